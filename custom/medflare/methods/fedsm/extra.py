"""FedSM-extra and the ensemble (FedSM paper, Sec. 3.1.1 and 3.1.2): the selector learns after the other models are finished.

For the federation's rounds only the global and the personal models are trained; then they are frozen, every site receives all
K + 1 of them, and the selector, now with K + 1 outputs (0 = global), is trained for extra rounds. FedSM-extra labels every
training image with the model of the smallest loss and later takes the most probable model; the ensemble minimises the loss of
the weighted output and later answers with that weighted output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medflare.core.hyper import param
from medflare.core.manifest import Manifest
from medflare.core.message import Message
from medflare.methods.base import Plan, ServerContext, Step
from medflare.methods.fedsm.halves import FedSMHyper, FedSMServer, FedSMSite
from medflare.methods.fedsm.selector import SelectorLoss
from medflare.methods.fedsm.super_model import SuperModel, super_model_parts
from medflare.sites.site import Batch, Site
from medflare.tasks.config import TaskConfig


def ensemble_output(outputs: Tensor, scores: Tensor) -> Tensor:
    """h = Σ_k ŷ_k h_k (Sec. 3.1.1): outputs (N, K+1, ...) weighted by scores (N, K+1), giving (N, ...)."""
    return (outputs * scores.reshape(*scores.shape, *[1] * (outputs.ndim - 2))).sum(dim=1)


def extra_labels(losses: Tensor) -> Tensor:
    """FedSM-extra's label of each image, argmin_k L(h_k, y) over the K + 1 models (Eq. 1): losses (N, K+1) -> (N,).

    Eq. 1 prints L(h, h_k), which cannot be meant: the super model's output h does not exist before its selector does.
    """
    return losses.argmin(dim=1)


@dataclass(frozen=True)
class FedSMExtraHyper(FedSMHyper):
    combine: str = param("extra", "label by the best model, or learn the weighted output", source="Sec. 3.1", choices=("extra", "ensemble"))
    selector_rounds: int = param(50, "extra rounds for the selector", source="Sec. 4", low=1)
    selector_updates: int = param(1, "not used: the selector has rounds of its own", choices=(1,))
    gamma: float | str = param(0.0, "not used: the selector's K + 1 scores include the global model", choices=(0.0,))


class FedSMExtraSite(FedSMSite):
    Hyper: ClassVar[type] = FedSMExtraHyper
    kind = "super_extra"

    def __init__(self, site: Site, hyper: FedSMExtraHyper, sites: tuple[str, ...]):
        super().__init__(site, hyper, sites)
        self.frozen = Message()  # the finished models, as the first selector round brought them

    @classmethod
    def selector_outputs(cls, sites: Sequence[str]) -> int:
        """One score for the global model and one for every site."""
        return len(sites) + 1

    @classmethod
    def outbound(cls, phase: str, plan: Plan) -> Manifest:
        if phase == "train_selector":
            return cls.selector_entries(plan)
        entries = super().outbound(phase, plan)
        return {entry: spec for entry, spec in entries.items() if not entry.startswith("selector")}

    def train_selector(self, round: int, incoming: Message) -> Message:
        if "model" in incoming.states:
            self.frozen = Message({e: s for e, s in incoming.states.items() if not e.startswith("selector_")}, incoming.facts)
        networks, _, _ = super_model_parts(self.site.task, self.frozen, self.selector_outputs(self.sites))
        networks = [network.to(self.site.device) for network in networks]
        loss = self._best_model_loss(networks) if self.hyper.combine == "extra" else self._ensemble_loss(networks)
        states, value = self.selector_round(round, incoming, loss)
        return Message(states, self.facts(loss=value, validation={}))

    @torch.no_grad()
    def _best_model_loss(self, networks: list[nn.Module]) -> SelectorLoss:
        """Cross entropy with each training image's best model; the labels are those of the images without augmentation."""
        losses = []
        for batch in self.site.ordered("train", batch_size=1):
            losses.append(torch.stack([self.site.loss(network(batch.images), batch.targets) for network in networks]))
        labels = extra_labels(torch.stack(losses).cpu())
        return lambda logits, batch: F.cross_entropy(logits, labels[batch.index.cpu()].to(logits.device))

    def _ensemble_loss(self, networks: list[nn.Module]) -> SelectorLoss:
        """The task's loss of the weighted output, through the weights alone."""

        def loss(logits: Tensor, batch: Batch) -> Tensor:
            with torch.no_grad():
                outputs = torch.stack([self.site.task.probabilities(network(batch.images)) for network in networks], dim=1)
            mixed = ensemble_output(outputs, logits.softmax(dim=1)).clamp(1e-6, 1 - 1e-6)
            # the task's loss takes logits: the inverse of its activation gives it back exactly this mixture
            return self.site.loss(mixed.log() if self.site.task.target == "multiclass" else mixed.logit(), batch.targets)

        return loss

    def state(self) -> Message:
        message = super().state()
        message.states |= {f"frozen:{entry}": state for entry, state in self.frozen.states.items()}
        message.facts["frozen"] = self.frozen.facts
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        entries = {e.removeprefix("frozen:"): s for e, s in state.states.items() if e.startswith("frozen:")}
        self.frozen = Message(entries, state.facts["frozen"])


