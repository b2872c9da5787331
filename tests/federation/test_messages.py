"""What server and site take from each other: every message as its phase declares it, or one line that names what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation import strategies
from federation.replayed import FEDERATIONS, LIAR, ROUNDS, recorded
from federation.strategies import cases, copied
from medflare.core.errors import MedflareError, MessageError, StateError
from medflare.core.manifest import anything
from medflare.core.message import Message
from medflare.core.store import MemoryStore
from medflare.federation.exchange import numbered
from medflare.federation.participant import Participant
from medflare.federation.settings import ENROL, FINALIZE
from medflare.federation.update_validation.messages import DELIVERS, ENROLS, INVITES, NUMBERED, unfit, unreadable
from medflare.methods.base import MEASURED
from medflare.methods.catalogue import get_method, method_names
from methods import squares

INVITATION = {"role": "inside", "sites": ["A", "B", "C"]}
TASK = squares.task(network={"name": "unet", "channels": [4, 8], "norm": "batch"})


def event(**changes: Any) -> dict[str, Any]:
    return {"events": [{"kind": "warning", "message": "a note", **changes}]}


# -- replies -----------------------------------------------------------------------------------------------------------------

STATES: dict[str, Callable[[], Any]] = {
    "a list": lambda: [1],
    "an entry that is no state": lambda: {"model": 3},
    "a number for a tensor": lambda: {"model": {"w": 3}},
    "an array for a tensor": lambda: {"model": {"w": torch.ones(2).numpy()}},
    "a sparse tensor": lambda: {"model": {"w": torch.ones(2).to_sparse()}},
    "a tensor without memory": lambda: {"model": {"w": torch.ones(2, device="meta")}},
    "a nested tensor": lambda: {"model": {"w": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}},
    "a parameter": lambda: {"model": {"w": torch.nn.Parameter(torch.ones(2))}},
    "a number for a name": lambda: {3: {}},
    "no Unicode": lambda: {"\ud800": {"w": 3}},
    "a book for a name": lambda: {"model": {"w" * 10**6: torch.ones(2)}},
}
FACTS: dict[str, Any] = {
    "a list": [1],
    "a tensor": {"loss": torch.ones(2)},
    "a huge number": {"n_samples": 10**5000},
    "half a character": {"validation": {"\ud800": 0.5}},
    "a million meta": {str(number): number for number in range(100_000)},
    "a set": {"validation": {1, 2}},
    "a number for a name": {"validation": {3: 0.5}},
    "nested without end": {"validation": strategies.nested(5000)},
    "a list that holds itself": {"validation": strategies.in_itself()},
    "few lists that are millions": {"validation": strategies.wide(100)},
    "events as text": {"events": "all is well"},
    "an event of no kind": {"events": [{"message": "hello"}]},
    "a verdict of the server's": event(kind="rejected"),
    "an event that says nothing": event(message="  "),
    "an event before the first round": event(round=-1),
    "an event with more": event(diagnosis="x"),
    "an event in another's name": event(site="other"),
    "a thousand events": {"events": event()["events"] * 1000},
}


@pytest.mark.parametrize("message", [Message(made(), {}) for made in STATES.values()] + [Message({}, meta) for meta in FACTS.values()])
def test_a_reply_that_cannot_be_read_is_refused_in_one_line(message: Message) -> None:
    reason = unreadable(message, "A")
    assert reason and "\n" not in reason and len(reason) < 200


def test_an_ordinary_reply_is_taken() -> None:
    meta = {"n_samples": 7, "loss": 0.5, "validation": {"global": None, "personal": 0.5}, **event(site="A", round=2)}
    message = Message({"model": {"w": torch.ones(2, 2).T, "count": torch.tensor(3)}}, meta)
    assert unreadable(message, "A") is None and unfit(message, MEASURED) is None
    assert unfit(Message({}, {"metrics": {"deployed": {"dice": None, "hd95": 40.0}}}), DELIVERS, ("metrics",)) is None
    assert "'n'" in str(unfit(Message(), ENROLS, ("n",)))


@pytest.mark.parametrize(
    ("declared", "meta"),
    [
        (MEASURED, {"validation": "good"}),
        (MEASURED, {"validation": {"$\\frac{$": 0.5}}),
        (MEASURED, {"validation": dict.fromkeys(map(str, range(99)), 0.5)}),
        (MEASURED, {"loss": "low"}),
        (MEASURED, {"loss": 1e300}),
        (MEASURED, {"n_samples": True}),
        (MEASURED, {"n_samples": 0}),
        (ENROLS, {"n": 7}),
        (ENROLS, {"n": {"train": -1}}),
        (ENROLS, {"n": {"train": 10**12}}),
        (ENROLS, {"n": {"test": 1}}),
        (ENROLS, {"n": {"train": 1, "autopsy": 1}}),
        (ENROLS, {"versions": {"torch": "2.5\n<script>"}}),
        (ENROLS, {"versions": {"torch": "1" * 65}}),
        (ENROLS, {"class_counts": "many"}),
        (DELIVERS, {"metrics": {"global": [1]}}),
        (DELIVERS, {"metrics": {"global": {"dice": 1e9}}}),
        (DELIVERS, {"metrics": {"global": {"hd95": -1}}}),
        (DELIVERS, {"metrics": {"global": {"beauty": 0.5}}}),
        (DELIVERS, {"privacy": {"epsilon": 1.0, "delta": 0.1}}),
        (DELIVERS, {"privacy": {"epsilon": 1.0, "delta": 2.0, "steps": 1}}),
        (DELIVERS, {"reports": {"$\\frac{$": {}}}),
        (DELIVERS, {"patients": 3}),
    ],
    ids=str,
)
def test_a_fact_that_its_declaration_does_not_take_is_named(declared: Any, meta: dict[str, Any]) -> None:
    problem = unfit(Message({}, meta), declared)
    assert problem and next(iter(meta)) in problem and "\n" not in problem


# -- requests ----------------------------------------------------------------------------------------------------------------


def participant(store: MemoryStore | None = None) -> Participant:
    return Participant("A", lambda role: squares.site("A", TASK), get_method("fedavg"), {}, store=store)


def training(step: int = 0) -> Message:
    return numbered(Message({"model": squares.start(TASK)}), step, 1)


def changed(ending: str, new: Callable[[torch.Tensor], Any]) -> Callable[[Message], None]:
    """The first tensor whose name ends so is replaced."""

    def change(message: Message) -> None:
        state = message.states["model"]
        name = next(name for name in state if name.endswith(ending))
        state[name] = new(state[name])

    return change


WRONG: dict[str, tuple[Callable[[Message], Any], str]] = {
    "no model": (lambda message: message.states.clear(), "model"),
    "an entry more": (lambda message: message.states.update(patients={}), "patients"),
    "a tensor more": (lambda message: message.states["model"].update(extra=torch.ones(1)), "extra"),
    "another shape": (changed("weight", lambda tensor: tensor[:1]), "shape"),
    "another dtype": (changed("weight", lambda tensor: tensor.double()), "float64"),
    "NaN": (changed("weight", lambda tensor: tensor * torch.nan), "NaN"),
    "a variance below 0": (changed("running_var", lambda tensor: -tensor), "running_var"),
    "no memory": (changed("weight", lambda tensor: torch.empty_like(tensor, device="meta")), "weight"),
    "no tensor": (changed("weight", lambda tensor: tensor.tolist()), "weight"),
    "a metadata item more": (lambda message: message.meta.update(rate=0.5), "rate"),
    "no step": (lambda message: message.meta.pop("step"), "step"),
    "a step as text": (lambda message: message.meta.update(step="first"), "step"),
    "no rounds": (lambda message: message.meta.update(run_rounds=None), "run_rounds"),
    "a million meta": (lambda message: message.meta.update({"more": list(range(2**20))}), "262144"),
    "an object": (lambda message: message.meta.update(more=object()), "object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_costs_the_site_the_task_alone(name: str) -> None:
    spoil, token = WRONG[name]
    store = MemoryStore()
    site = participant(store)
    site.answer(ENROL, 0, Message({}, dict(INVITATION)))
    message = training()
    spoil(message)
    with pytest.raises(MessageError, match=token) as caught:
        site.answer("train", 0, message)
    assert "\n" not in str(caught.value)
    fresh = participant()
    fresh.answer(ENROL, 0, Message({}, dict(INVITATION)))
    assert squares.equal(site.answer("train", 0, training()).states["model"], fresh.answer("train", 0, training()).states["model"])


@pytest.mark.parametrize(
    ("meta", "token"),
    [
        ({"role": "lead"}, "role"),
        ({"sites": "A, B"}, "sites"),
        ({"sites": []}, "sites"),
        ({"sites": ["B", "A"]}, "sites"),
        ({"sites": ["B", "C"]}, "sites"),
        ({"role": "outside"}, "outside"),
        ({"finished": -1}, "finished"),
        ({"hyper": 3}, "hyper"),
        ({"patients": 3}, "patients"),
    ],
)
def test_a_wrong_invitation_is_refused(meta: dict[str, Any], token: str) -> None:
    site = participant()
    with pytest.raises(MessageError, match=token):
        site.answer(ENROL, 0, Message({}, {**INVITATION, **meta}))
    assert site.answer(ENROL, 0, Message({}, dict(INVITATION))).meta["n"] == squares.site("A").n


def test_weights_to_start_from_that_the_task_does_not_name_are_refused() -> None:
    with pytest.raises(MessageError, match="start"):
        participant().answer(ENROL, 0, Message({"start": squares.start(TASK)}, dict(INVITATION)))


def test_a_step_that_the_run_does_not_have_is_refused_and_an_earlier_one_answered_again() -> None:
    store = MemoryStore()
    site = participant(store)
    site.answer(ENROL, 0, Message({}, {**INVITATION, "steps": 3}))
    first = site.answer("train", 0, training())
    restarted = participant(store)
    for member in (site, restarted):
        with pytest.raises(MessageError, match="step is 4"):
            member.answer("train", 1, training(4))
        with pytest.raises(MessageError, match="round"):
            member.answer("train", -1, training())
        assert squares.equal(member.answer("train", 0, training()).states["model"], first.states["model"])


@pytest.mark.parametrize(("item", "value"), [("selector", {"name": "vgg11"}), ("sites", ["A", "B"]), ("gamma", 1.5)])
def test_a_super_model_that_is_not_the_runs_is_refused(item: str, value: Any) -> None:
    found = recorded("fedsm")
    message = copied(found.sent[FINALIZE, ROUNDS, 0][LIAR])
    message.meta[item] = value
    with pytest.raises(MessageError, match=item):
        found.participants[LIAR].answer(FINALIZE, ROUNDS, message)


def test_class_totals_of_other_classes_are_refused() -> None:
    found = recorded("prr")
    message = copied(found.sent["share_normalisation", ROUNDS, 0][LIAR])
    message.meta["class_totals"] = [[1.0, 2.0, 3.0]]
    with pytest.raises(MessageError, match="class_totals"):
        found.participants[LIAR].answer("share_normalisation", ROUNDS, message)


def test_a_selector_is_not_trained_without_the_models_that_it_chooses_from() -> None:
    found, place = recorded("fedsm_extra"), ("train_selector", ROUNDS, 0)
    late = Participant(LIAR, lambda role: squares.site(LIAR, found.task), found.method, found.hyper)
    late.answer(ENROL, 0, Message({}, dict(INVITATION)))
    message = copied(found.sent[place][LIAR])
    message.states = {entry: state for entry, state in message.states.items() if entry.startswith("selector")}
    with pytest.raises(StateError, match="finished models"):
        late.answer("train_selector", ROUNDS, message)


def test_every_fact_and_every_delivery_of_every_method_is_declared() -> None:
    for name in method_names():
        algorithm = get_method(name).site_class
        assert algorithm.delivery is not None, name
        for phase in (*algorithm.phases, algorithm.delivery):
            loose = [item for item in (*phase.request_meta, *phase.reply_meta) if item.validator is anything]
            assert not loose, (name, phase.name, loose)
    assert all(item.validator is not anything for item in (*INVITES, *NUMBERED, *ENROLS, *DELIVERS))


@pytest.mark.parametrize("name", [name for name in FEDERATIONS if name != "scaffold"])
def test_a_request_that_is_nearly_right_is_answered_or_refused_in_one_line(name: str) -> None:
    found = recorded(name)
    member = found.participants[LIAR]
    (place,) = [place for place in found.sent if place[0] == FINALIZE]

    @cases(4)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        problem = ""
        try:
            assert member.answer(FINALIZE, place[1], data.draw(strategies.nearly(found.sent[place][LIAR]))).meta["metrics"]["deployed"]
        except MedflareError as error:
            problem = str(error)
        assert "\n" not in problem

    one()
    assert member.answer(FINALIZE, place[1], copied(found.sent[place][LIAR])).meta["metrics"] == found.replies[place][LIAR].meta["metrics"]
