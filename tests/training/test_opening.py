"""A site opened: its own settings applied, its data found, read and checked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medflare.core.errors import ConfigError, DataError
from medflare.core.rng import seeded
from medflare.data.loading import ENVIRONMENT, FOLDERS
from medflare.data.local import LocalSettings, local_settings
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site

TaskOf = Callable[..., TaskConfig]
SiteOf = Callable[..., Path]


def test_a_site_learns(make_site: SiteOf, make_task: TaskOf) -> None:
    site = open_site("A", make_task(loss={"name": "dice_ce"}, optimizer={"name": "adam", "lr": 0.05}), data_root=make_site())
    network, before = site.network(), None
    optimizer = site.optimizer(network.parameters())
    with seeded(0, "training"):
        for epoch in range(40):
            for batch in site.batches("train", epoch):
                loss = site.loss(network(batch.images), batch.targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                before = before or loss.item()
    assert before is not None and loss.item() < 0.5 * before
    dice = site.score(site.predictor(network)).values["dice"]
    assert dice is not None and dice > 0.8


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEDFLARE_CACHE", raising=False)


@pytest.mark.parametrize(
    ("bounds", "settings", "words"),
    [
        ({"pixels": 255}, {}, "bounds.pixels"),
        ({}, {"size": [60_000, 60_000]}, "60000 x 60000"),
        ({"epochs": 2}, {"local_epochs": 3}, "bounds.epochs"),
        ({"model_bytes": 100}, {}, "bounds.model_bytes"),
        ({"memory": 1e-6}, {"batch_size": 10**9}, "bounds.memory"),
    ],
)
def test_a_task_beyond_the_sites_bounds(
    make_site: SiteOf, make_task: TaskOf, bounds: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_site("A", make_task(**settings), data_root=make_site(), local={"bounds": bounds})


def test_a_task_within_the_sites_bounds(make_site: SiteOf, make_task: TaskOf) -> None:
    bounds = {"pixels": 256, "epochs": 1, "model_bytes": 10**6, "memory": 1}
    assert open_site("A", make_task(), data_root=make_site(), local={"bounds": bounds}).n["train"] == 5


def test_an_image_beyond_the_sites_bounds(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site(side=20)
    with pytest.raises(DataError, match=r"images/0.png: 20 x 20 pixels"):
        open_site("A", make_task(), data_root=folder, local={"bounds": {"pixels": 399}})
    assert open_site("A", make_task(), data_root=folder, local={"bounds": {"pixels": 400}}).n["train"] == 5


def test_files_elsewhere_are_read_where_the_site_allows_it(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = make_site(), tmp_path / "archive"
    (folder / "images").rename(elsewhere)
    (folder / "images").symlink_to(elsewhere)
    with pytest.raises(DataError, match=r"training\[0\]: .*images/0.png lies outside the site's folder; move it there, or"):
        open_site("A", make_task(), data_root=folder)
    assert open_site("A", make_task(), data_root=folder, local={"data_folders": [str(elsewhere)]}).n["train"] == 5
    monkeypatch.setenv(FOLDERS, str(elsewhere))
    assert open_site("A", make_task(size=[8, 8]), data_root=folder).n["train"] == 5
    with pytest.raises(DataError, match="lies outside"):  # the site's own word comes first
        open_site("A", make_task(), data_root=folder, local={"data_folders": [str(tmp_path / "other")]})


def test_opening(make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    folder, cache = make_site(), tmp_path / "cache"
    site = open_site("A", make_task(), local={"data_root": str(folder), "device": "cpu", "cache": str(cache)}, seed=5)
    assert site.n == {"train": 5, "validation": 2, "test": 3} and site.seed == 5 and site.device.type == "cpu"
    assert list(cache.iterdir())
    other = tmp_path / "other"
    open_site("A", make_task(size=[8, 8]), local={"data_root": str(folder), "cache": False}, cache=other)
    assert not other.exists()
    with pytest.raises(DataError, match="site A: no data root"):
        open_site("A", make_task())
    only_test = make_site({"test": ["x"]}, name="O")
    assert open_site("O", make_task(), data_root=only_test, role="outside").n == {"train": 0, "validation": 0, "test": 1}
    assert open_site("site-1", load_task("phantom")).n["train"] > 30


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"device": "gpu"}, "local/medflare.json: unknown device 'gpu'; use cpu, cuda or cuda:0"),
        ({"batchsize": 4}, "local/medflare.json: unknown setting 'batchsize'; did you mean batch_size"),
        ({"outbound": {"bytez": 4}}, "bytez"),
        ({"privacy": {"epsilon": 8}}, "privacy.delta"),
    ],
)
def test_bad_local_settings(make_task: TaskOf, make_site: SiteOf, local: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_site("A", make_task(), data_root=make_site(), local=local)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_settings_that_were_read_before(make_task: TaskOf, make_site: SiteOf) -> None:
    folder = make_site()
    read = open_site("A", make_task(), local=local_settings({"data_root": str(folder), "batch_size": 2}))
    assert read.batch_limit == 2 and read.n["train"] == 5
    assert open_site("A", make_task(), data_root=folder, local=LocalSettings()).batch_limit is None


def test_the_callers_word_goes_before_the_sites(make_task: TaskOf, make_site: SiteOf) -> None:
    folder = make_site()
    site = open_site("A", make_task(), data_root=folder, local={"data_root": "/nowhere", "device": "cpu"}, device="meta")
    assert site.device.type == "meta" and site.n["train"] == 5


def test_a_small_gpu_bounds_the_batches(make_task: TaskOf, make_site: SiteOf) -> None:
    """Training, passes in order and scoring keep to the site's own limit, and the results say that its batches differ."""
    folder, task = make_site({"training": [f"p{n}" for n in range(10)], "test": ["q", "r"]}), make_task(batch_size=8)
    site = open_site("A", task, data_root=folder, local={"batch_size": 3, "outbound": {"bytes": 10}})
    count = site.n["train"]
    sizes = [len(batch.images) for batch in site.batches("train", 0)]
    assert sum(sizes) == count and max(sizes) <= 4  # a single image that is left over joins three others
    assert max(len(batch.images) for batch in site.batches("train", 0, batch_size=6)) <= 4
    assert {len(batch.images) for batch in site.ordered("train")} <= {1, 2, 3}
    assert site.scoring_batch == site.batch_size == 3
    assert site.notes == ["trains with batches of 3, not the task's 8: its local/medflare.json says so"]
    assert site.task.fingerprint() == task.fingerprint()  # it takes part in the same federation


