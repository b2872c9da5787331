"""What a message may hold: declared once by the method, used by its code, and checked where a reply leaves and where it arrives."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from torch import Tensor

from medflare.core.message import Message
from medflare.core.settings import first_problem
from medflare.core.text import is_name

_VARIANCE: Final = "running_var"  # torch's name for it in every layer that keeps one


@dataclass(frozen=True)
class StateSpec:
    """The tensors of one entry of a message.

    Attributes:
        tensors: tensor name -> (shape, dtype).
        purpose: why the entry leaves the site, in words for the hospital's own report.
        nonnegative: names of tensors that hold no number below 0: whoever takes a root of one would get NaN.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    purpose: str
    nonnegative: frozenset[str] = frozenset()

    @classmethod
    def like(cls, state: Mapping[str, Tensor], purpose: str, nonnegative: bool = False) -> "StateSpec":
        """The spec that `state` (any device, meta included) satisfies; running variances are never below 0.

        Args:
            state: name -> tensor; only names, shapes and dtypes are read.
            purpose: why the entry leaves the site.
            nonnegative: whether no tensor holds a number below 0.
        """
        squares = frozenset(name for name in state if nonnegative or name.rpartition(".")[2] == _VARIANCE)
        return cls({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}, purpose, squares)


Manifest = dict[str, StateSpec]
# How numbers belong to classes, for the suppression of small cells: "values" of a class speak of that class alone; "counts" of all classes
# add up to a known total, so that one of them follows from the others.
PerClass = Literal["", "values", "counts"]


# -- declarations ------------------------------------------------------------------------------------------------------------


def _always(plan: Any) -> bool:
    return True


def _network(plan: Any) -> Mapping[str, Tensor]:
    return plan.template()


