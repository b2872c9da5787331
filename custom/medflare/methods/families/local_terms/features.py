"""RSC and FedSR: the head learns from other features than the body's."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from medflare.core.rng import seeded
from medflare.data.local import PLACE
from medflare.methods import (
    ConfigError,
    FeatureNetwork,
    FedAvgSite,
    FedAvgSiteHyper,
    Loss,
    PersistentState,
    Site,
    TaskConfig,
    copied_state,
    param,
    strict_dataclass,
    torch_generator,
    train_epochs,
)
from medflare.methods.parts.class_groups import (
    at_positions,
    class_logits,
    class_targets,
    groups_and_classes,
)
from medflare.networks.catalogue import feature_width
from medflare.networks.features import pooled
from medflare.training.epochs import samples_of_pass
from medflare.training.site_rules import few_patients


def refuse_compiled(site: Site) -> None:
    """Raises ConfigError at a site that compiles networks."""
    if site.computing.compiled:
        raise ConfigError(
            f"site {site.name}: the method changes layers by hooks, which a compiled network may "
            f"ignore; leave compile out of {PLACE}"
        )


def logits_from(
    model: FeatureNetwork, images: Tensor, change: Callable[[Tensor], Tensor]
) -> Tensor:
    """The logits of images, where the head gets `change(features)`."""

    def replace(_head: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
        return change(inputs[0])

    with model.head.register_forward_pre_hook(replace):
        return model(images)


def class_indices(site: Site, targets: Tensor, features: Tensor) -> Tensor:
    """Class indices (G, N, P), see `class_groups`, at the P positions of features (N, D, ...);
    label maps are resized (nearest).
    """
    task = site.annotation.reduced
    targets = site.annotation.targets(targets)
    if task.kind == "segmentation":
        targets = at_positions(targets, features)
    return class_targets(targets, task)


# -- RSC -------------------------------------------------------------------------------------------


_MOST_MUTED = 0.5  # of the channels of an image from which the body still learns


@strict_dataclass
class RSCHyper(FedAvgSiteHyper):
    """How much is muted."""

    feature_share: float = param(
        1 / 3, "share of muted channels; 0: FedAvg", symbol="p", source="Sec. 3", low=0, high=1
    )
    batch_share: float = param(
        1 / 3, "share of the batch whose channels are muted", source="Sec. 3.3", low=0, high=1
    )


def largest(values: Tensor, share: float) -> Tensor:
    """Which entries of the last axis are the largest ones; their number is rounded down.

    Examples:
        >>> largest(torch.tensor([3.0, 1.0, 2.0]), 2 / 3)
        tensor([ True, False,  True])
    """
    indices = values.topk(int(share * values.shape[-1])).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter(-1, indices, True)


def _of_truth(scores: Tensor, labels: Tensor) -> Tensor:
    """(N,) scores of the true class, mean over positions, from scores (G, N, C, P)."""
    return scores.gather(2, labels.unsqueeze(2)).mean(dim=(0, 2, 3))


def challenge(
    features: Tensor,
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    task: TaskConfig,
    hyper: RSCHyper,
) -> Tensor:
    """m (RSC, Eq. 2): False for muted channels; bool (N, D, 1, ...) for features (N, D, ...).

    Args:
        head: features -> logits.
        labels: see `class_indices`.
    """
    z = features.detach().requires_grad_()
    scores = class_logits(head(z), task)
    if task.target != "multiclass":
        scores = scores - scores.mean(dim=2, keepdim=True)  # (0, s) -> (-s/2, s/2)
    (gradient,) = torch.autograd.grad(_of_truth(scores, labels).sum(), z)  # Eq. 1
    ones = [1] * (z.ndim - 2)
    with torch.no_grad():
        unmuted = ~largest(pooled(gradient), hyper.feature_share).unflatten(1, (-1, *ones))
        muted = class_logits(head(z * unmuted), task)
        change = _of_truth(scores.softmax(2), labels) - _of_truth(muted.softmax(2), labels)
        return unmuted | ~largest(change, hyper.batch_share).reshape(-1, 1, *ones)


class RSCSite(FedAvgSite[RSCHyper]):
    """RSC (Huang et al., "Self-Challenging Improves Cross-Domain Generalization", ECCV 2020).

        g = ∂(h(z) · y)/∂z                                   (Eq. 1)
        m_i = 0 for the largest g_i, else 1;  z~ = m z       (Eq. 2-3)

    The head h learns from z~ for the images whose true class loses most by muting (Sec. 3.3), from
    the features z for the others. Channels are muted, by the mean gradient over the positions of a
    feature map. FedAvg averages, as in FedDAG's tables.
    """

    uses_features = True

    def _check_unmuted(self) -> None:
        """Raise ConfigError if the body learns from too few patients: those that are not muted."""
        site = self.site
        count = samples_of_pass(site)
        size = min(site.batch_size, count)
        unmuted = (size - int(self.hyper.batch_share * size)) * math.ceil(count / size)
        if self.hyper.feature_share > _MOST_MUTED and 0 < unmuted < site.minimum_patients:
            cause = (
                f"feature_share {self.hyper.feature_share:g} and batch_share "
                f"{self.hyper.batch_share:g}, which mute features of others"
            )
            raise few_patients(site.name, cause, site.minimum_patients)

    def round_loss(self, model: FeatureNetwork, round: int) -> Loss:
        """The task's loss on challenged features."""
        site = self.site
        self._check_unmuted()
        refuse_compiled(site)

        def head(features: Tensor) -> Tensor:
            return site.annotation.logits(model.head.forward(features))  # without its hook

        def loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
            def mute(z: Tensor) -> Tensor:
                labels = class_indices(site, targets, z)
                return z * challenge(z, head, labels, site.annotation.reduced, self.hyper)

            return site.loss(logits_from(model, images, mute), targets)

        return loss


