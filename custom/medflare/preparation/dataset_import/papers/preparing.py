"""From the downloads of a paper to its sites: what a `Preparation` is, and how it is done."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError, DataError
from medflare.data.datalist import FILE, LISTS
from medflare.preparation.dataset_import.folders import Item, prefixed
from medflare.preparation.dataset_import.frames import read_frame
from medflare.preparation.dataset_import.names import numbered
from medflare.preparation.dataset_import.papers.splits import (
    SPLIT_FILE,
    divided_warning,
    split_sites,
    with_paper_split,
    without_divided,
)
from medflare.preparation.dataset_import.patients import patient_of
from medflare.preparation.dataset_import.site_files import (
    check_files,
    check_target,
    place_files,
    write_datalist,
)
from medflare.preparation.dataset_import.splits import Sites, shared_warning

# Names in `Preparation.counts`, besides classes.
IMAGES = "images"
PATIENTS = "patients"
# Training and validation images together, if a paper has no validation images of its own.
TRAINED_ON = "not test"
TEST = "test"


@dataclass(frozen=True)
class Download:
    """A file or folder to download."""

    path: str  # below the folder of the downloads
    page: str  # that offers it

    def below(self, root: Path, *choices: str) -> Path:
        """The first path below `root` that exists, or its usual one without `choices`.

        DataError with the page to download from if there is none.
        """
        paths = choices or (self.path,)
        for path in paths:
            if (root / path).exists():
                return root / path
        raise DataError(
            f"{root / paths[0]}: not there; "
            f"get {self.path} from {self.page} and unpack it into {root}"
        )


@dataclass(frozen=True)
class Preparation:
    """How downloads become the sites of a paper's experiments."""

    name: str  # for the command line
    title: str
    papers: str  # the tables that use the data
    licence: str  # of the data, as their owners state it
    downloads: tuple[Download, ...]  # what to get
    # (folder of the downloads, sites, *downloads) -> images with their sites, and with split and
    # patient if the download names them
    find: Callable[..., list[Item]]
    sites: Any  # names of the sites, with what `find` has to know of each
    kind: str  # "segmentation" or "classification"
    # split -> share of the patients, for splits that the download does not name
    shares: Mapping[str, float]
    classes: tuple[str, ...] = ()  # of a classification, in the order of their numbers
    unit: str = "images"  # "images", "volumes" or "patches"
    splits: tuple[str, ...] = LISTS  # to write; a missing list is drawn when the data are read
    # site -> `IMAGES`, `PATIENTS`, `TRAINED_ON`, `TEST` or a class -> published number
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    total: int | None = None  # published number of images of all sites
    source: str = ""  # of `counts` and `total`
    group: str = "patient"  # what the download names as patients: "patient" or "lesion"
    notes: tuple[str, ...] = ()  # differences from the paper, one line each

    def describe(self) -> str:
        """The sites with their published numbers, the licence, and what to download."""
        with_patients = any(PATIENTS in numbers for numbers in self.counts.values())
        sizes = []
        for site, numbers in self.counts.items():
            if with_patients:
                sizes.append(f"{site} of {numbers[PATIENTS]} patients")
            else:
                both = numbers.get(TRAINED_ON, 0) + numbers.get(TEST, 0)
                sizes.append(f"{site} {numbers.get(IMAGES, both)}")
        published = [", ".join(sizes)] if sizes else []
        if self.total:
            published.append(f"{self.total} in all")
        lines = [
            f"{self.name}: {self.title}",
            f"  papers: {self.papers}",
            f"  {self.unit}: {'; '.join(published) or 'not published'}",
            f"  licence: {self.licence}",
        ]
        for download in self.downloads:
            lines += [f"  get {download.path}", f"      from {download.page}"]
        return "\n".join(lines)


def items_of(table: Path, rows: Iterable[Any], item: Callable[[Any], Item | None]) -> list[Item]:
    """The images of a table's rows; `item` returns None for a row to leave out.

    DataError names a row that the release does not have.
    """
    items = []
    for number, row in enumerate(rows, start=1):
        try:
            image = item(row)
        except (LookupError, TypeError, ValueError, DataError) as error:
            raise DataError(
                f"{table} row {number}: not as in the release ({error}); download it again"
            ) from error
        if image is not None:
            items.append(image)
    return items


def items_of_table(
    table: Path, columns: Sequence[str], item: Callable[[Any], Item | None]
) -> list[Item]:
    """As `items_of`, of a table with these columns."""
    return items_of(table, read_frame(table, columns).to_dict("records"), item)


