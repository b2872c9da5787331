"""Dermoscopy: Fed-ISIC2019 at six centres, as FLamby divides it; PRR's four clients and its out-of-distribution cohort."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from medflare.data.dataset_import.folders import Item
from medflare.data.dataset_import.papers.preparing import Download, expected, items_of
from medflare.data.dataset_import.tables import read_frame

_CENTRES: Final = ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern", "HAM_rosendahl", "MSK", "HAM_vienna_dias")  # by their numbers 0 ... 5
_SPLITS: Final = {"train": "", "test": "test"}  # validation images are drawn from the training images
_PRR_CLASSES: Final = ("nv", "bkl", "mel")
_COHORTS: Final = ("vidir_modern", "vidir_molemax", "rosendahl", "vienna_dias")  # clients A, B, C and the out-of-distribution cohort
_MSK: Final = "msk"  # client D


def find_fed_isic(root: Path, image_folder: Download, metadata: Download, split: Download) -> list[Item]:
    """The images of FLamby's table, with their lesions."""
    images = expected(root, "ISIC_2019_Training_Input_preprocessed", image_folder.path, download=image_folder)
    folds = expected(root, split.path, "train_test_folds.csv", download=split)
    table = expected(root, metadata.path, download=metadata)
    lesions = read_frame(table, ("image", "lesion_id")).set_index("image")["lesion_id"].to_dict()

    def item(row: Mapping[str, str]) -> Item:
        label, centre = int(float(row["target"])), _CENTRES[int(float(row["center"]))]
        if label not in range(8):
            raise ValueError(f"target {label}")
        return Item((images / f"{row['image']}.jpg",), label, lesions.get(row["image"], ""), _SPLITS[row["fold"]], centre)

    return items_of(folds, read_frame(folds, ("image", "target", "center", "fold")).to_dict("records"), item)


def find_prr(root: Path, ham_table: Download, part_1: Download, part_2: Download, msk: Download, truth: Download) -> list[Item]:
    """The nevi, benign keratoses and melanomas of HAM10000 and ISIC 2017; all images of `vienna_dias` are test images."""
    ham = expected(root, ham_table.path, f"{ham_table.path}.csv", f"{ham_table.path}.tab", download=ham_table)
    folders = [expected(root, part.path, download=part) for part in (part_1, part_2)]
    msk_images = expected(root, msk.path, download=msk)
    isic = expected(root, truth.path, download=truth)

    def ham_item(row: Mapping[str, str]) -> Item | None:
        _COHORTS.index(row["dataset"])  # ValueError for an unknown cohort
        if row["dx"] not in _PRR_CLASSES:
            return None
        name = f"{row['image_id']}.jpg"
        image = next((folder / name for folder in folders if (folder / name).exists()), folders[0] / name)
        split = "test" if row["dataset"] == _COHORTS[-1] else ""
        return Item((image,), _PRR_CLASSES.index(row["dx"]), row["lesion_id"], split, row["dataset"])

    def isic_item(row: Mapping[str, str]) -> Item:
        """ISIC 2017 names melanomas and seborrheic keratoses (a benign keratosis); the others are nevi."""
        name = "mel" if float(row["melanoma"]) else "bkl" if float(row["seborrheic_keratosis"]) else "nv"
        return Item((msk_images / f"{row['image_id']}.jpg",), _PRR_CLASSES.index(name), "", "", _MSK)

    ham_rows = read_frame(ham, ("lesion_id", "image_id", "dx", "dataset")).to_dict("records")
    isic_rows = read_frame(isic, ("image_id", "melanoma", "seborrheic_keratosis")).to_dict("records")
    return [*items_of(ham, ham_rows, ham_item), *items_of(isic, isic_rows, isic_item)]
