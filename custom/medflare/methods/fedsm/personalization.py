"""Ways to a personal model that FedSM's Table 6 compares with SoftPull: APFL, Per-FedAvg, pFedMe, each a loop for one round.

The formulas stand in `formulas.py`; SoftPull itself is a rule of the server.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.func import functional_call

from medflare.core.rng import seeded
from medflare.core.states import StateDict, copy_state
from medflare.data.sites.site import Site
from medflare.data.splits import Batch
from medflare.methods.fedsm.formulas import apfl_mixture, pfedme_outer
from medflare.methods.fedsm.hyper import FedSMSiteHyper
from medflare.methods.parts.proximal import proximal_gradients
from medflare.methods.parts.steps import unremembered
from medflare.methods.parts.training import epochs, train_epochs, trainable

Rate = float | torch.optim.Optimizer  # of a plain gradient step, or what takes a step of its own along the gradient


def train_apfl(
    model: nn.Module, local: StateDict, global_: StateDict, site: Site, round: int, share: float, rate: float = 0.0
) -> tuple[StateDict, StateDict, float]:
    """One round of APFL: v learns through the mixture; returns (v, mixture v̄, α). `model` is a workspace.

    Running statistics are collected while v̄ computes, so they are v̄'s as they are and nothing is blended into them. α follows
    α <- α - η <v - w, ∇f(v̄)> within [0, 1] (Deng et al. 2020, Eq. 11).

    Args:
        model: a network of the task; what it holds is overwritten.
        local: v.
        global_: w.
        site: gives batches, loss and optimizer.
        round: 0-based, a key of batches and dropout.
        share: α in [0, 1] as the round begins.
        rate: η of α; 0 leaves it.
    """
    model.load_state_dict(local)
    learnt = torch.tensor(share, device=site.device, requires_grad=rate > 0)
    anchor = {name: global_[name].to(site.device) for name, _ in model.named_parameters()}

    def mixed_loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        part = learnt if rate else share
        mixture = {name: part * weight + (1 - part) * anchor[name] for name, weight in network.named_parameters()}
        return site.loss(functional_call(network, mixture, (images,)), targets)

    @torch.no_grad()
    def learn_share() -> None:
        if learnt.grad is not None:
            learnt.sub_(rate * learnt.grad).clamp_(0.0, 1.0)
            learnt.grad = None

    train_epochs(model, site.optimizer(trainable(model)), site, round, "personal", loss=mixed_loss, correct=learn_share)
    local = copy_state(model.state_dict())
    share = float(learnt.detach()) if rate else share
    return local, apfl_mixture(local, global_, share, kept=[name for name, _ in model.named_buffers()]), share


def train_per_fedavg(model: nn.Module, site: Site, round: int, rate: Rate, outer_rate: Rate) -> None:
    """One round of first-order Per-FedAvg in place: θ' = θ - α g(θ; B1), θ <- θ - β g(θ'; B2) (Fallah et al. 2020, Alg. 1, FO).

    An optimizer in place of a rate takes its own step along the same gradient; the inner one starts from the moments that there are, and
    leaves them as they are.

    Consecutive mini-batches play B1 and B2; a last batch without a partner is left out, unless it is the only one, which then
    plays both.

    Args:
        model: θ, trained in place.
        site: gives batches and loss.
        round: 0-based, a key of batches and dropout.
        rate: α of the inner step, or the optimizer that takes it, which may be the outer one.
        outer_rate: β of the outer step, or the optimizer that takes it.
    """
    weights = trainable(model)
    inner, outer = _stepping(weights, rate), _stepping(weights, outer_rate)
    model.train()
    for epoch in epochs(site, round, "personal"):
        for first, second in _pairs(epoch):
            start = [weight.detach().clone() for weight in weights]
            with unremembered(inner):
                _step(inner, weights, _gradients(model, site, first))
            gradients = _gradients(model, site, second)
            with torch.no_grad():
                for weight, origin in zip(weights, start, strict=True):
                    weight.copy_(origin)
            _step(outer, weights, gradients)


def adapt(model: nn.Module, site: Site, round: int, rate: Rate, steps: int) -> None:
    """A few gradient steps in place on the site's training images: how Per-FedAvg's shared model becomes personal.

    Args:
        model: changed in place.
        site: gives batches and loss.
        round: 0-based, a key of batches and dropout.
        rate: α, or the optimizer that takes the steps.
        steps: how many, each on one batch; the batches begin again where they end.
    """
    weights = trainable(model)
    optimizer = _stepping(weights, rate)
    model.train()
    passes = (site.batches("train", round, "adapt", 0) for _ in range(steps))  # equal ones, and at least a batch in each
    with seeded(site.seed, site.name, round, "adapt", "dropout"):
        for batch in islice(chain.from_iterable(passes), steps):
            _step(optimizer, weights, _gradients(model, site, batch))


def train_pfedme(
    shared: nn.Module, personal: nn.Module, site: Site, round: int, *, rate: Rate, strength: float, inner_steps: int, outer_rate: float
) -> None:
    """One round of pFedMe in place: θ approximates the proximal point of w on each batch, then w moves towards θ.

    Args:
        shared: w, moved in place.
        personal: θ, trained in place; it goes on from the weights that it holds.
        site: gives batches and loss.
        round: 0-based, a key of batches and dropout.
        rate: of the gradient steps in θ, or the optimizer that takes them.
        strength: λ of the proximal term.
        inner_steps: gradient steps in θ per batch.
        outer_rate: η of the step in w.
    """
    weights, thetas = trainable(shared), trainable(personal)
    optimizer = _stepping(thetas, rate)
    personal.train()
    for batches in epochs(site, round, "personal"):
        for batch in batches:
            for _ in range(inner_steps):
                _step(optimizer, thetas, proximal_gradients(_gradients(personal, site, batch), thetas, weights, strength))
            with torch.no_grad():
                for weight, moved in zip(weights, pfedme_outer(weights, thetas, outer_rate, strength), strict=True):
                    weight.copy_(moved)
    with torch.no_grad():  # running statistics follow the model that saw the images
        for own, seen in zip(shared.buffers(), personal.buffers(), strict=True):
            own.copy_(seen)


def train_meta(
    meta: nn.Module, personal: nn.Module, site: Site, round: int, hyper: FedSMSiteHyper, optimizer: torch.optim.Optimizer
) -> None:
    """One round of Per-FedAvg or pFedMe in place: the site's copy of the shared model, and pFedMe's personal model beside it.

    Per-FedAvg's personal model is an adaptation of the shared model as it comes from the server, see `adapt`; this leaves it alone.
    Both go by the task's optimizer: a plain step at the rate of a task with Adam leaves a model where it is. pFedMe's outer step is by
    default as far as its proximal point, η = 1 / λ, which is the largest step along the gradient λ (w - θ) that does not go beyond it.

    Args:
        meta: the site's copy of the shared model, trained in place.
        personal: with pFedMe overwritten; becomes the personal model.
        site: gives batches and loss.
        round: 0-based, a key of batches and dropout.
        hyper: which of both, and its rates.
        optimizer: the task's, of the weights that take gradient steps: of `meta`, with pFedMe of `personal`.
    """
    if hyper.personalization == "perfedavg":
        train_per_fedavg(meta, site, round, inner_rate(hyper, optimizer), optimizer if hyper.meta_lr == "auto" else hyper.meta_lr)
        return
    strength = hyper.pfedme_lambda
    personal.load_state_dict(meta.state_dict())
    eta = (1 / strength if strength else 0.0) if hyper.meta_lr == "auto" else hyper.meta_lr
    rate = inner_rate(hyper, optimizer)
    train_pfedme(meta, personal, site, round, rate=rate, strength=strength, inner_steps=hyper.pfedme_steps, outer_rate=eta)


def inner_rate(hyper: FedSMSiteHyper, optimizer: torch.optim.Optimizer) -> Rate:
    """What takes the inner steps: the task's optimizer, or plain steps at a rate of their own."""
    return optimizer if hyper.adapt_lr == "auto" else hyper.adapt_lr


def _stepping(weights: Sequence[nn.Parameter], rate: Rate) -> torch.optim.Optimizer:
    return rate if isinstance(rate, torch.optim.Optimizer) else torch.optim.SGD(weights, lr=rate)


def _step(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _pairs(batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch]]:
    """Two by two, as they come; a last one without a partner is left out, the only one is its own."""
    rest = iter(batches)
    first, second = next(rest, None), next(rest, None)
    if first is not None and second is None:
        yield first, first
    while first is not None and second is not None:
        yield first, second
        first, second = next(rest, None), next(rest, None)


def _gradients(model: nn.Module, site: Site, batch: Batch) -> list[Tensor]:
    images, targets, _ = batch
    return list(torch.autograd.grad(site.loss(model(images), targets), trainable(model)))
