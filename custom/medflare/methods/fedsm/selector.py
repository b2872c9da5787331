"""FedSM's model selector: which network it is, and how a site trains it with one label for all its images."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.rng import seeded
from medflare.core.states import StateDict
from medflare.methods.base import Plan
from medflare.networks.catalogue import build_network
from medflare.sites.site import Batch, Site

COMPACT, VGG11 = "compact_selector", "vgg11"
RATES = {COMPACT: 1e-2, VGG11: 1e-3}  # VGG-11: the paper's
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


def selector_rate(plan: Plan) -> float:
    rate = plan.hyper.selector_lr
    return RATES[selector_spec(plan)["name"]] if rate == "auto" else float(rate)


def parameter_names(plan: Plan, outputs: int) -> set[str]:
    """Names of the selector's parameters: what Adam keeps moments for."""
    with torch.device("meta"):
        network = build_network(selector_spec(plan), plan.task.channels, outputs)
    return {name for name, _ in network.named_parameters()}


def initial_moments(state: StateDict, parameters: set[str]) -> dict[str, StateDict]:
    """Adam's moments before the first step: zeros for every parameter."""
    return {moment: {name: torch.zeros_like(tensor) for name, tensor in state.items() if name in parameters} for moment in MOMENTS}


def train_selector(
    model: nn.Module, optimizer: torch.optim.Optimizer, site: Site, keys: tuple[str | int, ...], loss: SelectorLoss, steps: str
) -> float:
    """One round of the selector's training at a site; returns its mean loss.

    Args:
        keys: what sets this pass apart, see `Site.batches`.
        loss: (selector logits, batch) -> mean loss of the batch.
        steps: "minibatch": a step per batch (as Algorithm 1); "fullbatch": one step per epoch with the gradient of the mean over
            all images (as the published code, up to a scale that Adam ignores).
    """
    if steps == "fullbatch":
        value = accumulate_gradient(model, site, (*keys, 0), loss)
        optimizer.step()
        return value
    total = 0.0
    model.train()
    with seeded(site.seed, site.name, *keys, "dropout"):
        for epoch in range(site.task.local_epochs):
            for batch_loss, share in _batch_losses(model, site, (*keys, epoch), loss):
                optimizer.zero_grad(set_to_none=True)
                batch_loss.backward()
                optimizer.step()
                total += batch_loss.item() * share
    return total / site.task.local_epochs


def accumulate_gradient(model: nn.Module, site: Site, keys: tuple[str | int, ...], loss: SelectorLoss) -> float:
    """Leave the gradient of the mean loss over all training images in the model's parameters; returns that loss."""
    total = 0.0
    model.train()
    model.zero_grad(set_to_none=True)
    with seeded(site.seed, site.name, *keys, "dropout"):
        for value, share in _batch_losses(model, site, keys, loss):
            (value * share).backward()
            total += value.item() * share
    return total


def _batch_losses(model: nn.Module, site: Site, keys: tuple[str | int, ...], loss: SelectorLoss) -> Iterator[tuple[Tensor, float]]:
    """Each batch's mean loss and its share of the training images."""
    for batch in site.batches("train", *keys):
        yield loss(model(batch.images), batch), len(batch.images) / site.n["train"]


def gradient_of(model: nn.Module) -> StateDict:
    """The accumulated gradient by parameter name, on the CPU."""
    return {name: parameter.grad.detach().cpu().clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


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


def adam_step(
    weights: StateDict, gradient: StateDict, moments: Mapping[str, StateDict], step: int, rate: float
) -> tuple[StateDict, dict[str, StateDict]]:
    """w - η m̂ / (√v̂ + ε) and the new moments: step number `step` (from 1) of Adam (Kingma and Ba 2015, Alg. 1), on named tensors.

    At the server, with the mean of the sites' gradients, this is full-batch Adam over the images of all sites: the one gradient
    that no site, which sees a single label, could follow alone. Entries without a gradient (buffers) stay as they are.
    """
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8  # torch's defaults
    first = {name: torch.lerp(moments["exp_avg"][name], g, 1 - beta1) for name, g in gradient.items()}
    second = {name: torch.lerp(moments["exp_avg_sq"][name], g * g, 1 - beta2) for name, g in gradient.items()}
    moved = dict(weights)
    for name, mean in first.items():
        spread = (second[name] / (1 - beta2**step)).sqrt() + epsilon
        moved[name] = weights[name] - rate / (1 - beta1**step) * mean / spread
    return moved, {"exp_avg": first, "exp_avg_sq": second}
