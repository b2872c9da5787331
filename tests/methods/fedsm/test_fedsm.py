"""FedSM's algorithms on small generated images: rounds, the selector, γ and every personalization."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small_tasks import stacked
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import copy_state, weighted_mean
from medflare.federation.update_validation.suppression import suppress_splits
from medflare.methods.base import Step
from medflare.methods.catalogue import build_deployed, get_method
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import FedAvgSite
from medflare.methods.fedsm.extra import FedSMExtraServer, FedSMExtraSite
from medflare.methods.fedsm.formulas import GAMMAS, fitted_temperature, soft_pull, tuned_gamma
from medflare.methods.fedsm.personalization import adapt
from medflare.methods.fedsm.server import FedSMServer
from medflare.methods.fedsm.site import FedSMSite
from medflare.training.epochs import trainable
from methods import squares
from methods.squares import SITES, equal

COMPACT: dict[str, Any] = {"selector": "compact_selector"}
ONE_UPDATE: dict[str, Any] = {**COMPACT, "selector_updates": 1}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"personalization": "finetune"},
    {"personalization": "apfl"},
    {"personalization": "perfedavg"},
    {"personalization": "pfedme"},
    {"selector_updates": 3},
    {"selector": "ridge", "selector_updates": "auto"},
]


def federation(**options: Any) -> squares.Played:
    return squares.federation(FedSMSite, FedSMServer, **{**ONE_UPDATE, **options})


@pytest.mark.parametrize("settings", [*SETTINGS[1:5], {}], ids=str)
def test_a_restart_after_every_step_changes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    once, again = (federation(**settings, store=store) for store in (None, tmp_path))
    first, second = (played.server.configure_final("A") for played in (once, again))
    assert first.meta == second.meta and first.states.keys() == second.states.keys()
    assert all(equal(state, second.states[entry]) for entry, state in first.states.items())
    for model in once.algorithms["A"].finalize(first).values():
        assert torch.isfinite(build_deployed(squares.SEGMENTATION, model)(stacked(squares.site().data.test).images)).all()


@pytest.mark.parametrize("combine", ["extra", "ensemble"])
def test_fedsm_extra_trains_its_selector_after_the_rounds(combine: str, tmp_path: Path) -> None:
    settings = {**COMPACT, "combine": combine, "selector_rounds": 2}
    once, again = (squares.federation(FedSMExtraSite, FedSMExtraServer, rounds=1, store=store, **settings) for store in (None, tmp_path))
    assert [turn.step.phase for turn in once.log] == ["train", "validate", "train_selector", "train_selector"]
    assert [len(turn.outgoing["A"].states) for turn in once.log[-2:]] == [5, 1], "the finished models are sent once"
    first, second = (played.server.configure_final("A") for played in (once, again))
    assert all(equal(state, second.states[entry]) for entry, state in first.states.items())
    assert first.meta["combine"] == combine


def test_the_global_model_equals_fedavgs() -> None:
    assert equal(federation().model, squares.federation(FedAvgSite, FedAvgServer).model)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_personal_models_are_pulled_by_eq_11(lam: float) -> None:
    log, server, _ = federation(lam=lam)
    for before, after in pairwise(log[:3]):
        pulled = soft_pull({name: reply.states["personal"] for name, reply in before.replies.items()}, lam)
        assert all(equal(after.outgoing[name].states["personal"], pulled[name]) for name in SITES)
    assert all(equal(server.personal[name], pulled[name]) for name in SITES)


def test_the_personal_model_of_an_absent_site_is_kept() -> None:
    log, _, _ = federation(rounds=3, absent=lambda step, name: name == "B" and step.round == 1)
    assert equal(log[2].outgoing["B"].states["personal"], soft_pull({n: r.states["personal"] for n, r in log[0].replies.items()}, 0.7)["B"])
    assert set(log[1].replies) == {"A", "C"}


def test_every_option_changes_what_is_delivered() -> None:
    found = []
    for settings in SETTINGS:
        delivered = federation(**{"gamma": 0.5, "selection": "last", **settings}).server.configure_final("A")
        found.append({f"{entry}/{name}": tensor for entry, state in delivered.states.items() for name, tensor in state.items()})
    assert not any(equal(found[i], found[j]) for i in range(len(found)) for j in range(i))


@pytest.mark.parametrize(
    ("method", "options", "offender"),
    [
        ("fedsm", {"selector": "auto"}, "selector"),
        ("fedsm_extra", {"selector": "ridge"}, "selector"),
        ("fedsm", {"selector_updates": 0}, "selector_updates"),
        ("fedsm", {"gamma": "often"}, "gamma"),
        ("fedsm", {"gamma": 1.5}, "gamma"),
    ],
)
def test_invalid_settings_are_refused(method: str, options: dict[str, Any], offender: str) -> None:
    with pytest.raises(ConfigError, match=offender):
        get_method(method).check(options, squares.SEGMENTATION)


# ---- γ and temperature -----------------------------------------------------------------------------------------------------------


def test_gamma_is_tuned_at_the_end_or_set() -> None:
    tuned = federation()
    assert [turn.step.phase for turn in tuned.log] == ["train", "train", "validate", "selector_confidence", "evaluate_gamma"]
    assert tuned.log[-2].outgoing["A"].states.keys() == {"selector"}, "the whole super model is sent once"
    gains = {site: reply.meta["gains"] for site, reply in tuned.log[-1].replies.items()}
    assert all(of.keys() == {f"{gamma:g}" for gamma in GAMMAS} for of in gains.values())
    assert tuned.server.gamma == tuned_gamma(gains) == tuned.server.configure_final("A").meta["gamma"]
    given = federation(gamma=0.25)
    assert given.log[-1].step.phase == "selector_confidence" and given.server.configure_final("A").meta["gamma"] == 0.25


def test_the_summary_leaves_out_suppressed_sites() -> None:
    """Of site B, whose validation patients are too few, there is neither vote nor calibration; no vote is not read as 0."""
    played = federation()
    calibrate, tune = played.log[-2:]
    for turn in (calibrate, tune):
        suppress_splits(turn.replies["B"].meta, FedSMSite.phase(turn.step.phase).reply_meta, ("validation",))
        played.server.aggregate(turn.step, turn.replies)
    summary = played.server.selector_summary()
    assert list(summary["votes"]) == ["A", "C"] and summary["candidates"] == list(GAMMAS)
    votes = {site: dict(zip(map("{:g}".format, GAMMAS), values, strict=True)) for site, values in summary["votes"].items()}
    assert summary["gamma"] == tuned_gamma(votes)
    assert summary["mean_gain"] == pytest.approx(sum(of[f"{summary['gamma']:g}"] for of in votes.values()) / 2)
    told = {site: calibrate.replies[site].meta["calibration"] for site in "AC"}
    assert summary["temperature"] == fitted_temperature(told) and calibrate.replies["B"].meta["calibration"] == []


def test_the_delivered_selector_is_calibrated() -> None:
    """Its scores are those of the elected round at the temperature that the sites' validation images ask for."""
    played = federation()
    temperature = fitted_temperature({site: reply.meta["calibration"] for site, reply in played.log[-2].replies.items()})
    assert temperature != 1.0
    sent, delivered = played.log[-2].outgoing["A"].states["selector"], played.server.configure_final("A").states["selector"]
    logits = [played.algorithms["A"].selector.logits(state, "test") for state in (sent, delivered)]
    torch.testing.assert_close(logits[1], logits[0] / temperature)


