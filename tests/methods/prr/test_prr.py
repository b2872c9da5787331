"""PRR on small generated images: rounds, losses and prototypes, aggregation, ablations, absent sites, final models."""

import math
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from medflare.core.hyper import build_hyper
from medflare.core.message import Message
from medflare.core.rng import torch_generator
from medflare.core.states import StateDict, batch_norm_entries, split_state, weighted_mean
from medflare.methods.base import Step
from medflare.methods.catalogue import build_deployed
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.parts.class_groups import class_totals
from medflare.methods.prr.fourier import fourier_aggregate, frequency_ratio
from medflare.methods.prr.hyper import PRRSiteHyper
from medflare.methods.prr.server import PRRServer
from medflare.methods.prr.site import PRRSite
from medflare.methods.prr.transfer import SitePrototypes, Supervision
from medflare.networks.catalogue import feature_width
from medflare.tasks.annotation import Annotation
from medflare.tasks.classes import class_names
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site
from methods import squares
from methods.squares import (
    BINARY_CLASSIFICATION,
    CLASSIFICATION,
    MULTICLASS,
    MULTILABEL,
    SEGMENTATION,
    SITES,
    enrolled,
    equal,
    site,
)

UNEVEN = (8, 4, 5)  # three training images of classes 0 and 1, two of class 2
federation = partial(squares.federation, PRRSite, PRRServer)


def server_of(algorithms: dict[str, Any], rounds: int = 2, **hyper: Any) -> Any:
    return squares.server(PRRServer, rounds=rounds, outside=(), algorithms=algorithms, **hyper)


def test_batch_normalisation_and_the_personal_model_never_leave_the_site() -> None:
    log, server, algorithms = federation()
    local = batch_norm_entries(algorithms["A"].site.network())
    assert local and {step.phase for step, _, _ in log} == {"train", "validate"}
    for _, outgoing, replies in log:
        for message in [*outgoing.values(), *replies.values()]:
            for state in message.states.values():
                assert not local & state.keys()
            assert message.states.keys() <= {"model", "prototypes"}
    assert not equal(algorithms["A"].normalisation, algorithms["B"].normalisation)
    assert server.models() == {}  # no whole model is known to the server


# ---- aggregation --------------------------------------------------------------------------------------------------------------


def test_without_its_parts_and_batch_normalisation_it_is_fedavg() -> None:
    server = federation(squares.WITHOUT_BATCH_NORM, pfa=False, det=False, cpa="off").server
    fedavg = squares.federation(
        FedAvgSite,
        FedAvgServer,
        squares.WITHOUT_BATCH_NORM,
        weighting="uniform",
        reset_optimizer=True,
    )
    assert equal(server.mean, fedavg.model)
    assert equal(server.aggregated["B"], fedavg.model)


def test_the_server_calls_fourier_aggregate_with_the_frequency_ratio_of_the_round() -> None:
    log, server, _ = federation(rounds=3)
    sent = [outgoing["A"].states["model"] for _, outgoing, _ in log]
    assert not equal(server.aggregated["A"], server.aggregated["B"])
    ratios = [frequency_ratio(round, 3) for round in range(3)]
    for round, ratio in enumerate(ratios):
        replies = log[round][2]
        stacked = torch.stack([replies[name].states["model"]["head.weight"] for name in SITES])
        torch.testing.assert_close(
            sent[round + 1]["head.weight"], fourier_aggregate(stacked, ratio, classifier=True)[0]
        )
        bias = torch.stack([replies[name].states["model"]["head.bias"] for name in SITES])
        torch.testing.assert_close(sent[round + 1]["head.bias"], bias.mean(0))


def test_absent_sites_keep_their_model_and_late_sites_start_from_the_mean() -> None:
    def absent(step: Step, name: str) -> bool:
        return step.phase == "train" and (
            (name == "B" and step.round == 1) or (name == "C" and step.round < 2)
        )

    log, server, algorithms = federation(rounds=3, absent=absent)
    after_first = server_of(algorithms, 3)
    after_first.aggregate(log[0][0], log[0][2])
    # Two rounds later, still that of round 0.
    assert equal(log[2][1]["B"].states["model"], after_first.aggregated["B"])
    # Only A trained in round 1.
    assert equal(log[2][1]["C"].states["model"], log[1][2]["A"].states["model"])
    assert set(log[1][2]) == {"A"} and set(server.aggregated) == set(SITES)


