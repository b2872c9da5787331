"""Camelyon17-WILDS: patches of lymph node sections from five hospitals, tumour or not."""

from pathlib import Path
from typing import Final

from medflare.core.errors import DataError
from medflare.data.starting.finding import Item
from medflare.data.starting.papers.preparation import IMAGES, NO_TEST, WITHOUT_TEST, Download, Preparation, expected
from medflare.data.starting.tables import read_rows

_RELEASE: Final = Download("camelyon17_v1.0", "https://wilds.stanford.edu/datasets/#camelyon17")
_COLUMNS: Final = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
_CENTRES: Final = 5


def find(root: Path) -> list[Item]:
    """The patches that metadata.csv lists, a site for each of its centres 0 ... 4.

    Args:
        root: holds camelyon17_v1.0.

    Raises:
        DataError: something is missing, or a row that is none of the release's.
    """
    release = expected(root, _RELEASE.what, ".", download=_RELEASE)
    table = expected(release, "metadata.csv", download=_RELEASE)
    patches = expected(release, "patches", download=_RELEASE)
    items = []
    for line, row in enumerate(read_rows(table, _COLUMNS), start=2):
        try:
            patient, node, x, y, tumor, centre = (int(row[name]) for name in _COLUMNS)
        except ValueError as error:
            raise DataError(f"{table} line {line}: {error}; download it again") from error
        if tumor not in (0, 1) or not 0 <= centre < _CENTRES:
            raise DataError(f"{table} line {line}: tumor {tumor}, center {centre}; the release has 0, 1 and 0 ... 4, download it again")
        name = f"patient_{patient:03}_node_{node}"
        image = patches / name / f"patch_{name}_x_{x}_y_{y}.png"
        items.append(Item((image,), tumor, f"{patient:03}", "", f"center{centre}"))
    return items


PREPARATION: Final = Preparation(
    name="camelyon17",
    title="Camelyon17-WILDS: histology patches, tumour or normal, five hospitals",
    papers="FedDAG, Tables I and V",
    licence="CC0 1.0",
    downloads=(_RELEASE,),
    find=find,
    kind="classification",
    classes=("normal", "tumor"),
    unit="patches",
    shares={"training": 0.8, "validation": 0.2},
    splits=WITHOUT_TEST,
    counts={"center1": {IMAGES: 34_904}, "center2": {IMAGES: 85_054}},
    total=455_954,
    source="FedDAG, Sec. IV-A1 (all patches); WILDS, Sec. 4.1.2 (its validation and test hospital)",
    notes=(
        "patients are kept in one split; WILDS and FedDAG split patches, so a patient's are on both sides",
        "FedDAG trains on a random part of the patches; its size and the ratio of its split are not legible in the text at hand",
        NO_TEST,
    ),
)
