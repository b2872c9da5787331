import math
from typing import Any

import pytest
import torch
from monai import losses
from torch.nn import functional

from helpers.fixture_types import Golden, TaskOf
from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.tasks.losses import LOSSES, build_loss, example_batch, pools_images


def test_cross_entropy(make_task: TaskOf) -> None:
    logits = torch.tensor([[2.0, 0, 0], [0, 0, 0]])
    targets = torch.tensor([0, 2])
    single = math.log(math.exp(2) + 2) - 2
    assert build_loss(make_task("classification"))(logits, targets).item() == pytest.approx(
        (single + math.log(3)) / 2
    )
    weighted = build_loss(make_task("classification", loss={"name": "ce", "weights": [1, 1, 3]}))
    assert weighted(logits, targets).item() == pytest.approx((single + 3 * math.log(3)) / 4)


def test_sigmoid_cross_entropy(make_task: TaskOf) -> None:
    logits = torch.randn(2, 1, 4, 4)
    targets = torch.randint(0, 2, (2, 4, 4))
    expected = functional.binary_cross_entropy_with_logits(logits[:, 0], targets.float())
    torch.testing.assert_close(
        build_loss(make_task(loss={"name": "ce"}))(logits, targets), expected
    )
    several = make_task(
        target="multilabel", labels=["a", "b"], loss={"name": "ce", "weights": [2, 5]}
    )
    zeros = torch.zeros(1, 2, 2, 2)
    ones = torch.ones(1, 2, 2, 2)
    assert build_loss(several)(zeros, ones).item() == pytest.approx(3.5 * math.log(2))
    findings = make_task(
        "classification", target="multilabel", labels=["a", "b"], loss={"name": "ce"}
    )
    assert build_loss(findings)(torch.zeros(3, 2), torch.ones(3, 2)).item() == pytest.approx(
        math.log(2)
    )
    one = make_task("classification", target="binary", labels=["sick"])
    assert build_loss(one)(torch.zeros(3, 1), torch.tensor([0, 1, 1])).item() == pytest.approx(
        math.log(2)
    )


def test_dice_by_hand(make_task: TaskOf) -> None:
    logits = torch.full((1, 1, 2, 2), -100.0)
    logits[0, 0, 0] = 100  # predicts the first row: two pixels
    targets = torch.tensor([[[1, 0], [1, 0]]])  # true: the first column
    loss = build_loss(make_task(loss={"name": "dice"}))
    assert loss(logits, targets).item() == pytest.approx(1 - 2 * 1 / 4, abs=1e-4)
    assert loss(logits, (logits[:, 0] > 0).long()).item() == pytest.approx(0, abs=1e-4)


def test_batch_dice_does_not_punish_empty_images(make_task: TaskOf) -> None:
    logits = torch.full((2, 1, 2, 2), -100.0)
    logits[0] = 100
    targets = torch.tensor([[[1, 1], [1, 1]], [[0, 0], [0, 0]]])
    targets_missed = torch.tensor([[[1, 1], [1, 1]], [[0, 0], [0, 1]]])
    per_image = build_loss(make_task(loss={"name": "dice", "batch": False}))
    pooled = build_loss(make_task(loss={"name": "dice", "batch": True}))
    assert pooled(logits, targets).item() == pytest.approx(0, abs=1e-4)
    assert per_image(logits, targets_missed).item() == pytest.approx(0.5, abs=1e-4)
    assert pooled(logits, targets_missed).item() == pytest.approx(1 - 8 / 9, abs=1e-4)


def test_sum_of_dice_and_cross_entropy(make_task: TaskOf) -> None:
    logits = torch.randn(2, 1, 4, 4)
    targets = torch.randint(0, 2, (2, 4, 4))
    dice = build_loss(make_task(loss={"name": "dice"}))(logits, targets)
    entropy = build_loss(make_task(loss={"name": "ce"}))(logits, targets)
    weighted = {"name": "dice_ce", "dice_weight": 0.5, "ce_weight": 2.0}
    both = build_loss(make_task(loss=weighted))(logits, targets)
    torch.testing.assert_close(both, 0.5 * dice + 2 * entropy)


