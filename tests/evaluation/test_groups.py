"""A metric by group of patients: values computed by hand, and no small group can be computed."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.pages import Page, faults
from helpers.fixture_types import Edit, SiteOf
from helpers.small_tasks import small_task
from medflare.evaluation.groups import GroupRow, group_rows, suppressed_groups
from medflare.evaluation.report import SiteReport, render_site_report
from medflare.federation.local.loop import run_local
from medflare.tasks.classes import Cases
from medflare.tasks.summaries import summarize

NAN = math.nan


def dice_of(*values: float) -> Cases:
    """Patients p0, p1, ... with these values of Dice."""
    names = tuple(f"p{number}" for number in range(len(values)))
    return Cases(names, {"dice": torch.tensor(values, dtype=torch.float64)})


def groups_of(letters: str) -> dict[str, str]:
    return {f"p{number}": letter for number, letter in enumerate(letters)}


def test_the_mean_over_the_patients_of_each_group() -> None:
    cases = dice_of(0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 0.9, 0.9, 0.9, 0.4, NAN)
    rows = group_rows(cases, groups_of("aaaaabbbbbb"), 0, small_task())
    a, b = rows
    assert (a.group, a.patients, b.group, b.patients) == ("a", 5, "b", 5), "one has no value"
    assert a.value == pytest.approx(0.3) and b.value == pytest.approx(0.8)
    assert a.interval is None, "five patients have no interval"
    (one,) = group_rows(cases, groups_of("ccccccccccc"), 0, small_task())
    assert one.interval is not None and one.value is not None
    assert one.interval[0] < one.value < one.interval[1]


def test_the_accuracy_over_the_images_of_each_group() -> None:
    """Patients p0 to p4 have two images, of which one is right; the others one right image."""
    names = tuple(f"p{number}" for number in [*range(10), *range(5)])
    right = [0.8, 0.1, 0.1]
    wrong = [0.1, 0.8, 0.1]
    probabilities = torch.tensor([right] * 10 + [wrong] * 5, dtype=torch.float64)
    cases = Cases(names, {}, probabilities, torch.zeros(15, dtype=torch.long))
    rows = group_rows(cases, groups_of("aaaaabbbbb"), 0, small_task("classification"))
    assert [(row.group, row.patients, row.value) for row in rows] == [("a", 5, 0.5), ("b", 5, 1.0)]


def test_a_small_group_and_the_next_larger_one_are_not_shown() -> None:
    cases = dice_of(*[0.5] * 19)
    rows = group_rows(cases, groups_of("aaaabbbbbbccccccccc"), 3, small_task())
    assert rows[:2] == [GroupRow("a", None), GroupRow("b", None)] and rows[2].patients == 9
    rows = group_rows(cases, groups_of("a" * 10 + "b" * 9), 10, small_task())
    assert rows == [GroupRow("a", None), GroupRow("b", None)], "minimum_patients of the site"
    rows = group_rows(cases, groups_of("a" * 10 + "b" * 9), 9, small_task())
    assert [row.patients for row in rows] == [10, 9]


def test_groups_without_any_value() -> None:
    task = small_task()
    assert group_rows(Cases(), {}, 0, task) == []
    (row,) = group_rows(dice_of(*[0.5] * 5, NAN), groups_of("aaaaab"), 0, task)
    assert row.group == "a" and row.patients == 5


@pytest.mark.parametrize("minimum", [5, 7])
def test_the_suppressed_patients_are_many_enough(minimum: int) -> None:
    """The sum of the suppressed groups is known: all patients without the shown groups."""
    for number in (1, 2, 3, 4):
        for sizes in itertools.product((1, 2, 4, 5, 6, 9), repeat=number):
            by_group = dict(zip("abcd", sizes, strict=False))
            suppressed = suppressed_groups(by_group, minimum)
            shown = by_group.keys() - suppressed
            for group in shown:
                assert by_group[group] >= minimum
            if suppressed and shown:
                assert len(suppressed) > 1
                assert sum(by_group[group] for group in suppressed) >= minimum
            if min(sizes) >= minimum:
                assert not suppressed


def test_a_site_report_has_a_table_for_each_attribute() -> None:
    task = small_task()
    deployed = summarize({"dice": 0.5}, dice_of(*[0.25] * 6, *[0.75] * 6, 0.5), task)
    ages = {f"p{number}": "20-39" if number < 6 else "under 20" for number in range(13)}
    groups = {"sex": groups_of("ffffffmmmmmmo"), "age": ages, "scanner": groups_of("<b>" * 5)}
    report = SiteReport(
        "fedsm",
        "A",
        "inside",
        task,
        {"train": 4, "validation": 2, "test": 13},
        {"deployed": deployed},
        pictures={},
        events=[],
        constant=None,
        of_training=[],
        groups=groups,
        minimum_patients=6,
    )
    html = render_site_report(report)
    page = Page(html)
    assert not faults(html)
    sex = next(table for table in page.tables if table[0][0] == "sex")
    assert sex[1:] == [
        ["f", "not shown", "too few"],
        ["m", "0.7500.750 to 0.750", "6"],
        ["o", "not shown", "too few"],
    ]
    age = next(table for table in page.tables if table[0][0] == "age")
    assert [row[0] for row in age[1:]] == ["under 20", "20-39"]
    assert "fewer than 6 patients is not shown" in page.text
    assert "By sex, age, scanner" in page.text and "sent to the server" in page.text


def test_groups_are_on_the_page_of_the_site_and_nowhere_else(
    make_site: SiteOf, edit: Edit, tmp_path: Path
) -> None:
    tested = [f"t{number}" for number in range(10)]
    folder = make_site({"training": ["a", "b", "c", "d"], "validation": ["e"], "test": tested})

    def add(content: dict[str, Any]) -> None:
        for number, entry in enumerate(content["test"]):
            sex = "female" if number < 5 else "male"
            entry.update({"sex": sex, "age": 47, "scanner": "Aera-1.5T"})

    edit(folder, add)
    out = tmp_path / "run"
    run_local("fedavg", small_task(), ["A"], rounds=1, seed=0, data_root=tmp_path, out=out)
    page = Page((out / "sites" / "A" / "report.html").read_text())
    sex = next(table for table in page.tables if table[0][0] == "sex")
    assert [(row[0], row[2]) for row in sex[1:]] == [("female", "5"), ("male", "5")]
    scores = json.loads((out / "sites" / "A" / "scores" / "deployed.json").read_text())
    values = scores["values"]["dice"]
    expected = sum(values[:5]) / 5
    assert float(sex[1][1][:5]) == pytest.approx(expected, abs=6e-4)
    for file in out.rglob("*"):
        if file.is_file() and file.parent.name != "A":
            content = file.read_bytes()
            assert b"Aera-1.5T" not in content and b"female" not in content, file
