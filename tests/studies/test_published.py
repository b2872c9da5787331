"""The committed studies: each is one small packed file whose tables are those of its runs, and docs/results.md names it."""

import re
from pathlib import Path
from zipfile import ZipFile

import pytest

from medflare.studies.archive import STUDY_FILE, read_runs, read_study
from medflare.studies.tables.report import study_tables

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = sorted(path.parent for path in (DOCS / "results").glob(f"*/{STUDY_FILE}"))


def committed_tables(study: Path) -> dict[str, str]:
    """Title -> Markdown table of the packed `tables.md`."""
    with ZipFile(study / STUDY_FILE) as archive:
        page = archive.read("tables.md").decode()
    return dict(re.findall(r"^## (.+)\n\n((?:\|.*\n)+)", page, re.MULTILINE))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_committed_tables_are_those_of_the_committed_runs(study: Path) -> None:
    shown = committed_tables(study)
    assert shown and study_tables(read_study(study), shown) == shown


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_committed_studies_are_small_and_named(study: Path) -> None:
    assert (study / STUDY_FILE).stat().st_size < 30_000 * len(read_runs(study))
    assert f"](results/{study.name}/{STUDY_FILE})" in (DOCS / "results.md").read_text(encoding="utf-8")
