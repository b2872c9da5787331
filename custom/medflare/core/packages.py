"""Installed packages: optional ones, their versions, and code that a job may name."""

import atexit
import gc
import platform
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from medflare.core.errors import ConfigError, MedflareError

# Names for pip that differ from the import names.
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}
_LONGEST = 200  # characters of a module's name
# Packages from which a job, a task or a model's card may not name code, even if a site trusts it.
NEVER_TRUSTED = frozenset(
    {"__main__", "medflare", "monai", "nvflare", "torch", *sys.stdlib_module_names}
)


def installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not imported."""
    return find_spec(module) is not None


def require(module: str, purpose: str, error: type[MedflareError] = ConfigError) -> None:
    """Raise `error`, with the command that installs it, if an optional package is missing.

    `purpose` says what needs it, the beginning of the message.
    """
    if not installed(module):
        name = _DISTRIBUTIONS.get(module, module)
        raise error(
            f"{purpose} needs the package {name}, which is not installed here: pip install {name}"
        )


def untrusted(module: str, packages: Iterable[str]) -> str:
    """Why code of a module that a job, a task or a card names is not imported; "" if it may be.

    Examples:
        >>> untrusted("lab_nets.small", ["lab_nets"]), untrusted("os", ["os"])
        ('', 'code of os is never imported by name')
    """
    parts = module.split(".")
    package = parts[0]
    if len(module) > _LONGEST or not all(part.isidentifier() for part in parts):
        return "this is not the name of a module"
    if package in NEVER_TRUSTED:
        return f"code of {package} is never imported by name"
    for name in packages:
        if module == name or module.startswith(f"{name}."):
            return ""
    return f'to trust it, add "{package}" to packages in local/medflare.json'


def end_quickly() -> None:
    """Skip garbage collection when this process ends, which takes a second with torch and MONAI."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def installed_versions() -> dict[str, str]:
    """Package -> version, of Python and the packages that a result depends on, if they are
    installed.
    """
    packages = ["medflare", "nvflare", "torch", "monai", "numpy"]
    return {"python": platform.python_version(), **versions(packages)}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version, of those that are installed."""
    version_of: dict[str, str] = {}
    for package in packages:
        number = _version(package)
        if number:
            version_of[package] = number
    return version_of


@cache  # reads a file
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # for example medflare itself, if its code comes with the job
        return ""
