"""Federations whose replies are recorded once and replayed with faults, so that a whole run takes milliseconds; and random faults.

HYPOTHESIS_PROFILE=thorough takes new random cases, twenty times as many; by default every run tries the same ones.
"""

import copy
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from helpers.small_tasks import small_task
from medflare.core.message import Message
from medflare.federation.exchange import SiteReply
from medflare.federation.participant import Participant
from medflare.federation.run import Run
from medflare.federation.settings import run_settings
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig
from methods import squares

SITES: Final = ("A", "B", "C")
OUTSIDE: Final = ("O",)
FAULTY: Final = "B"
ROUNDS: Final = 1
Place = tuple[str, int, int]  # phase, round, part of a step

# Federations that together have every phase, entry and item: (method, its server algorithm, hyper-parameters).
FEDERATIONS: Final[dict[str, tuple[str, str | None, dict[str, Any]]]] = {
    "fedavg": ("fedavg", None, {}),
    "fedsm": ("fedsm", None, {"selector": "compact_selector", "selector_updates": 1}),
    "fedsm pfedme": (
        "fedsm",
        None,
        {"selector": "compact_selector", "selector_updates": 1, "personalization": "pfedme"},
    ),
    "fedsm ridge": ("fedsm", None, {"personalization": "perfedavg"}),
    "fedsm_extra": ("fedsm_extra", None, {"selector": "compact_selector", "selector_rounds": 1}),
    "prr": ("prr", None, {}),
    "grace": ("grace", None, {"probe": True}),
    "iop_fl": ("iop_fl", None, {}),
    "feddag": ("feddag", None, {"generator_width": 4, "distribution": "type2"}),
    "robust+sha": ("robust", "sha", {"rule": "median"}),
    "scaffold": ("scaffold", None, {}),
    "fedrep": ("fedrep", None, {}),
}


@dataclass
class Recorded:
    """One federation without faults: what was sent to every site and what it replied, by place."""

    method: Method
    task: TaskConfig
    hyper: Mapping[str, Any]
    sent: dict[Place, dict[str, Message]] = field(default_factory=dict)
    replies: dict[Place, dict[str, Message]] = field(default_factory=dict)
    participants: dict[str, Participant] = field(default_factory=dict)

    def run(self, folder: Path | None = None) -> Run:
        """The same federation, to be executed with an exchange."""
        settings = run_settings({"rounds": ROUNDS, "seed": squares.SEED, "outside": list(OUTSIDE)})
        return Run(self.method, self.task, self.hyper, settings, SITES, folder=folder)

    def present(self, round: int) -> list[str]:
        """Every site, at any time: a recording is an exchange with real participants."""
        return [*SITES, *OUTSIDE]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, SiteReply]:
        place = step.phase, step.round, step.part
        self.sent[place] = {site: copied(message) for site, message in outgoing.items()}
        replies = {
            site: self.participants[site].reply(*place[:2], copied(message))
            for site, message in outgoing.items()
        }
        self.replies[place] = {site: copied(message) for site, message in replies.items()}
        return {site: SiteReply(message) for site, message in replies.items()}


class Replay:
    """An exchange that replays a recording; at the places of `faults` the faulty site replies with these."""

    def __init__(self, recorded: Recorded, faults: Mapping[Place, SiteReply]):
        self.recorded, self.faults = recorded, faults
        self.sent: dict[Place, dict[str, Message]] = {}

    def present(self, round: int) -> list[str]:
        return [*SITES, *OUTSIDE]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, SiteReply]:
        place = step.phase, step.round, step.part
        self.sent[place] = {site: copied(message) for site, message in outgoing.items()}
        replies = {site: SiteReply(copied(self.recorded.replies[place][site])) for site in outgoing}
        if place in self.faults and FAULTY in outgoing:
            replies[FAULTY] = self.faults[place]
        return replies


@cache
def recorded(name: str) -> Recorded:
    """A federation of `FEDERATIONS` with three sites and one outside, recorded once in a process."""
    method_name, server, hyper = FEDERATIONS[name]
    recording = Recorded(get_method(method_name, server=server), small_task(batch_size=6), hyper)
    for site in (*SITES, *OUTSIDE):
        recording.participants[site] = participant(recording, site)
    results = recording.run().execute(recording)
    assert results["status"] == "COMPLETED", results["reason"]
    return recording