def test_sum_of_dice_and_focal_loss(make_task: TaskOf) -> None:
    logits = torch.randn(2, 3, 4, 4)
    targets = torch.randint(0, 3, (2, 4, 4))
    settings = {"target": "multiclass", "labels": ["background", "disc", "cup"]}
    structures = {"name": "dice", "batch": True, "include_background": False}
    dice = build_loss(make_task(**settings, loss=structures))(logits, targets)
    focal = build_loss(make_task(**settings, loss={"name": "focal", "gamma": 1}))(logits, targets)
    loss = structures | {"name": "dice_focal", "gamma": 1}
    both = build_loss(make_task(**settings, loss=loss))(logits, targets)
    torch.testing.assert_close(both, dice + focal / 3)


def test_focal_loss_of_fed_isic_and_of_the_baselines(make_task: TaskOf, golden: Golden) -> None:
    reference = golden("flamby_isic_focal")
    focal = {
        "name": "focal",
        "gamma": float(reference["gamma"]),
        "weights": reference["alpha"].tolist(),
    }
    task = make_task("classification", labels=list("abcdefgh"), loss=focal)
    loss = build_loss(task)(torch.tensor(reference["logits"]), torch.tensor(reference["targets"]))
    assert loss.item() == pytest.approx(float(reference["loss"]), rel=1e-5)
    reference = golden("baselines")
    loss = build_loss(make_task("classification", loss={"name": "focal"}))
    value = loss(
        torch.tensor(reference["bs/logits"], dtype=torch.float32), torch.tensor(reference["y"])
    )
    assert value.item() == pytest.approx(float(reference["focal/gamma2"]), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "gamma"), [("classification", 0.0), ("classification", 1.0), ("segmentation", 0.5)]
)
def test_focal_has_a_gradient_where_the_network_is_certain(
    make_task: TaskOf, kind: str, gamma: float
) -> None:
    shape = (2, 3) if kind == "classification" else (2, 1, 4, 4)
    logits = torch.full(shape, -50.0)
    logits[:, 0] = 50.0
    logits.requires_grad_()
    targets = (
        torch.zeros(2, dtype=torch.long)
        if kind == "classification"
        else torch.ones(2, 4, 4, dtype=torch.long)
    )
    build_loss(make_task(kind, loss={"name": "focal", "gamma": gamma}))(logits, targets).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_a_loss_has_a_gradient_on_empty_masks(make_task: TaskOf) -> None:
    for name in ("dice", "ce", "dice_ce", "dice_focal", "focal"):
        logits = torch.randn(2, 1, 4, 4, requires_grad=True)
        build_loss(make_task(loss={"name": name}))(
            logits, torch.zeros(2, 4, 4, dtype=torch.long)
        ).backward()
        assert (
            logits.grad is not None and logits.grad.isfinite().all() and logits.grad.abs().sum() > 0
        )


@pytest.mark.parametrize(
    ("kind", "loss", "named"),
    [
        ("segmentation", {"name": "dise"}, "dise"),
        ("segmentation", {"name": "dice", "batches": True}, "batches"),
        ("classification", {"name": "dice"}, "dice"),
        ("classification", {"name": "ce", "weights": [1, 2]}, "weights"),
        ("classification", {"name": "focal", "gamma": -1.0}, "gamma"),
        ("classification", {"name": "focal", "gamma": 0.5}, "gamma"),
        ("classification", {"name": "focal", "gamma": 50.0}, "single image"),
        ("segmentation", {"name": "FocalLoss", "gamma": 50.0}, "single image"),
        ("segmentation", {"name": "FocalLoss", "gamma": -4.0}, "single image"),
        ("segmentation", {"name": "DiceFocalLoss", "gamma": math.nan}, "single image"),
        ("segmentation", {"name": "HausdorffDTLoss", "alpha": 18.0}, "single image"),
        ("segmentation", {"name": "LogHausdorffDTLoss", "alpha": -1.0}, "single image"),
        ("segmentation", {"name": "TverskyLoss", "alpha": -0.9}, "single image"),
        ("segmentation", {"name": "DiceLoss", "smooth_dr": -50.0}, "single image"),
        ("segmentation", {"name": "DiceLoss", "smooth_nr": 1e6}, "single image"),
        ("segmentation", {"name": "focal", "weights": [2.0]}, "focal"),
        ("segmentation", {"name": "DiceLoss", "batched": True}, "batched"),
        ("segmentation", {"name": "DiceLoss", "to_onehot_y": True}, "to_onehot_y"),
        ("segmentation", {"name": "DiceLoss", "reduction": "none"}, "DiceLoss"),
        ("segmentation", {"name": "PerceptualLoss"}, "PerceptualLoss"),
    ],
)
def test_a_wrong_loss_is_refused(
    make_task: TaskOf, kind: str, loss: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        build_loss(make_task(kind, loss=loss))


LOSS_SETTINGS = [
    *({"name": name} for name in LOSSES),
    {"name": "dice", "batch": True},
    {"name": "dice_ce", "batch": True},
    {"name": "dice_ce", "squared": True},
    {"name": "dice_focal", "batch": True},
    *({"name": name, "weights": [1.0, 2.0, 5.0]} for name in ("ce", "dice_ce", "focal")),
]


@pytest.mark.parametrize("kind", ["binary", "multiclass", "multilabel"])
@pytest.mark.parametrize("settings", LOSS_SETTINGS, ids=str)
def test_a_loss_says_whether_it_is_the_mean_over_images(
    make_task: TaskOf, kind: str, settings: dict[str, object]
) -> None:
    if kind == "binary":
        settings = {key: value for key, value in settings.items() if key != "weights"}
    task = make_task(
        target=kind, labels=["a"] if kind == "binary" else ["a", "b", "c"], loss=settings
    )
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, task.outputs, 6, 6, generator=generator)
    classes = (
        torch.rand(4, 6, 6, generator=generator) * torch.tensor([0.4, 1.0, 1.5, 2.9]).view(4, 1, 1)
    ).long()
    targets = {
        "binary": classes.clamp(max=1),
        "multiclass": classes,
        "multilabel": (logits * 0 + classes[:, None]).clamp(max=1),
    }[kind]
    loss = build_loss(task)
    one_by_one = torch.stack([loss(logits[i : i + 1], targets[i : i + 1]) for i in range(4)]).mean()
    same = torch.isclose(loss(logits, targets), one_by_one, rtol=1e-5)
    assert bool(same) == (pools_images(task) is None), pools_images(task)


