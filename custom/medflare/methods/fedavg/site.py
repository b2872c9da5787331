"""FedAvg's site algorithm: trains the incoming global model and sends it back. Most other site algorithms change one thing of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from pydantic.dataclasses import dataclass
from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, count
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.states import StateDict, copy_state
from medflare.inference.deployed import plain_message
from medflare.methods.base import MEASURED, Capability, Plan, SiteAlgorithm, SiteHyper
from medflare.methods.parts.partial import LocalPart
from medflare.networks.features import FeatureNetwork
from medflare.privacy.settings import PrivacyHyper, check_private, check_private_site, cost, is_private, privacy_cost, train_privately
from medflare.tasks.config import TaskConfig
from medflare.training.epochs import Loss, OptimizerMemory, train_epochs, trainable
from medflare.training.site import Site

T = TypeVar("T")

# What the messages of FedAvg and of most other methods hold.
GLOBAL = TensorSpec("model")
MODEL = TensorSpec("model", "the site's locally trained model, for the weighted mean")
OWN = TensorSpec("own")  # what stays at home of a model that is shared in part
PRIVACY = MetaSpec("privacy", "what the run has cost the site's patients, with DP-SGD", cost)
SELECTED_ROUND = MetaSpec("selected_round", "rounds of training behind a model", count(optional=True))

TRAIN = Phase("train", request=(GLOBAL,), reply=(MODEL,), reply_meta=(*MEASURED, PRIVACY))
TRAIN_PART = Phase(
    "train_part",
    request=(TensorSpec("model", template=lambda plan: moving(plan)),),
    reply=(TensorSpec("model", "what of the locally trained model is not at rest, for the weighted mean", lambda plan: moving(plan)),),
    reply_meta=MEASURED,
)
VALIDATE = Phase("validate", request=(GLOBAL,), reply_meta=MEASURED)
DELIVERY = Phase("finalize", request=(GLOBAL,), request_meta=(SELECTED_ROUND.as_optional(),))


@dataclass(frozen=True, config=STRICT)
class FedAvgSiteHyper(SiteHyper):
    """What every algorithm that trains with the task's optimizer has."""

    reset_optimizer: bool = param(False, "start every round with a fresh optimizer; false keeps its moments at the site")


@dataclass(frozen=True, config=STRICT)
class FedAvgHyper(PrivacyHyper, FedAvgSiteHyper):
    """FedAvg's own site algorithm; others inherit `PrivacyHyper` where DP-SGD protects all that they send."""


F = TypeVar("F", bound=FedAvgSiteHyper)


def resting(plan: Plan[Any, Any]) -> LocalPart:
    """What rests in the first rounds, see `TaskConfig.freeze`."""
    return LocalPart.of_paths(plan.network(), plan.task.freeze["parts"])


def moving(plan: Plan[Any, Any]) -> StateDict:
    """Shapes and dtypes of all that does not."""
    return resting(plan).shared(plan.template())


def trained_model(state: StateDict, round: int | None) -> Message:
    """A network as a delivered model.

    Args:
        state: its weights.
        round: rounds of training behind them; None where nobody can say.
    """
    return plain_message(state, **{SELECTED_ROUND: round})


def received(incoming: Message) -> Message:
    """The global model as a delivered one, with the rounds of training behind it where the server says them."""
    return trained_model(incoming.states[GLOBAL], incoming.meta.get(SELECTED_ROUND))


