from typing import Any

import numpy as np
import pytest
import torch

from helpers.fixture_types import TaskOf
from helpers.forked_trial import fork_trials
from medflare.core.errors import ConfigError
from medflare.data import trial
from medflare.data.transforms import Augmentation, Preprocessing
from medflare.data.trial import try_task
from medflare.tasks.allowed_transforms import photometric_augmentations, spatial_augmentations
from medflare.tasks.config import load_task


def _disc() -> tuple[torch.Tensor, torch.Tensor]:
    """A picture that equals its mask, off centre, so that any lack of alignment shows."""
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    mask = ((rows - 6) ** 2 + (columns - 9) ** 2 < 12).long()
    return mask[None, None].float().repeat(3, 1, 1, 1), mask[None].repeat(3, 1, 1)


def test_shrinking_averages_and_enlarging_is_smooth(make_task: TaskOf) -> None:
    picture = np.zeros((1, 32, 32), np.float32)
    picture[:, ::2] = 255  # every second row: the average of any 2 x 2 block is one half
    result = Preprocessing(make_task()).image(picture)
    assert (
        type(result) is torch.Tensor
        and result.shape == (1, 16, 16)
        and result.dtype == torch.float32
    )
    torch.testing.assert_close(result, torch.full((1, 16, 16), 0.5))
    ramp = np.linspace(0, 255, 8, dtype=np.float32)[None, None].repeat(8, axis=1)
    enlarged = Preprocessing(make_task()).image(ramp)
    assert (
        enlarged.shape == (1, 16, 16)
        and (enlarged[0, 0].diff() >= 0).all()
        and len(enlarged[0, 0].unique()) > 8
    )
    same = np.random.default_rng(0).random((1, 16, 16), dtype=np.float32) * 255
    torch.testing.assert_close(Preprocessing(make_task()).image(same), torch.tensor(same / 255))


@pytest.mark.parametrize("axis", [None, 1, -1, [0, 1]])
def test_what_is_ours_equals_monais(make_task: TaskOf, axis: int | list[int] | None) -> None:
    """The argument that ours lacks makes it MONAI's."""
    images, targets = _disc()
    flip = {"name": "RandFlip", "prob": 0.7, "spatial_axis": axis}
    scale = {"name": "ScaleIntensityRange", "a_min": 9, "a_max": 77, "b_min": 0.1, "b_max": 0.8}
    ours = make_task(augment=(flip,), intensity=scale)
    theirs = make_task(
        augment=({**flip, "lazy": False},), intensity={**scale, "dtype": torch.float32}
    )
    picture = np.random.default_rng(0).random((3, 16, 16), dtype=np.float32) * 255
    assert torch.equal(Preprocessing(ours).image(picture), Preprocessing(theirs).image(picture))
    batches = [
        Augmentation(task)(images, targets, np.random.RandomState(0)) for task in (ours, theirs)
    ]
    assert not torch.equal(batches[0][0], images)
    for pair in zip(*batches, strict=True):
        assert torch.equal(*pair)


@pytest.mark.parametrize("channel_wise", [False, True])
def test_an_image_is_not_changed(make_task: TaskOf, channel_wise: bool) -> None:
    """MONAI's NormalizeIntensity writes into its image; `data check` compares it with others afterwards."""
    intensity = {"name": "NormalizeIntensity", "nonzero": True, "channel_wise": channel_wise}
    picture = np.arange(16, dtype=np.float32).reshape(1, 4, 4)
    before = picture.copy()
    result = Preprocessing(make_task(intensity=intensity)).intensities(picture)
    assert np.array_equal(picture, before) and abs(float(result[result != 0].mean())) < 1e-5


@pytest.mark.parametrize("part", [np.s_[:1], np.s_[:, ::2]])
def test_an_intensity_transform_that_changes_the_shape_is_named(
    make_task: TaskOf, monkeypatch: pytest.MonkeyPatch, part: Any
) -> None:
    """Masks would lie elsewhere."""
    prepared = Preprocessing(make_task(intensity={"name": "NormalizeIntensity"}))
    monkeypatch.setattr(prepared, "_intensity", lambda image: image[part])
    with pytest.raises(
        ConfigError, match=r"intensity NormalizeIntensity: it makes .* of 3 x 4 x 4"
    ):
        prepared.intensities(np.zeros((3, 4, 4), np.float32))


