"""Folders that are written beside their place and take it in one step: nobody finds half of one, and a full disk costs nothing."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(place: Path) -> Iterator[Path]:
    """An empty folder beside a place, on the same disk, which is gone at the end of the block.

    Args:
        place: folders above it that do not exist are made.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        yield Path(scratch)


def put_in_place(new: Path, place: Path) -> None:
    """Rename a folder; an earlier one in its place goes once the new one is there, and stays where that fails.

    Args:
        new: a folder on the disk of `place`.
        place: where it belongs.
    """
    old = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    earlier = place.exists()
    if earlier:
        os.rename(place, old)
    try:
        os.rename(new, place)
    except BaseException:
        if earlier:
            os.rename(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)
