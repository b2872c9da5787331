"""Where a site keeps decoded images. Light to import: it needs no torch."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.settings import STRICT

_VARIABLE: Final = "MEDFLARE_CACHE"


@dataclass(frozen=True, config=STRICT)
class CacheSettings:
    """Where decoded images are kept, and how many of them.

    Attributes:
        folder: for their files; "" for MEDFLARE_CACHE, else the engine's choice.
        limit_gb: most that all files together take on disk, in gigabytes; the longest unused make room.
        memory_gb: images of a site that take more than this, in gigabytes, stay on disk and are read batch by batch.
    """

    folder: str = ""
    limit_gb: Annotated[float, Field(gt=0)] = 100.0
    memory_gb: Annotated[float, Field(ge=0)] = 4.0


def placed(own: CacheSettings | None, engines: Path | None = None) -> CacheSettings | None:
    """The settings with the folder that is used, or None where nothing is kept on disk.

    Args:
        own: the site's settings; None where it wants no cache.
        engines: folder of the engine's choice, where neither the site nor MEDFLARE_CACHE names one.
    """
    if own is None:
        return None
    folder = own.folder or os.environ.get(_VARIABLE) or engines
    return replace(own, folder=str(Path(folder).expanduser())) if folder else None
