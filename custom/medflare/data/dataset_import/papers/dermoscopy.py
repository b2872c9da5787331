"""Dermoscopy: Fed-ISIC2019 at six centres, as FLamby divides it; PRR's four clients and its out-of-distribution cohort."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from medflare.data.datalist import SPLITS
from medflare.data.dataset_import.finding import Item
from medflare.data.dataset_import.papers.preparing import IMAGES, TEST, TRAINED_ON, Download, Preparation, expected, items_of
from medflare.data.dataset_import.tables import read_rows

CLASSES: Final = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES: Final = ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern", "HAM_rosendahl", "MSK", "HAM_vienna_dias")  # by their numbers 0 ... 5
_COUNTS: Final = ((9930, 2483), (3163, 791), (2691, 672), (1807, 452), (655, 164), (351, 88))  # train, test
_ISIC_2019: Final = "https://challenge.isic-archive.com/data/#2019"
_FLAMBY: Final = "https://github.com/owkin/FLamby/tree/main/flamby/datasets/fed_isic2019/dataset_creation_scripts"
_IMAGES, _METADATA, _FOLDS = (
    Download("ISIC_2019_Training_Input", _ISIC_2019),
    Download("ISIC_2019_Training_Metadata.csv", _ISIC_2019),
    Download("train_test_split", _FLAMBY),
)
_SPLITS: Final = {"train": "", "test": "test"}  # validation images are drawn from the training images


def find_fed_isic(root: Path) -> list[Item]:
    """The images that FLamby's table lists, with their lesions."""
    images = expected(root, "ISIC_2019_Training_Input_preprocessed", _IMAGES.what, download=_IMAGES)
    folds = expected(root, _FOLDS.what, "train_test_folds.csv", download=_FOLDS)
    metadata = expected(root, _METADATA.what, download=_METADATA)
    lesions = {row["image"]: row["lesion_id"].strip() for row in read_rows(metadata, ("image", "lesion_id"))}

    def item(row: Mapping[str, str]) -> Item:
        label = int(float(row["target"]))
        CLASSES[label]
        centre, split = CENTRES[int(float(row["center"]))], _SPLITS[row["fold"].strip()]
        return Item((images / f"{row['image']}.jpg",), label, lesions.get(row["image"], ""), split, centre)

    return items_of(folds, read_rows(folds, ("image", "target", "center", "fold")), item)


FED_ISIC: Final = Preparation(
    name="fed_isic2019",
    title="Fed-ISIC2019: dermoscopy, eight classes, six centres",
    papers="GRACE, Tables 1-4; FedDAG, Table IV",
    licence="CC BY-NC 4.0",
    downloads=(_IMAGES, _METADATA, _FOLDS),
    find=find_fed_isic,
    kind="classification",
    classes=CLASSES,
    shares=dict(zip(SPLITS, (0.7, 0.1, 0.2), strict=True)),
    counts={centre: {TRAINED_ON: train, TEST: test} for centre, (train, test) in zip(CENTRES, _COUNTS, strict=True)},
    total=23_247,
    source="FLamby, fed_isic2019/README.md",
    crossing="FLamby splits by image, so lesions are on both sides of its split",
    notes=(
        "validation images are drawn by lesion from FLamby's training images; GRACE validates on the test images",
        "FLamby evens out the illumination and shrinks the images; its ISIC_2019_Training_Input_preprocessed is used where it is there",
    ),
)


# -- PRR -------------------------------------------------------------------------------------------------------------------

_PRR_CLASSES: Final = ("nv", "bkl", "mel")
_COHORTS: Final = ("vidir_modern", "vidir_molemax", "rosendahl", "vienna_dias")  # clients A, B, C and the out-of-distribution cohort
_MSK: Final = "msk"  # client D
_HAM: Final = "https://doi.org/10.7910/DVN/DBW86T"
_ISIC_2017: Final = "https://challenge.isic-archive.com/data/#2017"
_TABLE, _PART_1, _PART_2, _MSK_IMAGES, _TRUTH = (
    Download("HAM10000_metadata", _HAM),
    Download("HAM10000_images_part_1", _HAM),
    Download("HAM10000_images_part_2", _HAM),
    Download("ISIC-2017_Training_Data", _ISIC_2017),
    Download("ISIC-2017_Training_Part3_GroundTruth.csv", _ISIC_2017),
)
_PRR_COUNTS: Final = {  # images, nv, bkl, mel
    "vidir_modern": (2987, 1832, 475, 680),
    "vidir_molemax": (3868, 3720, 124, 24),
    "rosendahl": (1635, 803, 490, 342),
    _MSK: (2000, 1372, 254, 374),
    "vienna_dias": (427, 350, 10, 67),
}


def find_prr(root: Path) -> list[Item]:
    """The nevi, benign keratoses and melanomas of both downloads; all of `vienna_dias` are test images."""
    return [*_ham(root), *_isic(root)]


def _ham(root: Path) -> list[Item]:
    table = expected(root, _TABLE.what, f"{_TABLE.what}.csv", f"{_TABLE.what}.tab", download=_TABLE)
    folders = [expected(root, part.what, download=part) for part in (_PART_1, _PART_2)]

    def item(row: Mapping[str, str]) -> Item | None:
        _COHORTS.index(row["dataset"])
        if row["dx"] not in _PRR_CLASSES:
            return None
        name = f"{row['image_id']}.jpg"
        image = next((folder / name for folder in folders if (folder / name).exists()), folders[0] / name)
        split = "test" if row["dataset"] == _COHORTS[-1] else ""
        return Item((image,), _PRR_CLASSES.index(row["dx"]), row["lesion_id"], split, row["dataset"])

    return items_of(table, read_rows(table, ("lesion_id", "image_id", "dx", "dataset")), item)


def _isic(root: Path) -> list[Item]:
    """ISIC 2017 names melanomas and seborrheic keratoses (a benign keratosis); the rest are nevi."""
    folder = expected(root, _MSK_IMAGES.what, download=_MSK_IMAGES)
    table = expected(root, _TRUTH.what, download=_TRUTH)

    def item(row: Mapping[str, str]) -> Item:
        name = "mel" if float(row["melanoma"]) else "bkl" if float(row["seborrheic_keratosis"]) else "nv"
        return Item((folder / f"{row['image_id']}.jpg",), _PRR_CLASSES.index(name), "", "", _MSK)

    return items_of(table, read_rows(table, ("image_id", "melanoma", "seborrheic_keratosis")), item)


PRR: Final = Preparation(
    name="dermoscopy_prr",
    title="Dermoscopy: PRR's four clients and its out-of-distribution cohort, three classes",
    papers="PRR, Tables II and IV-XII",
    licence="HAM10000: CC BY-NC 4.0; ISIC 2017: CC0 1.0",
    downloads=(_TABLE, _PART_1, _PART_2, _MSK_IMAGES, _TRUTH),
    find=find_prr,
    kind="classification",
    classes=_PRR_CLASSES,
    shares=dict(zip(SPLITS, (0.7, 0.1, 0.2), strict=True)),
    counts={site: dict(zip((IMAGES, *_PRR_CLASSES), numbers, strict=True)) for site, numbers in _PRR_COUNTS.items()},
    source="PRR, Table I",
    notes=(
        "lesions of HAM10000 are kept in one split; PRR says that it splits by class, and nothing of lesions",
        "vienna_dias has test images only: give it the role outside",
        "PRR crops the central square of each image; here images are shrunk as a whole",
    ),
)
