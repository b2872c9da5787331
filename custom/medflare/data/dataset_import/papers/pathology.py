"""Histology: the patches of Camelyon17-WILDS from five hospitals, and patches around the cells of MIDOG 2022 from five tumours."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from medflare.core.errors import DataError
from medflare.data.dataset_import.folders import Item
from medflare.data.dataset_import.papers.preparing import Download, expected, items_of
from medflare.data.dataset_import.tables import read_frame
from medflare.data.reading import explained

_COLUMNS: Final = ("patient", "node", "x_coord", "y_coord", "tumor", "center")


def find_camelyon(root: Path, download: Download) -> list[Item]:
    """The patches of metadata.csv, a site for each of its centres 0 ... 4."""
    release = expected(root, download.path, ".", download=download)
    table = expected(release, "metadata.csv", download=download)
    patches = expected(release, "patches", download=download)

    def item(row: Mapping[str, str]) -> Item:
        patient, node, x, y, tumor, centre = (int(row[name]) for name in _COLUMNS)
        if tumor not in (0, 1) or not 0 <= centre < 5:
            raise ValueError(f"tumor {tumor}, center {centre}")
        name = f"patient_{patient:03}_node_{node}"
        return Item((patches / name / f"patch_{name}_x_{x}_y_{y}.png",), tumor, f"{patient:03}", "", f"center{centre}")

    return items_of(table, read_frame(table, _COLUMNS).to_dict("records"), item)


_SIDE: Final = 96  # pixels of a patch; FedDAG resizes all images to 96 x 96, so patches keep their resolution
_TABLES: Final = ("MIDOG2022_training.json", "MIDOG2022_training_png.json", "MIDOG.json")  # of the TIFF files, of the PNG files, of 2021
_LABELS: Final = {1: 1, 2: 0}  # category -> class: mitotic figure, hard negative
# The numbers of each tumour's images; 51 more images, of human melanoma, have no annotations.
_NUMBERS: Final = {
    "human_breast_cancer": range(1, 151),
    "canine_lung_cancer": range(151, 195),
    "canine_lymphoma": range(195, 250),
    "canine_cutaneous_mast_cell_tumor": range(250, 300),
    "human_neuroendocrine_tumor": range(300, 355),
}


def find_midog(root: Path, annotations: Download, image_files: Download) -> list[Item]:
    """A patch around every annotated cell, a site for each tumour, a patient for each image."""
    table = expected(root, *_TABLES, download=annotations)
    try:
        content: Any = json.loads(table.read_text(encoding="utf-8"))
        images = {int(entry["id"]): (Path(entry["file_name"]).name, (entry["width"], entry["height"])) for entry in content["images"]}
        cells = sorted(content["annotations"], key=lambda cell: int(cell["image_id"]))
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{table}: not the annotations of MIDOG 2022 ({error}); download it again") from error

    def item(cell: Mapping[str, Any]) -> Item:
        (name, size), label = images[int(cell["image_id"])], _LABELS[int(cell["category_id"])]
        source = expected(root, f"images/{name}", name, download=image_files)
        (site,) = (tumour for tumour, numbers in _NUMBERS.items() if int(source.stem) in numbers)
        if size != _opened(source).size:
            raise ValueError(f"{source} is {_opened(source).size}, its annotations say {size}")
        left, top = patch_corner([float(side) for side in cell["bbox"]], size, _SIDE)
        patch = root / "patches" / source.stem / f"{int(cell['id'])}.png"
        return Item((patch,), label, source.stem, "", site, {patch: partial(_patch, source, left, top)})

    return items_of(table, cells, item)


def patch_corner(box: Sequence[float], size: tuple[int, int], side: int) -> tuple[int, int]:
    """Left column and top row of the square around a box; at the border of the image it is shifted inwards.

    Args:
        box: (x1, y1, x2, y2) in pixels; it may extend beyond the image.
        size: width and height of the image in pixels.
        side: of the square in pixels.

    Raises:
        ValueError: the box is empty or outside of the image, or the image is smaller than the square.

    Examples:
        >>> patch_corner((40, 60, 50, 70), (100, 80), 16), patch_corner((-9, 75, 11, 95), (100, 80), 16)
        ((37, 57), (0, 64))
    """
    x1, y1, x2, y2 = box
    width, height = size
    if not (max(x1, 0) < min(x2, width) and max(y1, 0) < min(y2, height)) or min(size) < side:
        raise ValueError(f"no patch of {side} x {side} around the box {list(box)} of an image of {width} x {height}")
    left, top = (math.floor((x1 + x2 - side) / 2), math.floor((y1 + y2 - side) / 2))
    return min(max(left, 0), width - side), min(max(top, 0), height - side)


@lru_cache(maxsize=1)  # the patches of one image follow each other
def _opened(source: Path) -> Image.Image:
    with explained(source), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such images are large
        return Image.open(source)


@lru_cache(maxsize=1)
def _pixels(source: Path) -> np.ndarray:
    with explained(source):
        return np.asarray(_opened(source).convert("RGB"))


def _patch(source: Path, left: int, top: int) -> np.ndarray:
    return np.ascontiguousarray(_pixels(source)[top : top + _SIDE, left : left + _SIDE])