# ---- all kinds of tasks, and what data may lack -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task", [MULTILABEL, MULTICLASS, squares.VGG, BINARY_CLASSIFICATION, squares.WITHOUT_BATCH_NORM]
)
def test_it_trains_on_every_kind_of_task(task: TaskConfig) -> None:
    log, server, algorithms = federation(task, outside=("O",))
    losses = [replies["A"].meta["loss"] for step, _, replies in log if step.phase == "train"]
    for loss in losses:
        assert math.isfinite(loss)
    assert server.prototypes["prototypes"].abs().sum() > 0
    for model in algorithms["A"].finalize(server.configure_final("A")).values():
        assert torch.isfinite(
            build_deployed(task, model)(algorithms["A"].site.data.test.images)
        ).all()
    assert bool(server.context.events.of("warning")) == (
        task in (BINARY_CLASSIFICATION, squares.WITHOUT_BATCH_NORM)
    )


def test_a_class_without_images_is_a_warning() -> None:
    log, server, _ = federation(CLASSIFICATION, missing=1)
    warnings = []
    for event in server.context.events.of("warning"):
        if "class" in event["message"]:
            warnings.append(event["message"])
    assert len(warnings) == 1 and "class medium" in warnings[0]
    assert log[0][2]["A"].states["prototypes"]["present"].tolist() == [True, False, True]
    assert torch.equal(server.prototypes["prototypes"][1], torch.zeros(8))
    for step, _, replies in log:
        if step.phase == "train":
            assert math.isfinite(replies["A"].meta["loss"])


def test_the_prototype_of_a_class_is_of_the_sites_that_have_it() -> None:
    algorithms = squares.algorithms(PRRSite, CLASSIFICATION)
    algorithms["B"] = PRRSite(site("B", CLASSIFICATION, missing=2), algorithms["B"].plan)
    log, server, _ = squares.play(server_of(algorithms, rounds=2), algorithms)
    sent = [replies.states["prototypes"]["prototypes"] for replies in log[1][2].values()]
    mean, spread = (sent[0][2] + sent[2][2]) / 2, (sent[0][2] - sent[2][2]).abs() / 2  # of two
    noise = torch.randn(
        3, 8, generator=torch_generator(server.context.seed, "server", 1, "prototypes")
    )
    torch.testing.assert_close(server.prototypes["prototypes"][2], mean + spread * noise[2])


@pytest.mark.parametrize(
    ("task", "present"),
    [(MULTILABEL, [True, True, False, False]), (MULTICLASS, [False, True, False])],
)
def test_prototypes_of_what_a_site_did_not_annotate_are_not_sent(
    task: TaskConfig, present: list[bool]
) -> None:
    """The background of exclusive classes holds the structures that it did not annotate."""
    algorithms = squares.algorithms(PRRSite, task)
    part = algorithms["A"].site
    part.annotation = Annotation(task, ["square"])
    request = server_of(algorithms).configure(Step("train", 0), "A")
    sent = algorithms["A"].perform("train", 0, request).states["prototypes"]
    assert sent["present"].tolist() == present
    assert sent["prototypes"].any(dim=1).tolist() == present


# ---- delivery -----------------------------------------------------------------------------------------------------------------


def test_both_models_are_delivered_of_their_best_rounds() -> None:
    log, server, algorithms = federation(rounds=3, selection="best")
    models = algorithms["A"].finalize(server.configure_final("A"))
    validations = [replies["A"].meta["validation"] for _, _, replies in log[1:]]
    for role in ("global", "personal"):
        best = max(range(3), key=lambda i: (validations[i][role], i)) + 1  # the later of equals
        assert algorithms["A"].best[role].round == best
        measured = algorithms["A"].validation(
            algorithms["A"].network(role, models[role].states["model"])
        )
        assert measured == pytest.approx(validations[best - 1][role])


