"""A task's network, loss and transforms, tried in a process with limited time and memory.

How much work an argument makes depends on MONAI (a number of blocks, a width, a number of cells, a
factor). So the network is built on the meta device, the loss takes two images, and one of the
task's size goes through each transform.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import psutil
import torch

from medflare.core.errors import ConfigError
from medflare.core.extensions import PACKAGES_VARIABLE, trusted
from medflare.core.text import format_shape
from medflare.data.transforms import Augmentation, Preprocessing
from medflare.networks.catalogue import builds_on_meta, meta_network
from medflare.networks.foreign import NetworkSpec, foreign_module, imported
from medflare.tasks.allowed_transforms import is_usual
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.losses import build_loss, example_batch

_SECONDS = 30  # of computing, for the network, one image and all transforms
_START = 600  # seconds in which a busy machine starts Python and imports MONAI
_SEEDS = (0, 0, 1)  # of the images that each transform makes
_REFUSED = 3  # exit status
_SMALLER = "make its arguments smaller"
# Not by -m, which imports from the working directory: a folder that somebody else may have filled.
_RUN = (
    "import sys; sys.path[:] = filter(None, sys.path); from medflare.data.trial import main; "
    "main(float(sys.argv[1]), int(sys.argv[2]))"
)
# Of a network that is built in seconds, whatever its arguments say.
_FEW = 32  # values of an argument
_DEEP = 64  # largest number: of blocks, of layers, ...
_WIDE = 2048  # largest width
_WIDTHS = frozenset(
    {"channels", "features", "hidden", "hidden_size", "mlp_dim", "width", "dimension"}
)


def try_task(task: TaskConfig, memory: float, location: str, setting: str = "") -> None:
    """Try the task's network, loss and transforms, unless no argument can make much work.

    Args:
        memory: GiB that they may take.
        setting: the setting that allows more memory; "" for none.

    Raises:
        ConfigError: the network, the loss or a transform fails, or takes more time or memory.
    """
    # What this process does not trust is refused here, not in the other process.
    usual = [is_usual(settings) for settings in (task.intensity, *task.augment)]
    quick = builds_quickly(task.network) and builds_quickly(task.loss)
    if quick and builds_on_meta(task) and all(usual):
        return
    if foreign_module(task.network):
        imported(task.network["name"])
    content = json.dumps(task.to_dict(), sort_keys=True)
    problem, remedy = _problem(content, ",".join(trusted()), memory, _SECONDS)
    if not problem:
        return
    if remedy and setting:
        remedy += f", or raise {setting} where it needs more than {memory:.3g} GiB"
    text = f"{location}: {problem} (tried on one image of {format_shape(task.size)})"
    raise ConfigError(f"{text}; {remedy}" if remedy else text)


def builds_quickly(spec: NetworkSpec) -> bool:
    """Whether no argument of {"name": ..., arguments} can make a network, or loss, slow to build.

    Examples:
        >>> builds_quickly({"name": "unet", "channels": [16, 32, 512], "num_res_units": 2})
        True
        >>> builds_quickly({"name": "DenseNet", "block_config": [200, 1, 1, 1]})
        False
    """
    arguments = {name: value for name, value in spec.items() if name not in ("name", "weights")}
    if foreign_module(spec):
        return not arguments
    return all(_is_small(name, tuple(_leaves(value))) for name, value in arguments.items())


def _is_small(argument: str, values: tuple[Any, ...]) -> bool:
    largest = _WIDE if argument in _WIDTHS else _DEEP
    numbers = [value for value in values if isinstance(value, int | float)]
    return len(values) <= _FEW and all(value <= largest for value in numbers)


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nested lists and mappings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


@cache
def _problem(task: str, packages: str, memory: float, seconds: int) -> tuple[str, str]:
    """The network, the loss or the transform that failed, and why, and what to do if it needs too
    much; "" for none.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",
        PACKAGES_VARIABLE: packages,
    }
    command = [sys.executable, "-u", "-c", _RUN, str(memory), str(seconds)]
    try:
        ended = subprocess.run(
            command,
            input=task,
            capture_output=True,
            text=True,
            env=environment,
            timeout=_START + seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"network and transforms: more than {_START + seconds} s", _SMALLER
    if ended.returncode == 0:
        return "", ""
    tried = (ended.stdout or "network and transforms").splitlines()[-1]
    if ended.returncode == -signal.SIGPROF:
        return f"{tried}: more than {seconds} s of computing", _SMALLER
    last_line = ended.stderr.strip().rpartition("\n")[2]
    if ended.returncode == _REFUSED and "memory" not in last_line:
        return last_line, ""
    return f"{tried}: exit status {ended.returncode}, {last_line:.200}", _SMALLER


def main(memory: float, seconds: int) -> None:
    """Try the task in the standard input; what is tried is printed before, since it may end this
    process.
    """
    try:
        _try(load_task(json.load(sys.stdin)), memory, seconds)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(_REFUSED)


def _try(task: TaskConfig, memory: float, seconds: int) -> None:
    import monai.networks.nets  # not part of the measured time
    import monai.transforms  # noqa: F401

    torch.set_num_threads(1)
    _limit(memory)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    sys.stdout.write(f"network {task.network['name']}\n")
    meta_network(task)
    sys.stdout.write(f"loss {task.loss['name']}\n")
    loss = build_loss(task)
    if not builds_quickly(task.loss):
        logits, targets = example_batch(task, task.size)
        loss(logits.requires_grad_(), targets).backward()
    shape = (task.image_channels, *task.size)
    image = np.random.RandomState(0).random_sample(shape).astype(np.float32)
    sys.stdout.write(f"intensity {task.intensity['name']}\n")
    Preprocessing(task).intensities(image)
    for settings in task.augment:
        sys.stdout.write(f"augment {settings['name']}\n")
        try:
            augmentation = Augmentation(replace(task, augment=({**settings, "prob": 1.0},)))
        except ConfigError:  # some have no such argument
            augmentation = Augmentation(replace(task, augment=(settings,)))
        images = torch.from_numpy(image)[None]
        targets = torch.zeros(1, *task.size, dtype=torch.long)
        draws = []
        for seed in _SEEDS:
            augmented, _ = augmentation(images, targets, np.random.RandomState(seed))
            draws.append(augmented)
        if not torch.allclose(draws[0], draws[1], rtol=0, atol=0, equal_nan=True):
            raise ConfigError(
                f"augment {settings['name']}: two equal generators give different images; "
                "draw random numbers from self.R"
            )


def _limit(memory: float) -> None:
    """Limit the address space, where the system can (not macOS and Windows)."""
    process = psutil.Process()
    if hasattr(process, "rlimit"):
        limit = process.memory_info().vms + int(memory * 2**30)
        _, hard = process.rlimit(psutil.RLIMIT_AS)
        if hard != psutil.RLIM_INFINITY:
            limit = min(limit, hard)
        process.rlimit(psutil.RLIMIT_AS, (limit, hard))
