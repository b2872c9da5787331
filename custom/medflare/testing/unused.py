"""Code of a method that nothing uses, as after a slip in a name."""

import ast
import inspect
import sys
from collections.abc import Container, Iterator
from difflib import get_close_matches
from types import FunctionType

from medflare.methods.method import Method

_SIMILAR = 0.8  # of difflib, from which a name is taken for a slip


def unused(method: Method, performed: Container[str]) -> str:
    """A hyper-parameter that the method's own code does not read, or one of its functions that is
    called like one of medflare's and not called, in words; "" if there is none.

    `performed`: phases that a run has.
    """
    algorithms = (method.site_class, method.server_class)
    foreign = {cls for algorithm in algorithms for cls in algorithm.__mro__ if _is_foreign(cls)}
    used = {name for module in {cls.__module__ for cls in foreign} for name in _names_in(module)}
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
    for cls in sorted(foreign, key=lambda cls: cls.__name__):
        inherited = _names_of(cls)
        for name, value in vars(cls).items():
            is_called = name in used or name in inherited or name in performed
            if isinstance(value, FunctionType) and not is_called:
                for meant in get_close_matches(name, inherited, 1, _SIMILAR):
                    return f"nothing calls {cls.__name__}.{name}; is it to be {meant!r}?"
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


def _names_in(module: str) -> Iterator[str]:
    """The names that a module reads, also as attributes and texts."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
