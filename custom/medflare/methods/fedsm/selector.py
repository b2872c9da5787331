"""FedSM's model selector: which network it is, how a site trains it with one label for all its images, how the server steps it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medflare.core.manifest import Entry
from medflare.core.message import Message
from medflare.core.rng import Key, seeded
from medflare.core.states import StateDict, copy_state, weighted_mean
from medflare.data.sites.site import Site
from medflare.data.splits import Batch
from medflare.methods.base import Plan, ServerContext, SiteHalf
from medflare.methods.fedsm.formulas import adam_step
from medflare.methods.fedsm.hyper import FedSMSiteHyper
from medflare.methods.fedsm.ridge import RIDGE, ridge_solution
from medflare.methods.parts.training import epochs, samples_of_pass, weighted_sum

COMPACT, VGG11 = "compact_selector", "vgg11"
RATES = {COMPACT: 1e-2, VGG11: 1e-3}  # VGG-11: the paper's
GRADIENT = "selector_gradient"  # entry of a reply
SQUARE = "exp_avg_sq"  # Adam takes its root
MOMENTS = ("exp_avg", SQUARE)
SelectorLoss = Callable[[Tensor, Batch], Tensor]
SelectorPlan = Plan[FedSMSiteHyper, Any]


# -- what it is --------------------------------------------------------------------------------------------------------------


def is_ridge(plan: SelectorPlan) -> bool:
    """Whether the selector is solved at the server and never trained."""
    return plan.site_hyper.selector == "ridge"


def selector_spec(plan: SelectorPlan) -> Mapping[str, Any]:
    """The selector's network: the one asked for, or with "auto" VGG-11 unless it would dwarf the task's own network.

    VGG-11 has 129 M parameters; with two Adam moments they are 99 % of the traffic of the published example. "auto" takes the
    compact selector where VGG-11 is larger than the task's network, and for volumes, which VGG-11 does not take.
    """
    if is_ridge(plan):
        return {"name": RIDGE}
    if plan.site_hyper.selector != "auto":
        return {"name": plan.site_hyper.selector}
    if plan.task.spatial_dims != 2:
        return {"name": COMPACT}
    size = {name: sum(t.numel() for t in plan.template(spec).values()) for name, spec in (("task", None), ("vgg", {"name": VGG11}))}
    return {"name": COMPACT if size["vgg"] > size["task"] else VGG11}


def selector_rate(plan: SelectorPlan) -> float:
    """Adam's rate for it."""
    rate = plan.site_hyper.selector_lr
    return RATES[selector_spec(plan)["name"]] if rate == "auto" else float(rate)


class SelectorEntries(NamedTuple):
    """The entries of a selector.

    Attributes:
        itself: its weights.
        sent: what a site needs to train it.
        answered: what a site makes of it: its gradient, or itself with Adam's moments, as the settings say.
    """

    itself: Entry
    sent: tuple[Entry, ...]
    answered: tuple[Entry, ...]


def selector_entries(outputs: Callable[[SelectorPlan], int]) -> SelectorEntries:
    """The declared entries of a selector.

    Args:
        outputs: plan -> how many scores it gives.
    """

    def whole(plan: SelectorPlan) -> StateDict:
        return plan.template(selector_spec(plan), outputs(plan))

    def parameters(plan: SelectorPlan) -> StateDict:
        names = dict(plan.network(selector_spec(plan), outputs(plan)).named_parameters())
        return {name: tensor for name, tensor in whole(plan).items() if name in names}

    def steps_at_server(plan: SelectorPlan) -> bool:
        return not is_ridge(plan) and plan.site_hyper.selector_steps == "server"

    def steps_at_site(plan: SelectorPlan) -> bool:
        return not is_ridge(plan) and not steps_at_server(plan)

    def moments_too(plan: SelectorPlan) -> bool:
        return steps_at_site(plan) and plan.site_hyper.sync_moments

    def trained(plan: SelectorPlan) -> bool:
        return not is_ridge(plan)

    purpose = "Adam's {} of the selector: a site sees one label only, the mean has seen all"
    moments = [Entry(f"selector_{name}", purpose.format(name), parameters, moments_too, unsigned=name == SQUARE) for name in MOMENTS]
    answered = (
        Entry(GRADIENT, "the gradient of the selector, which tells sites apart", parameters, steps_at_server),
        Entry("selector", "the selector that tells sites apart", whole, steps_at_site),
        *moments,
    )
    return SelectorEntries(Entry("selector", template=whole), (Entry("selector", template=whole, when=trained), *moments), answered)


