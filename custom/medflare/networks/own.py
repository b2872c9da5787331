"""Networks of one's own: "package.module:name" imports code, so the process must have been told that it may. Light to import.

A task and a delivered model's card are data that come from others. Who trusts a package says so where the process runs: in the
environment variable MEDFLARE_NETWORKS, or, under FLARE, as one of the `packages` in the party's local/medflare.json (see
`flare.participants`). What is named there is looked at before it is called: a class derived from `torch.nn.Module`, or a
function that its package has declared with `register`.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from medflare.core.errors import ConfigError, one_line
from medflare.core.packages import untrusted

VARIABLE: Final = "MEDFLARE_NETWORKS"  # packages or modules, separated by commas
_MARK: Final = ":"
_trusted: set[str] = set()
_factories: set[Callable[..., Any]] = set()

F = TypeVar("F", bound=Callable[..., Any])


def register(factory: F) -> F:
    """Declare a function of one's own package as one that builds a network; as a decorator.

    Args:
        factory: takes `in_channels`, `out_channels` and what else the task fixes, and returns a `torch.nn.Module`.
    """
    _factories.add(factory)
    return factory


def own_module(spec: Mapping[str, Any]) -> str:
    """The module that a network of one's own lies in, which is not imported; empty for every other network.

    Args:
        spec: "name" and arguments.
    """
    module, mark, _ = str(spec.get("name")).partition(_MARK)
    return module if mark else ""


def trust(module: str) -> None:
    """From now on networks of this module may be imported in this process; the party's own settings have said so."""
    _trusted.add(module)


def imported(name: str) -> Callable[..., Any]:
    """The class or registered function that "package.module:name" names; nothing of it is called.

    Raises:
        ConfigError: nobody here trusts the module, or it has no such thing.
    """
    module, _, attribute = name.partition(_MARK)
    package = module.split(".")[0]
    named = [word.strip().rstrip(".") for word in os.environ.get(VARIABLE, "").split(",")]
    if reason := untrusted(module, {*_trusted, *filter(None, named)}):
        raise ConfigError(f"network {name}: this process does not trust {package}: {reason}, or outside FLARE sets {VARIABLE}={package}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the package raises
        remedy = "a network of one's own is 'package.module:name'"
        raise ConfigError(f"network {name}: it cannot be imported ({one_line(error)}); {remedy}") from error
    if not _builds_networks(found, package):
        reason = f"it is neither a torch.nn.Module class of {package} nor a function that {package} has declared with {__name__}.register"
        raise ConfigError(f"network {name}: {reason}")
    builder: Callable[..., Any] = found
    return builder


def _builds_networks(found: Any, package: str) -> bool:
    from torch import nn

    if isinstance(found, type):
        return issubclass(found, nn.Module) and found.__module__.split(".")[0] == package
    return callable(found) and any(found is factory for factory in _factories)
