import math
from typing import Any

import pytest
import torch

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.tasks.annotation import Annotation, marginal_logits
from medflare.tasks.losses import build_loss
from medflare.tasks.metrics import measure

ORGANS = ["background", "liver", "spleen", "kidney"]
LOSSES: tuple[dict[str, Any], ...] = (
    {"name": "ce"},
    {"name": "ce", "weights": [1, 2, 3, 4]},
    {"name": "dice"},
    {"name": "dice", "include_background": False},
    {"name": "dice_ce", "weights": [1, 2, 3, 4], "batch": True},
    {"name": "focal"},
    {"name": "focal", "weights": [1, 2, 3, 4]},
    {"name": "TverskyLoss", "alpha": 0.3, "beta": 0.7},
    {"name": "DiceFocalLoss", "include_background": False, "weight": [2, 3, 4]},
    {"name": "GeneralizedDiceLoss"},
)


def organs(**changes: Any) -> Any:
    return small_task(**{"target": "multiclass", "labels": ORGANS, **changes})


def drawn(outputs: int = 4) -> torch.Tensor:
    return torch.randn(
        2, outputs, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def test_classes_that_are_not_annotated_join_the_background() -> None:
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(
        marginal_logits(p.log(), [0, 2]).softmax(dim=1),
        torch.tensor([[0.8, 0.2]], dtype=torch.float64),
    )
    torch.testing.assert_close(
        marginal_logits(p.log() + 7, [0, 1, 3]).softmax(dim=1),
        torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64),
    )
    assert marginal_logits(p, [0, 1, 2, 3]) is p


def test_cross_entropy_by_hand() -> None:
    annotation = Annotation(organs(loss={"name": "ce"}), ["liver"])
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 2).T[None].log()  # one image of two pixels
    targets = torch.tensor([[0, 1]])
    assert annotation.loss()(p, targets).item() == pytest.approx(
        -(math.log(0.7) + math.log(0.3)) / 2
    )


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_every_loss_is_that_of_a_task_of_merged_classes(loss: dict[str, Any]) -> None:
    annotation = Annotation(organs(loss=loss), ["liver", "kidney"])
    logits = drawn().float().requires_grad_()
    targets = torch.arange(512).remainder(3).reshape(2, 16, 16)
    as_stored = torch.tensor([0, 1, 3])[targets]
    merged = torch.stack(
        [logits[:, [0, 2]].exp().sum(dim=1).log(), logits[:, 1], logits[:, 3]], dim=1
    )
    chosen = {name: value for name, value in loss.items() if name not in ("weights", "weight")}
    if "weights" in loss:
        chosen["weights"] = [1, 2, 4]
    if "weight" in loss:
        chosen["weight"] = [2, 4]
    alone = build_loss(organs(labels=["background", "liver", "kidney"], loss=chosen))
    value = annotation.loss()(logits, as_stored)
    torch.testing.assert_close(value, alone(merged, targets))
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.isfinite().all() and gradient[:, 1].abs().sum() > 0


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_all_annotated_is_the_task_loss_bit_by_bit(loss: dict[str, Any]) -> None:
    task = organs(loss=loss)
    logits = drawn().float()
    targets = torch.arange(512).remainder(4).reshape(2, 16, 16)
    for names in (None, ["liver", "spleen", "kidney"], ORGANS):
        assert torch.equal(
            Annotation(task, names).loss()(logits, targets), build_loss(task)(logits, targets)
        )


def test_a_prediction_of_a_structure_that_is_not_annotated_has_no_loss() -> None:
    """The truth says background, because the spleen is not annotated."""
    loss = Annotation(organs(loss={"name": "ce"}), ["liver"]).loss()
    sure_of_spleen = torch.zeros(1, 4, 1)
    sure_of_spleen[:, 2] = 30
    assert loss(sure_of_spleen, torch.zeros(1, 1, dtype=torch.long)).item() == pytest.approx(
        0, abs=1e-6
    )
    assert (
        build_loss(organs(loss={"name": "ce"}))(sure_of_spleen, torch.zeros(1, 1, dtype=torch.long))
        > 20
    )


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "ce", "weights": [1, 2, 3]},
        {"name": "dice"},
        {"name": "dice_ce"},
        {"name": "dice_focal", "include_background": False},
        {"name": "focal", "weights": [1, 2, 3]},
    ],
    ids=str,
)
@pytest.mark.parametrize("names", [["cup"], ["disc", "vessel"]])
def test_sigmoid_outputs_that_are_not_annotated_have_no_gradient(
    loss: dict[str, Any], names: list[str]
) -> None:
    labels = ["disc", "vessel", "cup"]
    annotation = Annotation(small_task(target="multilabel", labels=labels, loss=loss), names)
    logits = drawn(3).float().requires_grad_()
    targets = (drawn(3) > 0.5).float()
    (gradient,) = torch.autograd.grad(annotation.loss()(logits, targets), logits)
    for place, label in enumerate(labels):
        assert bool(gradient[:, place].any()) == (label in names)