@pytest.mark.filterwarnings("ignore:Divide by zero")
def test_an_intensity_range_without_width_is_monais(make_task: TaskOf) -> None:
    scale = {"name": "ScaleIntensityRange", "a_min": 9, "a_max": 9, "b_min": 0.1, "b_max": 0.8}
    ours = make_task(intensity={**scale, "clip": True})
    theirs = make_task(intensity={**scale, "clip": True, "dtype": torch.float32})
    picture = np.random.default_rng(0).random((3, 16, 16), dtype=np.float32) * 255
    actual = Preprocessing(ours).image(picture)
    assert torch.equal(actual, Preprocessing(theirs).image(picture))
    torch.testing.assert_close(actual, torch.tensor(picture - 9 + 0.1))


def test_masks_keep_their_values(make_task: TaskOf) -> None:
    mask = np.kron(np.array([[0, 7], [3, 300]]), np.ones((16, 16), np.int64))[None]
    resized = Preprocessing(make_task()).mask(mask)
    assert resized.dtype == torch.int64 and resized.shape == (1, 16, 16)
    torch.testing.assert_close(resized, torch.as_tensor(mask[:, ::2, ::2]))


@pytest.mark.parametrize(
    "intensity",
    [
        {"name": "NormalizeIntensity", "channel_wise": True},
        {
            "name": "ScaleIntensityRangePercentiles",
            "lower": 1,
            "upper": 99,
            "b_min": 0,
            "b_max": 1,
            "clip": True,
        },
    ],
)
def test_other_intensity_transforms(make_task: TaskOf, intensity: dict[str, object]) -> None:
    for picture in (
        np.random.default_rng(0).normal(1000, 50, (1, 16, 16)),
        np.full((1, 16, 16), 9),
    ):
        result = Preprocessing(make_task(intensity=intensity)).image(picture.astype(np.float32))
        assert result.isfinite().all() and result.abs().max() < 6


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in (*spatial_augmentations(), *photometric_augmentations())
        if name != "Rand3DElastic"
    ],
)
def test_every_augmentation_is_seeded_and_keeps_shapes(make_task: TaskOf, name: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "Rand2DElastic": {"spacing": [6, 6], "magnitude_range": [1, 2]},
        "RandAffine": {"rotate_range": 0.5, "translate_range": 3},
        "RandRotate": {"range_x": 0.5},
        "RandZoom": {"min_zoom": 0.7, "max_zoom": 1.3},
        "RandScaleIntensity": {"factors": 0.5},
        "RandScaleIntensityFixedMean": {"factors": 0.5},
        "RandStdShiftIntensity": {"factors": 0.5},
        "RandSimulateLowResolution": {"upsample_mode": "bilinear"},
        "RandCoarseShuffle": {"holes": 2, "spatial_size": 4},
        "RandShiftIntensity": {"offsets": 0.5},
        "RandCoarseDropout": {"holes": 2, "spatial_size": 4},
        "RandSmoothDeform": {"rand_size": [3, 3], "def_range": 0.3},
        "RandSmoothFieldAdjustContrast": {"rand_size": [3, 3]},
        "RandSmoothFieldAdjustIntensity": {"rand_size": [3, 3], "gamma": [0.5, 1.5]},
    }
    augment = Augmentation(make_task(augment=[{"name": name, "prob": 1.0, **needed.get(name, {})}]))
    images, masks = _disc()
    # A picture of two values has no contrast to change.
    images = 0.2 + 0.5 * images + torch.linspace(0, 0.1, 16)
    once = augment(images, masks, np.random.RandomState(5))
    twice = augment(images, masks, np.random.RandomState(5))
    other = augment(images, masks, np.random.RandomState(6))
    assert once[0].shape == images.shape and once[1].shape == masks.shape
    assert (
        once[0].dtype == torch.float32
        and once[1].dtype == torch.int64
        and set(once[1].unique().tolist()) <= {0, 1}
    )
    torch.testing.assert_close(once[0], twice[0], rtol=0, atol=0)
    torch.testing.assert_close(once[1], twice[1], rtol=0, atol=0)
    if name not in ("RandFlip", "RandRotate90"):  # two draws of these may well agree
        assert not torch.equal(once[0], other[0])
    if name in photometric_augmentations():
        torch.testing.assert_close(once[1], masks)
        assert not torch.equal(once[0], images)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "RandFlip", "spatial_axis": 1},
        {"name": "RandRotate90"},
        {"name": "RandAffine", "rotate_range": 1.0, "translate_range": 3, "padding_mode": "zeros"},
        {"name": "RandZoom", "min_zoom": 0.7, "max_zoom": 1.3},
        {"name": "Rand2DElastic", "spacing": [6, 6], "magnitude_range": [1, 2]},
        {
            "name": "RandSmoothDeform",
            "rand_size": [3, 3],
            "def_range": 0.3,
            "grid_mode": "bilinear",
        },
    ],
)
def test_image_and_mask_move_together(make_task: TaskOf, settings: dict[str, object]) -> None:
    images, masks = _disc()
    moved, target = Augmentation(make_task(augment=[{**settings, "prob": 1.0}]))(
        images, masks, np.random.RandomState(1)
    )
    assert not torch.equal(target, masks)
    disagreement = ((moved[:, 0] > 0.5) != (target == 1)).float().sum() / (target == 1).sum()
    assert disagreement < 0.25  # linear and nearest interpolation differ along the outline alone


