"""Nothing is guessed in silence: what an import does not know stops it, or is said in one line."""

import json
import os
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from pandas._libs.parsers import STR_NA_VALUES
from PIL import Image
from pydicom.data import get_testdata_file

from helpers import volume_sites
from helpers.downloaded_folders import classes, mask, pairs, picture, table
from helpers.small_tasks import small_task
from helpers.volume_sites import beside_a_series, change, dicom_series
from medflare.core.errors import DataError, MedflareError
from medflare.data.datalist import read_content, read_datalist
from medflare.data.decoding import target_of
from medflare.data.loading import open_source
from medflare.data.local import DATA_FOLDERS_VARIABLE, read_local
from medflare.data.reading import read_stored
from medflare.inference.inputs import find_inputs
from medflare.preparation.check import check_site
from medflare.preparation.dataset_import.datalists import ImportReport, import_folder
from medflare.preparation.dataset_import.frames import read_frame
from medflare.preparation.dataset_import.options import Columns, ImportOptions
from medflare.preparation.proposing import TaskHints, summarise
from medflare.tasks.config import load_task


def imported(root: Path, **options: Any) -> ImportReport:
    return import_folder(root, ImportOptions(**options))


def error_of(root: Path, **options: Any) -> str:
    """The error of one line, after which nothing was written."""
    with pytest.raises(DataError) as error:
        imported(root, **options)
    assert not [*root.rglob("datalist.json")]
    assert "\n" not in str(error.value)
    return str(error.value)


def content(root: Path) -> Any:
    return json.loads((root / "datalist.json").read_text())


def pictures(root: Path, number: int) -> list[str]:
    """The names of so many pictures."""
    return [picture(root / f"{n}.png", 60 + n).name for n in range(number)]


def rows(root: Path, *columns: Any) -> Path:
    """A table of pictures, whose further columns have these cells."""
    names = pictures(root, len(columns[0][1]))
    header = ("image", *(name for name, _ in columns))
    cells = [cells for _, cells in columns]
    return table(root / "t.csv", header, *zip(names, *cells, strict=True))


# -- splits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["holdout", "test2", "external test", "Prüfung", "2", "NA"])
def test_a_split_that_is_not_known(word: str, tmp_path: Path) -> None:
    splits = ["train"] * 14 + ["val"] * 4 + [word] * 2
    rows(tmp_path, ("label", "ab" * 10), ("split", splits))
    text = error_of(tmp_path)
    assert "t.csv line 20" in text and repr(word) in text and "--redraw" in text
    drawn = imported(tmp_path, redraw=True).sites[""]
    assert sum(item.split == "test" for item in drawn) == 4


def test_images_without_a_split_are_counted(tmp_path: Path) -> None:
    rows(tmp_path, ("label", "ab" * 10), ("split", ["train", "test"] * 8 + [""] * 4))
    assert "note: 4 of 20 images have no split" in imported(tmp_path).render()
    assert "no split" not in imported(tmp_path, redraw=True, force=True).render()


@pytest.mark.parametrize("name", ["external_set", "Holdout", "external_test", "extern/images"])
@pytest.mark.parametrize("redraw", [False, True])
def test_a_split_folder_that_is_not_known(name: str, redraw: bool, tmp_path: Path) -> None:
    for folder in ("train", name):
        classes(tmp_path / folder, patients=10)
    text = error_of(tmp_path, redraw=redraw)
    assert name.partition("/")[0] in text and "rename it" in text and "cat" in text


@pytest.mark.parametrize("inner", ["", "bird", "a/b"])
def test_a_folder_beside_those_of_splits_is_no_class(inner: str, tmp_path: Path) -> None:
    classes(tmp_path / "train", patients=10)
    for number in range(6):
        picture(tmp_path / "extern" / inner / f"{number}.png")
    assert "extern" in (text := error_of(tmp_path)) and "rename" in text and "--kind" in text


def test_masks_beside_those_of_splits(tmp_path: Path) -> None:
    for folder in ("train", "extern"):
        pairs(tmp_path / folder, image="images/{n}.png", label="masks/{n}.png")
    assert "extern/images/IMG_00.png" in (text := error_of(tmp_path)) and "--redraw" in text
    assert len(imported(tmp_path, redraw=True).sites[""]) == 20


@pytest.mark.parametrize("names", [("训练集", "验证集", "测试集"), ("Trainingsdaten", "Testdaten")])
def test_folders_of_splits_in_other_languages(names: tuple[str, ...], tmp_path: Path) -> None:
    for count, name in enumerate(names, start=3):
        pairs(tmp_path / name, count, image="images/{n}.png", label="masks/{n}.png")
    drawn = imported(tmp_path).sites[""]
    tests = {item.first for item in drawn if item.split == "test"}
    assert tests == {*(tmp_path / names[-1] / "images").iterdir()}


@pytest.mark.parametrize("images", [3, 6])
def test_folders_that_may_be_splits(images: int, tmp_path: Path) -> None:
    for name in ("TR", "TE"):
        pairs(tmp_path / name, images, image="images/{n}.png", label="masks/{n}.png")
    assert "the folders TE, TR; if they are splits, rename them" in imported(tmp_path).render()


LISTED = {"training": range(6), "validation": (6, 7), "test": (8, 9)}


@pytest.mark.parametrize("name", ["splits.json", "dataset.json", "fold0.json"])
@pytest.mark.parametrize("entry", ["IMG_{:02}.png", {"image": ["images/IMG_{:02}.png"]}])
def test_splits_of_a_json_list(name: str, entry: Any, tmp_path: Path) -> None:
    """As MONAI's and Decathlon's; the unlabelled test images of Decathlon are not there."""
    root = pairs(tmp_path / "in", image="images/{n}.png", label="masks/{n}.png")
    text = json.dumps(entry)
    listed = {}
    for split, numbers in LISTED.items():
        listed[split] = [json.loads(text.replace("{:02}", f"{n:02}")) for n in numbers]
    (root / name).write_text(json.dumps(listed), encoding="utf-8")
    report = imported(root)
    assert name in report.dataset.layout
    for item in report.sites[""]:
        assert int(item.first.stem[-2:]) in LISTED[item.split]
    listed["test"] = ["other.png"]
    (root / name).write_text(json.dumps(listed), encoding="utf-8")
    (root / "datalist.json").unlink()
    assert "test names IMG_08 alone" in error_of(root)
    assert "datalist.json in the folder" not in imported(root, redraw=True).render()
    out = tmp_path / "out"
    assert "datalist.json in the folder" in imported(root, redraw=True, out=out).render()


def test_the_test_images_of_decathlon_may_have_the_names_of_others(tmp_path: Path) -> None:
    pairs(tmp_path, image="imagesTr/{n}.png", label="labelsTr/{n}.png")
    listed: dict[str, list[Any]] = {"training": [], "test": ["./imagesTs/IMG_00.png"]}
    for path in (tmp_path / "imagesTr").iterdir():
        listed["training"].append({"image": f"./imagesTr/{path.name}"})
    (tmp_path / "dataset.json").write_text(json.dumps(listed), encoding="utf-8")
    picture(tmp_path / "imagesTs" / "IMG_00.png")
    assert imported(tmp_path).dataset.layout == "images and masks by name"


def test_folds_of_a_json_list_are_asked_about(tmp_path: Path) -> None:
    pairs(tmp_path)
    listed = [{"image": f"IMG_{n:02}.png", "fold": n % 5} for n in range(10)]
    (tmp_path / "brats.json").write_text(json.dumps({"training": listed}), encoding="utf-8")
    assert "IMG_00 alone, as it has a fold" in error_of(tmp_path)


def test_training_images_may_lie_beside_a_folder_of_test_images(tmp_path: Path) -> None:
    for kind, write in (("classes", classes), ("masks", pairs)):
        for folder in (tmp_path / kind, tmp_path / kind / "test"):
            write(folder)
        assert "the splits" in imported(tmp_path / kind).guessed
        tests = content(tmp_path / kind)["test"]
        assert tests and all(entry["image"].startswith("test/") for entry in tests)


# -- names -----------------------------------------------------------------------------------------------------------------


def test_a_number_in_two_tables_is_one_class(tmp_path: Path) -> None:
    for split, end in (("train", ""), ("test", ".0")):
        names = pictures(tmp_path / split, 12)
        table(
            tmp_path / f"{split}.csv",
            ("image", "label"),
            *((f"{split}/{name}", f"{n % 3}{end}") for n, name in enumerate(names)),
        )
    assert imported(tmp_path).dataset.labels == {"0": "0", "1": "1", "2": "2"}
    assert {entry["label"] for entry in content(tmp_path)["test"]} == {0, 1, 2}