# -- at a site ---------------------------------------------------------------------------------------------------------------


class SiteSelector:
    """The selector's training at one site; its moments, where the server does not average them, lie in the half's memory.

    Args:
        half: the site half that it belongs to.
        outputs: one score for every site, or for the global model too.
    """

    def __init__(self, half: SiteHalf[Any], outputs: int):
        self.half, self.outputs = half, outputs
        self.plan: SelectorPlan = half.plan
        self.hyper = self.plan.site_hyper

    def network(self, state: StateDict) -> nn.Module:
        """The selector with these weights.

        Args:
            state: its weights.
        """
        return self.half.network("selector", state, selector_spec(self.plan), self.outputs)

    @torch.no_grad()
    def scores(self, state: StateDict, split: str) -> Tensor:
        """Softmax scores (N, outputs) of the split's images, or with `fit` "patch" of their windows, on the CPU.

        Args:
            state: the selector's weights.
            split: "train", "validation" or "test".
        """
        selector = self.network(state).eval()
        return torch.cat([selector(batch.images).softmax(dim=1).cpu() for batch in self.half.site.ordered(split)])

    def round(self, round: int, incoming: Message, loss: SelectorLoss) -> tuple[dict[str, StateDict], float]:
        """One update of the selector: its gradient for the server, or local steps with the server's (else the site's) moments.

        Args:
            round: 0-based.
            incoming: holds the selector and, where they are averaged, its moments.
            loss: (selector logits, batch) -> mean loss of the batch.

        Returns:
            The entries to answer with, and the mean loss.
        """
        selector, site = self.network(incoming.states["selector"]), self.half.site
        keys = (round, "selector", incoming.facts.get("update", 0))
        if self.hyper.selector_steps == "server":
            value = accumulate_gradient(selector, site, (*keys, 0), loss)
            return {GRADIENT: gradient_of(selector)}, value
        memory, synced = self.half.memory, self.hyper.sync_moments
        source = incoming.states if synced else memory.states
        moments = {moment: source.get(f"selector_{moment}", {}) for moment in MOMENTS}
        optimizer = adam_with_moments(selector, selector_rate(self.plan), moments, memory.facts.get("selector_step", 0))
        value = train_selector(selector, optimizer, site, keys, loss, self.hyper.selector_steps)
        moments, memory.facts["selector_step"] = moments_of(selector, optimizer)
        named = {f"selector_{moment}": state for moment, state in moments.items()}
        states = {"selector": copy_state(selector.state_dict())}
        if synced:
            return {**states, **named}, value
        memory.states.update(named)
        return states, value


def train_selector(
    model: nn.Module, optimizer: torch.optim.Optimizer, site: Site, keys: tuple[Key, ...], loss: SelectorLoss, steps: str
) -> float:
    """One round of the selector's training at a site; returns its mean loss.

    Args:
        model: the selector, trained in place.
        optimizer: of its parameters.
        site: gives batches.
        keys: what sets this pass apart, see `Site.batches`.
        loss: (selector logits, batch) -> mean loss of the batch.
        steps: "minibatch": a step per batch (as Algorithm 1); "fullbatch": one step per epoch with the gradient of the mean over
            all images (as the published code, up to a scale that Adam ignores).
    """
    if steps == "fullbatch":
        value = accumulate_gradient(model, site, (*keys, 0), loss)
        optimizer.step()
        return value
    values, shares = list[Tensor](), list[float]()
    model.train()
    for batches in epochs(site, *keys):
        for batch_loss, share in _losses(model, site, batches, loss):
            optimizer.zero_grad(set_to_none=True)
            batch_loss.backward()
            optimizer.step()
            values.append(batch_loss.detach())
            shares.append(share)
    return weighted_sum(values, shares) / site.task.local_epochs


def accumulate_gradient(model: nn.Module, site: Site, keys: tuple[Key, ...], loss: SelectorLoss) -> float:
    """Leave the gradient of the mean loss over all training images in the model's parameters; returns that loss.

    Args:
        model: the selector; earlier gradients are dropped.
        site: gives batches.
        keys: what sets this pass apart, see `Site.batches`.
        loss: (selector logits, batch) -> mean loss of the batch.
    """
    values, shares = list[Tensor](), list[float]()
    model.train()
    model.zero_grad(set_to_none=True)
    with seeded(site.seed, site.name, *keys, "dropout"):
        for value, share in _losses(model, site, site.batches("train", *keys), loss):
            (value * share).backward()
            values.append(value.detach())
            shares.append(share)
    return weighted_sum(values, shares)


