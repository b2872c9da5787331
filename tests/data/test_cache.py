"""Images are decoded once: per process, and with a folder once per site, in a file per image."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.fixture_types import Edit, SiteOf, TaskOf
from medflare.core.errors import DataError
from medflare.data import decoding
from medflare.data.datalist import LISTS
from medflare.data.loading import SiteData, load_site_data
from medflare.data.local import Bounds, CacheSettings, ImageBounds, cache_with_folder
from medflare.tasks.config import TaskConfig


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the images that are decoded from now on."""
    names: list[str] = []
    target_of = decoding.target_of

    def recorded(task: Any, source: Any, entry: Any, image: Any) -> Any:
        names.append(entry.name)
        return target_of(task, source, entry, image)

    monkeypatch.setattr(decoding, "target_of", recorded)
    return names


@pytest.fixture
def kept(tmp_path: Path) -> CacheSettings:
    return CacheSettings(str(tmp_path / "cache"))


def _files(settings: CacheSettings) -> list[Path]:
    return sorted(Path(settings.folder).glob("*.safetensors"))


def loaded(
    task: TaskConfig, folder: Path, settings: CacheSettings | None = None, **options: Any
) -> SiteData:
    """As a new process loads it."""
    decoding._decoded_sites.clear()
    return load_site_data("A", task, folder, cache=settings, **options)


def equal(first: SiteData, second: SiteData) -> bool:
    for name in ("train", "validation", "test"):
        one = first.split(name)
        other = second.split(name)
        assert (
            one.names == other.names
            and one.patients == other.patients
            and one.targets.dtype == other.targets.dtype
        )
        assert torch.equal(one.images, other.images) and torch.equal(one.targets, other.targets)
    return True