@pytest.mark.parametrize(
    "pair", [("1", "1.00"), ("1", "01"), ("1.5", "1,5"), ("Mild", "mild"), ("not_seen", "not seen")]
)
def test_one_class_is_not_written_in_two_ways(pair: tuple[str, str], tmp_path: Path) -> None:
    names = pictures(tmp_path / "table", 12)
    lines = [f"{name};{pair[n % 2]};x" for n, name in enumerate(names)]
    (tmp_path / "table" / "t.csv").write_text("\n".join(["image;label;note", *lines]))
    text = error_of(tmp_path / "table")
    assert "label" in text and all(repr(name) in text for name in pair)
    classes(tmp_path / "folders", names=(*pair, "other"))
    assert all(repr(name) in error_of(tmp_path / "folders") for name in pair)
    for site, name in zip("ab", pair, strict=True):
        classes(tmp_path / "sites" / site, names=(name, "other"))
    assert all(repr(name) in error_of(tmp_path / "sites", site_folders=True) for name in pair)


@pytest.mark.parametrize("word", sorted(STR_NA_VALUES - {"", "#N/A"}))
def test_words_for_missing_values_are_names(word: str, tmp_path: Path) -> None:
    names = ["Mild", word, "Severe"] * 8
    hospitals = [word] * 12 + ["UKE"] * 12
    rows(tmp_path / "in", ("label", names), ("hospital", hospitals), ("patient", range(24)))
    report = imported(tmp_path / "in", columns=Columns(site="hospital"), out=tmp_path / "out")
    assert (
        sorted(report.dataset.labels.values()) == sorted({*names}) and "unknown" not in report.sites
    )
    assert sum(map(len, report.sites.values())) == 24
    assert (
        f"{word} in column label" in report.render()
        and f"{word} in column hospital" in report.render()
    )


@pytest.mark.parametrize("error", ["#N/A", "#REF!", "#DIV/0!", "#NAME?", "#WERT!"])
@pytest.mark.parametrize("column", ["label", "patient"])
def test_errors_of_excel_are_no_names(column: str, error: str, tmp_path: Path) -> None:
    columns = {"label": ["a", "b"] * 6, "patient": [f"p{n}" for n in range(12)]}
    columns[column][7] = error
    rows(tmp_path, *columns.items())
    assert f"t.csv line 9: {error} in column {column} is an error" in error_of(tmp_path)


def test_findings_that_are_not_known_are_missing(tmp_path: Path) -> None:
    rows(tmp_path, ("A", ["1", "0", "NA"] * 4), ("B", ["0", "1", "1"] * 4))
    assert "no label" in error_of(tmp_path, columns=Columns(label="A,B"))
    assert len(imported(tmp_path, columns=Columns(label="A,B"), skip=True).sites[""]) == 8


def test_sites_have_the_classes_of_all_sites(tmp_path: Path) -> None:
    classes(tmp_path / "A", patients=10, names=("mel", "nv"))
    classes(tmp_path / "B", patients=10, names=("bcc", "nv"))
    report = imported(tmp_path, site_folders=True)
    assert report.dataset.labels == {"0": "bcc", "1": "mel", "2": "nv"}
    counts = np.zeros((2, 3), int)
    for line in report.render().splitlines():
        if line.split()[:1] in (["A"], ["B"]):
            counts["AB".index(line.split()[0])] += [int(number) for number in line.split()[-3:]]
    assert counts.tolist() == [[0, 10, 10], [10, 0, 10]]
    for site in "AB":
        assert content(tmp_path / site)["labels"] == report.dataset.labels
        assert all(
            entry["label"] == ["bcc", "mel", "nv"].index(entry["image"].split("/")[0])
            for entry in content(tmp_path / site)["training"]
        )
    assert "note: A: no image of bcc" in report.render()


def test_a_warning_of_several_sites_is_printed_once(tmp_path: Path) -> None:
    for site, name in (("A", "{n}"), ("B", "{n}"), ("C", "eve{n}_left"), ("D", "{p}_{n}")):
        for n in range(12):
            picture(tmp_path / site / "ab"[n % 2] / f"{name.format(n=n, p='uvw'[n % 3])}.png")
    lines = imported(tmp_path, site_folders=True).render().splitlines()
    unknown = [line for line in lines if "patients are unknown" in line]
    assert [line.split(":")[1] for line in unknown] == [" A, B, C", " D"]
    assert "give --patient REGEX (" in unknown[0]
    assert "give --patient '^([^_-]+)[_-]' (if u, ... are patients)" in unknown[1]


def test_sites_of_other_kinds_or_findings_are_refused(tmp_path: Path) -> None:
    pairs(tmp_path / "kinds" / "A")
    classes(tmp_path / "kinds" / "B")
    assert "--kind" in error_of(tmp_path / "kinds", site_folders=True)
    for site, names in (("A", ("x", "y")), ("B", ("x", "z"))):
        rows(tmp_path / "findings" / site, (names[0], ["1", "1"] * 6), (names[1], ["1", "0"] * 6))
    assert "--label-column" in error_of(tmp_path / "findings", site_folders=True)