class PreparedData(NamedTuple):
    """Sites that were written."""

    preparation: Preparation
    sites: Sites  # site -> its images with their splits
    home: Path  # folder of the sites
    table: str  # numbers of images, beside the published ones
    warnings: tuple[str, ...]  # patients in two splits or sites, and differences from the paper

    def render(self) -> str:
        """The table, notes and warnings, and the files that were written."""
        lines = [self.preparation.title, "", self.table, ""]
        lines += prefixed("note", self.preparation.notes)
        if "test" not in self.preparation.splits:
            lines.append(
                "note: no test list: a site that trains draws one from its training patients, "
                "an outside site is tested on all its images"
            )
        lines += prefixed("WARNING", self.warnings)
        for site in self.sites:
            lines.append(f"written: {self.home / site / FILE}")
        return "\n".join(lines)


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
) -> PreparedData:
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
        DataError: something is missing or damaged, the paper's split is missing, counts differ
            (strict), or datalists exist.
        ConfigError: both `redraw` and `paper_split`.
    """
    if redraw and paper_split:
        raise ConfigError(
            "--split paper uses the paper's split, --redraw draws another; give one of them"
        )
    if not source.is_dir():
        paths = ", ".join(download.path for download in preparation.downloads)
        raise DataError(f"{source}: not a folder; give the folder with {paths}")
    items = preparation.find(source, preparation.sites, *preparation.downloads)
    check_files(items, source)
    counts = dict(preparation.counts)
    if redraw:
        trained = {item.site for item in items if item.split != "test"}
        for number, item in enumerate(items):
            if item.site in trained:
                items[number] = replace(item, split="")
        for site, numbers in counts.items():
            of_split = (TRAINED_ON, TEST)
            counts[site] = {name: numbers[name] for name in numbers if name not in of_split}
    if paper_split:
        items = with_paper_split(items, source / SPLIT_FILE)
    by_site: dict[str, list[Item]] = {}
    for item in sorted(items, key=attrgetter("site")):
        by_site.setdefault(item.site, []).append(item)
    table, differences = compare_counts(preparation, counts, by_site)
    if differences and strict:
        found = differences[0]
        if len(differences) > 1:
            found += f", and {len(differences) - 1} more"
        raise DataError(
            f"{preparation.name}: {found} ({preparation.source}); "
            "complete the download, or leave --strict out"
        )
    check_target(target, by_site, force=force)
    sites = split_sites(by_site, preparation.shares, seed)
    divided = divided_warning(sites, preparation.group)
    shared = shared_warning(sites, preparation.group, preparation.splits)
    warnings = (*filter(None, (divided, shared)), *differences)
    sites = without_divided(sites)
    header = {"labels": numbered(preparation.classes)}
    for site, listed in sites.items():
        place_files(target / site, listed, source, copy=copy, slices={})
        write_datalist(target / site, listed, source, splits=preparation.splits, header=header)
    return PreparedData(preparation, sites, target, table, warnings)


def compare_counts(
    preparation: Preparation, counts: Mapping[str, Mapping[str, int]], sites: Sites
) -> tuple[str, list[str]]:
    """A table of numbers of images, and a line for every difference from the published ones.

    A cell is "number (published)" if they differ.
    """
    rows = []
    differences = []
    compared = set[str]().union(*counts.values())
    for site in sorted({*sites, *counts}):
        items = sites.get(site, ())
        patients = set(map(patient_of, items))
        test = sum(item.split == "test" for item in items)
        numbers = {IMAGES: len(items), PATIENTS: len(patients)}
        if TRAINED_ON in compared:
            numbers[TRAINED_ON] = len(items) - test
        if TEST in compared:
            numbers[TEST] = test
        for label, name in enumerate(preparation.classes):
            numbers[name] = sum(item.label == label for item in items)
        row = {"site": site} | {name: str(number) for name, number in numbers.items()}
        for name, count in counts.get(site, {}).items():
            if numbers[name] != count:
                row[name] += f" ({count})"
                differences.append(f"{site} has {numbers[name]} {name}, published are {count}")
        rows.append(row)
    total = sum(map(len, sites.values()))
    if preparation.total not in (None, total):
        differences.append(
            f"there are {total} {preparation.unit}, published are {preparation.total}"
        )
    table = pd.DataFrame(rows).to_string(index=False)
    return f"{table}\npublished counts: {preparation.source or 'none'}", differences
