"""Downloaded folders become datalists, or an error of one line."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.downloaded_folders import classes, mask, pairs, picture, table
from helpers.volume_sites import TASK, beside_a_series, change, dicom_series, write
from medflare.core.errors import DataError
from medflare.data.datalist import read_datalist
from medflare.data.decoding import Source
from medflare.preparation.dataset_import import site_files
from medflare.preparation.dataset_import.datalists import import_folder
from medflare.preparation.dataset_import.folders import scan_folder
from medflare.preparation.dataset_import.image_table import ImageTable
from medflare.preparation.dataset_import.options import Columns, ImportOptions
from medflare.preparation.dataset_import.tables import read_tables
from medflare.preparation.proposing import TaskHints, summarise
from medflare.tasks.config import load_task


def listed(root: Path) -> list[dict[str, Any]]:
    """All entries of a folder's datalist."""
    content = json.loads((root / "datalist.json").read_text())
    return [entry for split in ("training", "validation", "test") for entry in content[split]]


def labels_of(root: Path) -> dict[Any, Any]:
    """Image -> label of all entries."""
    return {entry["image"]: entry["label"] for entry in listed(root)}


def error_of(root: Path, **options: Any) -> str:
    """The error of one line, after which nothing was written."""
    with pytest.raises(DataError) as error:
        import_folder(root, ImportOptions(**options))
    assert not (root / "datalist.json").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_per_class_below_folders_of_splits(tmp_path: Path) -> None:
    classes(tmp_path / "pets" / "train", patients=12)
    classes(tmp_path / "pets" / "Test Set", patients=4)
    picture(tmp_path / "__MACOSX" / "cat" / "junk.png")
    report = import_folder(tmp_path)
    assert report.dataset.labels == {"0": "cat", "1": "dog"}
    content = json.loads((tmp_path / "datalist.json").read_text())
    assert len(content["test"]) == 8 and all(
        "Test Set" in entry["image"] for entry in content["test"]
    )
    assert len(content["training"]) + len(content["validation"]) == 24 and content["validation"]
    assert all(entry["label"] == ("dog" in entry["image"]) for entry in listed(tmp_path))
    header, *_, test = report.render().splitlines()[2:6]
    assert header.split() == ["split", "images", "patients", "cat", "dog"] and test.split() == [
        "test",
        "8",
        "8",
        "4",
        "4",
    ]


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("{n}.png", "{n}_mask.png"),
        ("images/{n}.png", "masks/{n}.png"),
        ("images_train/p1/{n}.png", "masks/p1/{n}.png"),
        ("image/{n}.png", "label/mask_{n}.png"),
        ("left/{n}.png", "masks/{n}.png"),
        ("Task1_Training_Input/{n}.png", "Task1_Training_GroundTruth/{n}_segmentation.png"),
    ],
)
def test_images_and_masks_by_name(image: str, label: str, tmp_path: Path) -> None:
    import_folder(pairs(tmp_path, image=image, label=label))
    assert labels_of(tmp_path) == {
        image.format(n=f"IMG_{n:02}"): label.format(n=f"IMG_{n:02}") for n in range(10)
    }
    assert len(read_datalist(tmp_path, "segmentation")) == 10


def test_splits_may_have_files_of_the_same_names(tmp_path: Path) -> None:
    for split in ("train", "test"):
        pairs(tmp_path / split, image="images/{n}.png", label="masks/{n}.png")
    import_folder(tmp_path)
    assert (
        all(mask == image.replace("images", "masks") for image, mask in labels_of(tmp_path).items())
        and len(listed(tmp_path)) == 20
    )
    content = json.loads((tmp_path / "datalist.json").read_text())
    assert (
        all(entry["image"].startswith("test/") for entry in content["test"])
        and len(content["test"]) == 10
    )


