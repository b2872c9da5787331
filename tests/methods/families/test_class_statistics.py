"""Statistics by class: each formula against NumPy, torch or scikit-learn, and what small or absent classes do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn import functional

from helpers.volume_sites import PATCHES, TASK, make_sites
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.federation.local.loop import run_local
from medflare.federation.suppression import Suppression
from medflare.methods import copied_state
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.families.class_statistics.fed_gaussian import (
    GAUSSIANS,
    FedGaussianServer,
    FedGaussianSite,
    calibrated,
    drawn,
)
from medflare.methods.families.class_statistics.fedproto import (
    PROTOTYPES,
    FedProtoServer,
    FedProtoSite,
    prototype_distance,
    prototype_head,
)
from medflare.methods.families.class_statistics.ridge import (
    STATISTICS,
    RidgeServer,
    RidgeSite,
    ridge_weights,
)
from medflare.methods.families.class_statistics.statistics import (
    class_moments,
    feature_rows,
    head_of,
    pooled_covariances,
    pooled_means,
    with_head,
)
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import FedAvgSite
from medflare.tasks.annotation import Annotation
from methods import squares

PAIRS: dict[str, tuple[type[Any], type[Any]]] = {
    "fedproto": (FedProtoSite, FedProtoServer),
    "fed_gaussian": (FedGaussianSite, FedGaussianServer),
    "ridge": (RidgeSite, RidgeServer),
}
TASKS = (
    "SEGMENTATION",
    "MULTICLASS",
    "MULTILABEL",
    "CLASSIFICATION_WITH_BATCH_NORM",
    "BINARY_CLASSIFICATION",
)


def drawn_features(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def collected(algorithm: Any, network: Any) -> tuple[Tensor, Tensor]:
    """Features (M, D) and classes (G, M) of all training images or pixels."""
    parts = list(feature_rows(algorithm.site, network))
    return torch.cat([rows for rows, _ in parts]), torch.cat([labels for _, labels in parts], 1)


def assert_bits(first: StateDict, second: StateDict) -> None:
    assert squares.equal(first, second)


# -- what all have in common ----------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("task", TASKS)
def test_every_target_works_with_a_site_that_misses_the_first_round(name: str, task: str) -> None:
    played = squares.federation(
        *PAIRS[name],
        getattr(squares, task),
        absent=lambda step, site: site == "C" and step.round == 0,
    )
    for algorithm in played.algorithms.values():
        models = algorithm.finalize(played.server.configure_final(algorithm.site.name))
        for tensor in models["deployed"].states["model"].values():
            assert tensor.isfinite().all()
    assert not played.server.context.events.of("warning")


@pytest.mark.parametrize("name", PAIRS)
def test_volumes_in_patches_and_whole(name: str, tmp_path: Path) -> None:
    root = make_sites(tmp_path, ("A", "BB"))
    for task in (PATCHES, TASK):
        results = run_local(name, task, ["A", "BB"], rounds=1, seed=0, data_root=root)
        assert results["status"] == "COMPLETED", results["reason"]
        for site in results["sites"].values():
            assert site["metrics"]["deployed"]["dice"] is not None


@pytest.mark.parametrize("name", PAIRS)
def test_algorithms_rebuilt_before_every_task_give_the_same_bits(name: str, tmp_path: Path) -> None:
    models = []
    for store in (None, tmp_path):
        played = squares.federation(*PAIRS[name], store=store)
        last = played.algorithms["A"].finalize(played.server.configure_final("A"))
        models.append(last["deployed"].states["model"])
    assert_bits(models[0], models[1])


@pytest.mark.parametrize("name", PAIRS)
def test_a_head_that_is_not_linear_with_bias_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="network vgg16_slim is not one linear layer"):
        squares.plan_of(*PAIRS[name], squares.VGG)


@pytest.mark.parametrize("name", ["fedproto", "fed_gaussian"])
def test_patches_of_several_labels_are_refused_as_negatives_are_not_counted(name: str) -> None:
    task = squares.task(target="multilabel", labels=["square", "corner"], image_mode="patch")
    with pytest.raises(ConfigError, match="pixels without a label are not counted"):
        get_method(name).check({}, task)


@pytest.mark.parametrize("task", TASKS)
def test_moments_are_numpys(task: str) -> None:
    algorithm = squares.algorithm(RidgeSite, task=getattr(squares, task))
    network = algorithm.site.network()
    features, labels = collected(algorithm, network)
    means, covariances = class_moments(algorithm.site, network)
    classes = len(means) // len(labels)
    for row in range(len(means)):
        chosen = features[labels[row // classes] == row % classes].numpy()
        assert len(chosen) > 1
        np.testing.assert_allclose(means[row], chosen.mean(axis=0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(covariances[row], np.cov(chosen.T), rtol=1e-3, atol=1e-6)


def test_pooled_moments_are_those_of_the_union() -> None:
    parts = [drawn_features(5, 3, seed=1) + 2, drawn_features(9, 3, seed=2), drawn_features(0, 3)]
    means = torch.stack([part.mean(dim=0) if len(part) else part.sum(dim=0) for part in parts])
    spread = torch.stack([part.T.cov() if len(part) else torch.zeros(3, 3) for part in parts])
    samples = torch.tensor([[5.0], [9.0], [0.0]], dtype=torch.float64)
    union = torch.cat(parts)
    torch.testing.assert_close(pooled_means(means[:, None], samples)[0], union.mean(dim=0))
    pooled = pooled_covariances(spread[:, None], means[:, None], samples)[0]
    torch.testing.assert_close(pooled, union.T.cov())


def test_head_of_and_with_head_are_inverse() -> None:
    for task in (squares.SEGMENTATION, squares.MULTICLASS, squares.BINARY_CLASSIFICATION):
        state = squares.start(task)
        assert_bits(with_head(state, *head_of(state)), state)
        weight, bias = head_of(state)
        moved = with_head(state, weight + 1, bias + 2)
        assert head_of(moved)[0].equal(weight + 1) and head_of(moved)[1].equal(bias + 2)


@pytest.mark.parametrize("name", PAIRS)
def test_statistics_of_zeros_are_an_event_and_change_nothing(name: str) -> None:
    site_class, server_class = PAIRS[name]
    members = squares.algorithms(site_class)
    server = squares.server(server_class, algorithms=members, rounds=1)
    phase = "class_statistics" if name == "fed_gaussian" else "train"
    step = next(step for step in server.steps() if step.phase == phase)
    replies = {}
    for site, algorithm in members.items():
        algorithm.site.annotation = Annotation(algorithm.site.task)
        algorithm.site.annotation.complete = site == "A"  # B and C annotated other structures
        replies[site] = algorithm.perform(phase, step.round, server.configure(step, site))
    server.aggregate(step, replies)
    assert [event["site"] for event in server.context.events.of("warning")] == ["B", "C"]
    alone = squares.server(server_class, algorithms=members, rounds=1)
    alone.aggregate(step, {"A": replies["A"]})
    for entry, state in alone.memory.states.items():
        assert_bits(server.memory.states[entry], state)


@pytest.mark.parametrize("target", ["multiclass", "multilabel"])
def test_a_small_class_is_suppressed(target: str) -> None:
    """Of several labels all rows: those of a label and its negatives add up to what other labels show."""
    task = squares.MULTICLASS if target == "multiclass" else squares.MULTILABEL
    for site_class, phase, entry in (
        (FedProtoSite, "train", PROTOTYPES[0]),
        (RidgeSite, "train", STATISTICS),
        (FedGaussianSite, "class_statistics", GAUSSIANS[0]),
    ):
        algorithm = squares.algorithm(site_class, task=task)
        train = algorithm.site.data.train
        few = train.targets == 2 if target == "multiclass" else train.targets[:, 1]
        few[2:] = 0
        if target == "multiclass":
            train.targets[2:][train.targets[2:] == 2] = 0
        request = (
            Message() if site_class is FedProtoSite else Message({"model": squares.start(task)})
        )
        reply = algorithm.perform(phase, 0, request)
        declared = algorithm.phase(phase)
        algorithm.site.minimum_patients = 3
        sent = Suppression(algorithm.site).suppressed(reply, declared, algorithm.plan)
        first = next(iter(sent[entry].values()))
        if target == "multilabel" or site_class is RidgeSite:
            for tensor in sent[entry].values():
                assert not tensor.any()
        else:
            assert first.flatten(1).any(dim=1).tolist() == [True, True, False]


# -- FedProto -------------------------------------------------------------------------------------


def test_distance_to_prototypes_by_hand() -> None:
    """Class 0: mean (2, 0), prototype (1, 1); class 1: no prototype; class 2: not in the batch."""
    features = torch.tensor([[1.0, 0.0], [3.0, 0.0], [7.0, 7.0]])
    labels = torch.tensor([[[0], [0], [1]]])
    prototypes = torch.tensor([[1.0, 1.0], [0.0, 0.0], [9.0, 9.0]])
    assert prototype_distance(features, labels, prototypes) == 2.0
    maps = features.T.reshape(1, 2, 3, 1)  # the same as three pixels
    assert prototype_distance(maps, labels.reshape(1, 1, 3), prototypes) == 2.0


def test_the_head_predicts_the_nearest_prototype() -> None:
    features = drawn_features(20, 4)
    prototypes = drawn_features(3, 4, seed=1)
    distances = torch.cdist(features, prototypes).square()
    logits = functional.linear(features, *prototype_head(prototypes, squares.MULTICLASS))
    torch.testing.assert_close(logits.softmax(1), (-distances).softmax(1))
    prototypes[1] = 0
    logits = functional.linear(features, *prototype_head(prototypes, squares.MULTICLASS))
    assert not (logits.argmax(1) == 1).any()
    pair = drawn_features(4, 4, seed=2)
    distances = torch.cdist(features, pair).square()
    logits = functional.linear(features, *prototype_head(pair, squares.MULTILABEL))
    expected = distances[:, ::2] - distances[:, 1::2]
    torch.testing.assert_close(logits, expected)


def trained_personal(lam: float) -> tuple[Any, Any]:
    played = squares.run("fedproto", lam=lam)
    return played.algorithms["A"], played.server


def test_without_the_term_a_site_trains_alone() -> None:
    alone = squares.algorithm(FedAvgSite, server_class=FedAvgServer)
    state = squares.start()
    for round in range(2):
        state = alone.perform("train", round, Message({"model": state})).states["model"]
    personal, _ = trained_personal(0.0)
    assert_bits(personal.personal, state)
    pulled, _ = trained_personal(1.0)
    assert not squares.equal(pulled.personal, state)


def test_the_term_pulls_prototypes_together() -> None:
    """The sites' backgrounds differ, and so do their features."""
    apart = {}
    for lam in (0.0, 10.0):
        played = squares.run("fedproto", rounds=3, lam=lam)
        last = [turn for turn in played.log if turn.step.phase == "train"][-1]
        sent = torch.stack([reply.states["prototypes"]["means"] for reply in last.replies.values()])
        apart[lam] = float((sent - sent.mean(dim=0)).square().sum())
    assert apart[10.0] < 0.5 * apart[0.0]


