"""The server's checkpoint: restored by the same run only, and copied to the run that resumes it."""

from pathlib import Path
from typing import Any

import pytest

from medflare.core.errors import StateError
from medflare.federation.checkpoint import CHECKPOINT, Checkpoint, copy_checkpoint, stored_plan
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.outcome import SiteCost
from medflare.federation.schedule import Federation
from medflare.methods.fedavg import FedAvgServer
from methods import squares

PLAN: dict[str, Any] = {
    "method": "fedavg",
    "algorithms": ["fedavg", "fedavg"],
    "sites": ("A", "B"),
    "hyper": {"site": {"clamp": (0, 1)}, "server": {}},
    "seed": 1,
}


def federation() -> Any:
    """A run that has done nothing yet."""
    return Federation(squares.server(FedAvgServer), LocalExchange((), pytest.fail))


def under_way() -> Any:
    """A run with something to remember."""
    run = federation()
    run.server.model = {name: tensor + 1 for name, tensor in run.server.model.items()}
    run.server.best.propose(0.5, 2, run.server.model)
    run.outcome.enrolled |= {"B": {"n": {"train": 4}}, "A": {"n": {"train": 3}}}
    run.outcome.history.append({"step": 0})
    run.outcome.costs["A"] = SiteCost(30, 20)
    run.events.add("warning", "before")
    return run


def test_a_checkpoint_restores_algorithm_and_run(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, PLAN)
    before = under_way()
    after = federation()
    checkpoint.save(4, before)
    after.events.add("warning", "at the new start")
    assert checkpoint.restore(after) == 4
    assert squares.equal(after.server.model, before.server.model)
    assert (after.server.best.round, after.server.best.value) == (2, 0.5)
    assert after.server.memory.meta == before.server.memory.meta, (
        "nothing of the run stays in the algorithm"
    )
    assert after.returning == {"A": {"train": 3}, "B": {"train": 4}} and after.outcome.history == [
        {"step": 0}
    ]
    assert after.outcome.costs == {"A": SiteCost(30, 20)}
    assert [event["kind"] for event in after.events] == ["warning", "warning", "resumed"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 2),
        ("sites", ("A",)),
        ("hyper", {"site": {}, "server": {}}),
        ("method", "prr"),
        ("new", 1),
    ],
)
def test_a_checkpoint_of_another_run_raises(tmp_path: Path, name: str, value: Any) -> None:
    Checkpoint(tmp_path, PLAN).save(1, under_way())
    other = federation()
    with pytest.raises(StateError, match=name):
        Checkpoint(tmp_path, {**PLAN, name: value}).restore(other)
    assert (
        squares.equal(other.server.model, federation().server.model)
        and not other.outcome.history
        and not other.events.to_list()
    )


def test_without_a_checkpoint_loading_raises(tmp_path: Path) -> None:
    new = tmp_path / "new"
    for load in (
        lambda: Checkpoint(tmp_path, PLAN).restore(federation()),
        lambda: stored_plan(tmp_path),
        lambda: copy_checkpoint(tmp_path, new),
    ):
        with pytest.raises(StateError, match="no checkpoint"):
            load()
    assert not new.exists()


def test_a_copied_checkpoint_is_independent(tmp_path: Path) -> None:
    interrupted = Checkpoint(tmp_path / "interrupted", PLAN)
    copied = Checkpoint(tmp_path / "copied", PLAN)
    interrupted.save(1, under_way())
    copy_checkpoint(tmp_path / "interrupted", tmp_path / "copied")
    assert copied.restore(federation()) == 1
    copied.save(2, under_way())
    copy_checkpoint(tmp_path / "copied", tmp_path / "third")
    assert interrupted.restore(federation()) == 1


def test_a_damaged_checkpoint_raises(tmp_path: Path) -> None:
    Checkpoint(tmp_path, PLAN).save(1, under_way())
    path = tmp_path / f"{CHECKPOINT}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for load in (
        lambda: Checkpoint(tmp_path, PLAN).restore(federation()),
        lambda: copy_checkpoint(tmp_path, tmp_path / "copied"),
    ):
        with pytest.raises(StateError, match="checksum"):
            load()


def test_a_resume_with_other_code_is_noted(tmp_path: Path) -> None:
    Checkpoint(tmp_path, PLAN, {"lab": "1.0", "lab code": "a"}).save(1, under_way())
    for code in ("a", "b"):
        resumed = federation()
        Checkpoint(tmp_path, PLAN, {"lab": "1.0", "lab code": code}).restore(resumed)
        messages = " ".join(event["message"] for event in resumed.events.to_list())
        assert ("other versions of lab code:" in messages) == (code == "b")
