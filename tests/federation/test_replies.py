"""The gate: whatever a site sends is either usable or rejected in one line, and nothing behind it fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from medflare.core.message import Message
from medflare.evaluation.contract import validate_results
from medflare.federation.exchange import Reply
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.local.loop import run_local
from medflare.federation.screening.replies import DELIVERS, ENROLS, unfit, unreadable
from medflare.federation.settings import DELIVER, ENROL
from medflare.methods.base import MEASURED, Step
from small import tiny_phantom

TINY = tiny_phantom(size=[16, 16])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def wide(width: int) -> Any:
    value: Any = [0] * width
    for _ in range(4):
        value = [value] * width
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def event(**changes: Any) -> dict[str, Any]:
    return {"events": [{"kind": "warning", "message": "a note", **changes}]}


STATES = {
    "states that are a list": lambda: Message([1], {}),  # type: ignore[arg-type]
    "an entry that is no state": lambda: Message({"model": 3}, {}),  # type: ignore[dict-item]
    "a number in place of a tensor": lambda: Message({"model": {"w": 3}}, {}),  # type: ignore[dict-item]
    "an array in place of a tensor": lambda: Message({"model": {"w": torch.ones(2).numpy()}}, {}),  # type: ignore[dict-item]
    "a sparse tensor": lambda: Message({"model": {"w": torch.ones(2).to_sparse()}}, {}),
    "a tensor without memory": lambda: Message({"model": {"w": torch.ones(2, device="meta")}}, {}),
    "tensors of several shapes": lambda: Message({"model": {"w": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}}, {}),
    "a tensor that is learnt": lambda: Message({"model": {"w": torch.nn.Parameter(torch.ones(2))}}, {}),
    "a tensor that waits to be negated": lambda: Message({"model": {"w": torch.ones(2, dtype=torch.complex64).conj().imag}}, {}),
    "an entry's name that is no text": lambda: Message({3: {}}, {}),  # type: ignore[dict-item]
    "an entry's name that is no Unicode": lambda: Message({"\ud800": {"w": 3}}, {}),  # type: ignore[dict-item]
    "a name that is a book": lambda: Message({"model": {"w" * 10**6: torch.ones(2)}}, {}),
}
FACTS: dict[str, Any] = {
    "facts that are a list": [1],
    "a tensor": {"loss": torch.ones(2)},
    "a huge number": {"n_samples": 10**400},
    "a number of thousands of digits": {"loss": 10**5000},
    "nested without end": {"validation": nested(5000)},
    "half a character": {"validation": {"\ud800": 0.5}},
    "a million facts": {str(number): number for number in range(100_000)},
    "a set": {"validation": {1, 2}},
    "a name that is a number": {"validation": {3: 0.5}},
    "a name that is half a character": {"\ud800": 0.5},
    "few lists that are millions when they are written down": {"validation": wide(100)},
    "a list that holds itself": {"validation": itself()},
    "events as text": {"events": "all is well"},
    "an event as text": {"events": ["all is well"]},
    "an event of no kind": {"events": [{"message": "hello"}]},
    "an event of an unknown kind": event(kind="party"),
    "a verdict of the server's": event(kind="rejected"),
    "an event that says nothing": event(message="  "),
    "an event before the first round": event(round=-1),
    "an event with more": event(diagnosis="x"),
    "an event in another's name": event(site="other"),
    "an event in a round that is text": event(round="first"),
    "an event without words": event(message=None),
    "a thousand events": {"events": event()["events"] * 1000},
}


@pytest.mark.parametrize("made", STATES.values(), ids=STATES)
def test_states_that_nobody_can_work_with(made: Callable[[], Message]) -> None:
    reason = unreadable(made(), "A")
    assert reason and "\n" not in reason and len(reason) < 200


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
def test_facts_that_nobody_can_work_with(facts: Any) -> None:
    reason = unreadable(Message({}, facts), "A")
    assert reason and "\n" not in reason and len(reason) < 200


def test_what_sites_say_every_day_passes() -> None:
    facts = {"n_samples": 7, "loss": 0.5, "validation": {"global": None, "personal": 0.5}, **event(site="A", round=2)}
    message = Message({"model": {"w": torch.ones(2, 2).T, "count": torch.tensor(3)}}, facts)
    assert unreadable(message, "A") is None and unfit(message, MEASURED) is None


@pytest.mark.parametrize(
    ("declared", "facts", "words"),
    [
        (MEASURED, {"validation": "good"}, "validation is str, expected a table"),
        (ENROLS, {"n": 7}, "n is int, expected a table"),
        (ENROLS, {"n": {"train": -1}}, "n 'train' is -1, expected a count"),
        (ENROLS, {"n": {"test": 1}}, "n says nothing of 'train'"),
        (ENROLS, {"versions": "new"}, "versions is str, expected a table"),
        (ENROLS, {"versions": {"torch": 2.5}}, "versions 'torch' is float, expected text"),
        (ENROLS, {"versions": {"torch": "2.5\n<script>"}}, "versions 'torch' is '2.5\\n<script>', expected a version"),
        (ENROLS, {"versions": {"torch": "1" * 65}}, f"versions 'torch' is '{'1' * 60}', expected a version"),
        (ENROLS, {"class_counts": "many"}, "class_counts is str, expected a list"),
        (DELIVERS, {"metrics": "fine"}, "metrics is str, expected a table"),
        (DELIVERS, {"metrics": {"global": [1]}}, "metrics 'global' is list, expected a table of metrics"),
        (DELIVERS, {"metrics": {"global": {"dice": 1e9}}}, "metrics 'global' 'dice' is 1000000000.0, expected a number from 0 to 1"),
        (DELIVERS, {"metrics": {"global": {"hd95": -1}}}, "metrics 'global' 'hd95' is -1, expected a number from 0 to 1e+06"),
        (ENROLS, {"n": {"train": 10**12}}, "n 'train' is 1000000000000, expected a count"),
        (DELIVERS, {"privacy": {"epsilon": 1.0, "delta": 0.1}}, "privacy says nothing of 'steps'"),
        (DELIVERS, {"reports": 3}, "reports is int, expected a table"),
        (DELIVERS, {"reports": {"$\\frac{$": {}}}, "reports '$\\\\frac{$' is no name of a model"),
        (DELIVERS, {"metrics": {"global": {"beauty": 0.5}}}, "metrics 'global' 'beauty' is no metric"),
        (DELIVERS, {"patients": 3}, "unexpected fact 'patients'"),
        (DELIVERS, {"privacy": {"epsilon": 1.0, "delta": 2.0}}, "privacy 'delta' is 2.0, expected a number from 0 to 1"),
        (ENROLS, {"n": {"train": 1, "autopsy": 1}}, "n 'autopsy' is no split"),
        (MEASURED, {"validation": {"$\\frac{$": 0.5}}, "validation '$\\\\frac{$' is no name of a model"),
        (MEASURED, {"validation": dict.fromkeys(map(str, range(99)), 0.5)}, "validation names 99 models, more than 16"),
        (MEASURED, {"loss": "low"}, "loss is str, expected a number"),
        (
            MEASURED,
            {"loss": 1e300},
            "loss is 1e+300: training diverged at the site; lower its learning rate or check its images",
        ),
        (MEASURED, {"n_samples": True}, "n_samples is bool, expected a number"),
    ],
)
def test_facts_that_cannot_be_meant(declared: Any, facts: dict[str, Any], words: str) -> None:
    assert unfit(Message({}, facts), declared) == words


def test_what_must_be_said() -> None:
    assert unfit(Message(), ENROLS, ("n",)) == "fact 'n' is missing"
    assert unfit(Message({}, {"metrics": {"deployed": {"dice": None, "hd95": 40.0}}}), DELIVERS, ("metrics",)) is None


class Attacked(LocalExchange):
    """The plain loop with one site whose answers to a phase are another's."""

    victim, phase = "B", ""
    answers: Callable[[Message], Message] = staticmethod(lambda message: message)

    def answer(self, site: str, step: Step, message: Message) -> Reply:
        reply = super().answer(site, step, message)
        if site == self.victim and step.phase == self.phase and reply.message is not None:
            return Reply(type(self).answers(reply.message))
        return reply


ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "a metric that is text": ("train", {"validation": "good"}),
    "a loss without end": ("train", {"loss": 10**400}),
    "an event of an unknown kind": ("train", event(kind="party")),
    "an event in another's name": ("train", event(site="A")),
    "facts nested without end": ("train", {"more": nested(5000)}),
    "counts that are a list": (ENROL, {"n": [1, 2, 3]}),
    "counts that are text": (ENROL, {"n": "many"}),
    "final metrics that are text": (DELIVER, {"metrics": "good"}),
    "a Dice of a thousand million": (DELIVER, {"metrics": {"global": {"dice": 1e9}}}),
    "half a character": ("train", {"\ud800": 1}),
    "a fact that nobody asked for": ("train", {"patients": 3}),
    "votes on a thousand models": ("train", {"validation": {str(number): 0.5 for number in range(1000)}}),
    "too few class counts": (ENROL, {"class_counts": [1]}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_one_site_cannot_end_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    phase, changes = ATTACKS[name]
    monkeypatch.setattr(Attacked, "phase", phase)
    monkeypatch.setattr(Attacked, "answers", staticmethod(lambda message: Message(message.states, {**message.facts, **changes})))
    monkeypatch.setattr("medflare.federation.local.loop.LocalExchange", Attacked)
    results = run_local("fedavg", TINY, ("A", "B", "C"), rounds=1, seed=0)
    assert results["status"] == "COMPLETED", results["reason"]
    validate_results(results)
    assert {found["site"] for found in results["events"] if found["kind"] == "rejected"} == {"B"}
    assert all(results["sites"][site]["metrics"]["global"]["dice"] is not None for site in "AC")


def test_too_few_sites_that_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attacked, "phase", ENROL)
    monkeypatch.setattr(Attacked, "answers", staticmethod(lambda message: Message({}, {"n": "many"})))
    monkeypatch.setattr("medflare.federation.local.loop.LocalExchange", Attacked)
    results = run_local("fedavg", TINY, ("A", "B"), rounds=1, seed=0)
    assert results["status"] == "FAILED" and "min_sites is 2" in results["reason"]