class FedAvgSite(SiteAlgorithm[F]):
    """Trains the incoming global model for the task's local epochs and sends it back."""

    Hyper: ClassVar[type] = FedAvgHyper
    phases: ClassVar[tuple[Phase, ...]] = (TRAIN, TRAIN_PART, VALIDATE)
    delivery: ClassVar[Phase | None] = DELIVERY
    capabilities: ClassVar[frozenset[Capability]] = frozenset({"accumulate", "freeze"})

    def __init__(self, site: Site, plan: Plan[F, Any]):
        super().__init__(site, plan)
        self.optimizers = OptimizerMemory(self.memory)
        if is_private(self.hyper) and self.inside:
            check_private_site(site, self.hyper)

    @classmethod
    def check(cls, task: TaskConfig, hyper: F, server_hyper: Any) -> None:
        """With differential privacy, refuse networks and losses that mix the images of a batch, and parts at rest; see `check_private`.

        Raises:
            ConfigError: one of them.
        """
        if is_private(hyper):
            check_private(task)
            if task.freeze["parts"]:
                raise ConfigError("dp_noise: rounds in which parts of the network rest are not counted; leave out task.freeze")

    def train(self, round: int, incoming: Message) -> Message:
        """Measure the incoming global model, train it (`fit`) and send it back."""
        model = self.network("model", incoming.states[GLOBAL])
        validation = self.validation(model)
        loss = self.optimized(model, "model", lambda optimizer: self.fit(model, optimizer, round))
        cost = self.privacy()
        more = {} if cost is None else {PRIVACY: cost}
        return Message({MODEL: copy_state(model.state_dict())}, self.meta(loss=loss, validation={"global": validation}, **more))

    def train_part(self, round: int, incoming: Message) -> Message:
        """A round in which parts of the network rest: they are those of the common initial model, and do not travel."""
        part, own = resting(self.plan), self.site.network().state_dict()
        state = {**part.kept(copy_state(own)), **incoming.states[GLOBAL]}
        with self.network("model", state).at_rest(self.site.task.freeze["parts"]):
            reply = self.train(round, Message({GLOBAL: state}))
        return Message({MODEL: part.shared(reply.states[MODEL])}, reply.meta)

    def optimized(self, model: nn.Module, purpose: str, train: Callable[[torch.optim.Optimizer], T]) -> T:
        """`train` with the task's optimizer, fresh or with the moments that the last round left; returns its loss.

        Args:
            model: whose trainable parameters are optimized.
            purpose: names the optimizer's moments in the algorithm's memory.
            train: called with the optimizer.
        """
        weights = trainable(model)
        moments = purpose if len(weights) == len(list(model.parameters())) else f"{purpose}/part"  # while parts of the network rest
        optimizer = self.site.optimizer(weights)
        with self.continued({moments: optimizer}):
            return train(optimizer)

    @contextmanager
    def continued(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> Iterator[None]:
        """Training with optimizers, by purpose, that go on with the last round's moments; afresh where `reset_optimizer` says so.

        Args:
            optimizers: purpose -> optimizer; their moments are taken up on entry and kept on leaving.
        """
        kept = {} if self.hyper.reset_optimizer else optimizers
        for purpose, optimizer in kept.items():
            self.optimizers.recall(purpose, optimizer)
        yield
        for purpose, optimizer in kept.items():
            self.optimizers.keep(purpose, optimizer)

    def fit(self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int) -> float | None:
        """One round of local training; the one thing that most local variants change.

        Args:
            model: holds the incoming weights; trained in place.
            optimizer: of its trainable parameters.
            round: 0-based, a key of batches and dropout.

        Returns:
            The mean training loss over all images; None where it stays untold.
        """
        return self.descend(model, optimizer, round)

    def descend(self, model: nn.Module, optimizer: torch.optim.Optimizer, round: int, loss: Loss | None = None) -> float | None:
        """Epochs of the task's loss or of another that is a mean over images; with DP-SGD where asked for, whose loss stays untold.

        Args:
            model: trained in place.
            optimizer: of its trainable parameters.
            round: 0-based, a key of batches and dropout.
            loss: (model, images, targets) -> the mean of the images' losses; None: the task's loss of the model's output.

        Returns:
            The mean loss over all images; None with DP-SGD.
        """
        if is_private(self.hyper):
            train_privately(model, optimizer, self.site, self.account, self.hyper, loss)
            return None
        return train_epochs(model, optimizer, self.site, round, "model", loss=loss)

    def privacy(self) -> dict[str, Any] | None:
        """What DP-SGD has cost so far in this run; None without it."""
        return privacy_cost(self.site, self.account, self.hyper) if is_private(self.hyper) else None

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metric of the incoming global model."""
        return Message({}, self.meta(validation={"global": self.validation(self.network("model", incoming.states[GLOBAL]))}))

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """Global and deployed are the selected global model; it is also all that a site has of its own."""
        return dict.fromkeys(("global", "personal", "deployed"), received(incoming))