def test_masks_of_other_images_are_not_used(tmp_path: Path) -> None:
    pairs(tmp_path, image="train/images/2021/{n}.png", label="train/masks/2021/{n}.png")
    # The only mask of this name is of 2021.
    picture(tmp_path / "train" / "images" / "2022" / "IMG_01.png")
    assert "2022/IMG_01.png: no mask" in error_of(tmp_path)
    picture(tmp_path / "train" / "images" / "odd.png")
    mask(tmp_path / "test" / "masks" / "odd.png")  # of another split
    report = import_folder(tmp_path, ImportOptions(skip=True))
    assert len({entry["label"] for entry in listed(tmp_path)}) == len(listed(tmp_path)) == 10
    assert (
        "left out: test/masks/odd.png" in report.render()
        and "left out: train/images/2022/IMG_01.png: no mask" in report.render()
    )


@pytest.mark.parametrize("parts", [["imaging"], ["flair", "t1"]])
def test_a_folder_for_each_case_with_its_mask(parts: list[str], tmp_path: Path) -> None:
    volumes(
        tmp_path, *(f"case_{case}/{name}" for case in range(4) for name in (*parts, "segmentation"))
    )
    import_folder(tmp_path)
    files = {
        f"case_{case}/segmentation.nii.gz": [f"case_{case}/{part}.nii.gz" for part in parts]
        for case in range(4)
    }
    assert {
        entry["label"]: np.atleast_1d(entry["image"]).tolist() for entry in listed(tmp_path)
    } == files


def test_ambiguous_masks_are_refused(tmp_path: Path) -> None:
    pairs(tmp_path / "a", image="left/{n}.png", label="masks/{n}.png")
    picture(tmp_path / "a" / "right" / "IMG_03.png")
    text = error_of(tmp_path / "a")
    assert "left/IMG_03.png" in text and "right/IMG_03.png" in text
    mask(pairs(tmp_path / "b") / "IMG_03_seg.png")
    assert "IMG_03_seg.png" in error_of(tmp_path / "b")


def test_volumes_of_nnunet_with_a_file_per_channel(tmp_path: Path) -> None:
    volumes(tmp_path, "imagesTs/case_z_0000", *(f"labelsTr/case_{case}" for case in "abcd"))
    volumes(
        tmp_path, *(f"imagesTr/case_{case}_000{channel}" for case in "abcd" for channel in range(2))
    )
    (tmp_path / "dataset.json").write_text(
        json.dumps({"channel_names": {"0": "T2", "1": "ADC"}, "labels": {"background": 0, "PZ": 1}})
    )
    report = import_folder(tmp_path)
    assert report.dataset.channels == {"0": "T2", "1": "ADC"} and report.dataset.notes == (
        "1 test images without masks are not used",
    )
    assert {tuple(entry["image"]) for entry in listed(tmp_path)} == {
        (f"imagesTr/case_{case}_0000.nii.gz", f"imagesTr/case_{case}_0001.nii.gz")
        for case in "abcd"
    }


def test_volumes_with_a_file_for_each_named_channel(tmp_path: Path) -> None:
    files = [
        f"BraTS/BraTS_00{case}/BraTS_00{case}_{part}"
        for case in range(4)
        for part in ("flair", "t1", "seg")
    ]
    volumes(tmp_path, *files[:-2], files[-1])  # the last one has no t1
    assert import_folder(tmp_path).dataset.channels == {"0": "flair", "1": "t1"}
    names = {
        tuple(name and Path(name).name for name in entry["image"]) for entry in listed(tmp_path)
    }
    assert names == {
        (f"BraTS_00{n}_flair.nii.gz", None if n == 3 else f"BraTS_00{n}_t1.nii.gz")
        for n in range(4)
    }


def volumes(root: Path, *names: str) -> None:
    """NIfTI files of these names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write(root / f"{name}.nii.gz", np.ones((4, 5, 6), np.uint8))


def series_of(folder: Path, number: int) -> Path:
    """A DICOM series of four slices of patient P`number`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return change(dicom_series(folder), PatientID=f"P{number}", SeriesInstanceUID=f"1.2.3.{number}")


def scans(root: Path, series: int = 4) -> Path:
    """A folder per class with a DICOM series for each of some patients, P0, P1, ..."""
    for number in range(series):
        series_of(root / ("healthy", "ill")[number % 2] / f"scan{number}", number)
    return root


