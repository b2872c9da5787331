"""A round at a PRR site: stages, teachers and students, losses and prototypes of every kind of task; every option has its effect."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers.small_tasks import stacked
from medflare.core.errors import ConfigError
from medflare.core.states import StateDict
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.prr.server import PRRServer
from medflare.methods.prr.site import PRRSite
from medflare.methods.prr.transfer import SitePrototypes, Supervision, class_logits, class_targets, class_totals, prototype_width
from medflare.tasks.classes import class_names
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site
from methods import squares
from methods.squares import BINARY_CLASSIFICATION, CLASSIFICATION, MULTICLASS, MULTILABEL, SEGMENTATION, SITES, enrolled, equal, site

UNEVEN = (8, 4, 5)  # three training images of classes 0 and 1, two of class 2

federation = partial(squares.federation, PRRSite, PRRServer)


def server_of(algorithms: dict[str, Any], rounds: int = 2, **hyper: Any) -> Any:
    return squares.server(PRRServer, rounds=rounds, outside=(), algorithms=algorithms, **hyper)


# ---- DET ----------------------------------------------------------------------------------------------------------------------


def stages_of(epochs: int, **hyper: Any) -> list[list[int]]:
    log, _, _ = federation(squares.task(local_epochs=epochs), sites=("A",), rounds=2, **hyper)
    return [replies["A"].meta["stages"] for step, _, replies in log if step.phase == "train"]


def test_stages_of_a_round() -> None:
    assert stages_of(3, lam1=0.0, lam2=0.0) == [[1, 2, 3], [1, 2, 3]]
    assert stages_of(3, lam1=0.0, lam2=0.0, det_steps="RE") == [[1, 2, 2], [1, 2, 2]]
    assert stages_of(3, lam1=0.0, lam2=0.0, det_steps="E") == [[2, 2, 2], [2, 2, 2]]
    assert stages_of(3, lam1=9.0, lam2=9.0)[1] == [1, 1, 1]
    assert stages_of(2, det=False) == [[], []]


def test_one_epoch_a_round_goes_through_all_stages() -> None:
    """The code's machine begins every round anew, so a round of one epoch would never recover nor sublimate."""
    assert stages_of(1, lam1=9.0, lam2=9.0)[1] == [1]
    assert stages_of(1, lam1=0.0, lam2=9.0)[1] == [2]
    assert stages_of(1, lam1=0.0, lam2=0.0)[1] == [3]
    assert stages_of(1, lam1=0.0, lam2=0.0, det_steps="RE")[1] == [2]


def after_one_round(clip: float | None, epochs: int = 2, **hyper: Any) -> tuple[StateDict, StateDict]:
    changes = {"local_epochs": epochs} if clip is None else {"local_epochs": epochs, "clip": {"norm": clip}}
    algorithm = squares.algorithms(PRRSite, squares.task(**changes), cpa="global", **hyper)["A"]
    server = server_of({"A": algorithm}, **hyper)
    reply = algorithm.perform("train", 0, server.configure(Step("train", 0), "A"))
    return algorithm.personal, {**algorithm.normalisation, **reply.states["model"]}


@pytest.mark.parametrize("clip", [None, 0.01])
def test_teachers_are_not_touched_by_their_students(clip: float | None) -> None:
    """Nor by the length of their gradients, where a step limits it."""
    alone, _ = after_one_round(clip, det=False)
    personal, deputy = after_one_round(clip, lam1=9.0, lam2=9.0)  # Recover only: P_k learns from labels alone
    assert equal(personal, alone)
    assert not equal(deputy, alone)
    alone, _ = after_one_round(clip, epochs=1, det=False)
    personal, deputy = after_one_round(clip, epochs=1, lam1=0.0, lam2=0.0)  # Sublimate only: D_k does
    assert equal(deputy, alone)
    assert not equal(personal, alone)


def test_the_personal_model_is_never_overwritten() -> None:
    algorithms = squares.algorithms(PRRSite)
    server = server_of(algorithms, rounds=3)
    for step in server.steps()[:3]:
        before = {name: algorithm.personal for name, algorithm in algorithms.items()}
        started = {}
        for name, algorithm in algorithms.items():
            personal, deputy = algorithm._models(server.configure(step, name))
            started[name] = dict(personal.state_dict())
            if before[name] is not None:
                assert equal(started[name], before[name])
                assert not equal(deputy.state_dict(), before[name])
        server.aggregate(
            step, {name: algorithm.perform("train", step.round, server.configure(step, name)) for name, algorithm in algorithms.items()}
        )


def rates(task: TaskConfig, rounds: int, **hyper: Any) -> list[list[float]]:
    """The learning rate of every step, by round."""
    found: list[list[float]] = []
    for round in range(rounds):
        algorithm = squares.algorithms(PRRSite, task, cpa="off", det=False, **hyper)["A"]
        optimizer, steps = algorithm.site.optimizer, list[float]()

        def spied(parameters: Any, optimizer: Any = optimizer, steps: list[float] = steps, **override: Any) -> torch.optim.Optimizer:
            made = optimizer(parameters, **override)
            made.register_step_pre_hook(lambda used, _args, _options: steps.append(used.param_groups[0]["lr"]))
            return made

        algorithm.site.optimizer = spied
        algorithm.perform("train", round, server_of({"A": algorithm}).configure(Step("train", round), "A"))
        found.append(steps)
    return found


def test_the_paper_halves_the_rate_after_every_25_epochs() -> None:
    found = rates(squares.task(local_epochs=10, batch_size=12), rounds=6)
    assert found[0] == found[1] == [0.01] * 10
    assert found[2] == [0.01] * 5 + [0.005] * 5, "the 25th epoch ends in the middle of a round"
    assert found[5] == [0.0025] * 10
    assert rates(squares.task(local_epochs=10, batch_size=12), rounds=6, halve_every=0)[5] == [0.01] * 10


