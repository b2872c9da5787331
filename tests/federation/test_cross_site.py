"""The cross-site matrix: personal models that sites share, and what every site measures of them."""

from typing import Any

import pytest
import torch

from helpers.small_tasks import tiny_phantom
from medflare import run_local
from medflare.core.errors import ConfigError, MessageError
from medflare.core.message import Message
from medflare.data.local import LocalSettings
from medflare.evaluation.presentation import method_tables
from medflare.evaluation.results import validate_results
from medflare.federation.builtin_messages import PERSONAL_MODEL
from medflare.federation.exchange import SiteReply
from medflare.federation.local import loop
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.participant import Participant
from medflare.federation.settings import CROSS_SITE, FINALIZE
from medflare.methods.base import Step
from medflare.methods.catalogue import build_deployed
from medflare.tasks.config import load_task
from medflare.training.opening import open_site
from methods import squares

TASK = load_task(tiny_phantom())
SITES = ("site-1", "site-2")
OUTSIDE = ("site-3",)


def run(**more: Any) -> dict[str, Any]:
    return run_local(
        "ditto", TASK, SITES, outside=OUTSIDE, rounds=1, seed=0, cross_site=True, **more
    )


def test_every_personal_model_is_tested_at_every_site() -> None:
    models: dict[tuple[str, str], Message] = {}
    results = run(delivered=lambda site, role, model, cases: models.update({(site, role): model}))
    validate_results(results)
    matrix = results["cross_site"]
    assert {owner: set(row) for owner, row in matrix.items()} == {
        site: {*SITES, *OUTSIDE} for site in SITES
    }
    for owner in SITES:
        module = build_deployed(TASK, models[owner, "personal"])
        for name in (*SITES, *OUTSIDE):
            site = open_site(name, TASK, seed=0, role="inside" if name in SITES else "outside")
            assert matrix[owner][name] == site.score(module, "test", ["dice"]).values["dice"]
        assert matrix[owner][owner] == results["sites"][owner]["metrics"]["personal"]["dice"]
    ((title, table),) = method_tables(results).items()
    assert (
        "Dice" in title
        and table["site-1"]["images of site-3"] == f"{matrix['site-1']['site-3']:.3f}"
    )
    network = sum(tensor.nbytes for tensor in models["site-1", "personal"].states["model"].values())
    plain = run_local("ditto", TASK, SITES, outside=OUTSIDE, rounds=1, seed=0)
    assert "cross_site" not in plain and results["sites"] == plain["sites"]
    assert results["traffic"]["up_bytes"] == plain["traffic"]["up_bytes"] + 2 * network
    assert results["traffic"]["down_bytes"] == plain["traffic"]["down_bytes"] + 3 * 2 * network


def test_a_method_without_personal_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="cross_site"):
        run_local("evaluate", TASK, SITES, rounds=0, seed=0, cross_site=True)


def test_a_faulty_model_is_not_sent_on(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LocalExchange.__call__

    def spoilt(
        exchange: LocalExchange, step: Step, outgoing: dict[str, Message]
    ) -> dict[str, SiteReply]:
        replies = dict(honest(exchange, step, outgoing))
        if step.phase == FINALIZE:
            state = replies["site-1"].message[PERSONAL_MODEL]  # type: ignore[index]
            name = next(iter(state))
            state[name] = state[name] * torch.nan
            replies["site-2"].message[PERSONAL_MODEL] = {"other": torch.ones(3)}  # type: ignore[index]
        assert step.phase != CROSS_SITE
        return replies

    monkeypatch.setattr(LocalExchange, "__call__", spoilt)
    results = run()
    assert {event["site"] for event in results["events"] if event["kind"] == "rejected"} == set(
        SITES
    )
    assert (
        "cross_site" not in results
        and results["sites"]["site-1"]["metrics"]["personal"]["dice"] is not None
    )


def test_a_site_that_does_not_test_has_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Participant):
        def reply(self, phase: str, round: int, incoming: Message) -> Message:
            if phase == CROSS_SITE and self.name == "site-2":
                raise MessageError("the disk is full")
            return super().reply(phase, round, incoming)

    monkeypatch.setattr(loop, "Participant", Silent)
    results = run()
    for row in results["cross_site"].values():
        assert set(row) == {"site-1", "site-3"}
    (event,) = (event for event in results["events"] if "disk" in event["message"])
    assert event["site"] == "site-2" and results["status"] == "COMPLETED"


