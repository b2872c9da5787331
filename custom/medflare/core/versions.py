"""Versions of what a result depends on, for result files and model cards."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("medflare", "nvflare", "torch", "monai", "numpy")


def installed_versions() -> dict[str, str]:
    """Package -> version of Python and of the installed packages; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # for example medflare itself where its code travels inside the job
            continue
    return found