@pytest.mark.parametrize(
    "target", [{}, {"target": "multilabel", "labels": ["a", "b"]}], ids=["binary", "multilabel"]
)
@pytest.mark.parametrize("prob", [1.0, 0.1])
def test_augmentations_that_change_the_size_are_refused(
    make_task: TaskOf, prob: float, target: dict[str, Any]
) -> None:
    zoom = {"name": "RandZoom", "prob": prob, "min_zoom": 0.5, "max_zoom": 0.6, "keep_size": False}
    for size, augment in (
        ([16, 24], {"name": "RandRotate90", "prob": prob}),
        ([16, 16], zoom),
        ([16, 16], {"name": "RandAffine", "prob": prob, "spatial_size": [8, 8]}),
        ([16, 16], {"name": "RandRotate90", "prob": prob, "spatial_axes": [0, 2]}),
    ):
        with pytest.raises(ConfigError, match=str(augment["name"])):
            Augmentation(make_task(size=size, augment=[augment], **target))
    turn = Augmentation(make_task(augment=[{"name": "RandRotate90", "prob": 1.0, "max_k": 1}]))
    with pytest.raises(ConfigError, match="RandRotate90"):  # images of another size than the task's
        turn(
            torch.rand(1, 1, 16, 24),
            torch.ones(1, 16, 24, dtype=torch.long),
            np.random.RandomState(0),
        )


def test_multilabel_and_class_targets(make_task: TaskOf) -> None:
    flip = [{"name": "RandFlip", "prob": 1.0, "spatial_axis": 0}]
    several = make_task(target="multilabel", labels=["a", "b"], augment=flip)
    images = torch.rand(2, 1, 16, 16)
    targets = torch.rand(2, 2, 16, 16).round()
    labels = torch.tensor([0, 2])
    moved = Augmentation(several)(images, targets, np.random.RandomState(0))[1]
    torch.testing.assert_close(moved, targets.flip(2))
    augmented, same = Augmentation(make_task("classification", augment=flip))(
        images, labels, np.random.RandomState(0)
    )
    assert same is labels
    torch.testing.assert_close(augmented, images.flip(2))


