"""FedSM's selector without a gradient: class-balanced ridge regression on fixed features, solved at the server from one exchange.

A site's images all have one label, its own, so all that a least-squares fit needs of it are the mean of its features and the mean of their
products. It is converged at once, and a site that misses rounds costs nothing.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from medflare.core.manifest import Entry
from medflare.core.states import StateDict
from medflare.data.sites.site import Site
from medflare.methods.base import Plan
from medflare.methods.fedsm.hyper import FedSMServerHyper
from medflare.networks.catalogue import meta_network, task_network
from medflare.networks.structure import example

RIDGE = "ridge_selector"
_NEVER: Final = -1e4  # logit of a class that is missing


def is_ridge(plan: Plan[Any, Any]) -> bool:
    """Whether the selector is solved at the server and never trained: as asked for, or with "auto" where its classes are the sites.

    "auto" trains a network where a setting of trained selectors is another than the default.
    """
    site, server = plan.site_hyper, plan.server_hyper
    if site.selector != "auto":
        return site.selector == "ridge"
    if not isinstance(server, FedSMServerHyper):
        return False
    here = (server.selector_updates, server.selector_weighting, site.selector_lr, site.selector_steps, site.sync_moments)
    return here == ("auto", "balanced", "auto", "server", True)


def _shapes(plan: Plan[Any, Any]) -> StateDict:
    width = _width(plan)
    return {"mean": torch.empty(width, dtype=torch.float64), "products": torch.empty(width, width, dtype=torch.float64)}


def _width(plan: Plan[Any, Any]) -> int:
    network = meta_network(plan.task, {"name": RIDGE}, len(plan.sites))
    return network.features_and_output(example(plan.task.image_channels, plan.task.size, "meta"))[0].shape[1]


STATISTICS = Entry(
    "selector_statistics",
    "mean and mean product of features of the training images (a thumbnail, intensity quantiles, edge strength): together they show an "
    "average image and how images vary around it",
    _shapes,
    is_ridge,
    measured="train",
)


@torch.no_grad()
def site_statistics(site: Site) -> StateDict:
    """{"mean": (F,), "products": (F, F)} of φ over the site's training images, float64: E[φ] and E[φ φᵀ].

    Args:
        site: whose training images are looked at, without augmentation.
    """
    body = task_network(site.task, {"name": RIDGE}, 2).to(site.device)
    mean: Tensor | float = 0.0
    products: Tensor | float = 0.0
    count = 0
    for images, _, _ in site.ordered("train"):
        features = body.features_and_output(images)[0].double().cpu()
        mean, products, count = mean + features.sum(dim=0), products + features.T @ features, count + len(features)
    return {"mean": torch.as_tensor(mean / count), "products": torch.as_tensor(products / count)}


def ridge_solution(statistics: Mapping[int, StateDict], classes: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Weights and biases of class-balanced ridge regression onto one-hot labels, where class k's images are those of one site.

        min_{W, b} mean_k E_k ||W φ + b - e_k||² + λ Σ_f s_f² ||W_f||²

    with s_f² the variance of feature f over all classes, each counted alike; so features need no common scale. Source: Hoerl and Kennard
    1970, with every class at weight 1 / n_k.

    Args:
        statistics: class -> {"mean": E_k[φ], "products": E_k[φ φᵀ]}; a class that is missing is never predicted.
        classes: K.
        penalty: λ.

    Returns:
        W (K, F) and b (K,), float32. Predictions of the classes that are there add up to one; they become scores by a temperature.

    Examples:
        >>> at = lambda value: {"mean": torch.tensor([value]).double(), "products": torch.tensor([[value**2]]).double()}
        >>> weight, bias = ridge_solution({0: at(0.0), 1: at(2.0)}, classes=2, penalty=0.0)
        >>> weight.round(decimals=3), bias.round(decimals=3)  # 1 - φ / 2 and φ / 2
        (tensor([[-0.5000],
                [ 0.5000]]), tensor([1., 0.]))
    """
    present = sorted(statistics)
    means = torch.stack([statistics[k]["mean"] for k in present])
    centre = means.mean(dim=0)
    spread = torch.stack([statistics[k]["products"] for k in present]).mean(dim=0) - torch.outer(centre, centre)
    scale = spread.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 1e-6 * scale.max().clamp_min(1e-12), scale, torch.inf)  # a constant feature tells nothing
    system = spread / torch.outer(scale, scale) + (penalty + 1e-9) * torch.eye(len(centre), dtype=torch.float64)
    weight, bias = torch.zeros(classes, len(centre), dtype=torch.float64), torch.full((classes,), _NEVER, dtype=torch.float64)
    weight[present] = torch.linalg.solve(system, ((means - centre) / len(present) / scale).T).T / scale
    bias[present] = 1 / len(present) - weight[present] @ centre
    return weight.float(), bias.float()
