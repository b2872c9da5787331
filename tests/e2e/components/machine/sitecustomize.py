"""Python loads this module at its start where its folder is on PYTHONPATH: then it takes its machine for another one.

MISSING_PACKAGES: names, separated by commas, of packages that look as if nobody had installed them.
MISSING_FOLDER: the folder of an editable installation, which is not found there; a job's copy of that package is.
CLOCK_SKEW: seconds by which the wall clock is wrong. Then pandas is missing: its C code cannot be imported with such a clock.
TORCH_IMPORTS: a file to which each process that imports torch adds a line.
"""

import datetime
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_SKEW = float(os.environ.get("CLOCK_SKEW", "0"))
_MISSING = {*os.environ.get("MISSING_PACKAGES", "").split(","), *(["pandas"] if _SKEW else [])}
_FOLDER = os.environ.get("MISSING_FOLDER")
_IMPORTS = os.environ.get("TORCH_IMPORTS")
_EDITABLE = "__editable__"  # how modules begin that an editable installation may bring for finding its package

_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime


class _Hiding(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _MISSING:
            return None
        if fullname == "torch._C" and _IMPORTS is not None:
            with open(_IMPORTS, "a", encoding="utf-8") as file:
                file.write(f"{sys.argv}\n")
        if path is None and _FOLDER is not None:  # it is on sys.path; the job's copy comes after it
            path = [
                entry for entry in sys.path if os.path.realpath(entry) != os.path.realpath(_FOLDER)
            ]
        return PathFinder.find_spec(fullname, path, target)


def _hide() -> None:
    kept = [
        finder
        for finder in sys.meta_path
        if _FOLDER is None or not getattr(finder, "__module__", "").startswith(_EDITABLE)
    ]
    sys.meta_path[:] = [_Hiding if finder is PathFinder else finder for finder in kept]


class _Kind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _datetime)


class _Skewed(_datetime, metaclass=_Kind):  # type: ignore[misc, valid-type]
    __slots__ = ()

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> datetime.datetime:
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)

    today = now


def _skew(ahead: float) -> None:
    """Everything that Python code sees as the time of day; not monotonic clocks, nor what OpenSSL compares certificates with."""
    time.time = lambda: _time() + ahead
    time.time_ns = lambda: _time_ns() + int(ahead * 1e9)
    datetime.datetime = _Skewed  # type: ignore[misc]


_hide()
if _SKEW:
    _skew(_SKEW)
