"""A site with more images than memory, beside one that holds them all.

    python benchmarks/memory.py --gb 8 --limit 2

Writes synthetic pictures with masks that take so many gigabytes when decoded, and runs one round of FedAvg on them (enrolment, training,
validation, delivery) in a process whose address space is limited to `--limit` gigabytes above what it has after its imports. Then two
processes, one with all images in memory and one with all of them on disk, read and train in turns; what counts is the ratio of their
images/s, the median over the turns, and beside it that of images per second of processor time, which others on the machine disturb less.
Everything is made in a temporary folder (TMPDIR), which takes about 1.2 times `--gb`, and removed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
SIDE = 128
GB = 10**9
SITE = "site-1"
BYTES = SIDE * SIDE * (3 * 4 + 8)  # of an image and its mask in memory
BATCHES = 5  # of 16 images, in every measurement: short ones, so that two that follow each other meet the same machine
TASK: dict[str, Any] = {
    "name": "memory",
    "kind": "segmentation",
    "target": "binary",
    "labels": ["square"],
    "channels": 3,
    "size": [SIDE, SIDE],
    "network": {"name": "unet", "channels": [8, 16], "norm": "instance"},
    "loss": {"name": "dice"},
    "optimizer": {"name": "adam", "lr": 0.001},
    "batch_size": 16,
    "local_epochs": 1,
    "metric": "dice",
}


def make_site(folder: Path, count: int) -> None:
    """So many noisy pictures with a bright square, as uncompressed TIFF: their decoding is not what is measured."""
    (folder / "images").mkdir(parents=True)
    random = np.random.default_rng(0)
    listed: dict[str, list[dict[str, str]]] = {"training": [], "validation": [], "test": []}
    for number in range(count):
        picture = random.integers(0, 120, (SIDE, SIDE, 3), dtype=np.uint8)
        mask = np.zeros((SIDE, SIDE), np.uint8)
        row, column = random.integers(0, SIDE - 40, 2)
        mask[row : row + 40, column : column + 40] = 1
        picture[mask > 0] += 100
        Image.fromarray(picture).save(folder / f"images/{number}.tif")
        Image.fromarray(mask).save(folder / f"images/{number}_mask.png")
        split = {8: "validation", 9: "test"}.get(number % 10, "training")
        listed[split].append(
            {"image": f"images/{number}.tif", "label": f"images/{number}_mask.png"}
        )
    (folder / "datalist.json").write_text(json.dumps(listed))


def opened(folder: Path, memory_gb: float) -> Any:
    from medflare.tasks.config import load_task
    from medflare.training.opening import open_site

    cache = {"folder": str(folder.parent / "cache"), "limit_gb": 1000, "memory_gb": memory_gb}
    return open_site(SITE, load_task(TASK), data_root=folder, local={"cache": cache})


def one_round(folder: Path) -> None:
    from medflare import run_local

    results = run_local(
        "fedavg", TASK, [SITE], rounds=1, seed=0, opener=lambda name, role: opened(folder, 0)
    )
    assert results["status"] == "COMPLETED", results["reason"]


def limited(scratch: Path, limit: float) -> None:
    """One round in so many gigabytes more than the process has after it has run a small site, and thus imported everything."""
    one_round(scratch / "small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (space + int(limit * GB),) * 2)
    started = time.monotonic()
    one_round(scratch / "large")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": time.monotonic() - started, "gb": (peak - before) / GB}))


def measured(folder: Path, memory_gb: float) -> None:
    """Images/s of reading alone and of training, a line for every word that comes in."""
    site = opened(folder, memory_gb)
    model = site.network()
    optimizer = site.optimizer(model.parameters())
    print("ready", flush=True)
    for epoch, what in enumerate(sys.stdin):
        started = time.monotonic()
        used = time.process_time()
        images = 0
        for number, batch in enumerate(site.batches("train", 0, "model", epoch)):
            if number == BATCHES:
                break
            images += len(batch.images)
            if what.strip() == "train":
                optimizer.zero_grad(set_to_none=True)
                site.loss(model(batch.images), batch.targets).backward()
                optimizer.step()
        print(
            json.dumps(
                [images / (time.monotonic() - started), images / (time.process_time() - used)]
            ),
            flush=True,
        )


def started(*arguments: str) -> subprocess.Popen[str]:
    paths = [str(HERE.parent / "custom"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str], word: str = "") -> str:
    assert process.stdin is not None and process.stdout is not None
    if word:
        print(word, file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a measurement ended early, exit code {process.wait()}")
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1, help="decoded images, gigabytes")
    parser.add_argument("--limit", type=float, default=0.5, help="gigabytes above the imports")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each process")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, folder = options.one
        if what == "limited":
            limited(Path(folder), options.limit)
        else:
            measured(Path(folder), 0 if what == "disk" else 1000)
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        count = int(options.gb * GB / BYTES)
        make_site(scratch / "small", 30)
        make_site(scratch / "large", count)
        process = started("--one", "limited", name, "--limit", str(options.limit))
        alone = json.loads(answer(process))
        process.communicate()
        cost = f"{alone['seconds']:.0f} s, {alone['gb']:.2f} GB above the imports at most"
        print(f"{count} images, {options.gb:g} GB: a round in {cost}", flush=True)
        kinds = {
            kind: started("--one", kind, str(scratch / "large")) for kind in ("memory", "disk")
        }
        for process in kinds.values():
            answer(process)
        print(
            "| | images/s in memory | images/s on disk | ratio | by processor time |\n|---|---|---|---|---|"
        )
        for what in ("read", "train"):
            found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
            for _ in range(options.repeats + 1):
                for kind, process in kinds.items():
                    found[kind].append(json.loads(answer(process, what)))
            turns = list(zip(found["memory"], found["disk"], strict=True))[1:]  # the first warms up
            memory, disk = (median(turn[place][0] for turn in turns) for place in (0, 1))
            wall, processor = (
                median(turn[1][clock] / turn[0][clock] for turn in turns) for clock in (0, 1)
            )
            print(
                f"| {what} | {memory:.0f} | {disk:.0f} | {wall:.2f} | {processor:.2f} |", flush=True
            )
        for process in kinds.values():
            process.communicate()


if __name__ == "__main__":
    main()
