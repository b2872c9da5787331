"""The entries of a message, each declared once: `message[SPEC]` reads and writes the entry."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, TypeVar

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import Self

from medflare.core.settings import first_problem
from medflare.core.states import State, StateDict
from medflare.core.text import is_name

T_co = TypeVar("T_co", covariant=True)
# How values belong to classes, for small-cell suppression: "values" of a class describe that class
# only; "counts" of all classes add up to a fixed total, so that one of them follows from the
# others.
PerClass = Literal["", "values", "counts"]


@dataclass(frozen=True)
class StateSpec:
    """The tensors of one state of a message.

    Attributes:
        tensors: tensor name -> (shape, dtype).
        purpose: why the state leaves the site, for the site's record.
        nonnegative: names of tensors without values below 0 (a square root of them must not be
            NaN).
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    purpose: str
    nonnegative: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())

    @classmethod
    def like(cls, state: State, purpose: str) -> "StateSpec":
        """The spec of `state` (any device, meta included); running variances are always
        nonnegative.
        """
        tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
        squares = frozenset(name for name in state if name.rpartition(".")[2] == "running_var")
        return cls(tensors, purpose, squares)


Manifest = dict[str, StateSpec]


@dataclass(frozen=True)
class EntrySpec(Generic[T_co]):
    """A named entry of a message, whose Python type is T_co: a `TensorSpec` or a `MetaSpec`."""

    name: str
    _: KW_ONLY
    optional: bool = False
    per_class: PerClass = ""

    def as_optional(self) -> Self:
        """The same entry, in a message that may lack it."""
        return replace(self, optional=True)


@dataclass(frozen=True)
class TensorSpec(EntrySpec[StateDict]):
    """A named state of a message, or a family of states: "personal/A", "personal/B".

    Attributes:
        purpose: why it leaves the site; may be empty if only the server sends it.
        template: plan -> a state with its names, shapes and dtypes (meta device); by default the
            task's network.
        when: plan -> whether it is sent with these settings.
        of: plan -> names of a family's members, for example its sites or clusters; None: one state.
        optional: whether the server's message may lack it.
        measured: the split whose images it was measured on ("train", "validation"); "" for weights
            and their updates. The participant sends zeros if the split has fewer patients than the
            site's `minimum_patients`.
        per_class: whether the first axis of its tensors is the class (`tasks.classes.class_names`,
            or the task's labels), see `PerClass`. For a class with fewer patients the participant
            sends zeros. With "values", that class's rows are zero. With "counts", and in integer
            tensors, all rows are. Zeros must mean "no such class" to the server.
        rest: where the network's other entries are, if it is a part of one: "local", each site has
            its own; "initial", they are frozen and everywhere those of the initial model.
    """

    purpose: str = ""
    template: Callable[[Any], State] = lambda plan: plan.template()
    when: Callable[[Any], bool] = lambda plan: True
    _: KW_ONLY
    of: Callable[[Any], Iterable[str]] | None = None
    measured: str = ""
    rest: Literal["local", "initial"] = "local"

    def member(self, name: str) -> "TensorSpec":
        """One state of the family."""
        return replace(self, name=f"{self.name}/{name}", of=None)

    def members(self, plan: Any) -> dict[str, "TensorSpec"]:
        """Entry -> spec: of the state itself, or of each of the family."""
        if self.of is None:
            return {self.name: self}
        return {spec.name: spec for spec in map(self.member, self.of(plan))}

    def spec(self, plan: Any) -> StateSpec:
        """Names, shapes and dtypes of the state, or of each of the family, with a plan's
        settings.
        """
        return StateSpec.like(self.template(plan), self.purpose)


@dataclass(frozen=True)
class MetaSpec(EntrySpec[T_co]):
    """A named metadata item of a message, whose Python type is T_co.

    Attributes:
        about: what it is, a few words.
        type: what pydantic accepts, see `number`, `count`, `text`, `table`, `by_model` and
            `listing`; texts are printable in any case.
        measured: the split whose patients it was measured on, "train" or "validation"; "" if it is
            no measurement.
        optional: whether the message may lack it.
        per_class: whether it is a table by class name or a list by class, at any depth, see
            `PerClass`. For a class with fewer patients of the split than `minimum_patients` the
            participant sends no "values"; it sends no "counts" at all.
        public: whether it tells nothing of single images, as a number of steps. With DP-SGD a site
            sends no other value of training images.
    """

    about: str = ""
    type: Any = field(default=Any, compare=False, repr=False)
    measured: str = ""
    public: bool = False

    def problem(self, value: object) -> str | None:
        """Why pydantic does not accept a value, in words that follow the item's name; None if it
        does.

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
    def _adapter(self) -> TypeAdapter:
        return TypeAdapter(self.type)


Spec = EntrySpec[Any]


def number(least: float = -math.inf, most: float = math.inf, *, optional: bool = False) -> Any:
    """The type of finite numbers, and None, a value that is not defined, if `optional`."""
    kind = Annotated[float, Field(strict=True, ge=least, le=most, allow_inf_nan=False)]
    return kind | None if optional else kind


def count(most: int = 2**53, *, optional: bool = False) -> Any:
    """The type of whole numbers from 0, and None if `optional`."""
    kind = Annotated[int, Field(strict=True, ge=0, le=most)]
    return kind | None if optional else kind


def text(*choices: str) -> Any:
    """The type of texts of up to 1000 characters, or of the choices."""
    if choices:
        return Literal[choices]
    return Annotated[str, Field(strict=True, max_length=1000)]


def table(values: Any = Any, most: int | None = None) -> Any:
    """The type of tables, name -> value, of up to `most` names."""
    return Annotated[dict[str, values], Field(max_length=most)]


def by_model(values: Any = Any, most: int = 16) -> Any:
    """The type of tables, model -> value, of at most `most` models, whose names tables and figures
    can show.
    """

    def check(name: str) -> str:
        # matplotlib reads text between dollar signs as mathematics.
        if not is_name(name) or "$" in name:
            raise ValueError("not a name of a model")
        return name

    return Annotated[dict[Annotated[str, AfterValidator(check)], values], Field(max_length=most)]


def listing(items: Any = Any, most: int | None = None) -> Any:
    """The type of lists of up to `most` items."""
    return Annotated[list[items], Field(max_length=most)]
