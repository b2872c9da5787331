"""FedAvg (McMahan et al., AISTATS 2017): every site trains the global model, the server averages.

    w <- sum_k p_k w_k,   p_k = n_k / n      (FedSM paper, Sec. 2; its printed 1/K in front is a double normalisation)

Also the base of the other methods: their halves change one thing each.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from medflare.core.hyper import param
from medflare.core.manifest import Manifest
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state, weighted_mean
from medflare.inference.deployed import plain_message
from medflare.methods.base import Plan, ServerContext, ServerHalf, SiteHalf, Step, plain_entry, sample_weights
from medflare.methods.parts.selection import Best, mean_validation
from medflare.methods.parts.training import OptimizerMemory, finite_or_none, train_epochs, trainable
from medflare.privacy.settings import PrivacyHyper, check_private, check_private_site, is_private, spent, train_privately
from medflare.sites.site import Site
from medflare.tasks.config import TaskConfig

T = TypeVar("T")


@dataclass(frozen=True)
class FedAvgSiteHyper:
    reset_optimizer: bool = param(True, "start every round with a fresh optimizer; false keeps its moments at the site")


@dataclass(frozen=True)
class FedAvgHyper(PrivacyHyper, FedAvgSiteHyper):
    """FedAvg's own site half; others inherit `PrivacyHyper` where DP-SGD protects all that they send."""


@dataclass(frozen=True)
class FedAvgServerHyper:
    weighting: str = param("samples", "aggregation weights: n_k/n or 1/K", symbol="p_k", choices=("samples", "uniform"))
    selection: str = param("best", "deliver the round with the best validation metric, or the last one", choices=("best", "last"))


class FedAvgSite(SiteHalf):
    """Trains the incoming global model for the task's local epochs and sends it back."""

    Hyper: ClassVar[type] = FedAvgHyper

    def __init__(self, site: Site, hyper: Any, sites: tuple[str, ...]):
        super().__init__(site, hyper, sites)
        self.optimizers = OptimizerMemory()
        if is_private(hyper) and site.name in sites:
            check_private_site(site, hyper)

    @classmethod
    def check(cls, task: TaskConfig, hyper: Any) -> None:
        if is_private(hyper):
            check_private(task)

    @classmethod
    def outbound(cls, phase: str, plan: Plan) -> Manifest:
        if phase == "train":
            return {"model": plain_entry(plan, "the site's locally trained model, for the weighted mean")}
        return {}

    def train(self, round: int, incoming: Message) -> Message:
        model = self.network("model", incoming.states["model"])
        validation = self.validation(model)
        loss = self.optimized(model, "model", lambda optimizer: self.fit(model, optimizer, round))
        cost = self.privacy()
        more = {} if cost is None else {"privacy": cost}
        return Message({"model": copy_state(model.state_dict())}, self.facts(loss=loss, validation={"global": validation}, **more))

    def optimized(self, model: nn.Module, purpose: str, train: Callable[[torch.optim.Optimizer], T]) -> T:
        """`train` with the task's optimizer, fresh or with the moments that the last round left; returns its loss."""
        optimizer = self.site.optimizer(trainable(model))
        with self.continued({purpose: optimizer}):
            return train(optimizer)

    @contextmanager
    def continued(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> Iterator[None]:
        """Training with optimizers, by purpose, that go on with the last round's moments; afresh where `reset_optimizer` says so."""
        kept = {} if self.hyper.reset_optimizer else optimizers
        for purpose, optimizer in kept.items():
            self.optimizers.recall(purpose, optimizer)
        yield
        for purpose, optimizer in kept.items():
            self.optimizers.keep(purpose, optimizer)

    def fit(self, model: Any, optimizer: Any, round: int) -> float | None:
        """One round of local training; the one thing that most local variants change."""
        return self.descend(model, optimizer, round)

    def descend(self, model: Any, optimizer: Any, round: int, loss: Callable[[Any, Tensor, Tensor], Tensor] | None = None) -> float | None:
        """Epochs of the task's loss or of another that is a mean over images; with DP-SGD where asked for, whose loss stays untold."""
        if is_private(self.hyper):
            train_privately(model, optimizer, self.site, self.hyper, loss)
            return None
        return train_epochs(model, optimizer, self.site, round, "model", loss=loss)

    def privacy(self) -> dict[str, Any] | None:
        return spent(self.site, self.hyper) if is_private(self.hyper) else None

    def validate(self, round: int, incoming: Message) -> Message:
        return Message({}, self.facts(validation={"global": self.validation(self.network("model", incoming.states["model"]))}))

    def facts(self, *, validation: Mapping[str, float | None], loss: float | None = None, **more: Any) -> dict[str, Any]:
        """The facts of every reply; an undefined metric travels as None, a loss that is not finite as it is, for the server to see."""
        measured = {role: finite_or_none(value) for role, value in validation.items()}
        return {"n_samples": self.site.n["train"], "loss": loss, "validation": measured, **more}

    def deliver(self, incoming: Message) -> dict[str, Message]:
        """Global and deployed are the selected global model; it is also all that a site has of its own."""
        plain = plain_message(incoming.states["model"])
        return dict.fromkeys(("global", "personal", "deployed"), plain)

    def state(self) -> Message:
        message = Message()
        self.optimizers.pack(message)
        return message

    def restore(self, state: Message) -> None:
        self.optimizers.unpack(state)


class FedAvgServer(ServerHalf):
    """Weighted mean of the sites' models; remembers the best round."""

    Hyper: ClassVar[type] = FedAvgServerHyper

    def __init__(self, context: ServerContext, hyper: Any):
        super().__init__(context, hyper)
        self.model: StateDict = context.initial_state()
        self.best = Best()

    def outgoing(self, step: Step, site: str) -> Message:
        return Message({"model": self.model})

    def accept(self, step: Step, replies: Mapping[str, Message]) -> None:
        self.best.offer(mean_validation(replies, "global"), step.round, self.model)
        if step.phase == "train":
            self.model = self.aggregate(replies)

    def aggregate(self, replies: Mapping[str, Message]) -> StateDict:
        """The next global model; what server-side methods change."""
        weights = sample_weights(replies, self.hyper.weighting)
        return weighted_mean({site: reply.states["model"] for site, reply in replies.items()}, weights)

    @property
    def selected(self) -> StateDict:
        if self.hyper.selection == "best" and self.best.state is not None:
            return self.best.state
        return self.model

    def delivery(self, site: str) -> Message:
        chosen = self.best.round if self.hyper.selection == "best" and self.best.state is not None else self.context.rounds
        return Message({"model": self.selected}, {"selected_round": chosen})

    def models(self) -> dict[str, Message]:
        return {"global": plain_message(self.selected)}

    def state(self) -> Message:
        message = Message({"model": self.model})
        self.best.pack("global", message)
        return message

    def restore(self, state: Message) -> None:
        self.model = state.states["model"]
        self.best.unpack("global", state)
