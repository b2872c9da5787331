"""MONAI's losses by name: on a task's logits and targets they give what MONAI gives."""

from typing import Any

import pytest
import torch
from monai import losses

from medflare.core.errors import ConfigError
from medflare.tasks.library_losses import library_losses, trial
from medflare.tasks.losses import build_loss, pools_images
from small import small_task

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
    if (name, target) == ("DiceCELoss", "multilabel") or (name, kind) == ("MCCLoss", "classification"):
        return  # refused, see below
    for changes in ({}, {"spatial_dims": 3, "size": [16, 16, 16]}):
        task = small_task(kind, **TARGETS[target], **changes)
        logits, targets = trial(task)
        assert build_loss(task, {"name": name})(logits, targets).ndim == 0


@pytest.mark.parametrize("target", ["multiclass", "multilabel"])
def test_many_classes_are_no_obstacle(target: str) -> None:
    for kind in ("segmentation", "classification"):
        task = small_task(kind, target=target, labels=[f"label {number}" for number in range(15)])
        for name in ("DiceLoss", "FocalLoss", "GeneralizedDiceLoss", "TverskyLoss"):
            build_loss(task, {"name": name})


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_what_has_no_sigmoid_is_refused_where_several_labels_may_be_true(kind: str) -> None:
    """DiceCELoss has a softmax in its cross entropy, whatever its activation: a second true label would be a mistake to it."""
    task = small_task(kind, target="multilabel", labels=["a", "b", "c"])
    for spec in ({"name": "DiceCELoss"}, {"name": "DiceCELoss", "lambda_ce": 0.05}, {"name": "DiceLoss", "softmax": True}):
        with pytest.raises(ConfigError, match=rf"^loss {spec['name']}: of task .*, its outputs compete as in a softmax.*or take ce"):
            build_loss(task, spec)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("AsymmetricUnifiedFocalLoss", ["segmentation", "classification"]),  # takes logits for probabilities and cuts them off at 0 and 1
        ("AUCMLoss", ["segmentation", "classification"]),  # wants numbers from 0 to 1 too
        ("JukeboxLoss", ["segmentation", "classification"]),
        ("GlobalMutualInformationLoss", ["segmentation", "classification"]),
        ("LocalNormalizedCrossCorrelationLoss", ["segmentation", "classification"]),
        ("MCCLoss", ["classification"]),  # the rest finds nothing in one pixel
        ("HausdorffDTLoss", ["classification"]),
        ("LogHausdorffDTLoss", ["classification"]),
        ("BoundaryLoss", ["classification"]),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_what_does_not_teach_logits_is_refused(name: str, kinds: list[str], target: str) -> None:
    for kind in kinds:
        with pytest.raises(ConfigError, match=rf"^loss {name}: .*(no worse|no gradient|finite number|does not take logits)"):
            build_loss(small_task(kind, **TARGETS[target]), {"name": name})


def test_the_first_of_several_labels_is_no_background() -> None:
    task = small_task(**TWO)
    loss = build_loss(task, {"name": "HausdorffDTLoss"})  # leaves the first output out by itself
    logits, targets = trial(task)
    (gradient,) = torch.autograd.grad(loss(logits.requires_grad_(), targets), logits)
    assert bool((gradient.abs().sum(dim=(0, 2, 3)) > 0).all())
    with pytest.raises(ConfigError, match="loss DiceLoss: of task squares, it finds wrong logits of a no worse than right ones"):
        build_loss(task, {"name": "DiceLoss", "include_background": False})


def test_class_weights() -> None:
    task = small_task(**THREE)
    logits, targets = trial(task)
    weighted = build_loss(task, {"name": "DiceCELoss", "weight": [1.0, 2.0, 0.5]})(logits, targets)
    assert weighted != build_loss(task, {"name": "DiceCELoss"})(logits, targets)


def test_every_name_works_or_is_refused_in_one_line() -> None:
    usable, lines = set(), dict[str, str]()
    for name in library_losses():
        try:
            build_loss(small_task(), {"name": name})
            usable.add(name)
        except ConfigError as refused:
            lines[name] = str(refused)
    assert all(line.startswith(f"loss {name}: ") and "\n" not in line for name, line in lines.items())
    assert {"SSIMLoss", "HausdorffDTLoss", "SoftDiceclDiceLoss", "DiceLoss"} <= usable
    assert "weights it would download" in lines["PerceptualLoss"]
    assert not {"BoxGIoULoss", "BendingEnergyLoss", "MaskedLoss"} & usable


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": "DiceLos"}, r"loss: unknown loss 'DiceLos'; did you mean DiceLoss"),
        ({"name": "DiceLoss", "batched": True}, r"loss DiceLoss: unknown argument 'batched'; did you mean batch"),
        ({"name": "DiceLoss", "to_onehot_y": True}, r"loss DiceLoss: unknown argument 'to_onehot_y'"),
        ({"name": "DiceLoss", "reduction": "none"}, r"loss DiceLoss: "),
        ({"name": "TverskyLoss", "reduction": "most"}, r"loss TverskyLoss: "),
    ],
)
def test_bad_losses(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        build_loss(small_task(), spec)


def test_what_mixes_images_is_not_for_private_training() -> None:
    assert pools_images(small_task(loss={"name": "DiceFocalLoss"})) is None
    assert "not the mean of its images' losses" in str(pools_images(small_task(loss={"name": "DiceFocalLoss", "batch": True})))
