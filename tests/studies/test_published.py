"""Every table of docs/results.md that names a study's folder is what that folder's runs give."""

import re
from functools import cache
from pathlib import Path

import pytest

from medflare.studies.archive import read_study, run_folder, write_rows, write_run
from medflare.studies.statistics.seeds import Run
from medflare.studies.tables.report import study_tables

DOCS = Path(__file__).parents[2] / "docs"


def published(page: str) -> list[tuple[str, str, str]]:
    """(folder, title, table) of every table under a line `<!-- table FOLDER: TITLE -->`."""
    found = re.findall(r"^<!-- table (\S+): (.+) -->\n\n?((?:\|.*\n)*)", page, re.MULTILINE)
    return [(folder, title, table) for folder, title, table in found]


@cache
def tables(folder: Path) -> dict[str, str]:
    return study_tables(read_study(folder))


def wrong_tables(page: str, root: Path) -> list[str]:
    """The published tables that are not those of the committed runs, by folder and title."""
    return [f"{folder}: {title}" for folder, title, table in published(page) if tables(root / folder).get(title) != table]


def test_published_tables_are_those_of_the_committed_runs() -> None:
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    assert page.count("\n<!-- table") == len(published(page)), "a line that names a table is misspelt"
    assert wrong_tables(page, DOCS) == []


def test_a_table_with_another_number_is_found(runs: list[Run], tmp_path: Path) -> None:
    for run in runs:
        write_run(run_folder(tmp_path / "results" / "study", "fedavg", run["seed"]), run)
    write_rows(tmp_path / "results" / "study", ["fedsm"])
    right = tables(tmp_path / "results" / "study")["dice"]
    page = f"Some words.\n\n<!-- table results/study: dice -->\n\n{right}\nMore words.\n"
    assert "0.533" in right and wrong_tables(page, tmp_path) == []
    assert wrong_tables(page.replace("0.533", "0.534"), tmp_path) == ["results/study: dice"]
    assert wrong_tables(page.replace("dice -->", "mice -->"), tmp_path) == ["results/study: mice"]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("results/*")), ids=lambda path: path.name)
def test_committed_studies_are_small(page: Path) -> None:
    assert sum(file.stat().st_size for file in page.rglob("*")) < 4_000_000
