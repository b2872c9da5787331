"""A long federation uses no more threads than a short one; the time that its rounds cost is measured by benchmarks/idle.py."""

import runpy
from pathlib import Path

import pytest

from e2e.simulation import END_TO_END, ROOT

pytestmark = END_TO_END


def test_threads_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seconds, usage = runpy.run_path(str(ROOT / "benchmarks" / "idle.py"))["idle_rounds"](tmp_path, sites=2, rounds=20)
    threads = {site: [line["threads"] for line in lines] for site, lines in usage.items()}
    assert len(seconds) == 20 and [len(counts) for counts in threads.values()] == [20, 20]
    assert all(counts[-1] <= counts[3] + 2 for counts in threads.values()), threads
