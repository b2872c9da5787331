"""Test-time adaptation of any final model (GRACE paper, Table 3): `ADAPTATIONS` by name, and the
messages that carry them.

A message of kind "dsbn" or "tent" holds the model that it adapts, whose own kind is its item
"base".
"""

from collections.abc import Callable
from typing import Final

from torch import nn

from medflare.adaptation.dsbn import TargetStatistics, batch_norm_layers
from medflare.adaptation.tent import Tent
from medflare.core.message import Message
from medflare.networks.catalogue import meta_network
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

STATISTICS = "statistics"  # the entry with the BatchNorm statistics that DSBN estimated

Build = Callable[[Message], nn.Module]


def _dsbn(model: nn.Module, task: TaskConfig, message: Message) -> TargetStatistics:
    adapted = TargetStatistics(model)
    if STATISTICS in message.states:
        adapted.load_statistics(message.states[STATISTICS])
    return adapted


def _tent(model: nn.Module, task: TaskConfig, message: Message) -> Tent:
    return Tent(model, task.target, **message.meta.get("tent", {"batch_size": task.batch_size}))


# kind -> (built model, task, message) -> module, images to probabilities
ADAPTATIONS: Final[dict[str, Callable[[nn.Module, TaskConfig, Message], nn.Module]]] = {
    "dsbn": _dsbn,
    "tent": _tent,
}


def check_adaptable(task: TaskConfig) -> None:
    """Raises ConfigError if the task's network has no BatchNorm, which the adaptations need."""
    batch_norm_layers(meta_network(task))


def with_tent(
    message: Message,
    task: TaskConfig,
    *,
    rate: float = 1e-3,
    steps: int = 1,
    episodic: bool = False,
) -> Message:
    """The final model with Tent around it; the settings are those of `Tent`."""
    adapted = _around(message, "tent")
    adapted.meta["tent"] = {
        "rate": rate,
        "steps": steps,
        "episodic": episodic,
        "batch_size": task.batch_size,
    }
    return adapted


def with_dsbn(message: Message) -> Message:
    """The final model with DSBN around it, whose statistics are not estimated yet."""
    return _around(message, "dsbn")


def _around(message: Message, kind: str) -> Message:
    meta = {**message.meta, "kind": kind, "base": message.meta["kind"]}
    return Message(dict(message.states), meta)


def dsbn_for(site: Site, message: Message, build: Build) -> Message:
    """`with_dsbn`, with the statistics of the site's test images; their labels are not used."""
    message = with_dsbn(message)
    if site.n["test"]:
        module = TargetStatistics(build(_base(message))).to(site.device)
        module.adapt(batch.images for batch in site.ordered("test", site.scoring_batch))
        message.states[STATISTICS] = module.statistics()
    return message


def adapted_model(task: TaskConfig, message: Message, build: Build) -> nn.Module:
    """The module of a final model of one of the kinds of `ADAPTATIONS`; `build` makes the module of
    the model that is adapted.
    """
    return ADAPTATIONS[message.meta["kind"]](build(_base(message)), task, message)


def _base(message: Message) -> Message:
    return Message(message.states, {**message.meta, "kind": message.meta["base"]})