@pytest.mark.parametrize("exported", [False, True])
def test_a_dicom_series_is_one_image_of_its_patient(exported: bool, tmp_path: Path) -> None:
    scans(tmp_path)
    for folder in (tmp_path, tmp_path / "ill" / "scan1") if exported else ():
        beside_a_series(folder)
    assert not import_folder(tmp_path).warnings
    assert {(entry["image"], entry["label"], entry["patient"]) for entry in listed(tmp_path)} == {
        (f"{name}/scan{number}", number % 2, f"P{number}")
        for number, name in enumerate(("healthy", "ill") * 2)
    }
    (tmp_path / "ill/scan1/0.dcm").write_text("no header")
    with pytest.raises(DataError, match=r"0\.dcm"):
        import_folder(tmp_path, ImportOptions(force=True))


@pytest.mark.parametrize("flat", [True, False])
def test_series_whose_slices_lie_beside_other_files_get_folders(flat: bool, tmp_path: Path) -> None:
    """As some archives export a class of studies: all slices in one folder; or a table beside those of one series."""
    root = scans(tmp_path / "in", 8)
    for number in range(8) if flat else (1,):
        series = root / ("healthy", "ill")[number % 2] / f"scan{number}"
        if flat:
            for file in series.iterdir():
                file.rename(series.parent / f"{number}-{file.name}")
            series.rmdir()
        else:
            (series / "protocol.csv").write_text("dose,kV\n1,120\n")
    assert "--out" in error_of(root)
    import_folder(root, ImportOptions(out=tmp_path / "out"))
    entries = {
        entry["patient"]: entry
        for entry in listed(tmp_path / "out")
        if str(entry["image"]).count("1.2.3.")
    }
    assert entries.keys() == {f"P{number}" for number in (range(8) if flat else (1,))}
    for patient, entry in entries.items():
        assert (
            len([*(tmp_path / "out" / entry["image"]).iterdir()]) == 4
            and entry["label"] == int(patient[1:]) % 2
        )


def test_a_slice_with_the_name_of_its_series_is_one_of_all_slices(tmp_path: Path) -> None:
    root = scans(tmp_path / "in", 8)
    series = root / "ill" / "scan1"
    (series / "0.dcm").rename(series / "1.2.3.1")
    (series / "protocol.csv").write_text("dose,kV\n1,120\n")
    import_folder(root, ImportOptions(out=tmp_path / "out"))
    (entry,) = (entry for entry in listed(tmp_path / "out") if entry["patient"] == "P1")
    assert len([*(tmp_path / "out" / entry["image"]).iterdir()]) == 4


@pytest.mark.parametrize("kind", ["LOCALIZER", "SCREEN SAVE"])
def test_localizers_and_screen_saves_beside_series_are_no_images(kind: str, tmp_path: Path) -> None:
    """As a workstation exports a study; files that are all localizers are the images."""
    scans(tmp_path, 8)
    for number in range(8):
        name = ("healthy", "ill")[number % 2]
        extra = series_of(tmp_path / name / f"extra{number}", number + 100)
        for file in sorted(extra.iterdir())[1:]:
            file.unlink()
        unplaced = () if kind == "LOCALIZER" else ("ImagePositionPatient",)
        change(extra, [0], unplaced, ImageType=["DERIVED", "SECONDARY", kind])
    report = import_folder(tmp_path)
    assert sorted(labels_of(tmp_path)) == sorted(
        f"{('healthy', 'ill')[number % 2]}/scan{number}" for number in range(8)
    )
    assert "screen saves and dose reports: 8, the first: healthy/extra0/0.dcm" in report.render()
    for number in range(8):
        shutil.rmtree(tmp_path / ("healthy", "ill")[number % 2] / f"scan{number}")
    assert len(import_folder(tmp_path, ImportOptions(force=True)).sites[""]) == 8


def test_two_pictures_of_one_series_make_no_screen_saves_of_the_others(tmp_path: Path) -> None:
    """As radiographs that were exported without their modality."""
    for number in range(8):
        name = ("healthy", "ill")[number % 2]
        views = series_of(tmp_path / name / f"scan{number}", number)
        change(views, range(4), ("ImagePositionPatient",), Modality="OT")
        for file in sorted(views.iterdir())[2 if number == 0 else 1 :]:
            file.unlink()
    assert len(import_folder(tmp_path).sites[""]) == 8


