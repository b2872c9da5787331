"""All preparations: their descriptions are in data.json, the functions that find their images in the modules beside it."""

import json
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Final

from medflare.core.settings import unknown
from medflare.data.dataset_import.folders import Item
from medflare.data.dataset_import.papers import dermoscopy, pathology, prostate, retina
from medflare.data.dataset_import.papers.preparing import Preparation

_FIND: Final[dict[str, Callable[..., list[Item]]]] = {
    "fed_isic2019": dermoscopy.find_fed_isic,
    "prostate": prostate.find_saml,
    "prostate_prr": partial(prostate.find_saml, sites=prostate.PRR_SITES),
    "prostate_fedsm": prostate.find_fedsm,
    "fundus": retina.find_dofe,
    "fundus_fedsm": retina.find_six,
    "dermoscopy_prr": dermoscopy.find_prr,
    "camelyon17": pathology.find_camelyon,
    "gdrbench": retina.find_grades,
    "midog2022": pathology.find_midog,
}
_DESCRIPTIONS: Final = json.loads((resources.files(__package__) / "data.json").read_text(encoding="utf-8"))
PREPARATIONS: Final = {name: Preparation(name=name, find=_FIND[name], **description) for name, description in _DESCRIPTIONS.items()}


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
