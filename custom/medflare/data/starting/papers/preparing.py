"""Downloads of a paper become sites: looked at, counted against the paper's table, searched for leaks, split, written."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from medflare.core.errors import DataError
from medflare.data.datalist import FILE
from medflare.data.starting.dealing import draw_splits
from medflare.data.starting.finding import Item
from medflare.data.starting.papers.preparation import IMAGES, PATIENTS, TEST, TRAINED_ON, Preparation
from medflare.data.starting.writing import bring_files, folder_of, refuse_existing, usable_items, write_datalist

_COUNTED: Final = (IMAGES, PATIENTS, TRAINED_ON, TEST)
Sites: TypeAlias = Mapping[str, Sequence[Item]]


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
        sites = {site: listed if _only_tested(listed) else [replace(item, split="") for item in listed] for site, listed in sites.items()}
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
    _write(preparation, split, source, target, copy=choices.copy)
    return Prepared(preparation, split, target, rows, (*warnings, *differing))


def _only_tested(items: Sequence[Item]) -> bool:
    return all(item.split == "test" for item in items)


def _first(lines: Sequence[str]) -> str:
    return lines[0] + (f", and {len(lines) - 1} more" if len(lines) > 1 else "")


def leaks_of(sites: Sites) -> list[str]:
    """A line for every patient whose images are in two splits or at two sites.

    Args:
        sites: site -> its images; a split that is not yet drawn counts as training.

    Examples:
        >>> a, b = (Item((Path(name),), 0, "p1", split) for name, split in (("a", "training"), ("b", "test")))
        >>> leaks_of({"A": [a, b]})
        ['p1 is in two splits of A: a (training) and b (test)']
        >>> leaks_of({"A": [a], "B": [replace(a, files=(Path("c"),))]})
        ['p1 is at two sites: a (A) and c (B)']
    """
    home: dict[str, tuple[str, Item]] = {}
    found: dict[str, str] = {}
    for site, items in sites.items():
        for item in items:
            if not item.patient:
                continue
            place, first = home.setdefault(item.patient, (site, item))
            both = (first.first.name, item.first.name)
            if place != site:
                found.setdefault(item.patient, f"{item.patient} is at two sites: {both[0]} ({place}) and {both[1]} ({site})")
            elif (first.split or "training") != (item.split or "training"):
                splits = (first.split or "training", item.split or "training")
                where = f"{both[0]} ({splits[0]}) and {both[1]} ({splits[1]})"
                found.setdefault(item.patient, f"{item.patient} is in two splits of {site}: {where}")
    return list(found.values())


# -- split -----------------------------------------------------------------------------------------------------------------


def _split(preparation: Preparation, site: str, items: Sequence[Item], seed: int) -> list[Item]:
    """The images of a site with their splits; a patient that the published split divides is named in none of them."""
    divided = _divided(items)
    if not divided:
        return draw_splits(items, site, preparation.shares, seed)
    test = [item for item in items if item.split == "test"]
    shares = {split: share for split, share in preparation.shares.items() if split != "test"}
    rest = draw_splits([item for item in items if item.split != "test"], site, shares, seed)
    return [replace(item, patient="") if item.patient in divided else item for item in (*rest, *test)]


def _divided(items: Sequence[Item]) -> set[str]:
    """Patients with images in and outside the published test list."""
    tested = {item.patient for item in items if item.split == "test"}
    return {item.patient for item in items if item.split != "test"} & tested - {""}


# -- counted ---------------------------------------------------------------------------------------------------------------


def beside_the_paper(preparation: Preparation, counts: Mapping[str, Mapping[str, int]], sites: Sites) -> tuple[str, list[str]]:
    """What was found beside what was published.

    Args:
        preparation: what is counted, and the published total.
        counts: the published ones, site by site.
        sites: site -> its images.

    Returns:
        A table, "found" or "found (published)" in a cell where they differ, and a line for every difference.
    """
    columns = [*(name for name in _COUNTED if name in (IMAGES, PATIENTS) or any(name in of for of in counts.values()))]
    columns += preparation.classes
    rows, differing = [["site", *columns]], []
    for site in sorted({*sites, *counts}):
        found = _counts(sites.get(site, ()), preparation.classes)
        published = counts.get(site, {})
        rows.append([site, *(_cell(found[name], published.get(name)) for name in columns)])
        off = {name: count for name, count in published.items() if found[name] != count}
        differing += [f"{site} has {found[name]} {name}, published are {count}" for name, count in off.items()]
    total = sum(map(len, sites.values()))
    if preparation.total not in (None, total):
        differing.append(f"there are {total} {preparation.unit}, published are {preparation.total}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([*lines, f"published counts: {preparation.source or 'none'}"]), differing


def _cell(found: int, published: int | None) -> str:
    return str(found) if published in (None, found) else f"{found} ({published})"


def _counts(items: Sequence[Item], classes: Sequence[str]) -> dict[str, int]:
    labels = Counter(item.label for item in items if isinstance(item.label, int))
    test = sum(item.split == "test" for item in items)
    people = len({item.patient or str(item.first) for item in items})
    counted = {IMAGES: len(items), PATIENTS: people, TRAINED_ON: len(items) - test, TEST: test}
    return counted | {name: labels[number] for number, name in enumerate(classes)}


# -- written ---------------------------------------------------------------------------------------------------------------


def _write(preparation: Preparation, sites: Sites, source: Path, target: Path, *, copy: bool) -> None:
    tables: dict[str, Any] = {"labels": {str(number): name for number, name in enumerate(preparation.classes)}}
    for site, items in sites.items():
        folder = folder_of(target, site)
        listed = bring_files(folder, items, source, copy=copy, recode=preparation.recode)
        write_datalist(folder, listed, source, splits=preparation.splits, tables=tables)
