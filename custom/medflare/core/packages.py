"""Installed packages: those that a site may do without, the versions of those that a result depends on, and how to be rid of them.

A job that carries medflare's code runs on what torch, MONAI and FLARE bring along.
"""

import atexit
import gc
import platform
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from medflare.core.errors import ConfigError, MedflareError

_RECORDED = ("medflare", "nvflare", "torch", "monai", "numpy")
# Names to install by, where they are not the names to import by.
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}
_LONGEST = 200  # characters of a module's name
# What a job, a task or a model's card may never name code of, whoever trusts it: what lies there is no network and no method of a lab's.
NEVER_TRUSTED = frozenset({"__main__", "medflare", "monai", "nvflare", "torch", *sys.stdlib_module_names})


def installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not imported."""
    return find_spec(module) is not None


def require(module: str, purpose: str, error: type[MedflareError] = ConfigError) -> None:
    """Go on only where a package is installed.

    Args:
        module: its top-level module.
        purpose: what needs it, the beginning of the message.

    Raises:
        error: it is not; the message names the package and the command that installs it.
    """
    if not installed(module):
        name = _DISTRIBUTIONS.get(module, module)
        raise error(f"{purpose} needs the package {name}, which is not installed here: pip install {name}")


def untrusted(module: str, packages: Iterable[str]) -> str:
    """Why code of a module is not imported because a job, a task or a card names it; "" where it may be.

    Examples:
        >>> untrusted("lab_nets.small", ["lab_nets"]), untrusted("os", ["os"])
        ('', 'code of os is never imported by a name')
    """
    package = module.split(".")[0]
    if len(module) > _LONGEST or not all(part.isidentifier() for part in module.split(".")):
        return "that is no module's name"
    if package in NEVER_TRUSTED:
        return f"code of {package} is never imported by a name"
    if any(module == name or module.startswith(f"{name}.") for name in packages):
        return ""
    return f'who trusts it adds "{package}" to packages in local/medflare.json'


def end_quickly() -> None:
    """When this process ends it does not search what it has imported for circles of references; torch and MONAI cost a second there."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def installed_versions() -> dict[str, str]:
    """Package -> version of Python and of what a result depends on; a package that is not installed is left out."""
    return {"python": platform.python_version()} | versions(_RECORDED)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {package: _version(package) for package in packages}
    return {package: number for package, number in found.items() if number is not None}


@cache  # reads the whole of a package's description
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # for example medflare itself where its code travels inside the job
        return None
