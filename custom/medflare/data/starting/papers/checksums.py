"""Files of a download held against their published checksums, in the format of `md5sum`, `sha1sum`, `sha256sum` and `sha512sum`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from medflare.core.errors import ConfigError, DataError
from medflare.core.store import file_digest
from medflare.data.progress import counted

_ALGORITHMS: Final = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}  # hexadecimal digits -> how they were computed
_LINE: Final = re.compile(r"([0-9a-fA-F]+) [ *](.+)")


@dataclass(frozen=True)
class Compared:
    """Files that are what was published.

    Attributes:
        listed: how many files the list names.
        equal: how many of them are there, each with its checksum.
        missing: those that are not there, by name.
    """

    listed: int
    equal: int
    missing: tuple[str, ...]

    def render(self) -> str:
        """One line, with a warning where files are missing."""
        line = f"checksums: {self.equal} of {self.listed} files are as published"
        return line + (f"; WARNING: {len(self.missing)} not there, the first: {self.missing[0]}" if self.missing else "")


def compare_checksums(listing: Path, folder: Path, *, strict: bool = False) -> Compared:
    """Hold the files of a folder against a list of checksums; nothing is changed.

    A listed file that is not at its place in the folder is looked for below: Zenodo lists names alone, wherever the files were moved to.
    Where several end in the name, each must have the checksum.

    Args:
        listing: a line a file, its checksum in hexadecimal digits, two blanks (or a blank and *), its name; the number of digits tells
            MD5, SHA-1, SHA-256 and SHA-512 apart.
        folder: of the downloads.
        strict: listed files that are not there are an error.

    Raises:
        ConfigError: the list cannot be read, or none of its files is there.
        DataError: files differ from what was published, or some are not there (strict).
    """
    wanted = _listed(listing)
    files = _found(folder, wanted)
    missing = tuple(name for name, found in files.items() if not found)
    if len(missing) == len(wanted):
        raise ConfigError(f"{listing}: none of its {len(wanted)} files is in {folder}, the first: {missing[0]}; give the list of these")
    if missing and strict:
        raise DataError(f"{folder}: {len(missing)} of {len(wanted)} files of {listing.name} are not there, the first: {missing[0]}")
    there = [(path, wanted[name]) for name, found in files.items() for path in found]
    read = counted(there, len(there), f"{folder}, files compared")
    differing = [path for path, checksum in read if file_digest(path, _ALGORITHMS[len(checksum)]) != checksum]
    if differing:
        others = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise DataError(f"{differing[0]}: not the file whose checksum is in {listing.name}{others}; download again what differs")
    return Compared(len(wanted), len(wanted) - len(missing), missing)


def _listed(listing: Path) -> Mapping[str, str]:
    """Name -> checksum, in the order of the list.

    Raises:
        ConfigError: a line that is none, or two checksums of one file.
    """
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{listing}: no list of checksums can be read there ({error})") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = _LINE.fullmatch(line.rstrip())
        if parts is None or len(parts[1]) not in _ALGORITHMS:
            raise ConfigError(f"{listing} line {number}: {line.strip()[:80]!r} is no checksum with a name; take one that md5sum wrote")
        name, digest = parts[2].removeprefix("./"), parts[1].lower()
        if found.setdefault(name, digest) != digest:
            raise ConfigError(f"{listing} line {number}: {name} has another checksum above; leave one of them")
    if not found:
        raise ConfigError(f"{listing}: it lists no file")
    return found


def _found(folder: Path, names: Iterable[str]) -> dict[str, list[Path]]:
    """Name -> the file at that place in a folder, else all files below it whose paths end in the name."""
    last: dict[str, list[Path]] = {PurePosixPath(name).name: [] for name in names}
    for path in sorted(folder.rglob("*")):
        if path.name in last and path.is_file():
            last[path.name].append(path)
    found = {}
    for name in names:
        parts = PurePosixPath(name).parts
        ending = [path for path in last[parts[-1]] if path.relative_to(folder).parts[-len(parts) :] == parts]
        found[name] = [folder / name] if folder / name in ending else ending
    return found