@pytest.mark.parametrize(
    ("personal", "deputy", "deployed"),
    [
        (0.25, 0.5, "global"),
        (0.5, 0.25, "personal"),
        (0.5, 0.5, "personal"),
        (None, None, "personal"),
        (None, 0.5, "personal"),
    ],
)
@pytest.mark.parametrize("selection", ["best", "last"])
def test_a_site_deploys_the_better_of_its_two_models_by_its_own_validation(
    selection: str, personal: float | None, deputy: float | None, deployed: str
) -> None:
    """The deputy is that of the selected round. A model's bias says here what it reaches; -1 is undefined."""
    algorithm = squares.algorithm(PRRSite, selection=selection)
    start = algorithm._deputy_state(server_of({"A": algorithm}).configure(Step("train", 0), "A"))
    reached = {"personal": personal, "global": deputy}
    states = {}
    for role, v in reached.items():
        bias = torch.full_like(start["head.bias"], -1 if v is None else v)
        states[role] = {**start, "head.bias": bias}
    algorithm.personal = states["personal"]
    for role, state in states.items():
        algorithm.best[role].propose(reached[role], 1, state)
    algorithm.validation = lambda model: (
        None if (value := float(model.state_dict()["head.bias"][0])) < 0 else value
    )
    models = algorithm.finalize(Message({"model": algorithm.part.shared(states["global"])}))
    assert equal(models["deployed"].states["model"], states[deployed])
    assert models["deployed"].meta["kept"] == {
        "keep": "best",
        "model": deployed,
        "validation": reached,
    }
    for role in states:
        assert "kept" not in models[role].meta, "they were not chosen"


def test_an_outside_site_gets_the_mean_deputy_with_the_mean_batch_normalisation() -> None:
    log, server, algorithms = federation(outside=("O",))
    assert [step.phase for step, _, _ in log] == [
        "train",
        "train",
        "validate",
        "share_normalisation",
    ]
    models = squares.algorithm(PRRSite, "O").finalize(server.configure_final("O"))
    assert models.keys() == {"global", "deployed"} and models["global"] is models["deployed"]
    own, shared = split_state(
        models["global"].states["model"], batch_norm_entries(algorithms["A"].site.network())
    )
    even = dict.fromkeys(SITES, 1.0)
    squares.assert_close(
        shared,
        weighted_mean({name: reply.states["model"] for name, reply in log[1][2].items()}, even),
    )
    squares.assert_close(
        own,
        weighted_mean(
            {name: algorithm.normalisation for name, algorithm in algorithms.items()}, even
        ),
    )
    assert equal(server.models()["global"].states["model"], models["global"].states["model"])


def test_an_outside_site_may_get_the_most_representative_personal_model() -> None:
    options: dict[str, Any] = {"counts": UNEVEN, "outside_model": "personal", "selection": "last"}
    algorithms = {}
    for name, missing in zip(SITES, (1, None, 2), strict=True):
        algorithms[name] = squares.algorithm(
            PRRSite, name, CLASSIFICATION, missing=missing, **options
        )
    log, server, _ = squares.play(
        squares.server(PRRServer, rounds=2, outside=("O",), algorithms=algorithms), algorithms
    )
    assert log[-1].step.phase == "share_personal"
    # shares of the classes: everybody (14, 6, 4) / 24, A (6, 0, 2) / 8, B (3, 3, 2) / 8, C (5, 3, 0) / 8; C is nearest
    assert equal(server.configure_final("O").states["model"], algorithms["C"].personal)


def test_an_inside_site_that_never_trained_gets_the_outside_model() -> None:
    _, server, algorithms = federation(absent=lambda step, name: name == "C")
    models = algorithms["C"].finalize(server.configure_final("C"))
    assert models.keys() == {"global", "deployed"}
    assert equal(
        split_state(models["global"].states["model"], algorithms["C"].part.names)[1], server.mean
    )


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


def test_with_one_epoch_a_round_the_thresholds_decide() -> None:
    """The code's machine would stay in Recover."""
    assert stages_of(1, lam1=9.0, lam2=9.0)[1] == [1]
    assert stages_of(1, lam1=0.0, lam2=9.0)[1] == [2]
    assert stages_of(1, lam1=0.0, lam2=0.0)[1] == [3]
    assert stages_of(1, lam1=0.0, lam2=0.0, det_steps="RE")[1] == [2]


def after_one_round(
    clip: float | None, epochs: int = 2, **hyper: Any
) -> tuple[StateDict, StateDict]:
    changes: dict[str, Any] = {} if clip is None else {"clip": {"norm": clip}}
    algorithm = squares.algorithm(
        PRRSite, task=squares.task(local_epochs=epochs, **changes), cpa="global", **hyper
    )
    server = server_of({"A": algorithm}, **hyper)
    reply = algorithm.perform("train", 0, server.configure(Step("train", 0), "A"))
    return algorithm.personal, {**algorithm.normalisation, **reply.states["model"]}