@pytest.mark.parametrize("local", [{}, {"batch_size": None}, {"batch_size": 8}, {"batch_size": 64}])
def test_no_limit_no_note(make_task: TaskOf, make_site: SiteOf, local: dict[str, Any]) -> None:
    site = open_site("A", make_task(batch_size=8), data_root=make_site(), local=local)
    assert site.batch_size == 8 and site.notes == []


def test_cache_true_is_the_callers_folder(make_task: TaskOf, make_site: SiteOf, tmp_path: Path) -> None:
    open_site("A", make_task(), data_root=make_site(), local={"cache": True}, cache=tmp_path / "cache")
    assert any((tmp_path / "cache").iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_said(make_task: TaskOf) -> None:
    with pytest.raises(ConfigError, match="device 'cuda' is not available here"):
        open_site("A", make_task(), local={"device": "cuda"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"local_epochs": 10**9}, r"local_epochs, bounds\.epochs in local/medflare\.json allows 1000"),
        ({"batch_size": 10**12}, r"batch_size 1000000000000, bounds\.batch in local/medflare\.json"),
        ({"accumulate": 10**9}, r"accumulate 1000000000, bounds\.batch"),
        ({"patches_per_image": 10**9, "image_mode": "patch"}, r"patches_per_image 1000000000, bounds\.batch"),
        ({"network": {"name": "unet", "channels": [20_000, 40_000]}}, r"bounds\.model_bytes in local/medflare\.json allows"),
        ({"intensity": {"name": "GaussianSmooth", "sigma": 1e7}}, r"intensity GaussianSmooth: .*bounds\.memory in local/medflare\.json"),
    ],
)
def test_a_new_site_has_bounds_before_it_says_any(make_site: SiteOf, make_task: TaskOf, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_site("A", make_task(**settings), data_root=make_site())


def test_a_site_may_raise_its_bounds(make_site: SiteOf, make_task: TaskOf) -> None:
    bounds = {"epochs": 10**10, "batch": 10**10}
    task = make_task(local_epochs=10**9, patches_per_image=10**9, image_mode="patch")
    assert open_site("A", task, data_root=make_site(), local={"bounds": bounds}).task.local_epochs == 10**9
