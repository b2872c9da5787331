"""All preparations, by name."""

from typing import Final

from medflare.core.settings import unknown
from medflare.data.dataset_import.papers import dermoscopy, pathology, prostate, retina
from medflare.data.dataset_import.papers.preparing import Preparation

_ALL: Final = (
    dermoscopy.FED_ISIC,
    *prostate.PREPARATIONS,
    retina.FOUR,
    retina.SIX,
    dermoscopy.PRR,
    pathology.CAMELYON,
    retina.GRADES,
    pathology.MIDOG,
)
PREPARATIONS: Final = {preparation.name: preparation for preparation in _ALL}


def get_preparation(name: str) -> Preparation:
    """The preparation of a name.

    Raises:
        ConfigError: there is none; the message has the nearest names.
    """
    if name not in PREPARATIONS:
        raise unknown("data of a paper", name, PREPARATIONS)
    return PREPARATIONS[name]


def listing() -> str:
    """All data that can be prepared."""
    return "\n\n".join(preparation.describe() for preparation in PREPARATIONS.values())
