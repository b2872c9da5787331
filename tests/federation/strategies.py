"""What a lying party may send: arbitrary meta and states, and valid messages with something changed in them, for Hypothesis.

HYPOTHESIS_PROFILE=thorough takes fresh random cases, twenty times as many; without it every run tries the same ones.
"""

import copy
import math
import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from medflare.core.message import Message

_COMMON: Final[dict[str, Any]] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", derandomize=True, **_COMMON)
settings.register_profile("thorough", print_blob=True, **_COMMON)
_PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "ci")


def cases(count: int) -> settings:
    """The settings of a test with so many cases in `make test`."""
    return settings(settings.get_profile(_PROFILE), max_examples=count * (20 if _PROFILE == "thorough" else 1))


class Hostile:
    """An object that fails whatever is asked of it."""

    def __bool__(self) -> bool:
        raise RuntimeError("hostile")

    def __len__(self) -> int:
        raise RuntimeError("hostile")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("hostile")

    __hash__ = object.__hash__


def nested(depth: int) -> Any:
    """A number in so many lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def wide(width: int) -> Any:
    """Few objects that are millions when they are written down: lists of the same list of the same list."""
    value: Any = [0] * width
    for _ in range(4):
        value = [value] * width
    return value


def in_itself() -> Any:
    """A list and a table that hold each other."""
    value: list[Any] = [1]
    value += [value, {"inner": value}]
    return value


KNOWN: Final = (
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
    "B",
)
BREAKING: Final = (
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
    "B\u200b",
    "\u202ex",
    "NaN",
)
names: SearchStrategy[str] = st.sampled_from((*KNOWN, *BREAKING)) | st.text(st.characters(exclude_categories=()), max_size=8)
EDGES: Final = (0, -1, 2**53, 2**63 + 1, 10**400, 10**4000, math.nan, math.inf, -math.inf, -0.0, 1e308, 5e-324, 1.0000001)
numbers: SearchStrategy[Any] = st.sampled_from(EDGES) | st.integers(-3, 40) | st.floats(width=64)
ODD: Final = (
    b"x",
    {1, 2},
    1j,
    ...,
    len,
    np.float32(0.5),
    np.array([1.0]),
    torch.ones(1),
    {1: 2, None: 4},
    {(1, 2): 3},
    Message(),
    Hostile(),
)
leaves: SearchStrategy[Any] = st.none() | st.booleans() | numbers | names | st.sampled_from(ODD)
small: SearchStrategy[Any] = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)
huge: SearchStrategy[Any] = st.sampled_from([nested(3000), wide(100), in_itself()])
anything: SearchStrategy[Any] = st.integers(0, 9).flatmap(lambda draw: huge if draw == 9 else small)
meta: SearchStrategy[Any] = st.dictionaries(names, anything, max_size=5) | anything  # of events see test_messages.py

# tensor -> what stands in its place: of another kind, dtype or shape, or with numbers that cannot be meant
SPOILT: Final[dict[str, Callable[[Tensor], Any]]] = {
    "nothing": lambda tensor: None,
    "hostile": lambda tensor: Hostile(),
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: torch.empty_like(tensor, device="meta"),
    "nested": lambda tensor: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "quantized": lambda tensor: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "negated view": lambda tensor: torch.ones_like(tensor, dtype=torch.complex64).conj().imag,
    "flat": lambda tensor: tensor.reshape(-1),
    "NaN": lambda tensor: torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor,
    "largest": lambda tensor: torch.full_like(tensor, (torch.finfo if tensor.is_floating_point() else torch.iinfo)(tensor.dtype).max),
    "negative": lambda tensor: -tensor.abs() - 1,
    "zero": torch.zeros_like,
    "turned": lambda tensor: -tensor,
}


def spoilt(name: str, tensor: Tensor) -> Any:
    """A tensor changed as `SPOILT` says; zeros where that is not possible."""
    try:
        return SPOILT[name](tensor.detach())
    except (RuntimeError, TypeError, NotImplementedError):
        return torch.zeros(())


tensors: SearchStrategy[Any] = st.builds(spoilt, st.sampled_from([*SPOILT]), st.sampled_from([torch.ones(2, 3), torch.tensor(3)]))
states: SearchStrategy[Any] = st.dictionaries(names, st.dictionaries(names, tensors | leaves, max_size=3) | leaves, max_size=3) | anything


def copied(message: Message) -> Message:
    """A message of its own; tensors are nobody's to change."""
    return Message({entry: dict(state) for entry, state in message.states.items()}, copy.deepcopy(message.meta))


@st.composite
def nearly(draw: DrawFn, message: Message) -> Message:
    """A message in which one thing is changed, and all else is as it was.

    Args:
        message: stays as it is.
    """
    changed = copied(message)
    if not changed.states or draw(st.booleans()):
        table = changed.meta
        while inner := [value for value in table.values() if isinstance(value, dict) and value]:
            if draw(st.booleans()):
                break
            table = draw(st.sampled_from(inner))
        key = draw(st.sampled_from(sorted(table)) | names) if table else draw(names)
        if draw(st.integers(0, 4)):
            table[key] = draw(anything)
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
            how = draw(st.sampled_from(sorted(SPOILT)))
            state.update({name: spoilt(how, tensor) for name, tensor in state.items()})
        case _:
            name = draw(st.sampled_from(sorted(state)))
            state[name] = spoilt(draw(st.sampled_from(sorted(SPOILT))), state[name])
    return changed
