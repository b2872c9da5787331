"""All preparations, by name."""

from collections.abc import Mapping
from typing import Final

from medflare.core.settings import unknown
from medflare.data.dataset_import.papers import dermoscopy, pathology, prostate, retina
from medflare.data.dataset_import.papers.preparing import IMAGES, PATIENTS, TEST, TRAINED_ON, Preparation

PREPARATIONS: Final = {
    preparation.name: preparation
    for preparation in (
        dermoscopy.FED_ISIC,
        *prostate.PREPARATIONS,
        retina.FOUR,
        retina.SIX,
        dermoscopy.PRR,
        pathology.CAMELYON,
        retina.GRADES,
        pathology.MIDOG,
    )
}


def get_preparation(name: str) -> Preparation:
    """The preparation of a name.

    Raises:
        ConfigError: there is none, with the nearest names.
    """
    if name not in PREPARATIONS:
        raise unknown("data of a paper", name, PREPARATIONS)
    return PREPARATIONS[name]


def listing() -> str:
    """What can be prepared: what it is, how many images the papers count at which sites, the licence, and what to download."""
    return "\n\n".join(map(_described, PREPARATIONS.values()))


def _described(preparation: Preparation) -> str:
    sizes = ", ".join(f"{site} {_size(of)}" for site, of in preparation.counts.items())
    total = f"{preparation.total} in all" if preparation.total is not None else ""
    downloads = [f"  get {download.what}\n      from {download.where}" for download in preparation.downloads]
    counted = "; ".join(filter(None, (sizes, total))) or "not published"
    lines = [f"{preparation.name}: {preparation.title}", f"  papers: {preparation.papers}", f"  {preparation.unit}: {counted}"]
    return "\n".join([*lines, f"  licence: {preparation.licence}", *downloads])


def _size(of: Mapping[str, int]) -> str:
    """Of a site what the paper counts: its images, or its patients where it does not count images."""
    if IMAGES in of or TRAINED_ON in of:
        return str(of[IMAGES] if IMAGES in of else of[TRAINED_ON] + of[TEST])
    return f"of {of[PATIENTS]} patients"
