"""Tables of hospitals and public data sets: the columns, the lines in messages, the images of a row."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.downloaded_folders import classes, mask, picture, table
from helpers.volume_sites import change, dicom_series, write
from medflare.core import packages
from medflare.core.errors import DataError
from medflare.preparation.dataset_import.datalists import import_folder
from medflare.preparation.dataset_import.frames import read_frame
from medflare.preparation.dataset_import.options import Columns, ImportOptions


def pictures(root: Path, count: int = 12, name: str = "{n}.png") -> list[str]:
    """The names of so many pictures."""
    names = [name.format(n=number) for number in range(count)]
    for number, file in enumerate(names):
        picture(root / file, 60 + 9 * number)
    return names


def labels_of(root: Path, **options: Any) -> dict[str, Any]:
    """Image -> its class, or its findings, as imported."""
    import_folder(root, ImportOptions(force=True, **options))
    content = json.loads((root / "datalist.json").read_text())
    labels = {}
    for split in ("training", "validation", "test"):
        for entry in content[split]:
            label = entry["label"]
            if isinstance(label, list):
                positive = [number for number, value in enumerate(label) if value]
                labels[entry["image"]] = [content["labels"][str(number)] for number in positive]
            else:
                labels[entry["image"]] = content["labels"][str(label)]
    return labels


def error_of(root: Path, **options: Any) -> str:
    """The error of one line, after which nothing was written."""
    with pytest.raises(DataError) as error:
        import_folder(root, ImportOptions(**options))
    assert not [*root.rglob("datalist.json")] and "\n" not in str(error.value)
    return str(error.value)


# -- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_the_separator_is_that_of_most_rows(separator: str, tmp_path: Path) -> None:
    rows = [(name, str(number % 3)) for number, name in enumerate(pictures(tmp_path))]
    header = ("image", "grade (0, 1, 2)")
    lines = [separator.join(row) for row in (header, *rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert "grade (0, 1, 2)" in error_of(tmp_path)
    assert labels_of(tmp_path, columns=Columns(label="grade (0, 1, 2)")) == dict(rows)


@pytest.mark.parametrize(
    ("above", "wrong", "line"),
    [
        ("sep=;\nimage;label\n", "lost.png;a", 9),
        ("image,label\n\n\n", "lost.png,a", 10),
        ('image,label,note\nx.png,a,"two\nlines"\n', "lost.png,a,", 10),
    ],
)
def test_messages_name_the_line_of_the_file(
    above: str, wrong: str, line: int, tmp_path: Path
) -> None:
    mark = ";" if "sep" in above else ","
    names = pictures(tmp_path, 6)
    picture(tmp_path / "x.png")
    rows = [f"{name}{mark}{'ab'[number % 2]}" for number, name in enumerate(names)]
    (tmp_path / "t.csv").write_text(above + "\n".join([*rows, wrong]))
    assert f"t.csv line {line}: no file for 'lost.png'" in error_of(tmp_path)


def test_lines_above_the_header_and_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    rows = [f"{name},{'ab'[number % 2]},c" for number, name in enumerate(pictures(tmp_path))]
    for header, words in (
        ("Export of 2024\nimage,label,note", "lines above"),
        ("image,diagnosis,diagnosis", "two columns are called 'diagnosis'"),
    ):
        (tmp_path / "t.csv").write_text("\n".join([header, *rows]))
        assert words in error_of(tmp_path)
    # Excel's columns and rows without a name or a value are none.
    text = "\n".join(["image,label,,", *(f"{row}," for row in rows), ",,,", ",,,"])
    (tmp_path / "t.csv").write_text(text.replace(",c,", ",,"))
    assert len(read_frame(tmp_path / "t.csv")) == 12


def test_an_empty_table_beside_the_images_is_no_table(tmp_path: Path) -> None:
    classes(tmp_path)
    (tmp_path / "list.csv").touch()
    (tmp_path / "notes.csv").write_text("\n\n")
    report = import_folder(tmp_path)
    assert any("empty: list.csv, notes.csv" in note for note in report.dataset.notes)


def test_a_table_of_excel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are floats there, formatted cells may be empty, and a sheet may be, too."""
    openpyxl = pytest.importorskip("openpyxl")
    workbook = openpyxl.Workbook()
    sheet = workbook.active
    sheet.append(["image", "grade", "patient"])
    names = pictures(tmp_path)
    for number, name in enumerate(names):
        sheet.append([name, float(number % 3), number // 2])
    workbook.create_sheet("notes")
    workbook.save(tmp_path / "grades.xlsx")
    assert labels_of(tmp_path) == {name: str(number % 3) for number, name in enumerate(names)}
    (tmp_path / "datalist.json").unlink()
    (tmp_path / "~$grades.xlsx").write_bytes(b"open somewhere")
    workbook["notes"].append(["anything"])
    workbook.save(tmp_path / "grades.xlsx")
    assert "2 visible sheets with cells (Sheet, notes)" in error_of(
        tmp_path, table=tmp_path / "grades.xlsx"
    )
    workbook["notes"].sheet_state = "hidden"
    workbook.save(tmp_path / "grades.xlsx")
    assert len(read_frame(tmp_path / "grades.xlsx")) == 12
    monkeypatch.setattr(packages, "installed", lambda module: False)
    assert "pip install openpyxl" in error_of(tmp_path)
    monkeypatch.undo()
    damaged = bytearray((tmp_path / "grades.xlsx").read_bytes())
    damaged[300:900] = bytes(600)
    (tmp_path / "grades.xlsx").write_bytes(damaged)
    assert "cannot be read as a table" in error_of(tmp_path, table=tmp_path / "grades.xlsx")


def test_rows_that_a_filter_hides_are_not_read_silently(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    workbook = openpyxl.Workbook()
    workbook.active.append(["image", "grade"])
    names = pictures(tmp_path)
    for number, name in enumerate(names):
        workbook.active.append([name, "ab"[number % 2]])
    workbook.active.row_dimensions[99].hidden = True  # an empty one
    choices = workbook.create_sheet("choices")
    choices.append(["a"])
    choices.row_dimensions[1].hidden = True
    choices.sheet_state = "hidden"
    workbook.active.column_dimensions["B"].hidden = True
    workbook.save(tmp_path / "grades.xlsx")
    assert len(labels_of(tmp_path)) == len(names)
    (tmp_path / "datalist.json").unlink()
    workbook.active.row_dimensions[4].hidden = True
    workbook.save(tmp_path / "grades.xlsx")
    assert "rows are hidden, as a filter does; show them, or delete them" in error_of(tmp_path)
    workbook.active.delete_rows(4)
    workbook.active.row_dimensions[4].hidden = False
    workbook.save(tmp_path / "grades.xlsx")
    assert {*labels_of(tmp_path)} == {*names} - {names[2]}


def test_titles_above_the_names_of_columns(tmp_path: Path) -> None:
    rows = [f"{name};{'ab'[number % 2]};" for number, name in enumerate(pictures(tmp_path))]
    above = ["Export;2024-03-01;", "Study: skin;;"]
    (tmp_path / "t.csv").write_text("\n".join([*above, "file;label;", *rows]))
    remedy = "if line 3 has the names of the columns (file, label), take out what is above"
    assert error_of(tmp_path).endswith(remedy)


def test_formulas_that_nobody_has_computed(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    workbook = openpyxl.Workbook()
    workbook.active.append(["image", "label", "note"])
    for line, name in enumerate(pictures(tmp_path), start=2):
        workbook.active.append([name, f'=IF(MOD({line},2),"a","b")'])
    workbook.save(tmp_path / "t.xlsx")
    assert "cell B2 is a formula without a value; open the file in Excel" in error_of(tmp_path)


def test_a_sheet_that_is_too_wide_or_too_large_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes can name cells of millions of rows and columns."""
    openpyxl = pytest.importorskip("openpyxl")
    workbook = openpyxl.Workbook()
    workbook.active.append(["image", "grade"])
    for name in pictures(tmp_path):
        workbook.active.append([name, 1])
    table = tmp_path / "grades.xlsx"
    workbook.save(table)
    monkeypatch.setattr("medflare.core.files._MOST_UNPACKED", 100)
    assert "more than 0 MB" in error_of(tmp_path, table=table)
    workbook.active["XFD2"] = 1
    workbook.save(table)
    monkeypatch.undo()
    assert "16384 columns, more than 2000" in error_of(tmp_path, table=table)


# -- columns -------------------------------------------------------------------------------------


def test_two_columns_that_can_be_the_label_are_asked_about(tmp_path: Path) -> None:
    """As ISIC 2020, beside its sample of a submission."""
    names = pictures(tmp_path)
    rows = [
        (name, ("nevus", "unknown", "melanoma")[n % 3], int(n % 3 == 2))
        for n, name in enumerate(names)
    ]
    table(tmp_path / "train.csv", ("image_name", "diagnosis", "target"), *rows)
    assert "diagnosis and target can both be the label" in error_of(tmp_path)
    table(tmp_path / "sample.csv", ("image_name", "target"), *((name, 0) for name in names[:4]))
    assert "diagnosis and target" in error_of(tmp_path), "the other table is no way out"
    (tmp_path / "sample.csv").unlink()
    expected = {name: str(target) for name, _, target in rows}
    assert labels_of(tmp_path, columns=Columns(label="target")) == expected
    coded = [(name, n % 3, "abc"[n % 3]) for n, name in enumerate(names)]
    table(tmp_path / "train.csv", ("image_name", "label", "category"), *coded)
    assert labels_of(tmp_path) == {name: str(number) for name, number, _ in coded}


@pytest.mark.parametrize("endings", [("quality_grade", "dr_grade"), ("T-stage", "N-stage")])
def test_two_columns_that_end_like_a_label(endings: Sequence[str], tmp_path: Path) -> None:
    rows = [(name, n % 2, n % 3) for n, name in enumerate(pictures(tmp_path))]
    table(tmp_path / "t.csv", ("image", *endings), *rows)
    assert f"{endings[0]} and {endings[1]} can both be the label" in error_of(tmp_path)


def test_the_usual_column_that_names_files_is_the_image(tmp_path: Path) -> None:
    names = pictures(tmp_path, name="scan_{n}.png")
    rows = [(1000 + n, name, "ab"[n % 2]) for n, name in enumerate(names)]
    table(tmp_path / "t.csv", ("image_id", "file_name", "label"), *rows)
    assert labels_of(tmp_path) == {name: label for _, name, label in rows}


def test_a_table_with_masks_has_labels_on_request(tmp_path: Path) -> None:
    rows = [(name, f"gt/{name}", "ab"[n % 2]) for n, name in enumerate(pictures(tmp_path))]
    for _, file, _ in rows:
        mask(tmp_path / file)
    table(tmp_path / "t.csv", ("image", "mask", "diagnosis"), *rows)
    assert labels_of(tmp_path, kind="classification") == {name: label for name, _, label in rows}


@pytest.mark.parametrize(
    ("case", "patient"),
    [("Fallnummer", "Pseudonym"), ("case", "mrn_hash"), ("lesion_id", "Patienten-Nr")],
)
def test_a_case_is_no_patient_beside_one(case: str, patient: str, tmp_path: Path) -> None:
    names = pictures(tmp_path)
    rows = [(name, 9000 + n, f"p{n // 2}", "ab"[n // 2 % 2]) for n, name in enumerate(names)]
    table(tmp_path / "t.csv", ("image", case, patient, "label"), *rows)
    assert f"patient {patient}" in import_folder(tmp_path).dataset.layout
    table(tmp_path / "t.csv", ("image", case, "label"), *((*row[:2], row[3]) for row in rows))
    assert f"patient {case}" in import_folder(tmp_path, ImportOptions(force=True)).dataset.layout


def test_findings_with_other_values_than_0_and_1(tmp_path: Path) -> None:
    """As CheXpert: the columns of valid.csv are 0 or 1, those of train.csv are not."""
    for split, values in (("train", ("1.0", "-1.0", "0.0")), ("valid", ("1.0", "0.0", "1.0"))):
        names = pictures(tmp_path, name=f"{split}/{{n}}.png")
        rows = [(name, values[n % 3], values[(n + 1) % 3]) for n, name in enumerate(names)]
        table(tmp_path / f"{split}.csv", ("Path", "Edema", "Mass"), *rows)
    assert "train.csv: Edema, Mass, ... have empty cells, -1 or words beside 0 and 1" in error_of(
        tmp_path
    )
    text = error_of(tmp_path, columns=Columns(label="Edema,Mass"))
    assert "'-1.0' in column Edema" in text and "hold 0 or 1 each" in text


@pytest.mark.parametrize("cells", [("1,0", "0,0"), ("TRUE", "FALSE"), ("WAHR", "falsch")])
def test_findings_as_excel_writes_them(cells: tuple[str, str], tmp_path: Path) -> None:
    names = pictures(tmp_path)
    lines = [f"{name};{cells[n % 2]};{cells[n % 3 > 0]}" for n, name in enumerate(names)]
    (tmp_path / "t.csv").write_text("\n".join(["image;A;B", *lines]))
    expected = {name: ["A"] * (n % 2 == 0) + ["B"] * (n % 3 == 0) for n, name in enumerate(names)}
    assert labels_of(tmp_path, columns=Columns(label="A,B")) == expected
    assert (
        "several findings"
        in import_folder(tmp_path, ImportOptions(columns=Columns(label="A,B"), force=True)).render()
    )


def test_a_class_with_a_decimal_comma_is_a_number(tmp_path: Path) -> None:
    names = pictures(tmp_path)
    lines = [f"{name};{n % 2},0" for n, name in enumerate(names)]
    (tmp_path / "t.csv").write_text("\n".join(["image;label", *lines]))
    assert labels_of(tmp_path) == {name: str(n % 2) for n, name in enumerate(names)}


@pytest.mark.parametrize("joined", ["['a', 'b']", "[1, 0]", "a;b"])
def test_a_cell_that_lists_labels_is_refused(joined: str, tmp_path: Path) -> None:
    """As PadChest and ODIR-5K."""
    names = pictures(tmp_path)
    lines = [f'{name},"{joined if n % 2 else "c"}"' for n, name in enumerate(names)]
    (tmp_path / "t.csv").write_text("\n".join(["image,label", *lines]))
    text = error_of(tmp_path)
    assert repr(joined) in text and "write | between them" in text


def test_cells_that_all_list_labels_are_findings(tmp_path: Path) -> None:
    """As PadChest's Labels; with one in each, as ODIR-5K's, they are classes."""
    names = pictures(tmp_path)
    cells = ["['mass']", "['mass', 'effusion, left']", '["no finding"]']
    lines = [f"{name};{cells[n % 3]}" for n, name in enumerate(names)]
    (tmp_path / "t.csv").write_text("\n".join(["image;label", *lines]))
    expected = [["mass"], ["effusion, left", "mass"], []]
    assert labels_of(tmp_path) == {name: expected[n % 3] for n, name in enumerate(names)}
    lines = [f"{name};['{'DN'[n % 2]}']" for n, name in enumerate(names)]
    (tmp_path / "t.csv").write_text("\n".join(["image;label", *lines]))
    assert labels_of(tmp_path) == {name: "DN"[n % 2] for n, name in enumerate(names)}


# -- rows ----------------------------------------------------------------------------------------


def test_an_image_in_two_rows_is_refused_if_they_differ(tmp_path: Path) -> None:
    rows = [(name, "ab"[n % 2]) for n, name in enumerate(pictures(tmp_path))]
    table(tmp_path / "t.csv", ("image", "label"), *rows, ("3.png", "a"))
    text = error_of(tmp_path)
    assert "t.csv line 14: image 3.png is also in" in text
    assert "t.csv line 5, with other cells;" in text
    table(tmp_path / "t.csv", ("image", "label"), *rows, ("3.png", "b"))
    assert labels_of(tmp_path)["3.png"] == "b"


def test_files_are_found_in_upper_and_lower_case(tmp_path: Path) -> None:
    names = pictures(tmp_path, name="IMG_{n}.PNG")
    rows = [(name.lower(), "ab"[n % 2]) for n, name in enumerate(names)]
    table(tmp_path / "t.csv", ("image", "label"), *rows)
    expected = {name: "ab"[n % 2] for n, name in enumerate(names)}
    assert labels_of(tmp_path) == expected
    for name in names:  # another file, whose name is that of the row
        picture(tmp_path / name.lower(), 200)
    assert labels_of(tmp_path) == {name.lower(): label for name, label in expected.items()}


def test_a_row_for_each_patient(tmp_path: Path) -> None:
    """By folders, by DICOM's PatientID; a patient with several volumes is asked about."""
    rows = [(f"P{number:03}", "ab"[number % 2]) for number in range(8)]
    for root in ("pictures", "dicom", "bids"):
        table(tmp_path / root / "t.csv", ("patient_id", "label"), *rows)
    folders, series, bids = (tmp_path / root for root in ("pictures", "dicom", "bids"))
    for number, (patient, _) in enumerate(rows):
        pictures(folders / "images" / patient, 3)
        change(
            dicom_series(series / f"s{number}"), PatientID=patient, SeriesInstanceUID=f"1.{number}"
        )
        (bids / patient / "anat").mkdir(parents=True)
        write(bids / patient / "anat" / "T1w.nii.gz", np.ones((3, 4, 5)) * number)
    expected = {f"images/{patient}/{n}.png": label for patient, label in rows for n in range(3)}
    assert labels_of(folders) == expected
    entries = json.loads((folders / "datalist.json").read_text())["training"]
    assert all(entry["patient"] == entry["image"].split("/")[1] for entry in entries)
    assert labels_of(series) == {f"s{number}": label for number, (_, label) in enumerate(rows)}
    assert labels_of(bids) == {f"{patient}/anat/T1w.nii.gz": label for patient, label in rows}
    (bids / "datalist.json").unlink()
    write(bids / "P003" / "anat" / "FLAIR.nii.gz", np.zeros((3, 4, 5)))
    text = error_of(bids)
    assert "t.csv line 5: 'P003' can be P003/anat/FLAIR.nii.gz and P003/anat/T1w.nii.gz" in text


# -- tables that cannot be used ------------------------------------------------------------------


def _sites(root: Path) -> list[str]:
    """Pictures of the same names in two folders that are no classes."""
    for site in ("north", "south"):
        pictures(root / site, 8)
    return [f"{site}/{number}.png" for site in ("north", "south") for number in range(8)]


@pytest.mark.parametrize(
    ("header", "cells", "problem"),
    [
        (("image", "label"), lambda names: [name.partition("/")[2] for name in names], "can be"),
        (("image", "outcome"), lambda names: names, "--label-column"),
        (("image", "label"), lambda names: [f"x{name}x" for name in names], "names no image"),
    ],
)
def test_folders_are_no_classes_beside_a_table_of_the_images(
    header: tuple[str, str], cells: Any, problem: str, tmp_path: Path
) -> None:
    names: Iterable[str] = cells(_sites(tmp_path))
    table(tmp_path / "t.csv", header, *((name, "ab"[n % 2]) for n, name in enumerate(names)))
    text = error_of(tmp_path)
    assert "are the folders north, south the classes?" in text and problem in text
    assert {*labels_of(tmp_path, kind="classification").values()} == {"north", "south"}


def test_files_of_one_name_at_each_site_are_named(tmp_path: Path) -> None:
    rows: list[tuple[str, ...]] = []
    for name in _sites(tmp_path):
        site, _, file = name.partition("/")
        rows.append((site, file, f"P{file[0]}", "ab"[len(rows) % 2]))
    table(tmp_path / "all.csv", ("hospital", "file", "patient", "label"), *rows)
    columns = Columns(site="hospital")
    text = error_of(tmp_path, columns=columns, out=tmp_path.parent / "out")
    assert "column file: '0.png' can be north/0.png and south/0.png; write the whole" in text


def test_numbers_that_pandas_has_made_floats_name_files(tmp_path: Path) -> None:
    names = pictures(tmp_path)
    rows = [(f"{n}.0", f"{n // 2}.0", "ab"[n // 2 % 2]) for n in range(len(names))]
    table(tmp_path / "t.csv", ("image_id", "patient", "label"), *rows, ("", "", "a"))
    assert "line 14: no file for ''" in error_of(tmp_path)
    assert labels_of(tmp_path, skip=True)["3.png"] == "b"
    (tmp_path / "datalist.json").unlink()
    table(tmp_path / "t.csv", ("patient", "label"), *(row[1:] for row in rows[::2]))
    assert "numbers that name 6 of 12 images" in error_of(tmp_path)


@pytest.mark.parametrize("last", [(), ("outside_training",)])
def test_masks_of_a_table_that_are_not_those_beside_are_asked_about(
    last: tuple[str, ...], tmp_path: Path
) -> None:
    """As predictions, also of medflare."""
    rows = []
    for name in pictures(tmp_path / "images"):
        mask(tmp_path / "masks" / name)
        predicted = mask(tmp_path / "predictions" / f"{name[:-4]}_seg.png")
        rows.append((f"images/{name}", predicted.name, *["" for _ in last]))
    table(tmp_path / "predictions/predictions.csv", ("image", "mask", *last), *rows)
    text = error_of(tmp_path)
    assert ("predictions are no labels" in text) == bool(last)
    assert last or "predictions/0_seg.png and masks/0.png seem to be masks of one image" in text
    report = import_folder(tmp_path, ImportOptions(leave_out=("predictions",)))
    assert {item.masks[0].parent.name for item in report.sites[""]} == {"masks"}
    assert import_folder(tmp_path, ImportOptions(columns=Columns(mask="mask"), force=True))


def test_a_table_of_excluded_patients_leaves_none_out(tmp_path: Path) -> None:
    rows = [(name, f"P{n}", "ab"[n % 2]) for n, name in enumerate(pictures(tmp_path))]
    table(tmp_path / "labels.csv", ("file", "patient", "label"), *rows)
    table(tmp_path / "excluded.csv", ("patient", "reason"), ("P3", "consent"), ("P7", "artefact"))
    for columns in (Columns(), Columns(patient="patient")):
        report = import_folder(tmp_path, ImportOptions(columns=columns, force=True))
        assert "not used: excluded.csv: says nothing new" in report.render()
        assert len(report.sites[""]) == 12


def test_several_masks_in_a_cell_are_named(tmp_path: Path) -> None:
    rows = []
    for name in pictures(tmp_path):
        mask(tmp_path / f"m{name}")
        rows.append((name, f"m{name};m{name}"))
    table(tmp_path / "t.csv", ("image", "mask"), *rows)
    assert "no mask m0.png;m0.png; if these are several, unite them" in error_of(
        tmp_path, columns=Columns(mask="mask")
    )


def test_labels_of_single_slices_are_explained(tmp_path: Path) -> None:
    """As of RSNA's hemorrhages."""
    rows: list[tuple[str, int]] = []
    for number in range(6):
        series = dicom_series(tmp_path / f"s{number}", 2)
        change(series, range(2), SeriesInstanceUID=f"1.2.{number}")
        for file in sorted(series.iterdir()):
            file.rename(tmp_path / f"ID_{number}{file.name}")
            rows.append((f"ID_{number}{file.stem}", len(rows) % 2))
        series.rmdir()
    table(tmp_path / "t.csv", ("ID", "any"), *rows)
    text = error_of(tmp_path, columns=Columns(label="any"), out=tmp_path.parent / "out")
    assert "'ID_00' in column ID; slices of a series have no own labels" in text


def test_a_column_that_may_name_the_sites_is_named(tmp_path: Path) -> None:
    names = pictures(tmp_path / "in")
    rows = []
    for number, name in enumerate(names):
        rows.append((name, "ab"[number % 2], ("north", "south", "east")[number % 3], "one"))
    table(tmp_path / "in/t.csv", ("image", "class", "Hospital name", "centre"), *rows)
    column = "Hospital name"
    note = f"--site-column '{column}' --out DATA makes a site of each of the 3 names in column {column}"

    def report(**options: Any) -> str:
        out = tmp_path / "out" / str(len(options))
        return import_folder(
            tmp_path / "in", ImportOptions(out=out, force=True, **options)
        ).render()

    assert f"note: {note}" in report().split("\n")
    for options in ({"sites": 1}, {"columns": Columns(site=column), "redraw": True}):
        assert "--site-column" not in report(**options)


def test_a_table_that_names_fewer_images_than_there_are_is_only_noted(tmp_path: Path) -> None:
    table(classes(tmp_path) / "names.csv", ("number", "meaning"), (0, "cat"), (1, "dog"))
    report = import_folder(tmp_path)
    assert "names.csv names no image of the folder, as '0' in column number" in report.render()


def test_the_error_of_a_table_is_the_only_one(tmp_path: Path) -> None:
    rows = [(name, "ab"[n % 2]) for n, name in enumerate(pictures(tmp_path))]
    table(tmp_path / "t.csv", ("image", "outcome"), *rows)
    assert error_of(tmp_path).startswith(f"{tmp_path}/t.csv: no column is recognized as the label")
