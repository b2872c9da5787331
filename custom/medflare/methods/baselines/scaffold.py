"""SCAFFOLD (Karimireddy et al., ICML 2020, Alg. 1): control variates correct the drift of local training.

    y <- y - η_l (g_k(y) - c_k + c)                       every local step
    c_k <- c_k - c + (w_g - y) / (K η_l)                  option (ii)
    w_g <- w_g + η_g Σ_k p_k (y_k - w_g),   c <- c + (1/N) Σ_{k in S} (c_k⁺ - c_k)

With plain gradient steps, w_g - y is η_l times the sum of all corrected gradients, so option (ii) is the mean of the K mini-batch
gradients along the site's path. It is computed as this mean: it needs no learning rate and remains a gradient under Adam, momentum and
weight decay. η_g is 1, as in the paper's experiments.

c_k stays at its site. Its update counts once the server has used it: a reply that is late, lost or rejected changes neither side, so
that c remains the mean of the c_k.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from medflare.core.hyper import param
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, count
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.states import StateDict, copy_state, moved
from medflare.methods.base import MEASURED, Capability, PersistentState, Plan, ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServer, FedAvgServerHyper
from medflare.methods.fedavg.site import GLOBAL, MODEL, VALIDATE, FedAvgSite, FedAvgSiteHyper
from medflare.methods.method import Method
from medflare.training.epochs import train_epochs

METHOD = Method(
    name="scaffold",
    title="Control variates against client drift",
    paper="Karimireddy et al., SCAFFOLD, ICML 2020",
    site="medflare.methods.baselines.scaffold:ScaffoldSite",
    server="medflare.methods.baselines.scaffold:ScaffoldServer",
)


def _trained(plan: Plan[Any, Any]) -> StateDict:
    return {name: weight.detach() for name, weight in plan.network().named_parameters() if weight.requires_grad}


CONTROL = TensorSpec("control", template=_trained)  # c
UPDATE = TensorSpec("control_update", "change of the site's control variate, a mean gradient of its training images", _trained)
COUNTED = MetaSpec("counted", "round of the site's last control update that the server has used", count(optional=True))


@dataclass(frozen=True, config=STRICT)
class ScaffoldSiteHyper(FedAvgSiteHyper):
    """A class of its own: the two algorithms work only with each other."""


@dataclass(frozen=True, config=STRICT)
class ScaffoldServerHyper(FedAvgServerHyper):
    """The weights hold for control variates as for models."""

    weighting: Literal["samples", "uniform"] = param(
        "uniform", "aggregation weights: n_k/n or 1/K", symbol="p_k", source="Alg. 1, lines 16-17"
    )


def corrected_gradients(gradients: Sequence[Tensor], own: Sequence[Tensor], shared: Sequence[Tensor]) -> list[Tensor]:
    """g_k(y) - c_k + c for every parameter (Alg. 1, line 10), with c_k `own` and c `shared`."""
    return [g - c_k + c for g, c_k, c in zip(gradients, own, shared, strict=True)]


class Correction:
    """A gradient hook for `train_epochs`: corrects the gradients by c_k and c, and averages them as they were before."""

    def __init__(self, network: nn.Module, own: StateDict, shared: StateDict):
        self.weights = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
        self.own, self.shared = ({name: state[name].to(w.device) for name, w in self.weights.items()} for state in (own, shared))
        self.steps = 0
        self._total = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    @torch.no_grad()
    def __call__(self) -> None:
        self.steps += 1
        for name, weight in self.weights.items():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self._total[name] += gradient
            (weight.grad,) = corrected_gradients([gradient], [self.own[name]], [self.shared[name]])

    def mean(self) -> StateDict:
        """(1/K) Σ g_k(y) over the K steps, on the CPU; zeros without any."""
        return copy_state({name: total / max(self.steps, 1) for name, total in self._total.items()})


class ScaffoldSite(FedAvgSite[ScaffoldSiteHyper]):
    """Follows corrected gradients; sends the change of its control variate with its model.

    Attributes:
        control: c_k, as far as the server has counted its updates; None for zeros.
        update: c_k⁺ - c_k of the last trained round, not yet known to be counted.
    """

    Hyper: ClassVar[type] = ScaffoldSiteHyper
    server_hyper: ClassVar[type] = ScaffoldServerHyper
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase("train", request=(GLOBAL, CONTROL), request_meta=(COUNTED,), reply=(MODEL, UPDATE), reply_meta=MEASURED),
        VALIDATE,
    )
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    dp_unsupported_reason = "its control variates are means of gradients without noise"
    control, update = PersistentState("control"), PersistentState("update")

    def train(self, round: int, incoming: Message) -> Message:
        """Training along corrected gradients (Alg. 1, lines 9-13); the reply holds the model and c_k⁺ - c_k."""
        shared = incoming.states[CONTROL]
        control = self.control or {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
        if self.update is not None and incoming.meta[COUNTED] == self.memory.meta["updated"]:
            control = moved(control, self.update)
        model = self.network("model", incoming.states[GLOBAL])
        validation = self.validation(model)
        correction = Correction(model, control, shared)
        loss = self.optimized(
            model, "model", lambda optimizer: train_epochs(model, optimizer, self.site, round, "model", gradient_hook=correction)
        )
        self.control, self.update = control, moved(correction.mean(), control, -1.0)
        self.memory.meta["updated"] = round
        states: dict[str, StateDict] = {MODEL: copy_state(model.state_dict()), UPDATE: self.update}
        return Message(states, self.meta(loss=loss, validation={"global": validation}))


class ScaffoldServer(FedAvgServer[ScaffoldServerHyper]):
    """FedAvg's server algorithm with a control variate.

    Attributes:
        controls: Σ_k n_k c_k over all sites, whose weighted mean is c; n_k = 1 for uniform weights.
    """

    Hyper: ClassVar[type] = ScaffoldServerHyper
    site_hyper: ClassVar[type] = ScaffoldSiteHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    controls = PersistentState("controls")

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.controls = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in _trained(context.plan).items()}
        self.memory.meta |= {"samples": {}, "counted": {}}

    @property
    def weights(self) -> dict[str, float]:
        """site -> n_k of every inside site, absent ones included; by samples, of those that have enrolled.

        Samples count as far as the lead permits (`ServerContext.counted`). A late site can change this for the others; what is already
        in c keeps its weight, so that c remains the mean of the c_k.
        """
        context = self.context
        if self.hyper.weighting == "uniform":
            return dict.fromkeys(context.sites, 1.0)
        enrolled = {site: counts["n"]["train"] for site, counts in sorted(context.site_counts.items()) if site in context.sites}
        current = {site: samples * context.counted.get(site, 1.0) for site, samples in enrolled.items()}
        return {**current, **self.memory.meta["samples"]}

    @property
    def control(self) -> StateDict:
        """c, the mean of all c_k."""
        total = sum(self.weights.values()) or 1.0
        return {name: tensor / total for name, tensor in self.controls.items()}

    def configure(self, step: Step, site: str) -> Message:
        """FedAvg's message; for training also c, and which of the site's updates has been counted."""
        message = super().configure(step, site)
        if step.phase == "train":
            message.states[CONTROL] = self.control
            message.meta[COUNTED] = self.memory.meta["counted"].get(site)
        return message

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """FedAvg's aggregation; after training c moves by the mean of the sites' updates (Alg. 1, line 17)."""
        super().aggregate(step, replies)
        if step.phase != "train":
            return
        weights = self.memory.meta["samples"] = self.weights
        for site, reply in replies.items():
            self.controls = moved(self.controls, reply.states[UPDATE], weights[site])
            self.memory.meta["counted"][site] = step.round
