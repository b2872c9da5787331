"""What a method's modules and classes hold between two steps, beside an algorithm's memory."""

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from medflare.methods.method import Method
from medflare.testing.unused import foreign_classes

_HELD = (bool, int, float, str, list, dict, set, Tensor)


class OutsideMemory:
    """The global values and class attributes of a method of another distribution, as they are now.

    A copy that cannot be made is left out.
    """

    def __init__(self, method: Method):
        self._before = list(_copies(_owners(method)))

    def changed(self) -> str:
        """The first value that is not as it was; "" if all are."""
        for owner, name, _, _ in self._differing():
            return f"{owner.__name__}.{name}"
        return ""

    def restore(self) -> None:
        """Set all values back, containers in place."""
        for owner, name, value, before in self._differing():
            if isinstance(value, list):
                value[:] = copy.deepcopy(before)
            elif isinstance(value, dict | set):
                value.clear()
                value.update(copy.deepcopy(before))
            setattr(owner, name, value)

    def _differing(self) -> Iterator[tuple[Any, str, Any, Any]]:
        for owner, name, value, before in self._before:
            if not _equal(vars(owner).get(name), before):
                yield owner, name, value, before


def _owners(method: Method) -> list[Any]:
    """The classes of a method's algorithms, and their modules."""
    classes = foreign_classes(method)
    modules = {cls.__module__ for cls in classes}
    return [*classes, *filter(None, map(sys.modules.get, sorted(modules)))]


def _copies(owners: Iterable[Any]) -> Iterator[tuple[Any, str, Any, Any]]:
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, _HELD) and not name.startswith("__"):
                try:
                    yield owner, name, value, copy.deepcopy(value)
                except Exception:  # whatever a value of the author's raises
                    continue


def _equal(value: Any, before: Any) -> bool:
    try:
        return bool(value == before)
    except Exception:  # as of tensors in a list
        return repr(value) == repr(before)