def _losses(model: nn.Module, site: Site, batches: Iterator[Batch], loss: SelectorLoss) -> Iterator[tuple[Tensor, float]]:
    """Each batch's mean loss and its share of the samples of a pass."""
    seen = samples_of_pass(site)
    for batch in batches:
        yield loss(model(batch.images), batch), len(batch.images) / seen


def gradient_of(model: nn.Module) -> StateDict:
    """The accumulated gradient by parameter name, on the CPU."""
    return {name: parameter.grad.detach().cpu().clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def head_of(gradient: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(weights (K, F), bias (K,)) of a selector's last layer.

    Args:
        gradient: by parameter name.
    """
    names = [name for name in gradient if name.startswith("head.")]
    weight, bias = (next(gradient[name] for name in names if name.endswith(kind)) for kind in ("weight", "bias"))
    return weight, bias


def adam_with_moments(model: nn.Module, rate: float, moments: Mapping[str, StateDict], step: int) -> torch.optim.Adam:
    """Adam whose first and second moments are the given ones (the server's averages) after `step` steps.

    Args:
        model: the selector.
        rate: of Adam.
        moments: "exp_avg" and "exp_avg_sq" -> parameter name -> tensor; not read at step 0.
        step: steps that were done before.
    """
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


# -- at the server -----------------------------------------------------------------------------------------------------------


class ServerSelector:
    """The selector at the server, in the half's memory: what is sent of it, and its next version from the sites' answers.

    Args:
        context: gives plan, seed and initial weights.
        memory: of the server half; takes the selector, its moments and its step count.
        outputs: one score for every site, or for the global model too.
    """

    def __init__(self, context: ServerContext, memory: Message, outputs: int):
        self.plan: SelectorPlan = context.plan
        self.memory = memory
        spec = selector_spec(self.plan)
        state = context.initial_state("selector", spec, outputs)
        names = dict(self.plan.network(spec, outputs).named_parameters())
        zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name in names}
        self.steps_here = self.plan.site_hyper.selector_steps == "server"
        synced = not is_ridge(self.plan) and (self.steps_here or self.plan.site_hyper.sync_moments)
        self._moments = tuple(f"selector_{moment}" for moment in MOMENTS) if synced else ()
        memory.states |= {"selector": state, **{entry: dict(zeros) for entry in self._moments}}
        memory.facts["selector_step"] = 0

    @property
    def state(self) -> StateDict:
        """The selector's weights."""
        return self.memory.states["selector"]

    @property
    def sent(self) -> dict[str, StateDict]:
        """The entries that a site needs to train it; none of one that is never trained."""
        if is_ridge(self.plan):
            return {}
        entries = ("selector",) if self.steps_here else ("selector", *self._moments)
        return {entry: self.memory.states[entry] for entry in entries}

    def solve(self, statistics: Mapping[str, StateDict], penalty: float) -> None:
        """The ridge selector from what the sites sent; a site that sent nothing is never chosen. Without any site it stays as it is.

        Args:
            statistics: site -> see `ridge.site_statistics`.
            penalty: see `ridge.ridge_solution`.
        """
        sites = {self.plan.sites.index(site): state for site, state in statistics.items()}
        if not sites:
            return
        weight, bias = ridge_solution(sites, len(self.plan.sites), penalty)
        self.memory.states["selector"] = {name: weight if name.endswith("weight") else bias for name in self.state}

    def aggregate(self, replies: Mapping[str, Message], weights: Mapping[str, float]) -> None:
        """The selector (and its moments) averaged over the sites, or one step along the mean gradient.

        Args:
            replies: site -> reply with its selector, or with its gradient.
            weights: site -> weight; only the ratios matter.
        """
        states = self.memory.states
        if not self.steps_here:
            for entry in self.sent:
                states[entry] = weighted_mean({site: reply.states[entry] for site, reply in replies.items()}, weights)
            return
        mean = weighted_mean({site: reply.states[GRADIENT] for site, reply in replies.items()}, weights)
        step = self.memory.facts["selector_step"] + 1
        moments = {moment: states[f"selector_{moment}"] for moment in MOMENTS}
        states["selector"], moments = adam_step(self.state, mean, moments, step, selector_rate(self.plan))
        states |= {f"selector_{moment}": moments[moment] for moment in MOMENTS}
        self.memory.facts["selector_step"] = step