# -- FedSR -----------------------------------------------------------------------------------------


@strict_dataclass
class FedSRHyper(FedAvgSiteHyper):
    """The two regularizers."""

    l2r: float = param(
        0.01, "weight of the squared norm of z", symbol="α_L2R", source="authors' code", low=0
    )
    cmi: float = param(
        5e-4, "weight of the KL divergence", symbol="α_CMI", source="authors' code", low=0
    )


def gaussian_kl(mu: Tensor, sigma: Tensor, r_mu: Tensor, r_sigma: Tensor) -> Tensor:
    """KL(N(mu, sigma²) || N(r_mu, r_sigma²)) of diagonal Gaussians, (..., D) -> (...)."""
    ratio = (sigma.square() + (mu - r_mu).square()) / (2 * r_sigma.square())
    return (r_sigma.log() - sigma.log() + ratio - 0.5).sum(dim=-1)


class Distributions(nn.Module):
    """σ(x) and r(z|y) of G groups of C classes, for features of D channels."""

    def __init__(self, groups: int, classes: int, width: int):
        super().__init__()
        self.deviation = nn.Linear(width, width)
        self.mean = nn.Parameter(torch.zeros(groups, classes, width))
        self.spread = nn.Parameter(torch.ones(groups, classes, width))

    def sigma(self, mu: Tensor) -> Tensor:
        """σ (..., D) of the features μ."""
        return functional.softplus(self.deviation(mu))

    def divergence(self, mu: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """The mean of KL(p(z|x) || r(z|y)), of (N, P, D) with labels (G, N, P)."""
        group = torch.arange(len(labels), device=labels.device).view(-1, 1, 1)
        r_sigma = functional.softplus(self.spread[group, labels])
        return gaussian_kl(mu, sigma, self.mean[group, labels], r_sigma).mean()


class FedSRSite(FedAvgSite[FedSRHyper]):
    """FedSR (Nguyen, Torr and Lim, NeurIPS 2022): a stochastic representation, two regularizers.

        z ~ N(μ(x), σ(x)²),   F_k + α_L2R E ||z||² + α_CMI E KL(p(z|x) || r_k(z|y))

    μ are the features of the task's network and the head classifies z, so that no network changes.
    σ is the softplus of a linear layer of μ. It stays at the site with r_k(z|y) = N(r_μ(y),
    r_σ(y)²); in the authors' code σ is averaged and r_k stays. The model predicts from μ; the
    authors average the predictions of 20 draws of z. Every pixel of a segmentation is a sample.
    """

    accumulates = False
    freezes = False
    uses_features = True
    distributions = PersistentState("distributions")

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        """Epochs of the regularized loss; returns its mean."""
        site = self.site
        refuse_compiled(site)
        width = feature_width(site.task)
        with seeded(site.seed, site.name, "distributions"):
            distributions = Distributions(*groups_and_classes(site.annotation.reduced), width)
        if self.distributions is not None:
            distributions.load_state_dict(self.distributions)
        second = site.optimizer(distributions.to(site.device).parameters())
        random = torch_generator(site.seed, site.name, round, "representation")

        def loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
            terms = []

            def draw(features: Tensor) -> Tensor:
                mu = features.reshape(*features.shape[:2], -1).movedim(1, 2)
                sigma = distributions.sigma(mu)
                z = mu + sigma * torch.randn(mu.shape, generator=random).to(mu.device)
                labels = class_indices(site, targets, features)
                terms.append(self.hyper.l2r * z.square().sum(dim=2).mean())
                terms.append(self.hyper.cmi * distributions.divergence(mu, sigma, labels))
                return z.movedim(2, 1).reshape(features.shape)

            task = site.loss(logits_from(model, images, draw), targets)
            return task + torch.stack(terms).sum()

        def step() -> None:
            second.step()
            second.zero_grad()

        with self.continued({"distributions": second}):
            value = train_epochs(
                model, optimizer, site, round, "model", loss=loss, gradient_hook=step
            )
        self.distributions = copied_state(distributions)
        return value
