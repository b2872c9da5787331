"""MIDOG 2022: patches around the cells that the challenge's annotations name, mitotic figures and their look-alikes, of five tumours."""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from medflare.core.errors import DataError
from medflare.data.starting.cutting import window_around
from medflare.data.starting.finding import Item
from medflare.data.starting.papers.preparation import NO_TEST, PATIENTS, WITHOUT_TEST, Download, Preparation, expected

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


class _Cell(NamedTuple):
    number: int
    image: int
    category: int
    box: list[float]


class _Picture(NamedTuple):
    file: str
    size: tuple[int, int]  # width, height


def find(root: Path) -> list[Item]:
    """A patch around every annotated cell, a site for each tumour, a patient for each image.

    Args:
        root: holds the annotations and the images, or the images in a folder `images`.

    Raises:
        DataError: something is missing, or the annotations are none of the release's.
    """
    table = expected(root, *_TABLES, download=_ANNOTATIONS)
    pictures, cells = _read(table)
    items = []
    for cell in cells:
        place = f"{table}: annotation {cell.number}"
        if cell.category not in _CATEGORIES or cell.image not in pictures:
            found = f"category {cell.category} of image {cell.image}"
            raise DataError(f"{place}: {found}; the release has 1 (mitotic figure) and 2 (hard negative) of its images, download it again")
        picture = pictures[cell.image]
        source = expected(root, f"images/{picture.file}", picture.file, download=_IMAGES)
        try:
            window = window_around(cell.box, source, picture.size, _SIDE)
            site = _tumour(source)
        except DataError as error:
            raise DataError(f"{place}: {error}; download it again") from error
        patch = root / "patches" / source.stem / f"{cell.number}.png"
        items.append(Item((patch,), _CLASSES.index(_CATEGORIES[cell.category]), source.stem, "", site, window))
    return items


def _read(table: Path) -> tuple[dict[int, _Picture], list[_Cell]]:
    """The images by their numbers, and the cells."""
    try:
        content: Any = json.loads(table.read_text(encoding="utf-8"))
        images = {
            int(entry["id"]): _Picture(Path(entry["file_name"]).name, (int(entry["width"]), int(entry["height"])))
            for entry in content["images"]
        }
        cells = [
            _Cell(int(entry["id"]), int(entry["image_id"]), int(entry["category_id"]), [float(number) for number in entry["bbox"]])
            for entry in content["annotations"]
        ]
    except KeyError as error:
        raise DataError(f"{table}: no annotations of MIDOG 2022 (an entry has no {error}); download it again") from error
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{table}: no annotations of MIDOG 2022 ({error}); download it again") from error
    return images, cells


def _tumour(source: Path) -> str:
    """Whose image it is by its number: the release's annotations do not say it."""
    number = int(source.stem) if source.stem.isdecimal() else 0
    for tumour, numbers in _NUMBERS.items():
        if number in numbers:
            return tumour
    raise DataError(f"{source.name} is none of the annotated images 001 ... 354")


PREPARATION: Final = Preparation(
    name="midog2022",
    title="MIDOG 2022: mitotic figures and their look-alikes, five tumours",
    papers="FedDAG, Table II",
    licence="CC BY 4.0, as others quote its record on Zenodo",
    downloads=(_ANNOTATIONS, _IMAGES),
    find=find,
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
