"""What the server takes from a site; everything else is that site's failure, never the run's."""

from typing import Any

from medflare.core.facade import public

_PUBLIC = {"screen": "updates", "Screened": "updates"}


def __getattr__(name: str) -> Any:
    return public(__name__, _PUBLIC, name)
