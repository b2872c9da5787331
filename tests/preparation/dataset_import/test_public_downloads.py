"""Public data sets as they are downloaded: each is read as it is meant, or asked about."""

import json
import re
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest

from helpers.downloaded_folders import classes, mask, pairs, picture, table
from helpers.volume_sites import write
from medflare.preparation.dataset_import.options import Columns
from preparation.dataset_import.test_segmentation_layouts import error_of, files, imported


@pytest.mark.parametrize("names", [("trainx/X_{n}", "trainy/Y_{n}"), ("b/{n}a", "c/{n}z")])
def test_a_class_of_masks_is_asked_about(names: tuple[str, str], tmp_path: Path) -> None:
    """As of a copy of PH2: before, the masks were images of a class."""
    images, masks = names
    for number in range(8):
        picture(tmp_path / f"{images.format(n=number)}.bmp", 80 + number, channels=3)
        mask(tmp_path / f"{masks.format(n=number)}.bmp", (255,))
    first = masks.format(n=0)
    assert f"{first}.bmp has two values, as masks have, beside" in error_of(tmp_path)
    assert len(imported(tmp_path, kind="classification").dataset.items) == 16


def test_folders_that_each_split_has_alone_are_asked_about(tmp_path: Path) -> None:
    """As of DENTEX, whose folders tell how far images are annotated."""
    for split, level in (("training", "quadrant"), ("validation", "quadrant_disease")):
        for number in range(8):
            picture(tmp_path / f"{split}_data" / level / "xrays" / f"{number}.png", 60 + number)
        (tmp_path / f"{split}_data" / level / "coco.json").write_text("{}")
    text = error_of(tmp_path)
    assert "quadrant, quadrant_disease the classes, though each is in one split alone" in text
    assert "text files are not read (training_data/quadrant/coco.json)" in text
    report = imported(tmp_path, kind="classification")
    assert [*report.dataset.labels.values()] == ["quadrant", "quadrant_disease"]


@pytest.mark.parametrize("kind", ["", "classification"])
@pytest.mark.parametrize("name", ["auto_test", "a/auto_test", "REFUGE-Validation400"])
def test_a_folder_that_is_called_like_a_split_is_no_class(
    kind: str, name: str, tmp_path: Path
) -> None:
    top, _, last = name.rpartition("/")
    for outer in filter(None, (top, top and "b")) if top else ("",):
        classes(tmp_path / outer)
    for number in range(6):
        picture(tmp_path / top / last / f"{number}.png", 60 + number)
    text = error_of(tmp_path, kind=kind)
    if kind or not top:
        assert f"is {last} a class, beside cat, dog? it is called like a split" in text
    assert {
        *imported(tmp_path, kind="classification", leave_out=(last,)).dataset.labels.values()
    } == {"cat", "dog"}


def test_folders_of_archives_in_folders_of_their_names_count_once(tmp_path: Path) -> None:
    for top in ("Lung Data", "Chest Data"):
        classes(tmp_path / top / top)
    assert "each of Chest Data, Lung Data holds the folders cat, dog" in error_of(tmp_path)
    report = imported(tmp_path, kind="classification")
    assert [*report.dataset.labels.values()] == ["cat", "dog"]


@pytest.mark.parametrize("each", [1, 2, 6])
def test_a_few_images_in_folders_of_patients_of_classes(each: int, tmp_path: Path) -> None:
    for name in ("AMD", "DME", "NORMAL"):
        for number in range(6):
            for image in range(each):
                picture(tmp_path / f"{name}{number}" / f"{image}.tif", 9 * image + number)
    asked = "AMD0, AMD1, AMD2, AMD3 and 14 more patients of the classes AMD, DME, NORMAL?"
    assert asked in error_of(tmp_path)


def test_a_folder_of_masks_beside_the_images_of_a_split(tmp_path: Path) -> None:
    """As of MyoPS; gd is no word of masks."""
    for number in range(6):
        picture(tmp_path / "train25" / f"myops_{number}.png", 60 + number)
        mask(tmp_path / "train25_myops_gd" / f"myops_{number}_gd.png", (200, 255))
    assert "if train25_myops_gd holds masks, call it masks" in error_of(tmp_path)
    (tmp_path / "train25_myops_gd").rename(tmp_path / "masks")
    for item in imported(tmp_path).dataset.items:
        assert item.masks == [tmp_path / "masks" / f"{item.first.stem}_gd.png"]


