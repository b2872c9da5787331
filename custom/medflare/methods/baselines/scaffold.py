"""SCAFFOLD (Karimireddy et al., ICML 2020, Alg. 1): control variates take out of local training what only its own site wants.

    y <- y - η_l (g_k(y) - c_k + c)                       every local step
    c_k <- (i) ∇F_k(w_g)  or  (ii) c_k - c + (w_g - y) / (K η_l)
    w_g <- w_g + η_g Σ_k p_k (y_k - w_g),   c <- c + (1/N) Σ_{k in S} (c_k⁺ - c_k)

With plain gradient steps w_g - y is η_l times the sum of all corrected gradients, so (ii) is the mean of the K mini-batch gradients
along the site's path. That is how it is computed here: it needs no learning rate and keeps its meaning under Adam, momentum and
weight decay, where the printed difference of weights is no gradient. The optimizer takes the corrected gradient for its own: where
all sites' gradients add up to zero, every corrected gradient is zero and no optimizer moves, which FedAvg cannot promise.

c_k stays at its site. An update of it counts once the server has taken it in: a reply that is late, lost or rejected changes
neither side, so that c remains the mean of the c_k.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from medflare.core.hyper import param
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, count
from medflare.core.message import Message
from medflare.core.rng import seeded
from medflare.core.settings import STRICT
from medflare.core.states import StateDict, blend, copy_state, moved
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean
from medflare.methods.base import MEASURED, Capability, PersistentState, ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServer, FedAvgServerHyper
from medflare.methods.fedavg.site import GLOBAL, MODEL, VALIDATE, FedAvgSite, FedAvgSiteHyper
from medflare.methods.method import Method
from medflare.networks.catalogue import meta_network
from medflare.tasks.config import TaskConfig
from medflare.training.epochs import samples_of_pass, train_epochs

METHOD = Method(
    name="scaffold",
    title="Control variates against client drift",
    paper="Karimireddy et al., SCAFFOLD, ICML 2020",
    site="medflare.methods.baselines.scaffold:ScaffoldSite",
    server="medflare.methods.baselines.scaffold:ScaffoldServer",
)


def _learnt(network: nn.Module) -> StateDict:
    """The entries that have a gradient, and so a control variate."""
    return {name: weight.detach() for name, weight in network.named_parameters() if weight.requires_grad}


CONTROL = TensorSpec("control", template=lambda plan: _learnt(plan.network()), exact=True)  # c, which must stay the mean of the c_k
UPDATE = TensorSpec(
    "control_update",
    "change of the site's control variate, a mean gradient of its training images",
    lambda plan: _learnt(plan.network()),
)
COUNTED = MetaSpec("counted", "the round of the site's last control update that the server has taken in", count(optional=True))


@dataclass(frozen=True, config=STRICT)
class ScaffoldSiteHyper(FedAvgSiteHyper):
    """How a site renews its control variate."""

    control: Literal["path", "gradient"] = param(
        "path", "mean gradient along the site's path, or the gradient at w_g (one more pass)", symbol="c_k", source="Alg. 1, (ii) or (i)"
    )


@dataclass(frozen=True, config=STRICT)
class ScaffoldServerHyper(FedAvgServerHyper):
    """The server's step. The weights hold for control variates as for models."""

    weighting: Literal["samples", "uniform"] = param(
        "uniform", "aggregation weights: n_k/n or 1/K", symbol="p_k", source="Alg. 1, lines 16-17"
    )
    server_rate: float = param(1.0, "step of the server", symbol="η_g", source="Alg. 1, line 17", low=0)


# -- formulas ------------------------------------------------------------------------------------------------------------------


def corrected_gradients(gradients: Sequence[Tensor], own: Sequence[Tensor], shared: Sequence[Tensor]) -> list[Tensor]:
    """g - c_k + c for every parameter (Alg. 1, line 10).

    Args:
        gradients: g_k(y).
        own: c_k.
        shared: c.

    Returns:
        The corrected gradients, in the same order; the plain ones where c_k = c.

    Examples:
        >>> corrected_gradients([torch.tensor([1.0])], [torch.tensor([0.5])], [torch.tensor([0.25])])
        [tensor([0.7500])]
    """
    return [g - c_k + c for g, c_k, c in zip(gradients, own, shared, strict=True)]


class Correction:
    """What `train_epochs` calls between gradient and step: corrects the gradients, and averages them as they were before.

    Args:
        network: the network that trains.
        own: c_k, by parameter name.
        shared: c, by parameter name.
    """

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


# -- site algorithm -----------------------------------------------------------------------------------------------------------------