def test_masks_are_moved_by_the_nearest_pixel(make_task: TaskOf) -> None:
    turned = {"name": "RandAffine", "prob": 1.0, "rotate_range": 1.0, "padding_mode": "zeros"}
    modes: list[dict[str, object]] = [
        {},
        {"mode": ["bilinear", "nearest"]},
        {"mode": ["bilinear", "bilinear"]},
    ]
    moved = [
        Augmentation(make_task(augment=[turned | mode]))(*_disc(), np.random.RandomState(1))
        for mode in modes
    ]
    for images, masks in moved[1:]:
        assert torch.equal(images, moved[0][0]) and torch.equal(masks, moved[0][1])


def test_wrong_arguments(make_task: TaskOf) -> None:
    with pytest.raises(ConfigError, match="'probability'"):
        Augmentation(make_task(augment=[{"name": "RandFlip", "probability": 1}]))
    with pytest.raises(ConfigError, match="a_max"):
        Preprocessing(make_task(intensity={"name": "ScaleIntensityRange", "a_min": 0}))


TASK = load_task("phantom").to_dict()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("intensity", {"name": "GaussianSmooth", "sigma": 1e9}),
        ("intensity", {"name": "MedianSmooth", "radius": 3000}),
        (
            "augment",
            [{"name": "RandFlip"}, {"name": "RandZoom", "min_zoom": 4000, "max_zoom": 5000}],
        ),
    ],
)
def test_transforms_that_need_too_much_memory_are_refused(
    setting: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_trials(monkeypatch)
    name = value["name"] if isinstance(value, dict) else value[-1]["name"]
    with pytest.raises(ConfigError, match=rf"{setting} {name}"):
        try_task(load_task({**TASK, setting: value}), 4.0, "site A", "bounds.memory")


def test_transforms_that_take_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_trials(monkeypatch)
    monkeypatch.setattr(trial, "_SECONDS", 1)
    task = load_task({**TASK, "augment": [{"name": "RandGridDistortion", "num_cells": 10**7}]})
    with pytest.raises(ConfigError, match=r"RandGridDistortion.* 1 s"):
        try_task(task, 4.0, "site A", "bounds.memory")


@pytest.mark.parametrize(
    "network",
    [
        {"name": "unet", "channels": [8, 8], "num_res_units": 10**7},
        {"name": "UNet", "channels": [8, 8], "strides": [2], "num_res_units": 10**7},
    ],
)
def test_a_network_that_takes_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch, network: dict[str, Any]
) -> None:
    fork_trials(monkeypatch)
    monkeypatch.setattr(trial, "_SECONDS", 1)
    with pytest.raises(ConfigError, match=rf"^site A: network {network['name']}: more than 1 s"):
        try_task(load_task({**TASK, "network": network}), 4.0, "site A", "bounds.memory")


def test_the_trial_of_a_network_says_what_is_wrong_with_it() -> None:
    network = {"name": "unet", "channels": [8, 8], "chanels": 65}
    with pytest.raises(ConfigError, match=r"site A: network unet: .*'chanels'"):
        try_task(load_task({**TASK, "network": network}), 4.0, "site A")


def test_ordinary_arguments_are_accepted_and_common_ones_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    augment = [
        {"name": "RandGridDistortion"},
        {"name": "Rand2DElastic", "spacing": [8, 8], "magnitude_range": [0, 1]},
        {"name": "RandGaussianSmooth"},
        {"name": "RandCoarseDropout", "holes": 6, "spatial_size": 5},
        {"name": "RandAffine", "prob": 0.5, "spatial_size": [64, 64]},
        {"name": "RandBiasField"},
    ]
    changed = {"augment": augment, "intensity": {"name": "GaussianSmooth", "sigma": 2.0}}
    network = {"name": "unet", "channels": [8, 8], "num_res_units": 65}
    task = load_task({**TASK, **changed, "network": network})
    try_task(task, 4.0, "site A", "bounds.memory")
    monkeypatch.setattr(trial, "_problem", None)
    intensity = {
        "name": "ScaleIntensityRange",
        "a_min": -1000,
        "a_max": 1e6,
        "b_min": 0,
        "b_max": 1,
    }
    try_task(load_task({**TASK, "intensity": intensity}), 4.0, "site A", "bounds.memory")