# -- at one site ---------------------------------------------------------------------------------------------------------------


def finished(
    *,
    share: bool | None = True,
    hyper: dict[str, Any] | None = None,
    shown: int = 5,
    **settings: Any,
) -> tuple[Participant, Message]:
    """A participant after one round, and its reply with the final metrics; the first `shown` of its
    five test patients have the structure.
    """
    site = squares.site("A", squares.WITHOUT_BATCH_NORM)
    site.data.test.targets[shown:] = 0
    participant = squares.participant(site, "fedavg", hyper or {}, **settings)
    squares.enrol(participant)
    state = site.network().state_dict()
    participant.reply("train", 0, Message({"model": state}, {"step": 0, "run_rounds": 1}))
    asked = {} if share is None else {"share": share}
    return participant, participant.reply(
        FINALIZE, 1, Message({"model": state}, {"step": 1, "run_rounds": 1, **asked})
    )


@pytest.mark.parametrize(
    ("share", "settings", "leaves", "named"),
    [
        (True, {"local": LocalSettings(share_model=True)}, True, ""),
        (True, {}, False, "share_model"),
        (None, {"local": LocalSettings(share_model=True)}, False, ""),
        (False, {"local": LocalSettings(share_model=True)}, False, ""),
        (
            True,
            {"local": LocalSettings(share_model=True), "hyper": {"site": {"dp_noise": 1.0}}},
            False,
            "privacy",
        ),
    ],
)
def test_a_personal_model_leaves_if_the_site_agrees(
    share: bool | None, settings: dict[str, Any], leaves: bool, named: str
) -> None:
    _, reply = finished(share=share, **settings)
    assert set(reply.states) == ({PERSONAL_MODEL.name} if leaves else set())
    messages = [
        event["message"] for event in reply.meta["events"] if "personal model" in event["message"]
    ]
    assert [named in message for message in messages] == [True] * bool(named)


@pytest.mark.parametrize(("minimum", "sent"), [(5, True), (6, False)])
def test_a_metric_of_few_patients_does_not_leave(minimum: int, sent: bool) -> None:
    participant, reply = finished(local=LocalSettings(share_model=True, minimum_patients=minimum))
    request = Message(
        {f"{PERSONAL_MODEL.name}/B": reply[PERSONAL_MODEL]}, {"step": 1, "run_rounds": 1}
    )
    value = participant.reply(CROSS_SITE, 1, request).meta[CROSS_SITE]["B"]
    assert (value is not None) == sent
    if sent:
        assert value == reply.meta["metrics"]["personal"]["dice"]


@pytest.mark.parametrize(("minimum", "value"), [(1, 0.0), (2, None)])
def test_a_metric_that_few_patients_define_does_not_leave(
    minimum: int, value: float | None
) -> None:
    """A model that answers background everywhere has no score for those without the structure."""
    local = LocalSettings(share_model=True, minimum_patients=minimum)
    participant, reply = finished(shown=1, local=local)
    state = {name: torch.zeros_like(tensor) for name, tensor in reply[PERSONAL_MODEL].items()}
    state["head.bias"] -= 9
    request = Message({f"{PERSONAL_MODEL.name}/B": state}, {"step": 1, "run_rounds": 1})
    assert participant.reply(CROSS_SITE, 1, request).meta[CROSS_SITE] == {"B": value}


def test_a_site_takes_models_of_members_that_fit() -> None:
    participant, reply = finished(local=LocalSettings(share_model=True))
    state = reply[PERSONAL_MODEL]
    for states in (
        {f"{PERSONAL_MODEL.name}/stranger": state},
        {PERSONAL_MODEL.name: state},
        {f"{PERSONAL_MODEL.name}/B": {"other": torch.ones(3)}},
    ):
        with pytest.raises(MessageError):
            participant.reply(CROSS_SITE, 1, Message(states, {"step": 1, "run_rounds": 1}))
