"""Sites of features: what a frozen body sees of every image, with patients, labels and splits as they were."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.fixture_types import Edit, SiteOf, TaskOf
from medflare import run_local
from medflare.core.errors import ConfigError, DataError
from medflare.data.datalist import FILE
from medflare.data.loading import load_site_data
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork
from medflare.preparation.dataset_import.features import TASK, write_features
from medflare.tasks.config import TaskConfig, load_task

NETWORK = {"name": "small_cnn", "channels": [4, 8], "batch_norm": True}
MONAIS = {"name": "DenseNet", "init_features": 4, "growth_rate": 2, "block_config": [1, 1]}


def pretrained(network: dict[str, Any], make_task: TaskOf, folder: Path) -> TaskConfig:
    """Three classes, and a network whose weights and running statistics lie in a file."""
    drawn = initial_network(make_task("classification", network=network), 5)
    drawn(torch.rand(8, 1, 16, 16))  # running statistics that are not the initial ones
    file = folder / "weights.safetensors"
    save_file(drawn.state_dict(), file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    weights = {"file": file.name, "sha256": digest, "format": "safetensors", "part": "body"}
    return make_task("classification", network=network | {"weights": weights}, sampling="balanced")


@pytest.fixture
def task(make_task: TaskOf, tmp_path: Path) -> TaskConfig:
    return pretrained(NETWORK, make_task, tmp_path)


@pytest.mark.parametrize("spec", [NETWORK, MONAIS], ids=["ours", "MONAI's"])
def test_features_are_those_of_the_frozen_body(
    spec: dict[str, Any], make_task: TaskOf, make_site: SiteOf, tmp_path: Path
) -> None:
    task = pretrained(spec, make_task, tmp_path)
    folder = make_site(kind="classification")
    actual = write_features(folder, task, tmp_path / "features", weights=tmp_path)
    images = load_site_data("A", task, folder)
    features = load_site_data("A", actual.task, tmp_path / "features")
    for before, after in (
        (images.train, features.train),
        (images.validation, features.validation),
        (images.test, features.test),
    ):
        assert before.patients == after.patients and torch.equal(before.targets, after.targets)
    network = initial_network(task, 0, start=load_file(tmp_path / "weights.safetensors")).eval()
    seen = features.test.take(torch.arange(3))[0]
    images_of = images.test.take(torch.arange(3))[0]
    with torch.no_grad():
        torch.testing.assert_close(network.head(seen.flatten(1)), network(images_of))
    assert seen.shape == (3, 1, 1, actual.task.size[1])


def test_sex_age_and_scanner_go_with_the_features(
    task: TaskConfig, make_site: SiteOf, edit: Edit, tmp_path: Path
) -> None:
    folder = make_site(kind="classification")
    known = {"sex": "female", "age": 63, "scanner": "Aera"}
    edit(folder, lambda content: content["test"][0].update(known))
    write_features(folder, task, tmp_path / "features", weights=tmp_path)
    first, *others = json.loads((tmp_path / "features" / FILE).read_text())["test"]
    assert {**first, **known} == first
    assert all("sex" not in entry for entry in others)


def test_a_federation_trains_heads_on_them(
    task: TaskConfig, make_site: SiteOf, tmp_path: Path
) -> None:
    for name in "AB":
        make_site(kind="classification", name=f"sites/{name}")
    actual = write_features(tmp_path / "sites", task, tmp_path / "features", weights=tmp_path)
    assert actual.images == {"A": 10, "B": 10} and "A: 10 x 8 features" in actual.render()
    head = load_task(tmp_path / "features" / TASK)
    assert head == actual.task and head.sampling == task.sampling and head.name == "shades_features"
    cases: list[tuple[str, Any]] = [("fedavg", {}), ("prr", {}), ("feddag", {"ndag": False})]
    for method, settings in cases:
        run: Any = run_local(
            method,
            head,
            sites=["A", "B"],
            rounds=2,
            seed=0,
            data_root=tmp_path / "features",
            **settings,
        )
        assert run["status"] == "COMPLETED"


def test_what_cannot_be_made(
    task: TaskConfig, make_task: TaskOf, make_site: SiteOf, tmp_path: Path
) -> None:
    folder = make_site(kind="classification")
    home = tmp_path / "features"
    for kind, named in (("segmentation", "squares"), ("classification", r"network\.weights")):
        with pytest.raises(ConfigError, match=named):
            write_features(folder, make_task(kind), home)
    with pytest.raises(DataError, match="another folder"):
        write_features(folder, task, folder / "features", weights=tmp_path)
    with (
        patch.object(FeatureNetwork, "has_features", False),
        pytest.raises(ConfigError, match="small_cnn"),
    ):
        write_features(folder, task, home, weights=tmp_path)
    write_features(folder, task, home, weights=tmp_path)
    with pytest.raises(DataError, match="--force"):
        write_features(folder, task, home, weights=tmp_path)
    listed = json.loads((home / FILE).read_text())
    shutil.rmtree(home / "features")
    write_features(folder, task, home, weights=tmp_path, force=True)
    assert json.loads((home / FILE).read_text()) == listed
    (folder / "images" / "3.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"3.png"):
        write_features(folder, task, tmp_path / "other", weights=tmp_path)
    assert not (tmp_path / "other" / FILE).exists(), "without a datalist it is not a site"