def test_a_dicom_series_has_the_segmentation_that_refers_to_it(tmp_path: Path) -> None:
    """As an archive exports a study: folders named by UIDs, the segmentation among the slices or in a folder of its own."""
    pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")
    from medflare.inference.dicom_seg import dicom_seg

    liver = {"value": "10200004", "scheme": "SCT", "meaning": "Liver"}
    coded = {
        "target": "multiclass",
        "labels": ["background", "liver", "spleen"],
        "codes": {"liver": liver},
    }
    expected = {}
    task = load_task({**TASK, "channels": 1, **coded})
    for number in range(6):
        series = series_of(tmp_path / f"study{number}" / f"1.2.{number}", number)
        mask = series / "900.dcm" if number % 2 else series.parent / "9.9" / "1.dcm"
        mask.parent.mkdir(exist_ok=True)
        name = "Liver" if number == 3 else "liver"  # one structure
        structures = {name: np.zeros((5, 6, 4), bool), "spleen": np.zeros((5, 6, 4), bool)}
        structures[name][1:3, 2:5, 1:3] = True
        structures["spleen"][4, 0, 3] = True
        mask.write_bytes(dicom_seg(series, structures, task))
        expected[str(series.relative_to(tmp_path))] = (
            str(mask.relative_to(tmp_path)),
            f"P{number}",
        )
    report = import_folder(tmp_path)
    assert report.dataset.labels == {"1": "liver", "2": "spleen"} and not report.warnings
    assert {
        entry["image"]: (entry["label"], entry["patient"]) for entry in listed(tmp_path)
    } == expected
    settings = summarise(tmp_path, TaskHints()).settings
    assert settings["labels"] == ["background", "liver", "spleen"], "named by the segments"
    assert (
        settings["codes"].keys() == {"liver"}
        and liver.items() <= settings["codes"]["liver"].items()
    ), "the other has a private code"
    source = Source(tmp_path, task)
    for entry in source.listed_items():
        assert set(np.unique(source.mask(entry, source.image(entry)))) == {0, 1, 2}


def test_a_table_names_files_labels_and_patients(tmp_path: Path) -> None:
    rows = [(f"p{n // 2}_{n}", "mel" if n % 3 else "nv", f"P{n // 2}") for n in range(20)]
    for name, *_ in rows:
        picture(tmp_path / "img" / f"{name}.png")
    table(tmp_path / "labels.csv", ("image_id", "dx", "Patient ID"), *rows)
    report = import_folder(tmp_path)
    assert (
        report.dataset.layout == "labels.csv: image image_id, label dx, patient Patient ID"
        and not report.warnings
    )
    entries = {
        entry["image"]: (["mel", "nv"][entry["label"]], entry["patient"])
        for entry in listed(tmp_path)
    }
    assert entries == {f"img/{name}.png": (label, patient) for name, label, patient in rows}


def test_a_table_for_each_split_names_its_own_images(tmp_path: Path) -> None:
    """As IDRiD: both sets have an IDRiD_001."""
    for folder, name, count in (
        ("a. Training Set", "Training", 20),
        ("b. Testing Set", "Testing", 10),
    ):
        rows = [(f"IDRiD_{number:03}", number % 3, number % 2) for number in range(count)]
        for image, *_ in rows:
            picture(tmp_path / "1. Original Images" / folder / f"{image}.jpg")
        columns = ("Image name", "Retinopathy grade", "Risk of macular edema ")  # as published
        table(
            tmp_path / "2. Groundtruths" / f"IDRiD_Disease Grading_{name} Labels.csv",
            columns,
            *rows,
        )
    report = import_folder(tmp_path)
    content = json.loads((tmp_path / "datalist.json").read_text())
    assert len(content["test"]) == 10 and all(
        "b. Testing" in entry["image"] for entry in content["test"]
    )
    assert len(content["training"]) + len(
        content["validation"]
    ) == 20 and report.dataset.labels == {"0": "0", "1": "1", "2": "2"}
    assert all(entry["label"] == int(entry["image"][-7:-4]) % 3 for entry in listed(tmp_path))
    import_folder(
        tmp_path, ImportOptions(columns=Columns(label="Risk of macular edema"), force=True)
    )
    assert all(entry["label"] == int(entry["image"][-7:-4]) % 2 for entry in listed(tmp_path))


