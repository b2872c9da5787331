"""Test-time adaptation as part of a method: a delivered model of any kind, used outside with DSBN or Tent (GRACE paper, Table 3)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.inference.batch_statistics import TargetStatistics, batch_norm_layers
from medflare.inference.tent import Tent
from medflare.methods.catalogue import build_deployed
from medflare.networks.catalogue import build_network
from medflare.sites.site import Site
from medflare.tasks.config import TaskConfig

STATISTICS = "statistics"  # the entry with the BatchNorm statistics that DSBN estimated


@dataclass(frozen=True)
class AdaptationHyper:
    tta: str = param("none", "how the global model adapts at an outside site", source="Table 3", choices=("none", "dsbn", "tent"))
    tent_rate: float = param(1e-3, "Tent's Adam rate", source="Table 3", low=0)
    tent_steps: int = param(1, "Tent's steps per batch", source="Table 3", low=1)
    tent_episodic: bool = param(False, "Tent forgets after every batch", source="Table 3")


def check_adaptable(task: TaskConfig, hyper: AdaptationHyper) -> None:
    """Before anything is trained: ConfigError where test-time adaptation is asked of a network without BatchNorm."""
    if hyper.tta != "none":
        with torch.device("meta"):
            batch_norm_layers(build_network(task.network, task.channels, task.outputs))


def with_adaptation(message: Message, task: TaskConfig, hyper: AdaptationHyper) -> Message:
    """The delivered model with the chosen test-time adaptation around it; the same one for "none"."""
    if hyper.tta == "none":
        return message
    facts: dict[str, Any] = {**message.facts, "kind": hyper.tta, "base": message.facts["kind"]}
    if hyper.tta == "tent":
        facts["tent"] = {
            "rate": hyper.tent_rate,
            "steps": hyper.tent_steps,
            "episodic": hyper.tent_episodic,
            "batch_size": task.batch_size,
        }
    return Message(dict(message.states), facts)


def adapted_to(site: Site, message: Message, hyper: AdaptationHyper) -> Message:
    """The delivered model for one site: as `with_adaptation`, for DSBN with the statistics of the site's unlabelled test images."""
    message = with_adaptation(message, site.task, hyper)
    if hyper.tta == "dsbn" and site.n["test"]:
        module = dsbn_model(site.task, message).to(site.device)
        module.adapt(batch.images for batch in site.ordered("test", site.scoring_batch))
        message.states[STATISTICS] = module.statistics()
    return message


def dsbn_model(task: TaskConfig, message: Message) -> TargetStatistics:
    """The module of a delivered model of kind "dsbn", with the statistics it was delivered with; `adapt` takes other images'."""
    model = TargetStatistics(_base(task, message))
    if STATISTICS in message.states:
        model.load_statistics(message.states[STATISTICS])
    return model


def tent_model(task: TaskConfig, message: Message) -> Tent:
    """The module of a delivered model of kind "tent"; it adapts while it predicts."""
    return Tent(_base(task, message), task.target, **message.facts["tent"])


def _base(task: TaskConfig, message: Message) -> nn.Module:
    return build_deployed(task, Message(message.states, {**message.facts, "kind": message.facts["base"]}))
