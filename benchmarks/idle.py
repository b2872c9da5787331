"""What a round costs when nothing is trained, and what a task costs in a process of its own, under FLARE's simulator.

    python benchmarks/idle.py [--sites 4] [--rounds 20]

Wanted, on two cores: at most 0.5 s a round with a process per site and a model of 2 MB (FLARE's defaults: 2.5 s), with a process per
task at most 1.25 times what a task costs FLARE's simulator whose executor does nothing, and no more threads or memory after many rounds
than after a few.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from medflare.flare.jobs.building import build_job
from medflare.tasks.config import load_task

HERE = Path(__file__).resolve().parent
USAGE = "usage.jsonl"  # as idle_executor.py writes it
LARGER = {"name": "unet", "channels": [32, 64, 128], "norm": "instance"}  # about 2 MB


def simulated(job: Path, workspace: Path, sites: int, threads: int) -> list[dict[str, Any]]:
    """The steps of a simulation, as metrics.jsonl has them."""
    run(job, workspace, sites, threads)
    lines = (
        (workspace / "server" / "simulate_job" / "medflare" / "metrics.jsonl")
        .read_text()
        .splitlines()
    )
    return [json.loads(line) for line in lines]


def run(job: Path, workspace: Path, sites: int, threads: int) -> None:
    """FLARE's simulator, to its end."""
    command = [
        sys.executable,
        "-m",
        "nvflare.cli",
        "simulator",
        str(job),
        "-w",
        str(workspace),
        "-n",
        str(sites),
        "-t",
        str(threads),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parent / "custom"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    with open(workspace.with_suffix(".log"), "w") as log:
        subprocess.run(
            command,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=1200,
            check=False,
        )


def idle_rounds(
    folder: Path, sites: int, rounds: int
) -> tuple[list[float], dict[str, list[dict[str, float]]]]:
    """A federation whose sites send a model of about 2 MB straight back.

    Returns:
        Seconds of every round, and by site {"threads", "megabytes"} of its process in every round.
    """
    job = build_job(
        "fedavg",
        load_task({**load_task("phantom").to_dict(), "network": LARGER}),
        out=folder / "job",
        rounds=rounds,
    )
    (job / "app" / "custom" / "idle_executor.py").write_text(
        (HERE / "components" / "idle_executor.py").read_text()
    )
    file = job / "app" / "config" / "config_fed_client.json"
    config = json.loads(file.read_text())
    config["executors"][0]["executor"]["path"] = "idle_executor.IdleExecutor"
    file.write_text(json.dumps(config))
    place = folder / "workspace"
    seconds = [
        step["seconds"] for step in simulated(job, place, sites, sites) if step["phase"] == "train"
    ]
    usage = {
        file.parts[-3]: [json.loads(line) for line in file.read_text().splitlines()]
        for file in place.glob(f"*/simulate_job/{USAGE}")
    }
    return seconds, usage


def seconds_per_task(folder: Path, sites: int) -> float:
    """Of a task that trains nothing (it scores the validation images), each in a process of its own."""
    job = build_job("fedavg", "phantom", out=folder / "job-tasks", rounds=1)
    steps = simulated(job, folder / "workspace-tasks", sites, 1)
    return next(step["seconds"] for step in steps if step["phase"] == "validate") / sites


def seconds_per_noop(folder: Path, sites: int) -> float:
    """Of a task that does nothing at all, each in a process of its own: a round's seconds (the second round's) by its sites."""
    config = folder / "job-noop" / "app" / "config"
    custom = folder / "job-noop" / "app" / "custom"
    config.mkdir(parents=True)
    custom.mkdir()
    (custom / "noop.py").write_text((HERE / "components" / "noop.py").read_text())
    (folder / "job-noop" / "meta.json").write_text(
        json.dumps({"name": "noop", "min_clients": sites, "deploy_map": {"app": ["@ALL"]}})
    )
    empty: dict[str, Any] = {
        "format_version": 2,
        "components": [],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    workflow = {"id": "noop", "path": "noop.NoopController", "args": {}}
    server = {**empty, "workflows": [workflow], "server": {"task_request_interval": 0.1}}
    client = {
        **empty,
        "executors": [{"tasks": ["*"], "executor": {"path": "noop.NoopExecutor", "args": {}}}],
    }
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))
    run(folder / "job-noop", folder / "workspace-noop", sites, 1)
    seconds = json.loads(
        (folder / "workspace-noop" / "server" / "simulate_job" / "seconds.json").read_text()
    )
    return seconds[1] / sites


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        seconds, usage = idle_rounds(Path(scratch), options.sites, options.rounds)
        print(
            f"round without training, {options.sites} sites: mean {statistics.mean(seconds[1:]):.2f} s, max {max(seconds[1:]):.2f} s"
        )
        for site, rounds in sorted(usage.items()):
            for what in ("threads", "megabytes"):
                print(
                    f"  {site} {what}: {rounds[2][what]:.0f} in round 2, {rounds[-1][what]:.0f} in round {len(rounds) - 1}"
                )
        task = seconds_per_task(Path(scratch), 2)
        noop = seconds_per_noop(Path(scratch), 2)
        print(
            f"task in a process of its own: {task:.2f} s, one that does nothing: {noop:.2f} s, ratio {task / noop:.2f}"
        )


if __name__ == "__main__":
    main()
