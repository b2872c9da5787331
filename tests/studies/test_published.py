"""The committed studies: each is one small packed file whose tables are those of its runs, and docs/results.md names it."""

import re
from pathlib import Path
from zipfile import ZipFile

import pytest

from medflare.studies.grid import STUDY_FILE, read_study
from medflare.studies.tables import StudyTables

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = sorted(path.parent for path in (DOCS / "results").glob(f"*/{STUDY_FILE}"))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_committed_tables_are_those_of_the_committed_runs(study: Path) -> None:
    with ZipFile(study / STUDY_FILE) as archive:
        page = archive.read("tables.md").decode()
    committed = dict(re.findall(r"^## (.+)\n\n((?:\|.*\n)+)", page, re.MULTILINE))  # title -> table
    groups = read_study(study)
    assert committed and StudyTables(groups).tables(committed) == committed
    assert (study / STUDY_FILE).stat().st_size < 30_000 * sum(map(len, groups.values()))
    assert f"](results/{study.name}/{STUDY_FILE})" in (DOCS / "results.md").read_text(encoding="utf-8")
