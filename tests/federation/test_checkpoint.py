"""The server half on disk after a step: taken up by the same run only, and copied to a run that goes on with it."""

import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.store import StateStore
from medflare.federation.checkpoint import CHECKPOINT, Checkpoint, stored_plan, take_up
from medflare.federation.exchange import Reply
from medflare.federation.schedule import Federation
from medflare.federation.screening.updates import Screened
from medflare.methods.base import Step
from medflare.methods.fedavg import FedAvgServer
from methods import squares

PLAN: dict[str, Any] = {
    "method": "fedavg",
    "halves": ["fedavg", "fedavg"],
    "sites": ("A", "B"),
    "hyper": {"site": {"clamp": (0, 1)}, "server": {}},
    "seed": 1,
}


class Nobody:
    """An exchange that reaches no site."""

    def present(self, round: int) -> list[str]:
        return []

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        return {}


def federation() -> Any:
    """A run that has done nothing yet."""
    return Federation(squares.server(FedAvgServer), Nobody(), lambda phase: {})


def under_way() -> Any:
    """A run with something to remember."""
    run = federation()
    run.server.model = {name: tensor + 1 for name, tensor in run.server.model.items()}
    run.server.best.offer(0.5, 2, run.server.model)
    run.outcome.enrolled |= {"B": {"n": {"train": 4}}, "A": {"n": {"train": 3}}}
    run.past.remember(Screened({}, {}, steps={"train/change": 0.5}, digests={"train/model": {"ab12": "B"}}), 1)
    run.outcome.history.append({"step": 0})
    run.outcome.down_bytes, run.outcome.up_bytes = 30, 20
    run.events.add("warning", "before")
    return run


def test_everything_comes_back(tmp_path: Path) -> None:
    checkpoint, before, after = Checkpoint(tmp_path, PLAN), under_way(), federation()
    checkpoint.save(4, before)
    after.events.add("warning", "at the new start")
    assert checkpoint.restore(after) == 4
    assert squares.equal(after.server.model, before.server.model)
    assert (after.server.best.round, after.server.best.value) == (2, 0.5)
    assert after.server.memory.facts == before.server.memory.facts, "nothing of the run stays in the half"
    assert after.returning == {"A": {"train": 3}, "B": {"train": 4}} and after.outcome.history == [{"step": 0}]
    assert after.past == before.past and after.past.seen == {"train/model": {"ab12": ["B", 1]}}
    assert (after.outcome.down_bytes, after.outcome.up_bytes) == (30, 20)
    assert [event["message"] for event in after.events] == ["before", "at the new start", "went on after 4 finished steps"]


def test_who_has_not_come_back_yet_is_remembered(tmp_path: Path) -> None:
    """A run that is taken up and interrupted again still knows the members that missed it, with the images that they had."""
    checkpoint, second, third = Checkpoint(tmp_path, PLAN), federation(), federation()
    checkpoint.save(1, under_way())
    checkpoint.restore(second)
    second.outcome.enrolled["A"] = {"n": {"train": 3}}
    checkpoint.save(2, second)
    Checkpoint(tmp_path, PLAN).restore(third)
    assert third.returning == {"A": {"train": 3}, "B": {"train": 4}}


def test_the_last_one_counts_and_nothing_else_is_left(tmp_path: Path) -> None:
    for finished in (1, 2):
        Checkpoint(tmp_path, PLAN).save(finished, under_way())
    assert Checkpoint(tmp_path, PLAN).restore(federation()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{CHECKPOINT}.jsonl", f"{CHECKPOINT}.safetensors"]


def test_a_step_late_in_a_run_writes_no_more_than_an_early_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a busy disk takes its time
    checkpoint, run = Checkpoint(tmp_path, PLAN), under_way()
    sizes: dict[str, list[int]] = {"jsonl": [], "safetensors": []}
    for step in range(10, 40):
        run.outcome.history.append({"step": step, "sites": {"A": {"loss": 0.5}}})
        run.events.add("warning", f"in {step}", round=step)
        run.past.remember(Screened({}, {}, steps={"train/change": 0.5}, digests={"train/model": {f"{step:04x}": "B"}}), step)
        checkpoint.save(step, run)
        for kind, size in sizes.items():
            size.append((tmp_path / f"{CHECKPOINT}.{kind}").stat().st_size)
    lines = [later - earlier for earlier, later in pairwise(sizes["jsonl"])]
    assert len(set(lines)) == 1 and len(set(sizes["safetensors"])) == 1
    after = federation()
    Checkpoint(tmp_path, PLAN).restore(after)
    assert after.outcome.history == run.outcome.history and after.past == run.past
    assert [event["message"] for event in after.events][:-1] == [event["message"] for event in run.events]


def test_what_a_crash_wrote_beside_the_checkpoint_does_not_count(tmp_path: Path) -> None:
    """The journal is written first: killed between the two, a run has a line that its checkpoint does not know."""
    journal = tmp_path / f"{CHECKPOINT}.jsonl"
    Checkpoint(tmp_path, PLAN).save(1, under_way())
    journal.write_bytes(journal.read_bytes() + b'{"history": [{"step": 1}], "eve')
    again, after = Checkpoint(tmp_path, PLAN), federation()
    again.restore(after)
    assert after.outcome.history == [{"step": 0}]
    after.outcome.history.append({"step": 1})
    again.save(2, after)
    third = federation()
    Checkpoint(tmp_path, PLAN).restore(third)
    assert third.outcome.history == [{"step": 0}, {"step": 1}] and third.past == under_way().past


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))])
def test_a_damaged_journal_is_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    Checkpoint(tmp_path, PLAN).save(1, under_way())
    damage(tmp_path / f"{CHECKPOINT}.jsonl")
    for load in (lambda: Checkpoint(tmp_path, PLAN).restore(federation()), lambda: take_up(tmp_path, tmp_path / "own")):
        with pytest.raises(StateError, match=r"checkpoint\.jsonl: content does not match its checksum"):
            load()


