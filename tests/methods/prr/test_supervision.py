"""PRR's loss on images and pixels: every kind of task as softmax problems, prototypes, the losses it is compared with."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers.small_tasks import stacked
from medflare.methods.prr.supervision import (
    SitePrototypes,
    Supervision,
    class_logits,
    class_names,
    class_targets,
    class_totals,
    prototype_width,
)
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site
from methods.squares import BINARY_CLASSIFICATION, CLASSIFICATION, MULTICLASS, MULTILABEL, SEGMENTATION, SITES, enrolled, site

UNEVEN = (8, 4, 5)  # three training images of classes 0 and 1, two of class 2

# ---- tasks as softmax problems ------------------------------------------------------------------------------------------------


def test_every_task_is_a_group_of_softmax_problems() -> None:
    logits = torch.arange(2 * 3 * 2 * 2.0).reshape(2, 3, 2, 2)
    grouped = class_logits(logits, MULTICLASS)
    assert grouped.shape == (1, 2, 3, 4) and torch.equal(grouped[0, 1, :, 1], logits[1, :, 0, 1])
    assert class_targets(torch.arange(8).reshape(2, 2, 2), MULTICLASS).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    pairs = class_logits(logits[:, :2], MULTILABEL)
    assert pairs.shape == (2, 2, 2, 4)
    torch.testing.assert_close(pairs.softmax(2)[1, 1, 1, 1], logits[1, 1, 0, 1].sigmoid())
    assert class_targets(torch.tensor([[[[0.0, 1.0]], [[1.0, 1.0]]]]), MULTILABEL).tolist() == [[[0, 1]], [[1, 1]]]
    assert class_logits(torch.zeros(4, 1), BINARY_CLASSIFICATION).shape == (1, 4, 2, 1)
    assert class_targets(torch.zeros(4, dtype=torch.long), BINARY_CLASSIFICATION).shape == (1, 4, 1)


def test_class_totals_count_negatives_where_only_positives_are_counted() -> None:
    sites = {name: site(name, MULTILABEL) for name in SITES}
    totals = class_totals(MULTILABEL, {name: enrolled(data) for name, data in sites.items()})
    targets = torch.cat([data.data.train.targets for data in sites.values()])
    for g in range(2):
        assert totals[g].tolist() == [(targets[:, g] == 0).sum(), (targets[:, g] == 1).sum()]
    assert class_names(MULTILABEL) == [("not square", "square"), ("not corner", "corner")]
    everything = class_totals(CLASSIFICATION, {name: enrolled(site(name, CLASSIFICATION, UNEVEN)) for name in SITES})
    assert everything.tolist() == [[9, 9, 6]]


def supervision(data: Site, kind: str, global_: Tensor | None = None, totals: Tensor | None = None) -> Supervision:
    totals = class_totals(data.task, {"A": enrolled(data)}) if totals is None else totals
    return Supervision(data, kind, beta=0.8, tau=3.0, totals=totals, global_=global_)


def dice_of(supervised: Supervision, logits: Tensor, targets: Tensor) -> Tensor:
    assert supervised._dice is not None
    return supervised._dice(logits, targets)


@pytest.mark.parametrize("task", [SEGMENTATION, MULTILABEL, MULTICLASS, CLASSIFICATION, BINARY_CLASSIFICATION])
def test_supervision_without_imbalance_is_cross_entropy_and_dice(task: TaskConfig) -> None:
    data = site("A", task)
    images, targets, _ = next(iter(data.ordered("train")))
    logits = data.network()(images)
    equal = torch.ones_like(class_totals(task, {"A": enrolled(data)}))
    found = supervision(data, "global", totals=equal)(logits, targets)
    if task.target == "multiclass":
        expected = functional.cross_entropy(logits, targets)
    else:
        expected = functional.binary_cross_entropy_with_logits(logits, targets.reshape(logits.shape).float())
    if task.kind == "segmentation":
        expected = expected + dice_of(supervision(data, "ce"), logits, targets)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(supervision(data, "ce")(logits, targets), expected)
    torch.testing.assert_close(supervision(data, "task")(logits, targets), data.loss(logits, targets))
    skewed = equal.clone()
    skewed[:, 0] = 1000
    assert supervision(data, "global", totals=skewed)(logits, targets) < found  # less competition for the common class


def test_comparison_losses() -> None:
    data = site("A", CLASSIFICATION, UNEVEN)
    images, targets, _ = next(iter(data.ordered("train")))
    logits = data.network()(images)
    weight = torch.tensor([8 / 9, 8 / 9, 8 / 6])
    expected = (functional.cross_entropy(logits, targets, reduction="none") * weight[targets]).mean()
    torch.testing.assert_close(supervision(data, "fedeamc")(logits, targets), expected)
    p = logits.softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(supervision(data, "focal")(logits, targets), (-(1 - p).square() * p.log()).mean())


def test_refinement_weighs_the_classes_that_are_far_from_the_others() -> None:
    data = site("A", CLASSIFICATION)
    images, targets, _ = next(iter(data.ordered("train")))
    logits, local = data.network()(images), torch.eye(3)
    opposite = local.clone()
    opposite[1] = torch.tensor([1.0, 0.0, 0.0])
    refined = supervision(data, "local", opposite)
    refined.refine(local)
    torch.testing.assert_close(refined.gamma, torch.tensor([[1.0, 4 / 3, 1.0]]))
    assert refined.gamma is not None
    expected = (functional.cross_entropy(logits, targets, reduction="none") * refined.gamma[0][targets]).mean()
    torch.testing.assert_close(refined(logits, targets), expected)
    without = supervision(data, "global", opposite)
    without.refine(local)
    assert without.gamma is None


@pytest.mark.parametrize("task", [SEGMENTATION, MULTILABEL, CLASSIFICATION])
def test_prototypes_are_masked_means_of_the_features(task: TaskConfig) -> None:
    data = site("A", task)
    network = data.network().eval()
    gathered = SitePrototypes(task, prototype_width(task), "cpu")
    with torch.no_grad():
        for images, targets, _ in data.ordered("train"):
            gathered.add(network.features_and_output(images)[0], targets)
        embeddings = network.features_and_output(stacked(data.data.train).images)[0]
    targets = data.data.train.targets if task.target == "multilabel" else data.data.train.targets[:, None]
    rows = embeddings.movedim(1, -1)
    expected = torch.stack(
        [rows[targets[:, g] == c].mean(0) for g in range(targets.shape[1]) for c in range(3 if task is CLASSIFICATION else 2)]
    )
    torch.testing.assert_close(gathered.state()["prototypes"], expected, rtol=1e-4, atol=1e-5)
    assert gathered.state()["present"].all()


def test_a_smaller_feature_map_sees_the_nearest_labels() -> None:
    gathered = SitePrototypes(SEGMENTATION, 1, "cpu")
    targets = torch.zeros(1, 16, 16, dtype=torch.long)
    targets[0, :8, :8] = 1
    gathered.add(torch.tensor([[[[5.0, 1.0], [2.0, 3.0]]]]), targets)
    assert gathered.state()["prototypes"].flatten().tolist() == [2.0, 5.0] and gathered.state()["present"].tolist() == [True, True]
