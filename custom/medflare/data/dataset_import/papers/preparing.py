"""From the downloads of a paper to its sites: what to get, which sites it makes, what the paper counts, and the datalists.

A recipe is a `Preparation`; those of the papers are in the files beside this one.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from medflare.core.errors import DataError
from medflare.data.datalist import FILE, SPLITS
from medflare.data.dataset_import.datalists import aligned
from medflare.data.dataset_import.finding import Item
from medflare.data.dataset_import.partition import draw_splits
from medflare.data.dataset_import.writing import Recode, bring_files, folder_of, refuse_existing, usable_items, write_datalist

IMAGES: Final = "images"
PATIENTS: Final = "patients"
TRAINED_ON: Final = "not test"  # training and validation images together, where a paper has no validation images of its own
TEST: Final = "test"
WITHOUT_TEST: Final = ("training", "validation")  # `splits` of data on which papers leave sites out
NO_TEST: Final = "no test list: a site that trains draws one from its training patients, an outside site is tested on all its images"


Sites: TypeAlias = Mapping[str, Sequence[Item]]
Row = TypeVar("Row")


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


# -- what recipes find files and rows with ---------------------------------------------------------------------------------


def expected(root: Path, *choices: str, download: Download) -> Path:
    """The first of some places below the folder of the downloads that exists.

    Raises:
        DataError: none exists; says which was expected and where it is downloaded.
    """
    for choice in choices:
        if (root / choice).exists():
            return root / choice
    raise DataError(f"{root / choices[0]}: not there; get {download.what} from {download.where} and unpack it into {root}")


def files_in(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """Files of a folder by their endings in lower case, sorted; hidden ones are left out.

    Raises:
        DataError: there is none.
    """
    found = sorted(path for path in folder.iterdir() if path.name.lower().endswith(endings) and not path.name.startswith("."))
    if not found:
        raise DataError(f"{folder}: holds no file that ends in {' or '.join(endings)}; unpack the download completely")
    return found


def items_of(table: Path, rows: Sequence[Row], item: Callable[[Row], Item | None]) -> list[Item]:
    """The images of a table's rows, or of a list's lines.

    Raises:
        DataError: such a row.
    """
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(item(row))
        except (LookupError, TypeError, ValueError, DataError) as error:
            raise DataError(f"{table} row {number}: none of the release's ({error}); download it again") from error
    return [image for image in found if image is not None]


_COUNTED: Final = (IMAGES, PATIENTS, TRAINED_ON, TEST)


@dataclass(frozen=True)
class Choices:
    """How a preparation is done.

    Attributes:
        strict: counts that differ from the paper's are an error.
        redraw: all splits are drawn by patient, also where the download names some.
        seed: of what is drawn.
        copy: files are copied and not linked.
        force: datalists that exist are written anew.
    """

    strict: bool = False
    redraw: bool = False
    seed: int = 0
    copy: bool = False
    force: bool = False


@dataclass(frozen=True)
class Prepared:
    """Sites that were written.

    Attributes:
        preparation: of which data.
        sites: site -> its images with their splits.
        home: folder of the sites.
        table: what was found beside what the paper counts.
        warnings: what may spoil a comparison, one line each.
    """

    preparation: Preparation
    sites: Sites
    home: Path
    table: str
    warnings: tuple[str, ...]

    def render(self) -> str:
        """The table, what to beware of, and what was written."""
        lines = [self.preparation.title, "", self.table, ""]
        lines += [f"note: {note}" for note in self.preparation.notes]
        lines += [f"WARNING: {warning}" for warning in self.warnings]
        return "\n".join([*lines, *(f"written: {folder_of(self.home, site) / FILE}" for site in self.sites)])


def prepare(preparation: Preparation, source: Path, target: Path, choices: Choices = Choices()) -> Prepared:
    """Makes the sites of a paper from what was downloaded; nothing is written before everything fits.

    Args:
        preparation: of which data.
        source: folder of the downloads, unpacked.
        target: folder of the sites; each has its files as hard links, or copies, and its datalist.json.
        choices: see there.

    Raises:
        DataError: something is missing or damaged, the same patient is in two splits or at two sites, counts differ (strict), or
            datalists exist.
    """
    if not source.is_dir():
        raise DataError(f"{source}: not a folder; give the folder with {', '.join(download.what for download in preparation.downloads)}")
    items, bad = usable_items(preparation.find(source), source)
    if bad:
        raise DataError(f"{source}: {len(bad)} of {len(bad) + len(items)} are not usable, the first: {bad[0]}; download them again")
    sites: dict[str, list[Item]] = {}
    for item in items:
        sites.setdefault(item.site, []).append(item)
    counts = preparation.counts
    if choices.redraw:
        trained = {site for site, listed in sites.items() if any(item.split != "test" for item in listed)}
        sites = {site: [replace(item, split="") if site in trained else item for item in listed] for site, listed in sites.items()}
        counts = {site: {name: count for name, count in of.items() if name not in (TRAINED_ON, TEST)} for site, of in counts.items()}
    leaks = leaks_of(sites)
    if leaks and not preparation.crossing:
        raise DataError(f"{preparation.name}: {_first(leaks)}; a patient belongs to one split of one site")
    warnings = (f"{preparation.crossing}: {_first(leaks)}; --redraw splits by patient",) if leaks else ()
    rows, differing = beside_the_paper(preparation, counts, sites)
    if differing and choices.strict:
        raise DataError(f"{preparation.name}: {_first(differing)} ({preparation.source}); complete the download, or leave --strict out")
    refuse_existing(target, sites, force=choices.force)
    split = {site: _split(preparation, site, listed, choices.seed) for site, listed in sorted(sites.items())}
    tables = {"labels": {str(number): name for number, name in enumerate(preparation.classes)}}
    for site, listed in split.items():
        brought = bring_files(folder_of(target, site), listed, source, copy=choices.copy, recode=preparation.recode)
        write_datalist(folder_of(target, site), brought, source, splits=preparation.splits, tables=tables)
    return Prepared(preparation, split, target, rows, (*warnings, *differing))


def _first(lines: Sequence[str]) -> str:
    return lines[0] + (f", and {len(lines) - 1} more" if len(lines) > 1 else "")


def leaks_of(sites: Sites) -> list[str]:
    """A line for every patient whose images are in two splits or at two sites; a split that is not yet drawn counts as training.

    Examples:
        >>> a, b = (Item((Path(name),), 0, "p1", split) for name, split in (("a", "training"), ("b", "test")))
        >>> leaks_of({"A": [a, b]}), leaks_of({"A": [a], "B": [a]})
        (['p1 is in two splits of A: a (training) and b (test)'], ['p1 is at two sites: a (A) and a (B)'])
    """
    home: dict[str, tuple[str, str, str]] = {}
    found: dict[str, str] = {}
    for site, items in sites.items():
        for item in items:
            split, file = item.split or "training", item.first.name
            place, first, other = home.setdefault(item.patient, (site, split, file))
            if place != site:
                found.setdefault(item.patient, f"{item.patient} is at two sites: {other} ({place}) and {file} ({site})")
            elif first != split:
                found.setdefault(item.patient, f"{item.patient} is in two splits of {site}: {other} ({first}) and {file} ({split})")
    return [line for patient, line in found.items() if patient]


def _split(preparation: Preparation, site: str, items: Sequence[Item], seed: int) -> list[Item]:
    """The images of a site with their splits; a patient that the published test list divides is named in neither part."""
    test, rest = ([item for item in items if (item.split == "test") == tested] for tested in (True, False))
    divided = {item.patient for item in test} & {item.patient for item in rest} - {""}
    if not divided:
        return draw_splits(items, site, preparation.shares, seed)
    shares = {split: share for split, share in preparation.shares.items() if split != "test"}
    return [replace(item, patient="") if item.patient in divided else item for item in (*draw_splits(rest, site, shares, seed), *test)]


def beside_the_paper(preparation: Preparation, counts: Mapping[str, Mapping[str, int]], sites: Sites) -> tuple[str, list[str]]:
    """What was found beside what was published.

    Returns:
        A table, "found" or "found (published)" in a cell where they differ, and a line for every difference.
    """
    columns = [name for name in _COUNTED if name in (IMAGES, PATIENTS) or any(name in of for of in counts.values())]
    columns += preparation.classes
    rows, differing = [["site", *columns]], []
    for site in sorted({*sites, *counts}):
        items = sites.get(site, ())
        labels = Counter(item.label for item in items if isinstance(item.label, int))
        test = sum(item.split == "test" for item in items)
        people = len({item.patient or str(item.first) for item in items})
        found = {IMAGES: len(items), PATIENTS: people, TRAINED_ON: len(items) - test, TEST: test}
        found |= {name: labels[number] for number, name in enumerate(preparation.classes)}
        off = {name: count for name, count in counts.get(site, {}).items() if found[name] != count}
        rows.append([site, *(f"{found[name]} ({off[name]})" if name in off else str(found[name]) for name in columns)])
        differing += [f"{site} has {found[name]} {name}, published are {count}" for name, count in off.items()]
    total = sum(map(len, sites.values()))
    if preparation.total not in (None, total):
        differing.append(f"there are {total} {preparation.unit}, published are {preparation.total}")
    return "\n".join([aligned(rows), f"published counts: {preparation.source or 'none'}"]), differing
