"""Retinal photographs: disc and cup of DoFE (Wang et al., TMI 2020) and RIGA+, and the grades of GDRBench (Che et al., MICCAI 2023)."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from medflare.core.errors import DataError
from medflare.data.datalist import SPLITS
from medflare.data.dataset_import.folders import Item
from medflare.data.dataset_import.papers.preparing import (
    IMAGES,
    NO_TEST,
    SHARES_50_25_25,
    SHARES_80_20,
    WITHOUT_TEST,
    Download,
    Preparation,
    expected,
    files_in,
    items_of,
)
from medflare.data.reading import explained

_DOFE: Final = Download("Fundus (DoFE's dataset, folders Domain1 ... Domain4)", "https://github.com/emma-sjwang/Dofe")
_RIGA: Final = Download("RIGAPlus (folders RIGA and RIGA-mask)", "https://zenodo.org/record/6325549")
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


def find_dofe(root: Path, sites: Mapping[str, tuple[int, ...]] = _FOUR) -> list[Item]:
    """The images of DoFE's domains, by site."""
    items = []
    for site, domains in sites.items():
        for inner in (f"Domain{domain}/{split}/ROIs" for domain in domains for split in _SPLITS):
            folder = expected(root, f"Fundus/{inner}", inner, download=_DOFE)
            for image in files_in(expected(folder, "image", download=_DOFE), _PICTURES):
                mask = expected(folder, f"mask/{image.name}", download=_DOFE)
                items.append(_item(image, mask, site, cup_is_darkest=True))
    return items


def find_six(root: Path) -> list[Item]:
    """The images of FedSM's six clients, of DoFE's dataset and RIGA+; RIGA+ has photographs without masks, which are left out."""
    items = find_dofe(root, _DOFE_OF_SIX)
    photographs = expected(root, "RIGAPlus/RIGA", "RIGA", download=_RIGA)
    masks = expected(root, "RIGAPlus/RIGA-mask", "RIGA-mask", download=_RIGA)
    for site, folders in _RIGA_OF_SIX.items():
        outlined = []
        for image in sorted(path for folder in folders for path in expected(photographs, folder, download=_RIGA).glob("*/*")):
            mask = masks / image.relative_to(photographs).parent / f"{image.stem}-{_READER}{image.suffix}"
            if image.name.lower().endswith(_PICTURES) and mask.exists():
                outlined.append(_item(image, mask, site, cup_is_darkest=False))
        if not outlined:
            raise DataError(f"{masks / folders[0]}: no mask of reader {_READER}; get {_RIGA.what} from {_RIGA.where}")
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


_FOUR_COUNTS: Final = {"Drishti-GS": 101, "RIM-ONE": 159, "REFUGE-train": 400, "REFUGE-val": 400}
_SIX_COUNTS: Final = {"Drishti-GS": 101, "RIGA-BinRushed": 195, "RIGA-Magrabia": 94, "RIGA-MESSIDOR": 460, "RIM-ONE": 159, "REFUGE": 800}
_MASKS: Final = "images are DoFE's regions around the optic disc; masks are written anew as 0, 1 (disc), 2 (cup)"
_EYES: Final = "the release does not say which photographs are of one patient: each counts as a patient"

FOUR: Final = Preparation(
    name="fundus",
    title="Optic disc and cup: four sites",
    papers="IOP-FL, Tables I and II",
    licence="those of Drishti-GS, RIM-ONE r3 and REFUGE; research only",
    downloads=(_DOFE,),
    find=find_dofe,
    kind="segmentation",
    shares={"training": 0.84, "validation": 0.16},  # of IOP-FL's 64, 16 and 20 %
    splits=WITHOUT_TEST,
    counts={site: {IMAGES: count} for site, count in _FOUR_COUNTS.items()},
    source="IOP-FL, Sec. IV-A: 101, 159, 400 and 400 images",
    notes=(NO_TEST, _EYES, _MASKS),
)

SIX: Final = replace(
    FOUR,
    name="fundus_fedsm",
    title="Optic disc and cup: FedSM's six sites",
    papers="FedSM, Tables 3 and 5-7",
    licence="those of Drishti-GS, RIM-ONE r3, REFUGE and RIGA; research only",
    downloads=(_DOFE, _RIGA),
    find=find_six,
    shares=SHARES_50_25_25,
    splits=SPLITS,
    counts={site: {IMAGES: count} for site, count in _SIX_COUNTS.items()},
    source="FedSM, Table 1: training, validation and test images together",
    notes=(
        _EYES,
        _MASKS,
        f"FedSM does not say which of RIGA's six readers it follows; masks are those of reader {_READER}",
        "RIGA+ leaves photographs of RIGA out and has them cropped: expect a few more or fewer at RIGA-Magrabia and RIGA-MESSIDOR",
    ),
)


# -- GDRBench --------------------------------------------------------------------------------------------------------------

_RELEASE: Final = Download("images and splits", "https://github.com/chehx/DGDR/tree/main/GDRBench")
_SOURCES: Final = ("APTOS", "DEEPDR", "FGADR", "IDRID", "MESSIDOR", "RLDR")
_GRADES: Final = ("nodr", "mild_npdr", "moderate_npdr", "severe_npdr", "pdr")
_LISTS: Final = {"train": "training", "crossval": "validation"}


def find_grades(root: Path) -> list[Item]:
    """The images of the split files, a site for each source."""
    images = expected(root, "images", download=_RELEASE)

    def item(text: str, source: str, split: str) -> Item:
        path, _, grade = text.strip().rpartition(" ")
        _GRADES[int(grade)]  # IndexError for an unknown grade
        if Path(path).parts[:1] != (source,):
            raise ValueError(f"{text!r} is no '{source}/GRADE/FILE NUMBER'")
        return Item((images / path,), int(grade), "", split, source)

    items = []
    for source, (name, split) in product(_SOURCES, _LISTS.items()):
        file = expected(root, f"splits/{source}_{name}.txt", download=_RELEASE)
        lines = [text for text in file.read_text(encoding="utf-8").splitlines() if text.strip()]
        items += items_of(file, lines, partial(item, source=source, split=split))
    return items


GRADES: Final = Preparation(
    name="gdrbench",
    title="GDRBench: five grades of diabetic retinopathy, six sources",
    papers="FedDAG, Table III",
    licence="of each source its own; FGADR and Messidor-2 are given on request only",
    downloads=(_RELEASE,),
    find=find_grades,
    kind="classification",
    classes=_GRADES,
    shares=SHARES_80_20,
    splits=WITHOUT_TEST,
    counts={"APTOS": {IMAGES: 3662}, "FGADR": {IMAGES: 1842}, "IDRID": {IMAGES: 516}, "RLDR": {IMAGES: 1593}},
    total=11_357,
    source="GDRBench/README.md; all six together: FedDAG, Sec. IV-A1",
    notes=(_EYES, NO_TEST),
)
