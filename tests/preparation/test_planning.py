"""A planned task: each choice as computed by hand, accepted by `load_task`, with its reason."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from helpers import small_tasks
from helpers.volume_sites import cube_task
from medflare.core.errors import ConfigError
from medflare.data.transforms import Augmentation
from medflare.networks.catalogue import initial_network
from medflare.preparation.check import check_task
from medflare.preparation.fingerprint import (
    LEARNT,
    Channel,
    DatasetFingerprint,
    Intensities,
    Presence,
    Spread,
)
from medflare.preparation.planning import Topology, plan, topology
from medflare.preparation.step_cost import noise_targets
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.losses import build_loss
from medflare.tasks.optimizers import build_optimizer

VALUES = Intensities(-100, 20, 300, 50, 80)
SIDE = 16


def spread(*sides: float, tenth: tuple[float, ...] | None = None) -> Spread:
    return Spread(tenth or sides, tenth or sides, sides, sides, sides)


def fingerprint(
    *sides: float,
    spacing: tuple[float, ...] | None = None,
    tenth: tuple[float, ...] | None = None,
    **changes: Any,
) -> DatasetFingerprint:
    """Ten images of one size, one channel."""
    task = (cube_task if len(sides) == 3 else small_tasks.small_task)(
        **{"channels": 1, **changes.pop("learnt", {})}
    )
    written = task.to_dict()
    gaps = spread(*spacing, tenth=tenth) if spacing else None
    extent = (
        spread(*(side * gap for side, gap in zip(sides, spacing, strict=True))) if spacing else None
    )
    actual: dict[str, Any] = {
        "site": "A",
        "images": 10,
        "patients": 10,
        "zeros": 0.1,
        "channels": (Channel(VALUES, VALUES),),
    }
    actual |= {
        "learnt": {name: written[name] for name in LEARNT},
        "sizes": spread(*sides),
        "spacings": gaps,
        "extents": extent,
    }
    actual["classes"] = {task.labels[0]: Presence(10, 0.1)}
    return DatasetFingerprint(**(actual | changes))


def planned(*actual: DatasetFingerprint, **options: Any) -> dict[str, Any]:
    settings = plan(actual, **options).settings
    load_task(settings)
    return settings


class TestGeometry:
    def test_the_median_image_where_memory_holds_it(self) -> None:
        task = planned(fingerprint(30, 20, 17, spacing=(2.0, 2.0, 2.0)))
        assert task["spacing"] == [2.0, 2.0, 2.0] and task["image_mode"] == "patch"
        # 30, 20, 17 -> 15, 10, 9 -> 8, 5, 5 -> 4: two poolings of all, a third one of the first axis, which has 8 left, less than 12
        assert task["network"]["strides"] == [[1, 1, 1], [2, 2, 2], [2, 2, 2]]
        assert task["network"]["filters"] == [32, 64, 128] and task["size"] == [32, 20, 20]
        assert task["batch_size"] == 2 and task["patches_per_image"] == 1

    def test_sizes_after_resampling(self) -> None:
        other = fingerprint(16, 16, 32, spacing=(2.0, 2.0, 1.0), site="B", images=30)
        task = planned(fingerprint(32, 32, 16, spacing=(1.0, 1.0, 2.0)), other)
        assert task["spacing"] == [2.0, 2.0, 1.0] and task["size"] == [16, 16, 32]

    def test_thick_slices_take_the_tenth_percentile(self) -> None:
        proposed = plan([fingerprint(64, 64, 12, spacing=(1.0, 1.0, 6.0), tenth=(0.9, 0.9, 3.0))])
        assert proposed.settings["spacing"] == [1.0, 1.0, 3.0]
        assert proposed.settings["network"]["strides"][:3] == [[1, 1, 1], [2, 2, 1], [2, 2, 2]]
        assert "10th percentile" in proposed.render()
        assert proposed.settings["augment"][0]["rotate_range"] == [0, 0, pytest.approx(3.1416)]

    @pytest.mark.parametrize("options", [{}, {"voxels": True}])
    def test_volumes_of_unknown_spacing_stay_as_stored(self, options: dict[str, bool]) -> None:
        known = fingerprint(16, 16, 16, spacing=(1.0, 1.0, 5.0), site="B")
        task = planned(known, *([] if options else [fingerprint(16, 16, 16)]), **options)
        assert task["spacing"] is None and task["size"] == [16, 16, 16]
        assert task["network"]["strides"] == [[1, 1, 1], [2, 2, 2], [2, 2, 2]]

    def test_pictures(self) -> None:
        task = planned(fingerprint(57, 20), modality="photo")
        assert "spacing" not in task and task["spatial_dims"] == 2
        assert task["size"] == [64, 20] and task["network"]["strides"] == [
            [1, 1],
            [2, 2],
            [2, 2],
            [2, 1],
        ]


@pytest.mark.parametrize(
    ("size", "spacing", "padded", "poolings"),
    [
        ((32, 32), (1, 1), (32, 32), (3, 3)),
        ((32, 32, 8), (1, 1, 3), (32, 32, 8), (3, 3, 1)),
        ((9, 9, 40), (1, 1, 1), (10, 10, 40), (1, 1, 2)),
        ((20, 20, 10), (1, 1, 4), (20, 20, 10), (2, 2, 0)),
        ((96, 96, 10), (1, 1, 2.5), (96, 96, 10), (4, 4, 1)),
        ((64, 64, 34), (4, 4, 1), (64, 64, 40), (4, 4, 3)),
        ((320, 320, 20), (0.8, 0.8, 5), (320, 320, 20), (6, 6, 2)),
        # The Decathlon's prostates, as in nnU-Net's documentation.
        ((20, 320, 256), (3.6, 0.62, 0.62), (20, 320, 256), (2, 6, 6)),
    ],
)
def test_poolings_and_sizes_are_those_of_the_published_program(
    size: tuple[int, ...],
    spacing: tuple[float, ...],
    padded: tuple[int, ...],
    poolings: tuple[int, ...],
) -> None:
    """Numbers that nnU-Net's own `get_pool_and_conv_props` gives (commit 04f3cfc)."""
    levels = topology(size, spacing)
    assert levels.padded(size) == padded and levels.divisors == tuple(
        2**number for number in poolings
    )


