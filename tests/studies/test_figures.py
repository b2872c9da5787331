"""Figures of studies: each shows what the runs hold, and is left out where they hold nothing of it."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from medflare.cli import main
from medflare.studies.archive import write_run
from medflare.studies.figures import (
    learning_curves,
    routing_coefficients,
    study_figures,
)
from medflare.studies.statistics import Run

pytestmark = pytest.mark.figures


def text(svg: str | None) -> str:
    """The words in a figure, which must be whole XML."""
    assert svg is not None
    return "\n".join(part for part in ElementTree.fromstring(svg).itertext() if part.strip())


def told(run: Run, **reports: dict[str, Any]) -> Run:
    """The run with what deployed models report of themselves, site by site."""
    sites = {name: {**site, "reports": {"deployed": reports.get(name, {})}} for name, site in run["sites"].items()}
    return {**run, "sites": sites}


@pytest.fixture
def routing(runs: list[Run]) -> Run:
    return told(runs[0], X={"coefficients": {"body": [0.2, 0.3, 0.5], "head": [0.4, 0.3, 0.3]}})


def test_learning_curves_have_a_line_for_every_model(runs: list[Run]) -> None:
    curves = {"global": {"A": [[0, 0.1], [1, 0.5]]}, "personal": {"A": [[0, 0.1], [1, 0.6]]}}
    rising = {"fedsm": [{**runs[0], "curves": curves}], "fedavg": [{**runs[0], "curves": {"global": curves["global"]}}]}
    shown = text(learning_curves({**rising, "constant": rising["fedavg"]}, "dice"))
    assert "fedsm, global" in shown and "fedsm, personal" in shown and "\nfedavg\n" in f"\n{shown}\n"
    assert "validation Dice" in shown and "constant" not in shown
    assert learning_curves({"fedavg": runs}, "dice") is None


def test_routing_shows_its_coefficients_at_the_site_that_was_left_out(routing: Run, runs: list[Run]) -> None:
    shown = text(routing_coefficients({"iop_fl": [routing]})).splitlines()
    assert "X outside" in shown and shown.index("A") < shown.index("B") < shown.index("global")
    assert routing_coefficients({"fedavg": runs}) is None


def test_a_study_draws_what_it_can(routing: Run, tmp_path: Path) -> None:
    assert set(study_figures({"iop_fl": [routing]})) == {"routing"}
    write_run(tmp_path, "iop_fl/seed0", routing)
    assert main(["study", "--tables", str(tmp_path), "--figures", str(tmp_path / "drawn")]) == 0
    assert "currentColor" not in (tmp_path / "drawn" / "routing.svg").read_text()
