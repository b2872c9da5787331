"""Installed packages: optional ones, their versions, and code that a job may name."""

import atexit
import gc
import platform
import sys
from collections.abc import Container, Iterable, Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import (
    EntryPoint,
    PackageNotFoundError,
    distributions,
    packages_distributions,
    version,
)
from importlib.util import find_spec
from pathlib import Path

from medflare.core.errors import ConfigError, MedflareError

# Names for pip of some imported packages, which need no search.
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "medflare": "medflare"}
CODE = " code"  # after a package's name, of its hash in `code_versions`
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


def trust_refusal(module: str, packages: Iterable[str]) -> str | None:
    """Why code of a module that a job, a task or a card names is not imported; None if it may be.

    Examples:
        >>> trust_refusal("lab_nets.small", ["lab_nets"]), trust_refusal("os", ["os"])
        (None, 'code of os is never imported by name')
    """
    parts = module.split(".")
    package = parts[0]
    if len(module) > _LONGEST or not all(part.isidentifier() for part in parts):
        return "this is not the name of a module"
    if package in NEVER_TRUSTED:
        return f"code of {package} is never imported by name"
    for name in packages:
        if module == name or module.startswith(f"{name}."):
            return None
    return f'to trust it, add "{package}" to packages in local/medflare.json'


def end_quickly() -> None:
    """Skip garbage collection when this process ends, which takes a second with torch and MONAI."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def installed_versions() -> dict[str, str]:
    """Package -> version, of Python and the packages that a result depends on, if they are
    installed.
    """
    number = platform.python_version()
    return {"python": number, **versions(["medflare", "nvflare", "torch", "monai", "numpy"])}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version, of those that are installed."""
    return {package: _version(package) for package in packages if _version(package)}


@cache  # reads a file
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # for example medflare itself, if its code comes with the job
        return ""


def extension_modules(names: Container[str]) -> set[str]:
    """The modules of all entry points with these names, in any group of medflare."""
    return {entry_module(point) for _, point in _extensions() if point.name in names}


def entry_module(point: EntryPoint) -> str:
    """The module that an entry point names, which may be malformed."""
    return point.value.partition(":")[0].strip()


def _extensions() -> Iterator[tuple[str, EntryPoint]]:
    """The entry points in groups of medflare, each with the name of its distribution."""
    for distribution in distributions():
        for point in distribution.entry_points:
            if point.group.startswith("medflare."):
                yield distribution.name, point


def code_versions(modules: Iterable[str]) -> dict[str, str]:
    """Package -> version, and "PACKAGE code" -> hash of its .py files (16 hex digits), of the
    distributions that hold the modules; a package without a distribution has a hash alone.
    """
    record: dict[str, str] = {}
    for package in sorted({module.partition(".")[0] for module in modules}):
        name = _distribution(package)
        record |= versions([name])
        code = _code_hash(package)
        if code:
            record[name + CODE] = code
    return record


@cache  # reads the files of all distributions
def _distribution(package: str) -> str:
    if package in _DISTRIBUTIONS:
        return _DISTRIBUTIONS[package]
    names = set(packages_distributions().get(package, ()))
    for name, point in _extensions():  # an editable installation may list no package
        if entry_module(point).partition(".")[0] == package:
            names.add(name)
    return min(names, default=package)


@cache  # reads all files of the package; its code in this process does not change later
def _code_hash(package: str) -> str:
    spec = find_spec(package)
    files = {}
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            for file in Path(folder).rglob("*.py"):
                files[file.relative_to(folder).as_posix()] = file
        if not files and spec.has_location:
            files[package] = Path(str(spec.origin))
    digest = sha256()
    for name, file in sorted(files.items()):
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16] if files else ""
