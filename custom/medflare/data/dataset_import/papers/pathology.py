"""Histology: the patches of Camelyon17-WILDS from five hospitals, and patches around the cells of MIDOG 2022 from five tumours."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from medflare.core.errors import DataError
from medflare.data.dataset_import.cutting import window_around
from medflare.data.dataset_import.finding import Item
from medflare.data.dataset_import.papers.preparing import (
    IMAGES,
    NO_TEST,
    PATIENTS,
    WITHOUT_TEST,
    Download,
    Preparation,
    expected,
    items_of,
)
from medflare.data.dataset_import.tables import read_rows

_RELEASE: Final = Download("camelyon17_v1.0", "https://wilds.stanford.edu/datasets/#camelyon17")
_COLUMNS: Final = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
_CENTRES: Final = 5


def find_camelyon(root: Path) -> list[Item]:
    """The patches that metadata.csv lists, a site for each of its centres 0 ... 4."""
    release = expected(root, _RELEASE.what, ".", download=_RELEASE)
    table = expected(release, "metadata.csv", download=_RELEASE)
    patches = expected(release, "patches", download=_RELEASE)

    def item(row: Mapping[str, str]) -> Item:
        patient, node, x, y, tumor, centre = (int(row[name]) for name in _COLUMNS)
        if tumor not in (0, 1) or not 0 <= centre < _CENTRES:
            raise ValueError(f"tumor {tumor}, center {centre}")
        name = f"patient_{patient:03}_node_{node}"
        return Item((patches / name / f"patch_{name}_x_{x}_y_{y}.png",), tumor, f"{patient:03}", "", f"center{centre}")

    return items_of(table, read_rows(table, _COLUMNS), item)


CAMELYON: Final = Preparation(
    name="camelyon17",
    title="Camelyon17-WILDS: histology patches, tumour or normal, five hospitals",
    papers="FedDAG, Tables I and V",
    licence="CC0 1.0",
    downloads=(_RELEASE,),
    find=find_camelyon,
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


# -- MIDOG 2022 ------------------------------------------------------------------------------------------------------------

_SIDE: Final = 96  # pixels of a patch; FedDAG resizes all images to 96 x 96, so that these stay as they are
_PAGE: Final = "https://midog.deepmicroscopy.org/download-dataset/"
_TABLES: Final = ("MIDOG2022_training.json", "MIDOG2022_training_png.json", "MIDOG.json")  # of the TIFF files, of the PNG files, of 2021
_ANNOTATIONS, _IMAGES = Download(_TABLES[0], _PAGE), Download("images 001 ... 354", _PAGE)
_CLASSES: Final = ("hard_negative", "mitotic_figure")
_CATEGORIES: Final = {1: "mitotic_figure", 2: "hard_negative"}
# The numbers of each tumour's images; then come 51 of human melanoma, which nobody annotated.
_NUMBERS: Final = {
    "human_breast_cancer": range(1, 151),
    "canine_lung_cancer": range(151, 195),
    "canine_lymphoma": range(195, 250),
    "canine_cutaneous_mast_cell_tumor": range(250, 300),
    "human_neuroendocrine_tumor": range(300, 355),
}


def find_midog(root: Path) -> list[Item]:
    """A patch around every annotated cell, a site for each tumour, a patient for each image."""
    table = expected(root, *_TABLES, download=_ANNOTATIONS)
    try:
        content: Any = json.loads(table.read_text(encoding="utf-8"))
        pictures = {int(entry["id"]): entry for entry in content["images"]}
        cells = list(content["annotations"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{table}: no annotations of MIDOG 2022 ({error}); download it again") from error

    def item(cell: Mapping[str, Any]) -> Item:
        picture, label = pictures[int(cell["image_id"])], _CLASSES.index(_CATEGORIES[int(cell["category_id"])])
        name = Path(picture["file_name"]).name
        source = expected(root, f"images/{name}", name, download=_IMAGES)
        (site,) = (tumour for tumour, numbers in _NUMBERS.items() if int(source.stem) in numbers)
        window = window_around([float(side) for side in cell["bbox"]], source, (int(picture["width"]), int(picture["height"])), _SIDE)
        return Item((root / "patches" / source.stem / f"{int(cell['id'])}.png",), label, source.stem, "", site, window)

    return items_of(table, cells, item)


MIDOG: Final = Preparation(
    name="midog2022",
    title="MIDOG 2022: mitotic figures and their look-alikes, five tumours",
    papers="FedDAG, Table II",
    licence="CC BY 4.0, as others quote its record on Zenodo",
    downloads=(_ANNOTATIONS, _IMAGES),
    find=find_midog,
    kind="classification",
    classes=_CLASSES,
    unit="patches",
    shares={"training": 0.8, "validation": 0.2},
    splits=WITHOUT_TEST,
    counts={tumour: {PATIENTS: len(numbers)} for tumour, numbers in _NUMBERS.items()},
    total=20_552,
    source="the challenge's page as it is quoted: images of each tumour, 9501 mitotic figures; 11051 look-alikes, as others count them",
    notes=(
        f"FedDAG does not say what it classifies: here it is the annotated cells, each in a patch of {_SIDE} x {_SIDE} pixels",
        "patches are cut at the images' own resolution and at their border shifted inwards; a patch may show other cells too",
        "every image is a patient; images 355 ... 405 (human melanoma) have no annotations and are left out",
        NO_TEST,
    ),
)
