"""Dermoscopy: Fed-ISIC2019 at six centres, as FLamby divides it; PRR's four clients and its out-of-distribution cohort."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from medflare.data.dataset_import.folders import Item
from medflare.data.dataset_import.papers.preparing import (
    IMAGES,
    SHARES_70_10_20,
    TEST,
    TRAINED_ON,
    Download,
    Preparation,
    expected,
    items_of,
)
from medflare.data.dataset_import.tables import read_frame

CLASSES: Final = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES: Final = ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern", "HAM_rosendahl", "MSK", "HAM_vienna_dias")  # by their numbers 0 ... 5
_COUNTS: Final = ((9930, 2483), (3163, 791), (2691, 672), (1807, 452), (655, 164), (351, 88))  # train, test
_ISIC_2019: Final = "https://challenge.isic-archive.com/data/#2019"
_FLAMBY: Final = "https://github.com/owkin/FLamby/tree/main/flamby/datasets/fed_isic2019/dataset_creation_scripts"
_IMAGES: Final = Download("ISIC_2019_Training_Input", _ISIC_2019)
_METADATA: Final = Download("ISIC_2019_Training_Metadata.csv", _ISIC_2019)
_FOLDS: Final = Download("train_test_split", _FLAMBY)
_SPLITS: Final = {"train": "", "test": "test"}  # validation images are drawn from the training images


def find_fed_isic(root: Path) -> list[Item]:
    """The images of FLamby's table, with their lesions."""
    images = expected(root, "ISIC_2019_Training_Input_preprocessed", _IMAGES.what, download=_IMAGES)
    folds = expected(root, _FOLDS.what, "train_test_folds.csv", download=_FOLDS)
    metadata = expected(root, _METADATA.what, download=_METADATA)
    lesions = read_frame(metadata, ("image", "lesion_id")).set_index("image")["lesion_id"].to_dict()

    def item(row: Mapping[str, str]) -> Item:
        label = int(float(row["target"]))
        CLASSES[label]  # IndexError for an unknown class
        centre, split = CENTRES[int(float(row["center"]))], _SPLITS[row["fold"]]
        return Item((images / f"{row['image']}.jpg",), label, lesions.get(row["image"], ""), split, centre)

    return items_of(folds, read_frame(folds, ("image", "target", "center", "fold")).to_dict("records"), item)


FED_ISIC: Final = Preparation(
    name="fed_isic2019",
    title="Fed-ISIC2019: dermoscopy, eight classes, six centres",
    papers="GRACE, Tables 1-4; FedDAG, Table IV",
    licence="CC BY-NC 4.0",
    downloads=(_IMAGES, _METADATA, _FOLDS),
    find=find_fed_isic,
    kind="classification",
    classes=CLASSES,
    shares=SHARES_70_10_20,
    counts={centre: {TRAINED_ON: train, TEST: test} for centre, (train, test) in zip(CENTRES, _COUNTS, strict=True)},
    total=23_247,
    source="FLamby, fed_isic2019/README.md",
    crossing="FLamby splits by image, so its split divides lesions",
    notes=(
        "validation images are drawn by lesion from FLamby's training images; GRACE validates on the test images",
        "FLamby evens out the illumination and shrinks the images; its ISIC_2019_Training_Input_preprocessed is used if it is there",
    ),
)


# -- PRR -------------------------------------------------------------------------------------------------------------------

_PRR_CLASSES: Final = ("nv", "bkl", "mel")
_COHORTS: Final = ("vidir_modern", "vidir_molemax", "rosendahl", "vienna_dias")  # clients A, B, C and the out-of-distribution cohort
_MSK: Final = "msk"  # client D
_HAM: Final = "https://doi.org/10.7910/DVN/DBW86T"
_ISIC_2017: Final = "https://challenge.isic-archive.com/data/#2017"
_TABLE: Final = Download("HAM10000_metadata", _HAM)
_PARTS: Final = (Download("HAM10000_images_part_1", _HAM), Download("HAM10000_images_part_2", _HAM))
_MSK_IMAGES: Final = Download("ISIC-2017_Training_Data", _ISIC_2017)
_TRUTH: Final = Download("ISIC-2017_Training_Part3_GroundTruth.csv", _ISIC_2017)
_PRR_COUNTS: Final = {  # images, nv, bkl, mel
    "vidir_modern": (2987, 1832, 475, 680),
    "vidir_molemax": (3868, 3720, 124, 24),
    "rosendahl": (1635, 803, 490, 342),
    _MSK: (2000, 1372, 254, 374),
    "vienna_dias": (427, 350, 10, 67),
}


def find_prr(root: Path) -> list[Item]:
    """The nevi, benign keratoses and melanomas of both downloads; all images of `vienna_dias` are test images."""
    ham = expected(root, _TABLE.what, f"{_TABLE.what}.csv", f"{_TABLE.what}.tab", download=_TABLE)
    folders = [expected(root, part.what, download=part) for part in _PARTS]
    msk_images = expected(root, _MSK_IMAGES.what, download=_MSK_IMAGES)
    isic = expected(root, _TRUTH.what, download=_TRUTH)

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


PRR: Final = Preparation(
    name="dermoscopy_prr",
    title="Dermoscopy: PRR's four clients and its out-of-distribution cohort, three classes",
    papers="PRR, Tables II and IV-XII",
    licence="HAM10000: CC BY-NC 4.0; ISIC 2017: CC0 1.0",
    downloads=(_TABLE, *_PARTS, _MSK_IMAGES, _TRUTH),
    find=find_prr,
    kind="classification",
    classes=_PRR_CLASSES,
    shares=SHARES_70_10_20,
    counts={site: dict(zip((IMAGES, *_PRR_CLASSES), numbers, strict=True)) for site, numbers in _PRR_COUNTS.items()},
    source="PRR, Table I",
    notes=(
        "lesions of HAM10000 are kept in one split; PRR splits by class and does not mention lesions",
        "vienna_dias has test images only: give it the role outside",
        "PRR crops the central square of each image; here the whole image is resized",
    ),
)
