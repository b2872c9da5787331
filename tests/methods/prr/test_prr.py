"""PRR's algorithms on small generated images: the three parts and their ablations, memory, absent sites, what is delivered."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from medflare.core.message import Message
from medflare.core.rng import torch_generator
from medflare.core.states import batch_norm_entries, split_state, weighted_mean
from medflare.federation.local.loop import run_local
from medflare.inference.deployed import load_model
from medflare.methods.base import Step
from medflare.methods.catalogue import build_deployed
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.prr.fourier import fourier_aggregate, frequency_ratio
from medflare.methods.prr.server import PRRServer
from medflare.methods.prr.site import PRRSite
from medflare.tasks.config import TaskConfig, load_task
from methods import squares
from methods.squares import (
    BINARY_CLASSIFICATION,
    CLASSIFICATION,
    MULTICLASS,
    MULTILABEL,
    SEGMENTATION,
    SITES,
    VGG,
    WITHOUT_BATCH_NORM,
    equal,
    plan_of,
    play,
    site,
)

FEDBN: dict[str, Any] = {"pfa": False, "det": False, "cpa": "off"}
federation = partial(squares.federation, PRRSite, PRRServer)


def server_of(algorithms: dict[str, Any], rounds: int = 2, **hyper: Any) -> Any:
    return squares.server(PRRServer, rounds=rounds, outside=(), algorithms=algorithms, **hyper)


# ---- what leaves a site ---------------------------------------------------------------------------------------------------------


def test_batch_normalisation_and_the_personal_model_never_leave_the_site() -> None:
    log, server, algorithms = federation()
    local = batch_norm_entries(algorithms["A"].site.network())
    assert local and {step.phase for step, _, _ in log} == {"train", "validate"}
    for _, outgoing, replies in log:
        for message in [*outgoing.values(), *replies.values()]:
            assert not any(local & state.keys() for state in message.states.values())
            assert message.states.keys() <= {"model", "prototypes"}
    assert not equal(algorithms["A"].normalisation, algorithms["B"].normalisation)
    assert server.models() == {}  # no whole model is known to the server


# ---- aggregation --------------------------------------------------------------------------------------------------------------


def test_without_its_parts_and_batch_normalisation_it_is_fedavg() -> None:
    algorithms = squares.algorithms(PRRSite, WITHOUT_BATCH_NORM, **FEDBN)
    _, server, _ = play(server_of(algorithms, **FEDBN), algorithms)
    plain = squares.algorithms(FedAvgSite, WITHOUT_BATCH_NORM, reset_optimizer=True)
    fedavg = play(squares.server(FedAvgServer, algorithms=plain, rounds=2, weighting="uniform"), plain)
    assert equal(server.mean, fedavg.model)
    assert equal(server.aggregated["B"], fedavg.model)


def test_fedbn_is_the_plain_mean_with_local_batch_normalisation() -> None:
    log, _, algorithms = federation(**FEDBN)
    local = batch_norm_entries(algorithms["A"].site.network())
    first_replies, second_outgoing = log[0][2], log[1][1]
    mean = weighted_mean({name: reply.states["model"] for name, reply in first_replies.items()}, dict.fromkeys(SITES, 1.0))
    for message in second_outgoing.values():
        assert equal(message.states["model"], mean)
    models = algorithms["A"].finalize(log[-1][1]["A"])
    assert equal(models["personal"].states["model"], models["global"].states["model"])
    assert local <= models["personal"].states["model"].keys()


def test_every_site_gets_a_model_of_its_own_and_the_band_grows() -> None:
    log, server, _ = federation(rounds=3)
    sent = [outgoing["A"].states["model"] for _, outgoing, _ in log]
    assert not equal(server.aggregated["A"], server.aggregated["B"])
    ratios = [frequency_ratio(round, 3) for round in range(3)]
    for round, ratio in enumerate(ratios):
        replies = log[round][2]
        stacked = torch.stack([replies[name].states["model"]["head.weight"] for name in SITES])
        torch.testing.assert_close(sent[round + 1]["head.weight"], fourier_aggregate(stacked, ratio, classifier=True)[0])
        bias = torch.stack([replies[name].states["model"]["head.bias"] for name in SITES])
        torch.testing.assert_close(sent[round + 1]["head.bias"], bias.mean(0))


@pytest.mark.parametrize("cls_task", [SEGMENTATION, CLASSIFICATION])
def test_one_site_alone_gets_its_own_deputy_back(cls_task: TaskConfig) -> None:
    log, server, _ = federation(cls_task, sites=("A",))
    assert equal(server.aggregated["A"], log[1][2]["A"].states["model"])


def test_a_site_that_misses_a_round_keeps_its_last_model_and_a_late_one_starts_from_the_mean() -> None:
    def absent(step: Step, name: str) -> bool:
        return step.phase == "train" and ((name == "B" and step.round == 1) or (name == "C" and step.round < 2))

    log, server, algorithms = federation(rounds=3, absent=absent)
    after_first = server_of(algorithms, 3)
    after_first.aggregate(log[0][0], log[0][2])
    assert equal(log[2][1]["B"].states["model"], after_first.aggregated["B"])  # two rounds later, still that of round 0
    assert equal(log[2][1]["C"].states["model"], log[1][2]["A"].states["model"])  # only A trained in round 1
    assert set(log[1][2]) == {"A"} and set(server.aggregated) == set(SITES)


# ---- all kinds of tasks, and what data may lack -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [MULTILABEL, MULTICLASS, VGG, BINARY_CLASSIFICATION, WITHOUT_BATCH_NORM])
def test_it_trains_on_every_kind_of_task(task: TaskConfig) -> None:
    log, server, algorithms = federation(task, outside=("O",))
    losses = [replies["A"].meta["loss"] for step, _, replies in log if step.phase == "train"]
    assert all(math.isfinite(loss) for loss in losses)
    assert server.prototypes["prototypes"].abs().sum() > 0
    for model in algorithms["A"].finalize(server.configure_final("A")).values():
        assert torch.isfinite(build_deployed(task, model)(algorithms["A"].site.data.test.images)).all()
    assert bool(server.context.events.of("warning")) == (task in (BINARY_CLASSIFICATION, WITHOUT_BATCH_NORM))


def test_a_class_that_no_site_has_is_named_and_does_no_harm() -> None:
    algorithms = squares.algorithms(PRRSite, CLASSIFICATION, missing=1)
    log, server, _ = play(server_of(algorithms), algorithms)
    warnings = [event["message"] for event in server.context.events.of("warning") if "class" in event["message"]]
    assert len(warnings) == 1 and "class medium" in warnings[0]
    assert log[0][2]["A"].states["prototypes"]["present"].tolist() == [True, False, True]
    assert torch.equal(server.prototypes["prototypes"][1], torch.zeros(8))
    assert all(math.isfinite(replies["A"].meta["loss"]) for step, _, replies in log if step.phase == "train")


def test_the_prototype_of_a_class_is_of_the_sites_that_have_it() -> None:
    algorithms = squares.algorithms(PRRSite, CLASSIFICATION)
    algorithms["B"] = PRRSite(site("B", CLASSIFICATION, missing=2), algorithms["B"].plan)
    log, server, _ = play(server_of(algorithms, rounds=2), algorithms)
    sent = [replies.states["prototypes"]["prototypes"] for replies in log[1][2].values()]
    mean, spread = (sent[0][2] + sent[2][2]) / 2, (sent[0][2] - sent[2][2]).abs() / 2  # of two
    noise = torch.randn(3, 8, generator=torch_generator(server.context.seed, "server", 1, "prototypes"))
    torch.testing.assert_close(server.prototypes["prototypes"][2], mean + spread * noise[2])


def test_a_site_with_one_image() -> None:
    algorithms = squares.algorithms(PRRSite)
    algorithms["C"] = PRRSite(site("C", counts=(1, 1, 1)), algorithms["C"].plan)
    log, _, _ = play(server_of(algorithms), algorithms)
    assert math.isfinite(log[1][2]["C"].meta["loss"])


# ---- delivery -----------------------------------------------------------------------------------------------------------------


def test_both_models_are_delivered_of_their_best_rounds() -> None:
    log, server, algorithms = federation(rounds=3, selection="best")
    models = algorithms["A"].finalize(server.configure_final("A"))
    validations = [replies["A"].meta["validation"] for _, _, replies in log[1:]]
    for role in ("global", "personal"):
        best = max(range(3), key=lambda i: (validations[i][role], -i)) + 1
        assert algorithms["A"].best[role].round == best
        measured = algorithms["A"].validation(algorithms["A"].network(role, models[role].states["model"]))
        assert measured == pytest.approx(validations[best - 1][role])


@pytest.mark.parametrize(
    ("personal", "deputy", "deployed"),
    [(0.25, 0.5, "global"), (0.5, 0.25, "personal"), (0.5, 0.5, "personal"), (None, None, "personal"), (None, 0.5, "personal")],
)
@pytest.mark.parametrize("selection", ["best", "last"])
def test_a_site_deploys_the_better_of_its_two_models_by_its_own_validation(
    selection: str, personal: float | None, deputy: float | None, deployed: str
) -> None:
    """The deputy is that of the selected round. A model's bias says here what it reaches; -1 is undefined."""
    algorithm = squares.algorithm(PRRSite, selection=selection)
    start, reached = (
        algorithm._deputy_state(server_of({"A": algorithm}).configure(Step("train", 0), "A")),
        {"personal": personal, "global": deputy},
    )
    states = {role: {**start, "head.bias": torch.full_like(start["head.bias"], -1 if v is None else v)} for role, v in reached.items()}
    algorithm.personal = states["personal"]
    for role, state in states.items():
        algorithm.best[role].offer(reached[role], 1, state)
    algorithm.validation = lambda model: None if (value := float(model.state_dict()["head.bias"][0])) < 0 else value
    models = algorithm.finalize(Message({"model": algorithm.part.shared(states["global"])}))
    assert equal(models["deployed"].states["model"], states[deployed])
    assert models["deployed"].meta["kept"] == {"keep": "best", "model": deployed, "validation": reached}
    assert not any("kept" in models[role].meta for role in states), "they were not chosen"


