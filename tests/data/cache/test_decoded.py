"""Images are decoded once: per process, and with a folder per site."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from medflare.core.errors import DataError
from medflare.data.cache import decoded, shards
from medflare.data.cache.decoded import decoded_once
from medflare.data.cache.folder import CacheSettings, Room
from medflare.data.loading import load_site_data
from medflare.data.reading import ImageBounds
from medflare.data.sites.local import Bounds
from medflare.data.sources import FileSource
from medflare.tasks.config import TaskConfig
from small import stacked

TaskOf = Callable[..., TaskConfig]
SiteOf = Callable[..., Path]


def test_decoded_once(make_site: SiteOf, make_task: TaskOf) -> None:
    task = make_task()
    source = FileSource(make_site(), task)
    entries = source.entries()
    first = decoded_once("A", task, source, entries, None)
    assert decoded_once("A", task, source, entries, None) is first
    assert decoded_once("A", task, source, entries[:3], None).names == first.names[:3]


def test_once_per_process(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    load_site_data("A", make_task(), folder)
    with patch.object(decoded, "decode", side_effect=AssertionError("decoded twice")):
        load_site_data("A", make_task(batch_size=2, resplit=4), folder)  # neither setting concerns a single image
    with pytest.raises(AssertionError), patch.object(decoded, "decode", side_effect=AssertionError):
        load_site_data("A", make_task(size=[8, 8]), folder)


def test_memory_is_bounded(make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "_KEPT_SITES", 2)
    folder = make_site()
    for side in (8, 12, 16, 20):
        load_site_data("A", make_task(size=[side, side]), folder)
    assert len(decoded._memory) == 2


def test_cache_folder_serves_the_next_process(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    folder, kept = make_site(), CacheSettings(str(tmp_path / "cache"))
    first = load_site_data("A", make_task(), folder, cache=kept)
    decoded._memory.clear()  # what a new process starts with
    with patch.object(decoded, "decoded_rows", side_effect=AssertionError("decoded twice")):
        again = load_site_data("A", make_task(), folder, cache=kept)
    for name in ("train", "validation", "test"):
        torch.testing.assert_close(stacked(again.split(name)).images, stacked(first.split(name)).images, rtol=0, atol=0)
        assert again.split(name).names == first.split(name).names and again.split(name).patients == first.split(name).patients
        assert again.split(name).targets.dtype == first.split(name).targets.dtype


def test_cache_notices_changes_and_damage(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    folder, kept = make_site(), CacheSettings(str(tmp_path / "cache"))
    before = load_site_data("A", make_task(), folder, cache=kept)
    (folder / "images/0.png").write_bytes((folder / "images/1.png").read_bytes())
    os.utime(folder / "images/0.png", ns=(1, 1))
    decoded._memory.clear()
    after = load_site_data("A", make_task(), folder, cache=kept)
    assert not torch.equal(stacked(after.train).images[0], stacked(before.train).images[0])
    torch.testing.assert_close(stacked(after.train).images[0], stacked(before.train).images[1])
    file = max(Path(kept.folder).glob("*/00000.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(file.read_bytes())
    content[-20] ^= 255
    file.write_bytes(content)
    decoded._memory.clear()
    healed = load_site_data("A", make_task(), folder, cache=kept)
    torch.testing.assert_close(healed.test.targets, after.test.targets)
    assert file.read_bytes() != bytes(content)


def test_what_could_not_be_used_is_tried_again(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    """A file that was out of reach for a while keeps its size and time of change."""
    folder, kept = make_site(), CacheSettings(str(tmp_path / "cache"))
    task = make_task(unreadable="skip", unreadable_limit={"share": 0.5, "count": 5})
    names = load_site_data("A", task, folder).train.names
    whole = (folder / "images/0.png").read_bytes()
    known = (folder / "images/0.png").stat()
    (folder / "images/0.png").write_bytes(whole[:20].ljust(len(whole), b"x"))
    os.utime(folder / "images/0.png", ns=(known.st_atime_ns, known.st_mtime_ns))
    for _ in range(2):  # the second time from the cache
        decoded._memory.clear()
        assert load_site_data("A", task, folder, cache=kept).train.names == names[1:]
    (folder / "images/0.png").write_bytes(whole)
    os.utime(folder / "images/0.png", ns=(known.st_atime_ns, known.st_mtime_ns))
    for _ in range(2):
        decoded._memory.clear()
        assert load_site_data("A", task, folder, cache=kept).train.names == names
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1


def test_other_bounds_and_other_decoders_are_other_entries(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept, task = make_site(), CacheSettings(str(tmp_path / "cache")), make_task(unreadable="skip")
    count = len(load_site_data("A", task, folder, cache=kept).train)
    with pytest.raises(DataError, match=r"bounds\.pixels"):
        load_site_data("A", make_task(), folder, cache=kept, bounds=ImageBounds(pixels=100))
    assert len(load_site_data("A", task, folder, cache=kept).train) == count
    monkeypatch.setattr(decoded, "versions", lambda packages: dict.fromkeys(packages, "another"))
    with pytest.raises(AssertionError), patch.object(decoded, "decoded_rows", side_effect=AssertionError("decoded")):
        load_site_data("A", task, folder, cache=kept)


def test_bounds_that_concern_no_image_do_not_count(make_site: SiteOf, make_task: TaskOf) -> None:
    folder, task = make_site(), make_task()
    load_site_data("A", task, folder, bounds=Bounds())
    with patch.object(decoded, "decode", side_effect=AssertionError("decoded twice")):
        load_site_data("A", task, folder, bounds=Bounds(epochs=9, hours=5, minutes=60, memory=4, model_bytes=10**9))
        load_site_data("A", task, folder, bounds=ImageBounds())
    for bounds in (Bounds(pixels=10**6), Bounds(voxels=10**6)):
        with pytest.raises(AssertionError), patch.object(decoded, "decode", side_effect=AssertionError):
            load_site_data("A", task, folder, bounds=bounds)


def test_a_cache_that_cannot_be_written_costs_time_only(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(load_site_data("A", make_task(), make_site(), cache=CacheSettings(str(tmp_path / "cache"))).train) == 5
    assert "cannot be written" in caplog.text


def test_writing_keeps_no_tensor_of_an_image(make_site: SiteOf, make_task: TaskOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small tensor an image, between the large ones, would keep the memory of those from being used again."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 2**14)  # five images with their masks
    alive: list[int] = []

    def taken(room: Room, needed: int) -> None:
        alive.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))

    monkeypatch.setattr(Room, "take", taken)
    folder = make_site({"training": [f"p{number}" for number in range(40)]})
    gc.collect()
    load_site_data("A", make_task(), folder, cache=CacheSettings(str(tmp_path / "cache"), memory_gb=0))
    assert len(alive) >= 8 and max(alive) - min(alive) < 8, alive