class ScaffoldSite(FedAvgSite[ScaffoldSiteHyper]):
    """Follows corrected gradients, and sends how its control variate changes beside its model.

    Attributes:
        control: c_k as the server has counted it; None for zeros.
        update: c_k⁺ - c_k of the round in the item "updated", not yet known to be counted.
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
        own, shared = self._settled(incoming), incoming.states[CONTROL]
        model = self.network("model", incoming.states[GLOBAL])
        validation = self.validation(model)
        at_start = self._gradient(round, incoming.states[GLOBAL]) if self.hyper.control == "gradient" else None
        correction = Correction(model, own, shared)

        def follow(optimizer: torch.optim.Optimizer) -> float:
            return train_epochs(model, optimizer, self.site, round, "model", gradient_hook=correction)

        loss = self.optimized(model, "model", follow)
        self.update = moved(correction.mean() if at_start is None else at_start, own, -1.0)
        self.memory.meta["updated"] = round
        states: dict[str, StateDict] = {MODEL: copy_state(model.state_dict()), UPDATE: self.update}
        return Message(states, self.meta(loss=loss, validation={"global": validation}))

    def _settled(self, incoming: Message) -> StateDict:
        """c_k, with the last round's update where the server says that it has counted it."""
        own = self.control or {name: torch.zeros_like(tensor) for name, tensor in incoming.states[CONTROL].items()}
        if self.update is not None and incoming.meta[COUNTED] == self.memory.meta["updated"]:
            own = moved(own, self.update)
        self.control, self.update = own, None
        return own

    def _gradient(self, round: int, state: StateDict) -> StateDict:
        """∇F_k(w_g): the mean gradient over one pass of training images as training takes them; nothing moves."""
        model = self.network("control", state)  # a network of its own: BatchNorm's running statistics move, and are thrown away
        model.train().zero_grad(set_to_none=True)
        seen = samples_of_pass(self.site)
        with seeded(self.site.seed, self.site.name, round, "control", "dropout"):
            for images, targets, _ in self.site.batches("train", round, "control", 0):
                (self.site.loss(model(images), targets) * (len(images) / seen)).backward()
        named = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
        return copy_state({name: torch.zeros_like(weight) if weight.grad is None else weight.grad for name, weight in named})


# -- server algorithm ---------------------------------------------------------------------------------------------------------------


class SteppedMean(WeightedMean):
    """w_g <- w_g + η_g (Σ p_k y_k - w_g) for what is learnt; running statistics are averaged. Without a w_g at hand, the mean."""

    def __init__(self, hyper: ScaffoldServerHyper):
        super().__init__(hyper)
        self._learnt: frozenset[str] | None = None  # all floating entries, where no task says which

    def prepare(self, task: TaskConfig, rounds: int) -> None:
        """Learn which entries have a gradient."""
        super().prepare(task, rounds)
        self._learnt = frozenset(_learnt(meta_network(task)))

    def shared(self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None) -> StateDict:
        """The mean, and from `previous` only η_g of the way to it for what is learnt."""
        mean = super().shared(models, round, previous)
        if previous is None:
            return mean
        chosen = mean if self._learnt is None else self._learnt
        return {**mean, **blend({name: previous[name] for name in mean if name in chosen}, mean, self.hyper.server_rate)}


class ScaffoldServer(FedAvgServer[ScaffoldServerHyper]):
    """FedAvg's server algorithm with a step of its own and a control variate.

    Attributes:
        controls: Σ_k n_k c_k over all sites, whose mean is c; n_k = 1 where weights are uniform.
    """

    Hyper: ClassVar[type] = ScaffoldServerHyper
    site_hyper: ClassVar[type] = ScaffoldSiteHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = SteppedMean
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    controls = PersistentState("controls")

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.controls = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in _learnt(context.plan.network()).items()}
        self.memory.meta |= {"samples": {}, "counted": {}}

    @property
    def weights(self) -> dict[str, float]:
        """site -> n_k of every inside site, those that are not there included; by samples, of those that ever enrolled.

        Samples count as far as the lead lets them (`ServerContext.counted`). A site that comes later may change how far; what has gone
        into c keeps its weight, so that c stays the mean of the c_k.
        """
        context = self.context
        if self.hyper.weighting == "uniform":
            return dict.fromkeys(context.sites, 1.0)
        enrolled = {site: known["n"]["train"] for site, known in sorted(context.site_counts.items()) if site in context.sites}
        now = {site: count * context.counted.get(site, 1.0) for site, count in enrolled.items()}
        return {**now, **self.memory.meta["samples"]}

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