def test_hospitals_with_a_table_each_are_no_classes(tmp_path: Path) -> None:
    for hospital in ("north", "south"):
        for number in range(10):
            picture(tmp_path / hospital / "photos" / f"{number}.jpg")
        table(
            tmp_path / hospital / "grades.csv",
            ("photo", "grade"),
            *((f"{number}.jpg", number % 3) for number in range(10)),
        )
    assert "--site-folders" in error_of(tmp_path)
    report = import_folder(tmp_path, ImportOptions(site_folders=True))
    assert report.sites.keys() == {"north", "south"} and report.dataset.labels == {
        "0": "0",
        "1": "1",
        "2": "2",
    }


def test_findings_in_columns_or_in_one_cell(tmp_path: Path) -> None:
    """As ISIC 2018 and ChestX-ray14."""
    for number in range(12):
        picture(tmp_path / "images" / f"{number}.png")
    isic = [(n, *(float(n % 3 == k) for k in range(3))) for n in range(12)]
    nih = [(f"{n}.png", ("No Finding", "Effusion", "Effusion|Mass")[n % 3], n) for n in range(12)]
    for header, rows, names, labels in (
        (("image", "MEL", "NV", "BCC"), isic, ["MEL", "NV", "BCC"], (0, 1, 2)),
        (
            ("Image Index", "Finding Labels", "Patient ID"),
            nih,
            ["Effusion", "Mass"],
            ([0, 0], [1, 0], [1, 1]),
        ),
    ):
        table(tmp_path / "t.csv", header, *rows)
        assert (
            list(import_folder(tmp_path, ImportOptions(force=True)).dataset.labels.values())
            == names
        )
        assert labels_of(tmp_path) == {f"images/{n}.png": labels[n % 3] for n in range(12)}


def test_folders_of_patients_are_no_classes(tmp_path: Path) -> None:
    for number in range(8):
        picture(tmp_path / "train" / f"patient{number:05}" / "study1" / "view1.jpg")
    assert "--kind classification" in error_of(tmp_path)
    rows = (
        (f"set/train/patient{number:05}/study1/view1.jpg", "Female", -1.0) for number in range(8)
    )
    table(tmp_path / "train.csv", ("Path", "Sex", "Edema"), *rows)
    assert "--label-column" in error_of(tmp_path)


def test_two_eyes_are_of_one_patient(tmp_path: Path) -> None:
    rows = [(f"{number}_{eye}", number % 2) for number in range(10) for eye in ("left", "right")]
    for name, _ in rows:
        picture(tmp_path / f"{name}.jpeg")
    table(tmp_path / "trainLabels.csv", ("image", "level"), *rows)
    (warning,) = import_folder(tmp_path).warnings
    assert "left" in warning and all(
        entry["patient"] == entry["image"].partition("_")[0] for entry in listed(tmp_path)
    )


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("id_code", "diagnosis"),
        ("image", "level"),
        ("Image name", "Retinopathy grade"),
        ("photo", "adjudicated_dr_grade"),
    ],
)
def test_columns_of_public_tables_are_recognized(image: str, label: str, tmp_path: Path) -> None:
    """Of APTOS, EyePACS, Messidor-1 and Messidor-2; a table of images without labels, for a submission, is not used."""
    names = [f"{number:03x}c" for number in range(12)]
    for name in names:
        picture(tmp_path / "train_images" / f"{name}.png")
    table(
        tmp_path / "train.csv",
        (image, "eye", label),
        *((name, "left", number % 3) for number, name in enumerate(names)),
    )
    table(tmp_path / "test.csv", (image,), ("another",))
    import_folder(tmp_path)
    assert labels_of(tmp_path) == {
        f"train_images/{name}.png": number % 3 for number, name in enumerate(names)
    }