HIDDEN: dict[str, dict[str, tuple[str, Callable[[Message], Message]]]] = {
    "fedsm": {
        "no sample count": ("train", lambda sent: Message(sent.states, {"loss": 0.5, "validation": {}})),
        "no validation": ("train", lambda sent: Message(sent.states, {"n_samples": sent.facts["n_samples"]})),
        "half a vote on gamma": ("tune", lambda sent: Message({}, {**sent.facts, "gains": {"0.5": 1.0}})),
        "no vote on gamma": ("tune", lambda sent: Message({}, {"n_samples": sent.facts["n_samples"]})),
    },
    "prr": {
        "too few class counts": (ENROL, lambda sent: Message({}, {**sent.facts, "class_counts": []})),
        "as many images as can be": (ENROL, lambda sent: Message({}, {**sent.facts, "n": {"train": 10**9}, "class_counts": [0, 2**53]})),
        "no sample count": ("train", lambda sent: Message(sent.states, {"loss": 0.5})),
    },
}


@pytest.mark.parametrize(("method", "name"), [(method, name) for method in HIDDEN for name in HIDDEN[method]])
def test_what_a_method_needs_and_one_site_keeps_back(method: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    phase, lie = HIDDEN[method][name]
    monkeypatch.setattr(Attacked, "phase", phase)
    monkeypatch.setattr(Attacked, "answers", staticmethod(lie))
    monkeypatch.setattr("medflare.federation.local.loop.LocalExchange", Attacked)
    results = run_local(method, TINY, ("A", "B", "C"), rounds=1, seed=0)
    assert results["status"] == "COMPLETED", results["reason"]
    validate_results(results)
    assert all(results["sites"][site]["metrics"]["deployed"]["dice"] is not None for site in "AC")
