"""The plain loop: a whole federation on one machine, without FLARE."""

from typing import Any

from medflare.core.facade import public

_PUBLIC = {"LocalExchange": "exchange", "resume_local": "loop", "run_local": "loop"}


def __getattr__(name: str) -> Any:
    return public(__name__, _PUBLIC, name)
