"""What a site keeps back, and what it says of its data."""

import math
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import medflare
from helpers.small_tasks import stacked
from medflare.core.errors import ConfigError
from medflare.core.manifest import MetaSpec
from medflare.core.message import Message
from medflare.core.store import MemoryStore
from medflare.federation.final_models import ArtifactStore
from medflare.federation.participant import Participant
from medflare.federation.settings import ENROL, FINALIZE
from medflare.federation.update_validation.messages import ENROLS, declaration_problem, message_problem
from medflare.federation.update_validation.suppression import small_splits, suppress_splits
from medflare.methods.catalogue import get_method
from medflare.training.site import Site
from methods import squares

INVITATION = {"role": "inside", "sites": ["A", "B"]}


def _site(left_out: int = 0, notes: int = 0) -> Site:
    site = squares.site("A")  # 12 training, 4 validation and 5 test patients
    site.data = replace(site.data, left_out=tuple(f"{number}.png: damaged {'x' * 1000}" for number in range(left_out)))
    site.notes = [f"note {number}" for number in range(notes)]
    return site


def _asked(minimum: int) -> dict[str, Message]:
    """Replies to enrolment, one round and delivery of FedAvg."""
    site = _site()
    participant = Participant("A", lambda role: site, get_method("fedavg"), {}, minimum_patients=minimum)
    replies = {ENROL: participant.answer(ENROL, 0, Message({}, dict(INVITATION)))}
    for phase in ("train", FINALIZE):
        incoming = Message({"model": site.network().state_dict()}, {"step": len(replies) - 1, "run_rounds": 1})
        replies[phase] = participant.answer(phase, 0, incoming)
    return replies


def test_images_that_cannot_be_used_are_counted_and_not_named() -> None:
    site = _site(left_out=300, notes=100)
    reply = Participant("A", lambda role: site, get_method("fedavg"), {}).answer(ENROL, 0, Message({}, dict(INVITATION)))
    assert message_problem(reply, "A") is None
    messages = [event["message"] for event in reply.meta["events"] if event["kind"] == "left_out"]
    assert len(messages) == 1 and "300" in messages[0] and ".png" not in str(reply.meta)


def test_letters_that_are_not_latin_fit_through_the_servers_gate() -> None:
    """A site cannot help how its folders are called: the gate counts bytes of JSON, six for each of these letters."""
    site, line = _site(), "第一季度眼底照片无法读取，" * 13
    site.notes = [line] * 60
    reply = Participant("A", lambda role: site, get_method("fedavg"), {}).answer(ENROL, 0, Message({}, dict(INVITATION)))
    assert message_problem(reply, "A") is None
    messages = [event["message"] for event in reply.meta["events"] if event["kind"] == "warning"]
    assert len(messages) > 10 and messages[0] == line and f"{60 - len(messages) + 1} more" in messages[-1]


def test_a_site_says_what_it_runs_on() -> None:
    reply = _asked(0)[ENROL]
    told = reply.meta["versions"]
    assert told["medflare"] == medflare.__version__ and {*told} == {"medflare", "torch", "monai"}
    assert declaration_problem(reply, ENROLS) is None


@pytest.mark.parametrize(("minimum", "validation", "test"), [(0, True, True), (4, True, True), (5, False, True), (6, False, False)])
def test_metrics_of_few_patients_stay_at_the_site(minimum: int, validation: bool, test: bool) -> None:
    replies = _asked(minimum)
    trained, delivered = replies["train"].meta, replies[FINALIZE].meta
    assert (trained["validation"]["global"] is not None) == validation and trained["loss"] is not None
    assert (delivered["metrics"]["global"]["dice"] is not None) == test and delivered["n"]["test"] == 5
    said = [event["message"] for event in replies[ENROL].meta["events"]]
    expected = [split for split, tells in (("validation", validation), ("test", test)) if not tells]
    assert len(said) == len(expected) and all(split in line for split, line in zip(expected, said, strict=True))
    assert all(message_problem(reply, "A") is None for reply in replies.values())


def test_patients_are_counted_and_not_images() -> None:
    site = squares.site("A")
    site.data = replace(site.data, test=replace(stacked(site.data.test), patients=("one",) * 5))
    assert small_splits(site, 2) == ("test",) and small_splits(site, 1) == () == small_splits(squares.site("A"), 4)


def test_a_report_that_cannot_be_written_costs_no_model() -> None:
    class Full(ArtifactStore):
        def finish(self, *given: Any) -> None:
            raise OSError("no space left beside scans/Meier.png")

    site = _site()
    participant = Participant("A", lambda role: site, get_method("fedavg"), {}, artifacts=Full())
    participant.answer(ENROL, 0, Message({}, dict(INVITATION)))
    incoming = Message({"model": site.network().state_dict()}, {"step": 0, "run_rounds": 1})
    meta = participant.answer(FINALIZE, 0, incoming).meta
    assert meta["metrics"]["global"]["dice"] is not None
    warnings = [event["message"] for event in meta["events"] if event["kind"] == "warning"]
    assert len(warnings) == 1 and "OSError" in warnings[0] and "Meier" not in warnings[0]


