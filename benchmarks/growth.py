"""How cost grows with sites, with rounds and with the network, in the plain loop and in FLARE's simulator.

    python benchmarks/growth.py sites [--sites 4,8,16,32,64] [--engines loop,simulator]
    python benchmarks/growth.py rounds [--rounds 100]
    python benchmarks/growth.py parameters [--widths 40,80,160,320]
    python benchmarks/growth.py sites rounds parameters --figure growth.png

FedAvg on images of noise, 32 x 32, two of them to train on at every site: what is measured is what surrounds the training. Each run is
a process of its own with one thread a site. After every step it notes the processor time, memory, threads and written bytes of all its
processes, start and end not counted. On a machine that others use the same work takes more processor time than on a quiet one: the plain
loop therefore trains four sites by hand after every step, with nothing around it, and what counts is the ratio to them. The simulator,
which has a thread a site, keeps all cores busy; there the processor time stands alone.

Wanted: what a site costs in a round stays within 10 % of the smallest run's, whatever grows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from compare import environment, floor, processor_seconds
from components.usage import usage
from PIL import Image

if TYPE_CHECKING:
    from medflare.federation.outcome import StepReport

HERE = Path(__file__).resolve().parent
SIDE = 32
BESIDE = 4  # sites of the plain PyTorch loop that runs for a moment after every step
SPLITS = {"training": 2, "validation": 1, "test": 1}  # images of a site
TASK: dict[str, Any] = {
    "name": "growth",
    "kind": "segmentation",
    "target": "binary",
    "labels": ["square"],
    "channels": 3,
    "size": [SIDE, SIDE],
    "loss": {"name": "dice"},
    "optimizer": {"name": "adam", "lr": 0.001},
    "batch_size": 1,
    "local_epochs": 1,
    "metric": "dice",
}
COST = "processor ms a site and round"
Row = dict[str, Any]
# One for every step of a run: its phase, its round and what `usage` says after it.
Steps = list[dict[str, Any]]


def task_settings(width: int) -> dict[str, Any]:
    """The task, with a U-Net of four levels: 0.04 million parameters at a width of 8, 1.0 at 40, 66 at 320."""
    return {
        **TASK,
        "network": {
            "name": "unet",
            "channels": [width * 2**level for level in range(4)],
            "norm": "instance",
        },
    }


def names_of(sites: int) -> list[str]:
    return [f"site-{number + 1}" for number in range(sites)]


def make_sites(folder: Path, sites: int) -> None:
    """Noise and half a picture as its mask, another one at every site."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[SIDE // 2 :] = 1
    for number, name in enumerate(names_of(sites)):
        random = np.random.default_rng(number)
        listed: dict[str, list[dict[str, str]]] = {}
        (folder / name).mkdir(parents=True)
        Image.fromarray(mask).save(folder / name / "mask.png")
        for split, count in SPLITS.items():
            listed[split] = [
                {"image": f"{split}{place}.png", "label": "mask.png"} for place in range(count)
            ]
            for image in listed[split]:
                Image.fromarray(random.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(
                    folder / name / image["image"]
                )
        (folder / name / "datalist.json").write_text(json.dumps(listed))


# -- one run in this process -----------------------------------------------------------------------------------------------


def loop(scratch: Path, sites: int, rounds: int, width: int) -> Steps:
    """The plain loop, which keeps everything that a run keeps."""
    from medflare import run_local

    steps: Steps = []
    beside = bare(scratch, width)
    aside = 0.0

    def note(report: "StepReport") -> None:
        nonlocal aside
        steps.append({"phase": report.step.phase, "round": report.step.round, **usage()})
        steps[-1]["processor"] -= aside
        steps[-1]["bare"] = beside()
        aside += BESIDE * steps[-1]["bare"]

    task = task_settings(width)
    names = names_of(sites)
    data = scratch / "data"
    results = run_local(
        "fedavg",
        task,
        names,
        rounds=rounds,
        seed=0,
        data_root=data,
        out=scratch / "run",
        observe=note,
    )
    assert results["status"] == "COMPLETED", results["reason"]
    return steps


def simulator(scratch: Path, sites: int, rounds: int, width: int) -> Steps:
    """The same as a job of `nvflare simulator` with a thread a site."""
    from medflare.flare.jobs.building import build_job

    job = build_job("fedavg", task_settings(width), rounds=rounds, out=scratch / "job")
    for file in ("usage.py", "usage_widget.py"):
        (job / "app" / "custom" / file).write_text((HERE / "components" / file).read_text())
    config = job / "app" / "config" / "config_fed_server.json"
    server = json.loads(config.read_text())
    server["components"].append({"id": "usage", "path": "usage_widget.UsageWidget", "args": {}})
    config.write_text(json.dumps(server))
    command = [sys.executable, "-m", "nvflare.cli", "simulator", str(job), "-w", str(scratch / "w")]
    command += ["-c", ",".join(names_of(sites)), "-t", str(sites)]
    data = {"MEDFLARE_DATA_ROOT": str(scratch / "data")}
    said = scratch / "simulator.log"
    with said.open("w") as log:
        code = subprocess.run(
            command,
            env={**environment(), **data},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    place = scratch / "w" / "server" / "simulate_job"
    found = place / "medflare" / "results.json"
    if not found.exists():
        raise SystemExit(
            f"the simulator ended with exit code {code} and without results:\n{said.read_text()[-4000:]}"
        )
    results = json.loads(found.read_text())
    assert results["status"] == "COMPLETED", results["reason"]
    used, lines = (
        (place / file).read_text().splitlines()
        for file in ("usage.jsonl", "medflare/metrics.jsonl")
    )
    return [{**json.loads(line), **json.loads(use)} for line, use in zip(lines, used, strict=True)]


def bare(scratch: Path, width: int) -> Callable[[], float]:
    """What gives the processor seconds that a plain PyTorch loop of the same network on the same images takes for a site and round."""
    from medflare.tasks.config import load_task
    from medflare.training.opening import open_site

    sites = [
        open_site("site-1", load_task(task_settings(width)), data_root=scratch / "data")
    ] * BESIDE
    floor(sites, 1)
    return lambda: processor_seconds(lambda: floor(sites, 1)) / BESIDE


ENGINES = {"loop": loop, "simulator": simulator}


# -- runs beside each other ------------------------------------------------------------------------------------------------


def measured(engine: str, sites: int, rounds: int, width: int) -> Steps:
    """A run in a process of its own."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--one", engine]
    command += ["--sites", str(sites), "--rounds", str(rounds), "--widths", str(width)]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{engine}, {sites} sites, {rounds} rounds, width {width}: exit code {done.returncode}"
        )
    found: Steps = json.loads(done.stdout.splitlines()[-1])
    return found


def of_rounds(steps: Steps, sites: int, what: str) -> list[float]:
    """What a site adds to a count in each round of training but the first, in which everything is used for the first time."""
    return [(later[what] - earlier[what]) / sites for earlier, later in pairwise(trained(steps))]


def trained(steps: Steps) -> Steps:
    return [step for step in steps if step["phase"] == "train"]


def cost(steps: Steps, sites: int, rounds: slice = slice(None)) -> dict[str, float | None]:
    """Of a site and round: processor milliseconds, and how many times a bare loop's that is."""
    found = of_rounds(steps, sites, "processor")[rounds]
    bare = [
        (earlier["bare"] + later["bare"]) / 2
        for earlier, later in pairwise(trained(steps))
        if "bare" in later
    ][rounds]
    ratio = median(own / plain for own, plain in zip(found, bare, strict=True)) if bare else None
    return {COST: 1000 * median(found), "beside a bare loop": ratio}


def by_sites(engine: str, runs: Mapping[int, Steps]) -> list[Row]:
    """A row for each number of sites."""
    rows: list[Row] = []
    for sites, steps in runs.items():
        last = trained(steps)[-1]
        peak = max(step["megabytes"] for step in steps)
        further = (peak - rows[0]["peak MB"]) / (sites - rows[0]["sites"]) if rows else None
        threads = {"processes": last["processes"], "threads": last["threads"]}
        rows.append(
            {
                "engine": engine,
                "sites": sites,
                **cost(steps, sites),
                "peak MB": peak,
                "MB a further site": further,
                **threads,
            }
        )
    return rows


def by_rounds(engine: str, sites: int, steps: Steps) -> list[Row]:
    """A row for each tenth of the rounds."""
    tenth = len(trained(steps)) // 10
    written = of_rounds(steps, sites, "written")
    rows: list[Row] = []
    for begin in range(0, 10 * tenth, tenth):
        part = slice(begin, begin + tenth)
        end = trained(steps)[begin + tenth - 1]
        row: Row = {
            "engine": engine,
            "rounds": f"{begin + 1} to {begin + tenth}",
            **cost(steps, sites, part),
        }
        row |= {
            "written kB a site and round": median(written[part]) / 1000,
            "MB": end["megabytes"],
            "threads": end["threads"],
        }
        rows.append(row)
    return rows


def by_parameters(width: int, sites: int, steps: Steps) -> Row:
    millions = parameters(width) / 1e6
    peak = max(step["megabytes"] for step in steps)
    first = trained(steps)[0]["megabytes"]
    return {
        "million parameters": millions,
        **cost(steps, sites),
        "peak MB": peak,
        "MB more than after round 1": peak - first,
        "copies of the model a site": peak / (4 * millions) / sites,
    }


def parameters(width: int) -> int:
    from medflare.networks.segmenters import unet

    return sum(
        weight.numel()
        for weight in unet(3, 1, task_settings(width)["network"]["channels"]).parameters()
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    for row in rows:
        lines.append("| " + " | ".join(_shown(value) for value in row.values()) + " |")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def draw(file: Path, curves: Mapping[str, list[tuple[str, list[float], list[float]]]]) -> None:
    """A panel for each question.

    Args:
        file: PNG or SVG.
        curves: what grows -> (engine, its values, processor milliseconds of a site and round).
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(curves), 3.2), layout="constrained")
    for axes, (what, lines) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        for engine, across, up in lines:
            axes.plot(across, up, marker="o", label=engine)
        axes.set(
            xlabel={"parameters": "million parameters"}.get(what, what), ylabel=COST, ylim=(0, None)
        )
        axes.legend()
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(file)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def answered(
    options: argparse.Namespace, question: str, engine: str
) -> tuple[list[Row], list[float]]:
    """(the table, what grows along it)"""
    if question == "sites":
        rows = by_sites(
            engine,
            {sites: measured(engine, sites, options.few, 8) for sites in numbers(options.sites)},
        )
        return rows, [float(row["sites"]) for row in rows]
    if question == "rounds":
        rows = by_rounds(engine, 4, measured(engine, 4, options.rounds, 8))
        return rows, [float(row["rounds"].split()[-1]) for row in rows]
    rows = [
        by_parameters(width, 4, measured(engine, 4, options.few, width))
        for width in numbers(options.widths)
    ]
    return rows, [float(row["million parameters"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "questions",
        nargs="*",
        choices=["sites", "rounds", "parameters", []],
        metavar="sites|rounds|parameters",
    )
    parser.add_argument("--sites", default="4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=100, help="of the question 'rounds'")
    parser.add_argument(
        "--few", type=int, default=5, help="rounds of the other questions, at least three"
    )
    parser.add_argument("--widths", default="40,80,160,320")
    parser.add_argument(
        "--engines", default="loop", help="of the questions 'sites' and 'rounds': loop, simulator"
    )
    parser.add_argument("--figure", type=Path, help="draw what was found")
    parser.add_argument("--one", choices=list(ENGINES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            sites = int(options.sites)
            make_sites(scratch / "data", sites)
            print(
                json.dumps(
                    ENGINES[options.one](scratch, sites, options.rounds, int(options.widths))
                )
            )
        return
    curves: dict[str, list[tuple[str, list[float], list[float]]]] = {}
    for question in options.questions or ["sites"]:
        for engine in options.engines.split(",") if question != "parameters" else ["loop"]:
            rows, across = answered(options, question, engine)
            print(f"\n{table(rows)}", flush=True)
            curves.setdefault(question, []).append((engine, across, [row[COST] for row in rows]))
    if options.figure:
        draw(options.figure, curves)


if __name__ == "__main__":
    main()
