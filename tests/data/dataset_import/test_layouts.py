"""Folders as they are downloaded become datalists, or one line that says what is unclear."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

from helpers.downloaded_folders import classes, mask, pairs, picture, table
from helpers.volume_sites import beside_a_series, dicom_series, write
from medflare.core.errors import DataError
from medflare.data.datalist import read_datalist
from medflare.data.dataset_import.datalists import Wishes, init
from medflare.data.dataset_import.finding import holdings
from medflare.data.dataset_import.tables import GUESSED, Columns, read_table, suits


def listed(root: Path) -> list[dict[str, Any]]:
    """All entries of a folder's datalist."""
    content = json.loads((root / "datalist.json").read_text())
    return [entry for split in ("training", "validation", "test") for entry in content[split]]


def refused(root: Path, **wishes: Any) -> str:
    """The one line, after which nothing was written."""
    with pytest.raises(DataError) as error:
        init(root, Wishes(**wishes))
    assert not (root / "datalist.json").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_per_class_below_folders_of_splits(tmp_path: Path) -> None:
    classes(tmp_path / "pets" / "train", patients=12)
    classes(tmp_path / "pets" / "Test Set", patients=4)
    picture(tmp_path / "__MACOSX" / "cat" / "junk.png")
    written = init(tmp_path)
    assert written.found.labels == {"0": "cat", "1": "dog"}
    content = json.loads((tmp_path / "datalist.json").read_text())
    assert len(content["test"]) == 8 and all("Test Set" in entry["image"] for entry in content["test"])
    assert len(content["training"]) + len(content["validation"]) == 24 and content["validation"]
    assert all(entry["label"] == ("dog" in entry["image"]) for entry in listed(tmp_path))
    assert "split       images  patients  cat  dog" in written.render()


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("{n}.png", "{n}_mask.png"),
        ("images/{n}.png", "masks/{n}.png"),
        ("train/images/{n}.png", "train/masks/{n}_mask.png"),
        ("image/{n}.png", "label/mask_{n}.png"),
        ("Task1_Training_Input/{n}.png", "Task1_Training_GroundTruth/{n}_segmentation.png"),
    ],
)
def test_images_and_masks_by_name(image: str, label: str, tmp_path: Path) -> None:
    init(pairs(tmp_path, image=image, label=label))
    found = {entry["image"]: entry["label"] for entry in listed(tmp_path)}
    assert found == {image.format(n=f"IMG_{n:02}"): label.format(n=f"IMG_{n:02}") for n in range(10)}
    assert len(read_datalist(tmp_path, "segmentation")) == 10


def test_splits_may_have_files_of_the_same_names(tmp_path: Path) -> None:
    for split in ("train", "test"):
        pairs(tmp_path / split, image="images/{n}.png", label="masks/{n}.png")
    init(tmp_path)
    assert {(entry["image"], entry["label"]) for entry in listed(tmp_path)} == {
        (f"{split}/images/IMG_{n:02}.png", f"{split}/masks/IMG_{n:02}.png") for split in ("train", "test") for n in range(10)
    }
    content = json.loads((tmp_path / "datalist.json").read_text())
    assert all(entry["image"].startswith("test/") for entry in content["test"]) and len(content["test"]) == 10


def test_only_images_may_name_the_split(tmp_path: Path) -> None:
    for patient in ("p1", "p2"):
        pairs(tmp_path, image=f"images_train/{patient}/{{n}}.png", label=f"masks/{patient}/{{n}}.png")
    init(tmp_path)
    assert all(entry["label"] == entry["image"].replace("images_train", "masks") for entry in listed(tmp_path))


def test_a_mask_of_another_folder_is_no_image_s_own(tmp_path: Path) -> None:
    pairs(tmp_path, image="images/2021/{n}.png", label="masks/2021/{n}.png")
    picture(tmp_path / "images" / "2022" / "IMG_01.png")
    assert "images/2022/IMG_01.png" in refused(tmp_path)
    init(tmp_path, Wishes(skip=True))
    assert len({entry["label"] for entry in listed(tmp_path)}) == len(listed(tmp_path)) == 10


def test_a_mask_of_another_split_is_no_image_s_own(tmp_path: Path) -> None:
    pairs(tmp_path, image="train/images/{n}.png", label="train/masks/{n}.png")
    picture(tmp_path / "train" / "images" / "odd.png")
    mask(tmp_path / "test" / "masks" / "odd.png")
    assert "train/images/odd.png" in refused(tmp_path)


