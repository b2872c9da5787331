"""GDRBench: grades of diabetic retinopathy in the photographs of six sources, as Che et al. (MICCAI 2023) lay them out."""

from pathlib import Path
from typing import Final

from medflare.core.errors import DataError
from medflare.data.starting.finding import Item
from medflare.data.starting.papers.preparation import IMAGES, NO_TEST, WITHOUT_TEST, Download, Preparation, expected

_RELEASE: Final = Download("images and splits", "https://github.com/chehx/DGDR/tree/main/GDRBench")
_SOURCES: Final = ("APTOS", "DEEPDR", "FGADR", "IDRID", "MESSIDOR", "RLDR")
_GRADES: Final = ("nodr", "mild_npdr", "moderate_npdr", "severe_npdr", "pdr")
_LISTS: Final = {"train": "training", "crossval": "validation"}


def find(root: Path) -> list[Item]:
    """The images of the split files, a site for each source.

    Args:
        root: holds images/<SOURCE>/<grade>/ and splits/<SOURCE>_train.txt and _crossval.txt.

    Raises:
        DataError: something is missing, or a line that is no image with its grade.
    """
    images = expected(root, "images", download=_RELEASE)
    items = []
    for source in _SOURCES:
        for name, split in _LISTS.items():
            file = expected(root, f"splits/{source}_{name}.txt", download=_RELEASE)
            for line, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                if text.strip():
                    path, _, grade = text.strip().rpartition(" ")
                    if grade not in map(str, range(len(_GRADES))) or Path(path).parts[:1] != (source,):
                        raise DataError(f"{file} line {line}: {text!r} is no '{source}/GRADE/FILE NUMBER'; download it again")
                    items.append(Item((images / path,), int(grade), "", split, source))
    return items


PREPARATION: Final = Preparation(
    name="gdrbench",
    title="GDRBench: five grades of diabetic retinopathy, six sources",
    papers="FedDAG, Table III",
    licence="of each source its own; FGADR and Messidor-2 are given on request only",
    downloads=(_RELEASE,),
    find=find,
    kind="classification",
    classes=_GRADES,
    shares={"training": 0.8, "validation": 0.2},
    splits=WITHOUT_TEST,
    counts={"APTOS": {IMAGES: 3662}, "FGADR": {IMAGES: 1842}, "IDRID": {IMAGES: 516}, "RLDR": {IMAGES: 1593}},
    total=11_357,
    source="GDRBench/README.md; all six together: FedDAG, Sec. IV-A1",
    notes=(
        "nobody says which photographs are of one patient: each counts as a patient",
        NO_TEST,
    ),
)
