"""The optimisers that a task may name: torch's, by their classes' names or by the short names of the first three. Light to import."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError, one_line
from medflare.core.settings import STRICT, refuse_arguments, unknown

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

OPTIMIZERS: Final = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}  # name -> class in torch.optim
_REFUSED: Final = {
    "LBFGS": "it evaluates the loss several times a step, which no training loop here does",
    "Muon": "it takes weight matrices alone",
    "SparseAdam": "it takes sparse gradients alone",
}
_NUMBERS: Final = {"name", "lr", "momentum", "weight_decay", "eps"}  # with which every optimiser that can be made can take a step


@dataclass(frozen=True, config=STRICT)
class _Basics:
    """What every optimiser needs; torch checks the rest when it builds one."""

    name: str
    lr: Annotated[float, Field(gt=0)]


def with_rate(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as they are, where they have a name and a learning rate.

    Raises:
        ValidationError: they do not.
    """
    _Basics(**{name: settings[name] for name in ("name", "lr") if name in settings})
    return settings


def optimizer_class(name: str, place: str) -> "type[Optimizer]":
    """The class in torch.optim that a name means.

    Raises:
        ConfigError: there is none, or none that local training can use, with the reason.
    """
    import torch

    if name in _REFUSED:
        raise ConfigError(f"{place}: optimizer {name} cannot train here: {_REFUSED[name]}; take AdamW, SGD or another of torch.optim")
    found = {known: cls for known, cls in vars(torch.optim).items() if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)}
    usable = {known: cls for known, cls in found.items() if known not in _REFUSED and cls is not torch.optim.Optimizer}
    usable |= {short: found[known] for short, known in OPTIMIZERS.items()}
    if name not in usable:
        raise unknown("optimizer", name, usable, place)
    return usable[name]


def build_optimizer(
    settings: Mapping[str, Any], parameters: "Iterable[nn.Parameter]", place: str, clip: Mapping[str, float | None] | None = None
) -> "Optimizer":
    """torch's optimiser of `parameters`.

    Args:
        settings: {"name": see `optimizer_class`, arguments of torch's class}.
        place: the beginning of a message, for example "task brain_lgg".
        clip: what every step limits gradients to, see `clip_gradients`; None: nothing.

    Raises:
        ConfigError: no such name, or an argument or value that torch's class does not take.
    """
    arguments = dict(settings)
    name = arguments.pop("name")
    cls = optimizer_class(name, place)
    refuse_arguments(cls, arguments, f"{place}: optimizer {name}", taken=["params"])
    try:
        optimizer = cls(parameters, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{place}: optimizer {name}: {error}; see torch.optim.{cls.__name__}") from error
    clip_gradients(optimizer, **clip or {})
    return optimizer


def check_optimizer(settings: Mapping[str, Any], place: str) -> None:
    """Before anything starts: the optimiser can be built, and takes a step.

    For its first optimiser torch imports a third of itself, in a second of processor time. A server and who writes a job never train:
    where settings are but the usual numbers, torch looks at these and gets no parameters.

    Raises:
        ConfigError: see `build_optimizer`.
    """
    import torch

    if settings.keys() <= _NUMBERS:
        with suppress(_ValuesChecked):
            build_optimizer(settings, _no_parameters(), place)
        return
    weights = torch.nn.Parameter(torch.ones(2, 2))
    weights.grad = torch.ones(2, 2)
    optimizer = build_optimizer(settings, [weights], place)
    try:
        optimizer.step()
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
        raise ConfigError(f"{place}: optimizer {settings['name']}: a step fails ({one_line(error)})") from error


class _ValuesChecked(Exception):
    """torch has found all values right, and asks for the parameters."""


def _no_parameters() -> "Iterator[nn.Parameter]":
    raise _ValuesChecked
    yield


def clip_gradients(optimizer: "Optimizer", norm: float | None = None, value: float | None = None) -> None:
    """From now on every step of the optimiser begins with clipping, whatever changed the gradients before.

    Args:
        optimizer: steps all parameters that are clipped together.
        norm: largest norm of all gradients together; None: not limited.
        value: largest absolute value of each number of a gradient; None: not limited.
    """
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_

    def clip(optimizer: "Optimizer", *_: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if norm is not None:
            clip_grad_norm_(parameters, norm)
        if value is not None:
            clip_grad_value_(parameters, value)

    if norm is not None or value is not None:
        optimizer.register_step_pre_hook(clip)
