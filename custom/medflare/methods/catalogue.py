"""All methods by name: those of this room and those that other distributions bring.

A method is found by existing. In this room every module and package may hold `Method` objects, one of them as `METHOD`; another
distribution names its own in the entry-point group `medflare.methods`:

    [project.entry-points."medflare.methods"]
    my_method = "my_package.my_method:METHOD"

Nothing is imported before it is asked for: a method's name is that of the module or package that holds it.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from medflare.core.errors import ConfigError
from medflare.core.settings import no_such
from medflare.methods.method import Method, loaded, paired

if TYPE_CHECKING:
    from torch import nn

    from medflare.core.message import Message
    from medflare.tasks.config import TaskConfig

GROUP = "medflare.methods"  # the entry points of other distributions, and the package in which our own methods lie
RESERVED = ("evaluate", "list", "watch")  # what stands where the command line takes a method: `medflare job watch`
_NO_METHODS = ("aggregation", "base", "catalogue", "method", "parts")  # what this folder holds beside methods
SURVEYS = ("fingerprint",)  # they train nothing: found by name, and in no list of methods to train with


def get_method(name: str | Method, *, site: str | None = None, server: str | None = None) -> Method:
    """A method by name; `site` and `server` swap in the half of another method (GRACE's server on a MOON site, say).

    Args:
        name: of the method, or a method that no package declares; its models can then be built in this process alone.
        site: method that the site algorithm comes from; None: `name`.
        server: method that the server algorithm comes from; None: `name`.

    Raises:
        ConfigError: no such method, with the nearest name, or one that cannot be loaded.
    """
    if isinstance(name, Method):
        name = _registered(name)
    of_site, of_server = (_known(part or name) for part in (site, server))
    return paired(of_site, of_server)


def module_of(name: str) -> str:
    """The module that holds a method, which is not imported.

    Raises:
        ConfigError: no such method, with the nearest name.
    """
    if name in _own():
        return _own()[name]
    if name in _foreign():
        return _module(_foreign()[name])
    raise ConfigError(no_such("method", name, (*method_names(), *SURVEYS)))


def method_names() -> tuple[str, ...]:
    """Names of all methods that train, ours and others', sorted; imports no algorithm."""
    return tuple(sorted({*_own(), *_foreign()} - set(SURVEYS)))


def build_deployed(task: "TaskConfig", message: "Message") -> "nn.Module":
    """The module (images to probabilities) of a delivered model of any kind.

    Raises:
        ConfigError: a kind that no method builds.
        StateError: weights that do not fit the task.
    """
    from medflare.inference.deployed import build

    return build(task, message, _builder)


@cache
def _builder(kind: str) -> "Callable[[TaskConfig, Message], nn.Module] | None":
    """What builds models of a kind; None where no method does. Ours are asked first; a method that cannot be loaded builds nothing."""
    for name in (*_own(), *_foreign(), *_OBJECTS):
        try:
            models = _known(name).models
        except ConfigError:
            continue
        if kind in models:
            return loaded(models[kind])
    return None


_OBJECTS: dict[str, Method] = {}  # methods that this process was handed as objects


def _registered(method: Method) -> str:
    """The name of a method object, under which this process now knows it; a later object of the same name replaces it.

    Raises:
        ConfigError: a package declares another method of that name.
    """
    declared = method.name in _own() or method.name in _foreign()
    if declared and _known(method.name) is not method:
        raise ConfigError(f"method {method.name!r} exists already, from {module_of(method.name)}; give yours another name")
    if not declared and _OBJECTS.get(method.name) is not method:
        _OBJECTS[method.name] = method
        _builder.cache_clear()
    return method.name


def _known(name: str) -> Method:
    if name in _OBJECTS:
        return _OBJECTS[name]
    module = module_of(name)
    if name in _own():
        return next(method for method in _methods_in(module) if method.name == name)
    return _from_elsewhere(_foreign()[name])


@cache
def _own() -> dict[str, str]:
    """Method -> module that holds it, in this room: packages are asked, a shelf's modules and single modules are named like theirs."""
    found: dict[str, str] = {}
    folder = Path(__file__).parent
    for item in pkgutil.iter_modules([str(folder)]):
        place = f"{GROUP}.{item.name}"
        if item.name in _NO_METHODS:
            continue
        if not item.ispkg:
            found[item.name] = place
        elif held := list(_methods_in(place)):
            found |= {method.name: place for method in held}
        else:
            found |= {inner.name: f"{place}.{inner.name}" for inner in pkgutil.iter_modules([str(folder / item.name)])}
    return found


def _methods_in(module: str) -> Iterator[Method]:
    held = vars(importlib.import_module(module)).values()
    return (value for value in held if isinstance(value, Method))


@cache
def _foreign() -> dict[str, EntryPoint]:
    """Methods of other distributions by name.

    Raises:
        ConfigError: two distributions, or one and we ourselves, claim the same name, or one claims a word of the command line.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in RESERVED:
            raise ConfigError(f"method {point.name!r} of {_owner(point)} has a name that the command line needs; give it another one")
        other = found.get(point.name)
        if point.name in _own() or (other is not None and other.value != point.value):
            raise ConfigError(f"method {point.name!r} is brought by {_owner(point)} and exists already; uninstall one of the two")
        found[point.name] = point
    return found


def _module(point: EntryPoint) -> str:
    """The module that an entry point names.

    Raises:
        ConfigError: the entry point is malformed.
    """
    if EntryPoint.pattern.match(point.value) is None:
        raise ConfigError(f"entry point {point.name!r} of {_owner(point)} must be 'module:METHOD', it is {point.value!r:.100}")
    return point.module


def _from_elsewhere(point: EntryPoint) -> Method:
    try:
        method = point.load()
    except Exception as error:
        raise ConfigError(f"method {point.name!r} of {_owner(point)} cannot be loaded ({type(error).__name__}: {error})") from error
    if not isinstance(method, Method) or method.name != point.name:
        raise ConfigError(f"entry point {point.name!r} of {_owner(point)} must name a Method object with that name, it names {method!r}")
    return method


def _owner(point: EntryPoint) -> str:
    return f"the distribution {point.dist.name}" if point.dist is not None else point.value
