"""Patients who have images at several sites."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from medflare.data.datalist import LISTS
from medflare.preparation.dataset_import.folders import Item

Sites: TypeAlias = Mapping[str, Sequence[Item]]  # site -> its images


def across_sites(
    sites: Sites, draw: Callable[[str, Sequence[Item]], list[Item]]
) -> dict[str, list[Item]]:
    """The images of all sites with their splits, each site drawn alone by `draw` (site, images).

    Then a patient who is at an earlier site, too, gets the split of this site; sites with named
    splits come first.
    """
    named = {site for site, items in sites.items() if any(item.split for item in items)}
    split_of: dict[str, str] = {}
    drawn: dict[str, list[Item]] = {}
    for site in [*sorted(named), *sorted(sites.keys() - named)]:
        drawn[site] = []
        for item in draw(site, sites[site]):
            if site not in named:
                item = replace(item, split=split_of.get(item.patient, item.split))
            drawn[site].append(item)
        split_of = {item.patient: item.split for item in drawn[site]} | split_of
        split_of.pop("", None)
    return {site: drawn[site] for site in sites}


def shared_warning(sites: Sites, group: str, lists: Sequence[str] = LISTS) -> str:
    """A line about patients who are at two sites; "" if there is none.

    Args:
        group: what the download calls a patient, see `Preparation.group`.
        lists: the splits that are written; without "test", each site draws one later.

    Examples:
        >>> from pathlib import Path
        >>> a, b = (Item((Path(site),), 0, "p1", "training", site) for site in ("A", "B"))
        >>> shared_warning({"A": [a], "B": [b]}, "patient")
        'patients at two sites: 1, for example p1 at A and B; each is in one split at all sites'
    """
    splits_of: dict[str, dict[str, set[str]]] = {}  # patient -> site -> splits
    for site, items in sites.items():
        for item in items:
            splits_of.setdefault(item.patient, {}).setdefault(site, set()).add(item.split)
    splits_of.pop("", None)
    shared = {patient: splits for patient, splits in splits_of.items() if len(splits) > 1}
    if not shared:
        return ""
    example = next(iter(shared))
    places = " and ".join(shared[example])
    line = f"{group}s at two sites: {len(shared)}, for example {example} at {places}"
    apart = sum(len(set().union(*splits.values())) > 1 for splits in shared.values())
    if apart:
        crossing = _tested_and_trained_on(sites, shared)
        return (
            f"{line}; in different splits: {apart}; test images that show a {group} on which "
            f"another site trains: {crossing}; --redraw draws splits by {group} across sites"
        )
    if "test" not in lists:
        return (
            f"{line}; each site draws its test list when it reads the data, "
            "so a site can test what another trains on"
        )
    return f"{line}; each is in one split at all sites"


def _tested_and_trained_on(sites: Sites, shared: Mapping[str, Mapping[str, set[str]]]) -> int:
    """The number of test images whose patient another site has in training or validation."""
    number = 0
    for site, items in sites.items():
        for item in items:
            trained = False
            for other, splits in shared.get(item.patient, {}).items():
                trained = trained or (other != site and splits != {"test"})
            number += item.split == "test" and trained
    return number
