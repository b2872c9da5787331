"""Python loads this module at its start where its folder is on PYTHONPATH: then some packages look as if nobody had installed them.

MISSING_PACKAGES holds their names, separated by commas, and MISSING_FOLDER the folder of a package that is hidden only there.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MISSING = frozenset(os.environ["MISSING_PACKAGES"].split(","))
_FOLDER = os.path.realpath(os.environ["MISSING_FOLDER"])


class _Hiding(PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname in _MISSING:
            return None
        if path is None:  # an editable installation puts the folder on sys.path; the job's copy comes after it
            path = [entry for entry in sys.path if os.path.realpath(entry) != _FOLDER]
        return PathFinder.find_spec(fullname, path, target)


_EDITABLE = "__editable__"  # how modules begin that an editable installation may bring for finding its package
_FINDERS = [finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith(_EDITABLE)]
sys.meta_path[:] = [_Hiding if finder is PathFinder else finder for finder in _FINDERS]