class TestMemory:
    def test_less_memory_a_smaller_patch(self) -> None:
        actual = fingerprint(48, 48, 48)
        large = planned(actual)
        little = planned(actual, memory=0.3)
        assert large["size"] == [48, 48, 48]
        for new, side in zip(little["size"], large["size"], strict=True):
            assert new < side
        divisors = Topology((), little["network"]["strides"]).divisors
        assert [side % divisor for side, divisor in zip(little["size"], divisors, strict=True)] == [
            0,
            0,
            0,
        ]
        assert little["batch_size"] >= 2 and little["patches_per_image"] > 1

    def test_what_memory_leaves_goes_to_the_batch_up_to_a_twentieth_of_the_smallest_site(
        self,
    ) -> None:
        assert (
            planned(
                fingerprint(SIDE, SIDE, SIDE, images=100),
                fingerprint(SIDE, SIDE, SIDE, images=200, site="B"),
            )["batch_size"]
            == 5
        )
        assert planned(fingerprint(SIDE, SIDE, SIDE, images=10_000), memory=0.25)[
            "batch_size"
        ] in range(3, 100)

    def test_too_little_memory_and_too_small_images(self) -> None:
        for memory in (0.001, 0):
            with pytest.raises(ConfigError, match="memory"):
                plan([fingerprint(32, 32, 32)], memory=memory)
        with pytest.raises(ConfigError, match="10 x 10 x 4"):
            plan([fingerprint(10, 10, 4)])


class TestIntensity:
    def test_no_unit_and_photographs(self) -> None:
        for zeros, nonzero in ((0.2, False), (0.4, True)):
            intensity = planned(fingerprint(SIDE, SIDE, SIDE, zeros=zeros))["intensity"]
            assert intensity == {
                "name": "NormalizeIntensity",
                "nonzero": nonzero,
                "channel_wise": True,
            }

    @pytest.mark.parametrize(
        ("highest", "common"), [((255, 250), True), ((255, 4000), False), ((1, 255), False)]
    )
    def test_photographs_with_and_without_a_common_white(
        self, highest: tuple[int, int], common: bool
    ) -> None:
        sites = [
            fingerprint(
                SIDE,
                SIDE,
                site=site,
                channels=(Channel(Intensities(0, 0, white, white / 3, white / 4), None),),
            )
            for site, white in zip("AB", highest, strict=True)
        ]
        intensity = planned(*sites, modality="photo")["intensity"]
        if common:
            assert (intensity["a_min"], intensity["a_max"]) == (0, 255)
        else:
            assert intensity["name"] == "NormalizeIntensity"

    def test_ct_by_the_foreground_of_all(self) -> None:
        other = Intensities(0, 0, 100, 10, 40)
        sites = (
            fingerprint(SIDE, SIDE, SIDE),
            fingerprint(SIDE, SIDE, SIDE, site="B", images=30, channels=(Channel(VALUES, other),)),
        )
        intensity = planned(*sites, modality="ct")["intensity"]
        mean = 20.0
        deviation = (0.25 * (80**2 + 50**2) + 0.75 * (40**2 + 10**2) - 20**2) ** 0.5
        assert (intensity["a_min"], intensity["a_max"], intensity["clip"]) == (-25, 150, True)
        assert (intensity["b_min"], intensity["b_max"]) == pytest.approx(
            ((-25 - mean) / deviation, (150 - mean) / deviation), abs=1e-4
        )

    def test_ct_without_foreground(self) -> None:
        for inside in (None, Intensities(5, 5, 5, 5, 0)):
            with pytest.raises(ConfigError, match=r"ct.*foreground"):
                plan(
                    [fingerprint(SIDE, SIDE, SIDE, channels=(Channel(VALUES, inside),))],
                    modality="ct",
                )


