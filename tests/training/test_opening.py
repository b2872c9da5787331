from pathlib import Path
from typing import Any

import pytest

from helpers.fixture_types import SiteOf, TaskOf
from helpers.forked_trial import fork_trials
from medflare.core.errors import ConfigError, DataError
from medflare.data.local import (
    DATA_FOLDERS_VARIABLE,
    DATA_ROOT_VARIABLE,
    LocalSettings,
    local_settings,
)
from medflare.tasks.config import load_task
from medflare.training.opening import open_site


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEDFLARE_CACHE", raising=False)


@pytest.mark.parametrize(
    ("bounds", "settings", "named"),
    [
        ({"pixels": 255}, {}, "bounds.pixels"),
        ({}, {"size": [60_000, 60_000]}, "60000 x 60000"),
        ({"epochs": 2}, {"local_epochs": 3}, "bounds.epochs"),
        ({"model_bytes": 100}, {}, "bounds.model_bytes"),
        ({"memory": 1e-6}, {"batch_size": 10**9}, "bounds.memory"),
        ({}, {"accumulate": 10**9}, "bounds.batch"),
        ({}, {"patches_per_image": 10**9, "image_mode": "patch"}, "bounds.batch"),
        ({}, {"network": {"name": "unet", "channels": [20_000, 40_000]}}, "bounds.model_bytes"),
        ({}, {"intensity": {"name": "GaussianSmooth", "sigma": 1e9}}, "bounds.memory"),
        ({}, {"loss": {"name": "SSIMLoss", "win_size": 10**6}}, "loss SSIMLoss.*bounds.memory"),
    ],
)
def test_tasks_beyond_the_sites_bounds(
    make_site: SiteOf,
    make_task: TaskOf,
    bounds: dict[str, Any],
    settings: dict[str, Any],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_trials(monkeypatch)
    with pytest.raises(ConfigError, match=named):
        open_site("A", make_task(**settings), data_root=make_site(), local={"bounds": bounds})


def test_the_memory_of_a_step_does_not_tell_how_many_images_a_site_has(
    make_site: SiteOf, make_task: TaskOf
) -> None:
    lines = []
    for images in (1, 5):
        splits = {"training": [f"t{number}" for number in range(images)]}
        splits |= {"validation": ["v"], "test": ["x"]}
        folder = make_site(splits, name=str(images))
        local = {"bounds": {"memory": 0.01}}
        with pytest.raises(ConfigError, match=r"1000 x \[16, 16\]") as caught:
            open_site(str(images), make_task(batch_size=1000), data_root=folder, local=local)
        lines.append(str(caught.value).replace(f"site {images}", "site"))
    assert lines[0] == lines[1]


def test_tasks_within_the_sites_bounds(make_site: SiteOf, make_task: TaskOf) -> None:
    bounds = {"pixels": 256, "epochs": 10**10, "batch": 10**10, "model_bytes": 10**6, "memory": 1}
    task = make_task(local_epochs=10**9, patches_per_image=10**9, image_mode="patch")
    assert open_site("A", task, data_root=make_site(), local={"bounds": bounds}).n["train"] == 5


def test_an_image_beyond_the_sites_bounds(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site(side=20)
    with pytest.raises(DataError, match=r"images/0\.png"):
        open_site("A", make_task(), data_root=folder, local={"bounds": {"pixels": 399}})
    assert (
        open_site("A", make_task(), data_root=folder, local={"bounds": {"pixels": 400}}).n["train"]
        == 5
    )


def test_files_in_other_folders_need_the_sites_permission(
    make_site: SiteOf, make_task: TaskOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_site()
    elsewhere = tmp_path / "archive"
    (folder / "images").rename(elsewhere)
    (folder / "images").symlink_to(elsewhere)
    with pytest.raises(DataError, match=r"images/0\.png"):
        open_site("A", make_task(), data_root=folder)
    assert (
        open_site("A", make_task(), data_root=folder, local={"data_folders": [str(elsewhere)]}).n[
            "train"
        ]
        == 5
    )
    monkeypatch.setenv(DATA_FOLDERS_VARIABLE, str(elsewhere))
    assert open_site("A", make_task(size=[8, 8]), data_root=folder).n["train"] == 5
    with pytest.raises(DataError, match="images"):  # local settings come first
        open_site(
            "A", make_task(), data_root=folder, local={"data_folders": [str(tmp_path / "other")]}
        )


@pytest.mark.parametrize("network", [{"name": "resnet18"}, {"name": "mlp", "batch_norm": True}])
def test_batches_of_one_image_are_refused_where_sites_train(
    network: dict[str, Any], make_site: SiteOf, make_task: TaskOf
) -> None:
    folder = make_site(kind="classification", side=32)
    settings: dict[str, Any] = {"size": [32, 32], "network": network}
    with pytest.raises(ConfigError, match="batch_size to 2"):
        open_site("A", make_task("classification", batch_size=1, **settings), data_root=folder)
    open_site(
        "A", make_task("classification", batch_size=1, **settings), data_root=folder, role="outside"
    )
    open_site("A", make_task("classification", batch_size=2, **settings), data_root=folder)


def test_opening(
    make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(DATA_ROOT_VARIABLE, raising=False)
    folder = make_site()
    cache = tmp_path / "cache"
    site = open_site(
        "A",
        make_task(),
        local={"data_root": str(folder), "device": "cpu", "cache": str(cache)},
        seed=5,
    )
    assert (
        site.n == {"train": 5, "validation": 2, "test": 3}
        and site.seed == 5
        and site.device.type == "cpu"
    )
    assert list(cache.iterdir())
    other = tmp_path / "other"
    open_site(
        "A", make_task(size=[8, 8]), local={"data_root": str(folder), "cache": False}, cache=other
    )
    assert not other.exists()
    with pytest.raises(DataError, match="site A"):
        open_site("A", make_task())
    only_test = make_site({"test": ["x"]}, name="O")
    assert open_site("O", make_task(), data_root=only_test, role="outside").n == {
        "train": 0,
        "validation": 0,
        "test": 1,
    }
    assert open_site("site-1", load_task("phantom")).n["train"] > 30


def test_arguments_come_before_local_settings(make_task: TaskOf, make_site: SiteOf) -> None:
    folder = make_site()
    site = open_site(
        "A",
        make_task(),
        data_root=folder,
        local={"data_root": "/nowhere", "device": "cuda:77"},
        device="cpu:0",
    )
    assert str(site.device) == "cpu:0" and site.n["train"] == 5
    with pytest.raises(ConfigError, match="'batchsize'"):
        open_site("A", make_task(), data_root=folder, local={"batchsize": 4})


def test_the_sites_batch_limit_is_a_note(make_task: TaskOf, make_site: SiteOf) -> None:
    folder = make_site()
    task = make_task(batch_size=8)
    site = open_site(
        "A", task, data_root=folder, local=local_settings({"batch_size": 3, "minimum_patients": 5})
    )
    assert site.minimum_patients == 5
    assert site.scoring_batch == site.batch_size == 3 and len(site.notes) == 1
    assert site.task.fingerprint() == task.fingerprint()  # it takes part in the same federation
    unlimited = open_site("A", task, data_root=folder, local=LocalSettings())
    assert unlimited.batch_limit is None and unlimited.notes == []