def test_a_checkpoint_of_0_2_0_is_taken_up(tmp_path: Path) -> None:
    """It had no journal: everything stood in the checkpoint, written anew with every step."""
    before, after, store = under_way(), federation(), StateStore(tmp_path)
    Checkpoint(tmp_path, PLAN).save(1, before)
    message = store.load(CHECKPOINT)
    assert message is not None
    run = message.facts["run"]
    run |= {"history": before.outcome.history, "events": before.events.to_list()}
    run["past"]["seen"] = before.past.seen
    del run["journal"]
    store.save(CHECKPOINT, message)
    (tmp_path / f"{CHECKPOINT}.jsonl").unlink()
    checkpoint = Checkpoint(tmp_path, PLAN)
    checkpoint.restore(after)
    checkpoint.save(2, after)
    for found in (after, federation()):
        if found is not after:
            Checkpoint(tmp_path, PLAN).restore(found)
        assert found.outcome.history == before.outcome.history and found.past == before.past
        assert next(iter(found.events))["message"] == "before"


def test_a_plan_is_the_same_with_lists_for_tuples(tmp_path: Path) -> None:
    Checkpoint(tmp_path, PLAN).save(1, federation())
    Checkpoint(tmp_path, {**PLAN, "sites": ["A", "B"]}).restore(federation())
    assert stored_plan(tmp_path) == {**PLAN, "sites": ["A", "B"], "hyper": {"site": {"clamp": [0, 1]}, "server": {}}}


def test_a_setting_that_the_version_before_did_not_have_is_what_it_ran_with(tmp_path: Path) -> None:
    Checkpoint(tmp_path, PLAN).save(1, federation())
    Checkpoint(tmp_path, {**PLAN, "wire": "fp32"}).restore(federation())
    with pytest.raises(StateError, match="has wire = 'fp32', this run 'bf16'"):
        Checkpoint(tmp_path, {**PLAN, "wire": "bf16"}).restore(federation())


def test_a_checkpoint_of_an_older_version_is_named(tmp_path: Path) -> None:
    Checkpoint(tmp_path, {name: value for name, value in PLAN.items() if name != "halves"}).save(1, federation())
    with pytest.raises(StateError, match=r"was written by medflare 0\.1; finish the run with that version"):
        stored_plan(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 2), ("sites", ("A",)), ("hyper", {"site": {}, "server": {}}), ("method", "prr"), ("new", 1)]
)
def test_another_run_is_refused_by_what_differs_and_left_alone(tmp_path: Path, name: str, value: Any) -> None:
    Checkpoint(tmp_path, PLAN).save(1, under_way())
    other = federation()
    with pytest.raises(StateError, match=rf"has {name} = .*, this run .*; resume with what it began with"):
        Checkpoint(tmp_path, {**PLAN, name: value}).restore(other)
    assert squares.equal(other.server.model, federation().server.model) and not other.outcome.history and not other.events.to_list()


def test_nothing_to_take_up(tmp_path: Path) -> None:
    for load in (lambda: Checkpoint(tmp_path, PLAN).restore(federation()), lambda: stored_plan(tmp_path)):
        with pytest.raises(StateError, match=rf"no checkpoint in {tmp_path}: the run did not finish its first step; start it afresh"):
            load()
    with pytest.raises(StateError, match="that run did not finish its first step, or it came to its end"):
        take_up(tmp_path, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_a_copy_goes_on_by_itself(tmp_path: Path) -> None:
    interrupted, own = Checkpoint(tmp_path / "interrupted", PLAN), Checkpoint(tmp_path / "own", PLAN)
    interrupted.save(1, under_way())
    take_up(interrupted.folder, own.folder)
    assert own.restore(federation()) == 1
    with pytest.raises(StateError, match="own took up interrupted and was interrupted before a step of its own; resume interrupted"):
        take_up(own.folder, tmp_path / "third")
    own.save(2, under_way())
    take_up(own.folder, tmp_path / "third")
    assert interrupted.restore(federation()) == 1


def test_a_damaged_one_is_not_taken_for_none(tmp_path: Path) -> None:
    Checkpoint(tmp_path, PLAN).save(1, under_way())
    path = tmp_path / f"{CHECKPOINT}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for load in (lambda: Checkpoint(tmp_path, PLAN).restore(federation()), lambda: take_up(tmp_path, tmp_path / "own")):
        with pytest.raises(StateError, match="checksum"):
            load()
