"""FedSM's halves on small generated images: every personalization and selector, as declared, in one process or many."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from medflare.methods.catalogue import build_deployed
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.fedsm.extra import FedSMExtraServer, FedSMExtraSite
from medflare.methods.fedsm.formulas import GAMMAS, soft_pull
from medflare.methods.fedsm.selector import selector_spec
from medflare.methods.fedsm.server import FedSMServer
from medflare.methods.fedsm.site import FedSMSite
from methods import squares
from methods.squares import SITES, equal
from small import stacked

COMPACT: dict[str, Any] = {"selector": "compact_selector"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"personalization": "finetune"},
    {"personalization": "apfl"},
    {"personalization": "perfedavg"},
    {"personalization": "pfedme", "pfedme_beta": 0.5},
    {"selector_steps": "fullbatch"},
    {"selector_steps": "minibatch", "sync_moments": False},
    {"selector_updates": 3},
    {"gamma": 0.5, "selection": "last"},
    {"reset_optimizer": True},
]


def federation(**options: Any) -> squares.Played:
    return squares.federation(FedSMSite, FedSMServer, **{**COMPACT, "reset_optimizer": False, **options})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_new_process_for_every_task_changes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    once, again = (federation(**settings, store=store) for store in (None, tmp_path))
    first, second = (played.server.configure_delivery("A") for played in (once, again))
    assert first.facts == second.facts and first.states.keys() == second.states.keys()
    assert all(equal(state, second.states[entry]) for entry, state in first.states.items())
    for model in once.halves["A"].deliver(first).values():
        assert torch.isfinite(build_deployed(squares.SEGMENTATION, model)(stacked(squares.site().data.test).images)).all()


@pytest.mark.parametrize("combine", ["extra", "ensemble"])
def test_its_relatives_too(combine: str, tmp_path: Path) -> None:
    settings = {**COMPACT, "combine": combine, "selector_rounds": 2}
    once, again = (squares.federation(FedSMExtraSite, FedSMExtraServer, rounds=1, store=store, **settings) for store in (None, tmp_path))
    assert [turn.step.phase for turn in once.log] == ["train", "validate", "train_selector", "train_selector"]
    assert [len(turn.outgoing["A"].states) for turn in once.log[-2:]] == [5, 1], "the finished models are sent once"
    first, second = (played.server.configure_delivery("A") for played in (once, again))
    assert all(equal(state, second.states[entry]) for entry, state in first.states.items())
    assert first.facts["combine"] == combine


def test_the_global_model_is_fedavgs() -> None:
    ours = federation(reset_optimizer=True)
    assert equal(ours.model, squares.federation(FedAvgSite, FedAvgServer).model)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_personal_models_are_pulled_towards_each_other(lam: float) -> None:
    log, server, _ = federation(lam=lam)
    for before, after in pairwise(log[:3]):
        pulled = soft_pull({name: reply.states["personal"] for name, reply in before.replies.items()}, lam)
        assert all(equal(after.outgoing[name].states["personal"], pulled[name]) for name in SITES)
    assert all(equal(server.personal[name], pulled[name]) for name in SITES)


def test_an_absent_sites_personal_model_waits_for_it() -> None:
    log, server, _ = federation(rounds=3, absent=lambda step, name: name == "B" and step.round == 1)
    assert equal(log[2].outgoing["B"].states["personal"], soft_pull({n: r.states["personal"] for n, r in log[0].replies.items()}, 0.7)["B"])
    assert set(log[1].replies) == {"A", "C"} and server.personal.keys() == set(SITES)


def test_gamma_is_tuned_at_the_end_or_given() -> None:
    tuned = federation()
    assert [turn.step.phase for turn in tuned.log] == ["train", "train", "validate", "tune"]
    assert tuned.log[-1].replies["A"].facts["gammas"].keys() == {f"{gamma:g}" for gamma in GAMMAS}
    assert tuned.server.gamma in GAMMAS and tuned.server.configure_delivery("A").facts["gamma"] == tuned.server.gamma
    given = federation(gamma=0.25)
    assert given.log[-1].step.phase == "validate" and given.server.configure_delivery("A").facts["gamma"] == 0.25


@pytest.mark.parametrize(
    ("steps", "sent"), [("server", {"selector"}), ("minibatch", {"selector", "selector_exp_avg", "selector_exp_avg_sq"})]
)
def test_further_updates_are_of_the_selector_alone(steps: str, sent: set[str]) -> None:
    log, _, _ = federation(selector_updates=3, rounds=1, gamma=0.5, selector_steps=steps)
    phases = [("train", 0), ("train_selector", 1), ("train_selector", 2), ("validate", 0)]
    assert [(turn.step.phase, turn.step.part) for turn in log] == phases
    for update in (1, 2):
        message = log[update].outgoing["A"]
        assert message.states.keys() == sent and message.facts == {"update": update}


def test_every_option_changes_what_is_delivered() -> None:
    found = []
    for settings in SETTINGS:
        delivered = federation(**{"gamma": 0.5, "selection": "last", **settings}).server.configure_delivery("A")
        found.append({f"{entry}/{name}": tensor for entry, state in delivered.states.items() for name, tensor in state.items()})
    for i, settings in enumerate(SETTINGS):
        for j in range(i):
            assert equal(found[i], found[j]) == (settings == {"gamma": 0.5, "selection": "last"} and j == 0), (settings, SETTINGS[j])


def test_a_site_that_is_not_sure_lets_the_global_model_answer() -> None:
    _, server, halves = federation(gamma=1.0)
    deployed = build_deployed(squares.SEGMENTATION, halves["A"].deliver(server.configure_delivery("A"))["deployed"])
    plain = build_deployed(squares.SEGMENTATION, halves["A"].deliver(server.configure_delivery("A"))["global"])
    images = stacked(squares.site().data.test).images
    torch.testing.assert_close(deployed(images), plain(images))


def test_outside_there_is_no_personal_model() -> None:
    played = federation(outside=("O",))
    models = squares.half(FedSMSite, "O", **COMPACT).deliver(played.server.configure_delivery("O"))
    assert models.keys() == {"global", "deployed"} and models["deployed"].facts["kind"] == "super"


def test_volumes_have_the_compact_selector() -> None:
    large = squares.task(size=[16, 16, 16], spatial_dims=3, network={"name": "unet", "channels": [4, 8]})
    assert selector_spec(squares.plan_of(FedSMSite, FedSMServer, large)) == {"name": "compact_selector"}
