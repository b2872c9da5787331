"""From the downloads of a paper to its sites: what a `Preparation` is, and how it is done."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError, DataError
from medflare.data.datalist import FILE, SPLITS
from medflare.data.dataset_import.datalists import check_files, check_target, place_files, write_datalist
from medflare.data.dataset_import.folders import Item
from medflare.data.dataset_import.papers.splits import (
    SPLIT_FILE,
    Sites,
    divided_warning,
    shared_warning,
    split_sites,
    with_paper_split,
    without_divided,
)

# Names in `Preparation.counts`, besides classes.
IMAGES: Final = "images"
PATIENTS: Final = "patients"
TRAINED_ON: Final = "not test"  # training and validation images together, if a paper has no validation images of its own
TEST: Final = "test"


@dataclass(frozen=True)
class Download:
    """A file or folder to download (its path below the folder of the downloads), and the page that offers it."""

    path: str
    page: str


@dataclass(frozen=True)
class Preparation:
    """How downloads become the sites of a paper's experiments."""

    name: str  # for the command line
    title: str
    papers: str  # the tables that use the data
    licence: str  # of the data, as their owners state it
    downloads: tuple[Download, ...]  # what to get
    # (folder of the downloads, sites, *downloads) -> images with their sites, and with split and patient if the download names them
    find: Callable[..., list[Item]]
    sites: Any  # names of the sites, with what `find` has to know of each
    kind: str  # "segmentation" or "classification"
    shares: Mapping[str, float]  # split -> share of the patients, for splits that the download does not name
    classes: tuple[str, ...] = ()  # of a classification, in the order of their numbers
    unit: str = "images"  # "images", "volumes" or "patches"
    splits: tuple[str, ...] = SPLITS  # lists to write; a missing list is drawn when the data are read
    # site -> `IMAGES`, `PATIENTS`, `TRAINED_ON`, `TEST` or a class -> published number
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    total: int | None = None  # published number of images of all sites
    source: str = ""  # of `counts` and `total`
    group: str = "patient"  # what the download names as patients: "patient" or "lesion"
    notes: tuple[str, ...] = ()  # differences from the paper, one line each

    def describe(self) -> str:
        """The sites with their published numbers, the licence, and what to download."""
        sizes = [
            f"{site} {numbers.get(IMAGES, numbers.get(TRAINED_ON, 0) + numbers.get(TEST, 0))}" for site, numbers in self.counts.items()
        ]
        if any(PATIENTS in numbers for numbers in self.counts.values()):
            sizes = [f"{site} of {numbers[PATIENTS]} patients" for site, numbers in self.counts.items()]
        counted = "; ".join(filter(None, (", ".join(sizes), f"{self.total} in all" if self.total else ""))) or "not published"
        lines = [f"{self.name}: {self.title}", f"  papers: {self.papers}", f"  {self.unit}: {counted}", f"  licence: {self.licence}"]
        return "\n".join([*lines, *(f"  get {download.path}\n      from {download.page}" for download in self.downloads)])


def expected(root: Path, *choices: str, download: Download) -> Path:
    """The first path below `root` that exists; DataError with the page to download from if there is none."""
    for choice in choices:
        if (root / choice).exists():
            return root / choice
    raise DataError(f"{root / choices[0]}: not there; get {download.path} from {download.page} and unpack it into {root}")


def items_of(table: Path, rows: Iterable[Any], item: Callable[[Any], Item | None]) -> list[Item]:
    """The images of a table's rows; `item` returns None for a row to leave out. DataError names a row that the release does not have."""
    items = []
    for number, row in enumerate(rows, start=1):
        try:
            items.append(item(row))
        except (LookupError, TypeError, ValueError, DataError) as error:
            raise DataError(f"{table} row {number}: not as in the release ({error}); download it again") from error
    return [image for image in items if image is not None]


class Prepared(NamedTuple):
    """Sites that were written."""

    preparation: Preparation
    sites: Sites  # site -> its images with their splits
    home: Path  # folder of the sites
    table: str  # numbers of images, beside the published ones
    warnings: tuple[str, ...]  # patients in two splits or sites, and differences from the paper

    def render(self) -> str:
        """The table, notes and warnings, and the files that were written."""
        lines = [self.preparation.title, "", self.table, ""]
        lines += [f"note: {note}" for note in self.preparation.notes]
        if "test" not in self.preparation.splits:
            own = "a site that trains draws one from its training patients, an outside site is tested on all its images"
            lines.append(f"note: no test list: {own}")
        lines += [f"WARNING: {warning}" for warning in self.warnings]
        return "\n".join([*lines, *(f"written: {self.home / site / FILE}" for site in self.sites)])


