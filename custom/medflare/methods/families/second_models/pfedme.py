"""pFedMe (Dinh et al., NeurIPS 2020, Alg. 1): personal models as proximal points of the shared one.

θ ≈ argmin f(θ; batch) + λ/2 ||θ - w||²   by K steps of the task's optimizer      (Eq. 3)
w <- w - η λ (w - θ)                      after every batch, at the site          (line 8)
w <- (1 - β) w + β mean_k w_k             after every round, at the server        (line 11)
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medflare.methods import (
    ConfigError,
    FeatureNetwork,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSiteHyper,
    Site,
    StateDict,
    blend,
    copied_state,
    epochs,
    param,
    strict_dataclass,
    trainable,
)
from medflare.methods.families.second_models.site import SecondModelSite, loss_gradients, take_step
from medflare.methods.families.server_rules.rule import Models, ReweightedMean
from medflare.methods.parts.proximal import proximal_gradients
from medflare.networks.features import overwrite
from medflare.training.site_rules import few_patients


def pfedme_outer(
    weights: Sequence[Tensor], personal: Sequence[Tensor], rate: float, strength: float
) -> list[Tensor]:
    """w <- w - η λ (w - θ), a step of a site's copy of the shared model (Dinh et al. 2020, Alg. 1,
    line 8).

    Args:
        weights: w.
        personal: θ, in the same order.
        rate: η.
        strength: λ.
    """
    return [w - rate * strength * (w - t) for w, t in zip(weights, personal, strict=True)]


_LARGEST_STEP = 4 / 3  # rate times λ, below which Nesterov's momentum of any size is stable
_LARGEST_ADAPTIVE = 0.3  # the same for optimizers that divide by gradients, with `minimum_patients`


def train_pfedme(
    shared: nn.Module,
    personal: nn.Module,
    site: Site,
    round: int,
    optimizer: Optimizer,
    *,
    strength: float,
    inner_steps: int,
    share: float = 1.0,
) -> None:
    """One round of pFedMe in place.

    On each batch θ (`personal`) approximates the proximal point of w (`shared`), then w moves
    towards θ. The optimizer is θ's.

    Args:
        strength: λ.
        inner_steps: K per batch.
        share: η λ, the part of the way to θ that w moves; 1: as far as θ, the largest step along
            the gradient λ (w - θ) that does not go beyond it.

    Raises:
        ConfigError: SGD diverges from the proximal point, with some momentum at least; or other
            optimizers see the proximal term alone after the first batch. The model would be that of
            the first batches.
    """
    rate = site.task.optimizer["lr"]
    is_sgd = site.task.optimizer["name"].lower() in ("sgd", "asgd")
    if is_sgd and rate * strength > _LARGEST_STEP:
        raise ConfigError(
            f"pfedme diverges with λ {strength:g} and a learning rate of {rate:g}: take a rate "
            f"of {_LARGEST_STEP / strength:.2g} or less"
        )
    if not is_sgd and site.minimum_patients > 1 and rate * strength > _LARGEST_ADAPTIVE:
        largest = _LARGEST_ADAPTIVE / strength
        cause = f"λ {strength:g} and a learning rate of {rate:g} (take {largest:.2g} or less)"
        raise few_patients(site.name, cause, site.minimum_patients)
    weights = trainable(shared)
    thetas = trainable(personal)
    eta = share / strength if strength else 0.0
    personal.train()
    for batches in epochs(site, round, "personal"):
        for batch in batches:
            for _ in range(inner_steps):
                gradients = loss_gradients(personal, site, batch)
                proximal = proximal_gradients(gradients, thetas, weights, strength)
                take_step(optimizer, thetas, proximal)
            with torch.no_grad():
                overwrite(weights, pfedme_outer(weights, thetas, eta, strength))
    # Running statistics are those of the model that saw the images.
    overwrite(shared.buffers(), personal.buffers())


@strict_dataclass
class PFedMeHyper(FedAvgSiteHyper):
    """The proximal problem, and the step towards its solution."""

    lam: float = param(
        15.0,
        "weight of the proximal term; 15 is for plain SGD at a rate of 0.005, with Adam try 1",
        symbol="λ",
        source="Eq. 3; Sec. 5",
        low=0.001,
    )
    inner_steps: int = param(
        5, "steps of the personal model on a batch", symbol="K", source="Sec. 5", low=1, high=1000
    )
    share: float = param(
        1.0,
        "part of the way to the personal model that the shared one moves after a batch; "
        "the paper's 0.075 needs hundreds of rounds",
        symbol="η λ",
        source="Alg. 1, line 8; Sec. 5: η 0.005",
        low=0,
        high=1,
    )


@strict_dataclass
class PFedMeServerHyper(FedAvgServerHyper):
    """The server's step."""

    beta: float = param(
        1.0, "the server's step to the mean", symbol="β", source="Alg. 1, line 11", low=0
    )


class PFedMeSite(SecondModelSite[PFedMeHyper]):
    """Trains personal model and shared model together, see `train_pfedme`."""

    accumulates = False

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        personal = self.network("personal", model.state_dict())
        train = partial(
            train_pfedme,
            model,
            personal,
            self.site,
            round,
            strength=self.hyper.lam,
            inner_steps=self.hyper.inner_steps,
            share=self.hyper.share,
        )
        self.optimized(personal, "personal", train)
        self.personal = copied_state(personal)
        return None


class PFedMeMean(ReweightedMean):
    """(1 - β) w + β mean_k w_k of the trained entries; β may exceed 1, so that running statistics
    are averaged.
    """

    def server_step(self, mean: StateDict, models: Models, previous: StateDict) -> StateDict:
        return blend({name: previous[name] for name in mean}, mean, self.hyper.beta)


class PFedMeServer(FedAvgServer[PFedMeServerHyper]):
    """FedAvg's server algorithm with a step of β."""

    aggregation_class = PFedMeMean
