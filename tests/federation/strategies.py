"""What a lying site may send: arbitrary facts and states, and valid replies with something changed in them, for Hypothesis.

HYPOTHESIS_PROFILE=thorough takes fresh random cases, twenty times as many; without it every run tries the same ones.
"""

import copy
import datetime
import decimal
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from medflare.core.events import KINDS
from medflare.core.message import Message

_COMMON: Final[dict[str, Any]] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", derandomize=True, **_COMMON)
settings.register_profile("thorough", print_blob=True, **_COMMON)
_PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "ci")


def cases(count: int) -> settings:
    """The settings of a test with so many cases in `make test`.

    Args:
        count: of the cases.
    """
    return settings(settings.get_profile(_PROFILE), max_examples=count * (20 if _PROFILE == "thorough" else 1))


# -- facts -------------------------------------------------------------------------------------------------------------------


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


def self_containing(_: object) -> Any:
    """A list and a table that hold each other."""
    value: list[Any] = [1]
    value += [value, {"inner": value}]
    return value


def shared_wide(width: int) -> Any:
    """Few objects that are millions when they are written down: lists of the same list of the same list."""
    value: Any = [0] * width
    for _ in range(4):
        value = [value] * width
    return value


# Names that matter to somebody, and names that break what shows them.
WORDS: Final = (
    *("n", "train", "validation", "test", "class_counts", "metrics", "loss", "n_samples", "events", "global", "personal", "deployed"),
    *("selector", "dice", "hd95", "kind", "message", "site", "round", "A", "B", "C", "O", "epsilon", "delta", "steps", "reports"),
)
BREAKING: Final = ("", "\ud800", "$\\frac{$", "a\nb", "<script>", "x" * 70_000, "\0", "=cmd()", "{}", "%s", "../x", "0", "1e999", "nan")
# Names that look like those that matter: Cyrillic, full-width, composed anew, with what is not seen, in other letters, twice.
ALIKE: Final = (
    "n_s\u0430mples",
    "\uff22",
    "\u0412",
    "B\u200b",
    "B ",
    "b",
    "gl\u043ebal",
    "global\u00a0",
    "GLOBAL",
    "e\u0301",
    "\u202eglobal",
)
NUMBERS_AS_TEXT: Final = ("NaN", "-0", "1e308", "Infinity", "0x10", "\u0661", "1_000", "true", "null")
_KNOWN: Final = (*WORDS, *BREAKING, *ALIKE, *NUMBERS_AS_TEXT)
names: SearchStrategy[str] = st.sampled_from(_KNOWN) | st.text(st.characters(exclude_categories=()), max_size=8)
EDGES: Final = (0, -1, 1, 2**31, 2**53, 2**63, 2**63 + 1, -(2**63), 10**30, 10**400, 10**4000)
FLOATS: Final = (math.nan, math.inf, -math.inf, -0.0, 1e308, -1e308, 5e-324, 1e-9, 0.5, 1.0, 1.0000001, 7.0)
numbers: SearchStrategy[Any] = st.sampled_from([*EDGES, *FLOATS]) | st.integers(-3, 40) | st.floats(width=64)
plain: SearchStrategy[Any] = st.none() | st.booleans() | numbers | names
odd: SearchStrategy[Any] = st.sampled_from(
    [
        b"x",
        {1, 2},
        frozenset(),
        1j,
        ...,
        len,
        int,
        np.float32(0.5),
        np.float64(0.5),
        np.int64(3),
        np.array([1.0]),
        np.bool_(True),
        decimal.Decimal("0.5"),
        datetime.date(2026, 1, 1),
        torch.ones(1),
        torch.ones((), device="meta"),
        range(3),
        {1: 2, "1": 3, None: 4},
        {(1, 2): 3},
        Message(),
        Hostile(),
    ]
)
huge: SearchStrategy[Any] = st.integers(5, 3000).map(nested) | st.none().map(self_containing) | st.integers(30, 200).map(shared_wide)
leaves: SearchStrategy[Any] = plain | odd
small: SearchStrategy[Any] = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


@st.composite
def _anything(draw: DrawFn) -> Any:
    """One in ten is huge: such a message is refused for it, which takes long, and whatever else is in it is not looked at."""
    return draw(huge if draw(st.integers(0, 9)) == 9 else small)


anything: SearchStrategy[Any] = _anything()
events: SearchStrategy[Any] = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "kind": st.sampled_from([*KINDS, "party", None, 3]),
            "message": st.sampled_from(["a note", "", "  ", None, "x" * 5000, "\ud800", 7]),
            "site": st.sampled_from([None, "A", "B", "C", "O", 3, ""]),
            "round": st.sampled_from([None, 0, 1, -1, True, "first", 10**30, 0.5]),
            "more": plain,
        },
    ),
    max_size=3,
) | st.integers(1, 300).map(lambda count: [{"kind": "warning", "message": "a note"}] * count)
facts: SearchStrategy[Any] = st.dictionaries(names, anything, max_size=5) | st.fixed_dictionaries({"events": events}) | anything


# -- states ------------------------------------------------------------------------------------------------------------------