@pytest.mark.parametrize("clip", [None, 0.01])
def test_teachers_do_not_change(clip: float | None) -> None:
    """Neither by gradients nor by clipping their norm."""
    alone, _ = after_one_round(clip, det=False)
    # Recover only: P_k learns from labels alone.
    personal, deputy = after_one_round(clip, lam1=9.0, lam2=9.0)
    assert equal(personal, alone)
    assert not equal(deputy, alone)
    alone, _ = after_one_round(clip, epochs=1, det=False)
    # Sublimate only: D_k does.
    personal, deputy = after_one_round(clip, epochs=1, lam1=0.0, lam2=0.0)
    assert equal(deputy, alone)
    assert not equal(personal, alone)


def test_the_paper_halves_the_rate_after_every_25_epochs() -> None:
    site = squares.algorithm(
        PRRSite, task=squares.task(local_epochs=10, batch_size=12), cpa="off", det=False
    )
    site_optimizer = site.site.optimizer
    rates = list[float]()

    def observed(parameters: Any, **override: Any) -> torch.optim.Optimizer:
        optimizer = site_optimizer(parameters, **override)
        optimizer.register_step_pre_hook(
            lambda used, _args, _options: rates.append(used.param_groups[0]["lr"])
        )
        return optimizer

    site.site.optimizer = observed
    for round in (1, 2, 5):
        site.perform("train", round, server_of({"A": site}).configure(Step("train", round), "A"))
    assert rates == [0.01] * 10 + [0.01] * 5 + [0.005] * 5 + [0.0025] * 10, (
        "the 25th epoch ends in the middle of a round"
    )


def test_retrogress_is_measured_on_request() -> None:
    """Fig. 1a: the model before aggregation beside the model that the next round begins with."""
    log, _, algorithms = federation(rounds=3, retrogress=True)
    for before, after in pairwise(log):
        for name in algorithms:
            trained = before.replies[name].meta["validation_trained"]
            assert trained.keys() == {"global", "personal"}
            assert trained["personal"] == after.replies[name].meta["validation"]["personal"], (
                "P_k is never overwritten"
            )
    # Of the last round both parts of the trained deputy are at hand.
    for name, algorithm in algorithms.items():
        reply = log[-2].replies[name]
        deputy = algorithm.network("expected", {**algorithm.normalisation, **reply.states["model"]})
        assert algorithm.validation(deputy) == reply.meta["validation_trained"]["global"]
    assert "validation_trained" not in federation(rounds=1)[0][0].replies["A"].meta


def test_gamma_has_a_curve_for_every_class() -> None:
    log, _, _ = federation(squares.task(local_epochs=3), rounds=3, tau=1.0)
    first = log[0].replies["A"].meta
    last = log[2].replies["A"].meta
    assert "gammas" not in first, "there is no refinement before there are prototypes"
    assert last["gammas"].keys() == {"not square", "square"}
    for curve in last["gammas"].values():
        assert len(curve) == 3
    assert last["gamma"] == {name: curve[-1] for name, curve in last["gammas"].items()}
    for curve in last["gammas"].values():
        for value in curve:
            assert value >= 0.999
    assert max(last["gamma"].values()) > 1.0
    assert "gammas" not in federation(rounds=3, cpa="global")[0][2].replies["A"].meta


def test_class_totals_of_multilabel_tasks_include_negatives() -> None:
    data = site("A", MULTILABEL)
    totals = class_totals(MULTILABEL, enrolled(data))
    targets = data.data.train.targets
    for g in range(2):
        assert totals[g].tolist() == [(targets[:, g] == 0).sum(), (targets[:, g] == 1).sum()]
    assert class_names(MULTILABEL) == [("not square", "square"), ("not corner", "corner")]
    by_site = [
        class_totals(CLASSIFICATION, enrolled(site(name, CLASSIFICATION, UNEVEN))) for name in SITES
    ]
    assert torch.stack(by_site).sum(dim=0).tolist() == [[9, 9, 6]]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ("shuffle", [24, 12, 0]),
        ("balanced", [18, 18, 0]),
        ({"name": "weighted", "weights": [3, 1, 1]}, [27, 9, 0]),
    ],
    ids=str,
)
def test_class_totals_are_of_the_images_as_sampling_draws_them(
    sampling: Any, expected: list[int]
) -> None:
    """Balanced draws need no balance by the loss."""
    task = squares.task("classification", sampling=sampling)
    members = squares.algorithms(PRRSite, task, missing=2)
    server = squares.server(PRRServer, task, algorithms=members)
    assert server.class_totals.tolist() == [expected]


