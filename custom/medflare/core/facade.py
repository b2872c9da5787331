"""A package that offers names of its modules without importing them before they are used."""

import importlib
from collections.abc import Mapping
from typing import Any


def public(package: str, names: Mapping[str, str], name: str) -> Any:
    """What the `__getattr__` of a package answers; AttributeError if it offers no such name."""
    if name not in names:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module = names[name]
    if not module.startswith("medflare."):
        module = f"{package}.{module}"
    return getattr(importlib.import_module(module), name)
