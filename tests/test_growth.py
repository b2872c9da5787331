"""What a site costs in a round does not grow with the rounds, by bytes and threads; seconds are left to benchmarks/growth.py."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/growth.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import growth

    return growth


def test_a_late_round_writes_hardly_more_than_an_early_one(growth: Any, tmp_path: Path) -> None:
    growth.make_sites(tmp_path / "data", 2)
    steps = growth.loop(tmp_path, sites=2, rounds=14, width=1)
    written = growth.of_rounds(steps, 2, "written")
    threads = {step["threads"] for step in steps}
    assert len(written) == 13 and len(threads) == 1
    more = (mean(written[-3:]) - mean(written[1:4])) / 9  # bytes a site, from one round to the next
    assert more < 400, "its votes and the history of the steps in the checkpoint, some 250"


def test_a_table_says_what_a_site_adds(growth: Any) -> None:
    def steps(sites: int) -> list[dict[str, Any]]:
        fixed = {"bare": 0.25, "megabytes": 100.0 + 2 * sites, "threads": 3, "processes": 1}
        used = [{"processor": 1.0 + sites * 0.5 * round, **fixed} for round in range(3)]
        return [{"phase": "train", **use} for use in used] + [{**used[-1], "phase": "validate"}]

    few, many = growth.by_sites("loop", {4: steps(4), 8: steps(8)})
    assert (
        few["processor ms a site and round"]
        == many["processor ms a site and round"]
        == pytest.approx(500)
    )
    assert few["beside a bare loop"] == pytest.approx(2.0) and many[
        "MB a further site"
    ] == pytest.approx(2.0)
    assert (
        growth.table([{"sites": 4, "MB": 0.5, "more": None}])
        == "| sites | MB | more |\n|---|---|---|\n| 4 | 0.50 |  |"
    )
