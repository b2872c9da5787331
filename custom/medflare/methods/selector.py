"""FedSM's model selector: which network it is, and how a site trains it with one label for all its images."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.rng import seeded
from medflare.core.states import StateDict
from medflare.methods.base import Plan
from medflare.tasks.networks import build_network
from medflare.tasks.site import Batch, Site

COMPACT, VGG11 = "compact_selector", "vgg11"
MOMENTS = ("exp_avg", "exp_avg_sq")
SelectorLoss = Callable[[Tensor, Batch], Tensor]


def selector_spec(plan: Plan) -> Mapping[str, Any]:
    """The selector's network: the one asked for, or with "auto" VGG-11 unless it would dwarf the task's own network.

    VGG-11 has 129 M parameters; with two Adam moments they are 99 % of the traffic of the published example. "auto" takes the
    compact selector where VGG-11 is larger than the task's network.
    """
    if plan.hyper.selector != "auto":
        return {"name": plan.hyper.selector}
    size = {name: sum(t.numel() for t in plan.template(spec).values()) for name, spec in (("task", None), ("vgg", {"name": VGG11}))}
    return {"name": COMPACT if size["vgg"] > size["task"] else VGG11}


def parameter_names(plan: Plan, outputs: int) -> set[str]:
    """Names of the selector's parameters: what Adam keeps moments for."""
    with torch.device("meta"):
        network = build_network(selector_spec(plan), plan.task.channels, outputs)
    return {name for name, _ in network.named_parameters()}


def initial_moments(state: StateDict, parameters: set[str]) -> dict[str, StateDict]:
    """Adam's moments before the first step: zeros for every parameter."""
    return {moment: {name: torch.zeros_like(tensor) for name, tensor in state.items() if name in parameters} for moment in MOMENTS}


def train_selector(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    site: Site,
    round: int,
    loss: SelectorLoss,
    steps: str,
) -> float:
    """One round of the selector's training; returns its mean loss.

    Args:
        loss: (selector logits, batch) -> mean loss of the batch.
        steps: "fullbatch": one optimizer step per epoch with the gradient of the mean over all images (as the published code,
            up to a scale that Adam ignores); "minibatch": a step per batch (as Algorithm 1).
    """
    total = 0.0
    model.train()
    with seeded(site.seed, site.name, round, "selector", "dropout"):
        for epoch in range(site.task.local_epochs):
            optimizer.zero_grad(set_to_none=True)
            for value, share in _batch_losses(model, site, round, epoch, loss):
                total += value.item() * share
                (value * share if steps == "fullbatch" else value).backward()
                if steps == "minibatch":
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            if steps == "fullbatch":
                optimizer.step()
    return total / max(1, site.task.local_epochs)


def _batch_losses(model: nn.Module, site: Site, round: int, epoch: int, loss: SelectorLoss) -> Iterator[tuple[Tensor, float]]:
    """Each batch's mean loss and its share of the training images."""
    for batch in site.batches("train", round, "selector", epoch):
        yield loss(model(batch.images), batch), len(batch.images) / site.n["train"]


def adam_with_moments(model: nn.Module, rate: float, moments: Mapping[str, StateDict], step: int) -> torch.optim.Adam:
    """Adam whose first and second moments are the given ones (the server's averages) after `step` steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    if step > 0:
        slots = {
            place: {"step": torch.tensor(float(step)), **{moment: moments[moment][name].clone() for moment in MOMENTS}}
            for place, (name, _) in enumerate(model.named_parameters())
        }
        optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
    return optimizer


def moments_of(model: nn.Module, optimizer: torch.optim.Adam) -> tuple[dict[str, StateDict], int]:
    """Adam's moments by parameter name, on the CPU, and its step count."""
    named = dict(model.named_parameters())
    moments = {m: {name: optimizer.state[p][m].detach().cpu().clone() for name, p in named.items()} for m in MOMENTS}
    step = max(int(optimizer.state[p]["step"]) for p in named.values())
    return moments, step
