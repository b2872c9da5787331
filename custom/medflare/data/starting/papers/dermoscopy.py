"""PRR's dermoscopy: three cohorts of HAM10000 and the images of ISIC 2017 as clients, a fourth cohort as out-of-distribution site."""

from pathlib import Path
from typing import Final

from medflare.core.errors import DataError
from medflare.data.datalist import SPLITS
from medflare.data.starting.finding import Item
from medflare.data.starting.papers.preparation import IMAGES, Download, Preparation, expected
from medflare.data.starting.tables import read_rows

_CLASSES: Final = ("nv", "bkl", "mel")
_COHORTS: Final = ("vidir_modern", "vidir_molemax", "rosendahl", "vienna_dias")  # clients A, B, C and the out-of-distribution cohort
_MSK: Final = "msk"  # client D
_HAM: Final = "https://doi.org/10.7910/DVN/DBW86T"
_ISIC: Final = "https://challenge.isic-archive.com/data/#2017"
_TABLE, _PART_1, _PART_2, _IMAGES, _TRUTH = (
    Download("HAM10000_metadata", _HAM),
    Download("HAM10000_images_part_1", _HAM),
    Download("HAM10000_images_part_2", _HAM),
    Download("ISIC-2017_Training_Data", _ISIC),
    Download("ISIC-2017_Training_Part3_GroundTruth.csv", _ISIC),
)
_COUNTS: Final = {  # images, nv, bkl, mel
    "vidir_modern": (2987, 1832, 475, 680),
    "vidir_molemax": (3868, 3720, 124, 24),
    "rosendahl": (1635, 803, 490, 342),
    _MSK: (2000, 1372, 254, 374),
    "vienna_dias": (427, 350, 10, 67),
}


def find(root: Path) -> list[Item]:
    """The nevi, benign keratoses and melanomas of both downloads; all of `vienna_dias` are test images.

    Args:
        root: holds the downloads.

    Raises:
        DataError: something is missing, or a row of another cohort.
    """
    return [*_ham(root), *_isic(root)]


def _ham(root: Path) -> list[Item]:
    table = expected(root, _TABLE.what, f"{_TABLE.what}.csv", f"{_TABLE.what}.tab", download=_TABLE)
    folders = [expected(root, part.what, download=part) for part in (_PART_1, _PART_2)]
    items = []
    for row in read_rows(table, ("lesion_id", "image_id", "dx", "dataset")):
        if row["dataset"] not in _COHORTS:
            raise DataError(
                f"{table}: cohort {row['dataset']!r} of {row['image_id']}; HAM10000 has {', '.join(_COHORTS)}, download it again"
            )
        if row["dx"] not in _CLASSES:
            continue
        name = f"{row['image_id']}.jpg"
        image = next((folder / name for folder in folders if (folder / name).exists()), folders[0] / name)
        split = "test" if row["dataset"] == _COHORTS[-1] else ""
        items.append(Item((image,), _CLASSES.index(row["dx"]), row["lesion_id"], split, row["dataset"]))
    return items


def _isic(root: Path) -> list[Item]:
    """ISIC 2017 names melanomas and seborrheic keratoses (a benign keratosis); the rest are nevi."""
    folder = expected(root, _IMAGES.what, download=_IMAGES)
    table = expected(root, _TRUTH.what, download=_TRUTH)
    items = []
    for row in read_rows(table, ("image_id", "melanoma", "seborrheic_keratosis")):
        name = "mel" if float(row["melanoma"]) else "bkl" if float(row["seborrheic_keratosis"]) else "nv"
        items.append(Item((folder / f"{row['image_id']}.jpg",), _CLASSES.index(name), "", "", _MSK))
    return items


PREPARATION: Final = Preparation(
    name="dermoscopy_prr",
    title="Dermoscopy: PRR's four clients and its out-of-distribution cohort, three classes",
    papers="PRR, Tables II and IV-XII",
    licence="HAM10000: CC BY-NC 4.0; ISIC 2017: CC0 1.0",
    downloads=(_TABLE, _PART_1, _PART_2, _IMAGES, _TRUTH),
    find=find,
    kind="classification",
    classes=_CLASSES,
    shares=dict(zip(SPLITS, (0.7, 0.1, 0.2), strict=True)),
    counts={site: dict(zip((IMAGES, *_CLASSES), numbers, strict=True)) for site, numbers in _COUNTS.items()},
    source="PRR, Table I",
    notes=(
        "lesions of HAM10000 are kept in one split; PRR says that it splits by class, and nothing of lesions",
        "vienna_dias has test images only: give it the role outside",
        "PRR crops the central square of each image; here images are shrunk as a whole",
    ),
)
