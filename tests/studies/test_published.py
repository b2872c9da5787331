"""The committed studies: each is one small packed file whose tables are those of its runs, and docs/results.md names it."""

import re
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from medflare.studies import differences
from medflare.studies.paper_effects import PAPER_EFFECTS
from medflare.studies.report import notes
from medflare.studies.statistics import Comparison, compare_patients
from medflare.studies.study import STUDY_FILE, read_study
from medflare.studies.suites import load_suite
from medflare.studies.tables import StudyTables
from studies.published_claims import (
    CLAIMS,
    MECHANISMS,
    claim_lines,
    claims_tables,
    headlines_table,
    mechanisms_table,
)
from studies.published_prose import sentences

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = sorted(path.parent for path in (DOCS / "results").glob(f"*/{STUDY_FILE}"))
COMPARED: dict[tuple[object, ...], tuple[Comparison, object]] = {}


@cache
def study_tables(study: Path) -> StudyTables:
    return StudyTables(read_study(study))


@pytest.fixture(autouse=True)
def _compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and claims share their comparisons of patients, which take most of the time."""

    def compare(first: Any, second: Any, metric: str, **options: Any) -> Comparison:
        key = (id(first[0]), first[1], id(second[0]), second[1], metric, str(options))
        if key not in COMPARED:  # with the runs, so that no others get their ids
            COMPARED[key] = compare_patients(first, second, metric, **options), (first, second)
        return COMPARED[key][0]

    monkeypatch.setattr(differences, "compare_patients", compare)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_committed_tables_are_those_of_the_committed_runs(study: Path) -> None:
    with ZipFile(study / STUDY_FILE) as archive:
        page = archive.read("tables.md").decode()
    committed = dict(re.findall(r"^## (.+)\n\n((?:\|.*\n)+)", page, re.MULTILINE))  # title -> table
    shown = study_tables(study)
    texts = {title: str(shown.makers[title]()) for title in committed}
    assert committed and texts == committed
    if any("differences" in title for title in committed):
        assert [note for note in notes(shown) if f"- {note}\n" not in page] == []
    assert (study / STUDY_FILE).stat().st_size < 40_000 * sum(map(len, shown.groups.values()))
    assert f"](results/{study.name}/{STUDY_FILE})" in (DOCS / "results.md").read_text(
        encoding="utf-8"
    )


def test_the_claims_of_the_page_are_those_of_the_committed_runs() -> None:
    """On a change, paste the tables of the message into docs/results.md."""
    studies = {claim.study: study_tables(DOCS / "results" / claim.study) for claim in CLAIMS}
    lines = [line for claim in CLAIMS for line in claim_lines(claim, studies[claim.study])]
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    mechanisms = []
    for claim in MECHANISMS:
        mechanisms += claim_lines(claim, study_tables(DOCS / "results" / claim.study))
    for table in (headlines_table(lines), *claims_tables(lines), mechanisms_table(mechanisms)):
        assert table in page, table
    verdicts: dict[tuple[str, str], set[str]] = {}  # method and comparator -> in all studies
    for line in lines:
        key = line.row.partition(":")[0], line.comparator
        verdicts.setdefault(key, set()).add(line.verdict)
    assert "confirmed" in verdicts["prr", "FedBN"]
    for key in (("prr", "alone with PRR's loss"), ("grace", "FedAvg"), ("feddag", "FedAvg")):
        assert "confirmed" not in verdicts[key], "README.md says that it is not above"


@pytest.mark.parametrize(
    ("effect", "suite", "row", "comparator"),
    [
        (("fedsm", "dice", "inside"), "fedsm_table3", "FedSM", "FedAvg"),
        (("iop_fl", "dice", "inside"), "iop_table1_fundus", "IOP-FL", "FedAvg"),
        (("iop_fl", "dice", "outside"), "iop_table2_fundus", "IOP-FL", "FedAvg"),
        (("prr", "f1_macro", "inside"), "prr_table2", "Ours", "FedBN"),
        (("grace", "balanced_accuracy", "inside"), "grace_table1_isic", "GRACE", "FedAvg"),
        (("grace", "balanced_accuracy", "outside"), "grace_table2_isic", "GRACE", "FedAvg"),
        (("grace", "dice", "inside"), "grace_table1_prostate", "GRACE", "FedAvg"),
        (("grace", "dice", "outside"), "grace_table2_prostate", "GRACE", "FedAvg"),
    ],
)
def test_the_effects_of_the_papers_are_those_of_their_tables(
    effect: tuple[str, str, str], suite: str, row: str, comparator: str
) -> None:
    numbers = load_suite(suite).numbers
    first = numbers[row]["mean"]
    second = numbers[comparator]["mean"]
    scale = 100 if first > 1 else 1  # percent
    assert PAPER_EFFECTS[effect] == pytest.approx((first - second) / scale, abs=0.0015)


def test_the_numbers_in_sentences_are_those_of_the_committed_runs() -> None:
    """On a change, write the numbers of the message into the page."""
    for page, words in sentences(lambda name: study_tables(DOCS / "results" / name)):
        text = " ".join((DOCS.parent / page).read_text(encoding="utf-8").split())
        assert words in text, f"{page}: {words}"