@pytest.mark.parametrize(("table_form", "file_form"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_of_macos_are_those_of_others(
    table_form: Any, file_form: Any, tmp_path: Path
) -> None:
    def there(text: str) -> str:
        return unicodedata.normalize(file_form, text)

    def here(text: str) -> str:
        return unicodedata.normalize(table_form, text)

    for n in range(12):
        picture(tmp_path / "table" / there("Läsionen") / there(f"Läsion_{n}.png"))
    cells = [
        (here(f"Läsionen/Läsion_{n}.png"), (there, here)[n % 2]("Nävus") if n % 3 else "mel")
        for n in range(12)
    ]
    table(tmp_path / "table" / "t.csv", ("image", here("Läsionstyp")), *cells)
    report = imported(
        tmp_path / "table",
        columns=Columns(label=there("Läsionstyp")),
        patient=here(r"Läsion_(\d+)"),
    )
    assert [*report.dataset.labels.values()] == ["Nävus", "mel"] and len(report.sites[""]) == 12
    pairs(
        tmp_path / "masks", image=there("images/Läsion_{n}.png"), label=here("masks/Läsion_{n}.png")
    )
    assert len(imported(tmp_path / "masks").sites[""]) == 10
    for split, form in (("train", here), ("test", there)):
        classes(tmp_path / "classes" / split, names=(form("Nävus"), "mel"))
    assert [*imported(tmp_path / "classes").dataset.labels.values()] == ["Nävus", "mel"]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_splits_classes_and_patients_in_letters_of_macos(form: Any, tmp_path: Path) -> None:
    def there(text: str) -> str:
        return unicodedata.normalize(form, text)

    for split in ("entrenamiento", there("validación"), "prueba"):
        classes(tmp_path / "splits" / split)
    report = imported(tmp_path / "splits")
    for item in report.sites[""]:
        top = item.first.relative_to(tmp_path / "splits").parts[0]
        expected = {"entrenamiento": "training", "prueba": "test"}.get(top, "validation")
        assert item.split == expected
    listed = tmp_path / "listed"
    for n in range(10):
        picture(listed / there(f"Läsion_{n}.png"))
    table(listed / "t.csv", ("image", "label"), *((f"Läsion_{n}", n % 2) for n in range(10)))
    for split, numbers in (("train", range(6)), ("val", (6, 7)), ("test", (8, 9))):
        (listed / f"{split}.txt").write_text("".join(f"Läsion_{n}\n" for n in numbers))
    splits = [item.split for item in imported(listed).sites[""]]
    assert splits == [*["training"] * 6, *["validation"] * 2, *["test"] * 2]
    for n in range(10):
        picture(tmp_path / "other" / (there("Nävus"), "mel")[n % 2] / f"{n}.png")
    cells = [(f"{n}.png", ("Nävus", "mel")[n % 2]) for n in range(9)]
    table(tmp_path / "other" / "t.csv", ("image", "label"), *cells, ("9.png", "Nävus"))
    assert "but in the folder of mel" in error_of(tmp_path / "other")
    for n in range(8):
        picture(tmp_path / "folders" / there(f"Müller_{n:02}") / "1.png")
        picture(tmp_path / "folders" / there("Übersicht") / f"{n}.png")
    folders = [(f"elsewhere/Müller_{n:02}/", n % 2) for n in range(8)]
    table(tmp_path / "folders" / "t.csv", ("folder", "label"), *folders)
    assert len(imported(tmp_path / "folders", leave_out=("Übersicht",)).sites[""]) == 8


def test_a_cell_that_two_files_have_is_refused(tmp_path: Path) -> None:
    for n in range(8):
        picture(tmp_path / f"{n}.png")
        picture(tmp_path / f"{n}.jpg")
    table(tmp_path / "t.csv", ("image", "label"), *((n, "ab"[n % 2]) for n in range(8)))
    assert "whole path" in error_of(tmp_path, table=tmp_path / "t.csv")


# -- folders ---------------------------------------------------------------------------------------------------------------


def structures(
    root: Path,
    tops: tuple[str, ...] = ("images", "disc", "cup"),
    value: int = 1,
    name: str = "{n}.png",
) -> Path:
    """Photographs, and a folder of masks for each structure; the first cup is empty."""
    for number in range(10):
        picture(root / tops[0] / f"{number}.png", 80 + number)
        for top in tops[1:]:
            file = name.format(n=number, top=Path(top).name)
            mask(root / top / file, (value * (number > 0 or top == tops[1]),))
    return root


@pytest.mark.parametrize("split", ["", "train", "test"])
@pytest.mark.parametrize("home", ["images", "fundus"])
@pytest.mark.parametrize("name", ["{n}.png", "{n}_{top}.png", "{n}.bmp"])
def test_a_folder_of_masks_for_each_structure(
    split: str, home: str, name: str, tmp_path: Path
) -> None:
    for folder in ("", split) if split == "test" else (split,):
        structures(tmp_path / folder, (home, "disc", "cup"), name=name)
    if home == "fundus":
        text = error_of(tmp_path)
        assert "--kind segmentation" in text and "--kind classification" in text
    report = imported(tmp_path, kind="segmentation" if home == "fundus" else "")
    assert report.dataset.kind == "segmentation" and report.dataset.labels == {
        "0": "cup",
        "1": "disc",
    }
    entries = read_datalist(tmp_path, "segmentation")
    assert len(entries) == (20 if split == "test" else 10)
    for entry in entries:
        base = entry.image.parents[1]
        number = entry.image.stem
        assert entry.masks == [
            base / top / name.format(n=number, top=top) for top in ("cup", "disc")
        ]
    assert ("--kind" in report.guessed) == (home == "images")
    assert imported(tmp_path, kind="classification", force=True).dataset.kind == "classification"


def test_structures_with_other_files_are_refused(tmp_path: Path) -> None:
    structures(tmp_path / "lacking")
    (tmp_path / "lacking" / "cup" / "3.png").unlink()
    mask(tmp_path / "lacking" / "disc" / "99.png")
    assert "3.png: no mask of cup" in error_of(tmp_path / "lacking")
    skipped = imported(tmp_path / "lacking", skip=True)
    assert (
        len(skipped.sites[""]) == 9
        and "left out: disc/99.png: a mask without an image" in skipped.render()
    )
    for number, name in enumerate(("{n}-OD.png", "other{n}.png")):
        text = error_of(structures(tmp_path / str(number), name=name))
        assert "--mask-column" in text and "--kind classification" in text


def test_pictures_of_equal_names_are_classes(tmp_path: Path) -> None:
    for name in ("cat", "dog", "nothing"):
        for number in range(8):
            file = picture(tmp_path / name / f"{number}.png")
            if name == "nothing":
                Image.new("L", (16, 16)).save(file)
    assert imported(tmp_path).dataset.kind == "classification"


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("names", [("img_dir", "ann_dir"), ("x", "y"), ("ct", "organ")])
def test_masks_in_a_folder_of_any_name_are_no_class(
    names: tuple[str, str], suffix: str, tmp_path: Path
) -> None:
    """As of mmsegmentation; before: every mask was an image of the class ann_dir."""
    images, masks = names
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(6):
            (tmp_path / images / split).mkdir(parents=True, exist_ok=True)
            shades = np.sort(draw.integers(0, 256, (16, 16), dtype=np.uint8))
            Image.fromarray(shades).save(tmp_path / images / split / f"{split}{number}.{suffix}")
            mask(tmp_path / masks / split / f"{split}{number}.png", (1, 2))
    text = error_of(tmp_path)
    assert f"rename {masks} masks, and {images} images" in text
    (tmp_path / masks).rename(tmp_path / "masks")
    (tmp_path / images).rename(tmp_path / "images")
    dataset = imported(tmp_path).dataset
    assert dataset.kind == "segmentation" and len(dataset.items) == 12


@pytest.mark.parametrize("end", ["_{n}", "_cell_{n}", " ({n})"])
def test_numbered_masks_of_several_values_are_no_class(end: str, tmp_path: Path) -> None:
    """As of SegPC: x/106.bmp with a file for each cell, y/106_1.bmp and y/106_2.bmp."""
    for number in range(106, 114):
        picture(tmp_path / "x" / f"{number}.png", value=number, channels=3)
        for cell in range(1, 4):
            mask(tmp_path / "y" / f"{number}{end.format(n=cell)}.png", (20, 40))
    assert "rename y masks, and x images" in error_of(tmp_path)
    for file in (tmp_path / "y").iterdir():
        file.rename(file.with_stem("x" + re.sub(r"\W|_", "8", file.stem)))
    assert len(imported(tmp_path).dataset.items) == 32


def test_a_class_may_be_called_like_a_column(tmp_path: Path) -> None:
    report = imported(classes(tmp_path, names=("patients", "split")))
    header, training = report.render().splitlines()[2:4]
    assert header.split() == ["split", "images", "patients", "patients", "split"]
    assert training.split() == ["training", "28", "28", "14", "14"]


def test_folders_of_one_volume_each_may_be_patients(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}").mkdir()
        series = dicom_series(tmp_path / f"{number}" / "CT")
        change(series, PatientID=f"P{number}", SeriesInstanceUID=f"1.2.3.{number}")
    assert "4 folders (0, ...) for 4 images are many classes; if they are" in error_of(tmp_path)


def test_a_split_that_was_drawn_may_lack_a_class(tmp_path: Path) -> None:
    """Few images of five grades, as of a sample of Messidor: all of grade 1 are drawn for test."""
    names = [picture(tmp_path / f"{letter}.png").name for letter in "abcdefghijk"]
    table(tmp_path / "t.csv", ("image", "grade"), *zip(names, "01234013401", strict=True))
    report = imported(tmp_path)
    assert [item.label for item in report.sites[""] if item.split == "test"] == [1, 1, 1]
    assert any(
        text.endswith("of these classes, or give another --seed") for text in report.warnings
    )
    other = imported(tmp_path, seed=3, force=True)
    assert 1 in [item.label for item in other.sites[""] if item.split == "training"]


def test_classes_that_stand_in_one_split_only(tmp_path: Path) -> None:
    for name in "abc":
        for number in range(5):
            picture(tmp_path / "patients" / f"study {name}" / f"{name}_{number}.png")
    text = error_of(tmp_path / "patients", patient="^(.)")
    assert "study a" in text and "--kind classification" in text
    assert imported(tmp_path / "patients", patient="^(.)", kind="classification").warnings
    rows(
        tmp_path / "rare",
        ("label", ["a", "b"] * 9 + ["c", "c"]),
        ("patient", [n // 2 for n in range(20)]),
    )
    (warning,) = imported(tmp_path / "rare").warnings
    assert "c in " in warning and " a in" not in warning


@pytest.mark.parametrize("volumes", [False, True])
def test_several_masks_of_255_are_those_of_1(volumes: bool, tmp_path: Path) -> None:
    """From the folder to tensors, without a copy."""
    root = structures(tmp_path / "rim", value=255, name="{n}.bmp")
    for file in [*root.rglob("*.bmp"), *root.rglob("*.png")] if volumes else []:
        array = np.asarray(Image.open(file)).T
        volume_sites.write(file.with_suffix(".nii.gz"), np.stack([array] * 4, axis=2), np.eye(4))
        file.unlink()
    imported(root)
    settings: dict[str, Any] = {
        "target": "multilabel",
        "labels": ["cup", "disc"],
        "spatial_dims": 2 + volumes,
        "size": [16, 16, 4][: 2 + volumes],
    }
    task = small_task(**settings)
    assert check_site(root, task).ok
    entries = read_datalist(root, "segmentation")
    source = open_source("A", task, root)
    for entry in entries:
        target = target_of(task, source, entry, source.image(entry))
        for file, drawn in zip(entry.masks, target, strict=True):
            stored = nibabel.load(file).dataobj if volumes else np.asarray(Image.open(file))
            np.testing.assert_array_equal(drawn, np.asarray(stored) > 0)
    if not volumes:
        mask(entries[4].masks[1], (255, 128))
        text = f"{entries[4].masks[1]}: a structure's own mask holds 128, 255"
        assert text in check_site(root, task).render()


@pytest.mark.parametrize("above", ["masks", "ground truth", "train/masks"])
@pytest.mark.parametrize("name", ["{n}.png", "{n}_{top}.png", "{n}_mask.png"])
def test_folders_of_structures_in_the_folder_of_masks(
    above: str, name: str, tmp_path: Path
) -> None:
    home = str(Path(above).parent / "images")
    structures(tmp_path, (home, f"{above}/disc", f"{above}/cup"), name=name)
    report = imported(tmp_path)
    assert report.dataset.labels == {"0": "cup", "1": "disc"}
    for entry in read_datalist(tmp_path, "segmentation"):
        number = entry.image.stem
        expected = [
            tmp_path / above / top / name.format(n=number, top=top) for top in ("cup", "disc")
        ]
        assert entry.masks == expected


def test_several_masks_that_an_image_can_have_are_named(tmp_path: Path) -> None:
    for site in ("north", "south"):
        structures(tmp_path / site, ("images", "masks/disc", "masks/cup"), value=255)
    text = error_of(tmp_path)
    assert "north/masks/cup/0.png and north/masks/disc/0.png" in text and "--site-folders" in text
    report = imported(tmp_path, site_folders=True)
    assert [*report.sites] == ["north", "south"] and report.dataset.labels == {
        "0": "cup",
        "1": "disc",
    }


def test_folders_of_patients_in_the_folder_of_masks(tmp_path: Path) -> None:
    for number in range(10):
        picture(tmp_path / "images" / f"p{number}" / "eye.png", 80 + number)
        mask(tmp_path / "masks" / f"p{number}" / "eye.png")
    imported(tmp_path)
    for entry in read_datalist(tmp_path, "segmentation"):
        assert entry.masks == [tmp_path / "masks" / entry.image.parent.name / "eye.png"]


SYSTEM = [
    "@eaDir",
    "@Recycle",
    "#recycle",
    "#snapshot",
    "$RECYCLE.BIN",
    "RECYCLER",
    "System Volume Information",
    "lost+found",
    "__MACOSX",
]


@pytest.mark.parametrize("name", SYSTEM)
@pytest.mark.parametrize(("write", "inside"), [(classes, "cat"), (pairs, "")])
def test_folders_of_drives_and_systems_are_left_out(
    name: str, write: Callable[[Path], Path], inside: str, tmp_path: Path
) -> None:
    root = tmp_path / "hospitals" / "north"
    expected = len(imported(write(root)).sites[""])
    for folder in (root.parent, root, root / inside):
        for thumbnail in ("SYNOPHOTO_THUMB_S.jpg", "SYNOPHOTO_THUMB_XL.jpg"):
            picture(folder / name / "p00_0.png" / thumbnail)
    report = imported(root, force=True)
    assert len(report.sites[""]) == expected and name in report.render()
    assert [*imported(root.parent, site_folders=True, force=True).sites] == ["north"]


def test_folders_of_sites_are_named_when_they_are_left_out(tmp_path: Path) -> None:
    classes(tmp_path, names=("cat", "dog", "cow"))
    (tmp_path / "cow" / "datalist.json").write_text("{}")
    assert "cow" in imported(tmp_path).render().partition("note:")[2]


# -- files -----------------------------------------------------------------------------------------------------------------


def test_links_to_folders_are_named(tmp_path: Path) -> None:
    classes(tmp_path / "elsewhere", names=("a", "b", "c"))
    (tmp_path / "linked").mkdir()
    for name in "ab":
        (tmp_path / "linked" / name).symlink_to(tmp_path / "elsewhere" / name)
    assert "links" in (text := error_of(tmp_path / "linked")) and "a, b" in text
    classes(tmp_path / "linked")
    assert "links" in imported(tmp_path / "linked").render()


def test_links_to_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    annex = classes(tmp_path / "annex")
    for file in annex.rglob("*.png"):
        link = tmp_path / "linked" / file.relative_to(annex)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(file, link.parent))
    text = error_of(tmp_path / "linked")
    assert "p00_0.png is a link" in text and "--out" in text and DATA_FOLDERS_VARIABLE in text
    report = imported(tmp_path / "linked", out=tmp_path / "deep" / "er" / "out")
    assert "40 files are links to files outside" in report.render(), "another may have packed it"
    assert "outside" not in imported(annex, out=tmp_path / "out").render()
    entries = read_datalist(tmp_path / "deep" / "er" / "out", "classification")
    assert all(entry.image.is_file() and not entry.image.is_symlink() for entry in entries)
    monkeypatch.setenv(DATA_FOLDERS_VARIABLE, str(annex))
    imported(tmp_path / "linked")
    assert "outside" not in imported(tmp_path / "linked", out=tmp_path / "allowed").render()
    task = small_task("classification", target="binary", labels=["dog"])
    assert check_site(tmp_path / "linked", task).ok and summarise(tmp_path / "linked", TaskHints())
    monkeypatch.delenv(DATA_FOLDERS_VARIABLE)
    assert (line := check_site(tmp_path / "linked", task).render()).count(
        "is a link"
    ) == 1 and DATA_FOLDERS_VARIABLE in line
    with pytest.raises(DataError, match="is a link"):
        summarise(tmp_path / "linked", TaskHints())


def test_links_to_allowed_folders_are_followed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    annex = classes(tmp_path / "annex")
    (tmp_path / "linked").mkdir()
    for link in (
        tmp_path / "linked" / "all",
        tmp_path / "linked" / "again",
        annex / "circle",
        annex / "cat" / "circle",
    ):
        link.symlink_to(annex)
    assert "links" in error_of(tmp_path / "linked")
    monkeypatch.setenv(DATA_FOLDERS_VARIABLE, str(annex))
    report = imported(tmp_path / "linked")
    assert len(report.sites[""]) == 40 and "links" in report.render()
    inputs, _ = find_inputs([tmp_path / "linked"], tmp_path / "out")
    assert len(inputs) == 40


def test_what_windows_writes(tmp_path: Path) -> None:
    """Byte order marks and backslashes."""
    pairs(tmp_path, image="images/{n}.png", label="masks/{n}.png")
    (tmp_path / "dataset.json").write_text(
        json.dumps({"labels": {"background": 0, "disc": 1}}), encoding="utf-8-sig"
    )
    assert imported(tmp_path).dataset.labels == {"background": 0, "disc": 1}
    expected = read_datalist(tmp_path, "segmentation")
    text = (tmp_path / "datalist.json").read_text().replace("/", r"\\")
    (tmp_path / "datalist.json").write_text(text, encoding="utf-8-sig")
    actual = read_datalist(tmp_path, "segmentation")
    assert [(entry.image, entry.masks) for entry in actual] == [
        (entry.image, entry.masks) for entry in expected
    ]
    (tmp_path / "datalist.json").write_text(text.replace(r"images\\", r"..\\images\\"))
    with pytest.raises(DataError, match="outside"):
        read_datalist(tmp_path, "segmentation")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_text_of_all_editors(encoding: str, line_end: str, tmp_path: Path) -> None:
    """One rule for the task, the local settings, a datalist and a table."""

    def save(path: Path, text: str) -> Path:
        path.write_bytes(text.replace("\n", line_end).encode(encoding))
        return path

    task = small_task(labels=["Läsion"])
    assert (
        load_task(
            save(tmp_path / "task.json", json.dumps(task.to_dict(), ensure_ascii=False, indent=1))
        )
        == task
    )
    assert read_local(save(tmp_path / "medflare.json", '{\n"data_root": "/Läsion"}')) == {
        "data_root": "/Läsion"
    }
    save(tmp_path / "datalist.json", '{\n"training": [{"image": "Läsion.png", "label": 1}]}')
    assert read_datalist(tmp_path, "classification")[0].image == tmp_path / "Läsion.png"
    for separator in ",;\t|":
        frame = read_frame(
            save(tmp_path / "t.csv", f"image{separator}label\nLäsion.png{separator}Ö\n")
        )
        assert frame.to_dict("records") == [{"image": "Läsion.png", "label": "Ö"}]
    # The first line is for Excel.
    frame = read_frame(save(tmp_path / "t.csv", "sep=;\nimage;label\nLäsion.png;Ö, ö\n"))
    assert frame.to_dict("records") == [{"image": "Läsion.png", "label": "Ö, ö"}]


def test_text_of_no_known_encoding(tmp_path: Path) -> None:
    readers = {
        "task.json": load_task,
        "medflare.json": read_local,
        "datalist.json": lambda path: read_content(path.parent),
        "t.csv": read_frame,
    }
    for name, reader in readers.items():
        for encoding in ("cp1252", "utf-16-le"):
            (tmp_path / name).write_bytes('{"training": "Läsion"}'.encode(encoding))
            with pytest.raises(MedflareError, match=rf"{name}: .*save it in UTF-8") as error:
                reader(tmp_path / name)
            assert "\n" not in str(error.value)
        if name.endswith("json"):
            (tmp_path / name).write_text(r'{"training": "C:\images"}')
            with pytest.raises(MedflareError, match=rf"{name}: .*write / for"):
                reader(tmp_path / name)


def test_patients_that_are_all_called_alike_are_named(tmp_path: Path) -> None:
    rows(tmp_path, ("label", "ab" * 6), ("patient", ["ANON"] * 12))
    assert "'ANON'" in (text := error_of(tmp_path)) and "--patient" in text


def test_a_file_that_is_no_dicom_is_left_out_on_request(tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / ("healthy", "ill")[number % 2] / f"scan{number}"
        folder.parent.mkdir(exist_ok=True)
        change(dicom_series(folder), PatientID=f"P{number}", SeriesInstanceUID=f"1.2.3.{number}")
    beside_a_series(tmp_path)
    (tmp_path / "ill" / "notes.dcm").write_text("no DICOM")
    assert "ill/notes.dcm" in (text := error_of(tmp_path)) and "--skip" in text
    report = imported(tmp_path, skip=True)
    assert len(report.sites[""]) == 8 and "left out: ill/notes.dcm" in report.render()


def test_dicom_objects_without_an_image_are_counted(tmp_path: Path) -> None:
    """A report with DICOM's mark, one without it, and a dose."""
    for number in range(8):
        folder = tmp_path / ("healthy", "ill")[number % 2] / f"scan{number}"
        folder.parent.mkdir(exist_ok=True)
        change(dicom_series(folder), PatientID=f"P{number}", SeriesInstanceUID=f"1.2.3.{number}")
        change(folder, RescaleSlope=1, RescaleIntercept=number)
    for name in ("reportsi.dcm", "rtstruct.dcm", "rtdose.dcm"):  # the second without the mark
        shutil.copy(get_testdata_file(name), tmp_path / "ill" / "scan1" / name)
    report = imported(tmp_path)
    assert len(report.sites[""]) == 8
    task = small_task(
        "classification", target="binary", labels=["ill"], spatial_dims=3, size=[8, 8, 8]
    )
    assert check_site(tmp_path, task).ok
    assert len(find_inputs([tmp_path], tmp_path / "out")[0]) == 8
    text = report.render()
    assert "left out, DICOM objects that are not read as images: 3 (" in text
    assert "RT Structure Set Storage" in text and "make masks of their outlines" in text
    assert "the first: ill/scan1/reportsi.dcm" in text


def test_slides_are_not_read_as_slices(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / "ab"[number % 2] / str(number)
        folder.parent.mkdir(exist_ok=True)
        change(dicom_series(folder), SOPClassUID="1.2.840.10008.5.1.4.1.1.77.1.6")
    text = error_of(tmp_path)
    assert "no image" in text and "save regions of the slides as PNG" in text


def test_what_is_guessed_is_said_with_the_options(tmp_path: Path) -> None:
    assert "--kind" in imported(classes(tmp_path / "a")).render().partition("guessed: ")[2]
    assert not imported(tmp_path / "a", kind="classification", force=True).guessed
    rows(tmp_path / "b", ("label", "ab" * 10), ("split", ["train", "test"] * 10))
    line = imported(tmp_path / "b").render().partition("guessed: ")[2]
    assert "--label-column" in line and "--redraw" in line
    for columns, guessed in ((Columns(split="split"), True), (Columns(label="label"), False)):
        line = imported(tmp_path / "b", columns=columns, force=True).guessed
        assert ("--label-column" in line) == guessed


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("first", ["", "sep={}\n"])
def test_a_row_with_more_cells_than_the_header_is_refused(
    first: str, separator: str, tmp_path: Path
) -> None:
    """Its cells would be those of other columns; an empty one at the end is none."""
    file = tmp_path / "t.csv"

    def write(*rows: str) -> None:
        text = "\n".join(["image,label,note", *rows]) + "\n"
        file.write_text(first.format(separator) + text.replace(",", separator))

    write("0.png,a,,", "1.png,b,well,")
    assert read_frame(file)["note"].tolist() == ["", "well"]
    write("0.png,a,old, blurred", "1.png,b,well")
    line = 3 if first else 2
    with pytest.raises(DataError, match=rf"t\.csv: .*line {line} has 4 cells, the first one 3"):
        read_frame(file)


def volume(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.asarray(values, np.int16), np.eye(4)), path)


def test_folders_of_patients_are_no_classes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for patient in ("pat00", "pat01", "pat02"):
        for name in ("t1", "flair", "lesion"):
            volume(tmp_path / patient / f"{name}.nii.gz", random.integers(0, 99, (5, 4, 3)))
    error = error_of(tmp_path)
    assert "holds flair.nii.gz, lesion.nii.gz, t1.nii.gz, as folders of patients do" in error


@pytest.mark.parametrize("top", ["Kvasir-SEG", "Segmentation"])
def test_a_folder_of_everything_that_is_called_like_masks(top: str, tmp_path: Path) -> None:
    for number in range(6):
        picture(tmp_path / top / "images" / f"{number}.png", value=40 + 9 * number)
        mask(tmp_path / top / "masks" / f"{number}.png")
    assert len(imported(tmp_path).dataset.items) == 6


def test_structures_called_ignore_are_none(tmp_path: Path) -> None:
    for number in range(6):
        picture(tmp_path / "images" / f"{number}.png", value=40 + 9 * number)
        mask(tmp_path / "masks" / f"{number}.png")
    imported(tmp_path)
    file = tmp_path / "datalist.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "labels": {"0": "background", "1": "a", "2": "ignore"}}))
    assert "ignore" not in summarise(tmp_path, TaskHints()).settings["labels"]


@pytest.mark.parametrize("white_first", [False, True])
def test_a_mask_whose_palette_has_white_before_black_is_refused(
    white_first: bool, tmp_path: Path
) -> None:
    indices = np.zeros((8, 8), np.uint8)
    indices[2:5, 3:6] = 1
    image = Image.fromarray(indices, "P")
    palette = [255, 255, 255, 0, 0, 0] if white_first else [0, 0, 0, 255, 255, 255]
    image.putpalette(palette)
    image.save(tmp_path / "mask.png")
    if white_first:
        with pytest.raises(DataError, match="palette has white as a lower number"):
            read_stored(tmp_path / "mask.png", mask=True)
    else:
        assert (indices == read_stored(tmp_path / "mask.png", mask=True).array[0].T).all()


# -- tables and folders of hospitals and downloads ------------------------------------------------


def listed(root: Path, header: str, *lines: str, name: str = "labels.csv") -> Path:
    """A table below a folder."""
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("\n".join([header, *lines]), encoding="utf-8")
    return root


def label_by_image(report: ImportReport) -> dict[str, str]:
    names = report.dataset.labels
    return {item.first.name: names[str(item.label)] for item in report.dataset.items}


def test_a_number_of_a_row_is_not_an_image(tmp_path: Path) -> None:
    """Rows 1, 2, ... list the pictures 0.png, 1.png, ...: the column with suffixes is the image."""
    lines = []
    for number in range(12):
        picture(tmp_path / f"{number + 1}.png", value=40 + 9 * number)
        lines.append(f"{number + 1},{12 - number}.png,{'ab'[number % 2]}")
    report = imported(listed(tmp_path, "id,photo,label", *lines))
    expected = {f"{12 - number}.png": "ab"[number % 2] for number in range(12)}
    assert label_by_image(report) == expected


def test_a_column_of_split_words_is_the_split(tmp_path: Path) -> None:
    lines = []
    for number in range(12):
        picture(tmp_path / f"{number}.png", value=40 + 9 * number)
        split = ("train", "val", "test")[number % 3]
        lines.append(f"{number}.png,{'ab'[number // 6]},{split}")
    report = imported(listed(tmp_path, "image,label,usage", *lines))
    splits = {item.first.name: item.split for item in report.dataset.items}
    assert splits["0.png"] == "training" and splits["2.png"] == "test"


@pytest.mark.parametrize(
    ("label", "words"), [("a;b", "'a;b' joins other labels"), ("a, b", "'a, b' joins other labels")]
)
def test_labels_that_join_others_are_refused(label: str, words: str, tmp_path: Path) -> None:
    lines = []
    for number, value in enumerate(["a", "b", f'"{label}"'] * 4):
        picture(tmp_path / f"{number}.png", value=40 + 9 * number)
        lines.append(f"{number}.png,{value}")
    assert words in error_of(listed(tmp_path, "image,label", *lines))


def test_images_in_no_row_and_tables_that_are_not_used_are_named(tmp_path: Path) -> None:
    for number in range(12):
        picture(tmp_path / f"{number}.png", value=40 + 9 * number)
    rows_of = [f"{number}.png,{'ab'[number % 2]}" for number in range(10)]
    listed(tmp_path, "image,label", *rows_of, name="train.csv")
    listed(tmp_path, "image,label", "x.png,a", "y.png,b", name="test.csv")
    notes = "\n".join(imported(tmp_path).dataset.notes)
    assert "2 of 12 files have no complete row" in notes
    assert "test.csv" in notes


def test_numbers_of_patients_are_written_in_one_way(tmp_path: Path) -> None:
    lines = []
    for number in range(8):
        picture(tmp_path / f"{number}.png", value=40 + 9 * number)
        lines.append(f"{number}.png,{'ab'[number % 2]},{'0007' if number == 5 else number % 8}")
    lines[7] = "7.png,b,7"
    error = error_of(listed(tmp_path, "image,label,patient", *lines))
    assert "patients 0007 and 7 are one name" in error


def test_a_first_line_that_names_an_image_is_no_header(tmp_path: Path) -> None:
    for number in range(8):
        picture(tmp_path / f"img{number}.png", value=40 + 9 * number)
    lines = [f"img{number}.png,{number % 2}" for number in range(1, 8)]
    assert "its first line names images" in error_of(listed(tmp_path, "img0.png,0", *lines))


@pytest.mark.parametrize("name", ["200{n}/ST-1/image1.png", "P0{n}/left.png", "P0{n}_left.png"])
def test_a_first_line_that_names_a_patient_is_no_header(name: str, tmp_path: Path) -> None:
    """As in LERA, whose rows are 2000,0."""
    lines = []
    for number in range(8):
        file = name.format(n=number)
        picture(tmp_path / file, value=40 + 9 * number)
        lines.append(f"{file.partition('/')[0].partition('_')[0]},{number % 2}")
    assert "its first line names images" in error_of(listed(tmp_path, *lines))
    dataset = imported(listed(tmp_path, "patient,label", *lines)).dataset
    assert [item.label for item in dataset.items] == [0, 1] * 4


def test_folders_of_hospitals_with_folders_of_classes_are_asked_about(tmp_path: Path) -> None:
    for number in range(12):
        hospital, kind = (("Mainz", "benign"), ("Mainz", "malignant"), ("Kiel", "benign"))[
            number % 3
        ]
        picture(tmp_path / hospital / kind / f"{number}.png", value=40 + 9 * number)
    assert "--site-folders" in error_of(tmp_path)


def test_folders_that_differ_in_the_split_alone_are_no_classes(tmp_path: Path) -> None:
    for number in range(16):
        folder = ("benign_train", "benign_test", "malignant_train", "malignant_test")[number % 4]
        picture(tmp_path / folder / f"{number}.png", value=40 + 9 * number)
    assert "differ in the split alone" in error_of(tmp_path)


def test_folders_in_those_of_classes_may_be_the_classes(tmp_path: Path) -> None:
    """As LC25000; folders of patients have numbers."""
    for top in ("colon", "lung"):
        classes(tmp_path / "two" / top, names=(f"{top}_benign", f"{top}_tumor"))
        for patient in range(4):
            pictures(tmp_path / "patients" / top / f"{top}{patient}", 3)
    text = error_of(tmp_path / "two")
    assert "move them up" in text and "--kind classification" in text
    assert imported(tmp_path / "patients").dataset.labels == {"0": "colon", "1": "lung"}


@pytest.mark.parametrize("tops", [("2019", "2020"), ("Topcon", "Zeiss"), ("fold_1", "fold_2")])
def test_classes_in_folders_of_years_scanners_and_folds(
    tops: tuple[str, ...], tmp_path: Path
) -> None:
    for top in tops:
        classes(tmp_path / top, names=("benign", "malignant"))
    text = error_of(tmp_path)
    for option in ("--site-folders", "train, val or test", "give --kind classification"):
        assert option in text
    report = imported(tmp_path, kind="classification")
    assert report.dataset.labels == {"0": "benign", "1": "malignant"}
    for item in report.sites[""]:
        assert item.first.parent.name == ("benign", "malignant")[item.label]
        assert not item.patient or item.patient not in tops


def test_folders_of_patients_of_the_same_numbers(tmp_path: Path) -> None:
    for name in ("benign", "malignant"):
        for patient in range(4):
            pictures(tmp_path / "patients" / name / f"case{patient}", 3)
            pictures(tmp_path / "sites" / name / str(patient), 3)
    assert "benign, ... are the classes, give --kind" in error_of(tmp_path / "patients")
    report = imported(tmp_path / "patients", kind="classification")
    assert report.dataset.labels == {"0": "benign", "1": "malignant"}
    # Single digits are rather grades, in folders of sites.
    assert "if only the folders in them are classes" in error_of(tmp_path / "sites")


def test_a_folder_that_all_images_share_is_no_class(tmp_path: Path) -> None:
    for split in ("train", "test"):
        classes(tmp_path / split / "images")
    report = imported(tmp_path)
    assert report.dataset.labels == {"0": "cat", "1": "dog"}
    assert {item.split for item in report.dataset.items} == {"training", "test"}


def test_classes_that_are_called_like_masks(tmp_path: Path) -> None:
    classes(tmp_path, names=("label_0", "label_1"))
    error_of(tmp_path)
    assert len(imported(tmp_path, kind="classification").sites[""]) == 40


@pytest.mark.parametrize(("modality", "images"), [("CR", 16), ("US", 16), ("CT", 8)])
def test_radiographs_of_one_series_are_no_slices(
    modality: str, images: int, tmp_path: Path
) -> None:
    for number in range(8):
        folder = tmp_path / ("healthy", "ill")[number % 2] / f"patient{number}"
        folder.parent.mkdir(exist_ok=True)
        tags = {"PatientID": f"P{number}", "SeriesInstanceUID": f"1.2.3.{number}"}
        without = ("ImagePositionPatient",)
        change(dicom_series(folder, 2), range(2), without, Modality=modality, **tags)
    assert len(imported(tmp_path).sites[""]) == images


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    (classes(tmp_path) / "cow").mkdir()
    for name in (
        "horse.zip.001",
        "horse.z01",
        "Diagnosen.xls",
        "clip.avi",
        "labels.sav",
        "Old.accdb",
    ):
        (tmp_path / name).write_bytes(b"PK")
    notes = "\n".join(imported(tmp_path).dataset.notes)
    assert "as they are empty: cow" in notes and "files to unpack: 2, the first: horse.z01" in notes
    assert "files to save as CSV: 3, the first: Diagnosen.xls" in notes and "clip.avi" in notes


@pytest.mark.parametrize("names", ["{split}{number}_0.png", "{split}_{number}.png"])
def test_splits_by_the_names_of_files(names: str, tmp_path: Path) -> None:
    """As MedMNIST writes them."""
    for split, count in (("train", 6), ("val", 2), ("test", 4)):
        for number in range(count):
            for name in "ab":
                picture(tmp_path / name / names.format(split=split, number=number), 60 + number)
    items = imported(tmp_path).sites[""]
    assert all(item.split[:3] == item.first.name[:3] for item in items)
    assert sum(item.split == "test" for item in items) == 8


def test_a_list_of_test_images_beside_the_others(tmp_path: Path) -> None:
    """As ChestX-ray14."""
    names = pictures(tmp_path, 20)
    lines = [f"{name},{'ab'[number % 2]}" for number, name in enumerate(names)]
    listed(tmp_path, "image,label", *lines)
    (tmp_path / "train_val_list.txt").write_text("\n".join(names[:14]))
    (tmp_path / "test_list.txt").write_text("\n".join(names[14:]))
    tests = {item.first.name for item in imported(tmp_path).sites[""] if item.split == "test"}
    assert tests == {*names[14:]}


# -- found in a fifth count of foreign inputs --------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("path", "C:\\Users\\meier\\{patient}_a.png"),
        ("image", "{patient}-scan"),
        ("Bild", "{patient}_a.dcm"),
    ],
)
def test_a_column_of_images_that_are_not_there_is_no_patients_table(
    column: str, name: str, tmp_path: Path
) -> None:
    """Before, all images of a patient got the label of one that the table names."""
    rows: list[tuple[object, ...]] = [(column, "label", "patient")]
    for number in range(12):
        patient = f"p{number:02}"
        for view in "xy":
            picture(tmp_path / patient / f"{view}.png", 60 + number)
        rows.append((name.format(patient=patient), "neg" if number % 2 else "pos", patient))
    table(tmp_path / "labels.csv", *rows)
    text = error_of(tmp_path)
    assert f"column {column} names no image of the folder" in text
    assert len(imported(tmp_path, columns=Columns(image="patient")).dataset.items) == 24


def test_a_table_beside_the_chosen_one_is_named(tmp_path: Path) -> None:
    names = pictures(tmp_path, 12)
    table(tmp_path / "split.csv", ("image", "split"), *((name, "train") for name in names))
    labels = [(name, "ab"[number % 2]) for number, name in enumerate(names)]
    chosen = table(tmp_path / "labels.csv", ("image", "label"), *labels)
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    for path in (chosen, link / "labels.csv"):
        text = imported(tmp_path, table=path, force=True).render()
        assert text.count("not used, as --table") == 1
        assert "not used, as --table names another: split.csv" in text


def test_a_column_of_other_texts_in_each_row_is_no_class(tmp_path: Path) -> None:
    names = pictures(tmp_path, 12)
    table(
        tmp_path / "t.csv", ("image", "label"), *((name, f"text of {name[:-4]}") for name in names)
    )
    assert "column label has 12 values" in error_of(tmp_path)


def test_folders_of_patients_in_those_of_classes_are_no_classes(tmp_path: Path) -> None:
    for name in ("covid", "healthy"):
        for number in range(6):
            picture(tmp_path / name / f"Patient ({number})" / f"{name}{number}.png", 60 + number)
    assert "give --kind classification" in error_of(tmp_path)
    dataset = imported(tmp_path, kind="classification").dataset
    assert [*dataset.labels.values()] == ["covid", "healthy"]


def test_versions_in_folders_of_patients_are_asked_about(tmp_path: Path) -> None:
    for number in range(4):
        for version in ("orig", "pre"):
            picture(tmp_path / f"{number}" / version / "flair.png", 60 + number)
    problem = "if orig, pre are versions of one picture, leave one out with --leave-out orig"
    assert problem in error_of(tmp_path)


def test_classes_in_folders_of_a_few_patients(tmp_path: Path) -> None:
    """As of IDC; before, one of the classes was to be taken out."""
    for number in range(24):
        picture(tmp_path / f"IDC/1025{number % 6}/{number % 2}/{number}.png", 60 + number)
        picture(tmp_path / f"IDC/1025{number % 6}/{1 - number % 2}/{number}b.png", 90 + number)
    text = error_of(tmp_path)
    assert "if they are patients and 0, 1 the classes" in text
    (option,) = re.findall("--kind classification --patient '([^']+)'", text)
    items = imported(tmp_path, kind="classification", patient=option).sites[""]
    for item in items:
        patient, label, _ = item.first.relative_to(tmp_path / "IDC").parts
        assert (item.patient, item.label) == (patient, int(label))


def test_one_class_is_refused(tmp_path: Path) -> None:
    names = pictures(tmp_path, 12)
    cells = [(name, 1 if number < 6 else "") for number, name in enumerate(names)]
    table(tmp_path / "t.csv", ("image", "label"), *cells)
    assert "all images are of the class 1" in error_of(tmp_path, skip=True)


def test_a_site_without_a_structure_learns_how_to_say_it(tmp_path: Path) -> None:
    for number in range(6):
        for site, structures in (("A", ("disc", "cup")), ("B", ("disc",))):
            picture(tmp_path / site / "images" / f"{site}{number}.png", 80 + number)
            for structure in structures:
                mask(tmp_path / site / structure / f"{site}{number}.png")
    text = imported(tmp_path, site_folders=True, out=tmp_path / "out").render()
    assert "its structures: disc; those of A: cup, disc; give data init --structure" in text
    assert '"annotated"' in text


def test_columns_that_are_not_used_are_named(tmp_path: Path) -> None:
    """Each divides the rows; a number of the row and a constant say nothing."""
    cells = ("row", range(20)), ("label", "ab" * 10), ("study", ["x"] * 20)
    unused = ("exclude", [0, 1] * 10), ("val fold", [0, 1, 2, 3] * 5)
    rows(tmp_path, *cells, ("hospital", "AB" * 10), *unused)
    line = "t.csv: columns not used: val fold, exclude"
    remedy = "; if val fold tells the splits, write train, val and test in it, and give"
    notes = imported(tmp_path).dataset.notes
    assert f"{line}{remedy} --split-column 'val fold'" in notes
    assert line in imported(tmp_path, redraw=True, force=True).dataset.notes
    assert not any(
        "not used" in note for note in imported(rows(tmp_path / "b", *cells).parent).dataset.notes
    )


# -- folders and columns that mean two things ----------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["", unicodedata.normalize("NFD", "Übung/2014")])
@pytest.mark.parametrize("names", [("AMD", "DME", "NORMAL"), ("Covid_", "Normal_")])
def test_numbered_folders_of_several_classes_may_be_patients(
    names: tuple[str, ...], outer: str, tmp_path: Path
) -> None:
    """As Srinivasan's OCT volumes, whose folders AMD1, AMD2, ... are of patients."""
    for name in names:
        for number in range(3):
            for image in range(4):
                file = tmp_path / "raw" / outer / f"{name}{number}" / "8bit" / f"{image}.png"
                picture(file, 9 * image + number)
    text = error_of(tmp_path / "raw")
    classes = [name.strip("_") for name in names]
    assert f"patients of the classes {', '.join(classes)}? if so, move them" in text
    (option,) = re.findall("--patient '([^']+)'", text)
    for folder in [*(tmp_path / "raw" / outer).iterdir()]:
        (inner,) = [name for name in classes if folder.name.startswith(name)]
        (folder.parent / inner).mkdir(exist_ok=True)
        shutil.move(folder, folder.parent / inner / folder.name)
    report = imported(tmp_path / "raw", kind="classification", patient=option)
    assert [*report.dataset.labels.values()] == classes
    assert len({item.patient for item in report.sites[""]}) == 3 * len(names)


@pytest.mark.parametrize("names", [("grade 1", "grade 2", "normal"), ("01_TUMOR", "02_STROMA")])
def test_numbered_classes_are_no_patients(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        for image in range(6):
            picture(tmp_path / name / f"{image}.png", 9 * image)
    assert [*imported(tmp_path).dataset.labels.values()] == sorted(names)


def test_loose_pictures_beside_folders_of_classes_are_asked_about(tmp_path: Path) -> None:
    classes(tmp_path / "raw" / "dataset", names=("benign", "malignant"))
    for number in range(2):
        picture(tmp_path / "raw" / "figures" / f"fig{number}.png", 40 + number)
    text = error_of(tmp_path / "raw")
    assert "dataset holds the folders benign, malignant, figures holds images" in text
    assert "give the folder dataset" in text
    outer = imported(tmp_path / "raw", kind="classification").dataset
    assert [*outer.labels.values()] == ["dataset", "figures"]
    (tmp_path / "raw/datalist.json").unlink()
    assert [*imported(tmp_path / "raw/dataset").dataset.labels.values()] == ["benign", "malignant"]


def test_findings_of_one_site_are_findings_of_all(tmp_path: Path) -> None:
    """At one of them each image has exactly one finding, by chance."""
    cells = {"nord": ["10", "01"] * 6, "sued": ["10", "11", "00"] * 4}
    for site, pairs_of_site in cells.items():
        names = pictures(tmp_path / "raw" / site, len(pairs_of_site))
        listed = [(name, *pair) for name, pair in zip(names, pairs_of_site, strict=True)]
        table(tmp_path / "raw" / site / "t.csv", ("image", "edema", "effusion"), *listed)
    chosen = Columns(label="edema,effusion")
    report = imported(tmp_path / "raw", site_folders=True, out=tmp_path / "out", columns=chosen)
    assert "sites without a class" not in report.render()
    for site, pairs_of_site in cells.items():
        counts = {str(pair): 0 for pair in pairs_of_site}
        content_of_site = content(tmp_path / "out" / site)
        for split in ("training", "validation", "test"):
            for entry in content_of_site[split]:
                counts["".join(map(str, entry["label"]))] += 1
        assert counts == {pair: pairs_of_site.count(pair) for pair in counts}


@pytest.mark.parametrize(
    "column",
    [
        "Patienten-Nr",
        "N° patient",
        "patientid",
        "record_id",
        "Numéro de dossier",
        "código del paciente",
        "patiëntnummer",
        "患者ID",
    ],
)
def test_columns_that_are_called_patient(column: str, tmp_path: Path) -> None:
    rows(tmp_path, (column, [f"{n // 2}" for n in range(12)]), ("label", "abab" * 3))
    report = imported(tmp_path)
    assert len({item.patient for item in report.sites[""]}) == 6
    assert "patients are unknown" not in report.render()


def test_an_unused_column_that_may_name_the_patients_is_named(tmp_path: Path) -> None:
    keys = [f"K{number // 3}" for number in range(24)]
    more = [("size", [f"{n // 2}.5" for n in range(24)]), ("stage2", "abcde" * 4 + "abcd")]
    rows(tmp_path, ("label", "aaabbb" * 4), *more, ("the key", keys))
    warning, *_ = imported(tmp_path).warnings
    assert warning.endswith("or --patient-column 'the key' (if it names patients)")
    report = imported(tmp_path, columns=Columns(patient="the key"), force=True)
    assert len({item.patient for item in report.sites[""]}) == 8 and not report.warnings
    wrong = ["60-70", *range(50, 60), *range(47, 60)]
    numbers = [*map(str, range(24))]
    more = [("sex", "mmf" * 8), ("n", numbers), ("age", wrong), ("phototype", "012345" * 4)]
    rows(tmp_path, ("label", "aaabbb" * 4), *more)
    assert imported(tmp_path, force=True).warnings[0].endswith(" or --patient-column")


def test_a_record_of_each_image_tells_no_patient(tmp_path: Path) -> None:
    rows(tmp_path, ("record_id", [f"{n}" for n in range(12)]), ("label", "abab" * 3))
    assert "patients are unknown" in imported(tmp_path).render()


def test_files_that_the_user_leaves_out(tmp_path: Path) -> None:
    """As DRIVE's masks of the field of view, and those of a second reader."""
    for number in range(8):
        picture(tmp_path / "images" / f"{number}.png", 60 + number)
        for folder in ("1st_manual", "2nd_manual", "mask"):
            mask(tmp_path / folder / f"{number}.png")
        picture(tmp_path / "images" / f"{number}_old.png", 30)
    assert "--leave-out" in error_of(tmp_path, leave_out=("*_old.png",))
    chosen = ("mask", "2nd_manual", "*_old.png")
    report = imported(tmp_path, kind="segmentation", leave_out=chosen)
    assert {item.masks[0].parent.name for item in report.sites[""]} == {"1st_manual"}
    assert "left out by --leave-out 2nd_manual: 8 files" in report.render()
    (tmp_path / "datalist.json").unlink()
    assert "no file fits --leave-out third" in error_of(tmp_path, leave_out=("third",))


def test_a_hospital_with_one_class_names_those_of_all(tmp_path: Path) -> None:
    rows(tmp_path, ("label", ["ill"] * 12))
    assert "if other sites have them, --classes" in error_of(tmp_path)
    assert "class ill, which --classes lacks" in error_of(tmp_path, classes=("well", "sick"))
    report = imported(tmp_path, classes=("well", "ill"))
    assert {item.label for item in report.sites[""]} == {1}
    assert "no image of well" in report.render()
    assert content(tmp_path)["labels"] == {"0": "well", "1": "ill"}


def test_findings_have_no_order_of_classes(tmp_path: Path) -> None:
    rows(tmp_path, ("edema", "01" * 6), ("effusion", "011" * 4))
    chosen = Columns(label="edema,effusion")
    assert "--classes is for" in error_of(tmp_path, columns=chosen, classes=("edema", "effusion"))


def test_a_table_without_suffix_is_named(tmp_path: Path) -> None:
    """As HAM10000_metadata of the Dataverse."""
    pairs(tmp_path)
    (tmp_path / "LICENSE").write_text("Do, with it, what you want.\nAll of it.\n")
    (tmp_path / "metadata").write_text("lesion,image,dx\n1,a,nv\n")
    (tmp_path / "IM000005").write_bytes(b"\0,,\n,,\n")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    text = imported(tmp_path).render()
    found = "without a suffix that may be tables (if so, give --table): 1, the first: metadata"
    assert found in text
    assert "LICENSE" not in text and "IM000005" not in text


def test_the_arms_of_a_trial_are_no_splits(tmp_path: Path) -> None:
    classes(tmp_path, names=("test", "control"))
    for kind in ("", "classification"):
        text = error_of(tmp_path, kind=kind)
        assert "in a folder of a split; if test is a class, rename it" in text


@pytest.mark.parametrize("mask_class", ["SEG", "label_1"])
def test_a_class_that_is_called_as_masks_are(mask_class: str, tmp_path: Path) -> None:
    """SEG: segmented neutrophils, beside lymphocytes and monocytes."""
    names = (mask_class, mask_class.replace("1", "0").replace("SEG", "LYM"))
    for number in range(20):
        picture(tmp_path / names[number % 2] / f"{number}.png", 60 + number)
    assert "if the folders are classes, give --kind classification" in error_of(tmp_path)
    report = imported(tmp_path, kind="classification")
    assert {*report.dataset.labels.values()} == {*names}
    assert f"called as masks are, as {mask_class[:-1]}" in report.render()


def test_one_picture_beside_the_folder_of_the_classes_is_named(tmp_path: Path) -> None:
    classes(tmp_path / "dataset")
    picture(tmp_path / "logo.png")
    text = error_of(tmp_path)
    assert "logo.png is beside the folder dataset" in text and "--leave-out logo.png" in text
    report = imported(tmp_path, leave_out=("logo.png",))
    assert [*report.dataset.labels.values()] == ["cat", "dog"]


def test_a_table_in_the_folder_of_a_split_is_no_list_of_a_split(tmp_path: Path) -> None:
    """As HC18's test_set_pixel_size.csv."""
    for split in ("training_set", "test_set"):
        names = []
        for number in range(6):
            names.append(
                picture(tmp_path / split / f"{split[:4]}{number}_HC.png", 60 + number).name
            )
            mask(tmp_path / split / f"{split[:4]}{number}_HC_Annotation.png")
        sizes = [(name, number / 10) for number, name in enumerate(names)]
        table(tmp_path / f"{split}_pixel_size.csv", ("filename", "pixel size(mm)"), *sizes)
    report = imported(tmp_path)
    assert {item.split for item in report.sites[""]} == {"training", "validation", "test"}
    assert "csv: ;" not in report.render() and "csv: )" not in report.render()


@pytest.mark.parametrize("others", [(), ("lumen", "void")], ids=["one", "several"])
def test_folders_of_masks_in_each_case_are_no_classes(
    others: tuple[str, ...], tmp_path: Path
) -> None:
    """As EMIDEC's Images and Contours, and CVC-EndoSceneStill's structures."""
    for number in range(4):
        case = tmp_path / f"Case_{number:02}"
        for name in ("1", "2"):
            picture(case / "Views" / f"{name}.png", 80 + number, channels=3)
            for structure in ("Contours", *others):
                mask(case / structure / f"{name}.png")
    options = "".join(f" --leave-out {name}" for name in others)
    text = error_of(tmp_path)
    assert "have few values and the names of those in Views" in text
    assert "rename Contours masks, and Views images" in text and options in text
    for case in [*tmp_path.iterdir()]:
        (case / "Contours").rename(case / "masks")
        (case / "Views").rename(case / "images")
    imported(tmp_path, leave_out=others)
    entries = read_datalist(tmp_path, "segmentation")
    assert len(entries) == 8
    for entry in entries:
        (mask_file,) = entry.masks
        assert mask_file == entry.image.parent.parent / "masks" / entry.image.name


def test_ages_name_no_images(tmp_path: Path) -> None:
    """Before, the child of 12 years had the picture of the number 12."""
    children = [("Name", "Age", "Dx")]
    for number in range(1, 13):
        picture(tmp_path / f"{number}.png", 60 + number)
        children.append((f"child {number}", str(13 - number), "ab"[number % 2]))
    table(tmp_path / "children.csv", *children)
    assert "no column is recognized as the image" in error_of(tmp_path)
    report = imported(tmp_path, columns=Columns(image="Age"))
    assert len(report.dataset.items) == 12