def test_once_per_process(
    make_site: SiteOf, make_task: TaskOf, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_site()
    load_site_data("A", make_task(), folder, bounds=Bounds())
    decoded.clear()
    # Nothing that concerns an image.
    load_site_data(
        "A", make_task(batch_size=2, resplit=4), folder, bounds=Bounds(epochs=9, memory=4)
    )
    assert decoded == []
    monkeypatch.setattr(decoding, "_CACHED_SITES", 2)
    for side in (8, 12, 16, 20):
        load_site_data("A", make_task(size=[side, side]), folder)
    assert len(decoded) == 4 * 10 and len(decoding._decoded_sites) == 2


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_the_next_process_reads_what_was_decoded(
    kind: str, make_site: SiteOf, make_task: TaskOf, kept: CacheSettings, decoded: list[str]
) -> None:
    folder = make_site(kind=kind)
    task = make_task(kind)
    first = loaded(task, folder, kept)
    decoded.clear()
    assert (
        equal(first, loaded(task, folder, kept))
        and equal(first, loaded(task, folder))
        and len(decoded) == 10
    )
    assert len(_files(kept)) == 10 and {"image", "target"} == load_file(_files(kept)[0]).keys()
    assert stat.S_IMODE(Path(kept.folder).stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in _files(kept)} == {0o600}


def test_only_changed_and_damaged_files_are_decoded_again(
    make_site: SiteOf,
    make_task: TaskOf,
    kept: CacheSettings,
    decoded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_site()
    task = make_task()
    before = loaded(task, folder, kept)
    files = set(_files(kept))
    (folder / "images/0.png").write_bytes((folder / "images/1.png").read_bytes())
    os.utime(folder / "images/0.png", ns=(1, 1))
    decoded.clear()
    after = loaded(task, folder, kept)
    assert decoded == ["0.png"] and torch.equal(after.train.images[0], before.train.images[1])
    (new,) = set(_files(kept)) - files
    new.write_bytes(new.read_bytes()[:-20])
    decoded.clear()
    assert equal(loaded(task, folder, kept), after) and decoded == ["0.png"]
    monkeypatch.setattr(decoding, "versions", lambda packages: dict.fromkeys(packages, "another"))
    decoded.clear()
    loaded(task, folder, kept)
    with pytest.raises(DataError, match=r"bounds\.pixels"):
        loaded(task, folder, kept, bounds=ImageBounds(pixels=100))
    assert len(decoded) == 10


def test_unreadable_images_are_tried_again(
    make_site: SiteOf, make_task: TaskOf, kept: CacheSettings
) -> None:
    """A file that was out of reach for a while keeps its size and time of change."""
    folder = make_site()
    task = make_task(unreadable="skip", unreadable_limit={"share": 0.5, "count": 5})
    file = folder / "images/0.png"
    whole = file.read_bytes()
    known = file.stat()
    for content, images in ((whole[:20].ljust(len(whole), b"x"), 4), (whole, 5)):
        file.write_bytes(content)
        os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
        for _ in range(2):
            data = loaded(task, folder, kept)
            assert len(data.train) == images and len(data.left_out) == 5 - images


def test_the_least_recently_used_files_are_deleted(
    make_site: SiteOf, make_task: TaskOf, kept: CacheSettings
) -> None:
    folder = make_site()
    task = make_task()
    loaded(task, folder, kept)
    size = sum(path.stat().st_size for path in _files(kept))
    oldest, *others = _files(kept)
    os.utime(oldest, (1, 1))
    for path in others:
        os.utime(path, (2, 2))
    other = make_site({"training": ["a"], "validation": ["b"], "test": ["c"]}, name="B")
    tight = CacheSettings(kept.folder, limit_gb=(size + 2.5 * size / 10) / 10**9)
    loaded(task, other, tight)
    assert not oldest.exists()
    for path in others:
        assert path.exists()
    assert len(_files(kept)) == 12
    loaded(task, folder, CacheSettings(kept.folder, limit_gb=1e-8))
    assert len(_files(kept)) == 9, "its own files stay"


def test_a_file_deleted_during_training_is_decoded_again(
    make_site: SiteOf, make_task: TaskOf, kept: CacheSettings
) -> None:
    folder = make_site()
    task = make_task()
    whole = loaded(task, folder)
    disk = loaded(task, folder, CacheSettings(kept.folder, memory_gb=0))
    for path in _files(kept):
        path.unlink()
    images, targets = disk.train.take(torch.tensor([3, 0]))
    assert torch.equal(images, whole.train.images[[3, 0]]) and torch.equal(
        targets, whole.train.targets[[3, 0]]
    )
    assert len(_files(kept)) == 2


def test_an_unwritable_cache_is_a_warning(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = make_site()
    assert len(loaded(make_task(), folder, CacheSettings(str(tmp_path / "file"))).train) == 5
    assert "cannot be written" in caplog.text
    for place, limit in (("file", 100.0), ("new", 1e-8)):
        with pytest.raises(DataError, match="memory_gb"):
            loaded(
                make_task(),
                folder,
                CacheSettings(str(tmp_path / place), limit_gb=limit, memory_gb=1e-8),
            )


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEDFLARE_CACHE", raising=False)
    assert cache_with_folder(None, tmp_path) is None and cache_with_folder(CacheSettings()) is None
    assert cache_with_folder(CacheSettings(limit_gb=3), tmp_path) == CacheSettings(str(tmp_path), 3)
    monkeypatch.setenv("MEDFLARE_CACHE", "/everybodys")
    assert cache_with_folder(CacheSettings(), tmp_path) == CacheSettings("/everybodys")
    assert cache_with_folder(CacheSettings("~/own"), tmp_path) == CacheSettings(
        str(Path.home() / "own")
    )


def test_a_case_whose_other_channel_is_missing_is_decoded_again(
    make_site: SiteOf, make_task: TaskOf, edit: Edit, kept: CacheSettings
) -> None:
    folder = make_site()
    task = make_task(channels=["pre", "post"], missing_channels="zeros")

    def move_channel(content: dict[str, Any]) -> None:
        for split in LISTS:
            for item in content[split]:
                image = item["image"]
                item["image"] = image[::-1] if isinstance(image, list) else [image, None]

    for present in (0, 1):
        edit(folder, move_channel)
        data = loaded(task, folder, kept)
        assert data.train.images[:, present].any() and not data.train.images[:, 1 - present].any()


def test_a_file_that_vanishes_while_room_is_made_is_no_error(
    make_site: SiteOf,
    make_task: TaskOf,
    kept: CacheSettings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A link to nothing is listed and has no size, as a file that another job deletes."""
    Path(kept.folder).mkdir()
    gone = Path(kept.folder) / f"{'0' * 32}.safetensors"
    gone.symlink_to(tmp_path / "nothing")
    loaded(make_task(), make_site(), kept)
    assert not caplog.messages and len(_files(kept)) == 1 + 10