# ---- curves -------------------------------------------------------------------------------------------------------------------


def test_the_retrogress_of_a_round_is_measured_on_request() -> None:
    """Fig. 1a: the model before aggregation beside the model that the next round begins with."""
    log, _, algorithms = federation(rounds=3, retrogress=True)
    for before, after in pairwise(log):
        for name in algorithms:
            trained = before.replies[name].meta["validation_trained"]
            assert trained.keys() == {"global", "personal"}
            assert trained["personal"] == after.replies[name].meta["validation"]["personal"], "P_k is never overwritten"
    for name, algorithm in algorithms.items():  # of the last round both parts of the trained deputy are at hand
        reply = log[-2].replies[name]
        deputy = algorithm.network("expected", {**algorithm.normalisation, **reply.states["model"]})
        assert algorithm.validation(deputy) == reply.meta["validation_trained"]["global"]
    assert "validation_trained" not in federation(rounds=1)[0][0].replies["A"].meta


def test_gamma_has_a_curve_for_every_class() -> None:
    log, _, _ = federation(squares.task(local_epochs=3), rounds=3, tau=1.0)
    first, last = log[0].replies["A"].meta, log[2].replies["A"].meta
    assert "gammas" not in first, "there is no refinement before there are prototypes"
    assert last["gammas"].keys() == {"not square", "square"} and all(len(curve) == 3 for curve in last["gammas"].values())
    assert last["gamma"] == {name: curve[-1] for name, curve in last["gammas"].items()}
    assert all(value >= 0.999 for curve in last["gammas"].values() for value in curve) and max(last["gamma"].values()) > 1.0
    assert "gammas" not in federation(rounds=3, cpa="global")[0][2].replies["A"].meta


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
    balanced = torch.ones_like(class_totals(task, {"A": enrolled(data)}))
    found = supervision(data, "global", totals=balanced)(logits, targets)
    if task.target == "multiclass":
        expected = functional.cross_entropy(logits, targets)
    else:
        expected = functional.binary_cross_entropy_with_logits(logits, targets.reshape(logits.shape).float())
    if task.kind == "segmentation":
        expected = expected + dice_of(supervision(data, "ce"), logits, targets)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(supervision(data, "ce")(logits, targets), expected)
    torch.testing.assert_close(supervision(data, "task")(logits, targets), data.loss(logits, targets))
    skewed = balanced.clone()
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
    collected = SitePrototypes(task, prototype_width(task), "cpu")
    with torch.no_grad():
        for images, targets, _ in data.ordered("train"):
            collected.add(network.features_and_output(images)[0], targets)
        embeddings = network.features_and_output(stacked(data.data.train).images)[0]
    targets = data.data.train.targets if task.target == "multilabel" else data.data.train.targets[:, None]
    rows = embeddings.movedim(1, -1)
    expected = torch.stack(
        [rows[targets[:, g] == c].mean(0) for g in range(targets.shape[1]) for c in range(3 if task is CLASSIFICATION else 2)]
    )
    torch.testing.assert_close(collected.state()["prototypes"], expected, rtol=1e-4, atol=1e-5)
    assert collected.state()["present"].all()


def test_a_smaller_feature_map_sees_the_nearest_labels() -> None:
    collected = SitePrototypes(SEGMENTATION, 1, "cpu")
    targets = torch.zeros(1, 16, 16, dtype=torch.long)
    targets[0, :8, :8] = 1
    collected.add(torch.tensor([[[[5.0, 1.0], [2.0, 3.0]]]]), targets)
    assert collected.state()["prototypes"].flatten().tolist() == [2.0, 5.0] and collected.state()["present"].tolist() == [True, True]


# ---- options ------------------------------------------------------------------------------------------------------------------

CHANGES: list[dict[str, Any]] = [
    {"pfa": False},
    {"r0": 0.1},
    {"r1": 0.5},
    {"components": "amplitude"},
    {"components": "phase"},
    {"det": False},
    {"det_steps": "E"},
    {"det_steps": "RE"},
    {"lam1": 0.0, "lam2": 5.0},
    {"lam2": 5.0},
    {"cpa": "global"},
    {"cpa": "local"},
    {"cpa": "off"},
    {"cpa": "off", "plain_loss": "ce"},
    {"cpa": "off", "plain_loss": "focal"},
    {"cpa": "off", "plain_loss": "fedeamc"},
    {"beta": 0.2},
    {"tau": 1.0},
    {"halve_every": 1},
]


@pytest.fixture(scope="module")
def outcomes() -> Callable[..., StateDict]:
    """What two rounds of three epochs leave behind, by setting: site A's personal model and the one it would be sent next."""
    known = {}

    def outcome(**hyper: Any) -> StateDict:
        key = tuple(sorted(hyper.items()))
        if key not in known:
            settings: dict[str, Any] = {"lam1": 0.0, "lam2": 0.0, **hyper}
            _, server, algorithms = federation(squares.task(local_epochs=3), sites=("A", "B"), rounds=2, **settings)
            known[key] = algorithms["A"].personal | {f"next/{name}": tensor for name, tensor in server.aggregated["A"].items()}
        return known[key]

    return outcome


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_option_changes_the_result(outcomes: Callable[..., StateDict], change: dict[str, Any]) -> None:
    found = outcomes(**change)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert not equal(found, outcomes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r0": 0.4, "r1": 0.3}, "r0"),
        ({"lam1": 0.9, "lam2": 0.7}, "lam1"),
        ({"r1": 0.6}, "r1"),
        ({"tau": 0.5}, "tau"),
        ({"components": "amp"}, "components"),
    ],
)
def test_impossible_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_method("prr").check(change)