def test_only_prototypes_leave_and_absent_classes_keep_theirs() -> None:
    members = squares.algorithms(FedProtoSite)
    server = squares.server(FedProtoServer, algorithms=members)
    replies = {}
    for site, algorithm in members.items():
        replies[site] = algorithm.perform("train", 0, Message())
        assert replies[site].states.keys() == {"prototypes"}
    server.aggregate(Step("train", 0), replies)
    before = server.prototypes["means"]
    counts = torch.stack([site.site.class_counts() for site in members.values()]).double()
    sent = torch.stack([reply.states["prototypes"]["means"] for reply in replies.values()])
    weighted = (sent * counts[:, :, None]).sum(dim=0) / counts.sum(dim=0)[:, None]
    torch.testing.assert_close(before, weighted.float())
    replies["A"].states["prototypes"]["means"][1] = 0
    server.aggregate(Step("train", 1), {"A": replies["A"]})
    assert server.prototypes["means"][1].equal(before[1])
    torch.testing.assert_close(server.prototypes["means"][0], sent[0, 0])


def test_suppressed_counts_weigh_classes_equally() -> None:
    members = squares.algorithms(FedProtoSite, squares.CLASSIFICATION_WITH_BATCH_NORM)
    server = squares.server(FedProtoServer, algorithms=members)
    for enrolled in server.context.site_counts.values():
        enrolled["class_counts"] = []
    replies = {}
    for site, algorithm in members.items():
        replies[site] = algorithm.perform("train", 0, Message())
    server.aggregate(Step("train", 0), replies)
    sent = torch.stack([reply.states["prototypes"]["means"] for reply in replies.values()])
    torch.testing.assert_close(server.prototypes["means"], sent.mean(dim=0))


