"""The committed studies: each is one small packed file whose tables are those of its runs, and docs/results.md names it."""

import re
from pathlib import Path
from zipfile import ZipFile

import pytest

from medflare.studies.grid import STUDY_FILE, read_study
from medflare.studies.tables import StudyTables
from studies.published_claims import CLAIMS, claim_lines, claims_table, headlines_table

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = sorted(path.parent for path in (DOCS / "results").glob(f"*/{STUDY_FILE}"))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_committed_tables_are_those_of_the_committed_runs(study: Path) -> None:
    with ZipFile(study / STUDY_FILE) as archive:
        page = archive.read("tables.md").decode()
    committed = dict(re.findall(r"^## (.+)\n\n((?:\|.*\n)+)", page, re.MULTILINE))  # title -> table
    groups = read_study(study)
    tables = StudyTables(groups)
    assert committed and tables.tables(committed) == committed
    if any("differences" in title for title in committed):
        assert [note for note in tables.notes() if f"- {note}\n" not in page] == []
    assert (study / STUDY_FILE).stat().st_size < 30_000 * sum(map(len, groups.values()))
    assert f"](results/{study.name}/{STUDY_FILE})" in (DOCS / "results.md").read_text(
        encoding="utf-8"
    )


def test_the_claims_of_the_page_are_those_of_the_committed_runs() -> None:
    """On a change, paste the tables of the message into docs/results.md."""
    studies = {
        claim.study: StudyTables(read_study(DOCS / "results" / claim.study)) for claim in CLAIMS
    }
    lines = [line for claim in CLAIMS for line in claim_lines(claim, studies[claim.study])]
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    for table in (headlines_table(lines), claims_table(lines)):
        assert table in page, table