def prepare(
    preparation: Preparation,
    source: Path,
    target: Path,
    *,
    strict: bool = False,
    redraw: bool = False,
    paper_split: bool = False,
    seed: int = 0,
    copy: bool = False,
    force: bool = False,
) -> Prepared:
    """Make the sites of a paper from its downloads; nothing is written before all checks pass.

    Args:
        source: folder of the downloads, unpacked.
        target: folder of the sites; each gets its files as hard links and its datalist.json.
        strict: whether counts that differ from the paper's are an error.
        redraw: draw the splits by patient, also if the download names them.
        paper_split: use the paper's split: `SPLIT_FILE` in `source`, or what the download names.
        copy: copy the files.
        force: replace existing datalists.

    Raises:
        DataError: something is missing or damaged, the paper's split is missing, counts differ (strict), or datalists exist.
        ConfigError: both `redraw` and `paper_split`.
    """
    if redraw and paper_split:
        raise ConfigError("--split paper uses the paper's split, --redraw draws another; give one of them")
    if not source.is_dir():
        raise DataError(f"{source}: not a folder; give the folder with {', '.join(download.path for download in preparation.downloads)}")
    items = preparation.find(source, preparation.sites, *preparation.downloads)
    check_files(items, source)
    counts = preparation.counts
    if redraw:
        trained = {item.site for item in items if item.split != "test"}
        items = [replace(item, split="") if item.site in trained else item for item in items]
        counts = {site: {name: count for name, count in of.items() if name not in (TRAINED_ON, TEST)} for site, of in counts.items()}
    if paper_split:
        items = with_paper_split(items, source / SPLIT_FILE)
    sites = {site: [item for item in items if item.site == site] for site in sorted({item.site for item in items})}
    table, differences = compare_counts(preparation, counts, sites)
    if differences and strict:
        raise DataError(f"{preparation.name}: {_summary(differences)} ({preparation.source}); complete the download, or leave --strict out")
    check_target(target, sites, force=force)
    sites = split_sites(sites, preparation.shares, seed)
    divided = divided_warning(sites, preparation.group)
    shared = shared_warning(sites, preparation.group, preparation.splits)
    warnings = [warning for warning in (divided, shared) if warning]
    sites = without_divided(sites)
    header = {"labels": {str(number): name for number, name in enumerate(preparation.classes)}}
    for site, listed in sites.items():
        place_files(target / site, listed, source, copy=copy)
        write_datalist(target / site, listed, source, splits=preparation.splits, header=header)
    return Prepared(preparation, sites, target, table, (*warnings, *differences))


def _summary(lines: Sequence[str]) -> str:
    return lines[0] + (f", and {len(lines) - 1} more" if len(lines) > 1 else "")


def compare_counts(preparation: Preparation, counts: Mapping[str, Mapping[str, int]], sites: Sites) -> tuple[str, list[str]]:
    """A table of numbers of images, with "number (published)" in a cell if they differ, and a line for every difference."""
    rows, differences = [], []
    published = {name for numbers in counts.values() for name in numbers}
    for site in sorted({*sites, *counts}):
        items = sites.get(site, ())
        test = sum(item.split == "test" for item in items)
        number = {IMAGES: len(items), PATIENTS: len({item.patient or str(item.first) for item in items})}
        number |= {name: value for name, value in ((TRAINED_ON, len(items) - test), (TEST, test)) if name in published}
        number |= {name: sum(item.label == label for item in items) for label, name in enumerate(preparation.classes)}
        off = {name: count for name, count in counts.get(site, {}).items() if number[name] != count}
        rows.append({"site": site} | {name: f"{value} ({off[name]})" if name in off else str(value) for name, value in number.items()})
        differences += [f"{site} has {number[name]} {name}, published are {count}" for name, count in off.items()]
    total = sum(map(len, sites.values()))
    if preparation.total not in (None, total):
        differences.append(f"there are {total} {preparation.unit}, published are {preparation.total}")
    return f"{pd.DataFrame(rows).to_string(index=False)}\npublished counts: {preparation.source or 'none'}", differences
