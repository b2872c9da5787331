"""The optimisers that a task may name. Light to import: torch only when one is built."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from medflare.core.errors import ConfigError
from medflare.core.settings import unknown

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

OPTIMIZERS: Final = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}  # name -> class in torch.optim


def build_optimizer(settings: Mapping[str, Any], parameters: "Iterable[nn.Parameter]", place: str) -> "Optimizer":
    """torch's optimiser of `parameters`.

    Args:
        settings: {"name": one of `OPTIMIZERS`, arguments of torch's class}.
        parameters: what it steps.
        place: the beginning of a message, for example "task brain_lgg".

    Raises:
        ConfigError: a name that is not in the table, or an argument that torch's class does not take.
    """
    import torch

    arguments = dict(settings)
    name = arguments.pop("name")
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS, place)
    try:
        return getattr(torch.optim, OPTIMIZERS[name])(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: optimizer {name}: {error}; see torch.optim.{OPTIMIZERS[name]}") from error
