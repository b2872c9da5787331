"""Optimizers by the names of `torch.optim` (or "adam", "adamw", "sgd") and of extensions, and
learning-rate schedules over the rounds, whose factor `Participant._step` sets as
`Site.rate_factor`. Light to import.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from medflare.core.errors import ConfigError, one_line
from medflare.core.extensions import Extensions
from medflare.core.settings import no_such, refuse_arguments, strict_dataclass, unknown
from medflare.core.text import Json

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}  # name -> class in torch.optim


def optimizer_class(name: str, location: str) -> "type[Optimizer] | None":
    """The class in torch.optim, None for an extension, which is not imported here; ConfigError for
    an unknown or unsupported name.
    """
    if name in EXTENSIONS.names():
        return None
    usable = _usable()
    if name not in usable:
        raise unknown("optimizer", name, EXTENSIONS, location)
    return usable[name]


def _usable() -> "dict[str, type[Optimizer]]":
    import torch

    # Several loss evaluations a step, weight matrices only, sparse gradients only: the training
    # loops support none of these.
    unsupported = ("Optimizer", "LBFGS", "Muon", "SparseAdam")
    usable = {}
    for key, cls in vars(torch.optim).items():
        is_optimizer = inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
        if is_optimizer and key not in unsupported:
            usable[key] = cls
    for short, key in OPTIMIZERS.items():
        usable[short] = usable[key]
    return usable


def _check_class(candidate: Any) -> None:
    import torch

    if not (inspect.isclass(candidate) and issubclass(candidate, torch.optim.Optimizer)):
        raise TypeError(f"{candidate!r} is no class derived from torch.optim.Optimizer")


EXTENSIONS = Extensions("optimizer", "optimizers", _usable, _check_class)


def build_optimizer(
    settings: Json,
    parameters: "Iterable[nn.Parameter]",
    location: str,
    norm: float | None = None,
    value: float | None = None,
) -> "Optimizer":
    """The optimizer of `parameters`.

    Args:
        settings: {"name": see `optimizer_class`, arguments of its class}.
        location: the beginning of a message, for example "task brain_lgg".
        norm: maximum norm of all gradients together, before every step; None: no maximum.
        value: maximum absolute value of each number of a gradient; None: no maximum.

    Raises:
        ConfigError: an unknown name, or an argument or value that the class does not accept.
    """
    arguments = dict(settings)
    name = arguments.pop("name")
    cls: Any = EXTENSIONS.foreign(name) or optimizer_class(name, location)
    refuse_arguments(cls, arguments, f"{location}: optimizer {name}", reserved=["params"])
    try:
        optimizer = cls(parameters, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{location}: optimizer {name}: {error}; see {cls.__module__}.{cls.__name__}"
        ) from error

    if norm is not None or value is not None:
        optimizer.register_step_pre_hook(GradientClipping(norm, value))
    return optimizer


@dataclass(frozen=True)
class GradientClipping:
    """Clips an optimizer's gradients before its step; see `build_optimizer`."""

    norm: float | None
    value: float | None

    def __call__(self, optimizer: "Optimizer", *_: object) -> None:
        from torch.nn.utils import clip_grad_norm_, clip_grad_value_

        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if self.norm is not None:
            clip_grad_norm_(weights, self.norm)
        if self.value is not None:
            clip_grad_value_(weights, self.value)


def check_optimizer(settings: Json, location: str) -> None:
    """Raises ConfigError as `build_optimizer` does, before the run starts, or if one step of an
    extension fails. Of torch no optimizer is built: the first one takes a second.
    """
    name = settings["name"]
    if name not in EXTENSIONS.names():
        with suppress(_ValuesValid):
            build_optimizer(settings, _ValuesValid(), location)
        return
    import torch

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = build_optimizer(settings, [weight], location)
    try:
        optimizer.step()
        for slots in optimizer.state_dict()["state"].values():
            for value in slots.values():
                torch.as_tensor(0.0 if value is None else value)
    except Exception as error:  # whatever the package raises
        raise ConfigError(
            f"{location}: optimizer {name}: a step fails ({one_line(error)})"
        ) from error


class _ValuesValid(Exception):
    """Stands in the place of parameters and is raised when torch, which has validated all values by
    then, reads them.
    """

    def __iter__(self) -> "Iterator[nn.Parameter]":
        raise self


Fraction = Annotated[float, Field(ge=0, le=1)]


@strict_dataclass
class Schedule:
    """The factor of the learning rate over the rounds: here 1, after a linear warm-up."""

    name: str = "constant"
    warmup_rounds: NonNegativeInt = 0

    def rate_factor(self, round: int, rounds: int) -> float:
        """The factor of a round (from 0) of `rounds`; after the last round it stays as it is, and
        without rounds it is 1.

        Examples:
            >>> [Polynomial(power=1.0, warmup_rounds=1).rate_factor(round, 5) for round in range(5)]
            [0.5, 1.0, 0.75, 0.5, 0.25]
        """
        if rounds == 0:
            return 1.0
        round = min(round, rounds - 1)
        if round < self.warmup_rounds:
            return (round + 1) / (self.warmup_rounds + 1)
        return self._factor(round - self.warmup_rounds, rounds - self.warmup_rounds)

    def _factor(self, round: int, rounds: int) -> float:
        """The factor without the warm-up, which `round` and `rounds` do not include."""
        return 1.0


@strict_dataclass
class StepSchedule(Schedule):
    """factor ** (round // every)."""

    name: str = "step"
    every: PositiveInt = 10
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1

    def _factor(self, round: int, rounds: int) -> float:
        return self.factor ** (round // self.every)


@strict_dataclass
class Cosine(Schedule):
    """minimum + (1 - minimum) (1 + cos(π round / rounds)) / 2."""

    name: str = "cosine"
    minimum: Fraction = 0.0

    def _factor(self, round: int, rounds: int) -> float:
        return self.minimum + (1 - self.minimum) * (1 + math.cos(math.pi * round / rounds)) / 2


@strict_dataclass
class Polynomial(Schedule):
    """minimum + (1 - minimum) (1 - round / rounds) ** power: power 1 is linear, nnU-Net has 0.9."""

    name: str = "polynomial"
    power: PositiveFloat = 0.9
    minimum: Fraction = 0.0

    def _factor(self, round: int, rounds: int) -> float:
        return self.minimum + (1 - self.minimum) * (1 - round / rounds) ** self.power


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Schedule,
    "step": StepSchedule,
    "cosine": Cosine,
    "polynomial": Polynomial,
}


def build_schedule(settings: Any) -> Any:
    """The schedule that {"name": one of `SCHEDULES`, its settings} describes; as a pydantic
    validator.

    Raises:
        ValueError: an unknown name, or a setting or value that the schedule does not have.
    """
    if not isinstance(settings, Mapping):
        return settings
    name = str(settings.get("name"))
    if name not in SCHEDULES:
        raise ValueError(no_such("schedule", name, SCHEDULES))
    return SCHEDULES[name](**settings)