THREE: dict[str, Any] = {"target": "multiclass", "labels": ["a", "b", "c"]}
TARGETS: dict[str, dict[str, Any]] = {
    "binary": {},
    "multiclass": THREE,
    "multilabel": {"target": "multilabel", "labels": ["a", "b"]},
}
USUAL = (
    "DiceCELoss",
    "DiceFocalLoss",
    "DiceLoss",
    "FocalLoss",
    "GeneralizedDiceLoss",
    "TverskyLoss",
    "SSIMLoss",
    "HausdorffDTLoss",
)


def test_activation_and_one_hot_follow_from_the_target() -> None:
    binary = small_task()
    multiclass = small_task(**THREE)
    logits, targets = example_batch(binary)
    expected = losses.TverskyLoss(sigmoid=True)(logits, targets.float())
    torch.testing.assert_close(
        build_loss(binary, {"name": "TverskyLoss"})(logits, targets), expected
    )
    logits, targets = example_batch(multiclass)
    expected = losses.DiceFocalLoss(softmax=True, to_onehot_y=True)(logits, targets[:, None])
    torch.testing.assert_close(
        build_loss(multiclass, {"name": "DiceFocalLoss"})(logits, targets), expected
    )
    chosen = build_loss(
        multiclass, {"name": "DiceLoss", "sigmoid": True, "include_background": False}
    )
    expected = losses.DiceLoss(sigmoid=True, include_background=False, to_onehot_y=True)(
        logits, targets[:, None]
    )
    torch.testing.assert_close(chosen(logits, targets), expected)
    weighted = build_loss(multiclass, {"name": "DiceCELoss", "weight": [1.0, 2.0, 0.5]})
    assert weighted(logits, targets) != build_loss(multiclass, {"name": "DiceCELoss"})(
        logits, targets
    )


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("target", TARGETS)
def test_usual_losses_accept_every_target_in_two_and_three_dimensions(
    name: str, target: str
) -> None:
    for changes in ({}, {"spatial_dims": 3, "size": [16, 16, 16]}):
        task = small_task(**{**TARGETS[target], **changes})
        assert build_loss(task, {"name": name})(*example_batch(task)).ndim == 0
        if "Dice" in name and name != "HausdorffDTLoss":
            task = small_task(
                "classification",
                **{"target": "binary", "labels": ["a"], **TARGETS[target], **changes},
            )
            assert build_loss(task, {"name": name})(*example_batch(task)).ndim == 0


def test_a_loss_of_monai_is_not_for_private_training() -> None:
    assert "ce, dice or focal" in str(pools_images(small_task(loss={"name": "DiceFocalLoss"})))
