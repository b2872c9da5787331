"""Data sets as hospitals and public archives deliver them: each is read as it is meant, or asked about in one line."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import ExifTags, Image

from helpers.downloaded_folders import mask, picture, table
from helpers.volume_sites import change, dicom_series, write
from medflare.cli import main
from medflare.preparation.dataset_import.chosen_structures import parse_structures
from medflare.preparation.dataset_import.names import shortened
from medflare.preparation.dataset_import.options import Columns
from medflare.preparation.proposing import TaskHints, propose
from preparation.dataset_import.test_segmentation_layouts import error_of, files, imported

NUMBERS = range(10)


def entries(root: Path) -> dict[str, dict[str, Any]]:
    """Image (or its first file) -> its entry with its split."""
    content = json.loads((root / "datalist.json").read_text())
    named = {}
    for split in ("training", "validation", "test"):
        for entry in content[split]:
            image = entry["image"]
            named[image if isinstance(image, str) else image[0]] = {**entry, "split": split}
    return named


# -- tables without labels -------------------------------------------------------------------------


def test_a_table_of_totalsegmentator_gives_splits_and_people(tmp_path: Path) -> None:
    for number in NUMBERS:
        for name in ("ct", "segmentations/liver", "segmentations/spleen"):
            files(tmp_path, f"s00{number:02}/{name}.nii.gz{'*' if '/' in name else ''}")
    lines = []
    for number in NUMBERS:
        split = "test" if number > 7 else "train"
        lines.append((f"s00{number:02}", 50 + number, "mf"[number % 2], split, "AB"[number % 2]))
    header = ("image_id", "age", "gender", "split", "institute")
    table(tmp_path / "meta.csv", header, *lines)
    imported(tmp_path)
    entry = entries(tmp_path)["s0008/ct.nii.gz"]
    assert (entry["split"], entry["age"], entry["sex"]) == ("test", 58, "male")
    out = tmp_path.parent / "sites"
    report = imported(tmp_path, columns=Columns(site="institute"), out=out)
    assert {site: len(items) for site, items in report.sites.items()} == {"A": 5, "B": 5}


def test_a_row_describes_the_images_whose_names_begin_with_its_patient(tmp_path: Path) -> None:
    for patient in NUMBERS:
        for number in range(3):
            home = tmp_path / f"TCGA_CS_{patient:04}_1996"
            picture(home / f"{home.name}_{number}.png")
            mask(home / f"{home.name}_{number}_mask.png")
    lines = [(f"TCGA_CS_{patient:04}", "MF"[patient % 2], 50 + patient) for patient in NUMBERS]
    table(tmp_path / "data.csv", ("Patient", "gender", "age"), *lines)
    imported(tmp_path)
    for image, entry in entries(tmp_path).items():
        patient = int(image[len("TCGA_CS_") :][:4])
        assert entry["patient"] == f"TCGA_CS_{patient:04}"
        assert (entry["sex"], entry["age"]) == (["male", "female"][patient % 2], 50 + patient)


def test_an_empty_first_cell_says_nothing_of_its_column(tmp_path: Path) -> None:
    """A first image without a mask; a second line of names, as in the tables of PAPILA."""
    for number in NUMBERS:
        picture(tmp_path / "images" / f"{number}.png")
        mask(tmp_path / "outlines" / f"m{number}.png")
    lines = [(f"{number}.png", f"m{number}.png" if number else "") for number in NUMBERS]
    table(tmp_path / "labels.csv", ("image", "label"), *lines)
    text = error_of(tmp_path)
    assert "column label names files, as 'm1.png'; give --mask-column label" in text
    assert len(imported(tmp_path, skip=True, columns=Columns(mask="label")).sites[""]) == 9
    eyes = tmp_path / "eyes"
    files(eyes, "images/RET{n}OD.png")
    for eye in ("od", "os"):
        table(eyes / f"{eye}.csv", ("ID", "refraction"), ("", "dioptre"), ("#002", "1"))
    text = error_of(eyes)
    assert text.count("names no image") == 1 and "as '#002' in column ID" in text


@pytest.mark.parametrize("each", [1, 3])
def test_a_table_describes_the_patients_of_the_table_of_labels(each: int, tmp_path: Path) -> None:
    labels = []
    for number in range(10 * each):
        picture(tmp_path / f"scan{number:02}.png", number)
        labels.append((f"scan{number:02}.png", "xy"[number % 2], f"P{number // each}"))
    table(tmp_path / "labels.csv", ("file", "label", "patient"), *labels)
    people = [(f"P{n}", "FM"[n % 2], ["train", "val", "test"][max(0, n - 7)]) for n in NUMBERS]
    table(tmp_path / "people.csv", ("patient", "sex", "split"), *people)
    imported(tmp_path)
    for image, entry in entries(tmp_path).items():
        patient = int(image[len("scan") :][:2]) // each
        split = {8: "validation", 9: "test"}.get(patient, "training")
        assert (entry["patient"], entry["split"]) == (f"P{patient}", split)
        assert entry["sex"] == ("female", "male")[patient % 2]


def test_a_row_describes_the_channels_of_its_patient(tmp_path: Path) -> None:
    """The cell is the whole name of the mask alone, as in nnU-Net's folders."""
    files(
        tmp_path, "imagesTr/P{n}_0000.nii.gz", "imagesTr/P{n}_0001.nii.gz", "labelsTr/P{n}.nii.gz*"
    )
    table(tmp_path / "people.csv", ("patient", "age"), *((f"P{n}", 50 + n) for n in NUMBERS))
    imported(tmp_path)
    found = entries(tmp_path)
    assert found["imagesTr/P7_0000.nii.gz"]["age"] == 57
    assert {entry["patient"] for entry in found.values()} == {f"P{n}" for n in NUMBERS}
    (tmp_path / "datalist.json").unlink()
    lines = [(f"P{n}", ("train", "test")[n > 7], 50 + n) for n in NUMBERS]
    table(tmp_path / "people.csv", ("patient", "split", "age"), *lines)
    text = error_of(tmp_path)
    assert "people.csv: imagesTr/P8_0000.nii.gz is in the split test, but in a folder of" in text
    report = imported(tmp_path, redraw=True)
    assert report.dataset.layout.endswith("people.csv: patient patient, age age")
    assert {item.split for item in report.sites[""]} == {"training", "validation", "test"}


def test_a_table_beside_that_of_the_labels_describes_the_images_of_one_split(
    tmp_path: Path,
) -> None:
    """ISIC 2017: the metadata have as many columns as the labels, which --label-column names."""
    lines = []
    for number in NUMBERS:
        picture(tmp_path / "images" / f"ISIC_{number}.png")
        lines.append((f"ISIC_{number}", number % 2, int(number % 3 == 0)))
    table(tmp_path / "Training_GroundTruth.csv", ("image_id", "melanoma", "keratosis"), *lines)
    people = [(f"ISIC_{number}", 50 + number, "male") for number in NUMBERS]
    table(tmp_path / "Training_metadata.csv", ("image_id", "age_approximate", "sex"), *people)
    imported(tmp_path, columns=Columns(label="melanoma,keratosis"))
    entry = entries(tmp_path)["images/ISIC_3.png"]
    assert (entry["label"], entry["sex"]) == ([1, 1], "male")
    (tmp_path / "datalist.json").unlink()
    others = [(name.replace("ISIC", "Test"), *cells) for name, *cells in lines]
    for name, *_ in others:
        picture(tmp_path / "images" / f"{name}.png")
    table(tmp_path / "Test_GroundTruth.csv", ("image_id", "mel", "sk"), *others)
    error = error_of(tmp_path, columns=Columns(label="melanoma,keratosis"))
    assert "Test_GroundTruth.csv: --label-column: unknown column 'melanoma'" in error