# tensor -> what stands in its place: of another kind, dtype or shape, or with numbers that cannot be meant
SPOILT: Final[dict[str, Callable[[Tensor], Any]]] = {
    "nothing": lambda tensor: None,
    "a number": lambda tensor: 3,
    "an array": lambda tensor: tensor.numpy(),
    "a list": lambda tensor: tensor.tolist(),
    "hostile": lambda tensor: Hostile(),
    "sparse": lambda tensor: tensor.to_sparse(),
    "compressed": lambda tensor: torch.ones(2, 2).to_sparse_csr(),
    "meta": lambda tensor: torch.empty_like(tensor, device="meta"),
    "nested": lambda tensor: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "quantized": lambda tensor: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "learnt": lambda tensor: torch.nn.Parameter(tensor.float()),
    "double": lambda tensor: tensor.double(),
    "half": lambda tensor: tensor.half(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "negated view": lambda tensor: torch.ones_like(tensor, dtype=torch.complex64).conj().imag,
    "truth": lambda tensor: tensor.bool(),
    "longer": lambda tensor: torch.cat([tensor.reshape(-1)] * 2),
    "flat": lambda tensor: tensor.reshape(-1),
    "empty": lambda tensor: tensor.new_zeros(0),
    "one more side": lambda tensor: tensor[None],
    "endless": lambda tensor: torch.zeros(1).expand(10**12),
    "the same number": lambda tensor: torch.ones((), dtype=tensor.dtype).expand(tensor.shape),
    "transposed": lambda tensor: tensor.T.contiguous().T if tensor.ndim == 2 else tensor,
    "NaN": lambda tensor: torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor,
    "infinite": lambda tensor: torch.full_like(tensor, -math.inf) if tensor.is_floating_point() else tensor,
    "largest": lambda tensor: torch.full_like(tensor, _most(tensor.dtype)),
    "smallest": lambda tensor: torch.full_like(tensor, -_most(tensor.dtype)),
    "negative": lambda tensor: -tensor.abs() - 1,
    "a little negative": lambda tensor: -tensor.abs() - 1e-3 if tensor.is_floating_point() else -tensor.abs(),
    "zero": torch.zeros_like,
    "doubled": lambda tensor: tensor * 2,
    "turned": lambda tensor: -tensor,
}


def _most(dtype: torch.dtype) -> Any:
    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max


_TENSORS: Final = (torch.ones(2), torch.ones(2, 3), torch.tensor(3), torch.ones(2, dtype=torch.float64))
tensors: SearchStrategy[Any] = st.builds(lambda name, tensor: SPOILT[name](tensor), st.sampled_from([*SPOILT]), st.sampled_from(_TENSORS))
states: SearchStrategy[Any] = st.dictionaries(names, st.dictionaries(names, tensors | leaves, max_size=3) | leaves, max_size=3) | anything


# -- nearly valid replies ----------------------------------------------------------------------------------------------------


def copied(message: Message) -> Message:
    """A message of its own; tensors are nobody's to change."""
    return Message({entry: dict(state) for entry, state in message.states.items()}, copy.deepcopy(message.facts))


@st.composite
def nearly(draw: DrawFn, message: Message) -> Message:
    """A reply in which one to three things are changed, and all else is as it was.

    Args:
        message: the reply, which stays as it is.
    """
    changed = copied(message)
    for _ in range(draw(st.integers(1, 3))):
        if isinstance(changed.states, dict) and changed.states and draw(st.booleans()):
            _change_states(draw, changed)
        elif isinstance(changed.facts, dict):
            _change_facts(draw, changed)
    return changed


def _change_facts(draw: DrawFn, message: Message) -> None:
    action = draw(st.sampled_from(["leaf", "leaf", "leaf", "drop", "add", "name", "events", "all"]))
    if action == "all":
        message.facts = draw(anything)
    elif action == "events":
        message.facts["events"] = draw(events)
    elif action == "add":
        _place(draw, message.facts)[draw(names)] = draw(anything)
    else:
        inner = _place(draw, message.facts, full=True)
        if not inner:
            return
        key = draw(st.sampled_from(sorted(inner, key=str)))
        value = inner.pop(key)
        if action == "name":
            inner[draw(names)] = value
        elif action == "leaf":
            inner[key] = _instead(draw, value)


def _instead(draw: DrawFn, value: Any) -> Any:
    """Something of another kind, or of the same kind and another value."""
    if isinstance(value, list) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        return draw(st.sampled_from([value[:-1], value * 2, [*value[:place], draw(leaves), *value[place + 1 :]]]))
    if isinstance(value, int | float) and draw(st.booleans()):
        return draw(numbers)
    return draw(anything)


def _place(draw: DrawFn, table: dict[Any, Any], full: bool = False) -> dict[Any, Any]:
    """The table itself or one within it."""
    inner = [found for found in table.values() if isinstance(found, dict) and (found or not full)]
    deeper = bool(inner) and draw(st.booleans())
    return _place(draw, draw(st.sampled_from(inner)), full) if deeper else table


def _change_states(draw: DrawFn, message: Message) -> None:
    entry = draw(st.sampled_from(sorted(message.states, key=str)))
    state: Any = message.states[entry]
    action = draw(st.sampled_from(["tensor", "tensor", "tensor", "every tensor", "drop", "add", "entry", "extra", "all"]))
    if action == "all":
        message.states = draw(states)
    elif action == "entry":
        message.states[draw(names)] = message.states.pop(entry)
    elif action == "extra":
        message.states[draw(names)] = draw(st.just({"patients": torch.ones(3)}) | leaves)
    elif isinstance(state, Mapping) and state:
        chosen = sorted(state, key=str) if action == "every tensor" else [draw(st.sampled_from(sorted(state, key=str)))]
        spoil = SPOILT[draw(st.sampled_from(sorted(SPOILT)))]
        new = dict(state)
        for name in chosen:
            tensor = new.pop(name)
            if action == "add":
                new |= {name: tensor, draw(names): tensor}
            elif action != "drop" and isinstance(tensor, Tensor) and not tensor.is_meta:
                new[name] = _spoilt(tensor, spoil)
        message.states[entry] = new


def _spoilt(tensor: Tensor, spoil: Callable[[Tensor], Any]) -> Any:
    try:
        return spoil(tensor.detach())
    except (RuntimeError, TypeError, NotImplementedError):  # already spoilt in a way that this one does not take
        return None
