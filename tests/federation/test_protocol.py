"""Messages between server and site: each is as its phase declares it, or one line names the problem."""

import json
import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from federation.replayed import FAULTY, ROUNDS, copied, recorded
from federation.replayed import participant as replayed_participant
from medflare.core.errors import MessageError, StateError
from medflare.core.message import Message
from medflare.core.specs import StateSpec
from medflare.core.store import MemoryStore
from medflare.federation.builtin_messages import (
    COUNTS,
    ENROL_REPLY_META,
    FINAL_REPLY_META,
    INVITATION_META,
    METRICS,
    RUN_META,
)
from medflare.federation.exchange import with_step_number
from medflare.federation.participant import Participant
from medflare.federation.protocol import (
    declaration_problem,
    message_problem,
    negative,
    non_finite,
    tensor_problem,
)
from medflare.federation.settings import FINALIZE
from medflare.methods.catalogue import get_method, method_names
from medflare.methods.parts.measured import MEASURED
from methods import squares

TASK = squares.task(network={"name": "unet", "channels": [4, 8], "norm": "batch"})


def event(**changes: Any) -> dict[str, Any]:
    return {"events": [{"kind": "warning", "message": "a note", **changes}]}


# -- replies -----------------------------------------------------------------------------------------------------------------

STATES: dict[str, Callable[[], Any]] = {
    "a list": lambda: [1],
    "an entry that is not a state": lambda: {"model": 3},
    "an array": lambda: {"model": {"w": torch.ones(2).numpy()}},
    "a sparse tensor": lambda: {"model": {"w": torch.ones(2).to_sparse()}},
    "a tensor without memory": lambda: {"model": {"w": torch.ones(2, device="meta")}},
    "a parameter": lambda: {"model": {"w": torch.nn.Parameter(torch.ones(2))}},
    "a number as a name": lambda: {3: {}},
    "invalid Unicode": lambda: {"\ud800": {"w": 3}},
    "a long name": lambda: {"model": {"w" * 10**6: torch.ones(2)}},
}
META: dict[str, Any] = {
    "a list": [1],
    "a tensor": {"loss": torch.ones(2)},
    "a huge number": {"n_samples": 10**5000},
    "invalid Unicode": {"validation": {"\ud800": 0.5}},
    "too many items": {str(number): number for number in range(100_000)},
    "a set": {"validation": {1, 2}},
    "a number as a name": {"validation": {3: 0.5}},
    "deep nesting": {"validation": json.loads("[" * 500 + "]" * 500)},
    "events as text": {"events": "all is well"},
    "an event without a kind": {"events": [{"message": "hello"}]},
    "an event of the server": event(kind="rejected"),
    "an event before the first round": event(round=-1),
    "an event with more": event(diagnosis="x"),
    "an event of another site": event(site="other"),
    "a thousand events": {"events": event()["events"] * 1000},
}


@pytest.mark.parametrize(
    "message",
    [Message(made(), {}) for made in STATES.values()]
    + [Message({}, meta) for meta in META.values()],
)
def test_an_invalid_reply_has_a_problem_in_one_line(message: Message) -> None:
    reason = message_problem(message, "A")
    assert reason and "\n" not in reason and len(reason) < 200


def test_a_valid_reply_has_no_problem() -> None:
    meta = {
        "n_samples": 7,
        "loss": 0.5,
        "validation": {"global": None, "personal": 0.5},
        **event(site="A", round=2),
    }
    message = Message({"model": {"w": torch.ones(2, 2).T, "count": torch.tensor(3)}}, meta)
    assert message_problem(message, "A") is None and declaration_problem(message, MEASURED) is None
    assert (
        declaration_problem(
            Message({}, {"metrics": {"deployed": {"dice": None, "hd95": 40.0}}}),
            FINAL_REPLY_META,
            (METRICS,),
        )
        is None
    )
    assert "'n'" in str(declaration_problem(Message(), ENROL_REPLY_META, (COUNTS,)))


ONE_END: Final[dict[str, Any]] = {"auc": 0.9, "low": 0.8, "high": None, "sensitivity": []}


