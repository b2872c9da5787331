"""APFL (Deng et al. 2020, Alg. 1): a site's model is a mixture of a local and the global one.

    v̄ = α v + (1 - α) w                                  (Sec. 3)
    w <- w - η ∇f(w; ξ),   v <- v - η ∇_v f(v̄; ξ)        on the same batch ξ
    α <- α - η <v - w, ∇f(v̄; ξ)>, limited to [0, 1]      (Sec. 4, adaptive α)

w is the site's copy of the global model, which is FedAvg's. v and α stay at the site. Steps are
those of the task's optimizer; α is one more parameter beside v, its gradient as printed, so without
weight decay.
"""

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from medflare.core.states import State
from medflare.methods import (
    FeatureNetwork,
    FedAvgSiteHyper,
    PersistentState,
    Site,
    StateDict,
    copied_state,
    param,
    strict_dataclass,
    train_epochs,
)
from medflare.methods.families.second_models.site import SecondModelSite

T = TypeVar("T")
_ALPHA = "alpha"  # in the memory


def apfl_mixture(
    personal: StateDict, global_: State, share: float, kept: Collection[str] = ()
) -> StateDict:
    """APFL's model v̄ = α v + (1 - α) w (Deng et al. 2020, Sec. 3) for floating entries; integer
    entries of v.

    Args:
        personal: v.
        global_: w, with every floating entry of v.
        share: α in [0, 1]; 1 gives the local model, 0 the global one.
        kept: entries that are v̄'s already, for example its running statistics.
    """
    mixture = {}
    for name, tensor in personal.items():
        if tensor.is_floating_point() and name not in kept:
            mixture[name] = share * tensor + (1 - share) * global_[name]
        else:
            mixture[name] = tensor.clone()
    return mixture


def mixed_logits(
    network: nn.Module, anchor: State, share: float | Tensor, images: Tensor
) -> Tensor:
    """Logits of v̄, as a function of v and α.

    Args:
        network: holds v; its running statistics become those of v̄.
        anchor: w, without gradients.
        share: α.
        images: (N, C, ...).
    """
    weights = network.named_parameters()
    mixture = {name: share * weight + (1 - share) * anchor[name] for name, weight in weights}
    return functional_call(network, mixture, (images,))


def mixed_model(model: nn.Module, global_: State, share: float) -> StateDict:
    """v̄ of a trained v (`model`), whose running statistics are v̄'s already."""
    statistics = [name for name, _ in model.named_buffers()]
    return apfl_mixture(copied_state(model), global_, share, kept=statistics)


def train_apfl(
    model: nn.Module,
    global_: StateDict,
    site: Site,
    round: int,
    optimizer: Optimizer,
    *,
    share: float,
) -> StateDict:
    """One round of v (`model`) with frozen w (`global_`) and α (`share`).

    Returns:
        The mixture v̄.
    """
    anchor = {name: global_[name].to(site.device) for name, _ in model.named_parameters()}

    def mixed_loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        return site.loss(mixed_logits(network, anchor, share, images), targets)

    train_epochs(model, optimizer, site, round, "personal", loss=mixed_loss)
    return mixed_model(model, global_, share)


@strict_dataclass
class APFLHyper(FedAvgSiteHyper):
    """The mixing weight."""

    alpha: float = param(
        0.5,
        "share of the local model in the mixture; at the start, if it is adaptive",
        symbol="α",
        source="Sec. 3",
        low=0,
        high=1,
    )
    adaptive: bool = param(True, "learn the share at every site", source="Sec. 4")


class APFLSite(SecondModelSite[APFLHyper]):
    """Trains the global model and, on the same batches, v and α through the mixture, which is the
    personal model.
    """

    local = PersistentState("local")  # v
    _alpha: nn.Parameter  # of the round, set by `fit`

    def optimized(self, model: nn.Module, purpose: str, train: Callable[[Optimizer], T]) -> T:
        """FedAvg's; α is in a group without weight decay."""

        def without_decay(optimizer: Optimizer) -> T:
            group = optimizer.param_groups[0]
            weights = group["params"]
            if purpose == "personal" and weights[0] is self._alpha and group.get("weight_decay"):
                group["params"] = weights[1:]
                alone = {**group, "params": weights[:1], "weight_decay": 0.0}
                optimizer.param_groups.insert(0, alone)  # the order of the moments stays
            return train(optimizer)

        return super().optimized(model, purpose, without_decay)

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        local = self.network("personal", self.local or model.state_dict())
        share = torch.tensor(self.memory.meta.get(_ALPHA, self.hyper.alpha))
        alpha = nn.Parameter(share.to(self.site.device), requires_grad=self.hyper.adaptive)
        both = nn.Sequential(local)
        both.register_parameter(_ALPHA, alpha)
        anchor = {name: weight.detach() for name, weight in model.named_parameters()}
        model.train()
        local.train()

        def losses(images: Tensor, targets: Tensor) -> list[Tensor]:
            alpha.data.clamp_(0, 1)
            mixed = self.site.loss(mixed_logits(local, anchor, alpha, images), targets)
            return [mixed, self.site.loss(model(images), targets)]

        self._alpha = alpha
        loss = self.fit_both(both, optimizer, round, losses)
        learned = float(alpha.data.clamp_(0, 1))
        self.memory.meta[_ALPHA] = learned
        self.local = copied_state(local)
        self.personal = mixed_model(local, copied_state(model), learned)
        return loss
