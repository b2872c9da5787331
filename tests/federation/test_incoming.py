"""The gate at a site: what a server sends is as the phase declares, or it ends that task in one line and changes nothing."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import event, given
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
from medflare.federation.screening.incoming import INVITES, NUMBERED, Incoming, uninviting, unnumbered, unreadable
from medflare.federation.screening.replies import DELIVERS, ENROLS
from medflare.federation.settings import DELIVER, ENROL
from medflare.methods.catalogue import get_method, method_names
from methods import squares

INVITATION = {"role": "inside", "sites": ["A", "B", "C"]}
TASK = squares.task(network={"name": "unet", "channels": [4, 8], "norm": "batch"})


def participant(store: MemoryStore | None = None) -> Participant:
    return Participant("A", lambda role: squares.site("A", TASK), get_method("fedavg"), {}, store=store)


def training() -> Message:
    return numbered(Message({"model": squares.start(TASK)}), 0, 1)


def changed(**tensors: Callable[[torch.Tensor], Any]) -> Callable[[Message], None]:
    """The first tensor whose name ends so is replaced."""

    def change(message: Message) -> None:
        state = message.states["model"]
        for ending, new in tensors.items():
            name = next(name for name in state if name.endswith(ending))
            state[name] = new(state[name])

    return change


WRONG: dict[str, tuple[Callable[[Message], Any], str]] = {
    "no model": (lambda message: message.states.clear(), "missing entry 'model'"),
    "an entry more": (lambda message: message.states.update(patients={}), "unexpected entry 'patients'"),
    "a tensor more": (lambda message: message.states["model"].update(extra=torch.ones(1)), "model: unexpected tensor 'extra'"),
    "another shape": (changed(weight=lambda tensor: tensor[:1]), "has shape"),
    "another dtype": (changed(weight=lambda tensor: tensor.double()), "has dtype torch.float64, expected torch.float32"),
    "NaN": (changed(weight=lambda tensor: tensor * torch.nan), "holds NaN or infinity"),
    "a variance below 0": (changed(running_var=lambda tensor: -tensor), "holds a number below 0"),
    "no memory": (changed(weight=lambda tensor: torch.empty_like(tensor, device="meta")), "holds no numbers of its own"),
    "no tensor": (changed(weight=lambda tensor: tensor.tolist()), "is list, not a tensor"),
    "a fact more": (lambda message: message.facts.update(rate=0.5), "unexpected fact 'rate'"),
    "no step": (lambda message: message.facts.pop("step"), "fact 'step' is missing"),
    "a step as text": (lambda message: message.facts.update(step="first"), "step is str, expected a count"),
    "a step before the first": (lambda message: message.facts.update(step=-1), "step is -1, expected a count"),
    "no rounds": (lambda message: message.facts.update(run_rounds=None), "run_rounds is NoneType, expected a count"),
    "a million facts": (lambda message: message.facts.update({"more": list(range(2**20))}), "over 262144 bytes of facts"),
    "an object": (lambda message: message.facts.update(more=object()), "neither number nor text (object)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_costs_the_site_the_task_alone(name: str) -> None:
    spoil, words = WRONG[name]
    store = MemoryStore()
    site = participant(store)
    site.answer(ENROL, 0, Message({}, dict(INVITATION)))
    before = {kept: store.load(kept) or Message() for kept in store.names()}
    message = training()
    spoil(message)
    with pytest.raises(MessageError, match="site A does not take what the server sent for 'train' of round 0: ") as caught:
        site.answer("train", 0, message)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert before.keys() == set(store.names()) and all((store.load(kept) or Message()).facts == before[kept].facts for kept in before)
    fresh = participant()
    fresh.answer(ENROL, 0, Message({}, dict(INVITATION)))
    assert squares.equal(site.answer("train", 0, training()).states["model"], fresh.answer("train", 0, training()).states["model"])


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"role": "lead"}, "role is 'lead', expected inside or outside"),
        ({"sites": "A, B"}, "sites is str, expected a list"),
        ({"sites": []}, "no sorted list of different names"),
        ({"sites": ["B", "A"]}, "no sorted list of different names"),
        ({"sites": ["A", 3]}, "sites [1] is int, expected text"),
        ({"sites": ["B", "C"]}, "A is not among the sites that train"),
        ({"role": "outside"}, "A is among the sites that train"),
        ({"finished": -1}, "finished is -1, expected a count"),
        ({"seed": "one"}, "seed is str, expected a number"),
        ({"hyper": 3}, "hyper is int, expected a table"),
        ({"patients": 3}, "unexpected fact 'patients'"),
    ],
)
def test_an_invitation_that_cannot_be_meant(facts: dict[str, Any], words: str) -> None:
    site = participant()
    with pytest.raises(MessageError) as caught:
        site.answer(ENROL, 0, Message({}, {**INVITATION, **facts}))
    assert words in str(caught.value)
    assert site.answer(ENROL, 0, Message({}, dict(INVITATION))).facts["n"] == squares.site("A").n


def test_a_step_that_is_none_of_the_run() -> None:
    """Far ahead it is refused; asked again, or after an interruption an earlier one, it is answered as before."""
    store = MemoryStore()
    site = participant(store)
    site.answer(ENROL, 0, Message({}, {**INVITATION, "steps": 3}))
    first = site.answer("train", 0, training())
    for step, phase, round, words in (
        (10**9, "train", 1, "its step is 1000000000, the run that the site enrolled in has 3 and a delivery"),
        (4, DELIVER, 1, "its step is 4, the run"),
        (0, "validate", 1, "its step 0 is 'validate' of round 1, after step 0, 'train' of round 0"),
    ):
        with pytest.raises(MessageError, match=words):
            site.answer(phase, round, numbered(Message({"model": squares.start(TASK)}), step, 1))
    restarted = participant(store)
    with pytest.raises(MessageError, match="has 3 and a delivery"):
        restarted.answer("train", 1, numbered(Message({"model": squares.start(TASK)}), 4, 1))
    for again in (site, restarted):
        assert squares.equal(again.answer("train", 0, training()).states["model"], first.states["model"])
    site.answer("validate", 1, numbered(Message({"model": squares.start(TASK)}), 1, 1))
    with pytest.raises(MessageError, match="its step 2 is 'train' of round 0, after step 1, 'validate' of round 1"):
        site.answer("train", 0, numbered(Message({"model": squares.start(TASK)}), 2, 1))
    assert site.answer("validate", 1, numbered(Message({"model": squares.start(TASK)}), 1, 1)).facts["validation"]


def test_weights_to_start_from_that_the_task_does_not_name() -> None:
    with pytest.raises(MessageError, match="unexpected entry 'start'"):
        participant().answer(ENROL, 0, Message({"start": squares.start(TASK)}, dict(INVITATION)))


def test_a_round_is_a_count() -> None:
    for round in (-1, "first", None):
        with pytest.raises(MessageError, match="its round is no count"):
            participant().answer("train", round, training())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"selector": {"name": "vgg11"}}, "fact 'selector' is {'name': 'vgg11'}, this run has {'name': 'compact_selector'}"),
        ({"sites": ["A", "B"]}, "fact 'sites' is ['A', 'B'], this run has ['A', 'B', 'C']"),
        ({"gamma": 1.5}, "gamma is 1.5, expected a number from 0 to 1"),
    ],
)
def test_a_super_model_that_is_not_the_runs(facts: dict[str, Any], words: str) -> None:
    found = recorded("fedsm")
    message = copied(found.sent[DELIVER, ROUNDS, 0][LIAR])
    message.facts |= facts
    with pytest.raises(MessageError) as caught:
        found.participants[LIAR].answer(DELIVER, ROUNDS, message)
    assert words in str(caught.value)


def test_class_totals_of_other_classes() -> None:
    found = recorded("prr")
    message = copied(found.sent["share_normalisation", ROUNDS, 0][LIAR])
    message.facts["class_totals"] = [[1.0, 2.0, 3.0]]
    with pytest.raises(MessageError, match="'class_totals' is not of the task's classes"):
        found.participants[LIAR].answer("share_normalisation", ROUNDS, message)


def test_a_selector_to_train_without_the_models_that_it_chooses_from() -> None:
    found, place = recorded("fedsm_extra"), ("train_selector", ROUNDS, 0)
    late = Participant(LIAR, lambda role: squares.site(LIAR, found.task), found.method, found.hyper)
    late.answer(ENROL, 0, Message({}, dict(INVITATION)))
    message = copied(found.sent[place][LIAR])
    message.states = {entry: state for entry, state in message.states.items() if entry.startswith("selector")}
    with pytest.raises(StateError, match="before it was sent the finished models"):
        late.answer("train_selector", ROUNDS, message)


def test_every_fact_and_every_delivery_of_every_method_is_declared() -> None:
    """What takes anything is no gate."""
    for name in method_names():
        half = get_method(name).site_class
        assert half.delivery is not None, name
        for phase in (*half.phases, half.delivery):
            loose = [fact for fact in (*phase.tells, *phase.reports) if fact.takes is anything]
            assert not loose, (name, phase.name, loose)
    assert all(fact.takes is not anything for fact in (*INVITES, *NUMBERED, *ENROLS, *DELIVERS))


# -- fuzzed ------------------------------------------------------------------------------------------------------------------


@cache
def gate(name: str) -> Incoming:
    found = recorded(name)
    return Incoming(found.method.plan(found.task, ("A", "B", "C"), found.hyper))


def refused(name: str, phase: str, message: Message) -> str | None:
    """What a participant asks of a message before a half sees it."""
    half = recorded(name).method.site_class
    if problem := unreadable(message):
        return problem
    if phase == ENROL:
        return uninviting(message, LIAR)
    if problem := unnumbered(message):
        return problem
    own = Message(message.states, {fact: value for fact, value in message.facts.items() if fact not in ("step", "run_rounds")})
    declared = half.delivery if phase == DELIVER else half.phase(phase)
    assert declared is not None
    return gate(name).refusal(declared, own)


@cases(300)
@given(st.data())
def test_no_message_raises_anything_at_the_site(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*FEDERATIONS]))
    place = data.draw(st.sampled_from(sorted(recorded(name).sent)))
    known = recorded(name).sent[place][LIAR if place[0] != DELIVER else data.draw(st.sampled_from([LIAR, "O"]))]
    assert place[0] == ENROL or refused(name, place[0], known) is None
    problem = refused(name, place[0], data.draw(strategies.nearly(known)))
    event(f"refused: {problem is not None}")
    assert problem is None or (problem and "\n" not in problem and len(problem) < 2000)


@pytest.mark.parametrize("name", ["fedavg", "fedsm", "prr", "iop_fl", "feddag"])
def test_what_a_site_takes_it_can_work_with(name: str) -> None:
    """A delivery that is nearly right is refused in one line, or the models are made, measured and finite."""
    member, (place,) = recorded(name).participants[LIAR], [place for place in recorded(name).sent if place[0] == DELIVER]
    sent = recorded(name).sent[place][LIAR]

    @cases(4)
    @given(strategies.nearly(sent))
    def one(message: Message) -> None:
        problem = ""
        try:
            assert member.answer(DELIVER, place[1], message).facts["metrics"]["deployed"]
        except MedflareError as error:
            problem = str(error)
        assert "\n" not in problem
        event(f"refused: {problem != ''}")

    one()
    assert member.answer(DELIVER, place[1], copied(sent)).facts["metrics"] == recorded(name).replies[place][LIAR].facts["metrics"]