def test_a_focal_loss_of_one_sigmoid_keeps_its_weight() -> None:
    task = small_task(
        target="multilabel", labels=["disc", "cup"], loss={"name": "focal", "weights": [1, 5]}
    )
    plain = small_task(target="multilabel", labels=["cup"], loss={"name": "focal"})
    logits = drawn(2).float()
    targets = (drawn(2) > 0.5).float()
    expected = 5 * build_loss(plain)(logits[:, 1:], targets[:, 1:])
    torch.testing.assert_close(Annotation(task, ["cup"]).loss()(logits, targets), expected)


@pytest.mark.parametrize("kept", [[], [0], [1, 2]])
def test_the_background_and_a_structure_must_remain(kept: list[int]) -> None:
    with pytest.raises(ValueError, match=str(kept).replace("[", r"\[")):
        marginal_logits(torch.zeros(1, 4), kept)


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_a_site_without_labels_has_no_loss(kind: str) -> None:
    annotation = Annotation(small_task(kind), [])
    assert annotation.names == () and not annotation.complete
    with pytest.raises(ConfigError, match="run mean_teacher"):
        annotation.loss()(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize("names", [["background"], ["heart"], ["liver", "heart"]])
def test_an_unknown_name_or_a_classification_is_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=names[-1] if "heart" in names else "annotated"):
        Annotation(organs(), names)
    with pytest.raises(ConfigError, match="annotated"):
        Annotation(small_task("classification"), ["dark"])


def test_label_values_may_name_structures_that_are_not_annotated() -> None:
    values = {label: [number] for number, label in enumerate(ORGANS)}
    assert Annotation(organs(label_values=values), ["liver"]).reduced.labels == (
        "background",
        "liver",
    )


def test_metrics_are_of_the_annotated_structures() -> None:
    """The model finds a spleen, which is an error only where the spleen is annotated."""
    task = organs()
    truth = torch.zeros(1, 16, 16, dtype=torch.long)
    truth[:, :4] = 1
    answer = truth.clone()
    answer[:, 8:] = 2
    probabilities = torch.nn.functional.one_hot(answer, 4).movedim(-1, 1).float()

    def scores(names: list[str] | None) -> Any:
        return measure(
            [(probabilities, truth, None)], task, ["dice", "iou"], Annotation(task, names)
        ).scores(["a"])

    assert (
        scores(["liver"]).values == {"dice": 1.0, "iou": 1.0}
        and not scores(["liver"]).left_out["dice"]
    )
    assert scores(None).values["dice"] == 0.5 and scores(["liver", "spleen"]).values["dice"] == 0.5
    undefined = scores(["kidney"])
    assert (
        undefined.values["dice"] is None
        and undefined.undefined["dice"]
        and undefined.left_out["dice"] == 1
    )


def test_codes_of_structures_that_are_not_annotated_do_no_harm() -> None:
    codes = {name: {"value": "1", "meaning": name} for name in ORGANS[1:]}
    annotation = Annotation(organs(codes=codes), ["liver"])
    assert annotation.reduced.labels == ("background", "liver")
    assert annotation.loss()(drawn(), torch.zeros(2, 16, 16, dtype=torch.long)).isfinite()


@pytest.mark.parametrize("name", ["DiceLoss", "FocalLoss", "DiceFocalLoss"])
def test_the_weight_of_the_only_annotated_structure_counts(name: str) -> None:
    logits = drawn(2).float()
    targets = (drawn(2) > 0).float()

    def value(weight: list[float], **changes: Any) -> float:
        task = organs(loss={"name": name, "weight": weight}, **changes)
        return Annotation(task, ["liver"]).loss()(logits, targets).item()

    labels = {"target": "multilabel", "labels": ["liver", "spleen"]}
    assert value([5, 1], **labels) == pytest.approx(5 * value([1, 1], **labels))


def test_the_weight_of_the_only_class_beside_the_background_counts() -> None:
    logits = drawn().float()
    targets = torch.arange(512).remainder(2).reshape(2, 16, 16)

    def value(*weight: float) -> float:
        loss = {"name": "DiceLoss", "include_background": False, "weight": list(weight)}
        return Annotation(organs(loss=loss), ["liver"]).loss()(logits, targets).item()

    assert value(5, 1, 1) == pytest.approx(5 * value(1, 1, 1))
