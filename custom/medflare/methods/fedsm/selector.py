"""FedSM's model selector: a network that is solved at the server (ridge regression), or trained by the sites' gradients.

A site's images all have one label, its own. So all that a least-squares fit needs of a site are the mean of its features and the mean of
their products, sent once; and the gradient of a trained selector leads to the site's own label, so that only the server, which has the
mean of all gradients, takes a step.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medflare.core.manifest import TensorSpec
from medflare.core.message import Message
from medflare.core.rng import seeded
from medflare.core.states import StateDict, weighted_mean
from medflare.data.loading import Batch
from medflare.methods.base import Plan, ServerContext, SiteAlgorithm
from medflare.methods.fedsm.formulas import adam_step, ridge_solution
from medflare.networks.catalogue import meta_network, task_network
from medflare.networks.structure import example
from medflare.training.epochs import samples_of_pass, weighted_sum
from medflare.training.site import Site

RIDGE, COMPACT, VGG11 = "ridge_selector", "compact_selector", "vgg11"
RATES = {COMPACT: 1e-2, VGG11: 1e-3}  # of Adam; VGG-11: the paper's
GRADIENT = "selector_gradient"  # entry of a reply
MOMENTS = ("exp_avg", "exp_avg_sq")
PENALTY = 0.01  # of the ridge selector, as a share of each feature's variance
SelectorLoss = Callable[[Tensor, Batch], Tensor]  # (selector's logits, batch) -> mean loss
SelectorPlan = Plan[Any, Any]


# -- what it is --------------------------------------------------------------------------------------------------------------


def is_ridge(plan: SelectorPlan) -> bool:
    """Whether the selector is solved at the server and never trained."""
    return bool(plan.site_hyper.selector == "ridge")


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


class SelectorEntries(NamedTuple):
    """The entries of a selector.

    Attributes:
        itself: its weights.
        sent: its weights, where it is trained.
        gradient: what a site answers with, where it is trained.
    """

    itself: TensorSpec
    sent: TensorSpec
    gradient: TensorSpec


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

    def trained(plan: SelectorPlan) -> bool:
        return not is_ridge(plan)

    gradient = TensorSpec(GRADIENT, "the gradient of the selector, which tells sites apart", parameters, trained)
    return SelectorEntries(TensorSpec("selector", template=whole), TensorSpec("selector", template=whole, when=trained), gradient)


def _statistics(plan: SelectorPlan) -> StateDict:
    network = meta_network(plan.task, {"name": RIDGE}, len(plan.sites))
    width = network.features_and_output(example(plan.task.image_channels, plan.task.size, "meta"))[0].shape[1]
    return {"mean": torch.empty(width, dtype=torch.float64), "products": torch.empty(width, width, dtype=torch.float64)}


STATISTICS = TensorSpec(
    "selector_statistics",
    "mean and mean product of features of the training images (a thumbnail, intensity quantiles, edge strength): together they show an "
    "average image and how images vary around it",
    _statistics,
    is_ridge,
    measured="train",
)


# -- at a site ---------------------------------------------------------------------------------------------------------------


class SiteSelector:
    """The selector at one site.

    Args:
        algorithm: the site algorithm that it belongs to.
        outputs: one score for every site, or for the global model too.
    """

    def __init__(self, algorithm: SiteAlgorithm[Any], outputs: int):
        self.algorithm, self.outputs = algorithm, outputs
        self.plan: SelectorPlan = algorithm.plan

    def network(self, state: StateDict) -> nn.Module:
        """The selector with these weights."""
        return self.algorithm.network("selector", state, selector_spec(self.plan), self.outputs)

    @torch.no_grad()
    def logits(self, state: StateDict, split: str) -> Tensor:
        """Logits (N, outputs) of the split's images, or with `image_mode` "patch" of their windows, on the CPU."""
        selector = self.network(state).eval()
        return torch.cat([selector(batch.images).cpu() for batch in self.algorithm.site.ordered(split)])

    def accuracy(self, state: StateDict) -> float:
        """How many of the site's validation images it takes for the site's own; there must be some."""
        choices = self.logits(state, "validation").argmax(dim=1)
        return float((choices == self.plan.sites.index(self.algorithm.site.name)).float().mean())

    def gradient(self, round: int, incoming: Message, loss: SelectorLoss) -> tuple[dict[str, StateDict], float]:
        """The gradient of the mean loss over all training images, as the entry to answer with, and that loss."""
        site, selector = self.algorithm.site, self.network(incoming.states["selector"]).train()
        keys = (round, "selector", incoming.meta.get("update", 0), 0)
        values, shares, seen = list[Tensor](), list[float](), samples_of_pass(site)
        selector.zero_grad(set_to_none=True)
        with seeded(site.seed, site.name, *keys, "dropout"):
            for batch in site.batches("train", *keys):
                value, share = loss(selector(batch.images), batch), len(batch.images) / seen
                (value * share).backward()
                values.append(value.detach())
                shares.append(share)
        named = {name: weight.grad for name, weight in selector.named_parameters() if weight.grad is not None}
        return {GRADIENT: {name: gradient.detach().cpu().clone() for name, gradient in named.items()}}, weighted_sum(values, shares)

    def own_label_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """y_s = one_hot(k) for all images of site k (Eq. 2)."""
        return F.cross_entropy(logits, torch.full((len(logits),), self.plan.sites.index(self.algorithm.site.name), device=logits.device))


