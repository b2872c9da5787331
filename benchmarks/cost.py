"""What a method costs beside FedAvg on the same network, measured in one run: time of a round, peak memory, bytes each way.

    python benchmarks/cost.py [--task phantom] [--sites 3] [--rounds 5] [--repeats 3]
    python benchmarks/cost.py --methods all --write        the column "cost" of `medflare methods`

Every run is a process of its own with one thread; methods take turns, so that a busy machine slows all of them alike. Time is
processor time of all steps but those of the first round, divided by the rounds; the ratio is that of the medians over repeats.
The first method, with which all others are compared, runs again after every eight of them.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

# Beside FedAvg; FedSM's without its selector.
LIMITS = {"fedsm": 2.2, "prr": 2.2, "grace": 3.0, "iop_fl": 1.1, "feddag": 5.0}
LIMITS |= {"fedprox": 1.15, "fednova": 1.15, "fedper": 1.15, "ditto": 2.1, "apfl": 2.1}
COSTS = Path(__file__).parents[1] / "custom" / "medflare" / "methods" / "costs.json"
# Networks with batch normalisation, which some methods need.
NORM = {"name": "unet", "norm": "batch"}
# A warm-up round is one of FedAvg; the selector of fedsm_extra is trained after all rounds.
HYPER: dict[str, dict[str, Any]] = {"feddag": {"warmup": 0}, "fedsm_extra": {"selector_rounds": 1}}


def measure(method: str, task: str, sites: int, rounds: int) -> dict[str, Any]:
    """One run in this process: seconds of processor time a round, bytes a round and site, peak memory."""
    import torch

    import medflare
    from medflare.tasks.config import load_task

    torch.set_num_threads(1)
    clock = [time.process_time()]
    seconds: dict[int, float] = {}  # round -> of all its steps

    def after_step(report: Any) -> None:
        clock.append(time.process_time())
        round = report.step.round
        seconds[round] = seconds.get(round, 0.0) + clock[-1] - clock[-2]

    settings = load_task(task).to_dict()
    if settings["network"]["name"] == "unet":
        settings["network"] = NORM
    results = medflare.run_local(
        method, settings, sites, rounds=rounds, seed=0, observe=after_step, **HYPER.get(method, {})
    )
    assert results["status"] == "COMPLETED", results["reason"]
    later = [seconds[round] for round in range(1, rounds) if round in seconds]
    return {
        "seconds": sum(later) / (rounds - 1),
        "down": results["traffic"]["down_bytes"] / rounds / sites,
        "up": results["traffic"]["up_bytes"] / rounds / sites,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="phantom")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default="fedavg,fedsm,prr,grace,iop_fl,feddag")
    parser.add_argument("--write", action="store_true", help="write the ratios to costs.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.task, options.sites, options.rounds)))
        return
    methods = options.methods.split(",")
    if methods == ["all"]:
        from medflare.methods.catalogue import method_names

        methods = ["fedavg", *(name for name in method_names() if name != "fedavg")]
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    reference, *others = methods
    turns = [reference]
    for place, method in enumerate(others):
        if place and place % 8 == 0:
            turns.append(reference)
        turns.append(method)
    for _ in range(options.repeats):
        for method in turns:
            command = [sys.executable, "-W", "ignore", __file__, "--one", method]
            command += [
                "--task",
                options.task,
                "--sites",
                str(options.sites),
                "--rounds",
                str(options.rounds),
            ]
            found[method].append(
                json.loads(
                    subprocess.run(
                        command, check=True, capture_output=True, text=True
                    ).stdout.splitlines()[-1]
                )
            )
            print(f"{method} measured", file=sys.stderr)
    print(table(found))
    if options.write:
        base = median(run["seconds"] for run in found["fedavg"])
        ratios = {}
        for method, runs in sorted(found.items()):
            ratios[method] = round(median(run["seconds"] for run in runs) / base, 2)
        COSTS.write_text(json.dumps(ratios, indent=2) + "\n", encoding="utf-8")


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: a row a method, ratios to the first one."""
    medians = {
        method: {key: median(run[key] for run in runs) for key in runs[0]}
        for method, runs in found.items()
    }
    base = next(iter(medians.values()))
    lines = [
        "| method | round, s | beside FedAvg | limit | peak memory, MiB | down, MiB | up, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, cost in medians.items():
        cells = [
            f"{cost['seconds']:.2f}",
            f"{cost['seconds'] / base['seconds']:.2f}",
            str(LIMITS.get(method, "")),
        ]
        cells += [
            f"{cost['memory'] / 2**20:.0f}",
            f"{cost['down'] / 2**20:.2f}",
            f"{cost['up'] / 2**20:.2f}",
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
