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
        found = PathFinder.find_spec(fullname, path, target)
        hidden = found is not None and found.origin is not None and os.path.realpath(found.origin).startswith(_FOLDER + os.sep)
        return None if hidden else found


_EDITABLE = "__editable__"  # how modules begin that an editable installation may bring for finding its package
_FINDERS = [finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith(_EDITABLE)]
sys.meta_path[:] = [_Hiding if finder is PathFinder else finder for finder in _FINDERS]
