"""Test-time adaptation of any final model: `ADAPTATIONS` by name, and the messages that carry them.

A message of such a kind ("dsbn", "tent", an extension's name) holds the model that it adapts, whose
own kind is its item "base"; the item of the kind's name has its arguments.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from medflare.adaptation.dsbn import TargetStatistics, TestTimeNorm, require_batch_norm
from medflare.adaptation.labelshift import CLASS_SHARES, UNKNOWN_SHARES, LabelShift
from medflare.adaptation.memo import MEMO, MEMOSettings
from medflare.adaptation.sar import SAR, SARSettings
from medflare.adaptation.tent import Tent, TentSettings
from medflare.adaptation.ttt import TestTimeTraining, TTTSettings
from medflare.core.errors import ConfigError, StateError
from medflare.core.extensions import Extensions, check_callable
from medflare.core.hyper import build_hyper, parsed_value
from medflare.core.message import Message
from medflare.core.rng import seeded
from medflare.core.settings import no_such, strict_dataclass
from medflare.core.states import StateDict
from medflare.networks.catalogue import meta_network, task_network
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.site import Site

STATISTICS = "statistics"  # the entry with what an adaptation estimated from all images
NONE = "none"
LABEL_SHIFT = "labelshift"
ROUTING = "routing"  # of IOP-FL's models alone, whose kind is "routed"

Build = Callable[[Message], nn.Module]


@runtime_checkable
class Estimating(Protocol):
    """An adaptation that estimates a state from all images, before the first is predicted."""

    def adapt(self, batches: Iterable[Tensor]) -> None:
        """Estimate the state from images (N, C, H, W), in one pass."""

    def statistics(self) -> StateDict:
        """What was estimated."""

    def load_statistics(self, state: StateDict) -> None:
        """Restore what `statistics` returned."""


@strict_dataclass
class _NoSettings:
    """An adaptation without arguments."""


def _in_batches(adaptation: Any) -> Callable[..., nn.Module]:
    """Makes Tent or SAR with the task's batches, unless the settings say otherwise."""
    return lambda model, task, message, settings: adaptation(
        model, task.target, settings, settings.batch_size or task.batch_size
    )


# Kind -> class of its arguments, and (built model, task, message, arguments) -> module.
_BUILTIN: dict[str, tuple[type[Any], Callable[..., nn.Module]]] = {
    "dsbn": (_NoSettings, lambda model, *_: TargetStatistics(model)),
    "tent": (TentSettings, _in_batches(Tent)),
    "sar": (SARSettings, _in_batches(SAR)),
    "memo": (MEMOSettings, lambda model, task, _, settings: MEMO(model, task.target, settings)),
    "ttt": (TTTSettings, TestTimeTraining),
    LABEL_SHIFT: (
        _NoSettings,
        lambda model, task, message, _: LabelShift(model, task, message.meta.get(CLASS_SHARES)),
    ),
}


def _built(kind: str, model: nn.Module, task: TaskConfig, message: Message) -> nn.Module:
    settings_class, adaptation = _BUILTIN[kind]
    settings = build_hyper(settings_class, message.meta.get(kind, {}), f"adaptation {kind}")
    return adaptation(model, task, message, settings)


class _Adaptations(Extensions):
    """kind -> (built model, task, message) -> module, images to probabilities."""

    def __getitem__(self, kind: str) -> Callable[[nn.Module, TaskConfig, Message], nn.Module]:
        return self.foreign(kind) or partial(_built, kind)


def _try(adaptation: Any) -> None:
    """Raises if it cannot be called, or makes no probabilities around a small classifier."""
    check_callable(adaptation)
    network_spec = {"name": "small_cnn", "channels": [4], "batch_norm": True}
    task = replace(load_task("phantom_grades"), size=(8, 8), network=network_spec)
    with seeded(0, "try adaptation"):
        network = task_network(task).eval()
        images = torch.rand(2, task.image_channels, *task.size)
        try:
            module = adaptation(nn.Sequential(network, nn.Softmax(dim=1)), task, Message())
            values = module.eval()(images).detach()
        except Exception:  # it may need another task or model
            return
    lowest = values.min().item()
    highest = values.max().item()
    if not (lowest >= -_ROUNDING and highest <= 1 + _ROUNDING):
        raise ValueError(
            f"its outputs are {lowest:.3g} to {highest:.3g}; return probabilities, from 0 to 1"
        )


_ROUNDING = 1e-4
ADAPTATIONS = _Adaptations("adaptation", "adaptations", lambda: _BUILTIN, _try)


