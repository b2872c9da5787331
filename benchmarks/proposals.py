"""What `medflare task init` proposes, beside settings by hand, with the same processor time for each.

    python benchmarks/proposals.py DATA [--federations brain_lgg,mitosis] [--seconds 60] [--seeds 0,1,2] [--processes 2]

DATA has a folder for each federation, with a folder for each site. Every way trains FedAvg on one thread for as many rounds as fit into
the seconds of processor time, which two rounds before tell. Rules are chosen by the validation images, and reported by the test images:
both are the mean over the sites of the task's metric, for the round that the validation images chose.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, Final

import torch

from medflare.core.errors import MedflareError
from medflare.data.datalist import site_folders, site_name
from medflare.federation.local.loop import run_local
from medflare.preparation.learning_rate import usual_rate
from medflare.preparation.proposing import TaskHints, propose
from medflare.tasks.config import load_task

PROPOSED: Final = "proposed"
Settings = dict[str, Any]


# -- ways to train -----------------------------------------------------------------------------------------------------


def unet(width: int, levels: int = 4) -> Settings:
    return {
        "name": "unet",
        "channels": [width * 2**level for level in range(levels)],
        "norm": "instance",
    }


def dynunet(width: int, dims: int, levels: int = 4) -> Settings:
    strides = [[1] * dims] + [[2] * dims] * (levels - 1)
    kernels = [[3] * dims] * levels
    filters = [width * 2**level for level in range(levels)]
    return {
        "name": "DynUNet",
        "kernel_size": kernels,
        "strides": strides,
        "upsample_kernel_size": strides[1:],
        "filters": filters,
    }


def adam(rate: float) -> Settings:
    return {"name": "adam", "lr": rate}


def augmentation(settings: Settings, heavy: bool) -> list[Settings]:
    """The proposal's mirroring; with small rotations and scales, too, or with nnU-Net's transforms."""
    dims = settings.get("spatial_dims", 2)
    flips = [transform for transform in settings["augment"] if transform["name"] == "RandFlip"]
    if not heavy:
        return flips
    rotate = [0.2] * (1 if dims == 2 else 3)
    affine = {
        "name": "RandAffine",
        "prob": 0.5,
        "rotate_range": rotate,
        "scale_range": [0.1] * dims,
        "padding_mode": "border",
    }
    return [affine, *flips]


def segmentation_ways(proposed: Settings) -> dict[str, Settings]:
    """Way -> the settings that it changes."""
    dims = proposed.get("spatial_dims", 2)
    step = 8
    least = 16
    width = proposed["network"]["channels"][0]
    half = [max(least, side // 2 // step * step) for side in proposed["size"]]
    patches = {"image_mode": "patch", "size": half, "patches_per_image": 4 if dims == 2 else 2}
    return {
        PROPOSED: {},
        "mirroring alone": {"augment": augmentation(proposed, heavy=False)},
        "light augmentation": {"augment": augmentation(proposed, heavy=True)},
        "half the width": {"network": unet(width // 2)},
        "twice the width": {"network": unet(width * 2)},
        "four times the width": {"network": unet(width * 4)},
        "rate 0.003": {"optimizer": adam(0.003)},
        "Dice and cross entropy": {"loss": {"name": "dice_ce", "batch": True}},
        "half the size": {
            "image_mode": "resize",
            "size": half,
            "patches_per_image": 1,
            "spacing": None,
        },
        "patches of half the size": patches,
        "DynUNet, rate 0.003": {"network": dynunet(16, dims), "optimizer": adam(0.003)},
        "one local epoch": {"local_epochs": 1},
    }


def classification_ways(proposed: Settings) -> dict[str, Settings]:
    """Way -> the settings that it changes; networks without pretrained weights need no frozen body."""
    free: Settings = {"freeze": {"parts": [], "rounds": 0}}

    def network(name: str, rate: float, **arguments: Any) -> Settings:
        return {**free, "network": {"name": name, **arguments}, "optimizer": adam(rate)}

    return {
        PROPOSED: {},
        "frozen body, rate 0.001": {"freeze": ["body"], "optimizer": adam(0.001)},
        "frozen body, rate 0.01": {"freeze": ["body"], "optimizer": adam(0.01)},
        "fine-tuned, rate 0.0003": {**free, "optimizer": adam(0.0003)},
        "fine-tuned, rate 0.001": {**free, "optimizer": adam(0.001)},
        "small_cnn, rate 0.001": network("small_cnn", 0.001),
        "small_cnn, rate 0.003": network("small_cnn", 0.003),
        "vgg16_slim, rate 0.001": network("vgg16_slim", 0.001),
        "resnet18, rate 0.001": network("resnet18", 0.001, small_images=True),
        "images in their frequency": {"sampling": "shuffle"},
    }


def ways_of(proposed: Settings) -> dict[str, Settings]:
    return (segmentation_ways if proposed["kind"] == "segmentation" else classification_ways)(
        proposed
    )


# -- runs --------------------------------------------------------------------------------------------------------------


def train(
    root: Path, settings: Settings, seed: int, seconds: float, rounds: int | None
) -> Settings:
    """Train FedAvg and return its rounds and metrics; `rounds` None: two rounds tell how many fit into the seconds."""
    task = load_task(settings)
    sites = [site_name(folder) for folder in site_folders(root)]
    if rounds is None:
        ends: dict[int, float] = {}

        def observe(report: Any) -> None:
            ends[report.step.round] = time.process_time()

        run_local("fedavg", task, sites, rounds=2, seed=seed, data_root=root, observe=observe)
        rounds = max(1, int(seconds / (ends[1] - ends[0])))
    results = run_local("fedavg", task, sites, rounds=rounds, seed=seed, data_root=root)
    selection = results["model_selection"]["global"]
    chosen = next(
        entry for entry in selection["candidates"] if entry["round"] == selection["round"]
    )
    tests = [site["metrics"]["deployed"][task.metric] for site in results["sites"].values()]
    validation = mean(chosen["votes"].values())
    test = mean(value for value in tests if value is not None)
    return {"rounds": rounds, "chosen": selection["round"], "validation": validation, "test": test}


def run_one(job: Mapping[str, Any]) -> Iterator[Settings]:
    """The runs of one way on one federation, a seed after the other."""
    torch.set_num_threads(1)
    rounds = None
    for seed in job["seeds"]:
        described = {"federation": job["federation"], "way": job["way"], "seed": seed}
        try:
            line = train(Path(job["root"]), job["settings"], seed, job["seconds"], rounds)
        except (MedflareError, RuntimeError, ValueError) as error:
            yield described | {"problem": f"{type(error).__name__}: {error}"[:300]}
            return
        rounds = line["rounds"]
        yield described | line


def in_process(job: Mapping[str, Any], end: float) -> list[str]:
    """`run_one` in a process of its own, until the monotonic clock says `end`; its lines."""
    limit = max(1.0, end - time.monotonic())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", json.dumps(dict(job))]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=limit, check=False
        )
        output = ended.stdout
        error = ended.stderr.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode()
        error = "more time than the limit"
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return lines or [
        json.dumps({"federation": job["federation"], "way": job["way"], "problem": error})
    ]


def jobs_of(root: Path, seeds: Sequence[int], seconds: float) -> list[Settings]:
    """A job for every way of a federation."""
    proposed = propose(root, TaskHints()).settings
    jobs = []
    for way, changes in ways_of(proposed).items():
        settings = {
            name: value for name, value in (proposed | changes).items() if value is not None
        }
        if settings.get("image_mode", "resize") == "resize":
            settings.pop("patches_per_image", None)
        if "network" in changes and "optimizer" not in changes:
            settings["optimizer"] = {
                **settings["optimizer"],
                "lr": usual_rate(load_task(settings))[0],
            }
        job = {"federation": root.name, "root": str(root), "way": way, "settings": settings}
        jobs.append(job | {"seeds": list(seeds), "seconds": seconds})
    return jobs


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row for every way of a federation: mean over seeds, and the ratio to the way with the best validation."""
    rows = [
        "| federation | way | rounds | validation | test | test, proposal relative to this |",
        "|---|---|---|---|---|---|",
    ]
    for federation in dict.fromkeys(line["federation"] for line in lines):
        means: dict[str, tuple[float, float, float]] = {}
        for way in dict.fromkeys(line["way"] for line in lines if line["federation"] == federation):
            runs = [
                line
                for line in lines
                if (line["federation"], line["way"]) == (federation, way) and "test" in line
            ]
            if runs:
                means[way] = tuple(
                    mean(run[name] for run in runs) for name in ("rounds", "validation", "test")
                )
        best = max(means, key=lambda way: means[way][1], default="")
        for way, (rounds, validation, test) in means.items():
            ratio = f"{means[PROPOSED][2] / test:.2f}" if PROPOSED in means and test else "–"
            shown = f"**{way}**" if way == best else way
            rows.append(
                f"| {federation} | {shown} | {rounds:.0f} | {validation:.3f} | {test:.3f} | {ratio} |"
            )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--federations", help="names of folders, separated by commas; default: all")
    parser.add_argument("--ways", help="separated by semicolons; default: all")
    parser.add_argument("--seconds", type=float, default=60, help="processor time of a run")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=24 * 3600, help="seconds of all together")
    parser.add_argument(
        "--out", type=Path, help="file to which each run is appended as a line of JSON"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        for line in run_one(json.loads(options.one)):
            print(json.dumps(line), flush=True)
        return 0
    end = time.monotonic() + options.limit
    names = (
        options.federations.split(",")
        if options.federations
        else sorted(path.name for path in options.data.iterdir())
    )
    seeds = [int(seed) for seed in options.seeds.split(",")]
    lines: list[Settings] = []

    def run(job: Settings) -> None:
        for text in in_process(job, end):
            lines.append(json.loads(text))
            print(text, flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(text + "\n")

    with ThreadPoolExecutor(options.processes) as pool:
        pending = []
        for name in names:
            for job in jobs_of(options.data / name, seeds, options.seconds):
                if not options.ways or job["way"] in options.ways.split(";"):
                    pending.append(pool.submit(run, job))
        for done in pending:
            done.result()
    print(table(sorted(lines, key=lambda line: line["federation"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