def test_a_mask_that_two_images_may_claim(tmp_path: Path) -> None:
    pairs(tmp_path, image="left/{n}.png", label="masks/{n}.png")
    picture(tmp_path / "right" / "IMG_03.png")
    said = refused(tmp_path)
    assert "left/IMG_03.png" in said and "right/IMG_03.png" in said


def test_volumes_of_nnunet_with_channels_in_files_of_their_own(tmp_path: Path) -> None:
    volume = np.ones((4, 5, 6), np.uint8)
    (tmp_path / "imagesTr").mkdir()
    (tmp_path / "labelsTr").mkdir()
    (tmp_path / "imagesTs").mkdir()
    for case in ("a", "b", "c", "d"):
        for channel in range(2):
            write(tmp_path / "imagesTr" / f"case_{case}_{channel:04}.nii.gz", volume)
        write(tmp_path / "labelsTr" / f"case_{case}.nii.gz", volume)
    write(tmp_path / "imagesTs" / "case_z_0000.nii.gz", volume)
    (tmp_path / "dataset.json").write_text(json.dumps({"channel_names": {"0": "T2", "1": "ADC"}, "labels": {"background": 0, "PZ": 1}}))
    written = init(tmp_path)
    assert written.found.channels == {"0": "T2", "1": "ADC"} and written.found.notes == ("1 test images without masks are not used",)
    assert {tuple(entry["image"]) for entry in listed(tmp_path)} == {
        (f"imagesTr/case_{case}_0000.nii.gz", f"imagesTr/case_{case}_0001.nii.gz") for case in "abcd"
    }


def test_volumes_with_a_file_for_each_named_channel(tmp_path: Path) -> None:
    volume = np.ones((4, 5, 6), np.uint8)
    for case in range(4):
        folder = tmp_path / "BraTS" / f"BraTS_{case:03}"
        folder.mkdir(parents=True)
        for part in ("flair", "t1", "seg"):
            if (case, part) != (3, "t1"):
                write(folder / f"BraTS_{case:03}_{part}.nii.gz", volume)
    written = init(tmp_path)
    assert written.found.channels == {"0": "flair", "1": "t1"}
    names = {tuple(name and Path(name).name for name in entry["image"]) for entry in listed(tmp_path)}
    assert names == {(f"BraTS_00{n}_flair.nii.gz", None if n == 3 else f"BraTS_00{n}_t1.nii.gz") for n in range(4)}


def scans(root: Path, series: int = 4) -> Path:
    """A folder per class with a DICOM series of 4 slices for each of some patients, P0, P1, ..."""
    for number in range(series):
        folder = root / ("healthy", "ill")[number % 2] / f"scan{number}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        for file in dicom_series(folder).iterdir():
            slice_ = pydicom.dcmread(file)
            slice_.PatientID, slice_.SeriesInstanceUID = f"P{number}", f"1.2.3.{number}"
            slice_.save_as(file)
    return root


@pytest.mark.parametrize("exported", [False, True])
def test_a_dicom_series_is_one_image_of_its_patient(exported: bool, tmp_path: Path) -> None:
    scans(tmp_path)
    for folder in (tmp_path, tmp_path / "ill" / "scan1") if exported else ():
        beside_a_series(folder)
    written = init(tmp_path)
    found = {(entry["image"], entry["label"], entry["patient"]) for entry in listed(tmp_path)}
    assert found == {("healthy/scan0", 0, "P0"), ("ill/scan1", 1, "P1"), ("healthy/scan2", 0, "P2"), ("ill/scan3", 1, "P3")}
    assert not written.warnings


def test_dicom_files_that_make_no_image_are_one_line(tmp_path: Path) -> None:
    scans(tmp_path / "a")
    picture(tmp_path / "a" / "ill" / "scan1" / "photo.png")
    assert "0.dcm" in refused(tmp_path / "a")
    scans(tmp_path / "b")
    (tmp_path / "b" / "ill" / "scan1" / "0.dcm").write_text("no header")
    assert "0.dcm" in refused(tmp_path / "b")


def test_a_table_names_files_labels_and_patients(tmp_path: Path) -> None:
    rows = [(f"p{n // 2}_{n}", "mel" if n % 3 else "nv", f"P{n // 2}") for n in range(20)]
    for name, *_ in rows:
        picture(tmp_path / "img" / f"{name}.png")
    table(tmp_path / "labels.csv", ("image_id", "dx", "Patient ID"), *rows)
    written = init(tmp_path)
    assert written.found.by == "labels.csv: image image_id, label dx, patient Patient ID" and not written.warnings
    found = {entry["image"]: (["mel", "nv"][entry["label"]], entry["patient"]) for entry in listed(tmp_path)}
    assert found == {f"img/{name}.png": (label, patient) for name, label, patient in rows}