@pytest.mark.parametrize(
    ("declared", "meta"),
    [
        (MEASURED, {"validation": "good"}),
        (MEASURED, {"loss": "low"}),
        (MEASURED, {"validation": {"$\\frac{$": 0.5}}),
        (MEASURED, {"validation": dict.fromkeys(map(str, range(99)), 0.5)}),
        (MEASURED, {"loss": 1e300}),
        (MEASURED, {"n_samples": True}),
        (MEASURED, {"n_samples": 0}),
        (ENROL_REPLY_META, {"n": 7}),
        (ENROL_REPLY_META, {"n": {"train": -1}}),
        (ENROL_REPLY_META, {"n": {"train": 10**12}}),
        (ENROL_REPLY_META, {"n": {"train": 1, "autopsy": 1}}),
        (ENROL_REPLY_META, {"versions": {"torch": "2.5\n<script>"}}),
        (ENROL_REPLY_META, {"class_counts": "many"}),
        (FINAL_REPLY_META, {"metrics": {"global": {"dice": 1e9}}}),
        (FINAL_REPLY_META, {"metrics": {"global": {"hd95": -1}}}),
        (FINAL_REPLY_META, {"metrics": {"global": {"beauty": 0.5}}}),
        (FINAL_REPLY_META, {"privacy": {"epsilon": 1.0, "delta": 0.1}}),
        (FINAL_REPLY_META, {"privacy": {"epsilon": 1.0, "delta": 2.0, "steps": 1}}),
        (FINAL_REPLY_META, {"patients": 3}),
        (FINAL_REPLY_META, {"metrics": {"global": [1]}}),
        (FINAL_REPLY_META, {"intervals": {"global": {"A": {"dice": [0.5]}}}}),
        (FINAL_REPLY_META, {"intervals": {"global": {"A": {"dice": ["0", "1"]}}}}),
        (FINAL_REPLY_META, {"classes": {"global": {"confusion": [], "roc": [ONE_END]}}}),
        (FINAL_REPLY_META, {"reports": {"$\\frac{$": {}}}),
        (FINAL_REPLY_META, {"classes": {"global": {}}}),
        (FINAL_REPLY_META, {"classes": {"global": {"confusion": [[[1, 2]]], "roc": []}}}),
        (FINAL_REPLY_META, {"classes": {"global": {"confusion": [[[1]]] * 17, "roc": []}}}),
        (
            FINAL_REPLY_META,
            {
                "classes": {
                    "global": {
                        "confusion": [],
                        "roc": [{"auc": 2, "low": None, "high": None, "sensitivity": []}],
                    }
                }
            },
        ),
        (
            FINAL_REPLY_META,
            {
                "classes": {
                    "global": {
                        "confusion": [],
                        "roc": [{"auc": 1, "low": None, "high": None, "sensitivity": [0.5]}],
                    }
                }
            },
        ),
    ],
    ids=str,
)
def test_an_item_of_another_type_is_named(declared: Any, meta: dict[str, Any]) -> None:
    problem = declaration_problem(Message({}, meta), declared)
    assert problem and next(iter(meta)) in problem and "\n" not in problem


# -- requests ----------------------------------------------------------------------------------------------------------------


def participant(store: MemoryStore | None = None) -> Participant:
    return Participant(
        "A",
        lambda role: squares.site("A", TASK),
        get_method("fedavg"),
        {},
        store=store or MemoryStore(),
    )


def training(step: int = 0) -> Message:
    return with_step_number(Message({"model": squares.start(TASK)}), step, 1)


def changed(ending: str, new: Callable[[torch.Tensor], Any]) -> Callable[[Message], None]:
    """The first tensor whose name ends so is replaced."""

    def change(message: Message) -> None:
        state = message.states["model"]
        name = next(name for name in state if name.endswith(ending))
        state[name] = new(state[name])

    return change


WRONG_REQUESTS: dict[str, tuple[Callable[[Message], Any], str]] = {
    "no model": (lambda message: message.states.clear(), "model"),
    "another entry": (lambda message: message.states.update(patients={}), "patients"),
    "another tensor": (
        lambda message: message.states["model"].update(extra=torch.ones(1)),
        "extra",
    ),
    "another shape": (changed("weight", lambda tensor: tensor[:1]), "shape"),
    "another dtype": (changed("weight", lambda tensor: tensor.double()), "float64"),
    "NaN": (changed("weight", lambda tensor: tensor * torch.nan), "NaN"),
    "a variance below 0": (changed("running_var", lambda tensor: -tensor), "running_var"),
    "a list": (changed("weight", lambda tensor: tensor.tolist()), "weight"),
    "another item": (lambda message: message.meta.update(rate=0.5), "rate"),
    "no step": (lambda message: message.meta.pop("step"), "step"),
    "no rounds": (lambda message: message.meta.update(run_rounds=None), "run_rounds"),
    "too many items": (lambda message: message.meta.update({"more": list(range(2**20))}), "262144"),
    "an object": (lambda message: message.meta.update(more=object()), "object"),
}


