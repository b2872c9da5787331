"""Fed-ISIC2019: the dermoscopy images of ISIC 2019 at the six centres that they come from, as FLamby divides them."""

from pathlib import Path
from typing import Final

from medflare.core.errors import DataError
from medflare.data.datalist import SPLITS
from medflare.data.starting.finding import Item
from medflare.data.starting.papers.preparation import TEST, TRAINED_ON, Download, Preparation, expected
from medflare.data.starting.tables import read_rows

CLASSES: Final = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES: Final = ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern", "HAM_rosendahl", "MSK", "HAM_vienna_dias")  # by their numbers 0 ... 5
_COUNTS: Final = ((9930, 2483), (3163, 791), (2691, 672), (1807, 452), (655, 164), (351, 88))  # train, test
_ISIC: Final = "https://challenge.isic-archive.com/data/#2019"
_FLAMBY: Final = "https://github.com/owkin/FLamby/tree/main/flamby/datasets/fed_isic2019/dataset_creation_scripts"
_IMAGES, _METADATA, _FOLDS = (
    Download("ISIC_2019_Training_Input", _ISIC),
    Download("ISIC_2019_Training_Metadata.csv", _ISIC),
    Download("train_test_split", _FLAMBY),
)
_SPLITS: Final = {"train": "", "test": "test"}  # validation images are drawn from the training images


def find(root: Path) -> list[Item]:
    """The images that FLamby's table lists, with their lesions.

    Args:
        root: holds the downloads.

    Raises:
        DataError: something is missing, or the table names a centre, class or fold that it should not.
    """
    images = expected(root, "ISIC_2019_Training_Input_preprocessed", _IMAGES.what, download=_IMAGES)
    folds = expected(root, _FOLDS.what, "train_test_folds.csv", download=_FOLDS)
    metadata = expected(root, _METADATA.what, download=_METADATA)
    lesions = {row["image"]: row["lesion_id"].strip() for row in read_rows(metadata, ("image", "lesion_id"))}
    items = []
    for line, row in enumerate(read_rows(folds, ("image", "target", "center", "fold")), start=2):
        try:
            centre, label, split = CENTRES[int(float(row["center"]))], int(float(row["target"])), _SPLITS[row["fold"].strip()]
            CLASSES[label]
        except (ValueError, IndexError, KeyError) as error:
            raise DataError(f"{folds} line {line}: no centre, target and fold of Fed-ISIC2019 ({error}); download it again") from error
        items.append(Item((images / f"{row['image']}.jpg",), label, lesions.get(row["image"], ""), split, centre))
    return items


PREPARATION: Final = Preparation(
    name="fed_isic2019",
    title="Fed-ISIC2019: dermoscopy, eight classes, six centres",
    papers="GRACE, Tables 1-4; FedDAG, Table IV",
    licence="CC BY-NC 4.0",
    downloads=(_IMAGES, _METADATA, _FOLDS),
    find=find,
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
