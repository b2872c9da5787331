"""SCAFFOLD (Karimireddy et al., ICML 2020, Alg. 1): control variates against client drift.

    y <- y - η_l (g_k(y) - c_k + c)                       every local step
    c_k <- c_k - c + (w_g - y) / (K η_l)                  option (ii)
    w_g <- w_g + η_g Σ_k p_k (y_k - w_g),   c <- c + (1/N) Σ_{k in S} (c_k⁺ - c_k)

With plain gradient steps, w_g - y is η_l times the sum of all corrected gradients, so option (ii)
is the mean of the K mini-batch gradients along the site's path. It is computed as this mean: it
needs no learning rate and remains a gradient under Adam, momentum and weight decay. η_g is 1, as in
the paper's experiments.

c_k stays at its site. Its update counts once the server has used it: a reply that is late, lost or
rejected changes neither side, so that c remains the mean of the c_k.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from medflare.core.states import moved
from medflare.methods import (
    MEASURED,
    MODEL,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSite,
    FedAvgSiteHyper,
    Message,
    MetaSpec,
    PersistentState,
    Plan,
    Replies,
    ServerContext,
    StateDict,
    Step,
    TensorSpec,
    asks,
    copied_state,
    copy_state,
    count,
    param,
    phase,
    strict_dataclass,
)
from medflare.methods.fedavg.site import F
from medflare.training.epochs import named_trainable


def _zeros(plan: Plan) -> StateDict:
    weights = named_trainable(plan.network())
    return {name: torch.zeros(w.shape, dtype=w.dtype) for name, w in weights.items()}


CONTROL = TensorSpec("control", template=_zeros)  # c
UPDATE = TensorSpec(
    "control_update",
    "change of the site's control variate, a mean gradient of its training images",
    _zeros,
)
COUNTED = MetaSpec[int | None](
    "counted", "round of the site's last update that the server has used", count(optional=True)
)


@strict_dataclass
class ScaffoldServerHyper(FedAvgServerHyper):
    """The aggregation weights, which hold for control variates as for models."""

    weighting: Literal["samples", "uniform"] = param(
        "uniform", "aggregation weights: n_k/n or 1/K", symbol="p_k", source="Alg. 1, lines 16-17"
    )


def corrected_gradients(
    gradients: Sequence[Tensor], of_site: Sequence[Tensor], shared: Sequence[Tensor]
) -> list[Tensor]:
    """g_k(y) - c_k + c for every parameter (Alg. 1, line 10), with c_k `of_site` and c `shared`."""
    return [g - c_k + c for g, c_k, c in zip(gradients, of_site, shared, strict=True)]


class Correction:
    """A gradient hook for `train_epochs` that corrects the gradients by c_k and c, and averages the
    uncorrected ones.

    All tensors are on the network's device.
    """

    def __init__(self, network: nn.Module, of_site: StateDict, shared: StateDict):
        self.weights = named_trainable(network)
        self.of_site = of_site
        self.shared = shared
        self.steps = 0
        self._total = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    @torch.no_grad()
    def __call__(self) -> None:
        self.steps += 1
        for name, weight in self.weights.items():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self._total[name] += gradient
            (weight.grad,) = corrected_gradients(
                [gradient], [self.of_site[name]], [self.shared[name]]
            )

    def mean(self) -> StateDict:
        """(1/K) Σ g_k(y) over the K steps, on the CPU; zeros without any."""
        return copy_state({name: total / max(self.steps, 1) for name, total in self._total.items()})


class CountedSite(FedAvgSite[F]):
    """FedAvg's site algorithm with a control variate whose updates count once the server has used
    them.

    Attributes:
        control: c_k, as far as the server has counted its updates; None for zeros.
        update: c_k⁺ - c_k of the last trained round, not yet known to be counted.
    """

    server_hyper = ScaffoldServerHyper
    freezes = False
    control = PersistentState("control")
    update = PersistentState("update")

    def current_control(self, incoming: Message) -> StateDict:
        """c_k, with its last update if the server has counted it."""
        if self.control is None:
            self.control = _zeros(self.plan)
        if self.update is not None and incoming[COUNTED] == self.memory.meta["updated"]:
            self.control = moved(self.control, self.update)
            self.update = None
        return self.control

    def remember_update(self, round: int, update: StateDict) -> None:
        """Stores the update of a round."""
        self.update = update
        self.memory.meta["updated"] = round


class ScaffoldSite(CountedSite[FedAvgSiteHyper]):
    """Follows corrected gradients; sends the change of its control variate with its model."""

    accumulates = False
    dp_unsupported_reason = "its control variates are means of gradients without noise"

    @phase(request=(MODEL, CONTROL), request_meta=(COUNTED,), reply=(MODEL, UPDATE), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """Trains along corrected gradients (Alg. 1, lines 9-13) and sends the model and c_k⁺ -
        c_k.
        """
        control = self.current_control(incoming)
        model = self.network("model", incoming[MODEL])
        validation = self.validation(model)
        on_device = self.site.computing.state_on_device
        correction = Correction(model, on_device(control), on_device(incoming[CONTROL]))
        loss = self.train_model(model, round, "model", correction)
        self.remember_update(round, moved(correction.mean(), control, -1.0))
        entries = {MODEL: copied_state(model), UPDATE: self.update}
        return self.reply(entries, loss=loss, validation={"global": validation})


class CountedServer(FedAvgServer[ScaffoldServerHyper]):
    """FedAvg's server algorithm with the mean of the sites' control variates.

    Attributes:
        control_sum: Σ_k n_k c_k over all sites, whose weighted mean is c; n_k = 1 for uniform
            weights.
    """

    site_algorithm = CountedSite
    freezes = False
    control_sum = PersistentState("controls")

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.control_sum = _zeros(context.plan)
        self.memory.meta |= {"samples": {}, "counted": {}}

    @property
    def weights(self) -> dict[str, float]:
        """Site -> n_k of every inside site, absent ones included.

        Weights by samples are of the sites that have enrolled, as far as the lead permits
        (`ServerContext.counted_fraction`). A late site can change this for the others; what is
        already in c keeps its weight, so that c remains the mean of the c_k.
        """
        context = self.context
        if self.hyper.weighting == "uniform":
            return dict.fromkeys(context.sites, 1.0)
        current = {}
        for site, counts in sorted(context.site_counts.items()):
            if site in context.sites:
                current[site] = counts["n"]["train"] * context.counted_fraction.get(site, 1.0)
        return {**current, **self.memory.meta["samples"]}

    @property
    def control(self) -> StateDict:
        """c, the mean of all c_k."""
        total = sum(self.weights.values()) or 1.0
        return {name: tensor / total for name, tensor in self.control_sum.items()}

    @asks(CountedSite.train)
    def request_of_training(self, step: Step, site: str) -> Message:
        """FedAvg's message, and which of the site's updates has been counted."""
        message = self.request_of_model(step, site)
        message[COUNTED] = self.memory.meta["counted"].get(site)
        return message

    def update_of(self, reply: Message, start: StateDict) -> StateDict:
        """c_k⁺ - c_k in a reply to the model `start`."""
        return reply[UPDATE]

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """FedAvg's aggregation; c moves by the mean of the sites' updates (Alg. 1, line 17)."""
        start = self.model
        super().aggregate_models(step, replies)
        weights = self.weights
        self.memory.meta["samples"] = weights
        for site, reply in replies.items():
            self.control_sum = moved(self.control_sum, self.update_of(reply, start), weights[site])
            self.memory.meta["counted"][site] = step.round


class ScaffoldServer(CountedServer):
    """Sends c to the sites."""

    site_algorithm = ScaffoldSite

    def request_of_training(self, step: Step, site: str) -> Message:
        """The message of `CountedServer`, and c."""
        message = super().request_of_training(step, site)
        message[CONTROL] = self.control
        return message
