"""The downloads of the papers' data.

Their descriptions are in data.json, and a function for each finds its images.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from medflare.core.errors import DataError
from medflare.core.pictures import png
from medflare.core.settings import unknown
from medflare.core.text import read_json
from medflare.data.reading import PICTURES, explained, stem
from medflare.preparation.dataset_import.folders import Item, scan_folder
from medflare.preparation.dataset_import.frames import read_frame
from medflare.preparation.dataset_import.masks import pair_masks
from medflare.preparation.dataset_import.options import DEFAULTS
from medflare.preparation.dataset_import.papers.preparing import (
    Download,
    Preparation,
    items_of,
    items_of_table,
)

# -- prostate: SAML (Liu et al., MICCAI 2020), PRR, and FedSM --------------------------------------
# SAML's release was renamed once; ISBI and ISBI_1.5 are the two hospitals of NCI-ISBI 2013.


def find_volumes(root: Path, sites: Mapping[str, Sequence[str]], download: Download) -> list[Item]:
    """Volumes with their masks by name, below the first of a site's folders that exists.

    Case numbers are of one site only.
    """
    items = []
    for site, folders in sites.items():
        folder = download.below(root, *folders)
        pairs = pair_masks(scan_folder(folder), DEFAULTS)
        if pairs.missing:
            raise DataError(
                f"{folder / pairs.missing[0]}, the first of {len(pairs.missing)}; "
                "unpack or convert the download again"
            )
        for item in pairs.items:
            patient = f"{site} {stem(item.first)}"
            items.append(replace(item, patient=patient, split="", site=site))
    return items


# -- retina: DoFE (Wang et al., TMI 2020), RIGA+, and GDRBench (Che et al., MICCAI 2023) -----------

_READER = 1  # of RIGA's six, whose outlines are taken
# Between the three grey values of a mask, which shrinking has blurred.
_DARK = 51
_BRIGHT = 201
# IOP-FL keeps REFUGE's training and validation images apart, FedSM has them as one client.


def find_fundus(
    root: Path, sites: Mapping[str, Sequence[str]], dofe: Download, riga: Download | None = None
) -> list[Item]:
    """The images of DoFE's domains and RIGA+'s folders, by site."""
    items = []
    for site, folders in sites.items():
        for folder in folders:
            if riga and "Domain" not in folder:
                items += _find_riga(root, site, folder, riga)
            else:
                items += _find_dofe(root, site, folder, dofe)
    return items


def _find_dofe(root: Path, site: str, domain: str, download: Download) -> list[Item]:
    items = []
    for split in ("train", "test"):
        inner = f"{domain}/{split}/ROIs"
        folder = download.below(root, f"Fundus/{inner}", inner)
        for image in scan_folder(download.below(folder, "image")).images:
            mask = download.below(folder, f"mask/{image.name}")
            items.append(_item(image, mask, site, cup_is_darkest=True))
    return items


def _find_riga(root: Path, site: str, folder: str, download: Download) -> list[Item]:
    """The photographs that have masks; the others are left out."""
    photographs = download.below(root, f"RIGAPlus/RIGA/{folder}", f"RIGA/{folder}")
    masks = download.below(root, f"RIGAPlus/RIGA-mask/{folder}", f"RIGA-mask/{folder}")
    items = []
    for image in sorted(photographs.glob("*/*")):
        mask = masks / image.parent.name / f"{image.stem}-{_READER}{image.suffix}"
        if image.name.lower().endswith(PICTURES) and mask.exists():
            items.append(_item(image, mask, site, cup_is_darkest=False))
    if not items:
        raise DataError(
            f"{masks}: no mask of reader {_READER}; get {download.path} from {download.page}"
        )
    return items


def _item(image: Path, mask: Path, site: str, cup_is_darkest: bool) -> Item:
    """An image with its mask, which is written anew as PNG."""
    written = mask.with_suffix(".png")
    return Item(
        (image,),
        written,
        site=site,
        rendered={written: partial(_disc_and_cup, mask, cup_is_darkest)},
    )


def _disc_and_cup(mask: Path, cup_is_darkest: bool) -> bytes:
    """A mask as PNG: 0 (neither), 1 (disc around the cup) and 2 (cup).

    In DoFE's the cup is black, the disc grey and the rest white; in RIGA+'s the rest is black, the
    cup grey and the disc white.
    """
    with explained(mask):
        grey = np.asarray(Image.open(mask).convert("L"))
    if cup_is_darkest:
        cup = grey < _DARK
        rest = grey >= _BRIGHT
    else:
        cup = (grey >= _DARK) & (grey < _BRIGHT)
        rest = grey < _DARK
    return png(np.where(rest, 0, np.where(cup, 2, 1)).astype(np.uint8))


_LISTS = {"train": "training", "crossval": "validation"}


def find_grades(root: Path, sites: Sequence[str], download: Download) -> list[Item]:
    """The images of the split files, a site for each source."""
    images = download.below(root, "images")

    def item(text: str, source: str, split: str) -> Item:
        path, _, grade = text.strip().rpartition(" ")
        if Path(path).parts[:1] != (source,) or int(grade) not in range(5):
            raise ValueError(f"{text!r} is no '{source}/GRADE/FILE NUMBER'")
        return Item((images / path,), int(grade), "", split, source)

    items = []
    for source, (name, split) in product(sites, _LISTS.items()):
        file = download.below(root, f"splits/{source}_{name}.txt")
        lines = filter(str.strip, file.read_text(encoding="utf-8").splitlines())
        items += items_of(file, lines, partial(item, source=source, split=split))
    return items


# -- dermoscopy: Fed-ISIC2019 as FLamby divides it, and PRR ----------------------------------------

_PRR_CLASSES = ("nv", "bkl", "mel")


def find_fed_isic(
    root: Path, sites: Sequence[str], image_folder: Download, metadata: Download, split: Download
) -> list[Item]:
    """The images of FLamby's table, with their lesions."""
    name = "ISIC_2019_Training_Input_preprocessed"
    images = image_folder.below(root, name, image_folder.path)
    folds = split.below(root, split.path, "train_test_folds.csv")
    table = metadata.below(root)
    lesions = read_frame(table, ("image", "lesion_id")).set_index("image")["lesion_id"].to_dict()

    def item(row: Mapping[str, str]) -> Item:
        label = int(float(row["target"]))
        centre = sites[int(float(row["center"]))]
        # Validation images are drawn from the training images.
        split = {"train": "", "test": "test"}[row["fold"]]
        if label not in range(8):
            raise ValueError(f"target {label}")
        image = images / f"{row['image']}.jpg"
        return Item((image,), label, lesions.get(row["image"], ""), split, centre)

    return items_of_table(folds, ("image", "target", "center", "fold"), item)


