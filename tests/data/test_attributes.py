"""Sex, age and scanner: from tables to datalists, and from datalists to the groups of patients."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.downloaded_folders import picture, table
from helpers.fixture_types import Edit, SiteOf, TaskOf
from medflare.core.errors import DataError
from medflare.data.attributes import Attributes, groups_of_patients, parse_attributes
from medflare.data.datalist import read_datalist
from medflare.data.loading import load_site_data
from medflare.preparation.dataset_import.datalists import import_folder
from medflare.preparation.dataset_import.options import Columns, ImportOptions


@pytest.mark.parametrize(
    ("age", "years", "band"),
    [
        (0, 0, "under 20"),
        (19.9, 19.9, "under 20"),
        ("20", 20, "20-39"),
        ("39.5", 39.5, "20-39"),
        ("063Y", 63, "60-79"),
        ("018M", 1.5, "under 20"),
        ("90+", 90, "80 and over"),
        (">89", 89, "80 and over"),
        (80, 80, "80 and over"),
        (None, None, ""),
        ("unknown", None, ""),
    ],
)
def test_ages_and_their_bands(age: Any, years: float | None, band: str) -> None:
    attributes = parse_attributes(age=age)
    assert attributes.age == years
    assert attributes.groups["age"] == band


@pytest.mark.parametrize("age", ["old", "20-39", -1, 131, 22000])
def test_what_is_no_age_in_years(age: Any) -> None:
    with pytest.raises(ValueError, match="years from 0 to 130"):
        parse_attributes(age=age)


def test_words_for_the_sex() -> None:
    words = ["F", "female", "m", "Male", "O", "w", "1", "unknown", None]
    sexes = [parse_attributes(word).sex for word in words]
    assert sexes == ["female", "female", "male", "male", "other", "female", "1", "", ""]


def test_every_patient_is_in_one_group() -> None:
    images = [
        ("a", Attributes("female", 39.0, "X")),
        ("a", Attributes("female", 40.0, "")),
        ("b", Attributes("", 20.0, "Y")),
        ("c", Attributes()),
    ]
    groups = groups_of_patients(images)
    assert groups["sex"] == {"a": "female", "b": "not known", "c": "not known"}
    assert groups["age"] == {"a": "several", "b": "20-39", "c": "not known"}
    assert groups["scanner"] == {"a": "X", "b": "Y", "c": "not known"}
    assert groups_of_patients([("a", Attributes())]) == {}


def _imported(root: Path, header: tuple[str, ...], *rows: tuple[Any, ...], **options: Any) -> Any:
    """The report of an import, and the entries that the datalist has, in the table's order."""
    for number in range(len(rows)):
        picture(root / f"{number}.png", 60 + number)
    cells = [(f"{number}.png", "ab"[number % 2], *row) for number, row in enumerate(rows)]
    table(root / "t.csv", ("image", "label", *header), *cells)
    report = import_folder(root, ImportOptions(**options))
    entries = {entry.name: entry for entry in read_datalist(root, "classification")}
    return report, [entries[f"{number}.png"].attributes for number in range(len(rows))]


@pytest.mark.parametrize(
    ("sex", "age", "scanner"),
    [
        ("sex", "age", "scanner"),
        ("Patient Gender", "Patient Age", "Manufacturer"),
        ("gender", "age_approx", "camera"),
        ("Geschlecht", "Alter", "Microscope"),
        ("sex", "age_at_diagnosis", "device"),
    ],
)
def test_columns_of_a_table(sex: str, age: str, scanner: str, tmp_path: Path) -> None:
    rows = [("F", "63.0", "Aera"), ("M", "058Y", "Aera "), ("", "NA", "")] * 4
    report, attributes = _imported(tmp_path, (sex, age, scanner), *rows)
    first = Attributes("female", 63.0, "Aera"), Attributes("male", 58.0, "Aera"), Attributes()
    assert attributes == [*first] * 4
    layout = f"sex {sex}, age {age}, scanner {scanner}"
    assert layout in report.dataset.layout
    content = json.loads((tmp_path / "datalist.json").read_text())
    entries = [*content["training"], *content["validation"], *content["test"]]
    of_first = next(entry for entry in entries if entry["image"] == "0.png")
    of_third = next(entry for entry in entries if entry["image"] == "2.png")
    assert {**of_first, "age": 63} == of_first and type(of_first["age"]) is int
    assert of_third.keys() == {"image", "label"}


def test_ages_in_days_are_left_out_with_a_note(tmp_path: Path) -> None:
    rows = [("F", "22000"), ("M", "18000")] * 6
    report, attributes = _imported(tmp_path, ("sex", "age"), *rows)
    assert {one.age for one in attributes} == {None} and attributes[0].sex == "female"
    assert "t.csv: column age is not read as the age: age '22000'" in report.render()


def test_a_column_with_another_use_is_no_attribute(tmp_path: Path) -> None:
    rows = [("F",), ("M",)] * 6
    columns = Columns(label="sex")
    report, attributes = _imported(tmp_path, ("sex",), *rows, columns=columns)
    assert set(attributes) == {Attributes()}
    assert list(report.dataset.labels.values()) == ["F", "M"]


def test_sex_of_0_and_1_is_no_finding(tmp_path: Path) -> None:
    names = [picture(tmp_path / f"{number}.png", 60 + number).name for number in range(12)]
    cells = [(name, n % 2, n % 3 // 2, n % 2) for n, name in enumerate(names)]
    table(tmp_path / "t.csv", ("image", "oedema", "effusion", "sex"), *cells)
    with pytest.raises(DataError, match="which of oedema, effusion are labels"):
        import_folder(tmp_path)


def _add(attributes: dict[str, Any]) -> Any:
    def change(content: dict[str, Any]) -> None:
        for entry in content["test"]:
            entry.update(attributes)

    return change


def test_keys_of_a_datalist(make_site: SiteOf, make_task: TaskOf, edit: Edit) -> None:
    folder = make_site()
    assert load_site_data("A", make_task(), folder).test_groups == {}
    edit(folder, _add({"sex": "f", "age": 63.5, "scanner": None}))
    groups = load_site_data("A", make_task(), folder).test_groups
    women = {"p6": "female", "p7": "female"}
    assert groups == {"sex": women, "age": {"p6": "60-79", "p7": "60-79"}}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("age", "old", r"test\[0\]: age is no number of years"),
        ("age", [63], r"test\[0\].*age.*a number of years, or null"),
        ("sex", {"is": "f"}, r"test\[0\].*sex.*a text, or null"),
        ("scanner", True, r"test\[0\].*scanner.*a text, or null"),
    ],
)
def test_wrong_keys_of_a_datalist(
    key: str, value: Any, words: str, make_site: SiteOf, edit: Edit
) -> None:
    folder = make_site()
    edit(folder, _add({key: value}))
    with pytest.raises(DataError, match=words):
        read_datalist(folder, "segmentation")
