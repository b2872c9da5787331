"""Test-time training (Sun et al., ICML 2020), trained with FedAvg: every batch has the task's loss
and that of a rotation head, both with weight 1; the head is averaged as the model.

The formulas and the adaptation are in `adaptation.ttt`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from medflare.adaptation.registry import with_adaptation
from medflare.adaptation.ttt import ROTATION, rotation_head, rotation_loss
from medflare.core.message import Message
from medflare.core.phases import asks, phase
from medflare.core.rng import torch_generator
from medflare.core.specs import TensorSpec
from medflare.core.states import StateDict, copy_state
from medflare.methods.aggregation import site_models
from medflare.methods.base import PersistentState, ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServer, FedAvgServerHyper
from medflare.methods.fedavg.site import (
    MODEL,
    SELECTED_ROUND,
    FedAvgSite,
    FedAvgSiteHyper,
    received,
)
from medflare.methods.parts.measured import MEASURED
from medflare.networks.features import FeatureNetwork
from medflare.training.epochs import train_epochs

HEAD = TensorSpec(
    ROTATION,
    "head that says how far an image was turned, for the weighted mean",
    lambda plan: rotation_head(plan.task).state_dict(),
)


class TTTSite(FedAvgSite[FedAvgSiteHyper]):
    """FedAvg's site algorithm with a rotation head; the deployed model adapts itself."""

    accumulates = False
    freezes = False
    dp_unsupported_reason = "the rotation head learns without noise"
    uses_features = True
    head: nn.Linear  # of the round, set by `train`

    @phase(request=(MODEL, HEAD), reply=(MODEL, HEAD), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training with both losses; the reply holds model and head."""
        self.head = rotation_head(self.site.task).to(self.site.device)
        self.head.load_state_dict(incoming[HEAD])
        reply = super().train(round, incoming)
        reply[HEAD] = copy_state(self.head.state_dict())
        return reply

    def fit(
        self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int
    ) -> float | None:
        """Epochs of both losses; returns the mean of their sum."""
        second = self.site.optimizer(self.head.parameters())
        random = torch_generator(self.site.seed, self.site.name, round, "turns")

        def loss(network: Any, images: Tensor, targets: Tensor) -> Tensor:
            turns = torch.randint(self.head.out_features, (len(images),), generator=random)
            rotation = rotation_loss(network, self.head, images, turns)
            return self.site.loss(network(images), targets) + rotation

        def step_of_head() -> None:
            second.step()
            second.zero_grad(set_to_none=True)

        with self.continued({ROTATION: second}):
            return train_epochs(
                model, optimizer, self.site, round, "model", loss=loss, gradient_hook=step_of_head
            )

    @phase(request=(MODEL, HEAD), request_meta=(SELECTED_ROUND.as_optional(),))
    def finalize(self, incoming: Message) -> dict[str, Message]:
        """The selected global model with its head; deployed is the same, adapted by `ttt`."""
        shared = received(incoming)
        shared[HEAD] = incoming[HEAD]
        return {"global": shared, "personal": shared, "deployed": with_adaptation(shared, "ttt")}


class TTTServer(FedAvgServer[FedAvgServerHyper]):
    """FedAvg's server algorithm; it averages the head as the model."""

    site_algorithm = TTTSite
    freezes = False
    head = PersistentState("head")
    best_head = PersistentState("best_head")  # of the selected round

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.head = copy_state(rotation_head(context.task).state_dict())

    @asks(TTTSite.train)
    def request_of_both(self, step: Step, site: str) -> Message:
        """The global model and its head."""
        message = self.request_of_model(step, site)
        message[HEAD] = self.head
        return message

    def aggregate_models(self, step: Step, replies: Mapping[str, Message]) -> None:
        super().aggregate_models(step, replies)
        models = site_models(replies, HEAD)
        self.head = self.aggregation.shared(models, step.round, self.head)

    def select_model(self, step: Step, replies: Mapping[str, Message]) -> None:
        """As of FedAvg; the head of the selected round stays with it."""
        super().select_model(step, replies)
        if self.best.round == step.round:
            self.best_head = self.head

    def configure_final(self, site: str) -> Message:
        message = super().configure_final(site)
        message[HEAD] = self._selected_head
        return message

    def models(self) -> dict[str, Message]:
        models = super().models()
        for model in models.values():
            model[HEAD] = self._selected_head
        return models

    @property
    def _selected_head(self) -> StateDict:
        if "global" in self.model_selectors() and self.best_head is not None:
            return self.best_head
        return self.head