# -- CCVR -----------------------------------------------------------------------------------------


def test_drawn_features_have_the_moments() -> None:
    root = drawn_features(2, 3, 3)
    covariances = root @ root.mT
    centres = drawn_features(2, 3, seed=1)
    samples = drawn(centres, covariances, drawn_features(2, 40000, 3, seed=2))
    for row in range(2):
        torch.testing.assert_close(samples[row].mean(dim=0), centres[row], atol=0.05, rtol=0)
        torch.testing.assert_close(samples[row].T.cov(), covariances[row], atol=0.1, rtol=0.05)
    flat = drawn(centres, 0 * covariances, drawn_features(2, 5, 3))
    torch.testing.assert_close(flat, centres[:, None].expand(2, 5, 3))


def test_the_head_learns_the_present_classes() -> None:
    centres = torch.tensor([[4.0, 0.0], [0.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    samples = centres[:, None] + drawn_features(3, 50, 2)
    weight = drawn_features(3, 2, seed=5)
    bias = torch.zeros(3)
    present = torch.tensor([True, False, True])
    new, offset = calibrated(weight, bias, samples, present, squares.MULTICLASS, 50)
    assert new[1].equal(weight[1]) and offset[1] == 0
    scores = functional.linear(samples[[0, 2]], new, offset)[..., [0, 2]]
    assert (scores.argmax(dim=-1) == torch.tensor([[0], [1]])).double().mean() > 0.97
    alone = torch.tensor([True, False, False])
    assert calibrated(weight, bias, samples, alone, squares.MULTICLASS, 50)[0].equal(weight)


def test_each_label_learns_from_its_own_features() -> None:
    """Of the label "corner" (rows 2, 3) only: the other output does not change."""
    samples = drawn_features(4, 50, 2) + 4 * torch.arange(4)[:, None, None]
    weight = torch.zeros(2, 2)
    bias = torch.zeros(2)
    present = torch.tensor([True, False, True, True])
    new, offset = calibrated(weight, bias, samples, present, squares.MULTILABEL, 50)
    assert not new[0].any() and not offset[0]
    scores = functional.linear(samples[2:], new, offset)[..., 1]
    assert ((scores > 0) == torch.tensor([[False], [True]])).double().mean() > 0.97


def test_without_steps_the_model_is_fedavgs() -> None:
    expected = squares.run("fedavg")
    played = squares.run("fed_gaussian", head_steps=0, selection="last")
    assert_bits(played.model, expected.model)
    steps = [(step.phase, step.part) for step in played.server.steps()]
    assert steps[-3:] == [("validate", 0), ("class_statistics", 0), ("validate", 1)]


def test_only_the_head_changes() -> None:
    task = squares.CLASSIFICATION_WITH_BATCH_NORM
    expected = squares.run("fedavg", task).model
    played = squares.run("fed_gaussian", task, selection="last")
    model = played.server.configure_final("A").states["model"]
    changed = {name for name in model if not model[name].equal(expected[name])}
    assert changed == {"head.weight", "head.bias"}
    record = played.server.best.record
    assert [candidate["round"] for candidate in record] == [1, 2, 2]


# -- Fed3R ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_ridge_is_scikit_learns_on_all_images(task: str) -> None:
    played = squares.run("ridge", getattr(squares, task), rounds=1, lam=0.5, selection="last")
    rows = []
    labels = []
    for algorithm in played.algorithms.values():
        network = algorithm.site.network()
        features, classes = collected(algorithm, network)
        rows.append(functional.pad(features, (0, 1), value=1.0))
        labels.append(classes)
    classes = torch.cat(labels, dim=1)
    wanted = 2 * classes.T - 1
    if played.algorithms["A"].site.task.target == "multiclass":
        wanted = functional.one_hot(classes[0])
    model = Ridge(alpha=0.5, fit_intercept=False).fit(torch.cat(rows).numpy(), wanted.numpy())
    coefficients = torch.as_tensor(model.coef_).reshape(wanted.shape[1], -1)
    weight, bias = head_of(played.model)
    torch.testing.assert_close(weight.double(), coefficients[:, :-1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(bias.double(), coefficients[:, -1], rtol=1e-3, atol=1e-4)


def test_the_division_of_images_over_sites_does_not_matter() -> None:
    rows = drawn_features(30, 5)
    targets = drawn_features(30, 2, seed=1)
    whole = ridge_weights(rows.T @ rows, targets.T @ rows, 0.1)
    for sizes in ([10, 10, 10], [1, 25, 4]):
        parts = list(zip(rows.split(sizes), targets.split(sizes), strict=True))
        a = sum(part.T @ part for part, _ in reversed(parts))
        b = sum(wanted.T @ part for part, wanted in reversed(parts))
        torch.testing.assert_close(ridge_weights(a, b, 0.1), whole)


def test_a_late_site_adds_its_statistics() -> None:
    """Also one that is gone in the second round; the head learns what the initial one does not know."""
    task = squares.CLASSIFICATION_WITH_BATCH_NORM
    complete = squares.run("ridge", task, rounds=1)
    late = squares.federation(
        RidgeSite,
        RidgeServer,
        task,
        rounds=2,
        absent=lambda step, site: (step.round, site) in {(0, "C"), (1, "A")},
    )
    first = next(iter(late.server.memory.family(STATISTICS)))
    assert first == "A"
    squares.assert_close(late.model, complete.model)
    assert not squares.equal(complete.model, squares.start(task))


def test_statistics_that_cannot_be_solved_change_nothing() -> None:
    members = squares.algorithms(RidgeSite, sites=("A",))
    server = squares.server(RidgeServer, algorithms=members, lam=1.0)
    step = Step("train", 0)
    reply = members["A"].perform("train", 0, server.configure(step, "A"))
    reply.states["ridge"]["A"] = -torch.eye(len(reply.states["ridge"]["A"]), dtype=torch.float64)
    server.aggregate(step, {"A": reply})
    assert_bits(server.model, squares.start())
    assert server.context.events.of("warning")


# -- suppression -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prr", "fedproto", "fed_gaussian", "ridge"])
@pytest.mark.parametrize("shown", [1, 5])
def test_patients_are_counted_at_the_resolution_of_the_features(name: str, shown: int) -> None:
    """All 12 patients have the class 2, but not all at a position of the features, which are at
    every eighth pixel: the row would be that of one patient."""
    network = {"name": "AutoEncoder", "channels": [4, 8], "strides": [8, 2], "norm": "instance"}
    task = squares.task(
        network={**network, "up_kernel_size": 1},
        target="multiclass",
        labels=["background", "square", "corner"],
        size=[32, 32],
    )
    method = get_method(name)
    one = squares.algorithm(method.site_class, "A", task, server_class=method.server_class)
    targets = torch.zeros_like(one.site.data.train.targets)
    targets[:, :16, :16] = 1
    targets[:, 17, 19] = 2
    targets[:shown, 24, 24] = 2
    train = replace(one.site.data.train, targets=targets)
    one.site.data = replace(one.site.data, train=train)
    server = squares.server(method.server_class, task, algorithms={"A": one}, outside=())
    one.site.minimum_patients = 5
    if name == "fed_gaussian":
        start = copied_state(one.site.network())
        request = Message({"model": start}, {"selected_round": 0})
        reply = one.perform("class_statistics", 1, request)
    else:
        reply = one.perform("train", 0, server.configure(Step("train", 0), "A"))
    (state,) = (state for entry, state in reply.states.items() if entry != "model")
    for tensor in state.values():
        if name == "ridge":
            assert tensor.any() == (shown == 5)
            continue
        assert tensor[:2].any(), "other classes are sent"
        assert tensor[2].any() == (shown == 5)
