"""Test-time training (Sun et al., ICML 2020), trained with FedAvg: every batch has the task's loss
and that of a rotation head, both with weight 1; the head is averaged as the model.

The formulas and the adaptation are in `adaptation.ttt`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medflare.adaptation.registry import with_adaptation
from medflare.adaptation.ttt import ROTATION, rotation_head, rotation_loss
from medflare.core.message import FinalModels
from medflare.methods import (
    MEASURED,
    MODEL,
    SELECTED_ROUND,
    FeatureNetwork,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSite,
    FedAvgSiteHyper,
    Message,
    PersistentState,
    Replies,
    ServerContext,
    StateDict,
    Step,
    TensorSpec,
    asks,
    copied_state,
    phase,
    received,
    site_models,
    torch_generator,
    train_epochs,
)

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
        reply[HEAD] = copied_state(self.head)
        return reply

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        """Epochs of both losses; returns the mean of their sum."""
        second = self.site.optimizer(self.head.parameters())
        random = torch_generator(self.site.seed, self.site.name, round, "turns")

        def loss(network: Any, images: Tensor, targets: Tensor) -> Tensor:
            turns = torch.randint(self.head.out_features, (len(images),), generator=random)
            rotation = rotation_loss(network, self.head, images, turns)
            return self.site.loss(network(images), targets) + rotation

        def step_of_head() -> None:
            second.step()
            second.zero_grad()

        with self.continued({ROTATION: second}):
            return train_epochs(
                model, optimizer, self.site, round, "model", loss=loss, gradient_hook=step_of_head
            )

    @phase(request=(MODEL, HEAD), request_meta=(SELECTED_ROUND.as_optional(),))
    def finalize(self, incoming: Message) -> FinalModels:
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
        self.head = copied_state(rotation_head(context.task))

    @asks(TTTSite.train)
    def request_of_both(self, step: Step, site: str) -> Message:
        """The global model and its head."""
        message = self.request_of_model(step, site)
        message[HEAD] = self.head
        return message

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        super().aggregate_models(step, replies)
        self.head = self.aggregation.shared(site_models(replies, HEAD), step.round, self.head)

    def select_model(self, step: Step, replies: Replies) -> None:
        """Enter the model in the selection as FedAvg; the head of the selected round stays with
        it.
        """
        super().select_model(step, replies)
        if self.best.round == step.round:
            self.best_head = self.head

    def configure_final(self, site: str) -> Message:
        message = super().configure_final(site)
        message[HEAD] = self._selected_head
        return message

    def models(self) -> FinalModels:
        models = super().models()
        for model in models.values():
            model[HEAD] = self._selected_head
        return models

    @property
    def _selected_head(self) -> StateDict:
        if "global" in self.model_selectors() and self.best_head is not None:
            return self.best_head
        return self.head