def supervision(
    data: Site, kind: str, global_: Tensor | None = None, totals: Tensor | None = None
) -> Supervision:
    totals = class_totals(data.task, enrolled(data)) if totals is None else totals
    hyper = build_hyper(
        PRRSiteHyper,
        {"cpa": kind} if kind in ("global", "local") else {"cpa": "off", "plain_loss": kind},
    )
    return Supervision(data, hyper, totals, global_)


@pytest.mark.parametrize(
    "task", [SEGMENTATION, MULTILABEL, MULTICLASS, CLASSIFICATION, BINARY_CLASSIFICATION]
)
def test_without_imbalance_the_loss_is_cross_entropy_and_dice(task: TaskConfig) -> None:
    data = site("A", task)
    images, targets, _ = next(iter(data.ordered("train")))
    logits = data.network()(images)
    balanced = torch.ones_like(class_totals(task, enrolled(data)))
    actual = supervision(data, "global", totals=balanced)(logits, targets)
    if task.target == "multiclass":
        expected = functional.cross_entropy(logits, targets)
    else:
        expected = functional.binary_cross_entropy_with_logits(
            logits, targets.reshape(logits.shape).float()
        )
    if task.kind == "segmentation":
        expected = expected + data.annotation.loss({"name": "dice"})(logits, targets)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(supervision(data, "ce")(logits, targets), expected)
    torch.testing.assert_close(
        supervision(data, "task")(logits, targets), data.loss(logits, targets)
    )
    skewed = balanced.clone()
    skewed[:, 0] = 1000
    # Less competition for the common class.
    assert supervision(data, "global", totals=skewed)(logits, targets) < actual


def test_comparison_losses() -> None:
    data = site("A", CLASSIFICATION, UNEVEN)
    images, targets, _ = next(iter(data.ordered("train")))
    logits = data.network()(images)
    weight = torch.tensor([8 / 9, 8 / 9, 8 / 6])
    expected = (
        functional.cross_entropy(logits, targets, reduction="none") * weight[targets]
    ).mean()
    torch.testing.assert_close(supervision(data, "fedeamc")(logits, targets), expected)
    p = logits.softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(
        supervision(data, "focal")(logits, targets), (-(1 - p).square() * p.log()).mean()
    )


def test_refinement_weights_classes_by_their_distance() -> None:
    data = site("A", CLASSIFICATION)
    images, targets, _ = next(iter(data.ordered("train")))
    logits = data.network()(images)
    local = torch.eye(3)
    opposite = local.clone()
    opposite[1] = torch.tensor([1.0, 0.0, 0.0])
    refined = supervision(data, "local", opposite)
    refined.refine(local)
    torch.testing.assert_close(refined.gamma, torch.tensor([[1.0, 4 / 3, 1.0]]))
    assert refined.gamma is not None
    expected = (
        functional.cross_entropy(logits, targets, reduction="none") * refined.gamma[0][targets]
    ).mean()
    torch.testing.assert_close(refined(logits, targets), expected)
    without = supervision(data, "global", opposite)
    without.refine(local)
    assert without.gamma is None


@pytest.mark.parametrize("task", [SEGMENTATION, MULTILABEL, CLASSIFICATION])
def test_prototypes_are_masked_means_of_the_features(task: TaskConfig) -> None:
    data = site("A", task)
    network = data.network().eval()
    collected = SitePrototypes(task, feature_width(task), "cpu")
    with torch.no_grad():
        for images, targets, _ in data.ordered("train"):
            collected.add(network.features_and_output(images)[0], targets)
        embeddings = network.features_and_output(data.data.train.images)[0]
    targets = (
        data.data.train.targets if task.target == "multilabel" else data.data.train.targets[:, None]
    )
    rows = embeddings.movedim(1, -1)
    expected = []
    for g in range(targets.shape[1]):
        for c in range(3 if task is CLASSIFICATION else 2):
            expected.append(rows[targets[:, g] == c].mean(0))
    torch.testing.assert_close(
        collected.state()["prototypes"], torch.stack(expected), rtol=1e-4, atol=1e-5
    )
    assert collected.state()["present"].all()


