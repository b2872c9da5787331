"""What a message may hold: declared once by the method, used by its code, and checked where a reply leaves and where it arrives."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import Self

from medflare.core.message import Message
from medflare.core.settings import first_problem
from medflare.core.text import is_name


@dataclass(frozen=True)
class StateSpec:
    """The tensors of one state of a message.

    Attributes:
        tensors: tensor name -> (shape, dtype).
        purpose: why the state leaves the site, for the site's record.
        nonnegative: names of tensors without values below 0 (a square root of them must not be NaN).
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    purpose: str
    nonnegative: frozenset[str] = frozenset()

    @classmethod
    def like(cls, state: Mapping[str, Tensor], purpose: str) -> "StateSpec":
        """The spec of `state` (any device, meta included); running variances are always nonnegative."""
        squares = frozenset(name for name in state if name.rpartition(".")[2] == "running_var")
        return cls({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}, purpose, squares)


Manifest = dict[str, StateSpec]
# How values belong to classes, for small-cell suppression: "values" of a class describe that class only; "counts" of all classes add up to
# a fixed total, so that one of them follows from the others.
PerClass = Literal["", "values", "counts"]


class _Declared(str):
    """A name with its declaration as attributes."""

    optional: bool

    def __new__(cls, name: str, *args: Any, **more: Any) -> Self:
        return super().__new__(cls, name)

    def as_optional(self) -> Self:
        """The same, in a message that may lack it."""
        declared = copy.copy(self)
        declared.optional = True
        return declared