def test_every_decided_setting_has_one_reason() -> None:
    proposed = plan([fingerprint(SIDE, SIDE, SIDE)], name="mine")
    decided = {choice.setting: choice.value for choice in proposed.choices}
    assert len(decided) == len(proposed.choices)
    for choice in proposed.choices:
        assert choice.reason
    assert (
        set(decided) == set(proposed.settings) - set(LEARNT)
        and decided.items() <= proposed.settings.items()
    )
    assert proposed.settings["name"] == "mine"


def _always(transforms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**transform, "prob": 1.0} for transform in transforms]


def _noise(task: TaskConfig) -> tuple[Tensor, Tensor]:
    """Two images and their targets."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, task.image_channels, *task.size, generator=generator)
    return images, noise_targets(task, 2)


@pytest.mark.parametrize("dims", [2, 3])
def test_every_transform_of_a_planned_task_changes_images(dims: int) -> None:
    settings = planned(fingerprint(*[SIDE] * dims))
    for transform in settings["augment"]:
        task = load_task(settings | {"augment": _always([transform])})
        images, targets = _noise(task)
        changed, moved = Augmentation(task)(images, targets, np.random.RandomState(0))
        assert changed.shape == images.shape and moved.shape == targets.shape
        assert changed.isfinite().all() and not torch.equal(changed, images), transform["name"]


@pytest.mark.parametrize("dims", [2, 3])
def test_a_planned_task_learns_with_all_transforms(dims: int) -> None:
    """A few of its optimizer's steps on one batch, which is the same each time, lower its loss."""
    settings = planned(fingerprint(*[SIDE] * dims))
    task = load_task(settings | {"augment": _always(settings["augment"])})
    check_task(task)
    images, targets = Augmentation(task)(*_noise(task), np.random.RandomState(0))
    network = initial_network(task, seed=0)
    loss = build_loss(task)
    optimizer = build_optimizer(task.optimizer, network.parameters(), "task")
    losses = []
    for _ in range(4):
        value = loss(network(images), targets)
        losses.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert losses[-1] < losses[0], losses


def test_a_small_network_finds_small_structures_in_a_few_steps() -> None:
    """Two neighbouring structures, 1 % of the volumes. After as many steps with Dice and cross
    entropy the network answers the background alone.
    """
    learnt = {"target": "multiclass", "labels": ["background", "front", "back"]}
    settings = planned(fingerprint(24, 24, 24, learnt=learnt))
    changes = {
        "size": [24, 24, 24],
        "network": {"name": "unet", "channels": [8, 16, 32, 64], "norm": "instance"},
        "optimizer": {"name": "adam", "lr": 0.01},
    }
    task = load_task(settings | changes)
    random = np.random.default_rng(0)
    images, targets = _volumes_of_two_structures(random)
    network = initial_network(task, seed=0)
    loss = build_loss(task)
    optimizer = build_optimizer(task.optimizer, network.parameters(), "task")
    for _ in range(150):
        rows = random.permutation(len(images))[:2]
        optimizer.zero_grad()
        loss(network(images[rows]), targets[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        predicted = network(images).argmax(dim=1)
    for structure in (1, 2):
        prediction = predicted == structure
        truth = targets == structure
        assert 2 * (prediction & truth).sum() / (prediction.sum() + truth.sum()) > 0.7


def _volumes_of_two_structures(random: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth noise (12, 1, 24, 24, 24), brighter in an ellipsoid that a plane divides."""
    images = []
    targets = []
    for _ in range(12):
        centre = random.uniform(9, 14, 3)
        x, y, z = np.indices((24, 24, 24)) - centre.reshape(3, 1, 1, 1)
        inside = np.sqrt(x**2 + y**2 / 4 + z**2) < 2.6
        targets.append(np.where(inside, np.where(y < 0, 1, 2), 0))
        noise = gaussian_filter(random.standard_normal((24, 24, 24)), 1.5)
        images.append(noise / noise.std() + inside)
    return torch.tensor(np.stack(images)[:, None]).float(), torch.tensor(np.stack(targets))


def test_fingerprints_that_do_not_fit_are_refused() -> None:
    cube = fingerprint(SIDE, SIDE, SIDE)
    task = small_tasks.small_task("classification").to_dict()
    classes = dataclasses.replace(
        fingerprint(SIDE, SIDE), learnt={name: task[name] for name in LEARNT}
    )
    other = fingerprint(SIDE, SIDE, SIDE, site="B", learnt={"labels": ["ball"]})
    flat = fingerprint(SIDE, SIDE, SIDE, sizes=spread(16, 16))
    for sites, token in (
        ([cube, other], "labels"),
        ([], "fingerprint"),
        ([classes], "shades"),
        ([flat], "site A"),
    ):
        with pytest.raises(ConfigError, match=token):
            plan(sites)