def test_labels_are_resized_to_the_feature_map() -> None:
    collected = SitePrototypes(SEGMENTATION, 1, "cpu")
    targets = torch.zeros(1, 16, 16, dtype=torch.long)
    targets[0, :8, :8] = 1
    collected.add(torch.tensor([[[[5.0, 1.0], [2.0, 3.0]]]]), targets)
    assert collected.state()["prototypes"].flatten().tolist() == [2.0, 5.0] and collected.state()[
        "present"
    ].tolist() == [True, True]


@pytest.mark.parametrize("shown", [1, 5])
def test_a_class_that_few_patients_show_in_training_is_not_sent(shown: int) -> None:
    """Counted in the batches of the round, as patches may show fewer than the masks do."""
    algorithms = squares.algorithms(PRRSite, MULTICLASS)
    one = algorithms["A"]
    one.site.minimum_patients = 5
    train = one.site.data.train
    targets = train.targets.clamp(max=1)
    targets[:shown, 0, 0] = 2
    one.site.data = replace(one.site.data, train=replace(train, targets=targets))
    server = server_of(algorithms)
    for round in range(2):
        step = Step("train", round)
        replies = {}
        for name, algorithm in algorithms.items():
            replies[name] = algorithm.perform("train", round, server.configure(step, name))
        server.aggregate(step, replies)
        sent = replies["A"].states["prototypes"]
        assert sent["present"].tolist() == [True, True, shown == 5]
        assert sent["prototypes"][2].any() == (shown == 5)
    assert one.prototypes["prototypes"][2].any(), "the site itself uses it"
    assert ("corner" in replies["A"].meta["gamma"]) == (shown == 5)
    assert ("corner" in replies["A"].meta["gammas"]) == (shown == 5)


@cache
def three_rounds(**hyper: Any) -> Any:
    """A federation of three rounds; read only."""
    return federation(rounds=3, **hyper)


@pytest.mark.parametrize(
    ("warm_up", "refined"),
    [(0, [False, True, True]), (1, [False, True, True]), (2, [False, False, True])],
)
def test_the_warm_up_has_the_global_objective_alone(warm_up: int, refined: list[bool]) -> None:
    """The first round has no global prototypes, so that a warm-up of one round changes nothing."""
    log, _, algorithms = federation(rounds=3, warm_up=warm_up)
    trained = [turn.replies["A"] for turn in log if turn.step.phase == "train"]
    assert ["gamma" in reply.meta for reply in trained] == refined
    for reply in trained:
        assert "prototypes" in reply.states, "prototypes travel in every round"
    unrefined, _, plain = three_rounds(cpa="global")
    of_plain = [turn.replies["A"] for turn in unrefined if turn.step.phase == "train"]
    same = [
        equal(reply.states["model"], other.states["model"])
        for reply, other in zip(trained, of_plain, strict=True)
    ]
    assert same == [not changed for changed in refined]
    whole = three_rounds(warm_up=3).algorithms["A"].personal
    assert equal(whole, plain["A"].personal) and not equal(whole, algorithms["A"].personal)


def test_every_option_changes_the_result() -> None:
    """Of two rounds of three epochs: site A's personal model, and the one it would be sent next."""
    changes: list[dict[str, Any]] = [
        *squares.one_by_one(
            pfa=False,
            r0=0.1,
            r1=0.5,
            components=("amplitude", "phase"),
            det=False,
            det_steps=("E", "RE"),
            lam2=5.0,
        ),
        *squares.one_by_one(cpa=("global", "local", "off"), beta=0.2, tau=1.0, halve_every=1),
        {"cpa": "off", "plain_loss": "ce"},
        {"cpa": "off", "plain_loss": "focal"},
        {"cpa": "off", "plain_loss": "fedeamc"},
        {"warm_up": 2},
        {"lam1": 0.0, "lam2": 5.0},
    ]
    outcomes: list[StateDict] = []
    for change in ({}, *changes):
        settings: dict[str, Any] = {"lam1": 0.0, "lam2": 0.0, **change}
        _, server, algorithms = federation(
            squares.task(local_epochs=3), sites=("A", "B"), **settings
        )
        outcomes.append(
            algorithms["A"].personal
            | {f"next/{name}": tensor for name, tensor in server.aggregated["A"].items()}
        )
        for tensor in outcomes[-1].values():
            assert torch.isfinite(tensor).all(), change
        assert not (change and equal(outcomes[-1], outcomes[0])), change
