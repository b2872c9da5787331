"""Networks of other packages: the name of an entry point (see `core.extensions`), or
"package.module:name". Both import code, so the process must trust the package. Light to import.

By an import path only a subclass of `torch.nn.Module` or a function that its package has declared
with `register` is called; an entry point is such a declaration.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from medflare.core.errors import ConfigError, one_line
from medflare.core.extensions import Extensions, check_callable, require_trust
from medflare.core.extensions import trust as trust

NetworkSpec: TypeAlias = Mapping[str, Any]  # {"name": ..., arguments}
_factories: set[Callable[..., Any]] = set()

F = TypeVar("F", bound=Callable[..., Any])


def register(factory: F) -> F:
    """Decorator for a function of `in_channels`, `out_channels`, optionally `spatial_dims` and
    `size`, that returns a `torch.nn.Module`.
    """
    _factories.add(factory)
    return factory


EXTENSIONS = Extensions("network", "networks", tuple, check_callable)


def foreign_module(spec: NetworkSpec) -> str:
    """The module of a network of another package, {"name": "package.module:name"} or of an entry
    point, without importing it; "" for every other network.
    """
    name = str(spec.get("name"))
    module, mark, _ = name.partition(":")
    return module if mark else EXTENSIONS.module(name)


def imported(name: str) -> Callable[..., Any]:
    """The class or function of a network for which `foreign_module` has a module, not called;
    ConfigError if its package is not trusted, or does not have it.
    """
    foreign = EXTENSIONS.foreign(name)
    if foreign is not None:
        return foreign
    module, _, attribute = name.partition(":")
    package = module.split(".")[0]
    require_trust(f"network {name}", module)
    try:
        candidate = getattr(importlib.import_module(module), attribute)
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