class TensorSpec(str):
    """A named state of a message. To the code it is the name, to the manifest the declaration.

    A name that ends in "/" stands for a family: "personal/" for "personal/A", "personal/B".

    Attributes:
        purpose: why it leaves the site; may be empty for what only the server sends.
        template: plan -> a state with its names, shapes and dtypes (meta device); by default the task's own network.
        when: plan -> whether it is sent under these settings.
        nonnegative: whether it holds no number below 0.
        optional: whether the server's message may lack it.
        exact: whether its numbers travel as they are in any case, though they look like weights of the network.
        measured: the split whose images it was measured on ("train", "validation"); "" for weights and their updates. The participant sends
            zeros where the split has fewer patients than the site's `minimum_patients`.
        per_class: whether the first axis of its tensors is the class (`tasks.classes.class_names`, or the task's labels), see `PerClass`.
            The participant sends zeros for a class that fewer patients show: of "values" in that class's rows, of "counts" (and of
            tensors of whole numbers) in all rows. Zeros must mean "no such class" to the server.
    """

    purpose: str
    template: Callable[[Any], Mapping[str, Tensor]]
    when: Callable[[Any], bool]
    nonnegative: bool
    optional: bool
    exact: bool
    measured: str
    per_class: PerClass

    def __new__(
        cls,
        name: str,
        purpose: str = "",
        template: Callable[[Any], Mapping[str, Tensor]] = _network,
        when: Callable[[Any], bool] = _always,
        *,
        nonnegative: bool = False,
        optional: bool = False,
        exact: bool = False,
        measured: str = "",
        per_class: PerClass = "",
    ) -> "TensorSpec":
        entry = super().__new__(cls, name)
        entry.purpose, entry.template, entry.when = purpose, template, when
        entry.nonnegative, entry.optional, entry.exact = nonnegative, optional, exact
        entry.measured, entry.per_class = measured, per_class
        return entry

    def spec(self, plan: Any) -> StateSpec:
        """What the entry holds under a plan."""
        return StateSpec.like(self.template(plan), self.purpose, self.nonnegative)

    def covers(self, name: str) -> bool:
        """Whether a name in a message is this entry or one of its family."""
        return name.startswith(self) if self.endswith("/") else name == self

    def as_optional(self) -> "TensorSpec":
        """The same, in a message that may lack it."""
        entry = TensorSpec(self, self.purpose, self.template, self.when)
        entry.__dict__.update(self.__dict__, optional=True)
        return entry

    def of(self, site: str) -> str:
        """The family's entry of one site."""
        return f"{self}{site}"

    def family(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """site -> state of all entries of the family, sorted by site.

        Args:
            states: entry -> state of a message.

        Returns:
            Site -> state; empty where the message holds none of the family.

        Examples:
            >>> TensorSpec("personal/").family({"personal/B": 2, "model": 0, "personal/A": 1})
            {'A': 1, 'B': 2}
        """
        return {name.removeprefix(self): states[name] for name in sorted(states) if name.startswith(self)}


class Validator:
    """What a metadata item may be. Names and texts of all meta are known to be printable, see `federation.update_validation.messages`.

    Args:
        kind: a type for pydantic, or a function value -> what is wrong with it, in words, or None.
    """

    def __init__(self, kind: Any):
        self.kind = Annotated[Any, AfterValidator(partial(_raise_problem, kind))] if isinstance(kind, FunctionType) else kind

    def __call__(self, value: object) -> str | None:
        """What is wrong with a value, in words that follow the item's name, or None."""
        try:
            self._adapter.validate_python(value)
        except ValidationError as error:
            return first_problem(error)
        return None

    @cached_property  # made when it is first asked: a process imports more meta than it sees
    def _adapter(self) -> TypeAdapter[Any]:
        kind: Any = self.kind
        return TypeAdapter(kind)


def _raise_problem(problem: Callable[[object], str | None], value: object) -> object:
    if wrong := problem(value):
        raise ValueError(wrong)
    return value


def _check_model_name(name: str) -> str:
    if not is_name(name) or "$" in name:  # what stands between dollars is mathematics to a figure
        raise ValueError("no name of a model")
    return name


_ModelName = Annotated[str, AfterValidator(_check_model_name)]
Checks = Validator | Callable[[object], str | None]
anything = Validator(Any)


def _kind(of: Checks) -> Any:
    return of.kind if isinstance(of, Validator) else Validator(of).kind


def number(least: float = -math.inf, most: float = math.inf, *, optional: bool = False) -> Validator:
    """Takes finite numbers; where it is `optional`, None as well: a value that is not defined.

    Examples:
        >>> number(0, 1)(0.5), number(optional=True)(None), number(0, 1)(2)
        (None, None, 'Input should be less than or equal to 1, got 2')
    """
    kind = Annotated[float, Field(strict=True, ge=least, le=most, allow_inf_nan=False)]
    return Validator(kind | None if optional else kind)


def count(most: int = 2**53, *, optional: bool = False) -> Validator:
    """Takes whole numbers from 0."""
    kind = Annotated[int, Field(strict=True, ge=0, le=most)]
    return Validator(kind | None if optional else kind)


def text(*known: str) -> Validator:
    """Takes texts of up to 1000 characters, or only the known ones."""
    return Validator(Literal[known] if known else Annotated[str, Field(strict=True, max_length=1000)])


def table(of: Checks = anything) -> Validator:
    """Takes tables, name -> value.

    Examples:
        >>> table(count())({"train": 3}), table(count())({"train": "many"})
        (None, "train: Input should be a valid integer, got 'many'")
    """
    return Validator(dict[str, _kind(of)])  # type: ignore[misc]  # a type made at run time


def models(of: Checks = anything, most: int = 16) -> Validator:
    """Takes tables, model -> value, of a few models whose names are short and plain: they head tables and figures."""
    return Validator(Annotated[dict[_ModelName, _kind(of)], Field(max_length=most)])  # type: ignore[misc]  # a type made at run time


def listing(of: Checks = anything, most: int | None = None) -> Validator:
    """Takes lists of up to `most` items."""
    return Validator(Annotated[list[_kind(of)], Field(max_length=most)])  # type: ignore[misc]  # a type made at run time


class MetaSpec(str):
    """A named number, text or small table of a message. To the code it is the name, to the reader what it says.

    Attributes:
        about: what it says, a few words.
        takes: what is wrong with a value, see `number`, `count`, `text`, `table`, `models` and `listing`; asked before it is used.
        measured: the split whose patients it was measured on, "train" or "validation"; "" for what is no measurement.
        optional: whether the server's message may lack it.
        per_class: whether it is a table by class name or a list by class, at any depth, see `PerClass`. Where fewer training patients (or
            patients of the split that it was measured on) than the site's `minimum_patients` show a class, the participant leaves the
            class out of a table of "values" and its number out of a list; of "counts" it sends no number.
    """

    about: str
    validator: Validator
    measured: str
    optional: bool
    per_class: PerClass

    def __new__(
        cls,
        name: str,
        about: str = "",
        validator: Checks = anything,
        measured: str = "",
        *,
        optional: bool = False,
        per_class: PerClass = "",
    ) -> "MetaSpec":
        item = super().__new__(cls, name)
        item.validator = validator if isinstance(validator, Validator) else Validator(validator)
        item.about, item.measured, item.optional, item.per_class = about, measured, optional, per_class
        return item

    def as_optional(self) -> "MetaSpec":
        """The same, in a message that may lack it."""
        return MetaSpec(self, self.about, self.validator, self.measured, optional=True, per_class=self.per_class)


@dataclass(frozen=True)
class Phase:
    """One kind of exchange: what the server sends for it and what a site answers.

    Attributes:
        name: also the name of the site algorithm's method that answers.
        request, request_meta: tensors and metadata of the server's message.
        reply, reply_meta: tensors and metadata of the site's reply: everything that leaves the hospital, and nothing else may.
    """

    name: str
    request: tuple[TensorSpec, ...] = ()
    reply: tuple[TensorSpec, ...] = ()
    request_meta: tuple[MetaSpec, ...] = ()
    reply_meta: tuple[MetaSpec, ...] = ()

    def answered(self, plan: Any) -> tuple[TensorSpec, ...]:
        """The entries of a reply under a plan's settings."""
        return tuple(entry for entry in self.reply if entry.when(plan))

    def manifest(self, plan: Any) -> Manifest:
        """Names, shapes and dtypes of everything that a reply holds under a plan."""
        return {str(entry): entry.spec(plan) for entry in self.answered(plan)}

    def undeclared(self, reply: Message, plan: Any) -> str | None:
        """What a reply holds beyond the declaration, or lacks of its entries, in words, or None."""
        wanted = {str(entry) for entry in self.answered(plan)}
        if reply.states.keys() != wanted:
            return _difference("entry", wanted - reply.states.keys(), reply.states.keys() - wanted)
        extra = reply.meta.keys() - set(map(str, self.reply_meta))
        return _difference("item", set(), extra) if extra else None


def merged_phases(own: tuple[Phase, ...], further: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """All phases, those of one name as one that sends, tells, answers and reports what either does."""
    found = {phase.name: phase for phase in own}
    for phase in further:
        known = found.get(phase.name, Phase(phase.name))
        found[phase.name] = Phase(
            phase.name,
            request=(*known.request, *phase.request),
            reply=(*known.reply, *phase.reply),
            request_meta=(*known.request_meta, *phase.request_meta),
            reply_meta=(*known.reply_meta, *phase.reply_meta),
        )
    return tuple(found.values())


# -- checks ------------------------------------------------------------------------------------------------------------------


def violation(message: Message, manifest: Manifest) -> str | None:
    """What in `message` the manifest does not allow, in words, or None: entries, tensor names, shapes and dtypes must match exactly."""
    if message.states.keys() != manifest.keys():
        return _difference("entry", manifest.keys() - message.states.keys(), message.states.keys() - manifest.keys())
    for entry, spec in manifest.items():
        state = message.states[entry]
        if state.keys() != spec.tensors.keys():
            return f"{entry}: " + _difference("tensor", spec.tensors.keys() - state.keys(), state.keys() - spec.tensors.keys())
        for name, (shape, dtype) in spec.tensors.items():
            found = state[name]
            if tuple(found.shape) != shape:
                return f"{entry}/{name} has shape {tuple(found.shape)}, expected {shape}"
            if found.dtype != dtype:
                return f"{entry}/{name} has dtype {found.dtype}, expected {dtype}"
    return None


def _difference(what: str, missing: set[str], extra: set[str]) -> str:
    parts = [f"{word} {what} {sorted(names)[0]!r}" for word, names in (("missing", missing), ("unexpected", extra)) if names]
    return " and ".join(parts)


def non_finite(message: Message) -> str | None:
    """The first tensor that holds NaN or infinity, in words, or None."""
    for entry, state in sorted(message.states.items()):
        for name, tensor in state.items():
            if tensor.is_floating_point() and not _all_finite(tensor):
                return f"{entry}/{name} holds NaN or infinity"
    return None


def _all_finite(tensor: Tensor) -> bool:
    """Whether every number is finite. A finite sum says so ten times as fast; one that is not may have overflown."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def negative(message: Message, manifest: Manifest) -> str | None:
    """The first tensor with a number below 0 that can hold none, in words, or None.

    Args:
        message: that fits the manifest.
        manifest: says which those are.
    """
    for entry, spec in manifest.items():
        for name in sorted(spec.nonnegative):
            if bool((message.states[entry][name] < 0).any()):
                return f"{entry}/{name} holds a number below 0, which a variance or a mean square cannot be"
    return None