def test_a_table_that_describes_no_image_with_a_mask_is_not_used(tmp_path: Path) -> None:
    for number in NUMBERS:
        picture(tmp_path / f"{number:02}.png")
        mask(tmp_path / f"{number:02}_mask.png")
        picture(tmp_path / f"extra{number}.png")
    lines = [(f"extra{number}.png", number // 2, "MF"[number % 2]) for number in NUMBERS]
    table(tmp_path / "data.csv", ("image", "patient", "sex"), *lines)
    table(tmp_path / "all.csv", ("image", "sex"), *((f"other{n}.png", "F") for n in range(40)))
    report = imported(tmp_path, skip=True)
    assert "csv" not in report.dataset.layout
    [note] = [line for line in report.dataset.notes if "csv" in line]
    assert "all.csv: column image names no image with a mask or label, as 'other0.png'" in note
    (tmp_path / "all.csv").unlink()
    (tmp_path / "datalist.json").unlink()
    error = error_of(tmp_path, skip=True, columns=Columns(patient="patient"))
    assert "column image names no image with a mask or label, as 'extra0.png'" in error
    table(tmp_path / "ids.csv", ("image", "id"), *((f"{n:02}.png", n // 2) for n in NUMBERS))
    imported(tmp_path, skip=True, columns=Columns(patient="id"))
    assert entries(tmp_path)["05.png"]["patient"] == "2"
    for name in ("datalist.json", "ids.csv"):
        (tmp_path / name).unlink()
    named = [(f"{number:02}.png", *cells) for number, cells in enumerate(lines)]
    table(tmp_path / "data.csv", ("name", "image", "patient", "sex"), *named)
    imported(tmp_path, skip=True, columns=Columns(image="name", patient="patient"))
    assert entries(tmp_path)["04.png"]["patient"] == "2"


def test_a_table_of_bids_describes_its_participants(tmp_path: Path) -> None:
    for number in NUMBERS:
        subject = f"sub-{number:02}"
        for session in ("ses-1", "ses-2"):
            name = f"{subject}/{session}/anat/{subject}_{session}"
            files(tmp_path, f"{name}_T1w.nii.gz")
            files(tmp_path, f"derivatives/manual/{name}_label-lesion_mask.nii.gz*")
    rows = [(f"sub-{number:02}", 40 + number, "F") for number in NUMBERS]
    table(tmp_path / "participants.tsv", ("participant_id", "age", "sex"), *rows)
    report = imported(tmp_path)
    assert report.dataset.structure == "lesion" and not report.warnings
    entry = entries(tmp_path)["sub-03/ses-2/anat/sub-03_ses-2_T1w.nii.gz"]
    assert (entry["patient"], entry["age"], entry["sex"]) == ("sub-03", 43, "female")


def test_a_table_that_cannot_describe_the_images_is_noted(tmp_path: Path) -> None:
    files(tmp_path, "s0{n}/ct.nii.gz", "s0{n}/segmentation.nii.gz*")
    rows = [("s01", 50), ("s01", 60), *[(f"s0{number}", 50) for number in range(2, 10)]]
    table(tmp_path / "meta.csv", ("patient", "age"), *rows)
    (tmp_path / "damaged.csv").write_bytes(b"\xff\xfe\x00")
    text = imported(tmp_path).render()
    assert "note: not used: " in text and "line 3: says something else of s01/ct.nii.gz" in text
    assert "damaged.csv: cannot be read as a table" in text
    assert "age" not in entries(tmp_path)["s01/ct.nii.gz"]
    for name in ("datalist.json", "damaged.csv"):
        (tmp_path / name).unlink()
    options = {"columns": Columns(site="hospital"), "out": tmp_path.parent / "sites"}
    assert "hospital" in error_of(tmp_path, **options)


@pytest.mark.parametrize("options", [{}, {"columns": Columns(label="tumor")}])
def test_names_that_several_columns_compose_are_to_be_written(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Camelyon17-WILDS, whose table begins with the index of pandas."""
    lines = []
    for number in NUMBERS:
        picture(tmp_path / f"p/patch_{number % 5:03}_x_{33 * number}.png", number)
        lines.append((number, f"{number % 5:03}", 33 * number, number % 2, number // 5))
    header = ("", "patient", "x_coord", "tumor", "node")
    table(tmp_path / "metadata.csv", header, *lines)
    text = error_of(tmp_path, **options)
    assert "metadata.csv names no image of the folder, as '000' in column patient" in text
    assert "write the names of images in a column image, as p/patch_000_x_0.png" in text
    assert "unnamed" not in text


# -- tables that name files in other ways ----------------------------------------------------------


def graded(root: Path, names: list[str]) -> list[tuple[str, str]]:
    for name in names:
        picture(root / name)
    return [(name, "ab"[number % 2]) for number, name in enumerate(names)]


def test_numbers_that_excel_has_shortened_name_files(tmp_path: Path) -> None:
    graded(tmp_path, [f"{number:03}.png" for number in NUMBERS])
    table(tmp_path / "t.csv", ("image", "label"), *[(n, "ab"[n % 2]) for n in NUMBERS])
    assert len(imported(tmp_path).sites[""]) == 10
    assert entries(tmp_path)["007.png"]["label"] == 1


@pytest.mark.parametrize(
    "cell",
    ["{p}", "data/{p}", "data\\{p}\\", "{p}/study1", "{root}/data/{p}/", "x/y/data/{p}/study1/"],
)
def test_a_row_of_a_folder_is_of_all_its_images(cell: str, tmp_path: Path) -> None:
    for number in NUMBERS:
        for view in "ab":
            picture(tmp_path / "data" / f"pat{number:02}" / "study1" / f"{view}.png")
    rows = []
    for number in NUMBERS:
        named = cell.format(p=f"pat{number:02}", root=tmp_path.name)
        rows.append((named, "xy"[number % 2]))
    table(tmp_path / "t.csv", ("study", "label"), *rows)
    report = imported(tmp_path)
    assert len(entries(tmp_path)) == 20 and "not used" not in report.render()
    splits: dict[str, set[str]] = {}
    for image, entry in entries(tmp_path).items():
        splits.setdefault(image.split("/")[1], set()).add(entry["split"])
    assert all(len(of_patient) == 1 for of_patient in splits.values())


def test_two_series_of_a_patient_stay_in_one_split(tmp_path: Path) -> None:
    """As the error asks, the table has whole paths in the column of patients."""
    rows = []
    for number in NUMBERS:
        for series in "ab":
            folder = tmp_path / f"p{number}" / series
            folder.parent.mkdir(exist_ok=True)
            uid = f"1.2.{number}.{ord(series)}"
            change(dicom_series(folder), PatientID=f"P{number}", SeriesInstanceUID=uid)
            rows.append((f"p{number}/{series}", number % 2))
    table(tmp_path / "t.csv", ("PatientID", "label"), *rows)
    imported(tmp_path)
    named = entries(tmp_path)
    for number in NUMBERS:
        pair = [named[f"p{number}/{series}"] for series in "ab"]
        assert pair[0]["split"] == pair[1]["split"] and pair[0]["patient"] == f"P{number}"


def test_a_row_without_a_site_is_incomplete(tmp_path: Path) -> None:
    names = graded(tmp_path / "i", [f"{number}.png" for number in range(16)])
    rows = [(*row, "AB"[number // 8]) for number, row in enumerate(names)]
    rows[0] = (*rows[0][:2], "")
    table(tmp_path / "i" / "t.csv", ("image", "label", "clinic"), *rows)
    options = {"columns": Columns(site="clinic"), "out": tmp_path / "out"}
    assert "line 2: no site" in error_of(tmp_path / "i", **options)
    assert [*imported(tmp_path / "i", skip=True, **options).sites] == ["A", "B"]


def test_a_title_above_the_names_of_columns_is_refused(tmp_path: Path) -> None:
    rows = [(name, label, "") for name, label in graded(tmp_path, [f"{n}.png" for n in NUMBERS])]
    table(tmp_path / "t.csv", ("Export of 3 May", "", ""), ("image", "label", "note"), *rows)
    assert "take lines above the names of columns out" in error_of(tmp_path)


def test_a_table_elsewhere_that_names_no_image(tmp_path: Path) -> None:
    graded(tmp_path / "i", [f"{number}.png" for number in NUMBERS])
    other = table(
        tmp_path / "other.csv", ("image", "label"), *[(f"x{n}", "ab"[n % 2]) for n in NUMBERS]
    )
    assert "other.csv names no image of the folder" in error_of(tmp_path / "i", table=other)


# -- a table beside the folders of sites -----------------------------------------------------------


@pytest.mark.parametrize("tables", [1, 2])
def test_tables_beside_the_folders_of_sites(tables: int, tmp_path: Path) -> None:
    rows = []
    for site in ("north", "south"):
        rows += [(f"{site}{n}.png", "xy"[n % 2]) for n in NUMBERS]
        for number in NUMBERS:
            picture(tmp_path / site / f"{site}{number}.png")
    for number in range(tables):
        part = rows[number * 10 :] if number == tables - 1 else rows[:10]
        table(tmp_path / f"base{number}.csv", ("image", "grade"), *part)
    report = imported(tmp_path, site_folders=True)
    assert {site: len(items) for site, items in report.sites.items()} == {"north": 10, "south": 10}
    assert entries(tmp_path / "south")["south3.png"]["label"] == 1
    for site in ("north", "south"):
        (tmp_path / site / "datalist.json").unlink()
    (tmp_path / "south" / "south3.png").unlink()
    assert "no file for 'south3.png'" in error_of(tmp_path, site_folders=True)


# -- patients --------------------------------------------------------------------------------------


def test_folders_of_patients_are_proposed_and_found(tmp_path: Path) -> None:
    files(tmp_path, "Pat 0{n}/2019/scan.nii.gz", "Pat 0{n}/2019/mask.nii.gz*")
    files(tmp_path, "Pat 0{n}/2020/scan.nii.gz", "Pat 0{n}/2020/mask.nii.gz*")
    [warning] = imported(tmp_path).warnings
    assert "--patient '^([^/]+)/' (if the folders Pat 00, ... are patients)" in warning
    for pattern in ("^([^/]+)/", r"(Pat \d+)"):
        report = imported(tmp_path, patient=pattern, force=True)
        assert (
            not report.warnings
            and entries(tmp_path)["Pat 03/2020/scan.nii.gz"]["patient"] == "Pat 03"
        )


def test_patients_in_two_spellings_are_refused(tmp_path: Path) -> None:
    rows = [
        (name, grade, "P01" if n == 3 else f"p0{n // 2}")
        for n, (name, grade) in enumerate(graded(tmp_path, [f"{n}.png" for n in NUMBERS]))
    ]
    table(tmp_path / "t.csv", ("image", "label", "patient"), *rows)
    assert "patients p01 and P01 are one name" in error_of(tmp_path)


def test_a_site_without_validation_as_its_patients_train_elsewhere(tmp_path: Path) -> None:
    rows = []
    for number, (name, grade) in enumerate(graded(tmp_path / "i", [f"{n}.png" for n in range(24)])):
        rows.append((name, grade, f"p{number % 18}", "AB"[number // 18]))
    table(tmp_path / "i" / "t.csv", ("image", "label", "patient", "clinic"), *rows)
    options = {"columns": Columns(site="clinic"), "out": tmp_path / "out", "seed": 5}
    report = imported(tmp_path / "i", **options)
    assert "validation" not in {item.split for item in report.sites["B"]}
    assert "B: no validation image, as patients have one split at all sites" in report.warnings


# -- splits ----------------------------------------------------------------------------------------


def test_short_names_of_splits_are_read(tmp_path: Path) -> None:
    for split, number in (("Tr", 0), ("Va", 1), ("Ts", 2)):
        files(
            tmp_path,
            f"{split}/images/{number}{{n}}.nii.gz",
            f"{split}/labels/{number}{{n}}.nii.gz*",
        )
    report = imported(tmp_path)
    splits = {image[:2]: entry["split"] for image, entry in entries(tmp_path).items()}
    assert splits == {"Tr": "training", "Va": "validation", "Ts": "test"} and report.guessed


def test_a_folder_that_may_be_a_split_is_asked_about(tmp_path: Path) -> None:
    for folder, number in (("set-a-train", 0), ("heldout", 1)):
        files(
            tmp_path,
            f"{folder}/images/{number}{{n}}.nii.gz",
            f"{folder}/labels/{number}{{n}}.nii.gz*",
        )
    text = error_of(tmp_path)
    assert "in no folder of a split, but others are: heldout/" in text and "--redraw" in text


def test_validation_images_alone_are_refused(tmp_path: Path) -> None:
    for number in NUMBERS:
        picture(tmp_path / "val" / "ab"[number % 2] / f"{number}.png")
    text = error_of(tmp_path)
    assert "no image is for training" in text and "--redraw" in text
    assert len(imported(tmp_path, redraw=True).sites[""]) == 10


# -- masks and channels ----------------------------------------------------------------------------


def test_without_masks_the_error_says_how_they_are_called(tmp_path: Path) -> None:
    files(tmp_path, "{n}.nii.gz")
    text = error_of(tmp_path, kind="segmentation")
    assert "none of 10 images is called as masks are" in text and "--mask-column" in text


def test_a_channel_that_a_hospital_lacks_is_null_there(tmp_path: Path) -> None:
    for site, channels in (("A", ("flair", "t1", "t2")), ("B", ("t1", "t2"))):
        for channel in (*channels, "seg*"):
            name = channel.rstrip("*")
            star = "*" if channel.endswith("*") else ""
            files(tmp_path, f"{site}/p{{n}}/p{{n}}_{name}.nii.gz{star}")
    (tmp_path / "A" / "p3" / "p3_t1.nii.gz").unlink()
    text = imported(tmp_path, site_folders=True).render()
    assert (
        "B: no file of channel flair" in text and "A: 1 images lack a file of channel t1 " in text
    )
    assert "(null in datalist), the first: p3/p3_flair.nii.gz" in text
    content = json.loads((tmp_path / "B" / "datalist.json").read_text())
    assert content["channel_names"] == {"0": "flair", "1": "t1", "2": "t2"}
    image = content["training"][0]["image"]
    assert image[0] is None and [name.rpartition("_")[2] for name in image[1:]] == [
        "t1.nii.gz",
        "t2.nii.gz",
    ]
    assert entries(tmp_path / "A")["p3/p3_flair.nii.gz"]["image"][1] is None


# -- what is said of the images --------------------------------------------------------------------


@pytest.mark.parametrize("source", ["header", "dicom"])
def test_a_ct_without_air_is_a_ct(source: str, tmp_path: Path) -> None:
    for number in NUMBERS:
        folder = tmp_path / "xy"[number % 2] / f"{number}"
        folder.parent.mkdir(exist_ok=True)
        if source == "dicom":
            change(
                dicom_series(folder), PatientID=f"P{number}", SeriesInstanceUID=f"1.2.3.{number}"
            )
    if source == "header":
        shutil.rmtree(tmp_path / "x")
        shutil.rmtree(tmp_path / "y")
        files(tmp_path, "imagesTr/{n}_0000.nii.gz", "labelsTr/{n}.nii.gz*")
        header = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "liver": 1}}
        (tmp_path / "dataset.json").write_text(json.dumps(header))
    imported(tmp_path)
    reasons = [
        choice for choice in propose(tmp_path, TaskHints()).choices if choice.setting == "modality"
    ]
    assert [choice.value for choice in reasons] == ["ct"]


def test_volumes_without_a_spacing_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path, "{n}.nii.gz", "{n}_seg.nii.gz*")
    for name in ("3.nii.gz", "3_seg.nii.gz"):
        image = nibabel.load(tmp_path / name)
        array = np.asanyarray(image.dataobj)
        plain = nibabel.Nifti1Image(array, None)
        plain.header["pixdim"][1:4] = 0
        nibabel.save(plain, tmp_path / name)
    imported(tmp_path)
    assert main(["data", "check", str(tmp_path)]) == 0
    assert "1 images give no spacing, so distances are in voxels" in capsys.readouterr().out


def test_tilted_volumes_are_listed_as_one_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path, "{n}.nii.gz", "{n}_seg.nii.gz*")
    tilted = np.eye(4)
    tilted[1:3, 1:3] = [[0.77, -0.64], [0.64, 0.77]]
    for file in tmp_path.glob("*.nii.gz"):
        image = nibabel.load(file)
        nibabel.save(nibabel.Nifti1Image(np.asanyarray(image.dataobj), tilted), file)
    imported(tmp_path)
    assert main(["data", "check", str(tmp_path)]) == 1
    (problem,) = capsys.readouterr().out.splitlines()
    assert problem.startswith(f"PROBLEM: 20 alike, the first: {tmp_path}")


def test_every_file_that_cannot_be_read_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path, "{n}.png", "{n}_mask.png*")
    imported(tmp_path)
    for name in ("1.png", "4_mask.png"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:60])
    assert main(["data", "check", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert [line.partition(":")[0] for line in shown.out.splitlines()].count("PROBLEM") == 2
    assert "no task can be proposed" in shown.err and "--task" not in shown.err
    assert main(["task", "init", str(tmp_path), "--out", str(tmp_path / "task.json")]) == 1
    assert "medflare data check DATA lists all such files" in capsys.readouterr().err


# -- tables beside folders of splits ---------------------------------------------------------------


@pytest.mark.parametrize("columns", ["path", "name", "mask"])
def test_folders_of_splits_under_a_table_are_kept(columns: str, tmp_path: Path) -> None:
    """Before, the images of train/ and test/ were mixed."""
    rows = []
    for number in range(20):
        folder = "test_images" if number > 13 else "train_images"
        path = f"{folder}/{number:03}.png"
        picture(tmp_path / path, 60 + number)
        if columns == "mask":
            files(tmp_path, f"masks/{number:03}.png*")
        label = f"masks/{number:03}.png" if columns == "mask" else "ab"[number % 2]
        rows.append((f"{number:03}" if columns == "name" else path, label))
    header = ("image", "mask" if columns == "mask" else "label")
    table(tmp_path / "labels.csv", header, *rows)
    imported(tmp_path)
    for path, entry in entries(tmp_path).items():
        assert (entry["split"] == "test") == path.startswith("test_images")
    imported(tmp_path, redraw=True, force=True)
    tested = [path for path, entry in entries(tmp_path).items() if entry["split"] == "test"]
    assert any(path.startswith("train") for path in tested)


def test_a_table_that_contradicts_folders_is_refused(tmp_path: Path) -> None:
    rows = []
    for number in NUMBERS:
        split = "test" if number > 6 else "train"
        picture(tmp_path / f"{split}/{number}.png", 60 + number)
        rows.append((f"{split}/{number}.png", "ab"[number % 2], "train"))
    path = table(tmp_path / "t.csv", ("image", "label", "split"), *rows)
    assert "test/7.png is in the split training, but in a folder of test" in error_of(tmp_path)
    path.unlink()
    classes = tmp_path / "classes"
    pairs = []
    for number in NUMBERS:
        name = "ab"[number % 2]
        picture(classes / f"{name}/{number}.png", 60 + number)
        pairs.append((f"{number}.png", "a" if number == 3 else name))
    table(classes / "t.csv", ("image", "label"), *pairs)
    assert "b/3.png is a, but in the folder of b" in error_of(classes)
    imported(classes, columns=Columns(label="label"))
    assert entries(classes)["b/3.png"]["label"] == 0


@pytest.mark.parametrize("damage", ["title", "encoding", "header"])
def test_a_damaged_table_of_a_split_stops_the_import(damage: str, tmp_path: Path) -> None:
    """Before, the other table alone was used, and test images were drawn from its rows."""
    for split in ("train", "test"):
        rows = []
        for number in NUMBERS:
            picture(tmp_path / split / f"{split[:2]}{number}.png", 60 + number)
            rows.append((f"{split[:2]}{number}.png", "ab"[number % 2]))
        table(tmp_path / f"{split}.csv", ("image", "label"), *rows)
    imported(tmp_path)
    (tmp_path / "datalist.json").unlink()
    lines = (tmp_path / "test.csv").read_text()
    if damage == "title":
        (tmp_path / "test.csv").write_text("Study 7,\n" + lines)
    elif damage == "encoding":
        (tmp_path / "test.csv").write_bytes(lines.encode() + b"\xe4.png,a\n")
    else:
        (tmp_path / "test.csv").write_text(lines.partition("\n")[2])
    assert "test.csv" in error_of(tmp_path)


def test_a_list_of_test_images_without_labels_is_no_table_of_labels(tmp_path: Path) -> None:
    """As Kaggle's train.csv and test.csv."""
    for number in range(20):
        picture(tmp_path / "images" / f"{number:02}.png", 60 + number)
    rows = [(f"{number:02}", "ab"[number % 2]) for number in range(14)]
    table(tmp_path / "train.csv", ("id_code", "diagnosis"), *rows)
    table(tmp_path / "test.csv", ("id_code",), *[(f"{number:02}",) for number in range(14, 20)])
    report = imported(tmp_path)
    assert len(entries(tmp_path)) == 14
    assert any("6 of 20 files have no complete row" in note for note in report.dataset.notes)


def test_a_table_of_test_images_beside_folders_of_classes_is_refused(tmp_path: Path) -> None:
    """It would leave nothing to train on."""
    for number in range(16):
        folder = f"train/{'ab'[number % 2]}" if number < 10 else "test"
        picture(tmp_path / folder / f"{number:02}.png", 60 + number)
    rows = [(f"{number:02}.png", "ab"[number % 2]) for number in range(10, 16)]
    table(tmp_path / "test.csv", ("file", "label"), *rows)
    problem = error_of(tmp_path)
    assert "no image to train on" in problem and "10 of 16 files" in problem
    assert not (tmp_path / "datalist.json").exists()


def test_one_label_column_may_have_another_name_in_each_table(tmp_path: Path) -> None:
    for split, name in (("train", "label"), ("test", "class")):
        rows = []
        for number in NUMBERS:
            picture(tmp_path / f"{split[:2]}{number}.png", 60 + number)
            rows.append((f"{split[:2]}{number}.png", "ab"[number % 2]))
        table(tmp_path / f"{split}.csv", ("image", name), *rows)
    imported(tmp_path)
    of_test = [name for name, entry in entries(tmp_path).items() if entry["split"] == "test"]
    assert sorted(of_test) == [f"te{number}.png" for number in NUMBERS]


@pytest.mark.parametrize(
    ("trained", "tested", "problem"),
    [
        (("benign", "malignant"), ("0.0", "1.0"), "benign, malignant, only test images 0, 1"),
        (("no", "ca_left.lobe_T2"), ("no", "ca"), "ca_left.lobe_T2, only test images ca"),
    ],
)
def test_classes_of_one_split_that_may_be_another_are_refused(
    trained: tuple[str, str], tested: tuple[str, str], problem: str, tmp_path: Path
) -> None:
    """As ISIC 2016: benign and malignant in training, 0.0 and 1.0 in the test."""
    for split, names in (("train", trained), ("test", tested)):
        rows = []
        for number in NUMBERS:
            picture(tmp_path / f"{split[:2]}{number}.png", 60 + number)
            rows.append((f"{split[:2]}{number}.png", names[number % 2]))
        table(tmp_path / f"{split}.csv", ("image", "label"), *rows)
    assert f"only training images have the classes {problem}" in error_of(tmp_path)


# -- cells of tables -------------------------------------------------------------------------------


def test_two_columns_of_images_are_asked_about(tmp_path: Path) -> None:
    """Before, all right eyes were left out."""
    rows = []
    for number in NUMBERS:
        for eye in "lr":
            picture(tmp_path / f"{number}_{eye}.png", 60 + number)
        rows.append((f"p{number}", f"{number}_l.png", f"{number}_r.png", number % 2))
    table(tmp_path / "t.csv", ("patient", "image_left", "image_right", "dr_grade"), *rows)
    assert "image_left and image_right both name images" in error_of(tmp_path)


def test_a_label_column_with_files_and_one_of_measurements_are_refused(tmp_path: Path) -> None:
    rows = []
    measured = []
    for number in NUMBERS:
        picture(tmp_path / f"images/{number}.png", 60 + number)
        files(tmp_path, f"seg/q{7 * number}.png*")
        rows.append((f"images/{number}.png", f"seg/q{7 * number}.png"))
        measured.append((f"images/{number}.png", number + 0.37))
    path = table(tmp_path / "t.csv", ("image", "label"), *rows)
    assert "give --mask-column label" in error_of(tmp_path)
    table(path, ("image", "label"), *measured)
    text = error_of(tmp_path, kind="classification")
    assert "has 10 values, for example '0.37'" in text and len(text) < 300


def test_comments_above_a_table_and_empty_columns_behind_it(tmp_path: Path) -> None:
    rows = []
    for number in NUMBERS:
        picture(tmp_path / f"{number}.png", 60 + number)
        rows.append(f"{number}.png,{'ab'[number % 2]},,,,")
    text = "\n".join(["image,label,,,,", *rows])
    (tmp_path / "t.csv").write_text(f"# exported 2021-03-01, by PACS\n{text}")
    assert "begins with #; take it out" in error_of(tmp_path)
    (tmp_path / "t.csv").write_text(text)
    imported(tmp_path)
    assert len(entries(tmp_path)) == 10


# -- patients --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "proposed"),
    [
        ("patient{n:05}/study1/view1.png", False),  # one image each; before: the folder study1
        ("patient{n2:05}/study{n}/view1.png", True),
        ("ISIC2018_Task1-2_Training_Input/{n}.png", False),
        ("fold{n2}/{n}.png", False),
    ],
)
def test_only_folders_of_patients_are_proposed_as_patients(
    path: str, proposed: bool, tmp_path: Path
) -> None:
    rows = []
    for number in NUMBERS:
        name = path.format(n=number, n2=number // 2)
        picture(tmp_path / name, 60 + number)
        rows.append((name, "ab"[number % 2]))
    table(tmp_path / "t.csv", ("image", "label"), *rows)
    [warning] = [line for line in imported(tmp_path).warnings if "--patient" in line]
    assert ("are patients" in warning) == proposed


def test_left_and_right_after_a_number_are_eyes(tmp_path: Path) -> None:
    files(tmp_path, "images/Image_{n}L.png", "images/Image_{n}R.png")
    files(tmp_path, "masks/Image_{n}L.png*", "masks/Image_{n}R.png*")
    imported(tmp_path)
    assert {entry["patient"] for entry in entries(tmp_path).values()} == {
        f"Image_{number}" for number in NUMBERS
    }


# -- masks, volumes and their tables ---------------------------------------------------------------


def test_classes_in_a_table_beside_masks_are_asked_about(tmp_path: Path) -> None:
    """As TotalSegmentator's meta.csv with pathologies; before: a classification."""
    for number in NUMBERS:
        for name in ("ct", "segmentations/liver", "segmentations/spleen"):
            files(tmp_path, f"s00{number:02}/{name}.nii.gz{'*' if '/' in name else ''}")
    rows = [(f"s00{number:02}", "ab"[number % 2], 40 + number) for number in NUMBERS]
    table(tmp_path / "meta.csv", ("image_id", "pathology", "age"), *rows)
    text = error_of(tmp_path)
    assert "pathology can be the class, but masks lie beside the images" in text
    imported(tmp_path, kind="segmentation")
    assert entries(tmp_path)["s0003/ct.nii.gz"]["age"] == 43


def test_two_tables_with_other_sites_are_refused(tmp_path: Path) -> None:
    """As the two partitionings of FeTS; before: the last one counted."""
    files(tmp_path, "p{n4}.png", "p{n4}_seg.png*")
    for number, sites in ((1, 2), (2, 3)):
        rows = [(f"{index % sites + 1}", f"p{index:04}") for index in NUMBERS]
        table(tmp_path / f"partitioning_{number}.csv", ("Partition_ID", "Subject_ID"), *rows)
    out = tmp_path.parent / "out"
    text = error_of(tmp_path, columns=Columns(site="Partition_ID"), out=out)
    assert "partitioning_2.csv: p0002.png is at site 3, in another table at 1" in text


def test_versions_and_copies_of_an_image_are_refused(tmp_path: Path) -> None:
    files(tmp_path, "Images/{n}.png", "Masks/{n}.png*")
    imported(tmp_path)
    files(tmp_path, "Images_Cropped/{n}.png", "Masks_Cropped/{n}.png*")
    (tmp_path / "datalist.json").unlink()
    text = error_of(tmp_path)
    assert "Images/0.png and Images_Cropped/0.png seem to be versions of one picture" in text
    formats = tmp_path / "formats"
    files(formats, "PNG/Original/{n}.png", "PNG/Ground Truth/{n}.png*")
    files(formats, "TIF/Original/{n}.tif", "TIF/Ground Truth/{n}.tif*")
    assert "0.tif seem to be versions of one picture; give the folder" in error_of(formats)
    masked = tmp_path / "masked"
    files(masked, "jpg/{n}.jpg", "png/{n}.png*")
    assert "give --kind segmentation if they are masks" in error_of(masked)
    structures = tmp_path / "structures"
    files(structures, "original/{n}.png", "disc/{n}.png*", "cup/{n}.png*")
    assert "give --kind segmentation if they are masks" in error_of(structures)
    copied = tmp_path / "copied"
    files(copied, "imagesTr/p{n}_0000.nii.gz", "labelsTr/p{n}.nii.gz*")
    shutil.copy(copied / "imagesTr/p3_0000.nii.gz", copied / "imagesTr/p3_0000.nii")
    assert "p3_0000.nii and imagesTr/p3_0000.nii.gz would both have" in error_of(copied)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_data_set_that_is_divided_in_two_ways_is_refused(suffix: str, tmp_path: Path) -> None:
    """RIM-ONE DL: the true answer to a question about its folders would double every image."""
    for number in NUMBERS:
        draw = np.random.default_rng(number)
        pixels = np.sort(draw.integers(0, 255, (16, 16), np.uint8))
        for way, split in (("by_hospital", number < 5), ("randomly", number % 3)):
            folder = tmp_path / way / ("train" if split else "test") / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
    text = error_of(tmp_path)
    assert "by_hospital and randomly hold the same 10 pictures" in text
    assert text.endswith("leave one folder out, as with --leave-out randomly")
    assert "the same 10" in error_of(tmp_path, kind="classification")
    picture(next(tmp_path.glob("randomly/*/a/0.*")))  # another one of this name
    assert "each of by_hospital, randomly holds the folders a, b" in error_of(tmp_path)
    assert len(imported(tmp_path, leave_out=("randomly",)).dataset.items) == 10


@pytest.mark.parametrize(("copy", "number"), [("A (2)", 3), ("New folder", 1), ("Copy of nv", 5)])
def test_the_copy_and_no_class_is_to_be_left_out(copy: str, number: int, tmp_path: Path) -> None:
    for count in NUMBERS:
        pixels = np.random.default_rng(count).integers(0, 255, (16, 16), np.uint8)
        file = tmp_path / ("mel", "nv")[count % 2] / f"{count}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(file)
    (tmp_path / copy).mkdir()
    for file in sorted((tmp_path / "nv").iterdir())[:number]:
        shutil.copy(file, tmp_path / copy)
    assert error_of(tmp_path).endswith(
        f"hold the same {number} pictures; leave one folder out, as with --leave-out '{copy}'"
    )
    assert len(imported(tmp_path, leave_out=(copy,)).dataset.items) == 10


@pytest.mark.parametrize(
    ("home", "copy"), [("kaggle_3m", "lgg-mri-segmentation/kaggle_3m"), ("", "Z"), ("", "A")]
)
def test_a_data_set_that_lies_in_itself_is_refused(home: str, copy: str, tmp_path: Path) -> None:
    """As in Kaggle's LGG, whose copy is called as masks are."""
    for number in NUMBERS:
        draw = np.random.default_rng(number).integers(0, 255, (16, 16), np.uint8)
        for folder in (tmp_path / home, tmp_path / copy):
            path = folder / f"P{number}" / f"P{number}.tif"
            mask(path.with_name(f"P{number}_mask.tif"))
            Image.fromarray(draw).save(path)
    top = copy.split("/")[0]
    text = error_of(tmp_path)
    assert text.startswith(f"{tmp_path} and {top} hold the same 10 pictures; leave one")
    assert len(imported(tmp_path, leave_out=(top,)).dataset.items) == 10


def test_masks_of_many_objects_and_ignored_voxels_are_refused(tmp_path: Path) -> None:
    """As the Data Science Bowl 2018, and nnU-Net's label "ignore"."""
    for number in NUMBERS:
        files(
            tmp_path,
            f"a{number}/images/a{number}.png",
            f"a{number}/masks/{91 * number:x}e{{n}}.png*",
        )
    assert "holds 10 masks of one image; unite the masks" in error_of(tmp_path)
    ignored = tmp_path / "ignored"
    files(ignored, "imagesTr/p{n}_0000.nii.gz", "labelsTr/p{n}.nii.gz*")
    labels = {"background": 0, "tumour": 1, "ignore": 2}
    content = {"channel_names": {"0": "T1"}, "labels": labels}
    (ignored / "dataset.json").write_text(json.dumps(content))
    assert "the label ignore cannot be left out of training" in error_of(ignored)


def test_the_column_of_images_is_the_one_that_names_each_alone(tmp_path: Path) -> None:
    """As ADNI's table, whose subjects have several images."""
    rows = []
    for number in NUMBERS:
        subject = f"{number // 2:03}_S_{number // 2:04}"
        files(tmp_path, f"{subject}/I{number + 100}/t1_{number}.nii.gz")
        rows.append((f"I{number + 100}", subject, "AB"[number // 2 % 2]))
    table(tmp_path / "adni.csv", ("Image Data ID", "Subject", "Group"), *rows)
    imported(tmp_path, columns=Columns(label="Group"), kind="classification")
    assert {entry["patient"] for entry in entries(tmp_path).values()} == {row[1] for row in rows}


def test_a_second_table_describes_the_images_of_the_first(tmp_path: Path) -> None:
    """As ISIC 2019: lesions and ages beside the table of classes."""
    labels = []
    people = []
    for number in NUMBERS:
        picture(tmp_path / f"i{number}.png", 60 + number)
        labels.append((f"i{number}", "ab"[number // 2 % 2]))
        people.append((f"i{number}", f"L{number // 2}", 40 + number))
    table(tmp_path / "GroundTruth.csv", ("image", "label"), *labels)
    table(tmp_path / "Metadata.csv", ("image", "lesion", "age_approx"), *people)
    imported(tmp_path)
    assert entries(tmp_path)["i3.png"]["patient"] == "L1"
    assert entries(tmp_path)["i3.png"]["age"] == 43
    table(tmp_path / "Metadata.csv", ("image", "lesion_no", "age_approx"), *people)
    imported(tmp_path, columns=Columns(patient="lesion_no"), force=True)
    assert entries(tmp_path)["i3.png"]["patient"] == "L1"


def test_tables_named_after_splits_give_the_splits_of_masks(tmp_path: Path) -> None:
    """As SIIM-ACR: the column of the files has no usual name."""
    for split, numbers in (("train", range(12)), ("test", range(12, 20))):
        rows = []
        for number in numbers:
            files(tmp_path, f"png_images/{number}_x.png", f"png_masks/{number}_x.png*")
            rows.append((f"1.2.{number}", f"{number}_x.png"))
        table(tmp_path / f"stage_1_{split}_images.csv", ("ImageId", "new_filename"), *rows)
    imported(tmp_path)
    listed = entries(tmp_path)
    assert listed["png_images/13_x.png"]["split"] == "test"
    assert listed["png_images/3_x.png"]["split"] != "test"


def test_a_row_of_a_patient_is_of_all_its_sessions(tmp_path: Path) -> None:
    """As participants.tsv of BIDS; images of two kinds are refused."""
    rows = []
    for number in NUMBERS:
        for session in (1, 2):
            name = f"sub-{number:02}/ses-{session}/anat/sub-{number:02}_ses-{session}"
            files(tmp_path, f"{name}_T1w.nii.gz")
        rows.append((f"sub-{number:02}", "ab"[number % 2]))
    table(tmp_path / "participants.csv", ("participant_id", "group"), *rows)
    imported(tmp_path, columns=Columns(label="group"))
    listed = entries(tmp_path)
    assert len(listed) == 20
    first, second = [listed[f"sub-03/ses-{n}/anat/sub-03_ses-{n}_T1w.nii.gz"] for n in (1, 2)]
    assert first == {**second, "image": first["image"]} and first["patient"] == "sub-03"
    files(tmp_path, "sub-03/ses-1/anat/sub-03_ses-1_T2w.nii.gz")
    (tmp_path / "datalist.json").unlink()
    assert "'sub-03' can be" in error_of(tmp_path, columns=Columns(label="group"))


# -- tables of patients and studies ----------------------------------------------------------------


def test_a_table_of_patients_labels_both_eyes_by_their_names(tmp_path: Path) -> None:
    for number in NUMBERS:
        for eye in ("OD", "OS"):
            picture(tmp_path / f"photographs/P{number:03}_{eye}.jpg")
    rows = [(f"P{number:03}", "ab"[number % 2]) for number in NUMBERS]
    table(tmp_path / "clinic.csv", ("patient_id", "diagnosis"), *rows)
    report = imported(tmp_path)
    assert report.dataset.labels == {"0": "a", "1": "b"} and not report.warnings
    listed = entries(tmp_path)
    assert len(listed) == 20
    for eye in ("OD", "OS"):
        entry = listed[f"photographs/P003_{eye}.jpg"]
        assert (entry["patient"], entry["label"]) == ("P003", 1)


def test_a_name_that_no_file_has_is_no_patient_in_a_table_of_files(tmp_path: Path) -> None:
    for number in NUMBERS:
        picture(tmp_path / f"i{number}1.png", 60 + number)
    picture(tmp_path / "i99_flipped.png", 80)
    rows = [(f"i{number}1", "ab"[number % 2]) for number in NUMBERS]
    table(tmp_path / "t.csv", ("image", "label"), *rows, ("i99", "a"))
    assert "line 12: no file for 'i99'" in error_of(tmp_path)


def test_a_table_of_patients_is_joined_by_a_table_of_images(tmp_path: Path) -> None:
    """The labels stand beside the patients, the patients beside the images."""
    images = []
    for number in NUMBERS:
        for eye in (1, 2):
            name = f"scan{number}x{eye}.png"
            picture(tmp_path / name, 60 + number)
            images.append((name, f"P{number}"))
    rows = [(f"P{number}", 40 + number, "ab"[number % 2]) for number in NUMBERS]
    table(tmp_path / "images.csv", ("image", "patient_id"), *images)
    table(tmp_path / "patients.csv", ("patient_id", "age", "diagnosis"), *rows)
    imported(tmp_path)
    listed = entries(tmp_path)
    assert len(listed) == 20
    for eye in (1, 2):
        entry = listed[f"scan5x{eye}.png"]
        assert (entry["patient"], entry["age"], entry["label"]) == ("P5", 45, 1)


@pytest.mark.parametrize(
    ("stored", "written"), [("00{n}", "{n}"), ("p{n}", "P{n}"), ("0{n}", "0{n}")]
)
@pytest.mark.parametrize(
    "image", ["{n}/1.png {n}/2.png", "x{n}l.png x{n}r.png", "{n}_a.png {n}_b.png"]
)
def test_a_patient_may_be_written_in_another_way(
    stored: str, written: str, image: str, tmp_path: Path
) -> None:
    """Excel stores 001 as 1; files may be called 1.png in each folder."""
    images = []
    for number in NUMBERS:
        for name in image.format(n=stored.format(n=number)).split():
            picture(tmp_path / name, 60 + number)
            images.append((name, stored.format(n=number)))
    if image[0] == "x":
        table(tmp_path / "images.csv", ("image", "patient"), *images)
    rows = [(written.format(n=n), 40 + n, "ab"[n % 2]) for n in NUMBERS]
    table(tmp_path / "patients.csv", ("patient", "age", "diagnosis"), *rows)
    imported(tmp_path)
    listed = entries(tmp_path)
    expected = {name: (n // 2 % 2, 40 + n // 2) for n, (name, _) in enumerate(images)}
    assert {name: (entry["label"], entry["age"]) for name, entry in listed.items()} == expected


@pytest.mark.parametrize(
    ("tag", "stored", "written"),
    [
        ("AccessionNumber", "00{n}", "{n}"),
        ("AccessionNumber", "a{n}", "A{n}"),
        ("StudyInstanceUID", "1.2.840.99.{n}", "1.2.840.99.{n}"),
    ],
)
def test_a_list_of_studies_labels_a_dicom_export(
    tag: str, stored: str, written: str, tmp_path: Path
) -> None:
    """As a PACS exports radiographs, in folders named by UIDs; both views of a study have its label."""
    rows = []
    for number in NUMBERS:
        study = stored.format(n=1000 + number)
        for view in (1, 2):
            folder = tmp_path / f"1.3.{number}" / f"1.3.{number}.{view}"
            folder.parent.mkdir(exist_ok=True)
            dicom_series(folder, 1)
            tags = {tag: study, "PatientID": f"M{number // 2}", "Modality": "DX"}
            change(folder, [0], ("ImagePositionPatient",), SeriesInstanceUID=folder.name, **tags)
        rows.append((written.format(n=1000 + number), "no report", ("healthy", "ill")[number % 2]))
    table(tmp_path / "list.csv", (tag, "Report", "Diagnosis"), *rows)
    imported(tmp_path)
    listed = entries(tmp_path)
    assert len(listed) == 20
    for view in (1, 2):
        entry = listed[f"1.3.7/1.3.7.{view}/0.dcm"]
        assert (entry["patient"], entry["label"]) == ("M3", 1)


@pytest.mark.parametrize("label", ["grade", "ill"])
def test_classes_that_are_numbers_name_no_images(label: str, tmp_path: Path) -> None:
    for number in NUMBERS:
        picture(tmp_path / f"exam{number}" / f"{number:03}.png", 60 + number)
    table(tmp_path / "t.csv", ("exam", label), *((f"exam{n}", n % 2) for n in NUMBERS))
    imported(tmp_path, columns=Columns(label="" if label == "grade" else label))
    listed = entries(tmp_path)
    assert {name: entry["label"] for name, entry in listed.items()} == {
        f"exam{n}/{n:03}.png": n % 2 for n in NUMBERS
    }


@pytest.mark.parametrize("words", ["Training Validierung Test", "train holdout test"])
def test_a_column_of_splits_in_other_words_is_not_overlooked(words: str, tmp_path: Path) -> None:
    names = words.split()
    rows = []
    for number in range(12):
        picture(tmp_path / f"i{number}.png", 60 + number)
        rows.append((f"i{number}.png", "ab"[number % 2], names[number // 4]))
    table(tmp_path / "t.csv", ("image", "label", "Datensatz"), *rows)
    if "holdout" in words:
        assert "split 'holdout' is not train, val or test" in error_of(tmp_path)
        assert not {*imported(tmp_path, redraw=True).dataset.missing}
        return
    imported(tmp_path)
    splits = {name: entry["split"] for name, entry in entries(tmp_path).items()}
    assert (splits["i3.png"], splits["i4.png"], splits["i8.png"]) == (
        "training",
        "validation",
        "test",
    )


def test_masks_called_like_images_and_a_word_are_asked_about(tmp_path: Path) -> None:
    """IMD001_lesion is the mask, beside regions of colours; --skip would leave it out."""
    for number in NUMBERS:
        place = f"IMD0{number}"
        files(tmp_path, f"{place}/{place}.png", f"{place}/{place}_R1_Label.png*")
        mask(tmp_path / place / f"{place}_lesion.png")
    for skip in (False, True):
        text = error_of(tmp_path, skip=skip)
        assert "IMD00_lesion.png" in text and "call them NAME_mask" in text


def test_pages_of_one_file_are_refused_at_once(tmp_path: Path) -> None:
    for name in ("train-volume.tif", "train-labels.tif"):
        pages = [Image.fromarray(np.full((16, 16), page % 2, np.uint8)) for page in range(4)]
        pages[0].save(tmp_path / name, save_all=True, append_images=pages[1:])
    assert "4 pages or frames; store pages as files" in error_of(tmp_path)


def test_an_expression_in_place_of_the_tables_patients_is_said(tmp_path: Path) -> None:
    rows = []
    for number in NUMBERS:
        picture(tmp_path / f"{number}.png", 60 + number)
        patient = f"p{number // 2}" if number else ""
        rows.append((f"{number}.png", "ab"[number // 2 % 2], patient))
    table(tmp_path / "t.csv", ("image", "label", "patient_id"), *rows)
    assert "which names the patients of all" in error_of(tmp_path)
    warnings = imported(tmp_path, patient=r"^(\d+)").warnings
    assert any("in place of the 5 of the table" in line for line in warnings)


def test_folders_of_studies_in_a_table_are_of_the_patient_above(tmp_path: Path) -> None:
    """As MURA."""
    rows = []
    for number in NUMBERS:
        for study in ("study1_positive", "study2_negative"):
            place = f"train/XR_WRIST/patient{number:05}/{study}"
            picture(tmp_path / place / "image1.png", 60 + number)
            rows.append((f"{place}/", int(study == "study1_positive")))
    table(tmp_path / "studies.csv", ("image", "label"), *rows)
    imported(tmp_path, redraw=True)
    splits: dict[str, set[str]] = {}
    for name, entry in entries(tmp_path).items():
        splits.setdefault(Path(name).parts[2], set()).add(entry["split"])
    assert len(splits) == 10 and all(len(of_patient) == 1 for of_patient in splits.values())


@pytest.mark.parametrize(
    ("column", "cells", "names"),
    [
        ("eye", ("OD", "OS"), "{p}_{c}.jpg"),
        ("session_id", ("ses-M00", "ses-M12"), "{p}/{c}/anat/{p}_{c}_T1w.jpg"),
        ("date", ("2020-01-05", "2021-03-07"), "{p}/{c}/1.jpg"),
        ("visit date", ("2020-01-05", "2021-03-07"), "{p}_{c}.jpg"),
    ],
)
def test_a_row_of_a_patients_eye_or_visit_is_of_its_images_alone(
    column: str, cells: tuple[str, str], names: str, tmp_path: Path
) -> None:
    rows = []
    for number in NUMBERS:
        patient = f"sub-{number:03}"
        for cell in cells:
            picture(tmp_path / names.format(p=patient, c=cell), 60 + number)
        rows.append((patient, cells[number % 2], "ab"[number // 2 % 2]))
    table(tmp_path / "clinic.csv", ("participant_id", column, "diagnosis"), *rows)
    report = imported(tmp_path)
    assert f"{column} tells the images of a patient apart" in report.render()
    listed = entries(tmp_path)
    assert len(listed) == 10
    for number in NUMBERS:
        patient = f"sub-{number:03}"
        entry = listed[names.format(p=patient, c=cells[number % 2])]
        assert (entry["patient"], entry["label"]) == (patient, number // 2 % 2)


@pytest.mark.parametrize(
    ("column", "cells", "names"),
    [
        ("eye", ("right", "left"), ("R", "L")),
        ("Visit no", ("1", "02"), ("v01", "v2")),
        ("Datum", ("5.1.2020", "7.3.2021"), ("2020-01-05", "2021-03-07")),
    ],
)
def test_an_eye_or_visit_is_found_in_another_spelling(
    column: str, cells: tuple[str, str], names: tuple[str, str], tmp_path: Path
) -> None:
    rows = []
    for number in NUMBERS:
        for name in names:
            picture(tmp_path / f"P{number:03}_{name}.png", 60 + number)
        rows += [(f"P{number:03}", cells[row], "ab"[(number + row) % 2]) for row in (0, 1)]
    table(tmp_path / "clinic.csv", ("patient", column, "label"), *rows)
    imported(tmp_path)
    for row, name in enumerate(names):
        assert entries(tmp_path)[f"P007_{name}.png"]["label"] == (7 + row) % 2


@pytest.mark.parametrize("eyes", [("right",), ("right", "left")])
def test_a_row_of_an_eye_that_no_name_has_is_asked_about(
    eyes: Sequence[str], tmp_path: Path
) -> None:
    rows = []
    for number in NUMBERS:
        for name in ("a", "b"):
            picture(tmp_path / f"P{number:03}_{name}.png", 60 + number)
        rows += [(f"P{number:03}", eye, "2024", "ab"[number % 2]) for eye in eyes]
    table(tmp_path / "clinic.csv", ("patient", "eye", "date", "label"), *rows)
    assert "line 2: eye 'right' is in no name of 2 images, as P000_a.png" in error_of(tmp_path)
    assert len(imported(tmp_path, columns=Columns(image="patient")).sites[""]) == 20


def test_a_named_column_of_another_table_is_read_beside_the_one_that_is_named(
    tmp_path: Path,
) -> None:
    """As ISIC 2019: one-hot classes, and lesions beside them."""
    labels = []
    people = []
    for number in NUMBERS:
        picture(tmp_path / f"i{number}.png", 60 + number)
        labels.append((f"i{number}", number % 2, 1 - number % 2))
        people.append((f"i{number}", f"L{number // 2}"))
    truth = table(tmp_path / "Training_GroundTruth.csv", ("image", "MEL", "NV"), *labels)
    table(tmp_path / "Training_Metadata.csv", ("image", "lesion_no"), *people)
    imported(tmp_path, table=truth, columns=Columns(patient="lesion_no"))
    assert {entry["patient"] for entry in entries(tmp_path).values()} == {f"L{n}" for n in range(5)}


def test_numbers_that_hardly_occur_twice_are_measurements(tmp_path: Path) -> None:
    for number in range(20):
        picture(tmp_path / f"{1300 + number}.png", 60 + number)
    rows = [(1300 + number, 20 + 7 * number) for number in range(20)]
    table(tmp_path / "ages.csv", ("id", "boneage"), *rows)
    text = error_of(tmp_path, columns=Columns(label="boneage"))
    assert "measurements cannot be predicted" in text


def test_folders_in_a_table_count_as_patients_with_a_warning(tmp_path: Path) -> None:
    """As OASIS-1, whose subjects have several sessions."""
    rows = []
    for number in NUMBERS:
        scan = f"OAS1_00{number // 2}_MR{number % 2 + 1}"
        picture(tmp_path / scan / "image.png", 60 + number)
        rows.append((scan, number // 2 % 2))
    table(tmp_path / "oasis.csv", ("ID", "CDR"), *rows)
    report = imported(tmp_path, columns=Columns(label="CDR"))
    assert any("each cell of column ID counts as a patient" in line for line in report.warnings)
    pattern = r"^(OAS1_\d+)_"
    known = imported(tmp_path, columns=Columns(label="CDR"), patient=pattern, force=True)
    assert not any("counts as a patient" in line for line in known.warnings)


def test_numbers_of_patients_are_not_taken_for_numbers_of_files(tmp_path: Path) -> None:
    rows = []
    for number in range(1, 11):
        for photograph in (2 * number - 1, 2 * number):
            picture(tmp_path / f"P{number:03}" / f"{photograph}.jpg", 60 + photograph)
        rows.append((number, "ab"[number % 2]))
    table(tmp_path / "t.csv", ("Nr", "Diagnose"), *rows)
    assert "numbers that name 10 of 20 images" in error_of(tmp_path)
    assert len(imported(tmp_path, columns=Columns(image="Nr")).sites[""]) == 10


def test_patients_of_an_expression_in_two_spellings_are_refused(tmp_path: Path) -> None:
    for split, name in (("train", "Pat_A"), ("val", "pat_a"), ("test", "Pat_B")):
        for number in range(3):
            files(
                tmp_path,
                f"{split}/images/{name}{number}_1.png",
                f"{split}/masks/{name}{number}_1.png*",
            )
    assert "one name, written in two ways" in error_of(tmp_path, patient="^(.*)_1")


# -- columns of 0 and 1 ----------------------------------------------------------------------------


def flags(root: Path, **columns: Sequence[str]) -> None:
    """A table of pictures whose columns have these flags, repeated."""
    rows = []
    for number in NUMBERS:
        picture(root / f"{number}.png", 60 + number)
        rows.append((f"{number}.png", *[cells[number % len(cells)] for cells in columns.values()]))
    table(root / "t.csv", ("image", *columns), *rows)


@pytest.mark.parametrize(
    ("columns", "example"),
    [
        ({"treated": "0011", "glaucoma": "01"}, "treated,glaucoma"),
        ({"MEL": "100", "NV": "010", "BCC": "001", "smoker": "01", "open": "0011"}, "MEL,NV,BCC"),
    ],
)
def test_flags_that_may_be_no_labels_are_asked_about(
    columns: dict[str, str], example: str, tmp_path: Path
) -> None:
    """Before, all were read as findings."""
    flags(tmp_path, **columns)
    table(
        tmp_path / "sizes.csv", ("image", "width"), *[(f"{number}.png", 16) for number in NUMBERS]
    )
    text = error_of(tmp_path)
    assert "sizes.csv" not in text
    assert f"which of {', '.join(columns)} are labels?" in text and text.endswith(f"as {example}")
    report = imported(tmp_path, columns=Columns(label=example))
    assert list(report.dataset.labels.values()) == example.split(",")


def test_many_flags_side_by_side_are_findings(tmp_path: Path) -> None:
    """As in RFMiD and BRSET."""
    flags(tmp_path, a="0110", b="01", c="001", d="0011", e="011")
    report = imported(tmp_path)
    assert list(report.dataset.labels.values()) == [*"abcde"]
    assert "5 columns of 0 and 1, a to e, count as findings" in report.render()


def test_empty_findings_are_named(tmp_path: Path) -> None:
    """As in CheXpert."""
    flags(tmp_path, edema=["1.0", "0.0", ""], mass=["-1.0", "1.0", "0.0"])
    text = error_of(tmp_path)
    assert "t.csv: edema, mass, ... have empty cells, -1 or words beside 0 and 1" in text
    table(tmp_path / "t.csv", ("image", "edema", "mass"), ("0.png", 0, 1), ("1.png", 1, ""))
    text = error_of(tmp_path, columns=Columns(label="edema,mass"))
    assert "t.csv line 3: no label in column mass" in text


# -- companions of pictures ------------------------------------------------------------------------


@pytest.mark.parametrize("companion", ["x{n}-d.bmp", "x{n}_overlay.png", "small/x{n}.jpg"])
@pytest.mark.parametrize("folders", ["ab", "a"])
def test_companions_of_pictures_are_asked_about(
    folders: str, companion: str, tmp_path: Path
) -> None:
    """As the masks of Herlev; before: further images of the classes."""
    files(tmp_path, "a/x{n}.png", "b/x{n}.png")
    imported(tmp_path)
    (tmp_path / "datalist.json").unlink()
    for folder in folders:
        files(tmp_path, f"{folder}/{companion}")
    text = error_of(tmp_path)
    assert "images have companions" in text and "as a/x0.png has; take these out" in text
    assert "if they are masks, call them NAME_mask or give --structure, as" in text
    imported(tmp_path, kind="classification")
    assert len(entries(tmp_path)) == 20 + 10 * len(folders)


def test_second_views_are_no_companions(tmp_path: Path) -> None:
    imported(files(tmp_path, "a/x{n}.png", "a/x{n}_2.png", "b/y{n}.png", "b/y{n}_2.png"))
    assert len(entries(tmp_path)) == 40


def test_photographs_that_are_turned_without_their_masks_are_noted(tmp_path: Path) -> None:
    files(tmp_path, "{n}.jpg", "{n}_mask.png*")
    assert "EXIF" not in imported(tmp_path).render()
    with Image.open(tmp_path / "3.jpg") as image:
        exif = image.getexif()
        exif[ExifTags.Base.Orientation] = 6
        image.save(tmp_path / "3.jpg", exif=exif)
    text = imported(tmp_path, force=True).render()
    assert "1 photographs are turned by their EXIF orientation, their masks are not" in text


# -- what tables lack ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "row", "problem"),
    [
        (("ID", "Label"), "x{n}_bleeding,1", "write a row for each image, and a column for each"),
        (("", "patient"), "{n},7", "in column patient; write the names of images in a column"),
        (("study{n}/", "0"), "study{n}/,1", "its first line names images"),
        (
            ("image", "rle"),
            "x{n}.png,1 6 40 4",
            "column rle has lists of numbers, as run lengths of masks",
        ),
        (
            ("image", "segmentation"),
            "x{n}.png,1 6 40 4",
            "column segmentation has lists of numbers, as run lengths of masks",
        ),
        (("image", "label"), "x{n}.png,0.{n}7", "measurements cannot be predicted (regression)"),
        (("image", "label"), "x{n}.png,{n}7%", "measurements cannot be predicted (regression)"),
        (("image", ""), "x{n}.png,a", "give --label-column, one of image, unnamed 2"),
        (
            ("image", "label"),
            "x{n}.png,{nan}",
            "NaN in column label, whose other cells are numbers",
        ),
        (("", "label"), "{title}", "in several lines; write them all in the first one, and take"),
    ],
)
def test_tables_that_name_no_class_of_an_image(
    header: tuple[str, ...], row: str, problem: str, tmp_path: Path
) -> None:
    lines = [",".join(header).format(n=0)]
    for number in range(12):
        picture(tmp_path / f"study{number}" / f"x{number}.png", 60 + number)
        title = f"x{number}.png,a" if number else ",note\nimage,"
        lines.append(row.format(n=number, nan=number % 3 or "NaN", title=title))
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert problem in error_of(tmp_path)


def test_numbers_of_studies_name_their_folders(tmp_path: Path) -> None:
    """As in MIMIC-CXR, whose splits stand in another table."""
    labels = []
    splits = []
    for number in NUMBERS:
        picture(tmp_path / f"p{30000 + number // 2}/s{50000 + number}/{number}.png", 60 + number)
        labels.append((30000 + number // 2, 50000 + number, "ab"[number // 2 % 2]))
        splits.append((f"{number}", ("train", "validate", "test")[max(0, number // 2 - 2)]))
    table(tmp_path / "labels.csv", ("subject_id", "study_id", "outcome"), *labels)
    table(tmp_path / "split.csv", ("dicom_id", "split"), *splits)
    imported(tmp_path, columns=Columns(label="outcome"))
    entry = entries(tmp_path)["p30003/s50007/7.png"]
    assert (entry["patient"], entry["split"], entry["label"]) == ("30003", "validation", 1)


# -- splits, slices and channels in folders --------------------------------------------------------


def test_tables_of_splits_that_cannot_be_used_stop_the_import(tmp_path: Path) -> None:
    """As the indexes of Derm7pt, and the sets A and B of ORIGA; before: other splits were drawn."""
    rows = graded(tmp_path / "derm", [f"n{number}.png" for number in NUMBERS])
    table(tmp_path / "derm" / "meta.csv", ("image", "label"), *rows)
    for split, first in (("train", 0), ("test", 7)):
        table(tmp_path / "derm" / f"{split}_indexes.csv", ("indexes",), (first,), (first + 1,))
    text = error_of(tmp_path / "derm")
    assert "train_indexes.csv seems to list a split" in text and "--split-column" in text
    imported(tmp_path / "derm", redraw=True)
    origa = files(tmp_path / "origa", "images/n{n}.png", "masks/n{n}.png*")
    table(origa / "list.csv", ("image", "set"), *[(f"n{n}.png", "AB"[n % 2]) for n in NUMBERS])
    assert "list.csv: split 'A' is not train, val or test" in error_of(origa)
    imported(origa, redraw=True)


def test_masks_of_slices_are_to_be_stacked(tmp_path: Path) -> None:
    """As in CHAOS."""
    for number in range(4):
        (tmp_path / f"{number}").mkdir()
        dicom_series(tmp_path / f"{number}" / "CT")
        mask(tmp_path / f"{number}" / "liver" / "1.png", (63, 126))
        mask(tmp_path / f"{number}" / "liver" / "2.png", (63, 126))
    stack = "has a mask for each slice of a volume; stack the masks"
    before = "liver"
    for name in ("Ground", "CT_mask", "CT/mask"):
        for number in range(4):
            (tmp_path / f"{number}" / before).rename(tmp_path / f"{number}" / name)
        assert f"0/{name} {stack}" in error_of(tmp_path)
        before = name


def test_single_slices_beside_volumes_are_refused(tmp_path: Path) -> None:
    """As in OASIS of Neurite."""
    files(tmp_path, "p{n}/volume.nii.gz", "p{n}/volume_seg.nii.gz*")
    imported(tmp_path)
    (tmp_path / "datalist.json").unlink()
    for number in NUMBERS:
        for name in ("slice", "slice_seg"):
            write(tmp_path / f"p{number}" / f"{name}.nii.gz", np.ones((4, 3, 1), np.uint8))
    assert "p0/slice.nii.gz is one slice, beside the volume p0/volume" in error_of(tmp_path)


def test_the_mask_of_a_case_has_the_images_below_it(tmp_path: Path) -> None:
    """As in the challenge of white matter lesions (WMH)."""
    files(tmp_path, "p{n}/pre/FLAIR.nii.gz", "p{n}/pre/T1.nii.gz", "p{n}/wmh_seg.nii.gz*")
    imported(tmp_path)
    assert entries(tmp_path)["p3/pre/FLAIR.nii.gz"]["image"][1] == "p3/pre/T1.nii.gz"
    assert entries(tmp_path)["p3/pre/FLAIR.nii.gz"]["label"] == "p3/wmh_seg.nii.gz"
    (tmp_path / "datalist.json").unlink()
    files(tmp_path, "p{n}/orig/FLAIR.nii.gz")
    text = error_of(tmp_path)
    assert "p0/orig/FLAIR.nii.gz and p0/pre/FLAIR.nii.gz would both have the mask" in text


def test_folders_of_modalities_are_channels(tmp_path: Path) -> None:
    files(tmp_path, "FLAIR/{n}.nii.gz", "T1/{n}.nii.gz", "seg/{n}.nii.gz*")
    assert imported(tmp_path).dataset.channels == {"0": "FLAIR", "1": "T1"}
    assert entries(tmp_path)["FLAIR/3.nii.gz"]["image"] == ["FLAIR/3.nii.gz", "T1/3.nii.gz"]
    (tmp_path / "datalist.json").unlink()
    (tmp_path / "T1").rename(tmp_path / "other")
    assert "call them NAME_0000 and NAME_0001" in error_of(tmp_path)


def test_classes_in_folders_of_patients(tmp_path: Path) -> None:
    """As the patches of IDC."""
    files(tmp_path, "88{n}/0/a{n}.png", "88{n}/1/b{n}.png")
    text = error_of(tmp_path)
    assert "if these are classes, and 880, ... patients, give --kind classification" in text
    imported(tmp_path, kind="classification")
    entry = entries(tmp_path)["883/1/b3.png"]
    assert (entry["patient"], entry["label"]) == ("883", 1)


def test_an_image_and_its_mask_in_folders_of_visits(tmp_path: Path) -> None:
    for visit in ("baseline", "followup"):
        files(tmp_path, f"P0{{n}}/{visit}/t1.nii.gz", f"P0{{n}}/{visit}/lesion.nii.gz*")
    text = error_of(tmp_path)
    assert "if one of lesion, t1 is the mask of an image, give --structure NAME" in text
    imported(tmp_path, structures=parse_structures(["lesion"]))
    entry = entries(tmp_path)["P03/followup/t1.nii.gz"]
    assert entry["label"] == "P03/followup/lesion.nii.gz"


@pytest.mark.parametrize("cells", [("0", "1"), ("True", "False")])
def test_a_column_that_tells_the_test_images_is_not_ignored(
    cells: tuple[str, str], tmp_path: Path
) -> None:
    lines = [(f"{number}.png", "AB"[number % 2], cells[number > 7]) for number in NUMBERS]
    for number in NUMBERS:
        picture(tmp_path / f"{number}.png", number)
    table(tmp_path / "t.csv", ("image", "label", "is_test"), *lines)
    assert "column is_test seems to tell the splits" in error_of(tmp_path)
    imported(tmp_path, redraw=True)


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (("2019", "2020"), True),
        (("2021-03", "2021-04"), True),
        (("batch_1", "batch_2"), True),
        (("EXP1", "EXP2"), True),
        (("OD", "OS"), True),
        (("1", "2", "3", "4", "5", "6", "7", "8"), True),  # patients, more likely
        (("0", "1", "2", "3", "4", "5", "6"), False),  # BI-RADS
        (("0", "1"), False),
        (("grade_1", "grade_2"), False),
        (("nevus", "melanoma"), False),
    ],
)
def test_folders_of_years_parts_or_eyes_are_no_classes(
    names: tuple[str, ...], asked: bool, tmp_path: Path
) -> None:
    for name in names:
        files(tmp_path, f"{name}/a{{n}}{name}.png")
    if asked:
        assert f"are the folders {shortened(names)} the classes?" in error_of(tmp_path)
    imported(tmp_path, kind="classification" if asked else "")


# -- what the count of 2026-11-29 found ------------------------------------------------------------


@pytest.mark.parametrize("preview", ["preview", "thumbnails", "Vorschau"])
def test_small_copies_are_left_out(preview: str, tmp_path: Path) -> None:
    for name in ("benign", "malignant"):
        files(tmp_path, f"{name}/{name}{{n}}.png")
        files(tmp_path, f"{preview}/{name}{{n}}.jpg")
    report = imported(tmp_path)
    assert {Path(image).parent.name for image in entries(tmp_path)} == {"benign", "malignant"}
    assert any(
        "left out, previews of other images: 20, the first" in line for line in report.dataset.notes
    )


def test_small_copies_below_their_class_are_left_out(tmp_path: Path) -> None:
    files(tmp_path, "benign/b{n}.png", "benign/thumbs/b{n}_thumb.jpg", "malignant/m{n}.png")
    imported(tmp_path)
    assert {Path(image).parent.name for image in entries(tmp_path)} == {"benign", "malignant"}


def test_a_level_beside_a_diagnosis_is_not_the_label_without_a_question(tmp_path: Path) -> None:
    """participants.tsv of ADNI, as Clinica writes it."""
    for number in NUMBERS:
        picture(tmp_path / f"{number}.png", number)
    rows = [
        (f"{number}.png", 12 + 2 * (number % 3), ["CN", "AD"][number % 2]) for number in NUMBERS
    ]
    table(tmp_path / "t.csv", ("image", "education_level", "diagnosis_sc"), *rows)
    assert "education_level and diagnosis_sc can both be the label" in error_of(tmp_path)
    imported(tmp_path, columns=Columns(label="diagnosis_sc"))


def test_masks_of_several_readers_do_not_replace_each_other(tmp_path: Path) -> None:
    """KiTS21."""
    for number in NUMBERS:
        folder = f"case_{number:05}"
        files(tmp_path, f"{folder}/imaging.nii.gz")
        for name in ("kidney_instance-1_annotation-1", "kidney_instance-1_annotation-2"):
            files(tmp_path, f"{folder}/segmentations/{name}.nii.gz*")
        files(tmp_path, f"{folder}/segmentations/tumor_instance-1_annotation-1.nii.gz*")
    assert "are masks of one structure, as of several readers" in error_of(tmp_path)


def test_a_table_of_patients_moves_no_image_to_its_own_split(tmp_path: Path) -> None:
    """ISIC 2018, task 3, after the patients of all images were written into one table."""
    patients = []
    for split, count in (("Training", 12), ("Validation", 6)):
        rows = []
        for number in range(count):
            name = f"{split[0]}{number:02}"
            picture(tmp_path / f"{split}_Input" / f"{name}.png", number)
            rows.append((name, number % 2, 1 - number % 2))
            patients.append((name, f"{split}{number // 2}"))
        table(tmp_path / f"{split}_GroundTruth.csv", ("image", "MEL", "NV"), *rows)
    table(tmp_path / "Training_LesionGroupings.csv", ("image", "lesion_id"), *patients)
    imported(tmp_path)
    for image, entry in entries(tmp_path).items():
        assert (entry["split"] == "validation") == image.startswith("Validation")
        assert entry["patient"].startswith(image.partition("_")[0])


def test_shifted_numbers_of_masks_are_suspected(tmp_path: Path) -> None:
    for number in NUMBERS:
        picture(tmp_path / "images" / f"img_{number + 1:02}.png", number)
        mask(tmp_path / "masks" / f"mask_{number:02}.png")
    text = error_of(tmp_path)
    assert "img_10.png: no mask; the last: masks/mask_00.png: a mask without an image" in text
    assert "if the numbers of masks and images are shifted, rename them" in text


def test_columns_of_sites_that_are_called_differently_are_explained(tmp_path: Path) -> None:
    for site, name in (("Bern", "Diagnose"), ("Lugano", "diagnosi")):
        files(tmp_path, f"{site}/{site}{{n}}.png")
        rows = [(f"{site}{number}.png", number % 2) for number in NUMBERS]
        table(tmp_path / site / "list.csv", ("file", name), *rows)
    for columns in (Columns(), Columns(label="diagnosi")):
        text = error_of(tmp_path, columns=columns, site_folders=True)
        assert "columns need the same names at all sites" in text


def test_tables_with_a_common_key_are_joined_by_the_patients_of_images_alone(
    tmp_path: Path,
) -> None:
    keys = [(40000 + number, f"PSN-{100 + number}") for number in NUMBERS]
    for row, (_, name) in enumerate(keys):
        picture(tmp_path / "a" / f"{name}_a.png", row)
        picture(tmp_path / "b" / f"Aufnahme_{row}.png", row)
    diagnoses = [(number, ("Karzinom", "Adenom")[number % 2]) for number, _ in keys]
    for folder in ("a", "b"):
        table(tmp_path / folder / "Schluessel.csv", ("Fallnummer", "Pseudonym"), *keys)
        table(tmp_path / folder / "Diagnosen.csv", ("Fallnummer", "Diagnose"), *diagnoses)
    text = error_of(tmp_path / "b")
    assert "share Fallnummer, but tables are not joined: write the label beside the name" in text
    report = imported(tmp_path / "a")
    for item in report.sites[""]:
        number = 40000 + int(item.first.stem[4:7]) - 100
        assert item.patient == str(number)
        assert [*report.dataset.labels.values()][item.label] == ("Karzinom", "Adenom")[number % 2]


def test_a_class_is_not_proposed_as_the_patient(tmp_path: Path) -> None:
    """OCT2017: CNV-1016042-1.jpeg in CNV/."""
    for name in ("CNV1", "DME2"):
        files(tmp_path, f"{name}/{name}-{{n}}-1.png")
    [warning] = imported(tmp_path, kind="classification").warnings
    assert "--patient REGEX" in warning


def test_a_table_may_be_named_as_messages_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in NUMBERS:
        picture(tmp_path / "pictures" / f"{number}.png", number)
    rows = [(f"{number}.png", "AB"[number % 2]) for number in NUMBERS]
    table(tmp_path / "pictures" / "train.csv", ("image", "label"), *rows)
    monkeypatch.chdir(tmp_path)
    assert main(["data", "init", "pictures", "--table", "train.csv"]) == 0


def test_dates_of_visits_are_found_in_names(tmp_path: Path) -> None:
    rows = []
    for number in NUMBERS:
        for day, date, label in ((2, "2.3.2019", "active"), (11, "2020-03-11 00:00:00", "calm")):
            year = 2019 if day == 2 else 2020
            picture(tmp_path / f"P{number:03}_{year}03{day:02}.png", number)
            rows.append((f"P{number:03}", date, label))
    table(tmp_path / "visits.csv", ("Patient", "Visit", "label"), *rows)
    imported(tmp_path)
    entry = entries(tmp_path)["P003_20200311.png"]
    assert (entry["patient"], entry["label"]) == ("P003", 1)


@pytest.mark.parametrize("columns", [Columns(), Columns(mask="mask")])
def test_a_column_of_masks_is_not_that_of_the_images(columns: Columns, tmp_path: Path) -> None:
    """The names of the images have a wrong suffix."""
    files(tmp_path, "img/b{n}.png", "masks/m{n}.png*")
    rows = [(f"b{number}.tif", f"m{number}.png") for number in NUMBERS]
    table(tmp_path / "list.csv", ("image", "mask"), *rows)
    assert "b0.tif" in error_of(tmp_path, columns=columns)


def test_dates_that_excel_has_made_of_grades_are_no_classes(tmp_path: Path) -> None:
    for number in NUMBERS:
        picture(tmp_path / f"{number}.png", number)
    rows = [(f"{number}.png", ("2024-03-04 00:00:00", "5-5")[number % 2]) for number in NUMBERS]
    table(tmp_path / "list.csv", ("image", "grade"), *rows)
    assert "is a date, as Excel makes of 3-4; format the column as text" in error_of(tmp_path)


def test_a_class_folder_in_its_own_folder_is_to_be_moved(tmp_path: Path) -> None:
    """SIPaKMeD."""
    for name in ("im_one", "im_two"):
        files(tmp_path, f"{name}/{name}/a{{n}}.png")
        files(tmp_path, f"{name}/b{{n}}.png")
    assert "holds im_one; move what is in the inner one up" in error_of(
        tmp_path, kind="classification"
    )


def test_a_label_in_another_row_than_the_image_is_explained(tmp_path: Path) -> None:
    """An export of REDCap: a row for the baseline, and one for each photo."""
    rows = []
    for number in NUMBERS:
        picture(tmp_path / f"rc_{number}.png", number)
        rows += [(number, "AB"[number % 2], ""), (number, "", f"rc_{number}.png")]
    table(tmp_path / "study.csv", ("record_id", "diagnosis", "image"), *rows)
    text = error_of(tmp_path)
    assert "no row has both an image and its label" in text
    assert "write the label in the row of the image" in text


def test_versions_of_one_name_are_not_taken_for_a_patients_images(tmp_path: Path) -> None:
    for number in NUMBERS:
        for version in ("raw", "clahe"):
            picture(tmp_path / version / f"P{number // 2}" / f"E{number}.png", number)
    rows = [(f"E{number}.png", f"P{number // 2}", number % 2) for number in NUMBERS]
    table(tmp_path / "list.csv", ("image", "patient", "label"), *rows)
    text = error_of(tmp_path)
    assert "'E0.png' can be clahe/P0/E0.png and raw/P0/E0.png; write the whole path" in text


def test_sites_without_a_common_class_are_a_warning(tmp_path: Path) -> None:
    for site, labels in (("Oslo", ("benign", "malignant")), ("Rome", (0, 1)), ("Bern", (0, 1))):
        files(tmp_path / "in", f"{site}/{site}{{n}}.png")
        rows = [(f"{site}{number}.png", labels[number % 2], site) for number in NUMBERS]
        table(tmp_path / "in" / site / "t.csv", ("image", "label", "hospital"), *rows)
    warning = (
        "sites without a class of another site: Oslo (benign, malignant); if they are the same "
        "classes, write the same names at all sites"
    )
    report = imported(tmp_path / "in", site_folders=True, out=tmp_path / "out")
    assert report.warnings[-1] == warning
    rows = []
    for number in range(30):
        site = ("Oslo", "Rome", "Bern")[number // 10]
        rows.append((f"{site}{number % 10}.png", f"{site == 'Oslo'}{number % 2}", site))
    one = table(tmp_path / "t.csv", ("image", "label", "hospital"), *rows)
    columns = Columns(label="label", site="hospital")
    report = imported(tmp_path / "in", table=one, columns=columns, out=tmp_path / "one")
    assert any(": Oslo (True0, True1); if they are" in line for line in report.warnings)


def test_images_that_differ_in_the_suffix_alone_are_a_warning(tmp_path: Path) -> None:
    files(tmp_path, "mel/p{n}.png", "nv/p{n}.png", "nv/p{n}.jpg")
    report = imported(tmp_path)
    assert any(
        "differ in the suffix alone: 10, the first: nv/p0.jpg and nv/p0.png; if they are copies"
        in line
        for line in report.warnings
    )
    report = imported(tmp_path, patient="(p.)", force=True)
    assert not any("suffix" in line for line in report.warnings), "copies stay together"


@pytest.mark.parametrize(
    "name", ["unsorted", "To_check", "03 ungraded", "-1", "99", "excluded_bad"]
)
def test_a_class_of_ungraded_images_is_asked_about(name: str, tmp_path: Path) -> None:
    files(tmp_path / "folders", "1/p{n}.png", "2/q{n}.png", f"{name}/r{{n}}.png")
    text = error_of(tmp_path / "folders")
    assert f"is {name} a class, beside 1, 2? if its images are not graded, take" in text
    labels = [("1", "2", name)[number % 3] for number in NUMBERS]
    files(tmp_path / "table", "{n}.png")
    rows = [(f"{number}.png", label) for number, label in enumerate(labels)]
    table(tmp_path / "table" / "t.csv", ("image", "label"), *rows)
    columns = Columns(label="label")
    text = error_of(tmp_path / "table", columns=columns)
    assert f"is {name} a class, beside 1, 2? if it means not graded, empty its cells" in text
    for folder in ("folders", "table"):
        report = imported(tmp_path / folder, kind="classification")
        assert name in report.dataset.labels.values()


def test_companions_without_classes_may_be_masks(tmp_path: Path) -> None:
    files(tmp_path, "p{n}.png", "p{n}_ann1.png", "p{n}_ann2.png")
    text = error_of(tmp_path)
    assert "companions called NAME_ann1 and called NAME_ann2, as p0.png has; if one is" in text


def test_a_structure_is_named_by_the_end_of_the_names_of_masks(tmp_path: Path) -> None:
    files(tmp_path, "P{n}.png", "P{n}_Lung.png*", "P{n}-heart.png*", "P{n}_overlay.png")
    assert "companions called" in error_of(tmp_path)
    structures = parse_structures(["lungs=lung", "heart"])
    imported(tmp_path, structures=structures, leave_out=("*_overlay.png",))
    assert entries(tmp_path)["P3.png"]["label"] == ["P3_Lung.png", "P3-heart.png"]
    lung = {"structures": structures[:1], "leave_out": ("*_overlay.png", "*-heart.png")}
    imported(tmp_path, force=True, **lung)
    assert entries(tmp_path)["P3.png"]["label"] == "P3_Lung.png"


def test_an_image_with_a_mask_of_its_own_is_no_mask(tmp_path: Path) -> None:
    names = ("P{n}.png", "P{n}_mask.png*", "P{n}_lens.png", "P{n}_lens_mask.png*")
    files(tmp_path, *names)
    imported(tmp_path, structures=parse_structures(["lens"]))
    assert entries(tmp_path)["P3_lens.png"]["label"] == "P3_lens_mask.png"


def test_numbers_of_most_images_are_names_though_rows_repeat(tmp_path: Path) -> None:
    for number in range(20):
        picture(tmp_path / f"{number}.png", 60 + number)
    rows = [(number, number % 2) for number in range(16) for _ in range(2)]
    table(tmp_path / "t.csv", ("nr", "label"), *rows)
    imported(tmp_path)
    assert len(entries(tmp_path)) == 16


@pytest.mark.parametrize(
    "texts", [["left_lung", "right_lung"], ["left=left_lung", "right=right_lung"]]
)
def test_a_structure_may_be_named_by_all_words_behind_the_image(
    texts: list[str], tmp_path: Path
) -> None:
    files(tmp_path, "P{n}.png", "P{n}_left_lung.png*", "P{n}_right_lung.png*")
    imported(tmp_path, structures=parse_structures(texts))
    labels = json.loads((tmp_path / "datalist.json").read_text())["labels"]
    assert list(labels.values()) == [text.partition("=")[0] for text in texts]


@pytest.mark.parametrize("folder", ["nv", "train/nv", "images/nv"])
def test_a_folder_of_one_class_is_named(folder: str, tmp_path: Path) -> None:
    picture(tmp_path / folder / "1.png")
    text = error_of(tmp_path)
    assert "if all are of the class nv, give a folder of another class, too" in text
    assert "--classes with the names of all" in text
    (tmp_path / folder).rename(tmp_path / "photos")
    assert "of the class" not in error_of(tmp_path)


@pytest.mark.parametrize(
    ("file", "problem"),
    [("{n}.png", "images without masks or classes"), ("p{n}/a.png", "are many classes")],
)
def test_a_site_may_have_a_folder_of_one_class_that_others_have(
    file: str, problem: str, tmp_path: Path
) -> None:
    for site, names in (("A", ["nv"]), ("B", ["mel", "nv"]), ("C", ["bcc"])):
        for number in range(12):
            inner = file.format(n=number)
            picture(tmp_path / site / names[number % len(names)] / inner, 60 + number)
    assert problem in error_of(tmp_path, site_folders=True)
    (tmp_path / "C/bcc").rename(tmp_path / "C/mel")
    report = imported(tmp_path, site_folders=True)
    labels = {site: {item.label for item in items} for site, items in report.sites.items()}
    assert labels == {"A": {1}, "B": {0, 1}, "C": {0}}
    assert "A: no image of mel" in report.dataset.notes
    alone = imported(tmp_path / "A", classes=("mel", "nv"), force=True)
    assert {item.label for item in alone.sites[""]} == {1}


@pytest.mark.parametrize("name", ["\N{SLIGHTLY SMILING FACE}", "!!", "++"])
def test_a_name_without_a_letter_is_no_mask(name: str, tmp_path: Path) -> None:
    for number in NUMBERS:
        picture(tmp_path / "ab"[number % 2] / f"{number}.png", 60 + number)
    picture(tmp_path / "b" / f"{name}.png")
    imported(tmp_path)
    assert entries(tmp_path)[f"b/{name}.png"]["label"] == 1 and len(entries(tmp_path)) == 11


def test_a_table_of_objects_that_is_called_like_one_split_is_no_list(tmp_path: Path) -> None:
    """As RibFrac's fractures; with a column that names each row it may be the list."""
    files(tmp_path, "train-images/Rib{n}-image.nii.gz", "train-labels/Rib{n}-label.nii.gz*")
    rows = [(f"Case{number // 2}", number % 3, number) for number in range(20)]
    info = tmp_path / "train-info.csv"
    table(info, ("public_id", "label_code"), *(row[:2] for row in rows))
    report = imported(tmp_path)
    assert {item.split for item in report.sites[""]} == {"training", "validation", "test"}
    assert "note: not used: train-info.csv names no image" in report.render()
    for other in (("public_id", "label_code", "row"), ("public_id", "split")):
        table(info, other, *(row[: len(other)] for row in rows))
        (tmp_path / "datalist.json").unlink(missing_ok=True)
        assert "--redraw" in error_of(tmp_path)


@pytest.mark.parametrize("top", ["train", "Test set", "images", "masks"])
def test_splits_images_and_masks_are_no_sites(top: str, tmp_path: Path) -> None:
    for name in "ab":
        files(tmp_path, f"data/{top}/north/{name}/{name}{{n}}.png", f"data/south/{name}/{{n}}.png")
    assert f"{top} is called like a split" in error_of(tmp_path / "data", site_folders=True)
    text = error_of(tmp_path, site_folders=True)
    assert text.endswith(
        "if a folder is no site, give --leave-out with its name, or the folder that holds the sites"
    )


def test_lists_of_splits_name_images_as_class_folders_are_called(tmp_path: Path) -> None:
    for number in range(20):
        picture(tmp_path / str(number % 2) / f"{number}.png", number)
    for split, numbers in (("train", range(12)), ("val", range(12, 16)), ("test", range(16, 20))):
        lines = [f"{number}.png" for number in numbers]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines))
    report = imported(tmp_path)
    assert sum(item.split == "test" for item in report.dataset.items) == 4


def test_a_label_of_one_eye_is_not_that_of_the_other(tmp_path: Path) -> None:
    files(tmp_path, "P1{n}_OD.png", "P1{n}_OS.png")
    table(
        tmp_path / "grades.csv",
        ("ID", "OD", "OS"),
        *((f"P1{n}", n % 2, n // 2 % 2) for n in range(10)),
    )
    text = error_of(tmp_path, columns=Columns(label="OD"))
    assert "P10_OS.png is of the other; write a row for each image" in text
    imported(tmp_path, columns=Columns(label="OD,OS"))
    (tmp_path / "datalist.json").unlink()
    for number in range(10):
        (tmp_path / f"P1{number}_OS.png").unlink()
    assert len(imported(tmp_path, columns=Columns(label="OD")).sites[""]) == 10


def test_folders_that_many_classes_share_may_be_the_classes(tmp_path: Path) -> None:
    files(
        tmp_path,
        *(f"{stain}/grade{n}/{stain}{n}_{{n}}.png" for stain in ("HE", "Ki") for n in (1, 2)),
    )
    text = error_of(tmp_path)
    assert (
        "if grade1, grade2 are the classes, move them up; if HE, ... are the classes, give" in text
    )


@pytest.mark.parametrize("folder", ["gradcam", "predictions"])
def test_pictures_of_others_are_no_class(folder: str, tmp_path: Path) -> None:
    for number in range(10):
        name = f"{'ab'[number % 2]}{number}.png"
        picture(tmp_path / name[0] / name, 60 + number)
        picture(tmp_path / folder / name, 90 + number)
    assert f"is {folder} a class, beside a, b?" in error_of(tmp_path)
    imported(tmp_path, leave_out=[folder])
    assert len(entries(tmp_path)) == 10


def test_masks_without_a_name_beside_named_ones_are_asked_about(tmp_path: Path) -> None:
    files(tmp_path, "p{n}/img.png", "p{n}/label.png*", "p{n}/label_viz.png*")
    assert "are the masks without a name, viz structures?" in error_of(tmp_path)


@pytest.mark.parametrize("shift", [1, 9])
def test_masks_drawn_at_one_place_are_of_readers(shift: int, tmp_path: Path) -> None:
    files(tmp_path, "images/{n}.png", "masks/anna/{n}.png*", "masks/ben/{n}.png*")
    for number in range(10):
        for name, start in (("anna", 1), ("ben", 1 + shift)):
            drawn = np.zeros((24, 24), np.uint8)
            drawn[2:12, start : start + 9] = 255
            Image.fromarray(drawn).save(tmp_path / "masks" / name / f"{number}.png")
    if shift == 1:
        text = error_of(tmp_path)
        assert "are anna, ben structures?" in text and "--leave-out ben" in text
    options = {"kind": "segmentation"} if shift == 1 else {}
    assert imported(tmp_path, **options).dataset.labels == {"0": "anna", "1": "ben"}


def test_a_row_names_a_patient_and_one_of_the_images_in_his_folder(tmp_path: Path) -> None:
    files(tmp_path, "P1{n}/left.png", "P1{n}/right.png")
    rows = [
        (f"P1{n}", f"{side}.png", (n + len(side)) % 2)
        for n in range(10)
        for side in ("left", "right")
    ]
    table(tmp_path / "labels.csv", ("patient", "image", "label"), *rows)
    report = imported(tmp_path)
    found = {(item.patient, item.first.name, item.label) for item in report.sites[""]}
    assert found == {*rows} and all(
        item.first.parent.name == item.patient for item in report.sites[""]
    )
    table(tmp_path / "labels.csv", ("image", "label"), *(row[1:] for row in rows))
    (tmp_path / "datalist.json").unlink()
    assert "write the whole path in the table" in error_of(tmp_path)


def test_masks_of_structures_beside_their_image_are_named_by_structure(tmp_path: Path) -> None:
    files(tmp_path, "case{n}/image.png", "case{n}/disc.png*", "case{n}/cup.png*")
    assert "or give --structure NAME for each structure" in error_of(tmp_path)
    imported(tmp_path, structures=parse_structures(["disc", "cup"]))
    label = entries(tmp_path)["case3/image.png"]["label"]
    assert label == ["case3/disc.png", "case3/cup.png"]


def test_a_number_of_a_folder_and_of_files_may_be_a_patient(tmp_path: Path) -> None:
    files(tmp_path, *(f"{folder}/{{n}}.png" for folder in NUMBERS))
    table(tmp_path / "t.csv", ("ID", "diagnosis"), *((n, "ab"[n % 2]) for n in NUMBERS))
    assert "if the column names patients, give --patient-column" in error_of(tmp_path)
    imported(tmp_path, columns=Columns(patient="ID"))
    assert (entries(tmp_path)["7/2.png"]["label"], len(entries(tmp_path))) == (1, 100)


def test_the_sex_is_no_finding(tmp_path: Path) -> None:
    files(tmp_path, "{n}.png")
    rows = [(f"{n}.png", *(n >> place & 1 for place in range(4)), n % 2) for n in NUMBERS]
    table(tmp_path / "t.csv", ("image", "edema", "mass", "nodule", "effusion", "male"), *rows)
    assert "male are labels? all hold 0 and 1" in error_of(tmp_path)


# -- what the count of 2026-12-01 found ------------------------------------------------------------


@pytest.mark.parametrize(
    "splits", [("treningowy", "walidacyjny", "testowy"), ("training", "validatie", "test")]
)
def test_splits_in_further_languages_are_kept(splits: tuple[str, ...], tmp_path: Path) -> None:
    files(tmp_path, "{n}.png")
    rows = [(f"{number}.png", "ab"[number % 2], splits[number % 3]) for number in NUMBERS]
    table(tmp_path / "t.csv", ("image", "label", "zbior"), *rows)
    imported(tmp_path)
    assert entries(tmp_path)["1.png"]["split"] == "validation"
    assert entries(tmp_path)["8.png"]["split"] == "test"


def test_unknown_in_other_languages_is_said_to_be_a_class(tmp_path: Path) -> None:
    files(tmp_path, "{n}.png")
    rows = [(f"{number}.png", ("krank", "unbekannt")[number % 2]) for number in NUMBERS]
    table(tmp_path / "t.csv", ("Datei", "Befund"), *rows)
    assert "unbekannt in column Befund count as names" in imported(tmp_path).render()


def test_outlines_in_a_table_are_named(tmp_path: Path) -> None:
    """A table of VIA."""
    files(tmp_path, "{n}.png")
    outline = '"{""name"":""polygon"",""all_points_x"":[1,2],""all_points_y"":[1,2]}"'
    rows = [(f"{number}.png", outline, "polyp") for number in NUMBERS]
    header = ("filename", "region_shape_attributes", "region_attributes")
    table(tmp_path / "via.csv", header, *rows)
    text = error_of(tmp_path)
    assert "column region_shape_attributes has outlines, which are not read; save each" in text


def test_masks_of_several_objects_are_to_be_united(tmp_path: Path) -> None:
    files(tmp_path, "p{n}.png", "p{n}_lesion1.png*")
    for number in range(0, 10, 2):
        mask(tmp_path / f"p{number}_lesion2.png")
    assert "if they are of several objects, unite them" in error_of(tmp_path)


def test_outlines_of_imagej_are_named(tmp_path: Path) -> None:
    files(tmp_path, "p{n}.tif")
    (tmp_path / "p1_01.roi").write_bytes(b"Iout")
    assert "text files are not read (p1_01.roi)" in error_of(tmp_path)
