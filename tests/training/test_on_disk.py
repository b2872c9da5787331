"""A site whose images stay on disk has bit-identical batches, scores and models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.fixture_types import SiteOf, TaskOf
from helpers.forked_trial import fork_trials
from helpers.small_tasks import predicted, small_task, tiny_phantom
from helpers.volume_sites import PATCHES, cube_task, make_volumes
from medflare.core.rng import numpy_random_state
from medflare.data.loading import joined, load_site_data
from medflare.data.local import CacheSettings
from medflare.federation.local.loop import run_local
from medflare.inference.deployed import load_model
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site
from medflare.training.site import Site

AUGMENTED: dict[str, Any] = {
    "augment": [
        {"name": "RandFlip", "prob": 0.5},
        {"name": "RandScaleIntensity", "prob": 0.5, "factors": 0.5},
    ]
}
TASKS = {
    "masks": small_task(sampling="balanced", **AUGMENTED),
    "labels": small_task("classification", sampling="balanced", **AUGMENTED),
    "volumes": cube_task(**AUGMENTED),
    "patches": load_task({**PATCHES, **AUGMENTED}),
}


def _both(task: TaskConfig, folder: Path, kept: Path) -> tuple[Site, Site]:
    """The site in memory, and on disk."""
    settings: list[Any] = [False, {"folder": str(kept), "memory_gb": 0}]
    inside, outside = (
        open_site("A", task, data_root=folder, local={"cache": cache}, seed=3) for cache in settings
    )
    assert inside.data.train.in_memory and not outside.data.train.in_memory
    return inside, outside


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return len(first) == len(second) and all(
        _equal(one, other) for one, other in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("kind", TASKS)
def test_same_batches_and_scores(
    kind: str, make_site: SiteOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_trials(monkeypatch)
    task = TASKS[kind]
    folder = make_volumes(tmp_path / "A") if task.spatial_dims == 3 else make_site(kind=task.kind)
    inside, outside = _both(task, folder, tmp_path / "cache")
    for keys in ((0, "model", 0), (1, "model", 0)):
        assert _equal(list(inside.batches("train", *keys)), list(outside.batches("train", *keys)))
    for split in ("train", "test"):
        assert _equal(list(inside.ordered(split)), list(outside.ordered(split)))
    rows = torch.tensor([2, 0, 2])
    for chosen in (rows, rows[:0]):
        drawn = [
            site.take("train", chosen, numpy_random_state(0, "rows")) for site in (inside, outside)
        ]
        assert _equal(*drawn)
    assert torch.equal(inside.class_counts(), outside.class_counts())
    memory = joined([inside.data.train, inside.data.test], ["0", "1"])
    disk = joined([outside.data.train, outside.data.test], ["0", "1"])
    assert (
        memory.in_memory
        and not disk.in_memory
        and memory.names == disk.names
        and _equal(memory.images[4], disk.images[4])
    )
    assert _equal(list(inside.data.test.targets), list(outside.data.test.targets))
    model = inside.predictor(inside.network())
    assert inside.score(model, "test") == outside.score(model, "test")
    assert _equal(predicted(inside, model, "test"), predicted(outside, model, "test"))


@pytest.mark.parametrize("method", ["fedavg", "fedsm"])
def test_same_final_models(method: str, tmp_path: Path) -> None:
    task = load_task(tiny_phantom(network={"name": "unet", "channels": [2, 4], "norm": "instance"}))

    def run(name: str, cache: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        def opened(site: str, role: str) -> Site:
            return open_site(site, task, seed=0, role=role, local={"cache": cache})

        results = run_local(method, task, 2, rounds=2, seed=0, opener=opened, out=tmp_path / name)
        models = {
            str(card.parent.relative_to(tmp_path / name)): load_model(card.parent).message
            for card in tmp_path.glob(f"{name}/**/card.json")
        }
        return results, models

    (memory, kept) = run("memory", False)
    (disk, read) = run("disk", {"folder": str(tmp_path / "cache"), "memory_gb": 0})
    assert list((tmp_path / "cache").glob("*.safetensors"))
    assert (
        memory["status"] == "COMPLETED"
        and memory["sites"] == disk["sites"]
        and kept.keys() == read.keys() != set()
    )
    for name, message in kept.items():
        for entry, state in message.states.items():
            for key, tensor in state.items():
                assert torch.equal(tensor, read[name].states[entry][key])


def test_memory_gb_decides_what_stays_on_disk(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path
) -> None:
    folder = make_site()
    bytes_of_an_image = 16 * 16 * (4 + 8)
    for images, resident in ((10.1, True), (9.9, False)):
        cache = CacheSettings(str(tmp_path / "cache"), memory_gb=images * bytes_of_an_image / 10**9)
        assert load_site_data("A", make_task(), folder, cache=cache).train.in_memory == resident
