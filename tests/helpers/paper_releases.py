"""Tiny copies of what the papers' data look like when they were downloaded."""

import json
from pathlib import Path

import numpy as np

from helpers.downloaded_folders import mask, picture, table
from helpers.volume_sites import write

ISIC = ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern", "HAM_rosendahl", "MSK", "HAM_vienna_dias")


def volume(path: Path) -> None:
    """A small volume; as a mask it shows something in every slice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, np.pad(np.ones((4, 4, 3), np.uint8), ((2, 2), (2, 2), (0, 0))))


def fed_isic2019(root: Path, *, crossing: bool = True) -> Path:
    """Ten lesions of two images at each of six centres; every fifth lesion has its second image in the test fold."""
    folds: list[tuple[object, ...]] = [("image", "target", "center", "fold", "fold2")]
    lesions: list[tuple[object, ...]] = [("image", "age_approx", "lesion_id", "sex")]
    for centre in range(6):
        for number in range(20):
            name = f"ISIC_{centre}{number:03}"
            lesion = f"L{centre}_{number // 2}"
            fold = "test" if (number % 10 == 1 if crossing else number // 2 % 5 == 0) else "train"
            picture(root / f"ISIC_2019_Training_Input/{name}.jpg", 60 + number, 8, 3)
            folds.append((name, number % 8, centre, fold, f"{fold}_{centre}"))
            lesions.append((name, 50.0, lesion, "male"))
    table(root / "train_test_split", *folds)
    table(root / "ISIC_2019_Training_Metadata.csv", *lesions)
    return root


def prostate(root: Path, cases: int = 5) -> Path:
    """The six folders by their older names; one mask is spelt with a capital as in the release."""
    for folder in ("ISBI", "ISBI_1.5", "I2CVB", "UCL", "BIDMC", "HK"):
        for case in range(cases):
            volume(root / folder / f"Case{case:02}.nii.gz")
            volume(root / folder / f"Case{case:02}_{'S' if case == 1 else 's'}egmentation.nii.gz")
    return root


def prostate_fedsm(root: Path) -> Path:
    """What the scripts make of FedSM's six sources."""
    for folder in ("I2CVB", "MSD", "NCI_ISBI_3T", "NCI_ISBI_Dx", "Promise12", "PROSTATEx"):
        for case in range(4):
            for kind in ("Image", "Mask"):
                volume(root / "dataset" / folder / kind / f"case{case}.nii.gz")
    return root


def fundus(root: Path) -> Path:
    """DoFE's four domains: the cup black, the disc grey, the rest white."""
    for domain in range(1, 5):
        for split in ("train", "test"):
            for number in range(4):
                folder = root / f"Fundus/Domain{domain}/{split}/ROIs"
                picture(folder / f"image/{split}{number}.png", 90 + number, 16, 3)
                mask(folder / f"mask/{split}{number}.png", (255, 128, 10))
    return root


def riga(root: Path) -> Path:
    """RIGA+: the cup grey, the disc white, the rest black; six readers, and photographs that nobody outlined."""
    for folder in ("BinRushed", "Magrabia", "MESSIDOR_Base1", "MESSIDOR_Base2", "MESSIDOR_Base3"):
        for number in range(5):
            picture(root / f"RIGAPlus/RIGA/{folder}/Labeled/image{number}.tif", 90 + number, 16, 3)
            for reader in (1, 2):
                mask(
                    root / f"RIGAPlus/RIGA-mask/{folder}/Labeled/image{number}-{reader}.tif",
                    (255, 128),
                )
        picture(root / f"RIGAPlus/RIGA/{folder}/Unlabeled/image9.tif", 90, 16, 3)
    return root