# ---- the selector --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rounds", "updates"), [({}, 1, None), (COMPACT, 10, 100), (COMPACT, 150, 150), ({**COMPACT, "selector_updates": 2}, 5, 10)]
)
def test_the_selector_is_solved_or_takes_a_hundred_updates(options: dict[str, Any], rounds: int, updates: int | None) -> None:
    phases = [step.phase for step in squares.server(FedSMServer, rounds=rounds, **options).steps()]
    trains = {"train", "train_selector"}
    assert ("selector_features" in phases) == (updates is None) and (updates is None or sum(phase in trains for phase in phases) == updates)


def test_further_updates_send_the_selector_alone() -> None:
    log, _, _ = federation(selector_updates=3, rounds=1, gamma=0.5)
    phases = [("train", 0), ("train_selector", 1), ("train_selector", 2), ("validate", 0), ("selector_confidence", 0)]
    assert [(turn.step.phase, turn.step.part) for turn in log] == phases
    for update in (1, 2):
        message = log[update].outgoing["A"]
        assert message.states.keys() == {"selector"} and message.meta == {"update": update}


def uneven(**options: Any) -> squares.Played:
    """Site C has eight times the images of the others."""
    sizes = {"A": (4, 4, 5), "B": (4, 4, 5), "C": (32, 4, 5)}
    hyper: dict[str, Any] = {**ONE_UPDATE, "gamma": 0.5, **options}
    algorithms = {name: squares.algorithm(FedSMSite, name, counts=counts, **hyper) for name, counts in sizes.items()}
    return squares.play(squares.server(FedSMServer, rounds=1, outside=(), algorithms=algorithms), algorithms)