def test_results_and_card_say_which_model_every_site_deploys(tmp_path: Path) -> None:
    task = load_task({**load_task("phantom_grades").to_dict(), "size": [16, 16], "network": {"name": "small_cnn", "channels": [4, 8]}})
    results = run_local("prr", task, ["site-1", "site-2"], rounds=2, seed=0, outside=["site-3"], out=tmp_path)
    for name in ("site-1", "site-2"):
        site = results["sites"][name]
        card = load_model(tmp_path / "sites" / name / "deployed").card["kept"]
        assert site["reports"]["deployed"]["kept"] == card["model"]
        assert site["metrics"]["deployed"] == site["metrics"][card["model"]]
        assert card["validation"][card["model"]] == max(card["validation"].values())
    assert "reports" not in results["sites"]["site-3"] or "deployed" not in results["sites"]["site-3"]["reports"]


def outsider() -> PRRSite:
    return PRRSite(site("O"), plan_of(PRRSite, PRRServer))


def test_an_outside_site_gets_the_mean_deputy_with_the_mean_batch_normalisation() -> None:
    log, server, algorithms = federation(outside=("O",))
    assert [step.phase for step, _, _ in log] == ["train", "train", "validate", "share_normalisation"]
    models = outsider().finalize(server.configure_final("O"))
    assert models.keys() == {"global", "deployed"} and models["global"] is models["deployed"]
    own, shared = split_state(models["global"].states["model"], batch_norm_entries(algorithms["A"].site.network()))
    even = dict.fromkeys(SITES, 1.0)
    squares.assert_close(shared, weighted_mean({name: reply.states["model"] for name, reply in log[1][2].items()}, even))
    squares.assert_close(own, weighted_mean({name: algorithm.normalisation for name, algorithm in algorithms.items()}, even))
    assert equal(server.models()["global"].states["model"], models["global"].states["model"])


def test_an_outside_site_may_get_the_most_representative_personal_model() -> None:
    options: dict[str, Any] = {"counts": (8, 4, 5), "outside_model": "personal", "selection": "last"}
    algorithms = {
        name: squares.algorithm(PRRSite, name, CLASSIFICATION, missing=missing, **options)
        for name, missing in zip(SITES, (1, None, 2), strict=True)
    }
    log, server, _ = play(squares.server(PRRServer, rounds=2, outside=("O",), algorithms=algorithms), algorithms)
    assert log[-1].step.phase == "share_personal"
    # shares of the classes: everybody (14, 6, 4) / 24, A (6, 0, 2) / 8, B (3, 3, 2) / 8, C (5, 3, 0) / 8; C is nearest
    assert equal(server.configure_final("O").states["model"], algorithms["C"].personal)


def test_a_member_that_never_trained_is_treated_as_an_outsider() -> None:
    _, server, algorithms = federation(absent=lambda step, name: name == "C")
    models = algorithms["C"].finalize(server.configure_final("C"))
    assert models.keys() == {"global", "deployed"}
    assert equal(split_state(models["global"].states["model"], algorithms["C"].part.names)[1], server.mean)


# ---- memory -------------------------------------------------------------------------------------------------------------------
