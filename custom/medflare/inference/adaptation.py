"""Test-time adaptation as a part of a delivered model: a model of any kind, used with DSBN or Tent (GRACE paper, Table 3).

A message of kind "dsbn" or "tent" holds the model that it adapts, whose own kind is its fact "base".
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from medflare.core.message import Message
from medflare.data.sites.site import Site
from medflare.inference.batch_statistics import TargetStatistics, batch_norm_layers
from medflare.inference.tent import Tent
from medflare.networks.catalogue import build_network
from medflare.tasks.config import TaskConfig

ADAPTATIONS: Final = ("dsbn", "tent")
STATISTICS = "statistics"  # the entry with the BatchNorm statistics that DSBN estimated

Build = Callable[[Message], nn.Module]


def check_adaptable(task: TaskConfig) -> None:
    """Before anything is trained, refuse a task whose network has no BatchNorm, which test-time adaptation needs.

    Raises:
        ConfigError: it has none.
    """
    with torch.device("meta"):
        batch_norm_layers(build_network(task.network, task.image_channels, task.outputs, task.spatial_dims))


def with_tent(message: Message, task: TaskConfig, *, rate: float = 1e-3, steps: int = 1, episodic: bool = False) -> Message:
    """The delivered model with Tent around it.

    Args:
        message: the delivered model.
        task: gives the batch size.
        rate: of Adam.
        steps: per batch.
        episodic: forget after every batch.
    """
    settings = {"rate": rate, "steps": steps, "episodic": episodic, "batch_size": task.batch_size}
    return Message(dict(message.states), {**message.facts, "kind": "tent", "base": message.facts["kind"], "tent": settings})


def with_dsbn(message: Message) -> Message:
    """The delivered model with BatchNorm statistics of its own for the images that it meets, not estimated yet."""
    return Message(dict(message.states), {**message.facts, "kind": "dsbn", "base": message.facts["kind"]})


def dsbn_for(site: Site, message: Message, build: Build) -> Message:
    """`with_dsbn`, with the statistics of the site's unlabelled test images.

    Args:
        site: whose test images are looked at, without their labels.
        message: the delivered model that is adapted.
        build: message -> module, of the model that is adapted.
    """
    message = with_dsbn(message)
    if site.n["test"]:
        module = adapted_model(site.task, message, build).to(site.device)
        module.adapt(batch.images for batch in site.ordered("test", site.scoring_batch))
        message.states[STATISTICS] = module.statistics()
    return message


def adapted_model(task: TaskConfig, message: Message, build: Build) -> Any:
    """The module of a delivered model of kind "dsbn" or "tent".

    DSBN's has the statistics that it was delivered with, `adapt` takes other images'; Tent's adapts while it predicts.

    Args:
        task: gives the target, for Tent.
        message: the delivered model, with its fact "base".
        build: message -> module, of the model that is adapted.
    """
    base = build(Message(message.states, {**message.facts, "kind": message.facts["base"]}))
    if message.facts["kind"] == "tent":
        return Tent(base, task.target, **message.facts["tent"])
    model = TargetStatistics(base)
    if STATISTICS in message.states:
        model.load_statistics(message.states[STATISTICS])
    return model