def check_adaptable(task: TaskConfig) -> None:
    """Raises ConfigError if the task's network has no BatchNorm, which Tent and DSBN need."""
    require_batch_norm(meta_network(task))


def parsed(adapt: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of "tent" or "tent,rate=0.01,steps=2"; ConfigError for another text.

    Examples:
        >>> parsed("tent,rate=0.01")
        ('tent', {'rate': 0.01})
    """
    name, *words = [word.strip() for word in adapt.split(",")]
    names = (NONE, *ADAPTATIONS, ROUTING)
    if name not in names:
        raise ConfigError(no_such("adaptation", name, names))
    arguments = {}
    for word in words:
        argument, equals, value = word.partition("=")
        if not equals or name in (NONE, ROUTING):
            raise ConfigError(f"adaptation {adapt!r}: write {name}, or NAME,ARGUMENT=VALUE")
        arguments[argument] = parsed_value(value)
    return name, arguments


def with_adaptation(message: Message, adapt: str) -> Message:
    """The final model with an adaptation (see `parsed`) in place of its own one.

    "none" is its own model without any. "routing" is a model of experts as it is; ConfigError for
    any other model.
    """
    name, arguments = parsed(adapt)
    kind = message.meta["kind"]
    if name == ROUTING:
        if kind != "routed":
            raise ConfigError(
                "adaptation routing: the model holds no experts, "
                "as those of iop_fl at its outside sites do"
            )
        return message
    if kind in ADAPTATIONS:
        message = _base(message)
    if name == NONE:
        return message
    around = _around(message, name)
    if arguments:
        around.meta[name] = arguments
    return around


def with_tent(message: Message, task: TaskConfig, **settings: Any) -> Message:
    """The final model with Tent around it; `settings` are those of `TentSettings`."""
    adapted = _around(message, "tent")
    adapted.meta["tent"] = asdict(TentSettings(batch_size=task.batch_size, **settings))
    return adapted


def _around(message: Message, kind: str) -> Message:
    meta = {**message.meta, "kind": kind, "base": message.meta["kind"]}
    return Message(dict(message.states), meta)


def adapted_at(site: Site, message: Message, adapt: str, build: Build) -> Message:
    """`with_adaptation`, with what an `Estimating` one estimates from the site's test images; their
    labels are not used.

    Raises:
        ConfigError: the model cannot be adapted so.
    """
    message = with_adaptation(message, adapt)
    if message.meta["kind"] not in ADAPTATIONS:
        return message
    module = adapted_model(site.task, message, build)
    if isinstance(module, Estimating) and site.n["test"]:
        module.to(site.device)
        module.adapt(batch.images for batch in site.ordered("test", site.scoring_batch))
        message.states[STATISTICS] = module.statistics()
    return message


def adapted_model(task: TaskConfig, message: Message, build: Build) -> nn.Module:
    """The module of a final model of one of the kinds of `ADAPTATIONS`; `build` makes the module of
    the model that is adapted.

    Raises:
        ConfigError: the adaptation cannot be used with this model, or its arguments are wrong.
    """
    model = build(_base(message))
    if any(isinstance(part, TestTimeNorm) for part in model.modules()):
        raise ConfigError(
            f"a model of kind {message.meta['base']!r} normalizes by the test images already; "
            "use adaptation none"
        )
    module = ADAPTATIONS[message.meta["kind"]](model, task, message)
    if STATISTICS in message.states and isinstance(module, Estimating):
        module.load_statistics(message.states[STATISTICS])
    return module


def holds_experts(message: Message) -> bool:
    """Whether a message has the personal models that `routing` mixes."""
    return any(entry.startswith("expert/") for entry in message.states)


def remark(message: Message) -> str:
    """What a user of the adapted model has to know; "" for nothing."""
    unknown = message.meta["kind"] == LABEL_SHIFT and CLASS_SHARES not in message.meta
    return f"{LABEL_SHIFT}: {UNKNOWN_SHARES}" if unknown else ""


def _base(message: Message) -> Message:
    """The model that is adapted; StateError if there is none, or it is itself an adaptation."""
    base = message.meta.get("base")
    if not isinstance(base, str) or base in ADAPTATIONS:
        raise StateError(
            f"a model of kind {message.meta['kind']!r} adapts no model, or one that is adapted "
            "itself; fetch the model again"
        )
    states = {entry: state for entry, state in message.states.items() if entry != STATISTICS}
    return Message(states, {**message.meta, "kind": base})