class FedSMExtraServer(FedSMServer):
    Hyper: ClassVar[type] = FedSMExtraHyper
    site_class: ClassVar[type[FedSMSite]] = FedSMExtraSite

    def __init__(self, context: ServerContext, hyper: FedSMExtraHyper):
        super().__init__(context, hyper)
        self.given: set[str] = set()  # sites that hold the frozen models

    def steps(self) -> list[Step]:
        extra = [Step("train_selector", self.context.rounds + i, everyone=True) for i in range(self.hyper.selector_rounds)]
        return [*super().steps(), *extra]

    def outgoing(self, step: Step, site: str) -> Message:
        if step.phase != "train_selector":
            message = super().outgoing(step, site)
            return Message({e: s for e, s in message.states.items() if not e.startswith("selector")}, message.facts)
        models = Message() if site in self.given else super().delivery(site)
        return Message({**models.states, **self.selector}, {**models.facts, "update": 0})

    def accept(self, step: Step, replies: Mapping[str, Message]) -> None:
        if step.phase == "train_selector":
            self.given |= replies.keys()
            self.aggregate_selector(replies)
        else:
            super().accept(step, replies)

    def aggregate_selector(self, replies: Mapping[str, Message]) -> None:
        """Not before the other models are finished."""
        if all(entry.startswith("selector") for reply in replies.values() for entry in reply.states):
            super().aggregate_selector(replies)

    def delivery(self, site: str) -> Message:
        message = super().delivery(site)
        message.facts["combine"] = self.hyper.combine
        message.states["selector"] = self.selector["selector"]  # the last round's: there is no validation label to choose by
        return message

    def state(self) -> Message:
        message = super().state()
        message.facts["given"] = sorted(self.given)
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        self.given = set(state.facts["given"])


class ExtraSuperModel(SuperModel):
    """The most probable of K + 1 models answers each image (extra), or all of them by their scores (ensemble)."""

    def __init__(self, task: TaskConfig, networks: list[nn.Module], selector: nn.Module, names: list[str], combine: str = "extra"):
        super().__init__(task, networks, selector, names, gamma=0.0)
        self.combine = combine

    def choose(self, scores: Tensor) -> Tensor:
        return scores.argmax(dim=1)

    def forward(self, images: Tensor) -> Tensor:
        if self.combine == "extra":
            return super().forward(images)
        scores = self.scores(images)
        self.note(self.choose(scores))
        return self.combined(self.every_answer(images), scores)

    def combined(self, answers: Tensor, scores: Tensor) -> Tensor:
        return ensemble_output(answers, scores) if self.combine == "ensemble" else super().combined(answers, scores)


def extra_super_model(task: TaskConfig, message: Message) -> ExtraSuperModel:
    """The deployed model of FedSM-extra or the ensemble, as told by the fact "combine"."""
    parts = super_model_parts(task, message, outputs=len(message.facts["sites"]) + 1)
    return ExtraSuperModel(task, *parts, combine=message.facts["combine"]).eval()
