"""All methods by name: those of this folder and those of other distributions.

Every package below this folder may hold `Method` objects; another distribution names its own in the
entry-point group `medflare.methods`:

    [project.entry-points."medflare.methods"]
    my_method = "my_package.my_method:METHOD"

Algorithms are imported when they are first used.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medflare.core import extensions
from medflare.core.errors import ConfigError
from medflare.core.packages import trust_refusal
from medflare.core.settings import no_such
from medflare.methods.method import Method, loaded, paired

if TYPE_CHECKING:
    from torch import nn

    from medflare.core.message import Message
    from medflare.tasks.config import TaskConfig

RESERVED = ("create", "fetch", "list", "submit", "watch")  # words in the place of a method
SURVEYS = ("evaluate", "fingerprint")  # methods that do not train; not in `method_names`
_OBJECTS: dict[str, Method] = {}  # methods given to this process as objects


def get_method(name: str | Method, *, site: str | None = None, server: str | None = None) -> Method:
    """A method by name; `site` and `server` take an algorithm of another method, for example
    GRACE's server on a MOON site.

    Args:
        name: of the method, or a method that no package declares; its models can then be built in
            this process alone.
        site: method of the site algorithm; None: `name`.
        server: method of the server algorithm; None: `name`.

    Raises:
        ConfigError: no such method, with the nearest name, one that cannot be loaded, or a name
            that another distribution uses too.
    """
    if isinstance(name, Method):
        name = _registered(name)
    return paired(_by_name(site or name), _by_name(server or name))


def module_of(name: str) -> str:
    """The module that holds a method, without importing it; ConfigError, with the nearest name, if
    there is none, or if the name is in use, also as a word of the command line.
    """
    points = _foreign().get(name)
    if points is not None:
        extensions.require_unused("method", points, (*RESERVED, *_builtin()))
        return extensions.entry_module(points[0])
    if name in _builtin():
        return _builtin()[name][0]
    raise ConfigError(no_such("method", name, (*method_names(), *SURVEYS)))


def distribution_of(name: str) -> str:
    """The distribution that declares a method in an entry point; "" if none does."""
    for point in _foreign().get(name, ()):
        return point.dist.name if point.dist else ""
    return ""


def method_names() -> tuple[str, ...]:
    """Names of all methods that train, sorted; imports no algorithm."""
    return tuple(sorted({*_builtin(), *_foreign()} - set(SURVEYS)))


def build_deployed(task: "TaskConfig", message: "Message") -> "nn.Module":
    """The module (images to probabilities) of a final model of any kind.

    Raises:
        ConfigError: a kind that no method builds, see `_builder`.
        StateError: weights that do not fit the task.
    """
    from medflare.inference.deployed import build

    return build(task, message, _builder)


@cache
def _builder(kind: str) -> "Callable[[TaskConfig, Message], nn.Module] | None":
    """The builder of models of a kind; methods that cannot be loaded are skipped.

    A model's card, which is of another party, names the kind: only methods of trusted packages and
    those that this process uses already are loaded for it.

    Raises:
        ConfigError: no builder, and a method was not loaded.
    """
    builder = builtin_builder(kind)
    if builder is not None:
        return builder
    trusted = extensions.trusted()
    usable = []
    others = set()  # packages whose methods are not loaded
    for name, points in _foreign().items():
        module = extensions.entry_module(points[0])
        if module in sys.modules or not trust_refusal(module, trusted):
            usable.append(name)
        else:
            others.add(module.partition(".")[0])
    builder = _first_builder(kind, _loadable((*usable, *_OBJECTS)))
    if builder is None and others:
        raise ConfigError(
            f"unknown kind of model {kind!r}; if a package that this process does not trust "
            f"({', '.join(sorted(others))}) builds it, add that package to "
            f"{extensions.PACKAGES_VARIABLE}"
        )
    return builder


def builtin_builder(kind: str) -> "Callable[[TaskConfig, Message], nn.Module] | None":
    """The builder of models of a kind that a method of this folder has; imports no other
    package.
    """
    return _first_builder(kind, [method for _, method in _builtin().values()])


def _first_builder(
    kind: str, methods: Iterable[Method]
) -> "Callable[[TaskConfig, Message], nn.Module] | None":
    for method in methods:
        if kind in method.models:
            return loaded(method.models[kind])
    return None


def _loadable(names: Iterable[str]) -> Iterator[Method]:
    for name in names:
        try:
            yield _by_name(name)
        except ConfigError:
            continue


def _registered(method: Method) -> str:
    """The name of a method object, now known to this process; a later one of that name replaces it,
    unless a package declares it.
    """
    declared = method.name in _builtin() or method.name in _foreign()
    if declared and _by_name(method.name) is not method:
        raise ConfigError(
            f"method {method.name!r} exists already, from {module_of(method.name)}; "
            "give yours another name"
        )
    if not declared and _OBJECTS.get(method.name) is not method:
        _OBJECTS[method.name] = method
        _builder.cache_clear()
    return method.name


def _by_name(name: str) -> Method:
    if name in _OBJECTS:
        return _OBJECTS[name]
    module_of(name)  # ConfigError
    if name in _builtin():
        return _builtin()[name][1]
    return _from_entry_point(_foreign()[name][0])


@cache
def _builtin() -> dict[str, tuple[str, Method]]:
    """Name -> package below this folder, and method."""
    methods = {}
    for item in pkgutil.walk_packages([str(Path(__file__).parent)], "medflare.methods."):
        if item.ispkg:
            for value in vars(importlib.import_module(item.name)).values():
                if isinstance(value, Method):
                    methods[value.name] = item.name, value
    return methods


@cache
def _foreign() -> dict[str, list[EntryPoint]]:
    """The entry points of methods of other distributions by name, which may be in use."""
    return extensions.read_points("methods")


def _from_entry_point(point: EntryPoint) -> Method:
    def check(candidate: Any) -> None:
        if not isinstance(candidate, Method):
            raise TypeError(f"{point.value} is a {type(candidate).__name__}; name a Method")
        if candidate.name != point.name:
            raise ValueError(
                f"its Method is named {candidate.name!r}, the entry point {point.name!r}; "
                "give both one name"
            )

    return extensions.load("method", point, check)