@pytest.mark.parametrize("name", WRONG_REQUESTS)
def test_a_wrong_request_has_no_effect_on_the_next_one(name: str) -> None:
    spoil, token = WRONG_REQUESTS[name]
    store = MemoryStore()
    site = participant(store)
    squares.enrol(site, *squares.SITES)
    message = training()
    spoil(message)
    with pytest.raises(MessageError, match=token) as caught:
        site.reply("train", 0, message)
    assert "\n" not in str(caught.value)
    fresh = participant()
    squares.enrol(fresh, *squares.SITES)
    assert squares.equal(
        site.reply("train", 0, training()).states["model"],
        fresh.reply("train", 0, training()).states["model"],
    )


@pytest.mark.parametrize(
    ("meta", "token"),
    [
        ({"role": "lead"}, "role"),
        ({"sites": ["B", "C"]}, "sites"),
        ({"role": "outside"}, "outside"),
        ({"finished": -1}, "finished"),
        ({"patients": 3}, "patients"),
        ({"sites": ["A", "../../another-job/deployed"]}, "no name of a site"),
    ],
)
def test_a_wrong_invitation_raises(meta: dict[str, Any], token: str) -> None:
    site = participant()
    with pytest.raises(MessageError, match=token):
        squares.enrol(site, *squares.SITES, **meta)
    assert squares.enrol(site, *squares.SITES).meta["n"] == squares.site("A").n


def test_a_repeated_step_is_answered_again_also_after_a_restart() -> None:
    store = MemoryStore()
    site = participant(store)
    squares.enrol(site, *squares.SITES)
    first = site.reply("train", 0, training())
    for member in (site, participant(store)):
        with pytest.raises(MessageError, match="round"):
            member.reply("train", -1, training())
        assert squares.equal(
            member.reply("train", 0, training()).states["model"], first.states["model"]
        )


@pytest.mark.parametrize(
    ("federation", "phase", "item", "value"),
    [
        ("fedsm", FINALIZE, "selector", {"name": "vgg11"}),
        ("fedsm", FINALIZE, "sites", ["A", "B"]),
        ("fedsm", FINALIZE, "gamma", 1.5),
        ("prr", "share_normalisation", "class_totals", [[1.0, 2.0, 3.0]]),
    ],
)
def test_an_item_of_another_run_raises(federation: str, phase: str, item: str, value: Any) -> None:
    recording = recorded(federation)
    message = copied(recording.sent[phase, ROUNDS, 0][FAULTY])
    message.meta[item] = value
    with pytest.raises(MessageError, match=item):
        recording.participants[FAULTY].reply(phase, ROUNDS, message)


def test_training_a_selector_without_its_models_raises() -> None:
    recording = recorded("fedsm_extra")
    place = ("train_selector", ROUNDS, 0)
    late = replayed_participant(recording, FAULTY)
    squares.enrol(late, *squares.SITES)
    message = copied(recording.sent[place][FAULTY])
    message.states = {
        entry: state for entry, state in message.states.items() if entry.startswith("selector")
    }
    with pytest.raises(StateError, match="finished models"):
        late.reply("train_selector", ROUNDS, message)


def test_every_item_of_every_method_has_a_type() -> None:
    items = [*INVITATION_META, *RUN_META, *ENROL_REPLY_META, *FINAL_REPLY_META]
    for name in method_names():
        algorithm = get_method(name).site_class
        assert "finalize" in algorithm.phases, name
        for phase in algorithm.phases.values():
            items += [*phase.request_meta, *phase.meta]
    assert [item for item in items if item.type is Any] == []


# -- states ----------------------------------------------------------------------------------------


def test_only_nan_and_infinity_are_non_finite() -> None:
    state = {"w": torch.full((4,), 3e38), "count": torch.tensor(3), "none": torch.zeros(0)}
    assert non_finite(Message({"model": state})) is None and non_finite(Message()) is None
    for bad in (math.nan, math.inf, -math.inf):
        state["w"][1] = bad
        assert "model/w" in str(non_finite(Message({"model": state})))
    assert non_finite(Message({"model": {"w": torch.tensor([math.inf, -math.inf])}})) is not None, (
        "their sum is NaN"
    )


def test_a_running_variance_below_zero_is_detected() -> None:
    state = {"1.running_var": torch.tensor([0.5, 0.0]), "1.running_mean": torch.tensor([-1.0])}
    manifest = {"model": StateSpec.like(state, "")}
    assert negative(Message({"model": state}), manifest) is None and negative(Message(), {}) is None
    state["1.running_var"] = torch.tensor([0.5, -1e-6])
    message = Message({"model": state})
    assert "model/1.running_var" in str(negative(message, manifest))
    assert tensor_problem(message, manifest) == negative(message, manifest)
