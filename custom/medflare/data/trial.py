"""One image of a task's size through each of its transforms, in a process of its own whose time and memory are limited.

What a transform costs follows from arguments that mean something else in each of MONAI's: a width, a number of cells, a factor. So they are
tried, and not read.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from medflare.core.errors import ConfigError, MedflareError, one_line
from medflare.core.packages import installed
from medflare.data.geometry import format_shape
from medflare.data.transforms import Augmentation, Preprocessing
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.transforms import is_usual

_SECONDS: Final = 30  # of computing, for one image and all transforms; training takes thousands of images
_START: Final = 600  # seconds in which a busy machine starts Python and imports MONAI
_DRAWS: Final = 3


def try_transforms(task: TaskConfig, memory: float, place: str, setting: str = "") -> None:
    """Nothing where an image passes; those transforms of which no argument makes much work are not tried.

    Args:
        task: gives transforms, channels and size.
        memory: GiB that all of them may take at most.
        place: the beginning of a message.
        setting: what allows more memory; "" where nothing does.

    Raises:
        ConfigError: one fails, or takes more time or memory.
    """
    if all(map(is_usual, (task.intensity, *task.augment))):
        return
    name, problem = _tried(json.dumps(task.to_dict(), sort_keys=True), memory, _SECONDS)
    if problem:
        remedy = "make its arguments smaller" + (f", or raise {setting} where it needs more than {memory:.3g} GiB" if setting else "")
        raise ConfigError(f"{place}: {name}: one image of {format_shape(task.size)} {problem}; {remedy}")


@cache
def _tried(task: str, memory: float, seconds: int) -> tuple[str, str]:
    """(transform that was tried last, what became of the image, "" where it passed)."""
    paths = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "medflare.data.trial", str(memory), str(seconds)]
    try:
        ended = subprocess.run(command, input=task, capture_output=True, text=True, env=environment, timeout=_START + seconds, check=False)
    except subprocess.TimeoutExpired:
        return "transforms", f"takes more than {_START + seconds} s"
    said = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    name, problem = said[-1] if said else ("transforms", "")
    if ended.returncode == -signal.SIGPROF:
        return name, f"takes more than {seconds} s of computing"
    if ended.returncode and not problem:
        last = [str(ended.returncode), *ended.stderr.split("\n")[:-1]][-1]
        return name, f"ends the process that tries it ({last:.200})"
    return name, problem


def main(memory: float, seconds: int) -> int:
    """Try the task that comes by standard input, saying each transform before it is tried.

    Args:
        memory: GiB that this process may take beyond what it has.
        seconds: of computing, after which it is ended.
    """
    task = load_task(json.load(sys.stdin))
    named = [("intensity", task.intensity), *(("augment", settings) for settings in task.augment)]
    import monai.transforms  # noqa: F401  # its import takes no part of the time

    torch.set_num_threads(1)
    _limit(memory)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    for kind, settings in named:
        name = f"{kind} {settings['name']}"
        _say(name, "")
        try:
            _pass(task, kind, settings)
        except MedflareError as error:
            _say(name, f"fails: {error}")
            return 1
        except Exception as error:
            _say(name, f"fails ({one_line(error)})")
            return 1
    return 0


def _say(name: str, problem: str) -> None:
    sys.stdout.write(json.dumps([name, problem]) + "\n")
    sys.stdout.flush()  # before the transform may end this process


def _pass(task: TaskConfig, kind: str, settings: Mapping[str, Any]) -> None:
    random = np.random.RandomState(0)
    image = random.random_sample((task.image_channels, *task.size)).astype(np.float32)
    if kind == "intensity":
        Preprocessing(task).intensities(image)
        return
    try:
        augmentation = Augmentation(replace(task, augment=({**settings, "prob": 1.0},)))
    except ConfigError:  # some have no such argument
        augmentation = Augmentation(replace(task, augment=(dict(settings),)))
    for _ in range(_DRAWS):
        augmentation(torch.from_numpy(image)[None], torch.zeros(1, *task.size, dtype=torch.long), random)


def _limit(memory: float) -> None:
    """Not where the system does not say what a process has (/proc), as on macOS and Windows."""
    usage = Path("/proc/self/statm")
    if not usage.exists():
        return
    import resource

    if installed("psutil"):
        import psutil

        memory = min(memory, psutil.virtual_memory().available / 2**30)
    taken = int(usage.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + int(memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])))
