"""A site whose images stay on disk: the same batches, numbers and models as one that holds them in memory, to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.small_tasks import predicted, small_task, tiny_phantom
from helpers.volume_sites import PATCHES, cube_task, make_volumes
from medflare.core.errors import Aborted, DataError
from medflare.core.rng import numpy_random_state
from medflare.data.loading import joined, load_site_data
from medflare.data.local import CacheSettings
from medflare.federation.local.loop import run_local
from medflare.inference.deployed import load_model
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site
from medflare.training.site import Site

TaskOf = Callable[..., TaskConfig]
SiteOf = Callable[..., Path]
AUGMENTED: dict[str, Any] = {"augment": [{"name": "RandFlip", "prob": 0.5}, {"name": "RandGaussianNoise", "prob": 0.5}]}
TASKS = {
    "masks": small_task(sampling="balanced", **AUGMENTED),
    "labels": small_task("classification", sampling="balanced", **AUGMENTED),
    "volumes": cube_task(**AUGMENTED),
    "patches": load_task({**PATCHES, **AUGMENTED}),
}


def _both(task: TaskConfig, folder: Path, kept: Path) -> tuple[Site, Site]:
    """The site in memory, and on disk."""
    settings: list[Any] = [False, {"folder": str(kept), "memory_gb": 0}]
    inside, outside = (open_site("A", task, data_root=folder, local={"cache": cache}, seed=3) for cache in settings)
    assert inside.data.train.in_memory and not outside.data.train.in_memory
    return inside, outside


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return len(first) == len(second) and all(_equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", TASKS)
def test_the_same_images_in_the_same_order(kind: str, make_site: SiteOf, tmp_path: Path) -> None:
    task = TASKS[kind]
    folder = make_volumes(tmp_path / "A") if task.spatial_dims == 3 else make_site(kind=task.kind)
    inside, outside = _both(task, folder, tmp_path / "cache")
    for keys in ((0, "model", 0), (1, "model", 0)):
        assert _equal(list(inside.batches("train", *keys)), list(outside.batches("train", *keys)))
    for split in ("train", "test"):
        assert _equal(list(inside.ordered(split)), list(outside.ordered(split)))
    rows = torch.tensor([2, 0, 2])
    for chosen in (rows, rows[:0]):
        drawn = [site.take("train", chosen, numpy_random_state(0, "rows")) for site in (inside, outside)]
        assert _equal(*drawn)
    assert torch.equal(inside.class_counts(), outside.class_counts())
    assert _equal(list(inside.data.test.targets), list(outside.data.test.targets))
    model = inside.predictor(inside.network())
    assert inside.score(model, "test") == outside.score(model, "test")
    assert _equal(predicted(inside, model, "test"), predicted(outside, model, "test"))


def test_two_sites_on_disk_as_one(make_site: SiteOf, tmp_path: Path) -> None:
    task = TASKS["masks"]
    inside, outside = _both(task, make_site(), tmp_path / "cache")
    memory, disk = (joined([site.data.train, site.data.test], ["0", "1"]) for site in (inside, outside))
    assert memory.in_memory and not disk.in_memory
    assert memory.names == disk.names and memory.patients == disk.patients and len(disk) == 8
    rows = torch.tensor([7, 0, 5, 4])
    assert _equal(memory.take(rows), disk.take(rows)) and _equal(memory.image(6), disk.image(6))
    assert _equal(list(memory.targets), list(disk.targets))


@pytest.mark.parametrize("method", ["fedavg", "fedsm"])
def test_a_run_ends_in_the_same_models(method: str, tmp_path: Path) -> None:
    task = load_task(tiny_phantom(network={"name": "unet", "channels": [2, 4], "norm": "instance"}))

    def run(name: str, cache: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        def opened(site: str, role: str) -> Site:
            return open_site(site, task, seed=0, role=role, local={"cache": cache})

        results = run_local(method, task, 2, rounds=2, seed=0, opener=opened, out=tmp_path / name)
        models = {
            str(card.parent.relative_to(tmp_path / name)): load_model(card.parent).message for card in tmp_path.glob(f"{name}/**/card.json")
        }
        return results, models

    (memory, kept), (disk, read) = run("memory", False), run("disk", {"folder": str(tmp_path / "cache"), "memory_gb": 0})
    assert list((tmp_path / "cache").glob("*.safetensors"))
    assert memory["status"] == "COMPLETED" and memory["sites"] == disk["sites"] and kept.keys() == read.keys() != set()
    for name, message in kept.items():
        for entry, state in message.states.items():
            assert all(torch.equal(tensor, read[name].states[entry][key]) for key, tensor in state.items())


def test_small_sites_come_into_memory(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    folder, bytes_of_an_image = make_site(), 16 * 16 * (4 + 8)
    for images, resident in ((10.1, True), (9.9, False)):
        cache = CacheSettings(str(tmp_path / "cache"), memory_gb=images * bytes_of_an_image / 10**9)
        assert load_site_data("A", make_task(), folder, cache=cache).train.in_memory == resident


def test_a_job_asked_to_stop_stops_reading(make_site: SiteOf, tmp_path: Path) -> None:
    _, site = _both(TASKS["masks"], make_site(), tmp_path / "cache")
    batches = site.batches("train", 0, batch_size=2)
    next(batches)
    site.abort = lambda: True
    with pytest.raises(Aborted):
        next(batches)


def test_what_fits_nowhere_is_said_before_training(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    cache = CacheSettings(str(tmp_path / "cache"), limit_gb=1e-8, memory_gb=1e-8)
    with pytest.raises(DataError, match="memory_gb"):
        load_site_data("A", make_task(), make_site(), cache=cache)
    assert not (tmp_path / "cache").exists()
    small = CacheSettings(str(tmp_path / "cache"), limit_gb=1e-8)
    assert load_site_data("A", make_task(), make_site(name="B"), cache=small).train.in_memory, "the cache costs time only"


def test_a_folder_that_takes_nothing_lifts_no_limit(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    """No image was decoded when the folder could not be made, so that nobody knew yet how large they are."""
    (tmp_path / "file").touch()
    cache = CacheSettings(str(tmp_path / "file"), memory_gb=1e-8)
    with pytest.raises(DataError, match="memory_gb"):
        load_site_data("A", make_task(), make_site(), cache=cache)


def test_unreadable_images_are_remembered(make_site: SiteOf, make_task: TaskOf, tmp_path: Path) -> None:
    folder, task = make_site(), make_task(unreadable="skip", unreadable_limit={"share": 0.5, "count": 5})
    (folder / "images/1.png").write_bytes(b"no")
    cache = CacheSettings(str(tmp_path / "cache"), memory_gb=0)
    first = load_site_data("A", task, folder, cache=cache)
    again = load_site_data("A", task, folder, cache=CacheSettings(str(tmp_path / "cache")))
    assert len(first.train) == len(again.train) == 4 and first.left_out == again.left_out and "1.png" in first.left_out[0]
