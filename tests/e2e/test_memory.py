"""Many rounds: no process of the server or a site keeps growing, in memory or in threads. What rounds cost: benchmarks/idle.py."""

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from e2e.simulation import END_TO_END, Simulate
from medflare.flare.jobs.building import build_job

pytestmark = END_TO_END

ROUNDS = 24
POOLS = 5  # threads: FLARE's pools fill as they are needed, on busy cores later; one that is left behind in every round would make twenty
# bytes: FLARE remembers every stream for a minute, which shows in processes that hold next to nothing else.
SMALL = 12 << 20


def test_nothing_grows(simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path) -> None:
    """Of each process in the last third of the rounds, against the first: less than 5 % or 12 MB more memory, hardly more threads."""
    simulation = simulate(
        build_job("fedsm", tiny_task, rounds=ROUNDS, seed=1, out=tmp_path / "job"),
        "-n",
        "2",
        "-t",
        "2",
    )
    log = simulation.folder / "metrics.jsonl"
    # Process -> round -> (bytes, threads).
    usage: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    parent = psutil.Process(simulation.process.pid)
    while simulation.process.poll() is None:
        done = len(log.read_text().splitlines()) if log.exists() else 0
        for process in [parent, *parent.children(recursive=True)]:
            try:
                usage[process.pid][done].append((process.memory_info().rss, process.num_threads()))
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.2)
    assert simulation.results["status"] == "COMPLETED"
    third = ROUNDS // 3
    watched = 0
    for rounds in usage.values():
        first = [
            sample for done, samples in rounds.items() if 1 <= done <= third for sample in samples
        ]
        last = [
            sample
            for done, samples in rounds.items()
            if ROUNDS - third < done <= ROUNDS
            for sample in samples
        ]
        if first and last:  # a process that lived through the rounds
            watched += 1
            (before, threads), (after, more) = (
                map(statistics.mean, zip(*samples, strict=True)) for samples in (first, last)
            )
            assert after - before < max(0.05 * before, SMALL), (
                f"{before / 2**20:.1f} MB in the first third, {after / 2**20:.1f} last"
            )
            assert more <= threads + POOLS, (
                f"{threads:.1f} threads in the first third, {more:.1f} in the last"
            )
    assert watched >= 3, "the server and two sites"
