"""MONAI's losses by name: on a task's logits and targets they give what MONAI gives."""

from typing import Any

import pytest
import torch
from monai import losses

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.tasks.library_losses import library_losses, trial
from medflare.tasks.losses import build_loss, pools_images

THREE: dict[str, Any] = {"target": "multiclass", "labels": ["a", "b", "c"]}
TWO: dict[str, Any] = {"target": "multilabel", "labels": ["a", "b"]}
TARGETS: dict[str, dict[str, Any]] = {"binary": {"target": "binary", "labels": ["a"]}, "multiclass": THREE, "multilabel": TWO}


def test_activation_and_one_hot_follow_from_the_target() -> None:
    binary, multiclass = small_task(), small_task(**THREE)
    logits, targets = trial(binary)
    expected = losses.TverskyLoss(sigmoid=True)(logits, targets.float())
    torch.testing.assert_close(build_loss(binary, {"name": "TverskyLoss"})(logits, targets), expected)
    logits, targets = trial(multiclass)
    expected = losses.DiceFocalLoss(softmax=True, to_onehot_y=True)(logits, targets[:, None])
    torch.testing.assert_close(build_loss(multiclass, {"name": "DiceFocalLoss"})(logits, targets), expected)
    own = build_loss(multiclass, {"name": "DiceLoss", "sigmoid": True, "include_background": False})
    expected = losses.DiceLoss(sigmoid=True, include_background=False, to_onehot_y=True)(logits, targets[:, None])
    torch.testing.assert_close(own(logits, targets), expected)


@pytest.mark.parametrize(
    "name",
    ["DiceCELoss", "DiceFocalLoss", "DiceLoss", "FocalLoss", "GeneralizedDiceLoss", "GeneralizedDiceFocalLoss", "TverskyLoss", "MCCLoss"],
)
@pytest.mark.parametrize("kind", ["segmentation", "classification"])
@pytest.mark.parametrize("target", TARGETS)
def test_usual_ones_take_every_target_in_two_and_three_dimensions(name: str, kind: str, target: str) -> None:
    for changes in ({}, {"spatial_dims": 3, "size": [16, 16, 16]}):
        task = small_task(kind, **TARGETS[target], **changes)
        logits, targets = trial(task)
        assert build_loss(task, {"name": name})(logits, targets).ndim == 0


def test_class_weights() -> None:
    task = small_task(**THREE)
    logits, targets = trial(task)
    weighted = build_loss(task, {"name": "DiceCELoss", "weight": [1.0, 2.0, 0.5]})(logits, targets)
    assert weighted != build_loss(task, {"name": "DiceCELoss"})(logits, targets)


def test_every_name_works_or_is_refused() -> None:
    usable, lines = set(), dict[str, str]()
    for name in library_losses():
        try:
            build_loss(small_task(), {"name": name})
            usable.add(name)
        except ConfigError as refused:
            lines[name] = str(refused)
    assert all(name in line for name, line in lines.items())
    assert {"SSIMLoss", "HausdorffDTLoss", "SoftDiceclDiceLoss", "DiceLoss"} <= usable
    assert "PerceptualLoss" in lines, "it would download weights"
    assert not {"BoxGIoULoss", "BendingEnergyLoss", "MaskedLoss"} & usable


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"name": "DiceLos"}, "DiceLos"),
        ({"name": "DiceLoss", "batched": True}, "batched"),
        ({"name": "DiceLoss", "to_onehot_y": True}, "to_onehot_y"),
        ({"name": "DiceLoss", "reduction": "none"}, "DiceLoss"),
        ({"name": "TverskyLoss", "reduction": "most"}, "TverskyLoss"),
    ],
)
def test_a_loss_or_argument_that_monai_lacks_is_refused(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_loss(small_task(), spec)


def test_a_loss_that_pools_images_is_not_for_private_training() -> None:
    assert pools_images(small_task(loss={"name": "DiceFocalLoss"})) is None
    assert (pools_images(small_task(loss={"name": "DiceFocalLoss", "batch": True}))) is not None