def find_prr(
    root: Path,
    sites: Mapping[str, str],
    ham_table: Download,
    part_1: Download,
    part_2: Download,
    msk: Download,
    truth: Download,
) -> list[Item]:
    """The nevi, benign keratoses and melanomas of HAM10000 and ISIC 2017.

    `sites`: cohort -> the split of all its images, or "".
    """
    path = ham_table.path
    ham = ham_table.below(root, path, f"{path}.csv", f"{path}.tab")
    first = part_1.below(root)
    second = part_2.below(root)
    msk_images = msk.below(root)
    isic = truth.below(root)

    def ham_item(row: Mapping[str, str]) -> Item | None:
        split = sites[row["dataset"]]
        if row["dx"] not in _PRR_CLASSES:
            return None
        image = first / f"{row['image_id']}.jpg"
        if not image.exists() and (second / image.name).exists():
            image = second / image.name
        label = _PRR_CLASSES.index(row["dx"])
        return Item((image,), label, row["lesion_id"], split, row["dataset"])

    def isic_item(row: Mapping[str, str]) -> Item:
        """ISIC 2017 names melanomas and seborrheic keratoses; the others are nevi.

        A seborrheic keratosis is a benign keratosis.
        """
        name = "nv"
        if float(row["melanoma"]):
            name = "mel"
        elif float(row["seborrheic_keratosis"]):
            name = "bkl"
        image = msk_images / f"{row['image_id']}.jpg"
        return Item((image,), _PRR_CLASSES.index(name), "", "", "msk")  # client D

    items = items_of_table(ham, ("lesion_id", "image_id", "dx", "dataset"), ham_item)
    isic_columns = ("image_id", "melanoma", "seborrheic_keratosis")
    return items + items_of_table(isic, isic_columns, isic_item)


# -- histology: Camelyon17-WILDS, and MIDOG 2022 ---------------------------------------------------

_COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")


