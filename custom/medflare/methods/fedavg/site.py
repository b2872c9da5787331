"""FedAvg's site algorithm: trains the incoming global model and sends it back.

Most other site algorithms derive from it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.optim import Optimizer

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.message import FinalModels, Message
from medflare.core.phases import phase
from medflare.core.settings import strict_dataclass
from medflare.core.specs import MetaSpec, TensorSpec, count
from medflare.core.states import StateDict
from medflare.inference.deployed import plain_message
from medflare.methods.base import Plan, SiteAlgorithm, SiteHyper
from medflare.methods.parts.measured import MEASURED
from medflare.methods.parts.partial import LocalPart
from medflare.networks.features import FeatureNetwork, FixedFeatures, copied_state, keeps_features
from medflare.privacy.rounds import PrivacyCost, privacy_cost, train_privately
from medflare.privacy.settings import PrivacyHyper, check_private, check_private_site, is_private
from medflare.tasks.config import TaskConfig
from medflare.training.epochs import Loss, OptimizerMemory, train_epochs, trainable
from medflare.training.graph import Hook
from medflare.training.site import Site

T = TypeVar("T")


def frozen_part(plan: Plan) -> LocalPart:
    """The entries that are frozen in the first rounds, see `TaskConfig.freeze`."""
    return LocalPart.of_paths(plan.network(), plan.task.freeze.parts)


def trainable_part(plan: Plan) -> StateDict:
    """Shapes and dtypes of all other entries."""
    return frozen_part(plan).shared(plan.template())


# Messages of FedAvg and of most other methods.
MODEL = TensorSpec("model", "the site's locally trained model, for the weighted mean")
MODEL_PART = TensorSpec(
    "model",
    "the trainable part of the locally trained model, for the weighted mean",
    trainable_part,
    rest="initial",
)
PRIVACY = MetaSpec[dict[str, Any]](
    "privacy", "privacy cost of the run so far, with DP-SGD", PrivacyCost, public=True
)
SELECTED_ROUND = MetaSpec[int | None](
    "selected_round", "rounds of training behind a model", count(optional=True), public=True
)


@strict_dataclass
class FedAvgSiteHyper(SiteHyper):
    """Hyper-parameters of every site algorithm that trains with the task's optimizer."""

    reset_optimizer: bool = param(
        False, "start every round with a fresh optimizer; false keeps its moments at the site"
    )

    def passes(self, local_epochs: int) -> int:
        """Epochs of the shared model in a round of a task with so many local epochs."""
        return local_epochs


@strict_dataclass
class FedAvgHyper(PrivacyHyper, FedAvgSiteHyper):
    """FedAvg's own hyper-parameters.

    Other methods inherit `PrivacyHyper` too if DP-SGD protects all that they send.
    """


F = TypeVar("F", bound=FedAvgSiteHyper)


def trained_model(state: StateDict, rounds_trained: int | None) -> Message:
    """A final model: a network's weights and its number of rounds trained, None if unknown."""
    model = plain_message(state)
    model[SELECTED_ROUND] = rounds_trained
    return model


def received(incoming: Message) -> Message:
    """The incoming global model as a final model."""
    return trained_model(incoming[MODEL], incoming.get(SELECTED_ROUND))


def final_models(incoming: Message, personal: Message | None) -> FinalModels:
    """The final models: the incoming global one and, where there is one, the site's personal model,
    which the site then deploys.
    """
    shared = received(incoming)
    if personal is None:
        return {"global": shared, "deployed": shared}
    return {"global": shared, "personal": personal, "deployed": personal}


