"""Networks of one's own: "package.module:name" imports code, so the process must have been told that it may. Light to import.

A task and a delivered model's card are data that come from others. Who trusts a package says so where the process runs: in the
environment variable MEDFLARE_NETWORKS, or, under FLARE, in the party's `class_allow_list` (see `flare.exchange.participants`).
"""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from medflare.core.errors import ConfigError

VARIABLE: Final = "MEDFLARE_NETWORKS"  # packages or modules, separated by commas
_MARK: Final = ":"
_trusted: set[str] = set()


def own_module(spec: Mapping[str, Any]) -> str:
    """The module that a network of one's own lies in, which is not imported; empty for every other network.

    Args:
        spec: "name" and arguments.
    """
    module, mark, _ = str(spec.get("name")).partition(_MARK)
    return module if mark else ""


def trust(module: str) -> None:
    """From now on networks of this module may be imported in this process; somebody who may say so has.

    Args:
        module: its full name.
    """
    _trusted.add(module)


def imported(name: str) -> Callable[..., Any]:
    """The class or function that "package.module:name" names.

    Args:
        name: of the network.

    Raises:
        ConfigError: nobody here trusts the module, or it has no such thing.
    """
    module, _, attribute = name.partition(_MARK)
    if not _is_trusted(module):
        raise ConfigError(
            f"network {name}: it is code of {module.split('.')[0]}, which this process was not told to trust; who trusts it sets "
            f'{VARIABLE}={module.split(".")[0]}, or under FLARE adds "{module.split(".")[0]}." to class_allow_list in local/resources.json'
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"network {name}: it cannot be imported ({error}); a network of one's own is 'package.module:name'") from error
    if not callable(found):
        raise ConfigError(f"network {name}: it is a {type(found).__name__}; name a class or a function that builds a network")
    return found


def _is_trusted(module: str) -> bool:
    named = [name.strip().rstrip(".") for name in os.environ.get(VARIABLE, "").split(",")]
    return module in _trusted or any(name and (module == name or module.startswith(f"{name}.")) for name in named)
