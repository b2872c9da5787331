"""The splits of a paper's sites: published, or drawn by patient across sites."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from medflare.core.errors import DataError
from medflare.data.reading import stem
from medflare.preparation.dataset_import.folders import Item
from medflare.preparation.dataset_import.frames import read_frame
from medflare.preparation.dataset_import.names import shortened, split_name
from medflare.preparation.dataset_import.splits import Sites, across_sites, draw_splits

SPLIT_FILE = "split_of_the_paper.csv"  # beside the downloads, a row per image
_COLUMNS = ("image_id", "site", "split")


def with_paper_split(items: Sequence[Item], file: Path) -> list[Item]:
    """The images with the splits of a table; a site that it does not name keeps its splits.

    Without the table, the images as they are if the download names splits of a site that trains.

    Raises:
        DataError: no split is named, or the table and the images differ.
    """
    if not file.exists():
        trained = {item.site for item in items if item.split != "test"}
        if any(item.split and item.site in trained for item in items):
            return list(items)
        raise DataError(
            f"{file}: not there, but --split paper needs it; "
            f"add it with {', '.join(_COLUMNS)} of each image, or leave --split out"
        )
    splits = _read_splits(file)
    named = {site for site, _ in splits}
    listed = {(item.site, stem(item.first)) for item in items if item.site in named}
    _refuse_difference(file, "has no row for", listed - splits.keys())
    _refuse_difference(file, "names images that are not in the download:", splits.keys() - listed)
    assigned = []
    for item in items:
        split = splits.get((item.site, stem(item.first)), item.split)
        assigned.append(replace(item, split=split))
    return assigned


def _read_splits(file: Path) -> dict[tuple[str, str], str]:
    """(Site, image) -> split; DataError for a word that is no split, and an image in two splits."""
    table = read_frame(file, _COLUMNS)
    splits: dict[tuple[str, str], str] = {}
    for image, site, word in table[list(_COLUMNS)].itertuples(index=False, name=None):
        split = split_name(word)
        if not split:
            raise DataError(
                f"{file}: split {word!r} of {image} is not known; "
                "write training, validation or test"
            )
        if splits.setdefault((site, image), split) != split:
            raise DataError(f"{file}: {image} of {site} is in two splits; keep one of its rows")
    return splits


def _refuse_difference(file: Path, words: str, images: Iterable[tuple[str, str]]) -> None:
    names = [f"{image} of {site}" for site, image in sorted(images)]
    if names:
        raise DataError(
            f"{file}: {words} {shortened(names)}; correct the table, or complete the download"
        )


def split_sites(sites: Sites, shares: Mapping[str, float], seed: int) -> dict[str, list[Item]]:
    """The images of all sites with their splits: named ones are kept, others drawn by patient.

    Args:
        shares: split -> its share of the patients.
        seed: of the draw, with the name of the site.

    Raises:
        DataError: a site has too few patients.
    """
    return across_sites(sites, partial(_split_site, shares=shares, seed=seed))


def _split_site(
    site: str, items: Sequence[Item], *, shares: Mapping[str, float], seed: int
) -> list[Item]:
    """The images of a site with their splits, also where named splits divide patients."""
    if all(item.split for item in items):
        return list(items)
    test = [item for item in items if item.split == "test"]
    rest = [item for item in items if item.split != "test"]
    divided = {item.patient for item in test} & {item.patient for item in rest} - {""}
    if not divided:
        return draw_splits(items, site, shares, seed)
    without_test = {split: share for split, share in shares.items() if split != "test"}
    return [*draw_splits(rest, site, without_test, seed), *test]


def divided_patients(items: Iterable[Item]) -> set[str]:
    """The patients of a site's images that are in two splits.

    Examples:
        >>> named = ("p", "training"), ("p", "test"), ("q", "test"), ("", "training"), ("", "test")
        >>> divided_patients(Item((Path("a"),), 0, patient, split) for patient, split in named)
        {'p'}
    """
    split_of: dict[str, str] = {}
    divided = set()
    for item in items:
        if split_of.setdefault(item.patient, item.split) != item.split:
            divided.add(item.patient)
    return divided - {""}


def without_divided(sites: Sites) -> dict[str, list[Item]]:
    """The images of all sites; those of a patient in two splits of a site lose their patient.

    Sites refuse a datalist with a patient in two splits.
    """
    cleared: dict[str, list[Item]] = {}
    for site, items in sites.items():
        divided = divided_patients(items)
        cleared[site] = []
        for item in items:
            if item.patient in divided:
                item = replace(item, patient="")
            cleared[site].append(item)
    return cleared


def divided_warning(sites: Sites, group: str) -> str:
    """A line with the test images of each site whose patient its other images show, too.

    Args:
        group: what the download calls a patient, see `Preparation.group`.

    Returns:
        The line, or "" if no patient is in two splits of a site.
    """
    divided = sum(len(divided_patients(items)) for items in sites.values())
    if not divided:
        return ""
    counts = []
    for site, items in sites.items():
        test = [item.patient for item in items if item.split == "test"]
        others = {item.patient for item in items if item.split != "test"}
        if not test or not others:
            continue
        if any(test) or any(others):
            shown = sum(patient in others for patient in test if patient)
            counts.append(f"{site} {shown} of {len(test)}")
        else:
            counts.append(f"{site} unknown, without {group} ids")
    return (
        f"{group}s in two splits of a site: {divided}; test images that show a {group} of the "
        f"site's training or validation images: {', '.join(counts)}; "
        f"their numbers measure memory, too; --redraw draws splits by {group}"
    )