class FedAvgSite(SiteAlgorithm[F]):
    """Trains the incoming global model for the task's local epochs and sends it back.

    `train` calls `fit`, which calls `descend` with `round_loss` and `round_hook`.
    """

    # Has the settings of DP-SGD, which a subclass without hyper-parameters of its own inherits.
    Hyper: ClassVar[type] = FedAvgHyper
    accumulates = True
    freezes = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.freezes:
            del cls.phases["train_part"]

    def __init__(self, site: Site, plan: Plan[F, Any]):
        super().__init__(site, plan)
        self.optimizers = OptimizerMemory(self.memory)
        self._fixed: FixedFeatures | None = None
        if keeps_features(plan.task, site.device):
            self._fixed = FixedFeatures()
        if is_private(self.hyper) and self.inside:
            check_private_site(site, self.hyper)

    @classmethod
    def check(cls, task: TaskConfig, hyper: F, server_hyper: Any) -> None:
        """Raises ConfigError if DP-SGD cannot be used with the task (see `check_private`), or
        frozen rounds are combined with it.
        """
        if not is_private(hyper):
            return
        check_private(task)
        if task.freeze.parts:
            raise ConfigError(
                "dp_noise: rounds with frozen parts of the network are not counted; "
                "leave out task.freeze"
            )

    @phase(request=(MODEL,), reply=(MODEL,), meta=(*MEASURED, PRIVACY.as_optional()))
    def train(self, round: int, incoming: Message) -> Message:
        """Validate the incoming global model, train it (`fit`) and send it back."""
        model = self.network("model", incoming[MODEL])
        validation = self.validation(model)
        loss = self.optimized(model, "model", lambda optimizer: self.fit(model, optimizer, round))
        trained = copied_state(model)
        reply = self.reply({MODEL: trained}, loss=loss, validation={"global": validation})
        cost = self.privacy()
        if cost is not None:
            reply[PRIVACY] = cost
        return reply

    @phase(request=(MODEL_PART,), reply=(MODEL_PART,), meta=MEASURED)
    def train_part(self, round: int, incoming: Message) -> Message:
        """A round with frozen parts, which are those of the common initial model and do not
        travel.
        """
        part = frozen_part(self.plan)
        whole = {**part.local(copied_state(self.site.network())), **incoming[MODEL_PART]}
        network = self.network("model", whole)
        with network.frozen(self.site.task.freeze.parts, self._fixed):
            reply = self.train(round, Message.of({MODEL: whole}))
        reply[MODEL_PART] = part.shared(reply[MODEL])
        return reply

    def optimized(self, model: nn.Module, purpose: str, train: Callable[[Optimizer], T]) -> T:
        """Returns `train(optimizer)` with the task's optimizer of the model's trainable parameters,
        whose moments are `continued`.

        Args:
            purpose: names the optimizer's moments in the algorithm's memory.
        """
        weights = trainable(model)
        if len(weights) < len(list(model.parameters())):  # parts of the network are frozen
            purpose = f"{purpose}/part"
        optimizer = self.site.optimizer(weights)
        with self.continued({purpose: optimizer}):
            return train(optimizer)

    def train_model(
        self, model: nn.Module, round: int, purpose: str, gradient_hook: Hook | None = None
    ) -> float:
        """Epochs of the task's loss with the optimizer of this purpose, see `optimized`."""
        return self.optimized(
            model,
            purpose,
            lambda optimizer: train_epochs(
                model, optimizer, self.site, round, purpose, gradient_hook=gradient_hook
            ),
        )

    @contextmanager
    def continued(self, optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
        """Within the context, optimizers (by purpose) continue with the last round's moments, which
        are stored at its end; `reset_optimizer` switches both off.
        """
        if self.hyper.reset_optimizer:
            yield
            return
        for purpose, optimizer in optimizers.items():
            self.optimizers.recall(purpose, optimizer)
        yield
        for purpose, optimizer in optimizers.items():
            self.optimizers.keep(purpose, optimizer)

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        """One round of local training in place; most local variants override this.

        Args:
            model: holds the incoming weights.
            optimizer: of its trainable parameters.
            round: 0-based, a key of batches and dropout.

        Returns:
            The mean training loss over all images; None if it is not reported.
        """
        loss = self.round_loss(model, round)
        return self.descend(model, optimizer, round, loss, self.round_hook(model, round))

    def round_loss(self, model: FeatureNetwork, round: int) -> Loss | None:
        """The loss of a round's batches, see `descend`; arguments as of `fit`."""
        return None

    def round_hook(self, model: FeatureNetwork, round: int) -> Hook | None:
        """The hook that changes a round's gradients in place, see `descend`; arguments as of
        `fit`.
        """
        return None

    def descend(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        round: int,
        loss: Loss | None = None,
        gradient_hook: Hook | None = None,
    ) -> float | None:
        """Epochs of the task's loss, or of another one that is a mean over images, with DP-SGD if
        it is set.

        Args:
            model: trained in place.
            optimizer: of its trainable parameters.
            round: 0-based, a key of batches and dropout.
            loss: (model, images, targets) -> mean loss of the images; None: the task's loss of the
                model's output.
            gradient_hook: see `train_epochs`; refused with DP-SGD.

        Returns:
            The mean loss over all images; None with DP-SGD.
        """
        if not is_private(self.hyper):
            return train_epochs(
                model, optimizer, self.site, round, "model", loss=loss, gradient_hook=gradient_hook
            )
        if gradient_hook is not None:
            raise ConfigError("dp_noise: DP-SGD does not call this method's gradient hook")
        train_privately(model, optimizer, self.site, self.account, self.hyper, loss)
        return None

    def privacy(self) -> dict[str, Any] | None:
        """The privacy cost of this run so far; None without DP-SGD."""
        if not is_private(self.hyper):
            return None
        return privacy_cost(self.site, self.account, self.hyper)

    @phase(request=(MODEL,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metric of the incoming global model."""
        value = self.validation(self.network("model", incoming[MODEL]))
        return self.reply(validation={"global": value})

    @phase(request=(MODEL,), request_meta=(SELECTED_ROUND.as_optional(),))
    def finalize(self, incoming: Message) -> FinalModels:
        """The selected global model in all roles."""
        return dict.fromkeys(("global", "personal", "deployed"), received(incoming))
