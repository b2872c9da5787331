"""FedSM's model selector: a ridge regression at the server, or trained by the sites' gradients.

All images of a site have one label, the site itself. So a least-squares fit needs of each site only
the mean of its features and the mean of their products, sent once; and only the server, which has
the mean of all gradients, can step a trained selector.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medflare.core.rng import seeded
from medflare.data.loading import Batch
from medflare.methods import (
    Message,
    MetaSpec,
    PersistentState,
    Plan,
    Replies,
    ServerContext,
    Site,
    SiteAlgorithm,
    StateDict,
    TensorSpec,
    copy_state,
    count,
)
from medflare.methods.aggregation import plain_mean
from medflare.methods.fedsm.formulas import adam_step, ridge_solution
from medflare.networks.catalogue import feature_width, task_network
from medflare.training.epochs import samples_of_pass, weighted_sum

RIDGE = "ridge_selector"
COMPACT = "compact_selector"
VGG11 = "vgg11"
RATES = {COMPACT: 1e-2, VGG11: 1e-3}  # of Adam; VGG-11: the paper's
PENALTY = 0.01  # of the ridge selector, as a share of each feature's variance
SelectorLoss = Callable[[Tensor, Batch], Tensor]  # (selector's logits, batch) -> mean loss


def is_ridge(plan: Plan) -> bool:
    """Whether the selector is solved at the server and never trained."""
    return plan.site_hyper.selector == "ridge"


def selector_spec(plan: Plan) -> Mapping[str, Any]:
    """The selector's network.

    VGG-11 has 129 M parameters; with two Adam moments they are 99 % of the traffic of the published
    example. "auto" is the compact selector if VGG-11 is larger than the task's network, and for
    volumes, which VGG-11 does not take.
    """
    name = plan.site_hyper.selector
    if name == "ridge":
        name = RIDGE
    elif name == "auto":
        flat = plan.task.spatial_dims == 2
        small = flat and _size(plan.template({"name": VGG11})) <= _size(plan.template())
        name = VGG11 if small else COMPACT
    return {"name": name}


def _size(state: StateDict) -> int:
    return sum(tensor.numel() for tensor in state.values())


def _is_trained(plan: Plan) -> bool:
    return not is_ridge(plan)


class SelectorEntries:
    """The declarations of a selector with `outputs(plan)` scores.

    Attributes:
        outputs: plan -> number of scores.
        weights: its weights, once it is finished.
        trained: its weights while it is trained.
        gradient: what the sites reply while it is trained.
    """

    def __init__(self, outputs: Callable[[Plan], int]):
        def parameters(plan: Plan) -> Mapping[str, Tensor]:
            return dict(plan.network(selector_spec(plan), outputs(plan)).named_parameters())

        self.outputs = outputs
        self.weights = TensorSpec(
            "selector", template=lambda plan: plan.template(selector_spec(plan), outputs(plan))
        )
        self.trained = replace(self.weights, when=_is_trained)
        self.gradient = TensorSpec(
            "selector_gradient",
            "the gradient of the selector, which tells sites apart",
            parameters,
            _is_trained,
        )


OF_SITES = SelectorEntries(lambda plan: len(plan.sites))
UPDATE = MetaSpec[int]("update", "number of the selector's update within a round", count())


def _statistics(plan: Plan) -> StateDict:
    width = feature_width(plan.task, {"name": RIDGE})
    return {
        "mean": torch.empty(width, dtype=torch.float64),
        "products": torch.empty(width, width, dtype=torch.float64),
    }


STATISTICS = TensorSpec(
    "selector_statistics",
    "mean and mean product of features of the training images (a thumbnail, intensity quantiles, "
    "edge strength): together they show an average image and how images vary around it",
    _statistics,
    is_ridge,
    measured="train",
)


# -- at a site ------------------------------------------------------------------------------------


class SiteSelector:
    """The selector at one site."""

    def __init__(self, algorithm: SiteAlgorithm, entries: SelectorEntries):
        self.algorithm = algorithm
        self.plan: Plan = algorithm.plan
        self.entries = entries
        self.outputs = entries.outputs(self.plan)

    @property
    def label(self) -> int:
        """The site's class."""
        return self.plan.sites.index(self.algorithm.site.name)

    def network(self, state: StateDict) -> nn.Module:
        """The selector with these weights."""
        return self.algorithm.network("selector", state, selector_spec(self.plan), self.outputs)

    @torch.no_grad()
    def logits(self, state: StateDict, split: str) -> Tensor:
        """Logits (N, outputs) of the split's images, on the CPU.

        With `image_mode` "patch" they are of the images' windows.
        """
        selector = self.network(state).eval()
        batches = self.algorithm.site.ordered(split)
        return torch.cat([selector(batch.images).cpu() for batch in batches])

    def accuracy(self, state: StateDict) -> float:
        """Share of the site's validation images that are recognized as the site's.

        There must be at least one image.
        """
        recognised = self.logits(state, "validation").argmax(dim=1) == self.label
        return float(recognised.float().mean())

    def gradient(
        self, round: int, incoming: Message, loss: SelectorLoss
    ) -> tuple[StateDict, float]:
        """(gradient, value) of the mean loss over all training images."""
        site = self.algorithm.site
        selector = self.network(incoming[self.entries.trained]).train()
        keys = (round, "selector", incoming.get(UPDATE) or 0, 0)
        total = samples_of_pass(site)
        values = []
        shares = []
        selector.zero_grad()
        with seeded(site.seed, site.name, *keys, "dropout"):
            for batch in site.batches("train", *keys):
                value = loss(selector(batch.images), batch)
                share = len(batch.images) / total
                (value * share).backward()
                values.append(value.detach())
                shares.append(share)
        weights = selector.named_parameters()
        gradients = {name: w.grad for name, w in weights if w.grad is not None}
        return copy_state(gradients), weighted_sum(values, shares)

    def own_label_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross entropy with y_s = one_hot(k) for all images of site k (Eq. 2)."""
        labels = torch.full((len(logits),), self.label, device=logits.device)
        return F.cross_entropy(logits, labels)


@torch.no_grad()
def site_statistics(site: Site) -> StateDict:
    """{"mean": (F,), "products": (F, F)}, float64: E[φ] and E[φ φᵀ] over the training images.

    The images are not augmented.
    """
    body = task_network(site.task, {"name": RIDGE}, 2).to(site.device)
    total = torch.zeros((), dtype=torch.float64)
    products = torch.zeros((), dtype=torch.float64)
    count = 0
    for images, _, _ in site.ordered("train"):
        features = body.features_and_output(images)[0].double().cpu()
        total = total + features.sum(dim=0)
        products = products + features.T @ features
        count += len(features)
    return {"mean": total / count, "products": products / count}


# -- at the server --------------------------------------------------------------------------------


class ServerSelector:
    """The selector at the server: weights, Adam moments and step count.

    They are in the algorithm's memory.
    """

    state = PersistentState("selector")  # its weights
    first = PersistentState("selector_exp_avg")
    second = PersistentState("selector_exp_avg_sq")

    def __init__(self, context: ServerContext, memory: Message, entries: SelectorEntries):
        self.plan: Plan = context.plan
        self.memory = memory
        self.entries = entries
        spec = selector_spec(self.plan)
        self.state = context.initial_state("selector", spec, entries.outputs(self.plan))
        memory.meta["selector_step"] = 0
        if not is_ridge(self.plan):
            learnt = entries.gradient.template(self.plan)
            self.first = {name: torch.zeros_like(self.state[name]) for name in learnt}
            self.second = dict(self.first)

    def add_request(self, message: Message) -> None:
        """Adds the weights that a site needs to train the selector, unless it is never trained."""
        if not is_ridge(self.plan):
            message[self.entries.trained] = self.state

    def solve(self, replies: Replies) -> bool:
        """Solves the ridge selector; a site without statistics is never chosen.

        Returns:
            False, and the selector stays as it is, without statistics or if they are singular.
        """
        statistics = {
            self.plan.sites.index(site): reply[STATISTICS]
            for site, reply in replies.items()
            if reply[STATISTICS]["products"].any()
        }
        try:
            weight, bias = ridge_solution(statistics, len(self.plan.sites), PENALTY)
        except (ValueError, torch.linalg.LinAlgError):
            return False  # invalid statistics of one site must not end the run
        if not torch.isfinite(weight).all():
            return False
        self.state = {name: weight if name.endswith("weight") else bias for name in self.state}
        return True

    def step(self, replies: Replies) -> None:
        """One Adam step along the sites' mean gradient.

        Sites, its classes, have equal weights: else it would choose the largest site.
        """
        step = self.memory.meta["selector_step"] + 1
        gradients = {site: reply[self.entries.gradient] for site, reply in replies.items()}
        mean = plain_mean(gradients)
        rate = RATES[selector_spec(self.plan)["name"]]
        moments = {"exp_avg": self.first, "exp_avg_sq": self.second}
        self.state, moments = adam_step(self.state, mean, moments, step, rate)
        self.first = moments["exp_avg"]
        self.second = moments["exp_avg_sq"]
        self.memory.meta["selector_step"] = step