class TensorSpec(_Declared):
    """A named state of a message. A name that ends in "/" is a family: "personal/" for "personal/A", "personal/B".

    Attributes:
        purpose: why it leaves the site; may be empty if only the server sends it.
        template: plan -> a state with its names, shapes and dtypes (meta device); by default the task's network.
        when: plan -> whether it is sent with these settings.
        optional: whether the server's message may lack it.
        measured: the split whose images it was measured on ("train", "validation"); "" for weights and their updates. The participant sends
            zeros if the split has fewer patients than the site's `minimum_patients`.
        per_class: whether the first axis of its tensors is the class (`tasks.classes.class_names`, or the task's labels), see `PerClass`.
            For a class with fewer patients the participant sends zeros: of "values" in that class's rows, of "counts" (and of integer
            tensors) in all rows. Zeros must mean "no such class" to the server.
    """

    def __init__(
        self,
        name: str,
        purpose: str = "",
        template: Callable[[Any], Mapping[str, Tensor]] = lambda plan: plan.template(),
        when: Callable[[Any], bool] = lambda plan: True,
        *,
        optional: bool = False,
        measured: str = "",
        per_class: PerClass = "",
    ):
        self.purpose, self.template, self.when = purpose, template, when
        self.optional, self.measured, self.per_class = optional, measured, per_class

    def spec(self, plan: Any) -> StateSpec:
        """Names, shapes and dtypes of the state with a plan's settings."""
        return StateSpec.like(self.template(plan), self.purpose)

    def covers(self, name: str) -> bool:
        """Whether a name in a message is this state or a member of this family."""
        return name.startswith(self) if self.endswith("/") else name == self

    def of(self, site: str) -> str:
        """The family's state of one site."""
        return f"{self}{site}"

    def family(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """site -> state of all members of the family in a message's states, sorted by site.

        Examples:
            >>> TensorSpec("personal/").family({"personal/B": 2, "model": 0, "personal/A": 1})
            {'A': 1, 'B': 2}
        """
        return {name.removeprefix(self): states[name] for name in sorted(states) if name.startswith(self)}


class MetaSpec(_Declared):
    """A named metadata item of a message.

    Attributes:
        about: what it is, a few words.
        type: what pydantic accepts, see `number`, `count`, `text`, `table`, `models` and `listing`; texts are printable in any case.
        measured: the split whose patients it was measured on, "train" or "validation"; "" if it is no measurement.
        optional: whether the server's message may lack it.
        per_class: whether it is a table by class name or a list by class, at any depth, see `PerClass`. For a class with fewer patients of
            the split than `minimum_patients` the participant sends no "values"; it sends no "counts" at all.
    """

    def __init__(
        self, name: str, about: str = "", type: Any = Any, measured: str = "", *, optional: bool = False, per_class: PerClass = ""
    ):
        self.about, self.type, self.measured, self.optional, self.per_class = about, type, measured, optional, per_class

    def problem(self, value: object) -> str | None:
        """Why pydantic does not accept a value, in words that follow the item's name; None if it does.

        Examples:
            >>> MetaSpec("share", type=number(0, 1)).problem(2)
            'Input should be less than or equal to 1, got 2'
        """
        try:
            self._adapter.validate_python(value)
        except ValidationError as error:
            return first_problem(error)
        return None

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kind: Any = self.type
        return TypeAdapter(kind)


def number(least: float = -math.inf, most: float = math.inf, *, optional: bool = False) -> Any:
    """Finite numbers; None as well if `optional`: a value that is not defined."""
    kind = Annotated[float, Field(strict=True, ge=least, le=most, allow_inf_nan=False)]
    return kind | None if optional else kind


def count(most: int = 2**53, *, optional: bool = False) -> Any:
    """Whole numbers from 0; None as well if `optional`."""
    kind = Annotated[int, Field(strict=True, ge=0, le=most)]
    return kind | None if optional else kind


def text(*choices: str) -> Any:
    """Texts of up to 1000 characters, or one of the choices."""
    return Literal[choices] if choices else Annotated[str, Field(strict=True, max_length=1000)]


def table(values: Any = Any, most: int | None = None) -> Any:
    """Tables, name -> value, of up to `most` names."""
    return Annotated[dict[str, values], Field(max_length=most)]


def models(values: Any = Any, most: int = 16) -> Any:
    """Tables, model -> value, of at most `most` models with names that tables and figures can show."""

    def check(name: str) -> str:
        if not is_name(name) or "$" in name:  # matplotlib reads text between dollar signs as mathematics
            raise ValueError("not a name of a model")
        return name

    return Annotated[dict[Annotated[str, AfterValidator(check)], values], Field(max_length=most)]


def listing(items: Any = Any, most: int | None = None) -> Any:
    """Lists of up to `most` items."""
    return Annotated[list[items], Field(max_length=most)]


@dataclass(frozen=True)
class Phase:
    """One kind of exchange: what the server requests and what a site replies.

    Attributes:
        name: also the name of the site algorithm's method that replies.
        request, request_meta: tensors and metadata of the server's message.
        reply, reply_meta: tensors and metadata of the site's reply: all that leaves the hospital.
    """

    name: str
    request: tuple[TensorSpec, ...] = ()
    reply: tuple[TensorSpec, ...] = ()
    request_meta: tuple[MetaSpec, ...] = ()
    reply_meta: tuple[MetaSpec, ...] = ()

    def answered(self, plan: Any) -> tuple[TensorSpec, ...]:
        """The states of a reply with a plan's settings."""
        return tuple(spec for spec in self.reply if spec.when(plan))

    def manifest(self, plan: Any) -> Manifest:
        """Names, shapes and dtypes of everything that a reply holds with a plan's settings."""
        return {str(spec): spec.spec(plan) for spec in self.answered(plan)}

    def undeclared(self, reply: Message, plan: Any) -> str | None:
        """Which state of a reply is missing, or which state or metadata item is not declared; None if it is as declared."""
        declared = {str(spec) for spec in self.answered(plan)}
        return _difference("entry", declared, reply.states) or _difference("item", reply.meta.keys() & set(self.reply_meta), reply.meta)


def merged_phases(first: tuple[Phase, ...], second: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """All phases; two of one name become one that requests and replies what either does."""
    merged = {phase.name: phase for phase in first}
    for phase in second:
        earlier = merged.get(phase.name, Phase(phase.name))
        merged[phase.name] = Phase(
            phase.name,
            earlier.request + phase.request,
            earlier.reply + phase.reply,
            earlier.request_meta + phase.request_meta,
            earlier.reply_meta + phase.reply_meta,
        )
    return tuple(merged.values())


def violation(message: Message, manifest: Manifest) -> str | None:
    """How the states differ from the manifest in names, shapes or dtypes; None if they match exactly."""
    if problem := _difference("entry", manifest, message.states):
        return problem
    for entry, spec in manifest.items():
        state = message.states[entry]
        if problem := _difference("tensor", spec.tensors, state):
            return f"{entry}: {problem}"
        for name, (shape, dtype) in spec.tensors.items():
            tensor = state[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                return f"{entry}/{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected {shape} and {dtype}"
    return None


def _difference(kind: str, expected: Any, names: Any) -> str | None:
    missing, extra = set(expected) - set(names), set(names) - set(expected)
    parts = [f"{word} {kind} {min(group)!r}" for word, group in (("missing", missing), ("unexpected", extra)) if group]
    return " and ".join(parts) or None


def non_finite(message: Message) -> str | None:
    """The first tensor that holds NaN or infinity, in words, or None."""
    for entry, state in sorted(message.states.items()):
        for name, tensor in state.items():
            # A finite sum is ten times as fast to check; the sum of finite values may overflow.
            if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                return f"{entry}/{name} holds NaN or infinity"
    return None


def negative(message: Message, manifest: Manifest) -> str | None:
    """The first nonnegative tensor with a value below 0, in words, or None; the message must match the manifest."""
    for entry, spec in manifest.items():
        for name in sorted(spec.nonnegative):
            if bool((message.states[entry][name] < 0).any()):
                return f"{entry}/{name} holds a value below 0, which a variance or a mean square cannot be"
    return None
