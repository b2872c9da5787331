"""FedAMP and FedMTL: a proximal term to an anchor u_k that the server computes for each site.

FedAMP (Huang et al., "Personalized cross-silo federated learning on non-IID data", AAAI 2021;
arXiv 2007.03797):

    min_W Σ_k F_k(w_k) + λ Σ_{j<k} A(‖w_j - w_k‖²),   A(x) = 1 - exp(-x / σ)
    u_k <- Σ_j ξ_kj w_j,   ξ_kj = α A'(‖w_j - w_k‖²) for j ≠ k,   Σ_j ξ_kj = 1    (server)
    w_k <- argmin_w F_k(w) + λ / (2α) ‖w - u_k‖²                                  (site)

The factor 2 of A's gradient is in α. The argmin is a round of local training that starts at u_k.
Distances are of the trained weights; running statistics are averaged with ξ too. The scale of
squared distances depends on the network, so σ is by default their mean, α / σ is 1 / K (equal
models get their mean), and λ is in units of this σ, which makes the weight of the proximal term
λ K: otherwise close models get a strong term, which makes them closer. λ = 1 ties models to their
anchors: on mechanisms/clean_labels F1 is 0.45, with 0.01 0.94, alone 0.75 (six seeds). The paper's
heuristic for deep networks (cosines) is left out.

FedMTL is the multi-task objective of MOCHA (Smith et al., NeurIPS 2017, Sec. 3.1) for networks:

    min_W Σ_k F_k(w_k) + λ1 tr(W Ω Wᵀ) + λ2 ‖W‖²,   Ω = (I - 11ᵀ/K)²

W has the w_k as columns. Ω is the mean-regularized relationship of Evgeniou and Pontil (2004):
tr(W Ω Wᵀ) = Σ_k ‖w_k - w̄‖². It is fixed, and λ2 is the task's weight decay. A site's gradient of
the second term, with all other models fixed, is a proximal term to the mean of the others:

    2 λ1 Σ_j Ω_kj w_j = 2 λ1 Ω_kk (w_k - u_k),   u_k = -Σ_{j≠k} Ω_kj w_j / Ω_kk

MOCHA's dual steps need a convex loss and are not used. The "FedMTL" of PFLlib and of GRACE's
published code has another term, in which models are added, not compared:
(1 - 1/K)² ‖Σ_k w_k‖² + ‖W‖², times a power of ten.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from medflare.core.states import States
from medflare.methods import (
    MEASURED,
    MODEL,
    ConfigError,
    FedAvgSiteHyper,
    Message,
    MetaSpec,
    Replies,
    ServerContext,
    ServerHyper,
    StateDict,
    Step,
    TensorSpec,
    copied_state,
    number,
    param,
    phase,
    proximal_term,
    strict_dataclass,
    weighted_mean,
)
from medflare.methods.families.personalized_aggregation.personalized import (
    PERSONALS,
    TRAINED,
    G,
    PersonalizedServer,
    PersonalizedSite,
)
from medflare.methods.families.server_rules.rule import inner_products
from medflare.training.site_rules import check_steps

Anchors: TypeAlias = tuple[States, float]  # by site, and the strength of the proximal term
ANCHOR = TensorSpec("anchor", optional=True)  # absent before the site's first update
ANCHORS = TensorSpec("anchor", of=lambda plan: plan.sites)  # in the server's memory
STRENGTH = MetaSpec[float]("strength", "weight of the proximal term to the anchor", number(0.0))


# -- both -----------------------------------------------------------------------------------------


class AnchoredSite(PersonalizedSite[FedAvgSiteHyper]):
    """Trains its model w_k with gradients ∇F_k(w) + strength (w - u_k), starting at w_k.

    Without an anchor, u_k is w_k as it was at the start of the round.
    """

    starts_at_anchor: ClassVar[bool] = False

    @phase(request=(MODEL, ANCHOR), request_meta=(STRENGTH,), reply=(TRAINED,), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        personal = incoming[MODEL]
        value = self.selection.validated(round, personal)
        anchor = incoming.get(ANCHOR) or personal
        site = self.site
        check_steps(site.name, site.task, site.minimum_patients, incoming[STRENGTH])
        model = self.network("model", anchor if self.starts_at_anchor else personal)
        proximal = proximal_term(model, anchor, incoming[STRENGTH])
        loss = self.train_model(model, round, "model", proximal)
        trained = copied_state(model)
        return self.reply({TRAINED: trained}, loss=loss, validation={"personal": value})


def mixtures(states: States, shares: Tensor) -> States:
    """Site -> mean of all states with its row of `shares` (K, K), >= 0."""
    rows = dict(zip(states, shares.tolist(), strict=True))
    return {
        site: weighted_mean(states, dict(zip(states, row, strict=True)))
        for site, row in rows.items()
    }


class AnchoredServer(PersonalizedServer[G]):
    """Computes the anchors from the last models of all sites that have trained."""

    site_algorithm = AnchoredSite

    @abstractmethod
    def anchors(self, states: States) -> Anchors:
        """Site -> u_k, from site -> w_k, and the strength of the proximal term."""

    def request(self, step: Step, site: str) -> Message:
        """The site's model; for training also its anchor, if it has one."""
        message = super().request(step, site)
        if step.phase == "train":
            message[STRENGTH] = self.memory.meta.get(STRENGTH.name, 0.0)
            if ANCHORS.member(site) in self.memory:
                message[ANCHOR] = self.memory[ANCHORS.member(site)]
        return message

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """Stores the trained models, then computes all anchors anew."""
        super().aggregate_models(step, replies)
        anchors, self.memory[STRENGTH] = self.anchors(self.memory.family(PERSONALS))
        for site, anchor in anchors.items():
            self.memory[ANCHORS.member(site)] = anchor


