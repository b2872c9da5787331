"""Versions of what a result depends on, for result files and model cards."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("medflare", "nvflare", "torch", "monai", "numpy")


def installed_versions() -> dict[str, str]:
    """Package -> version of Python and of the installed packages; a package that is not installed is left out."""
    found = {package: _installed(package) for package in _PACKAGES}
    return {"python": platform.python_version()} | {package: number for package, number in found.items() if number is not None}


@cache  # reads the whole of a package's description
def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # for example medflare itself where its code travels inside the job
        return None
