"""Every table of docs/results.md and the pages below is what the runs in a committed folder give; figures are there and small."""

import re
from pathlib import Path

import pytest

from medflare.studies.archive import STUDY_FILE, read_runs, read_study, write_rows, write_run
from medflare.studies.statistics import Run
from medflare.studies.tables.report import study_tables

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "results.md", *sorted((DOCS / "results").glob("*.md"))]
STUDIES = sorted(path.parent for path in (DOCS / "results").glob(f"*/{STUDY_FILE}"))


def published(page: str) -> list[tuple[str, str, str]]:
    """(folder, title, table) of every table under a line `<!-- table FOLDER: TITLE -->`."""
    found = re.findall(r"^<!-- table (\S+): (.+) -->\n\n?((?:\|.*\n)*)", page, re.MULTILINE)
    return [(folder, title, table) for folder, title, table in found]


def wrong_tables(page: str, root: Path) -> list[str]:
    """The published tables that are not those of the committed runs, by folder and title."""
    shown = published(page)
    made = {
        folder: study_tables(read_study(root / folder), {title for of, title, _ in shown if of == folder})
        for folder in sorted({folder for folder, _, _ in shown})
    }
    return [f"{folder}: {title}" for folder, title, table in shown if made[folder].get(title) != table]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_published_tables_are_those_of_the_committed_runs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("\n<!-- table") == len(published(text)), "a line that names a table is misspelt"
    assert wrong_tables(text, DOCS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_no_other_table_holds_numbers(page: Path) -> None:
    """What nobody could make again would stand there unchecked."""
    text = re.sub(r"^<!-- table .+ -->\n\n?(\|.*\n)*", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [line for line in text.splitlines() if line.startswith("|") and re.search(r"\d\.\d", line)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_figures_are_there_and_small(page: Path) -> None:
    figures = [page.parent / target for target in re.findall(r"!\[.*?\]\((.+?)\)", page.read_text(encoding="utf-8"))]
    assert [figure for figure in figures if not 0 < figure.stat().st_size < 60_000] == []


def test_a_table_with_another_number_is_found(runs: list[Run], tmp_path: Path) -> None:
    for run in runs:
        write_run(tmp_path / "results" / "study", f"fedavg/seed{run['seed']}", run)
    write_rows(tmp_path / "results" / "study", ["fedsm"])
    made = study_tables(read_study(tmp_path / "results" / "study"), {"dice"})
    assert made.keys() == {"dice"}, "no other was asked for"
    right = made["dice"]
    page = f"Some words.\n\n<!-- table results/study: dice -->\n\n{right}\nMore words.\n"
    assert "0.533" in right and wrong_tables(page, tmp_path) == []
    assert wrong_tables(page.replace("0.533", "0.534"), tmp_path) == ["results/study: dice"]
    assert wrong_tables(page.replace("dice -->", "mice -->"), tmp_path) == ["results/study: mice"]


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_committed_studies_are_small_and_shown(study: Path) -> None:
    assert (study / STUDY_FILE).stat().st_size < 30_000 * len(read_runs(study))
    assert any(f"<!-- table results/{study.name}:" in page.read_text(encoding="utf-8") for page in PAGES)