# -- FedAMP ---------------------------------------------------------------------------------------


@strict_dataclass
class FedAMPServerHyper(ServerHyper):
    """The attraction of similar models."""

    lam: float = param(
        0.01,
        "weight of the attraction; without sigma in units of the mean squared distance",
        symbol="λ",
        source="ours",
        low=0,
    )
    sigma: float | None = param(
        None,
        "squared distance at which attraction fades; none: the mean of the round's",
        symbol="σ",
        low=1e-12,
    )
    step: float | None = param(
        None, "weight of an equal model of another site; none: 1/K", symbol="α/σ", low=1e-12
    )


def pairwise_squared_distances(states: Sequence[StateDict], names: Sequence[str]) -> Tensor:
    """‖w_j - w_k‖² over the entries `names`, (K, K) in float64."""
    products = inner_products(states, states[0], names)
    squares = products.diagonal()
    return (squares[:, None] + squares - 2 * products).clamp(min=0)


def attention(squared: Tensor, alpha: float, sigma: float) -> Tensor:
    """ξ, (K, K) with rows that sum to 1, from squared distances (K, K); A'(x) = exp(-x / σ) / σ."""
    xi = alpha * torch.exp(-squared / sigma) / sigma
    xi.fill_diagonal_(0)
    return xi + torch.diag(1 - xi.sum(dim=1))


def attraction(squared: Tensor, hyper: FedAMPServerHyper) -> tuple[Tensor, float]:
    """ξ and the strength λ / α of the proximal term, from squared distances (K, K)."""
    count = len(squared)
    mean = float(squared.sum()) / max(1, count * (count - 1))
    sigma = hyper.sigma or mean or 1.0
    alpha = sigma * (hyper.step or 1 / count)
    unit = 1.0 if hyper.sigma else sigma
    xi = attention(squared, alpha, sigma).clamp(min=0)  # below 0 by rounding only
    return xi, hyper.lam * unit / alpha


class FedAMPSite(AnchoredSite):
    """Takes a proximal step from u_k, FedAMP's local problem: training starts there."""

    starts_at_anchor = True


class FedAMPServer(AnchoredServer[FedAMPServerHyper]):
    """Computes u_k from the attraction of similar models; raises ConfigError if ξ_kk could be
    negative.
    """

    site_algorithm = FedAMPSite

    @classmethod
    def fewest_combined(cls, hyper: Any, sites: int) -> int:
        """Two with a σ below all distances but one: u_k - w_k is then that of one other site."""
        return sites if hyper.sigma is None else min(2, sites)

    def __init__(self, context: ServerContext):
        super().__init__(context)
        others = len(context.sites) - 1
        if (self.hyper.step or 0) * others > 1:
            raise ConfigError(
                f"step {self.hyper.step:g} gives {others} equal models more than all of the "
                f"weight; set step to at most {1 / others:.3g}"
            )

    def anchors(self, states: States) -> Anchors:
        trained = dict(self.context.plan.network().named_parameters())
        squared = pairwise_squared_distances(list(states.values()), list(trained))
        xi, strength = attraction(squared, self.hyper)
        self.context.note(weight=dict(zip(states, xi.diagonal().tolist(), strict=True)))
        return mixtures(states, xi), strength


# -- FedMTL ---------------------------------------------------------------------------------------


@strict_dataclass
class FedMTLServerHyper(ServerHyper):
    """The relationship of the sites."""

    lam: float = param(
        0.1,
        "weight of the relationship; 0: training alone",
        symbol="λ1",
        source="the paper chooses it for each data set",
        low=0,
    )


def mean_relationship(count: int) -> Tensor:
    """Ω = (I - 11ᵀ/K)², (K, K) in float64."""
    centring = torch.eye(count, dtype=torch.float64) - 1 / count
    return centring @ centring


def related(states: States, lam: float) -> Anchors:
    """u_k of FedMTL, and the strength 2 λ1 Ω_kk of the proximal term."""
    omega = mean_relationship(len(states))
    strength = 2 * lam * float(omega[0, 0])
    if len(states) == 1:  # it is related to no other
        return {}, strength
    return mixtures(states, (-omega).fill_diagonal_(0)), strength


class FedMTLServer(AnchoredServer[FedMTLServerHyper]):
    """Computes u_k from the sites' relationship Ω."""

    def anchors(self, states: States) -> Anchors:
        return related(states, self.hyper.lam)