def test_numbers_that_are_names_of_images_by_chance(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        for number in range(6):
            picture(tmp_path / folder / f"{number}.png")
    rows = [
        (number % 3, number, f"{folder}/{number}.png")
        for folder in ("a", "b")
        for number in range(6)
    ]
    table(tmp_path / "t.csv", ("grade", "age", "photograph"), *rows)
    import_folder(tmp_path)
    assert labels_of(tmp_path) == {name: grade for grade, _, name in rows}


def test_numbers_of_patients_are_read_alike(tmp_path: Path) -> None:
    rows = [
        (picture(tmp_path / f"{n}.png").name, n % 2, f"{n // 2}.0" if n % 2 else f" {n // 2}")
        for n in range(20)
    ]
    # Lesions stay together if there is no patient.
    table(tmp_path / "list.csv", ("file", "label", "lesion_id"), *rows)
    import_folder(tmp_path)
    assert {(entry["image"], entry["patient"]) for entry in listed(tmp_path)} == {
        (f"{n}.png", str(n // 2)) for n in range(20)
    }


@pytest.mark.parametrize(
    ("cells", "labels"),
    [(((0, 1), (1, 0)), [1, 0]), (((1, 0), (1, 1)), [[1, 0], [1, 1]])],
    ids=["classes", "findings"],
)
def test_several_label_columns(cells: Any, labels: list[Any], tmp_path: Path) -> None:
    table(
        tmp_path / "t.csv",
        ("image", "A", "B"),
        *((picture(tmp_path / f"{n}.png").name, *cells[n % 2]) for n in range(8)),
    )
    import_folder(tmp_path, ImportOptions(columns=Columns(label="A,B")))
    assert labels_of(tmp_path) == {f"{n}.png": labels[n % 2] for n in range(8)}


def test_a_table_of_masks(tmp_path: Path) -> None:
    pairs(tmp_path, image="x/{n}.png", label="y/{n}.png")
    rows = [(f"x/IMG_{n:02}.png", f"y/IMG_{n:02}.png", f"c{n}") for n in range(10)]
    table(
        tmp_path / "list.tsv",
        *((f"{a}\t{b}\t{c}",) for a, b, c in [("file", "outline", "case"), *rows]),
    )
    import_folder(tmp_path, ImportOptions(columns=Columns(mask="outline")))
    assert {
        (entry["image"], entry["label"], entry["patient"]) for entry in listed(tmp_path)
    } == set(rows)


@pytest.mark.parametrize(
    ("cell", "file", "named"),
    [
        ("001.png", "train/001.png", True),
        ("001", "train/001.png", True),
        ("set/train/001.png", "train/001.png", True),  # the cell begins above the folder
        ("..\\Train\\001.png", "train/001.png", True),
        ("D:\\export\\001.png", "001.png", True),
        ("test/001.png", "train/001.png", False),  # of the same name in another folder
        ("D:\\export\\p2\\001", "p1/001.png", False),
        ("/srv/test/001.png", "train/images/001.png", False),
    ],
)
def test_a_cell_names_a_file(cell: str, file: str, named: bool, tmp_path: Path) -> None:
    picture(tmp_path / "set" / file)
    path = table(tmp_path / "set/t.csv", ("image", "label"), (cell, "a"))
    dataset = read_tables([ImageTable(path, scan_folder(tmp_path / "set"))])
    assert [item.first for item in dataset.items] == [tmp_path / "set" / file] * named
    assert len(dataset.missing) == (not named) and all(
        repr(cell) in line for line in dataset.missing
    )


def test_the_file_with_the_most_common_folders_is_used(tmp_path: Path) -> None:
    cells = {
        "a/b/001.png": "a/b/001.png",
        "x/c/001.png": "c/001.png",
        "x/001.png": "001.png",
        "x/b/001.png": "b/001.png",
    }
    for file in cells.values():
        picture(tmp_path / file)
    path = table(tmp_path / "t.csv", ("image", "label"), *((cell, "a") for cell in cells))
    dataset = read_tables([ImageTable(path, scan_folder(tmp_path))])
    assert [item.first.relative_to(tmp_path).as_posix() for item in dataset.items] == list(
        cells.values()
    )
    (tmp_path / "001.png").unlink()
    table(path, ("image", "label"), ("001.png", "a"))
    with pytest.raises(DataError, match=r"001\.png"):
        read_tables([ImageTable(path, scan_folder(tmp_path))])


@pytest.mark.parametrize(
    ("header", "options", "token"),
    [
        (("image", "label"), {"columns": Columns(label="lable")}, "lable"),
        (("image", "label"), {"table": "a.csv"}, "9.png"),
        (("id", "polygon"), {"table": "a.csv"}, "--label-column"),
    ],
)
def test_a_table_that_does_not_fit_is_one_line(
    header: tuple[str, str], options: dict[str, Any], token: str, tmp_path: Path
) -> None:
    picture(tmp_path / "0.png")
    file = table(tmp_path / "a.csv", header, ("0.png", 1), ("9.png", 0))
    assert token in error_of(tmp_path, **options | ({"table": file} if "table" in options else {}))


def test_one_of_two_tables_must_be_chosen_and_other_tables_are_ignored(tmp_path: Path) -> None:
    classes(tmp_path)
    for name in ("a.csv", "b.csv"):
        table(tmp_path / name, ("image", "label"), ("p00_0.png", 1))
    assert "--table" in error_of(tmp_path)
    for name in ("a.csv", "b.csv"):
        table(tmp_path / name, ("image", "label"), ("test/0.png", 1))
    assert "a.csv" in import_folder(tmp_path).dataset.notes[0]


def test_unclear_folders_are_one_line(tmp_path: Path) -> None:
    assert "pictures.zip" in error_of(tmp_path / "pictures.zip")
    (tmp_path / "empty").mkdir()
    assert "empty" in error_of(tmp_path / "empty")
    picture(tmp_path / "loose" / "a.png")
    assert "loose" in error_of(tmp_path / "loose")
    assert "31" in error_of(
        classes(
            tmp_path / "many", patients=31, each=1, names=tuple(f"patient{n}" for n in range(31))
        )
    )
    picture(tmp_path / "twice" / "0.png")
    table(tmp_path / "twice" / "t.csv", ("image", "label"), ("0.png", 1), ("0", 0))
    assert "0.png" in error_of(tmp_path / "twice")


def test_a_classification_ignores_masks_on_request(tmp_path: Path) -> None:
    mask(classes(tmp_path) / "cat" / "p00_0_mask.png")
    assert "no mask" in error_of(tmp_path)
    report = import_folder(tmp_path, ImportOptions(kind="classification"))
    assert "1 masks are not used" in report.render() and len(listed(tmp_path)) == 40


@pytest.mark.parametrize(
    "patients", [("Müller1", "Möller1", "Meier2"), ("患者一", "患者二", "患者三")]
)
def test_folders_of_patients_whose_names_have_other_letters(
    patients: tuple[str, ...], tmp_path: Path
) -> None:
    for patient in patients:
        picture(tmp_path / patient / "image.png")
        mask(tmp_path / patient / "mask.png")
    import_folder(tmp_path)
    assert labels_of(tmp_path) == {f"{name}/image.png": f"{name}/mask.png" for name in patients}


def test_pictures_without_a_suffix_are_named(tmp_path: Path) -> None:
    """As some archives export them; DICOM files need none."""
    for number in range(12):
        file = picture(tmp_path / ("cat", "dog")[number % 2] / f"IMG_{number}.png")
        file.rename(file.with_suffix(""))
    (tmp_path / "cat" / "README").write_text("none")
    line = "left out, pictures without .png in their names: 12, the first: cat/IMG_0"
    assert line in error_of(tmp_path)
    classes(tmp_path)
    assert f"note: {line}" in import_folder(tmp_path).render()


@pytest.mark.parametrize(("copy", "remedy"), [(False, "with --copy"), (True, "free space there")])
def test_a_full_disk_is_named_with_what_helps(
    copy: bool, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(site_files.os, "link", full)
    monkeypatch.setattr(site_files.shutil, "copyfile", full)
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match=remedy):
        site_files._place(tmp_path / "a.png", tmp_path / "out" / "a.png", copy)
