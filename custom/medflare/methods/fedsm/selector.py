"""FedSM's model selector: a ridge regression at the server, or trained by the sites' gradients.

All images of a site have one label, the site itself. So a least-squares fit needs of each site only
the mean of its features and the mean of their products, sent once; and only the server, which has
the mean of all gradients, can step a trained selector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from medflare.core.rng import seeded
from medflare.core.states import state_bytes
from medflare.data.loading import Batch
from medflare.methods import MetaSpec, Plan, Replies, Site, StateDict, TensorSpec, count
from medflare.methods.fedsm.formulas import ridge_solution
from medflare.methods.fedsm.hyper import FedSMExtraSiteHyper
from medflare.networks.catalogue import feature_width, task_network

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
        small = flat and state_bytes(plan.template({"name": VGG11})) <= state_bytes(plan.template())
        name = VGG11 if small else COMPACT
    return {"name": name}


def _is_trained(plan: Plan) -> bool:
    return not is_ridge(plan)


def selector_outputs(plan: Plan) -> int:
    """The number of the selector's scores: one for every site, and one for the global model in
    FedSM-extra.
    """
    return len(plan.sites) + isinstance(plan.site_hyper, FedSMExtraSiteHyper)


def _parameters(plan: Plan) -> Mapping[str, Tensor]:
    network = plan.network(selector_spec(plan), selector_outputs(plan))
    return dict(network.named_parameters())


SELECTOR = TensorSpec(
    "selector", template=lambda plan: plan.template(selector_spec(plan), selector_outputs(plan))
)
# While it is trained.
TRAINED_SELECTOR = replace(SELECTOR, when=_is_trained)
GRADIENT = TensorSpec(
    "selector_gradient",
    "the gradient of the selector, which tells sites apart",
    _parameters,
    _is_trained,
)
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


@torch.no_grad()
def site_statistics(site: Site) -> StateDict:
    """{"mean": (F,), "products": (F, F)}, float64: E[φ] and E[φ φᵀ] over the training images
    without augmentation.
    """
    with seeded(0, "ridge"):  # only its head is random, which is not used
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


def solved(replies: Replies, sites: Sequence[str]) -> tuple[Tensor, Tensor] | None:
    """(weight, bias) of the ridge selector; None without statistics or if they are singular.

    A site without statistics is never chosen.
    """
    statistics = {
        sites.index(site): reply[STATISTICS]
        for site, reply in replies.items()
        if reply[STATISTICS]["products"].any()
    }
    try:
        weight, bias = ridge_solution(statistics, len(sites), PENALTY)
    except (ValueError, torch.linalg.LinAlgError):
        return None  # invalid statistics of one site must not end the run
    return (weight, bias) if torch.isfinite(weight).all() else None
