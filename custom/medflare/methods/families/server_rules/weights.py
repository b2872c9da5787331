"""Weights from the sites' models and costs alone: IDA, FedAWA and FedPIDAvg."""

import math

import torch
from torch import Tensor

from medflare.core.numbers import fractions
from medflare.core.states import States, cosines
from medflare.methods import (
    LOSS,
    ConfigError,
    FedAvgServer,
    FedAvgServerHyper,
    StateDict,
    finite_or_none,
    param,
    strict_dataclass,
)
from medflare.methods.aggregation import plain_mean
from medflare.methods.families.server_rules.rule import (
    Models,
    ReweightedMean,
    UniformHyper,
    Weights,
    inner_products,
)

_NEAR = 1e-12  # distances below this count as equal
_FURTHEST = 1.0  # FedAWA's t stays so near to log n_k: two weights change by a factor e^2 at most
_LEAST_IMAGES = 0.2  # FedPIDAvg's term of the images, as a share of all three
_MEMORY = 5  # costs in FedPIDAvg's sum


def inverse_distances(states: States) -> Weights:
    """α_k ∝ 1 / ||ω_avg - ω_k||_1 with ω_avg = (1/K) Σ_k ω_k, up to a common factor (Yeganeh et
    al., "Inverse Distance Aggregation", DART 2020).

    The weights are equal if all models agree.
    """
    mean = plain_mean(states)
    inverse = {}
    for site, state in states.items():
        distances = [(mean[name].double() - state[name].double()).abs().sum() for name in mean]
        inverse[site] = 1.0 / max(float(sum(distances)), _NEAR)
    return inverse


class InverseDistanceMean(ReweightedMean):
    """The mean with weights p_k / ||ω_avg - ω_k||_1, over the trained entries."""

    def weigh(self, models: Models, round: int, previous: StateDict) -> Weights:
        shares = self.shares(models)
        inverse = inverse_distances(self.trained_parts(models))
        return {site: share * inverse[site] for site, share in shares.items()}


class IDAServer(FedAvgServer[UniformHyper]):
    """FedAvg's server algorithm with a small weight for a site whose model is far from all others.

    `weighting=samples` is the paper's IDA with FedAvg.
    """

    aggregation_class = InverseDistanceMean


@strict_dataclass
class FedAWAHyper(FedAvgServerHyper):
    """The optimization of the weights."""

    steps: int = param(
        1, "optimizer steps of the weights a round; 0: FedAvg", source="authors' code", low=0
    )
    eta: float = param(
        0.001, "learning rate of the weights", symbol="η", source="authors' code", low=0, high=1
    )


def alignment_loss(logits: Tensor, vectors: Tensor, cosine: Tensor) -> Tensor:
    """Σ_k p_k ||δ_k - Σ_j p_j δ_j||_2 + Σ_k p_k (1 - cos(w_k, w_g)), with p = softmax(t).

    It is the loss of FedAWA (Shi et al., CVPR 2025), as in the authors' code.

    Args:
        logits: t, (K,).
        vectors: inner products of the client vectors δ_k = w_k - w_g, (K, K).
        cosine: cos(w_k, w_g), (K,).
    """
    weights = logits.softmax(dim=0)
    to_mean = vectors @ weights
    squares = vectors.diagonal() - 2 * to_mean + weights @ to_mean
    # The root has no gradient at 0.
    distances = squares.clamp(min=_NEAR**2).sqrt()
    return weights @ (distances + 1 - cosine)


class OptimizedWeights(ReweightedMean):
    """The mean with weights p that steps of Adam on t have optimized.

    Adam's settings and one step a round are those of the authors' code. Unlike there, t starts at
    log n_k, so that p starts at n_k/n, and the weights are those after the step. t stays near
    log n_k, so that no number of rounds gives one site nearly all weight. `record` holds t.
    """

    def weigh(self, models: Models, round: int, previous: StateDict) -> Weights:
        parts = list(self.trained_parts(models).values())
        zeros = {name: torch.zeros_like(tensor) for name, tensor in previous.items()}
        cosine = cosines(inner_products([*parts, previous], zeros))[-1, :-1]
        vectors = inner_products(parts, previous)
        shares = self.shares(models)
        images = {site: math.log(share) for site, share in shares.items()}
        start = [self.record.get(site, usual) for site, usual in images.items()]
        logits = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([logits], lr=self.hyper.eta, betas=(0.5, 0.999))
        for _ in range(self.hyper.steps):
            loss = alignment_loss(logits, vectors, cosine)
            (logits.grad,) = torch.autograd.grad(loss, [logits])
            optimizer.step()
        usual = torch.tensor(list(images.values()), dtype=torch.float64)
        near = logits.detach().clamp(usual - _FURTHEST, usual + _FURTHEST)
        self.record |= dict(zip(shares, near.tolist(), strict=True))
        return dict(zip(shares, near.softmax(dim=0).tolist(), strict=True))


class FedAWAServer(FedAvgServer[FedAWAHyper]):
    """Sites whose updates agree with the others' gain weight."""

    aggregation_class = OptimizedWeights


@strict_dataclass
class FetsPIDHyper(FedAvgServerHyper):
    """Shares of the three terms."""

    alpha: float = param(0.45, "share of the images", symbol="α", low=0)
    beta: float = param(0.45, "share of the drop of the cost", symbol="β", low=0)
    gamma: float = param(0.1, "share of the sum of costs", symbol="γ", low=0)

    def __post_init__(self) -> None:
        """Raises ConfigError if the images' share is too small: the model could be that of the only
        site with a drop.
        """
        total = self.alpha + self.beta + self.gamma
        if self.alpha < _LEAST_IMAGES * total:
            raise ConfigError(f"alpha must be at least {_LEAST_IMAGES:g} of alpha + beta + gamma")


def pid_weights(images: Weights, drops: Weights, sums: Weights, hyper: FetsPIDHyper) -> Weights:
    """α n_k/n + β d_k / Σ_j d_j + γ m_k / Σ_j m_j by site.

    FedPIDAvg (Mächler et al., FeTS challenge 2022). d_k is the drop of a site's cost since its last
    round, m_k the sum of its last five costs. A rise counts as no drop, and a term without any
    positive value is left out, so that no weight is negative. A site that a term lacks has 0 in it.
    """
    weights = dict.fromkeys(images, 0.0)
    for share, term in ((hyper.alpha, images), (hyper.beta, drops), (hyper.gamma, sums)):
        for site, value in fractions(term).items():
            weights[site] += share * value
    return weights


class PIDMean(ReweightedMean):
    """The mean with FedPIDAvg's weights; the cost is a round's mean training loss.

    The challenge's choice of sites is not included. With DP-SGD sites send no loss, and the rule is
    FedAvg's mean. `record` holds each site's last five costs.
    """

    def weigh(self, models: Models, round: int, previous: StateDict) -> Weights:
        drops = {}
        sums = {}
        for site, model in models.items():
            cost = finite_or_none(model.meta.get(LOSS.name))
            if cost is None:
                continue
            earlier = self.record.get(site, [])
            if earlier:
                drops[site] = earlier[-1] - cost
            self.record[site] = [*earlier, cost][-_MEMORY:]
            sums[site] = sum(self.record[site])
        return pid_weights(self.shares(models), drops, sums, self.hyper)


class FetsPIDServer(FedAvgServer[FetsPIDHyper]):
    """FedAvg's server algorithm with FedPIDAvg's weights."""

    aggregation_class = PIDMean
