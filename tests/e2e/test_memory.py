"""Thirty rounds: no process of the server or a site keeps growing."""

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from e2e.simulation import END_TO_END, Simulate
from medflare.flare.jobs.building import build_job

pytestmark = END_TO_END

ROUNDS = 30
SMALL = 12 << 20  # bytes: FLARE remembers every stream for a minute, which shows in processes that hold next to nothing else


def test_memory_does_not_grow(simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path) -> None:
    """Mean resident memory of each process in the last third of the rounds, against the first third: less than 5 % or 12 MB more."""
    simulation = simulate(build_job("fedsm", tiny_task, rounds=ROUNDS, seed=1, out=tmp_path / "job"), "-n", "2", "-t", "2")
    log = simulation.folder / "metrics.jsonl"
    memory: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # process -> round -> bytes
    parent = psutil.Process(simulation.process.pid)
    while simulation.process.poll() is None:
        done = len(log.read_text().splitlines()) if log.exists() else 0
        for process in [parent, *parent.children(recursive=True)]:
            try:
                memory[process.pid][done].append(process.memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.2)
    assert simulation.results["status"] == "COMPLETED"
    third = ROUNDS // 3
    watched = 0
    for rounds in memory.values():
        first = [size for done, sizes in rounds.items() if 1 <= done <= third for size in sizes]
        last = [size for done, sizes in rounds.items() if ROUNDS - third < done <= ROUNDS for size in sizes]
        if first and last:  # a process that lived through the rounds
            watched += 1
            before, growth = statistics.mean(first), statistics.mean(last) - statistics.mean(first)
            assert growth < max(0.05 * before, SMALL), f"{growth / 2**20:.1f} MB more than {before / 2**20:.0f} in the last third"
    assert watched >= 3, "the server and two sites"
