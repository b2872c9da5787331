"""Errors of a method's code: the step, and the place in that code."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medflare.core.errors import MedflareError, StepFailed, one_line

_NOBODYS = {"abc", "builtins", "medflare", "typing"}  # packages that no author of a method wrote


@contextmanager
def named_errors(where: str, *algorithms: type) -> Iterator[None]:
    """Raise StepFailed, with `where` and the place, for a bug in the block.

    OSErrors, as of a full disk, stay as they are.
    """
    try:
        yield
    except (MedflareError, OSError):
        raise
    except (Exception, SystemExit) as error:  # code that calls sys.exit is a bug, too
        raise StepFailed(f"{where}: {described(error, *algorithms)}") from error


def described(error: BaseException, *algorithms: type) -> str:
    """An error in one line, with the place in the algorithms' code that led to it."""
    return f"{type(error).__name__}: {one_line(error)} ({_place(error, *algorithms)})"


def _place(error: BaseException, *algorithms: type) -> str:
    """The innermost line of the code of the algorithms' authors, else of medflare, else of all."""
    modules = {algorithm.__module__ for algorithm in algorithms}
    packages = set[str]()
    for algorithm in algorithms:
        packages |= {cls.__module__.partition(".")[0] for cls in algorithm.__mro__}
    packages -= _NOBODYS
    places: dict[int, str] = {}  # 2: an author's, 1: medflare's, 0: another library's
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        is_own = package in packages if packages else module in modules
        file = Path(frame.f_code.co_filename)
        name = f"{file.parent.name}/{file.name}" if file.stem == "__init__" else file.name
        rank = 2 * is_own or int(package == "medflare")
        places[rank] = f"{name}, line {line}, in {frame.f_code.co_name}"
    return places[max(places)]
