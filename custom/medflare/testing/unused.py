"""Code of a method that nothing uses, as after a slip in a name."""

import ast
import inspect
import sys
from collections.abc import Container, Iterable, Iterator
from difflib import get_close_matches

from medflare.core.phases import is_declared, phases_of
from medflare.methods.method import Method

_SIMILAR = 0.8  # of difflib, from which a name is taken for a slip


def foreign_classes(method: Method) -> list[type]:
    """The classes of a method's algorithms that are not medflare's, by name."""
    classes = {*method.site_class.__mro__, *method.server_class.__mro__}
    return sorted(filter(_is_foreign, classes), key=lambda cls: cls.__name__)


def unused(method: Method, asked: Container[str]) -> str:
    """A hyper-parameter, function or class attribute of the method that its own code does not use,
    in words; "" if there is none.

    `asked`: phases that the steps of a schedule ask for.
    """
    foreign = foreign_classes(method)
    used = set(_names_in({cls.__module__ for cls in foreign}))
    if not used:  # no source, as in a notebook
        return ""
    for hyper in method.hyper_classes.values():
        inherited = _names_of(hyper)
        for cls in filter(_is_foreign, hyper.__mro__):
            for name in cls.__annotations__:
                if name not in used and name not in inherited:
                    return (
                        f"no code of the method reads its hyper-parameter {name!r}; use it, or "
                        "leave it out"
                    )
    # Another module of the package may call a function.
    packages = {cls.__module__.partition(".")[0] for cls in foreign}
    used.update(_names_in([name for name in sys.modules if name.partition(".")[0] in packages]))
    for cls in foreign:
        inherited = _names_of(cls)
        for name, value in vars(cls).items():
            if name in used or name in inherited or name in asked or name.startswith("_"):
                continue
            if name in method.site_class.phases:
                return (
                    f"no step asks for phase {name!r}: add Step.of({cls.__name__}.{name}, round) "
                    "to the server's steps"
                )
            phases = phases_of(value)
            if phases and not phases & method.site_class.phases.keys():
                return (
                    f"the site has no phase {min(phases)!r}, which {cls.__name__}.{name} asks for "
                    "or handles; name one that it has"
                )
            if not is_declared(value):
                meant = get_close_matches(name, inherited, 1, _SIMILAR)
                remedy = f"is it to be {meant[0]!r}?" if meant else "leave it out"
                return f"nothing uses {cls.__name__}.{name}; {remedy}"
    return ""


def _is_foreign(cls: type) -> bool:
    """Whether a class is neither medflare's nor one that medflare's inherit from."""
    return cls.__module__.partition(".")[0] not in ("medflare", "builtins", "typing", "abc")


def _names_of(cls: type) -> set[str]:
    """The public names of medflare's classes that a class inherits from."""
    names: set[str] = set()
    for base in cls.__mro__:
        if not _is_foreign(base):
            names.update(vars(base), getattr(base, "__annotations__", {}))
    return {name for name in names if not name.startswith("_")}


def _names_in(modules: Iterable[str]) -> Iterator[str]:
    """The names that modules read, also as attributes and texts; not in decorators, where a phase
    has a request and a handler without being asked for.
    """
    for module in modules:
        try:
            tree = ast.parse(inspect.getsource(sys.modules[module]))
        except (KeyError, OSError, TypeError):
            continue
        for node in ast.walk(tree):
            getattr(node, "decorator_list", []).clear()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield node.id
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