def find_camelyon(root: Path, sites: Sequence[str], download: Download) -> list[Item]:
    """The patches of metadata.csv, a site for each of its centres."""
    release = download.below(root, download.path, ".")
    table = download.below(release, "metadata.csv")
    patches = download.below(release, "patches")

    def item(row: Mapping[str, str]) -> Item:
        patient, node, x, y, tumor, centre = (int(row[name]) for name in _COLUMNS)
        if tumor not in (0, 1) or centre not in range(len(sites)):
            raise ValueError(f"tumor {tumor}, center {centre}")
        name = f"patient_{patient:03}_node_{node}"
        patch = patches / name / f"patch_{name}_x_{x}_y_{y}.png"
        return Item((patch,), tumor, f"{patient:03}", "", sites[centre])

    return items_of_table(table, _COLUMNS, item)


# Pixels of a patch; FedDAG resizes all images to 96 x 96, so patches keep their resolution.
_SIDE = 96
# Of the TIFF files, of the PNG files, of 2021.
_TABLES = ("MIDOG2022_training.json", "MIDOG2022_training_png.json", "MIDOG.json")
_LABELS = {1: 1, 2: 0}  # category -> class: mitotic figure, hard negative


def find_midog(
    root: Path, sites: Mapping[str, Sequence[int]], annotations: Download, image_files: Download
) -> list[Item]:
    """A patch around every annotated cell, a patient for each image.

    `sites`: tumour -> first and last number of its images.
    """
    table = annotations.below(root, *_TABLES)
    images = {}
    try:
        content = read_json(table)
        for entry in content["images"]:
            size = (entry["width"], entry["height"])
            images[int(entry["id"])] = (Path(entry["file_name"]).name, size)
        cells = sorted(content["annotations"], key=lambda cell: int(cell["image_id"]))
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{table}: not the annotations of MIDOG 2022 ({error}); download it again"
        ) from error

    def item(cell: Mapping[str, Any]) -> Item:
        name, size = images[int(cell["image_id"])]
        label = _LABELS[int(cell["category_id"])]
        source = image_files.below(root, f"images/{name}", name)
        number = int(source.stem)
        (site,) = (tumour for tumour, (first, last) in sites.items() if first <= number <= last)
        if size != _opened(source).size:
            raise ValueError(f"{source} is {_opened(source).size}, its annotations say {size}")
        left, top = patch_corner(list(map(float, cell["bbox"])), size, _SIDE)
        patch = root / "patches" / source.stem / f"{int(cell['id'])}.png"
        rendered = {patch: partial(_patch, source, left, top)}
        return Item((patch,), label, source.stem, "", site, rendered)

    return items_of(table, cells, item)


def patch_corner(box: Sequence[float], size: tuple[int, int], side: int) -> tuple[int, int]:
    """Left column and top row of the square around a box.

    At the border of the image it is shifted inwards.

    Args:
        box: (x1, y1, x2, y2) in pixels; it may extend beyond the image.
        size: width and height of the image in pixels.
        side: of the square in pixels.

    Raises:
        ValueError: the box is empty or outside of the image, or the image is smaller than the
            square.
    """
    x1, y1, x2, y2 = box
    width, height = size
    overlaps = max(x1, 0) < min(x2, width) and max(y1, 0) < min(y2, height)
    if not overlaps or min(size) < side:
        raise ValueError(
            f"no patch of {side} x {side} around the box {list(box)} "
            f"of an image of {width} x {height}"
        )
    left = math.floor((x1 + x2 - side) / 2)
    top = math.floor((y1 + y2 - side) / 2)
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


def _patch(source: Path, left: int, top: int) -> bytes:
    return png(np.ascontiguousarray(_pixels(source)[top : top + _SIDE, left : left + _SIDE]))


# -- all -------------------------------------------------------------------------------------------

_FIND: tuple[Callable[..., list[Item]], ...] = (
    find_volumes,
    find_fundus,
    find_grades,
    find_fed_isic,
    find_prr,
    find_camelyon,
    find_midog,
)
_BY_NAME = {find.__name__: find for find in _FIND}
_DESCRIPTIONS = read_json(Path(__file__).with_name("data.json"))
PREPARATIONS = {
    name: Preparation(name=name, **of | {"find": _BY_NAME[of["find"]]})
    for name, of in _DESCRIPTIONS.items()
}


def get_preparation(name: str) -> Preparation:
    """The preparation of a name; ConfigError with the nearest names if there is none."""
    if name not in PREPARATIONS:
        raise unknown("data of a paper", name, PREPARATIONS)
    return PREPARATIONS[name]


def list_preparations() -> str:
    """All data that can be prepared."""
    return "\n\n".join(preparation.describe() for preparation in PREPARATIONS.values())
