"""Proposals that end: measured steps, sizes that keep structures, and rates that follow the network."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.downloaded_folders import classes, pairs, picture
from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.core.text import format_seconds
from medflare.networks.catalogue import initial_network
from medflare.preparation import device_rules, proposing, round_time
from medflare.preparation.dataset_import.datalists import import_folder
from medflare.preparation.dataset_import.options import ImportOptions
from medflare.preparation.device_rules import local_epochs, turned_a_little
from medflare.preparation.fingerprint import fingerprints
from medflare.preparation.learning_rate import usual_rate
from medflare.preparation.planning import ProposedTask
from medflare.preparation.proposing import TaskHints, _with_rate_and_epochs, propose
from medflare.preparation.round_time import Stopwatch, round_seconds
from medflare.preparation.step_cost import StepCost, measure_step, step_operations
from medflare.tasks.config import TaskConfig, load_task

SMALL = {"name": "small_cnn"}
UNET = {"name": "unet", "channels": [8, 16, 32, 64], "norm": "instance"}


def proposed(root: Path, **hints: object) -> TaskConfig:
    import_folder(root, ImportOptions(force=True))
    return load_task(propose(root, TaskHints(**hints)).settings)  # type: ignore[arg-type]


def drawn(root: Path, side: int, thickness: int) -> Path:
    """Ten pictures with a square of which only the outline is the structure."""
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for number in range(10):
        mask = np.zeros((side, side), np.uint8)
        mask[side // 4 : 3 * side // 4, side // 4 : 3 * side // 4] = 1
        inner = slice(side // 4 + thickness, 3 * side // 4 - thickness)
        mask[inner, inner] = 0
        noise = np.random.default_rng(number).integers(0, 100, (side, side), dtype=np.uint8)
        Image.fromarray(noise + 100 * mask).save(root / "images" / f"{number}.png")
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")
    return root


def test_operations_are_counted_by_hand() -> None:
    """Two operations for each weight and pixel, of the output or, in a transposed convolution, of the input."""
    task = small_task(
        network={"name": "unet", "channels": [4, 8], "norm": "instance"}, size=[16, 16]
    )
    # down: 1 -> 4 at half the size, bottom: 4 -> 8 at half the size, up: (4 + 8) -> 4 by a transposed convolution, head 4 -> 1
    convolutions = 9 * (1 * 4 + 4 * 8) * 8 * 8 + 9 * 12 * 4 * 8 * 8 + 4 * 1 * 16 * 16
    assert step_operations(task) == 2 * convolutions


def test_a_network_for_masks_does_not_classify() -> None:
    task = small_task("classification", network=UNET, size=[32, 32])
    with pytest.raises(ConfigError, match=r"a training step on .* fails .*; change size, network"):
        measure_step(task, torch.device("cpu"))


def test_a_step_has_a_time_and_a_memory_of_its_size() -> None:
    small = small_task(network=UNET, size=[32, 32], batch_size=2)
    large = small_task(network=UNET, size=[128, 128], batch_size=8)
    costs = [measure_step(task, torch.device("cpu")) for task in (small, large)]
    assert 0 < costs[0].seconds < costs[1].seconds
    weights = sum(weight.numel() for weight in initial_network(large, 0).parameters())
    # numbers; the first level halves the sides.
    images = 8 * 128 * 128
    first_maps = 8 * 16 * 64 * 64
    # Bytes of weights, gradients and Adam's moments, and of what the step keeps.
    least = 4 * (4 * weights + images + first_maps)
    assert costs[1].gibibytes * 2**30 > least


def test_rates_follow_network_and_optimizer() -> None:
    small = small_task(network=UNET)
    large = small_task(network={"name": "unet", "channels": [64, 128, 256, 512]})
    assert usual_rate(small)[0] == 0.01 and usual_rate(large)[0] < 0.01
    sgd = small_task(network=UNET, optimizer={"name": "sgd", "lr": 1.0})
    assert usual_rate(sgd)[0] == pytest.approx(0.1)


def test_thin_structures_get_patches_and_broad_ones_whole_images(tmp_path: Path) -> None:
    thin = proposed(drawn(tmp_path / "thin", 256, 1))
    broad = proposed(drawn(tmp_path / "broad", 256, 64))
    assert thin.image_mode == "patch" and max(thin.size) <= 128 and thin.patches_per_image > 1
    assert broad.image_mode == "resize" and max(broad.size) < 128


def test_fixed_features_need_no_shorter_rounds(tmp_path: Path) -> None:
    """On a GPU they are computed in each epoch."""
    import_folder(classes(tmp_path, patients=12))
    settings = {"labels": ["cat", "dog"], "freeze": ["body"], "augment": [], "batch_size": 2}
    task = small_task("classification", **settings)
    sites = fingerprints(tmp_path, task)
    epochs = {}
    for device in ("cpu", "cuda"):
        stopwatch = Stopwatch(sites, torch.device(device), memory=1, limit=60)
        epochs[device] = local_epochs(task, stopwatch, seconds=60).value
    assert epochs["cpu"] > epochs["cuda"] == 1


def test_fewer_minutes_give_smaller_images(tmp_path: Path) -> None:
    root = drawn(tmp_path / "broad", 128, 32)
    plenty = proposed(root)
    little = proposed(root, minutes=1e-5)
    assert (
        math.prod(little.size) <= math.prod(plenty.size)
        and little.local_epochs == 1 < plenty.local_epochs
    )
    with pytest.raises(ConfigError, match="--minutes"):
        propose(root, TaskHints(minutes=0))


def test_a_classification_keeps_to_the_minutes_with_a_smaller_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        picture(tmp_path / "ab"[number % 2] / f"{number}.png", side=64)

    def cost(task: TaskConfig, device: torch.device) -> StepCost:
        if task.network["name"] == "small_cnn":
            return StepCost(0.1 + 1e-4 * math.prod(task.size), 0.0)
        return StepCost(0.5, 0.0)  # whatever the size is

    monkeypatch.setattr(proposing, "_FEW_IMAGES", 0)
    monkeypatch.setattr(round_time, "measure_step", cost)
    import_folder(tmp_path, ImportOptions())
    plenty = load_task(propose(tmp_path, TaskHints(minutes=1)).settings)
    assert plenty.network["name"] != "small_cnn" and plenty.size == (64, 64)
    # 7 images in batches of 2 are trained and 7 / 4 validated in a third of the time each: 3.8
    # steps. Of 64 pixels a side they take 1.9 s, of 48 1.25 s, of 32 0.77 s.
    little = propose(tmp_path, TaskHints(minutes=1.2 / 60))
    assert (little.settings["network"], little.settings["size"]) == (SMALL, [32, 32])
    assert "takes more than the minutes, with smaller images too" in little.render()
    for warning in little.warnings:
        assert "--minutes" not in warning
    given = propose(tmp_path, TaskHints(minutes=1.2 / 60, size=(48, 48))).settings
    assert (given["network"], given["size"]) == (SMALL, [48, 48])
    named = propose(tmp_path, TaskHints(minutes=1.2 / 60, network="resnet18"))
    assert named.settings["network"] == {"name": "resnet18"}
    assert any("more than --minutes" in warning for warning in named.warnings)


def test_structures_in_order_are_not_mirrored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = drawn(tmp_path / "pair", 64, 16)
    for path in (root / "masks").iterdir():
        mask = np.zeros((64, 64), np.uint8)
        mask[10:30, 20:40] = 1
        mask[32:52, 20:40] = 2
        Image.fromarray(mask).save(path)
    task = proposed(root)
    assert [
        transform["spatial_axis"] for transform in task.augment if transform["name"] == "RandFlip"
    ] == [1]
    assert task.image_mode == "resize", "their place tells them apart"
    (affine,) = [step for step in task.augment if step["name"] == "RandAffine"]
    assert affine["prob"] == 0.5 and affine["rotate_range"] == [0.26], "fifteen degrees"
    monkeypatch.setattr(device_rules, "_STEPS", 1)
    names = [step["name"] for step in proposed(root).augment]
    assert "RandAffine" not in names, "a round does not repeat images"


def test_volumes_with_coarse_slices_are_turned_in_their_plane() -> None:
    affine = {"name": "RandAffine", "prob": 0.2, "rotate_range": [0.0, 0.0, 3.1416]}
    affine["scale_range"] = [[-0.3, 0.4]] * 3
    turned = turned_a_little([{"name": "RandGaussianSmooth", "prob": 0.2}, affine])
    assert turned["rotate_range"] == [0.0, 0.0, 0.26]
    assert turned["scale_range"] == [0.15, 0.15, 0.15]


def test_a_round_is_the_steps_of_all_sites(tmp_path: Path) -> None:
    from medflare.preparation.fingerprint import fingerprints

    import_folder(pairs(tmp_path, values=(1,)), ImportOptions())
    task = small_task(labels=["foreground"], batch_size=2, local_epochs=3)
    (site,) = fingerprints(tmp_path, task)
    expected = 1.0 / 2 * (site.images * 3 + site.images / 4 / 3)
    assert round_seconds(task, [site], 1.0) == pytest.approx(expected)
    with pytest.raises(ConfigError, match="smaller size"):
        Stopwatch([site], torch.device("cpu"), memory=1e-6, limit=60.0).measured(task)


def test_the_time_of_a_round_has_its_validation_once() -> None:
    """An epoch takes 10 s, the validation of a round 60 s."""
    task = small_task(labels=["foreground"], batch_size=2)
    stopwatch = SimpleNamespace(
        sites=[SimpleNamespace(images=10)],
        device=torch.device("cpu"),
        limit=1000,
        measured_seconds=lambda task: 10 * task.local_epochs + 60,
        measured=lambda task: StepCost(seconds=1.0, gibibytes=0.1),
    )
    proposed = ProposedTask(task.to_dict(), ())
    timed = _with_rate_and_epochs(proposed, TaskHints(), cast(Stopwatch, stopwatch))
    assert timed.settings["local_epochs"] == 5
    assert f"about {format_seconds(110)} here" in timed.time


def test_the_proposal_says_how_long_a_round_takes(tmp_path: Path) -> None:
    import_folder(classes(tmp_path, patients=8), ImportOptions())
    text = propose(tmp_path, TaskHints()).render()
    assert "time: a round of FedAvg takes about" in text and "20 rounds about" in text