def camelyon17(root: Path) -> Path:
    """Ten patients with a tumour patch and a normal one at each of five centres."""
    rows: list[tuple[object, ...]] = [
        ("", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
    ]
    for centre in range(5):
        for patient in range(20 * centre, 20 * centre + 10):
            for tumor in (0, 1):
                rows.append(
                    (len(rows) - 1, f"{patient:03}", 1, 32 * tumor, 64, tumor, patient, centre, 0)
                )
                name = f"patient_{patient:03}_node_1"
                picture(
                    root / f"camelyon17_v1.0/patches/{name}/patch_{name}_x_{32 * tumor}_y_64.png",
                    100 + tumor,
                    8,
                    3,
                )
    table(root / "camelyon17_v1.0/metadata.csv", *rows)
    return root


def gdrbench(root: Path) -> Path:
    """Two images of each grade in each list of six sources."""
    grades = ("nodr", "mild_npdr", "moderate_npdr", "severe_npdr", "pdr")
    for source in ("APTOS", "DEEPDR", "FGADR", "IDRID", "MESSIDOR", "RLDR"):
        for split in ("train", "crossval"):
            files = []
            for number, grade in enumerate(grades):
                for n in range(2):
                    files.append((f"{source}/{grade}/{split} {n}.jpg", number))
            for file, _ in files:
                picture(root / "images" / file, 90, 8, 3)
            listed = root / f"splits/{source}_{split}.txt"
            listed.parent.mkdir(exist_ok=True)
            listed.write_text(
                "".join(f"{file} {number}\n" for file, number in files), encoding="utf-8"
            )
    return root


def midog2022(root: Path) -> Path:
    """Five images of each tumour with a mitotic figure and a look-alike, and one of human melanoma without annotations or file."""
    images: list[dict[str, object]] = []
    cells: list[dict[str, object]] = []
    for number in (
        *range(1, 6),
        *range(151, 156),
        *range(195, 200),
        *range(250, 255),
        *range(300, 305),
        355,
    ):
        images.append(
            {
                "file_name": f"{number:03}.tiff",
                "width": 110,
                "height": 110,
                "id": number,
                "license": 1,
            }
        )
        if number < 355:
            picture(root / f"images/{number:03}.tiff", 60 + number % 100, 110, 3)
            for category, left in ((1, 40), (2, -9)):
                box = [left, 30, left + 50, 80]
                cells.append(
                    {
                        "bbox": box,
                        "category_id": category,
                        "image_id": number,
                        "id": len(cells) + 1,
                        "labels": [],
                    }
                )
    categories = [{"id": 1, "name": "mitotic figure"}, {"id": 2, "name": "not mitotic figure"}]
    content = {"info": {}, "images": images, "categories": categories, "annotations": cells}
    (root / "MIDOG2022_training.json").write_text(json.dumps(content), encoding="utf-8")
    return root


def dermoscopy(root: Path) -> Path:
    """HAM10000's four cohorts in two parts, with a class that PRR leaves out, and ISIC 2017 with superpixels beside its images."""
    rows: list[tuple[object, ...]] = [
        ("lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization", "dataset")
    ]
    for cohort in ("vidir_modern", "vidir_molemax", "rosendahl", "vienna_dias"):
        for number in range(24):
            name = f"ISIC_{len(rows):07}"
            rows.append(
                (
                    f"HAM_{cohort}_{number // 2}",
                    name,
                    ("nv", "bkl", "mel", "df")[number // 2 % 4],
                    "histo",
                    50,
                    "male",
                    "back",
                    cohort,
                )
            )
            picture(root / f"HAM10000_images_part_{1 + number % 2}/{name}.jpg", 60 + number, 8, 3)
    table(root / "HAM10000_metadata", *rows)
    truth: list[tuple[object, ...]] = [("image_id", "melanoma", "seborrheic_keratosis")]
    for number in range(12):
        name = f"ISIC_9{number:06}"
        truth.append((name, float(number % 3 == 0), float(number % 3 == 1)))
        picture(root / f"ISIC-2017_Training_Data/{name}.jpg", 60 + number, 8, 3)
        picture(root / f"ISIC-2017_Training_Data/{name}_superpixels.png", 60, 8, 3)
    table(root / "ISIC-2017_Training_Part3_GroundTruth.csv", *truth)
    return root