@torch.no_grad()
def site_statistics(site: Site) -> StateDict:
    """{"mean": (F,), "products": (F, F)} of φ over the site's training images, float64: E[φ] and E[φ φᵀ]; without augmentation."""
    body = task_network(site.task, {"name": RIDGE}, 2).to(site.device)
    mean: Tensor | float = 0.0
    products: Tensor | float = 0.0
    count = 0
    for images, _, _ in site.ordered("train"):
        features = body.features_and_output(images)[0].double().cpu()
        mean, products, count = mean + features.sum(dim=0), products + features.T @ features, count + len(features)
    return {"mean": torch.as_tensor(mean / count), "products": torch.as_tensor(products / count)}


# -- at the server -----------------------------------------------------------------------------------------------------------


class ServerSelector:
    """The selector at the server, in the algorithm's memory: what is sent of it, and its next version from the sites' answers.

    Args:
        context: gives plan, seed and initial weights.
        memory: of the server algorithm; takes the selector, its moments and its step count.
        outputs: one score for every site, or for the global model too.
    """

    def __init__(self, context: ServerContext, memory: Message, outputs: int):
        self.plan: SelectorPlan = context.plan
        self.memory = memory
        spec = selector_spec(self.plan)
        memory.states["selector"] = context.initial_state("selector", spec, outputs)
        memory.meta["selector_step"] = 0
        if not is_ridge(self.plan):
            names = dict(self.plan.network(spec, outputs).named_parameters())
            zeros = {name: torch.zeros_like(tensor) for name, tensor in self.state.items() if name in names}
            memory.states |= {f"selector_{moment}": dict(zeros) for moment in MOMENTS}

    @property
    def state(self) -> StateDict:
        """The selector's weights."""
        return self.memory.states["selector"]

    @property
    def sent(self) -> dict[str, StateDict]:
        """The entry that a site needs to train it; none of one that is never trained."""
        return {} if is_ridge(self.plan) else {"selector": self.state}

    def solve(self, replies: Mapping[str, Message]) -> None:
        """The ridge selector from the sites' statistics; a site that sent none is never chosen. Without a solution it stays as it is."""
        statistics = {self.plan.sites.index(site): reply.states[STATISTICS] for site, reply in replies.items()}
        statistics = {place: state for place, state in statistics.items() if state["products"].any()}
        if not statistics:
            return
        try:
            weight, bias = ridge_solution(statistics, len(self.plan.sites), PENALTY)
        except torch.linalg.LinAlgError:  # statistics of no images: one site must not end the run
            return
        if torch.isfinite(weight).all():
            self.memory.states["selector"] = {name: weight if name.endswith("weight") else bias for name in self.state}

    def step(self, replies: Mapping[str, Message]) -> None:
        """One Adam step along the mean gradient. Its classes are sites, which count alike: by images the largest would answer for all."""
        states, step = self.memory.states, self.memory.meta["selector_step"] + 1
        mean = weighted_mean({site: reply.states[GRADIENT] for site, reply in replies.items()}, dict.fromkeys(replies, 1.0))
        moments = {moment: states[f"selector_{moment}"] for moment in MOMENTS}
        states["selector"], moments = adam_step(self.state, mean, moments, step, RATES[selector_spec(self.plan)["name"]])
        states |= {f"selector_{moment}": moments[moment] for moment in MOMENTS}
        self.memory.meta["selector_step"] = step
