"""A long federation uses no more threads than a short one; the time that its rounds cost is measured by benchmarks/idle.py."""

import runpy
from pathlib import Path

import pytest

from e2e.simulation import END_TO_END, ROOT

pytestmark = END_TO_END


def test_threads_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    steps = runpy.run_path(str(ROOT / "benchmarks" / "idle.py"))["idle_rounds"](tmp_path, sites=2, rounds=20)
    threads = {site: [step["sites"][site]["threads"] for step in steps] for site in steps[0]["sites"]}
    assert len(steps) == 20
    assert all(counts[-1] <= counts[3] + 2 for counts in threads.values()), threads