def participant(recording: Recorded, site: str) -> Participant:
    """A new participant of a recorded federation."""
    return Participant(
        site, lambda role: squares.site(site, recording.task), recording.method, recording.hyper
    )


def copied(message: Message) -> Message:
    """A copy of the message that shares its tensors."""
    return Message(
        {entry: dict(state) for entry, state in message.states.items()}, copy.deepcopy(message.meta)
    )


# -- random faults -----------------------------------------------------------------------------------------------------------

_COMMON: Final[dict[str, Any]] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("ci", derandomize=True, **_COMMON)
settings.register_profile("thorough", print_blob=True, **_COMMON)
_PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "ci")


def cases(count: int) -> settings:
    """The settings of a test with so many cases by default."""
    return settings(
        settings.get_profile(_PROFILE), max_examples=count * (20 if _PROFILE == "thorough" else 1)
    )


NAMES: Final = (
    "n",
    "train",
    "class_counts",
    "metrics",
    "loss",
    "n_samples",
    "events",
    "validation",
    "global",
    "deployed",
    "dice",
    "A",
)
ODD_NAMES: Final = (
    "",
    "\ud800",
    "$\\frac{$",
    "a\nb",
    "<script>",
    "x" * 70_000,
    "\0",
    "=cmd()",
    "../x",
    "gl\u043ebal",
    "\u202ex",
)
names: SearchStrategy[str] = st.sampled_from((*NAMES, *ODD_NAMES)) | st.text(
    st.characters(exclude_categories=()), max_size=8
)
EDGES: Final = (
    0,
    -1,
    2**53,
    2**63 + 1,
    10**400,
    math.nan,
    math.inf,
    -0.0,
    1e308,
    5e-324,
    1.0000001,
)
numbers: SearchStrategy[Any] = st.sampled_from(EDGES) | st.integers(-3, 40) | st.floats(width=64)
ODD: Final = (
    b"x",
    {1, 2},
    1j,
    len,
    np.float32(0.5),
    np.array([1.0]),
    torch.ones(1),
    {1: 2, None: 4},
    Message(),
)
leaves: SearchStrategy[Any] = st.none() | st.booleans() | numbers | names | st.sampled_from(ODD)
values: SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
# tensor -> what replaces it: of another kind, dtype or shape, or with wrong values
SPOILT: Final[dict[str, Callable[[Tensor], Any]]] = {
    "nothing": lambda tensor: None,
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: torch.empty_like(tensor, device="meta"),
    "flat": lambda tensor: tensor.reshape(-1),
    "NaN": lambda tensor: (
        torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor
    ),
    "largest": lambda tensor: torch.full_like(
        tensor, (torch.finfo if tensor.is_floating_point() else torch.iinfo)(tensor.dtype).max
    ),
    "negative": lambda tensor: -tensor.abs() - 1,
    "zero": torch.zeros_like,
    "flipped sign": lambda tensor: -tensor,
}
tensors: SearchStrategy[Any] = st.builds(
    lambda name, tensor: SPOILT[name](tensor),
    st.sampled_from([*SPOILT]),
    st.sampled_from([torch.ones(2, 3), torch.tensor(3)]),
)


@st.composite
def nearly(draw: DrawFn, message: Message) -> Message:
    """A copy of a message in which one thing is changed."""
    changed = copied(message)
    if not changed.states or draw(st.booleans()):
        table = changed.meta
        while inner := [value for value in table.values() if isinstance(value, dict) and value]:
            if draw(st.booleans()):
                break
            table = draw(st.sampled_from(inner))
        key = draw(st.sampled_from(sorted(table)) | names) if table else draw(names)
        if draw(st.integers(0, 4)):
            table[key] = draw(values)
        else:
            table.pop(key, None)
        return changed
    entry = draw(st.sampled_from(sorted(changed.states)))
    state = changed.states[entry]
    match draw(st.sampled_from(["tensor", "tensor", "tensor", "all", "drop", "more", "entry"])):
        case "drop":
            del changed.states[entry]
        case "entry":
            changed.states[draw(names)] = changed.states.pop(entry)
        case "more":
            state[draw(names)] = draw(tensors)
        case "all":
            spoil = SPOILT[draw(st.sampled_from(sorted(SPOILT)))]
            state.update({name: spoil(tensor) for name, tensor in state.items()})
        case _:
            name = draw(st.sampled_from(sorted(state)))
            state[name] = SPOILT[draw(st.sampled_from(sorted(SPOILT)))](state[name])
    return changed
