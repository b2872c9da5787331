"""Retinal photographs: disc and cup of DoFE (Wang et al., TMI 2020) and RIGA+, and the grades of GDRBench (Che et al., MICCAI 2023)."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from medflare.core.errors import DataError
from medflare.data.dataset_import.folders import Item
from medflare.data.dataset_import.papers.preparing import Download, expected, files_in, items_of
from medflare.data.reading import explained

_SPLITS: Final = ("train", "test")  # DoFE's; the papers draw their own
_PICTURES: Final = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
_READER: Final = 1  # of RIGA's six, whose outlines are taken
_DARK, _BRIGHT = 51, 201  # between the three grey values of a mask, which shrinking has blurred

# Site -> DoFE's domains. IOP-FL keeps REFUGE's training and validation images apart, FedSM has them as one client.
_FOUR: Final = {"Drishti-GS": (1,), "RIM-ONE": (2,), "REFUGE-train": (3,), "REFUGE-val": (4,)}
_DOFE_OF_SIX: Final = {"Drishti-GS": (1,), "RIM-ONE": (2,), "REFUGE": (3, 4)}
_RIGA_OF_SIX: Final = {
    "RIGA-BinRushed": ("BinRushed",),
    "RIGA-Magrabia": ("Magrabia",),
    "RIGA-MESSIDOR": ("MESSIDOR_Base1", "MESSIDOR_Base2", "MESSIDOR_Base3"),
}


def find_dofe(root: Path, download: Download, sites: Mapping[str, tuple[int, ...]] = _FOUR) -> list[Item]:
    """The images of DoFE's domains, by site."""
    items = []
    for site, domains in sites.items():
        for inner in (f"Domain{domain}/{split}/ROIs" for domain in domains for split in _SPLITS):
            folder = expected(root, f"Fundus/{inner}", inner, download=download)
            for image in files_in(expected(folder, "image", download=download), _PICTURES):
                mask = expected(folder, f"mask/{image.name}", download=download)
                items.append(_item(image, mask, site, cup_is_darkest=True))
    return items


def find_six(root: Path, dofe: Download, riga: Download) -> list[Item]:
    """The images of FedSM's six clients, of DoFE's dataset and RIGA+; RIGA+ has photographs without masks, which are left out."""
    items = find_dofe(root, dofe, _DOFE_OF_SIX)
    photographs = expected(root, "RIGAPlus/RIGA", "RIGA", download=riga)
    masks = expected(root, "RIGAPlus/RIGA-mask", "RIGA-mask", download=riga)
    for site, folders in _RIGA_OF_SIX.items():
        outlined = []
        for image in sorted(path for folder in folders for path in expected(photographs, folder, download=riga).glob("*/*")):
            mask = masks / image.relative_to(photographs).parent / f"{image.stem}-{_READER}{image.suffix}"
            if image.name.lower().endswith(_PICTURES) and mask.exists():
                outlined.append(_item(image, mask, site, cup_is_darkest=False))
        if not outlined:
            raise DataError(f"{masks / folders[0]}: no mask of reader {_READER}; get {riga.path} from {riga.page}")
        items += outlined
    return items


def _item(image: Path, mask: Path, site: str, cup_is_darkest: bool) -> Item:
    """An image with its mask, which is written anew as PNG."""
    written = mask.with_suffix(".png")
    return Item((image,), written, site=site, rendered={written: partial(read_disc_and_cup, mask, cup_is_darkest)})


def read_disc_and_cup(mask: Path, cup_is_darkest: bool) -> np.ndarray:
    """A mask as 0 (neither), 1 (disc around the cup) and 2 (cup), uint8 (H, W).

    Args:
        mask: file of DoFE (cup black, disc grey, rest white) or RIGA+ (rest black, cup grey, disc white).
        cup_is_darkest: whether it is DoFE's.
    """
    with explained(mask):
        grey = np.asarray(Image.open(mask).convert("L"))
    dark, bright = grey < _DARK, grey >= _BRIGHT
    cup, rest = (dark, bright) if cup_is_darkest else (~dark & ~bright, dark)
    return np.where(rest, 0, np.where(cup, 2, 1)).astype(np.uint8)


_SOURCES: Final = ("APTOS", "DEEPDR", "FGADR", "IDRID", "MESSIDOR", "RLDR")
_LISTS: Final = {"train": "training", "crossval": "validation"}


def find_grades(root: Path, download: Download) -> list[Item]:
    """The images of the split files, a site for each source."""
    images = expected(root, "images", download=download)

    def item(text: str, source: str, split: str) -> Item:
        path, _, grade = text.strip().rpartition(" ")
        if Path(path).parts[:1] != (source,) or int(grade) not in range(5):
            raise ValueError(f"{text!r} is no '{source}/GRADE/FILE NUMBER'")
        return Item((images / path,), int(grade), "", split, source)

    items = []
    for source, (name, split) in product(_SOURCES, _LISTS.items()):
        file = expected(root, f"splits/{source}_{name}.txt", download=download)
        lines = [text for text in file.read_text(encoding="utf-8").splitlines() if text.strip()]
        items += items_of(file, lines, partial(item, source=source, split=split))
    return items
