"""What is known of the data of a paper before they are there: what to download, which sites they make, and what the paper counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from medflare.core.errors import DataError
from medflare.data.datalist import SPLITS
from medflare.data.starting.finding import Item
from medflare.data.starting.writing import Recode

IMAGES: Final = "images"
PATIENTS: Final = "patients"
TRAINED_ON: Final = "not test"  # training and validation images together, where a paper has no validation images of its own
TEST: Final = "test"
WITHOUT_TEST: Final = ("training", "validation")  # `splits` of data on which papers leave sites out
NO_TEST: Final = "no test list: a site that trains draws one from its training patients, an outside site is tested on all its images"


@dataclass(frozen=True)
class Download:
    """One thing to get.

    Attributes:
        what: its file or folder, as it lies below --from.
        where: the page that offers it.
    """

    what: str
    where: str


@dataclass(frozen=True)
class Preparation:
    """How downloads become the sites of a paper's experiments.

    Attributes:
        name: for the command line.
        title: what it is, for people.
        papers: whose experiments use it, with the table that describes the data.
        licence: of the data, as its owners state it.
        downloads: what to get.
        find: from the folder of the downloads to the images, each with its site; with its split where the download names one, and with
            its patient where somebody says whose it is.
        kind: "segmentation" or "classification".
        classes: of a classification, in the order of their numbers.
        unit: what its images are: "images", "volumes" or "patches".
        shares: split -> share of the patients, for the splits that the download does not name.
        splits: lists that are written; one that is not there is drawn when the data are read, and an outside site without a test list is
            tested on all its images.
        counts: site -> `IMAGES`, `PATIENTS`, `TRAINED_ON`, `TEST` or a class -> what the paper counts; what nobody published is left out.
        total: images of all sites together, where only that is published.
        source: of `counts` and `total`.
        crossing: why a patient is in two splits or at two sites by the design of the published split; "" where that is a fault.
        recode: see `writing.bring_files`.
        notes: where this differs from the paper, one line each.
    """

    name: str
    title: str
    papers: str
    licence: str
    downloads: tuple[Download, ...]
    find: Callable[[Path], list[Item]]
    kind: str
    shares: Mapping[str, float]
    classes: tuple[str, ...] = ()
    unit: str = "images"
    splits: tuple[str, ...] = SPLITS
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    total: int | None = None
    source: str = ""
    crossing: str = ""
    recode: Recode | None = None
    notes: tuple[str, ...] = ()


def expected(root: Path, *choices: str, download: Download) -> Path:
    """The first of some places that exists.

    Args:
        root: the folder of the downloads.
        choices: paths below it, under which the same thing goes.
        download: what it comes with.

    Raises:
        DataError: none exists; says which was expected and where it is downloaded.
    """
    for choice in choices:
        if (root / choice).exists():
            return root / choice
    raise DataError(f"{root / choices[0]}: not there; get {download.what} from {download.where} and unpack it into {root}")


def files_in(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """Files of a folder by their endings, sorted; hidden ones are left out.

    Args:
        folder: is not searched below.
        endings: in lower case.

    Raises:
        DataError: there is none.
    """
    found = sorted(path for path in folder.iterdir() if path.name.lower().endswith(endings) and not path.name.startswith("."))
    if not found:
        raise DataError(f"{folder}: holds no file that ends in {' or '.join(endings)}; unpack the download completely")
    return found