def test_volumes_in_two_folders_and_their_mask_above(tmp_path: Path) -> None:
    """As a hospital's folder of WMH; before, a KeyError."""
    for patient in range(3):
        for name in ("orig/T1", "pre/T1", "wmh"):
            volume(tmp_path / f"{patient}" / f"{name}.nii.gz", patient)
    assert "each of 0, 1, 2 holds the folders orig, pre" in error_of(tmp_path)
    text = error_of(tmp_path, leave_out=("orig",))
    assert "each of 0, ... holds T1.nii.gz, wmh.nii.gz, as folders of patients do" in text


def volume(path: Path, value: int, *, two: bool = False) -> None:
    """A volume with a bright middle, of `two` values as a mask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    voxels = np.full((4, 4, 3), 0 if two else value, np.int16)
    voxels[1:3, 1:3] = 1 if two else 100 + np.arange(3)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)


def test_one_more_mask_of_an_image_is_no_mask_of_another_file(tmp_path: Path) -> None:
    """As of LES-AV; before, colours of vessels were images with the mask of the vessels."""
    for number in range(6):
        for name in ("images", "arteries-and-veins"):
            picture(tmp_path / name / f"{number}.png", 60 + len(name), channels=3)
        for name in ("masks", "vessel-segmentations"):
            mask(tmp_path / name / f"{number}.png", (255,))
    assert "two masks of one image; unite them, leave one out" in error_of(tmp_path)
    text = error_of(tmp_path, leave_out=("masks",))
    assert "arteries-and-veins/0.png and images/0.png would both have the mask" in text
    for item in imported(tmp_path, leave_out=("masks", "arteries-and-veins")).dataset.items:
        assert item.masks == [tmp_path / "vessel-segmentations" / item.first.name]


def test_two_divisions_of_the_same_pictures_are_asked_about(tmp_path: Path) -> None:
    """As of RIM-ONE DL; pictures of two classes have the same names, and sizes in bytes."""
    for number in range(12):
        for name in ("glaucoma", "normal"):
            for way, part in (("randomly", number % 3), ("by_hospital", number // 8)):
                split = ("training_set", "test_set")[bool(part)]
                home = tmp_path / f"partitioned_{way}" / split / name
                picture(home / f"{number}.bmp", 80, channels=3, seed=number + 20 * len(name))
    for kind in ("", "classification"):
        text = error_of(tmp_path, kind=kind)
        assert "hold the same 24 pictures; leave one folder out, as with --leave-out" in text
    (option,) = re.findall("--leave-out ([^;]+)$", text)
    assert len(imported(tmp_path, leave_out=(option,)).dataset.items) == 24


@pytest.mark.parametrize("top", ["Infection Segmentation Data", "annotations/A"])
def test_folders_of_images_in_one_that_is_called_like_masks(top: str, tmp_path: Path) -> None:
    """As of COVID-QU-Ex; before, all images were masks."""
    for number in range(6):
        home = tmp_path / top
        picture(home / "images" / f"{number}.png", 60 + number)
        mask(home / "infection masks" / f"{number}.png", (255,))
        picture(tmp_path / "Lung" / "images" / f"{number}L.png", 60 + number)
        mask(tmp_path / "Lung" / "lung masks" / f"{number}L.png", (255,))
    items = imported(tmp_path).dataset.items
    assert len(items) == 12
    for item in items:
        (path,) = item.masks
        assert (path.name, path.parents[1]) == (item.first.name, item.first.parents[1])
        assert item.first.parent.name == "images"


def test_two_sizes_of_the_same_pictures_are_asked_about(tmp_path: Path) -> None:
    """As of the knees of OAI; grade 0 was proposed to be left out as a version."""
    for number in range(24):
        for side in (16, 24):
            file = f"kneeKL{side}/{'train' if number < 16 else 'test'}/{number % 4}/{number}R.png"
            picture(tmp_path / file, 60 + number, side)
    remedy = "leave one out with --leave-out kneeKL16"
    assert remedy in error_of(tmp_path)
    assert remedy in imported(tmp_path, kind="classification").render()
    assert remedy not in imported(tmp_path, leave_out=("kneeKL16",), force=True).render()


@pytest.mark.parametrize("masks", [False, True])
def test_a_cover_beside_the_folder_of_the_images_is_no_image(masks: bool, tmp_path: Path) -> None:
    """As of Kvasir-SEG, whose folder made masks of all images; and of BUSI."""
    picture(tmp_path / "cover.png", 200)
    if masks:
        pairs(tmp_path / "Kvasir-SEG", image="images/{n}.png", label="masks/{n}.png")
    else:
        classes(tmp_path / "Dataset_BUSI", names=("benign", "malignant"))
        mask(tmp_path / "Dataset_BUSI" / "benign" / "p00_0_mask.png")
    kind = "segmentation" if masks else "classification"
    assert "leave the file out with --leave-out cover.png" in error_of(tmp_path, kind=kind)
    for options in ({"skip": True}, {"leave_out": ("cover.png",)}):
        report = imported(tmp_path, kind=kind, force=True, **options)
        assert len(report.sites[""]) == (10 if masks else 40)
        assert "cover.png" in report.render()
    assert [*report.dataset.labels.values()] == ([] if masks else ["benign", "malignant"])


def test_the_image_of_many_structures_is_no_cover(tmp_path: Path) -> None:
    picture(tmp_path / "ct.png", 200)
    for number in range(12):
        mask(tmp_path / "segmentations" / f"rib{number}_.png")
        mask(tmp_path / "segmentations" / f"liver{number}x.png")
    assert "--leave-out ct.png" not in error_of(tmp_path)


def test_folders_of_classes_beside_other_pictures_are_named(tmp_path: Path) -> None:
    """As of BACH, once its kind is given."""
    classes(tmp_path / "Photos", names=("Benign", "InSitu"))
    picture(tmp_path / "WSI" / "A01.png")
    picture(tmp_path / "WSI" / "A02.png")
    text = imported(tmp_path, kind="classification").render()
    assert "if Benign, InSitu are the classes, give the folder Photos" in text


@pytest.mark.parametrize("inner", ["{cls}/{part}", "{part}"])
def test_pictures_that_are_all_called_like_masks_by_a_folder(inner: str, tmp_path: Path) -> None:
    """As of EBHI-SEG, and of MoNuSeg."""
    picture(tmp_path / "cover" / "1.png", 200)
    for number in range(8):
        home = tmp_path / "EBHI-SEG" / inner.format(cls="ab"[number % 2], part="image")
        picture(home / f"{number}.png", 60 + number)
        if "cls" in inner:
            mask(home.parent / "label" / f"{number}.png", (255,))
    if "cls" in inner:
        assert len(imported(tmp_path, skip=True).dataset.items) == 8
    shutil.rmtree(tmp_path / "cover")
    for number in range(8):
        picture(tmp_path / "EBHI-SEG-test" / f"{number}b.png", 60 + number)
    if "cls" not in inner:
        text = error_of(tmp_path)
        assert "all 16 pictures are called as masks are" in text and "rename their folder" in text


@pytest.mark.parametrize("channel", ["brainmask", "BrainExtractionMask"])
def test_a_mask_of_the_brain_is_no_channel(channel: str, tmp_path: Path) -> None:
    """As of 3D-MR-MS."""
    for patient in range(6):
        home = tmp_path / f"patient{patient:02}"
        for name in ("FLAIR", "T1W", channel, "consensus_gt"):
            volume(
                home / f"{home.name}_{name}.nii.gz",
                9 * patient,
                two="m" in name or "M" in name or "gt" in name,
            )
    text = error_of(tmp_path)
    assert f"patient00_{channel}.nii.gz would be a channel" in text
    (pattern,) = re.findall("--leave-out '([^']+)'", text)
    report = imported(tmp_path, leave_out=(channel and f"*_{channel}.nii.gz",))
    assert [*report.dataset.channels.values()] == ["flair", "t1w"]
    assert pattern == f"*{channel.lower()}*"
    assert len(imported(tmp_path, kind="segmentation", force=True).dataset.channels) == 3


def test_overlays_and_predictions_are_no_channels(tmp_path: Path) -> None:
    cases = tmp_path / "pictures"
    for number in range(6):
        picture(cases / str(number) / "original.png")
        picture(cases / str(number) / "overlay.png")
        mask(cases / str(number) / "segmentation.png")
    text = error_of(cases)
    assert "0/original.png and 0/overlay.png would be among the channels" in text
    assert len(imported(cases, kind="segmentation").dataset.items[0].files) == 2
    assert len(imported(cases, leave_out=("overlay.png",), force=True).dataset.items) == 6
    cases = tmp_path / "volumes"
    for number in range(6):
        home = cases / str(number)
        volume(home / "ct.nii.gz", number)
        volume(home / "segmentation.nii.gz", number, two=True)
        write(home / "unet.nii.gz", np.arange(48, dtype=np.int16).reshape(4, 4, 3) % 3)
    assert "0/unet.nii.gz would be a channel, unet, and has few values" in error_of(cases)
    for home in cases.iterdir():
        for name in ("ct_n4", "prob"):
            write(home / f"{name}.nii.gz", np.arange(48, dtype=np.int16).reshape(4, 4, 3))
        (home / "unet.nii.gz").unlink()
    assert "0/ct_n4.nii.gz and 0/prob.nii.gz would be among the channels" in error_of(cases)
    cases = tmp_path / "corrected"
    for number in range(6):
        home = cases / str(number)
        volume(home / "mask.nii.gz", number, two=True)
        for name in ("T1_corrected", "T2_corrected"):
            values = number + np.arange(48, dtype=np.int16).reshape(4, 4, 3)
            write(home / f"{name}.nii.gz", values)
    assert len(imported(cases).dataset.items[0].files) == 2, "both are corrected"


@pytest.mark.parametrize(
    "names",
    [
        ("labels/final/{n}", "labels/original/{n}"),
        ("Manual_Segmentations/{n}_manual_orig", "Mask_images/{n}_mask_orig"),
    ],
)
def test_versions_and_fields_of_view_are_no_structures(
    names: tuple[str, str], tmp_path: Path
) -> None:
    """As of MONAI Label, and of DR HAGIS."""
    for number in range(6):
        picture(tmp_path / "Fundus" / f"{number}.png", 60 + number)
        for name in names:
            mask(tmp_path / f"{name.format(n=number)}.png", (255,))
    text = error_of(tmp_path)
    assert "structures? if so, give --kind segmentation" in text and "or versions" in text


def test_masks_are_not_the_images_of_a_table(tmp_path: Path) -> None:
    """As of PI-CAI, whose images are .mha files."""
    rows = []
    for number in range(8):
        volume(tmp_path / "picai_labels" / "lesions" / f"1{number:02}.nii.gz", number, two=True)
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / f"1{number:02}.mha").write_bytes(b"NDims = 3")
        rows.append((f"1{number:02}", ("NO", "YES")[number % 2]))
    picture(tmp_path / "docs" / "figure.png")
    table(tmp_path / "marksheet.csv", ("image", "case_csPCa"), *rows)
    text = error_of(tmp_path, columns=Columns(label="case_csPCa"))
    assert "have two values, as masks have" in text and "save as NIfTI: 8" in text
    options = {"columns": Columns(label="case_csPCa"), "kind": "classification"}
    assert len(imported(tmp_path, **options).dataset.items) == 8


def test_lists_of_splits_may_have_numbers(tmp_path: Path) -> None:
    """As of TG3K; before, its splits were not seen."""
    for number in range(14):
        picture(tmp_path / "image" / f"{number:04}.png", 60 + number)
        mask(tmp_path / "mask" / f"{number:04}.png")
    split = {"train": [*range(9)], "val": [9, 10], "test": [11, 12, 13]}
    (tmp_path / "trainval.json").write_text(json.dumps(split))
    for item in imported(tmp_path).sites[""]:
        key = {"training": "train", "validation": "val"}.get(item.split, item.split)
        assert int(item.first.stem) in split[key]


def test_a_table_of_the_images_of_a_split_is_no_list(tmp_path: Path) -> None:
    """As of HC18, whose test images have the names of training images, and no masks."""
    for split in ("training_set", "test_set"):
        rows = []
        for number in range(10):
            picture(tmp_path / split / f"{number:03}_HC.png", 60 + number + len(split))
            if split == "training_set":
                mask(tmp_path / split / f"{number:03}_HC_Annotation.png")
            rows.append((f"{number:03}_HC.png", number / 10))
        table(tmp_path / f"{split}_pixel_size.csv", ("filename", "pixel size(mm)"), *rows)
    assert len(imported(tmp_path).dataset.items) == 10


def test_training_images_without_a_row_are_named(tmp_path: Path) -> None:
    """As of C-NMC, whose training images lie in folders of classes."""
    classes(tmp_path / "training_data" / "fold_0", names=("all", "hem"))
    rows = []
    for number in range(6):
        rows.append((f"{number}.bmp", number % 2))
        picture(tmp_path / "validation_data" / "prelim" / f"{number}.bmp", 60 + number)
    table(tmp_path / "validation_data" / "labels.csv", ("name", "labels"), *rows)
    text = error_of(tmp_path)
    assert "40 training images have no row" in text and "--leave-out" in text


@pytest.mark.parametrize("order", ["{split}{cls}/{part}", "{part}/{split}{cls}"])
@pytest.mark.parametrize("split", ["", "Training400/"])
def test_folders_of_classes_above_images_and_masks_are_named(
    order: str, split: str, tmp_path: Path
) -> None:
    """As of the COVID-19 Radiography Database, and of REFUGE."""
    for cls in ("COVID", "Normal"):
        for part in ("images", "masks"):
            draw = picture if part == "images" else mask
            for number in range(6):
                home = tmp_path / order.format(split=split, cls=cls, part=part)
                draw(home / f"{cls}-{number}.png")
    text = imported(tmp_path).render()
    assert "folders COVID, Normal are not used; if they are classes, give --kind class" in text
    assert "are not used; if" not in imported(tmp_path, kind="segmentation", force=True).render()
    report = imported(tmp_path, kind="classification", force=True)
    assert [*report.dataset.labels.values()] == ["COVID", "Normal"]


@pytest.mark.parametrize("tabled", [False, True])
def test_masks_of_images_that_cannot_be_read_are_no_images(tabled: bool, tmp_path: Path) -> None:
    for number in range(8):
        name = "ab"[number % 2]
        for file in (f"Labels/P{number}", f"masks/{name}/{number}"):
            mask(tmp_path / str(tabled) / f"{file}.png")
        (tmp_path / f"{number}.mha").write_bytes(b"NDims = 3")
    shutil.rmtree(tmp_path / str(tabled) / ("masks" if tabled else "Labels"))
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    if tabled:
        rows = [(f"P{number}", "ab"[number % 2]) for number in range(8)]
        table(tmp_path / "findings.csv", ("patient", "label"), *rows)
    text = error_of(tmp_path)
    assert "all images have two values, as masks have" in text and "save as NIfTI: 8" in text


@pytest.mark.parametrize("name", ["augmented", "original", "Resized"])
def test_a_folder_of_versions_is_no_class_without_a_question(name: str, tmp_path: Path) -> None:
    classes(tmp_path, names=("cat", "dog"))
    classes(tmp_path, names=(name,))
    assert f"is {name} a class, beside cat, dog?" in error_of(tmp_path)
    assert len(imported(tmp_path, kind="classification").dataset.labels) == 3


def test_a_table_of_sites_describes_images_in_folders_of_classes(tmp_path: Path) -> None:
    rows = []
    for number in range(24):
        rows.append((f"{number:02}.png", "AB"[number // 12]))
        picture(tmp_path / "raw" / "ab"[number % 2] / f"{number:02}.png", 60 + number)
    table(tmp_path / "raw" / "sites.csv", ("image", "site"), *rows)
    options = {"columns": Columns(site="site"), "out": tmp_path / "out"}
    assert "give --kind classification" in error_of(tmp_path / "raw", **options)
    report = imported(tmp_path / "raw", kind="classification", **options)
    assert {site: len(items) for site, items in report.sites.items()} == {"A": 12, "B": 12}
    assert [*report.dataset.labels.values()] == ["a", "b"]


def test_a_table_of_one_class_beside_folders_of_classes_may_be_left_out(tmp_path: Path) -> None:
    """As a form for the answers to a challenge."""
    for split in ("train", "val"):
        classes(tmp_path / split)
    for number in range(4):
        picture(tmp_path / "test_images" / f"{number}.png", 60 + number)
    rows = [(f"{number}.png", "cat") for number in range(4)]
    file = table(tmp_path / "answers.csv", ("id", "label"), *rows)
    text = error_of(tmp_path)
    assert "leave the table out with --leave-out" in text
    report = imported(tmp_path, leave_out=(file.name,), skip=True)
    assert len(report.dataset.items) == 80


def test_archives_beside_folders_of_sites_are_named(tmp_path: Path) -> None:
    for site in "AB":
        classes(tmp_path / "raw" / site)
    (tmp_path / "raw" / "C.zip").write_bytes(b"PK")
    report = imported(tmp_path / "raw", site_folders=True, out=tmp_path / "out")
    assert "files to unpack: 1, the first: C.zip" in report.render()


def test_folders_of_centres_in_one_folder_are_named(tmp_path: Path) -> None:
    """As PolypGen: the centres were joined without a word."""
    for centre in ("C1", "C2"):
        data = tmp_path / f"PolypGen/data_{centre}"
        pairs(data, 6, f"images_{centre}/{{n}}.png", f"masks_{centre}/{{n}}.png")
    home = tmp_path / "PolypGen"
    (line,) = (text for text in imported(tmp_path).warnings if "--site-folders" in text)
    assert "data_C1, data_C2" in line and f"{home} --site-folders --out" in line
    (tmp_path / "datalist.json").unlink()
    report = imported(home, site_folders=True, out=tmp_path / "DATA")
    assert {site: len(items) for site, items in report.sites.items()} == {
        "data_C1": 6,
        "data_C2": 6,
    }


@pytest.mark.parametrize("case", ["patient_{a}", "P-{a}", "{a}"])
def test_cases_that_are_called_by_words(tmp_path: Path, case: str) -> None:
    for name in ("ann", "bob", "cid", "dan", "eve", "fay"):
        beginning = case.format(a=name)
        endings = ("t1.nii.gz", "flair.nii.gz", "lesion_mask.nii.gz*")
        files(tmp_path, *(f"{beginning}/{beginning}_{ending}" for ending in endings))
    report = imported(tmp_path)
    assert [*report.dataset.channels.values()] == ["flair", "t1"]
    assert len(report.dataset.items) == 6


def test_cases_whose_folders_are_called_like_files_and_a_word(tmp_path: Path) -> None:
    """As UCSF-PDGM, with two masks in each case."""
    case = "P-{n4}_nifti/P-{n4}"
    names = [f"{case}_{name}.nii.gz" for name in ("FLAIR", "T1", "brain_seg*", "tumor_seg*")]
    files(tmp_path, *(name.replace("*.nii.gz", ".nii.gz*") for name in names))
    assert "leave out all but one" in error_of(tmp_path)
    report = imported(tmp_path, leave_out=("*brain*",))
    assert [*report.dataset.channels.values()] == ["flair", "t1"]
    for item in report.dataset.items:
        number = item.first.parent.name.removesuffix("_nifti")
        endings = [path.name.removeprefix(number) for path in item.paths]
        assert endings == ["_FLAIR.nii.gz", "_T1.nii.gz", "_tumor_seg.nii.gz"]


def test_masks_of_several_values_in_other_folders_may_be_left_out(tmp_path: Path) -> None:
    """As COVID-19-CT-Seg_20cases."""
    files(
        tmp_path, "CT-Seg_20cases/{n}.nii.gz", "Lung_Mask/{n}.nii.gz", "Infection_Mask/{n}.nii.gz*"
    )
    assert "as with --leave-out Lung_Mask, or" in error_of(tmp_path)
    report = imported(tmp_path, leave_out=("Lung_Mask",))
    pairs_of_folders = {
        (item.first.parent.name, item.masks[0].parent.name) for item in report.dataset.items
    }
    assert pairs_of_folders == {("CT-Seg_20cases", "Infection_Mask")}


def test_masks_that_readers_agree_on_are_no_structures(tmp_path: Path) -> None:
    """As KiTS21, whose aggregated masks are of all, most or one of the readers."""
    names = [f"aggregated_{name}_seg.nii.gz" for name in ("AND", "MAJ", "OR")]
    files(tmp_path, "case_{n}/imaging.nii.gz", *(f"case_{{n}}/{name}*" for name in names))
    text = error_of(tmp_path)
    assert "are aggregated_and, aggregated_maj, aggregated_or structures?" in text
    report = imported(tmp_path, leave_out=("*_AND_*", "*_OR_*"))
    assert {item.masks[0].name for item in report.dataset.items} == {names[1]}


def test_a_form_for_answers_is_no_table_of_labels(tmp_path: Path) -> None:
    """As of challenges on Kaggle, where each test image has the class 0."""
    rows = [("id", "label")]
    for number in range(12):
        picture(tmp_path / f"train/a{number}.png", 60 + number)
        picture(tmp_path / f"test/b{number}.png", 90 + number)
        rows.append((f"a{number}", str(number % 2)))
    table(tmp_path / "train.csv", *rows)
    table(tmp_path / "sample_submission.csv", ("id", "label"), *((f"b{n}", 0) for n in range(12)))
    report = imported(tmp_path)
    labels = {item.first.name: item.label for item in report.dataset.items}
    assert labels == {f"a{number}.png": number % 2 for number in range(12)}
    assert "challenge (--table reads one): 1, the first: sample_submission.csv" in report.render()


def test_masks_of_brains_are_not_those_of_lesions(tmp_path: Path) -> None:
    """As BIDS with the derivatives of fmriprep: before, both were masks of one structure."""
    scan = "{n}_T1w.nii.gz"
    inner = "derivatives/fmriprep/sub-{n}/anat/sub-{n}_desc-"
    lesion = "derivatives/lesions/sub-{n}/anat/sub-{n}_desc-lesion_mask.nii.gz*"
    files(tmp_path, f"sub-{{n}}/anat/sub-{scan}", lesion)
    files(tmp_path, f"{inner}preproc_T1w.nii.gz", f"{inner}brain_mask.nii.gz*")
    text = error_of(tmp_path)
    assert (
        "masks show brain, lesion; leave all but one out, as with --leave-out '*desc-brain*'"
        in text
    )
    report = imported(tmp_path, leave_out=("*desc-brain*", "*desc-preproc*"))
    pairs_found = {tuple(path.name for path in item.paths) for item in report.dataset.items}
    expected = {(f"sub-{n}_T1w.nii.gz", f"sub-{n}_desc-lesion_mask.nii.gz") for n in range(10)}
    assert pairs_found == expected


def test_masks_that_a_header_does_not_list_are_named(tmp_path: Path) -> None:
    """As of the Decathlon, with a bad case taken out of its list."""
    files(tmp_path, "imagesTr/{n}.nii.gz", "labelsTr/{n}.nii.gz*")
    listed = [
        {"image": f"./imagesTr/{n}.nii.gz", "label": f"./labelsTr/{n}.nii.gz"} for n in range(9)
    ]
    (tmp_path / "dataset.json").write_text(json.dumps({"training": listed}))
    note = "1 masks are not listed in dataset.json, the first: labelsTr/9.nii.gz; to leave"
    assert note in imported(tmp_path).render()
    report = imported(tmp_path, leave_out=("9.nii.gz",), force=True)
    assert len(report.dataset.items) == 9 and "not listed" not in report.render()


@pytest.mark.parametrize("name", ["slide.ndpi", "oct.e2e", "train00.tfrec"])
def test_files_of_other_suffixes_are_named_without_an_image(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_bytes(b"abc")
    assert f"files that are not read: .{name.partition('.')[2]}" in error_of(tmp_path)
