"""The folder of decoded images: private, bounded, and nothing that is in use is ever removed."""

import errno
import os
import stat
import time
from pathlib import Path

import pytest

from medflare.data.cache.folder import ENVIRONMENT, CacheSettings, Room, discard, hold, new_entry, placed, private


def _entry(folder: Path, number: int, size: int = 1000, days: float = 0.0) -> Path:
    """An entry of so many bytes that was last used so many days ago."""
    entry = folder / f"{number:032x}"
    with new_entry(entry) as partial, private(partial / "content") as file:
        file.write(bytes(size))
    then = time.time() - 86400 * days
    os.utime(entry / "lock", (then, then))
    return entry


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert placed(None, tmp_path) is None and placed(CacheSettings()) is None
    assert placed(CacheSettings(limit_gb=3), tmp_path) == CacheSettings(str(tmp_path), 3)
    monkeypatch.setenv(ENVIRONMENT, "/everybodys")
    assert placed(CacheSettings(), tmp_path) == CacheSettings("/everybodys")
    assert placed(CacheSettings("~/own"), tmp_path) == CacheSettings(str(Path.home() / "own"))


def test_only_this_account_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        entry = _entry(tmp_path / "cache", 1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (entry.parent, entry)} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.iterdir()} == {0o600}


def test_an_entry_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    entry = tmp_path / f"{1:032x}"

    def killed() -> None:
        with new_entry(entry) as partial:
            (partial / "content").write_bytes(b"half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        killed()
    assert list(tmp_path.iterdir()) == [] and hold(entry) is None
    with new_entry(entry) as slow:
        (slow / "content").write_bytes(b"second")
        with new_entry(entry) as quick:
            (quick / "content").write_bytes(b"first")
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]
    assert (entry / "content").read_bytes() == b"first", "another process was faster, and may read it already"


def test_the_longest_unused_make_room(tmp_path: Path) -> None:
    old, older, new = _entry(tmp_path, 1, days=2), _entry(tmp_path, 2, days=3), _entry(tmp_path, 3)
    room = Room(CacheSettings(str(tmp_path), limit_gb=4000 / 10**9))
    room.take(500)
    assert old.exists() and older.exists() and new.exists()
    room.take(1000)
    assert old.exists() and not older.exists() and new.exists()
    with (held := hold(old)) or pytest.fail("it is there"):
        assert old.stat() and (old / "lock").stat().st_mtime > time.time() - 60, "used now"
        room.take(1500)
        assert old.exists() and not new.exists(), "what is in use stays"
        with pytest.raises(OSError, match=r"more than cache\.limit_gb = 4e-06, and no entry is out of use"):
            room.take(1001)
    assert held is not None and held.closed


def test_what_a_read_only_folder_holds_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = _entry(tmp_path, 1)

    def refused(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    with hold(entry) or pytest.fail("it is there"):
        assert (entry / "content").exists()


def test_what_is_damaged_goes_at_once(tmp_path: Path) -> None:
    entry = _entry(tmp_path, 1)
    with hold(entry) or pytest.fail("it is there"):
        discard(entry)
    assert not entry.exists() and list(tmp_path.iterdir()) == []