def test_sites_have_equal_weights_in_the_selectors_gradient() -> None:
    """Weighted by images, the largest site's name answers for everybody's images."""
    played = uneven()
    gradients = {name: reply.states["selector_gradient"] for name, reply in played.log[0].replies.items()}
    mean = weighted_mean(gradients, dict.fromkeys("ABC", 1.0))
    found = played.server.memory.states["selector_exp_avg"]  # after one step a tenth of the gradient
    squares.assert_close({name: 10 * tensor for name, tensor in found.items()}, mean)


def test_sites_have_equal_weights_in_the_selection_of_the_selectors_round() -> None:
    """Site C has most images and would choose the second round by them."""
    played = uneven(selection="mean")
    played.server.memory.meta.pop("selector/best")  # of the federation's own round
    for round, accuracies in ((1, (1.0, 1.0, 0.0)), (2, (0.0, 0.0, 1.0))):
        replies = {
            name: Message(reply.states, {**reply.meta, "validation": {"selector": accuracy}})
            for (name, reply), accuracy in zip(played.log[0].replies.items(), accuracies, strict=True)
        }
        played.server.aggregate(Step("validate", round), replies)
    assert played.server.best_selector.round == 1


def test_the_ridge_selector_separates_sites_after_one_exchange() -> None:
    """The sites of the tests differ in brightness; nothing is trained, and nothing of the selector travels in a round."""
    log, server, algorithms = federation(selector="ridge", rounds=1, sites=("A", "C"))
    assert [turn.step.phase for turn in log] == ["train", "validate", "selector_features", "selector_confidence", "evaluate_gamma"]
    assert not any("selector" in entry for entry in log[0].replies["A"].states) and "selector" not in log[0].outgoing["A"].states
    assert log[2].replies["A"].states.keys() == {"selector_statistics"}
    for place, name in enumerate(("A", "C")):
        choices = algorithms[name].selector.logits(server.delivered_selector, "test").argmax(dim=1)
        assert (choices == place).all()


def test_a_site_without_statistics_is_never_chosen() -> None:
    _, server, algorithms = federation(
        selector="ridge", rounds=1, gamma=0.5, absent=lambda step, name: (step.phase, name) == ("selector_features", "B")
    )
    scores = algorithms["B"].selector.logits(server.delivered_selector, "test").softmax(dim=1)
    assert (scores[:, 1] < 0.01).all() and torch.isfinite(scores).all()


def test_per_fedavg_adapts_the_aggregated_model() -> None:
    """The personal model is a few steps from the shared model that the server sent, and it is the one that was measured."""
    log, server, algorithms = federation(personalization="perfedavg", gamma=0.5, selection="last", rounds=2)
    last = log[-2]
    assert last.step.phase == "validate"
    for name, algorithm in algorithms.items():
        model = algorithm.network("expected", last.outgoing[name].states["meta"])
        adapt(model, algorithm.site, last.step.round, algorithm.optimizers.recall("meta", algorithm.site.optimizer(trainable(model))), 1)
        assert equal(server.personal[name], copy_state(model.state_dict()))
        assert algorithm.validation(model) == last.replies[name].meta["validation"]["personal"]
