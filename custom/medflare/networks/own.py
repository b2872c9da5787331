"""Networks of other packages: "package.module:name" imports code, so the process must trust the
package. Light to import.

A task and the card of a delivered model are data from other parties. The packages that a process
trusts are in the environment variable MEDFLARE_NETWORKS or, under FLARE, among the `packages` in
the party's local/medflare.json (see `flare.participants`). Only a subclass of `torch.nn.Module` or
a function that its package has declared with `register` is called.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from medflare.core.errors import ConfigError, one_line
from medflare.core.packages import untrusted

VARIABLE: Final = "MEDFLARE_NETWORKS"  # packages or modules, separated by commas
_trusted: set[str] = set()
_factories: set[Callable[..., Any]] = set()

F = TypeVar("F", bound=Callable[..., Any])


def register(factory: F) -> F:
    """Decorator for a function of `in_channels`, `out_channels`, optionally `spatial_dims` and
    `size`, that returns a `torch.nn.Module`.
    """
    _factories.add(factory)
    return factory


def own_module(spec: Mapping[str, Any]) -> str:
    """The module of a network {"name": "package.module:name"}, without importing it; "" for every
    other network.
    """
    module, mark, _ = str(spec.get("name")).partition(":")
    return module if mark else ""


def trust(module: str) -> None:
    """Allow this process to import networks of the module; the party's own settings say so."""
    _trusted.add(module)


def imported(name: str) -> Callable[..., Any]:
    """The class or registered function of "package.module:name", not called; ConfigError if its
    module is not trusted, or has none.
    """
    module, _, attribute = name.partition(":")
    package = module.split(".")[0]
    named = [word.strip().rstrip(".") for word in os.environ.get(VARIABLE, "").split(",")]
    reason = untrusted(module, {*_trusted, *filter(None, named)})
    if reason:
        raise ConfigError(
            f"network {name}: this process does not trust {package}: {reason}, "
            f"or outside FLARE sets {VARIABLE}={package}"
        )
    try:
        candidate: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the package raises
        raise ConfigError(f"network {name}: cannot be imported ({one_line(error)})") from error
    from torch import nn

    if isinstance(candidate, type) and issubclass(candidate, nn.Module):
        usable = candidate.__module__.split(".")[0] == package
    else:
        usable = any(candidate is factory for factory in _factories)
    if not usable:
        raise ConfigError(
            f"network {name}: is neither a torch.nn.Module class of {package} "
            f"nor a function declared with {__name__}.register"
        )
    return candidate