def test_tables_keep_their_names_and_a_failure_is_told() -> None:
    meta: dict[str, Any] = {"loss": math.nan, "validation": {"global": 0.5, "personal": None}, "scores": {"A": 0.5}, "n": 3}
    suppress_splits(
        meta, (MetaSpec("loss", measured="train"), MetaSpec("validation", measured="validation"), MetaSpec("n")), ("train", "validation")
    )
    assert math.isnan(meta.pop("loss"))
    assert meta == {"validation": {"global": None, "personal": None}, "scores": {"A": 0.5}, "n": 3}


class Listening(ArtifactStore):
    """Puts what it is told into a list."""

    def __init__(self, told: list[Any]):
        self.told = told

    def note_step(self, *step: Any) -> None:
        self.told.append(step)


def test_it_tells_each_step_when_it_begins_and_when_it_is_answered() -> None:
    site, told = _site(), list[Any]()
    participant = Participant("A", lambda role: site, get_method("fedavg"), {}, artifacts=Listening(told))
    participant.answer(ENROL, 0, Message({}, dict(INVITATION)))
    for number, phase in enumerate(("train", FINALIZE)):
        participant.answer(phase, number, Message({"model": site.network().state_dict()}, {"step": number, "run_rounds": 1}))
    assert told == [("train", 0, 1, True), ("train", 0, 1, False), (FINALIZE, 1, 1, True), (FINALIZE, 1, 1, False)]


def test_a_step_that_fails_has_ended_too() -> None:
    site, told = _site(), list[Any]()
    participant = Participant("A", lambda role: site, get_method("fedavg"), {}, artifacts=Listening(told))
    participant.answer(ENROL, 0, Message({}, dict(INVITATION)))
    site.abort = lambda: 1 / 0 > 1
    with pytest.raises(ZeroDivisionError):
        participant.answer("train", 0, Message({"model": site.network().state_dict()}, {"step": 0, "run_rounds": 1}))
    assert told == [("train", 0, 1, True), ("train", 0, 1, False)]


# ---- hours of a job ---------------------------------------------------------------------------------------------------------


class Clock:
    """A monotonic clock on which every batch takes ten minutes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr("medflare.federation.memory.time", SimpleNamespace(monotonic=lambda: self.seconds))

    def batch(self) -> bool:
        self.seconds += 600
        return False


def _worked(clock: Clock, store: MemoryStore, hours: float | None) -> Participant:
    """A participant as a process of its own makes it; two batches make its round."""

    def opened(role: str) -> Site:
        site = _site()

        def abort() -> bool:
            clock.batch()
            participant.working.check()
            return False

        site.abort = abort
        return site

    participant = Participant("A", opened, get_method("fedavg"), {}, store=store, hours=hours)
    return participant


def _round(participant: Participant, number: int, rounds: int, phase: str = "train") -> Message:
    incoming = Message({"model": squares.site("A").network().state_dict()}, {"step": number, "run_rounds": rounds})
    return participant.answer(phase, number, incoming)


def test_a_site_stops_after_its_hours_and_takes_the_final_models(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock(monkeypatch), MemoryStore()
    _worked(clock, store, 2.0).answer(ENROL, 0, Message({}, dict(INVITATION)))
    done = 0
    with suppress(ConfigError):
        for done in range(20):
            clock.seconds += 10**6  # it waits for others
            _round(_worked(clock, store, 2.0), done, rounds=20)
    assert 1 < done < 10
    with pytest.raises(ConfigError, match=r"bounds\.hours"):
        _round(_worked(clock, store, 2.0), done, rounds=20)
    assert _round(_worked(clock, store, 2.0), 20, rounds=20, phase=FINALIZE).meta["metrics"]["global"]["dice"] is not None


def test_another_run_has_hours_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock(monkeypatch), MemoryStore()
    for _ in range(3):
        _worked(clock, store, 1.5).answer(ENROL, 0, Message({}, dict(INVITATION)))
        assert "events" not in _round(_worked(clock, store, 1.5), 0, rounds=1).meta


def test_without_a_bound_nothing_is_said_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock(monkeypatch), MemoryStore()
    _worked(clock, store, None).answer(ENROL, 0, Message({}, dict(INVITATION)))
    assert "events" not in _round(_worked(clock, store, None), 0, rounds=10**6).meta and "work" not in store.names()