def test_one_patient_however_a_cell_writes_the_number(tmp_path: Path) -> None:
    rows = [(picture(tmp_path / f"{n}.png").name, n % 2, f"{n // 2}.0" if n % 2 else f" {n // 2}") for n in range(20)]
    table(tmp_path / "list.csv", ("file", "label", "patient"), *rows)
    init(tmp_path)
    assert {(entry["image"], entry["patient"]) for entry in listed(tmp_path)} == {(f"{n}.png", str(n // 2)) for n in range(20)}


@pytest.mark.parametrize(("second", "whose"), [("note", "lesion_id"), ("patient_id", "patient_id")])
def test_where_no_patient_is_told_lesions_stay_together(second: str, whose: str, tmp_path: Path) -> None:
    rows = [(picture(tmp_path / f"{n}.png").name, "nv" if n % 2 else "mel", f"l{n // 2}", f"p{n // 3}") for n in range(18)]
    table(tmp_path / "list.csv", ("file", "dx", "lesion_id", second), *rows)
    written = init(tmp_path)
    assert written.found.by == f"list.csv: image file, label dx, patient {whose}" and not written.warnings


def test_columns_of_zeros_and_ones_are_classes_or_findings(tmp_path: Path) -> None:
    for n in range(8):
        picture(tmp_path / f"{n}.png")
    columns = Columns(label="A,B")
    table(tmp_path / "t.csv", ("image", "A", "B"), *((f"{n}.png", n % 2, 1 - n % 2) for n in range(8)))
    init(tmp_path, Wishes(columns=columns))
    assert {entry["image"]: entry["label"] for entry in listed(tmp_path)} == {f"{n}.png": 1 - n % 2 for n in range(8)}
    table(tmp_path / "t.csv", ("image", "A", "B"), *((f"{n}.png", 1, n % 2) for n in range(8)))
    init(tmp_path, Wishes(columns=columns, force=True))
    assert {entry["image"]: entry["label"] for entry in listed(tmp_path)} == {f"{n}.png": [1, n % 2] for n in range(8)}


def test_a_table_of_masks(tmp_path: Path) -> None:
    pairs(tmp_path, image="x/{n}.png", label="y/{n}.png")
    rows = [(f"x/IMG_{n:02}.png", f"y/IMG_{n:02}.png", f"p{n}") for n in range(10)]
    table(tmp_path / "list.csv", ("file", "outline", "case"), *rows)
    init(tmp_path, Wishes(columns=Columns(mask="outline")))
    assert {(entry["image"], entry["label"], entry["patient"]) for entry in listed(tmp_path)} == set(rows)


@pytest.mark.parametrize(
    ("cell", "file"),
    [
        ("001.png", "train/001.png"),
        ("001", "train/001.png"),
        ("train/001", "train/001.png"),
        ("set/train/001.png", "train/001.png"),  # the cell begins above the folder that was given
        ("..\\Train\\001.png", "train/001.png"),
        ("images/001.png", "001.png"),
        ("D:\\export\\001.png", "001.png"),
    ],
)
def test_cells_that_name_a_file(cell: str, file: str, tmp_path: Path) -> None:
    picture(tmp_path / "set" / file)
    table(tmp_path / "set" / "t.csv", ("image", "label"), (cell, "a"))
    found = read_table(tmp_path / "set" / "t.csv", holdings(tmp_path / "set"), GUESSED)
    assert [item.first for item in found.items] == [tmp_path / "set" / file] and not found.missing


@pytest.mark.parametrize(
    ("cell", "file"),
    [
        ("test/001.png", "train/001.png"),
        ("test/001", "train/001.png"),
        ("test/001.png", "001.png"),  # in a folder that is called train
        ("p2/001.png", "p1/001.png"),
        ("images/p2/001.png", "images/p1/001.png"),
        ("D:\\export\\p2\\001.png", "p1/001.png"),
        ("/srv/test/001.png", "train/images/001.png"),
        ("/srv/test/001.png", "images/001.png"),
    ],
)
def test_a_file_of_the_same_name_elsewhere_is_another(cell: str, file: str, tmp_path: Path) -> None:
    root = tmp_path / "train"
    picture(root / file)
    table(root / "t.csv", ("image", "label"), (cell, "a"))
    found = read_table(root / "t.csv", holdings(root), GUESSED)
    assert not found.items and len(found.missing) == 1 and repr(cell) in found.missing[0]


def test_a_table_of_other_files_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "001.png")
    table(tmp_path / "t.csv", ("image", "label"), ("test/001.png", "a"))
    assert "t.csv" in refused(tmp_path)


def test_a_cell_takes_the_file_whose_folders_fit_best(tmp_path: Path) -> None:
    for file in ("001.png", "b/001.png", "a/b/001.png", "c/001.png"):
        picture(tmp_path / file)
    held = holdings(tmp_path)
    for cell, file in (
        ("a/b/001.png", "a/b/001.png"),
        ("x/c/001.png", "c/001.png"),
        ("x/001.png", "001.png"),
        ("x/b/001.png", "b/001.png"),
    ):
        table(tmp_path / "t.csv", ("image", "label"), (cell, "a"))
        assert [item.first for item in read_table(tmp_path / "t.csv", held, GUESSED).items] == [tmp_path / file]
    (tmp_path / "001.png").unlink()
    table(tmp_path / "t.csv", ("image", "label"), ("001.png", "a"))
    with pytest.raises(DataError, match=r"001\.png"):
        read_table(tmp_path / "t.csv", holdings(tmp_path), GUESSED)


def test_what_is_unclear_is_one_line(tmp_path: Path) -> None:
    assert "pictures.zip" in refused(tmp_path / "pictures.zip")
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(tmp_path / "empty")
    picture(tmp_path / "loose" / "a.png")
    picture(tmp_path / "loose" / "b.png")
    assert "loose" in refused(tmp_path / "loose")
    many = classes(tmp_path / "many", patients=31, each=1, names=tuple(f"patient{n}" for n in range(31)))
    assert "31" in refused(many)
    algorithm = pairs(tmp_path / "algorithm")
    (algorithm / "IMG_03_mask.png").unlink()
    assert "IMG_03.png" in refused(algorithm)
    twice = pairs(tmp_path / "twice")
    mask(twice / "IMG_03_seg.png")
    assert "IMG_03_seg.png" in refused(twice)
    other = pairs(tmp_path / "other")
    mask(other / "IMG_03_mask.png", side=20)
    assert "IMG_03_mask.png: 20 x 20" in refused(other)
    broken = classes(tmp_path / "broken")
    (broken / "cat" / "p00_0.png").write_text("no picture")
    assert "p00_0.png" in refused(broken)


def test_a_table_with_a_huge_cell_is_passed_over_or_named(tmp_path: Path) -> None:
    """Outlines of a viewer lie beside images; csv takes no cell above 128 KiB."""
    classes(tmp_path)
    outlines = table(tmp_path / "outlines.csv", ("id", "polygon"), (1, "0 " * 70_000))
    assert not suits(outlines, holdings(tmp_path))
    assert str(outlines) in refused(tmp_path, table=outlines)
    assert "outlines.csv" in init(tmp_path).found.notes[0]


@pytest.mark.parametrize(
    ("header", "wishes", "named"),
    [
        (("image", "label"), {"columns": Columns(label="lable")}, "lable"),
        (("image", "width"), {"table": "a.csv"}, "--label-column"),
        (("image", "label"), {"table": "a.csv"}, "9.png"),
    ],
)
def test_a_table_that_does_not_fit_is_one_line(header: tuple[str, str], wishes: dict[str, Any], named: str, tmp_path: Path) -> None:
    picture(tmp_path / "0.png")
    file = table(tmp_path / "a.csv", header, ("0.png", 1), ("9.png", 0))
    assert named in refused(tmp_path, **wishes | ({"table": file} if "table" in wishes else {}))


def test_of_two_tables_one_must_be_chosen(tmp_path: Path) -> None:
    picture(tmp_path / "0.png")
    for name in ("a.csv", "b.csv"):
        table(tmp_path / name, ("image", "label"), ("0.png", 1))
    assert "--table" in refused(tmp_path)


def test_incomplete_images_are_left_out_where_that_is_said(tmp_path: Path) -> None:
    pairs(tmp_path)
    (tmp_path / "IMG_03_mask.png").unlink()
    written = init(tmp_path, Wishes(skip=True))
    assert len(listed(tmp_path)) == 9 and "left out: IMG_03.png: no mask" in written.render()


def test_classes_may_be_asked_for_where_masks_lie_beside(tmp_path: Path) -> None:
    classes(tmp_path)
    mask(tmp_path / "cat" / "p00_0_mask.png")
    assert "no mask" in refused(tmp_path)
    written = init(tmp_path, Wishes(kind="classification"))
    assert len(listed(tmp_path)) == 40 and written.found.notes == ("1 masks are not used",)
