"""FedSM-extra and the ensemble (FedSM paper, Sec. 3.1.1 and 3.1.2): the selector is trained after the other models.

The federation's rounds train the global and the personal models; then these are frozen, every site receives all K + 1 of them, and a
selector with K + 1 outputs (0 = global) is trained for extra rounds. FedSM-extra labels every training image with the model of the
smallest loss and deploys the most probable model; the ensemble minimises the loss of the weighted output and deploys this output.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from medflare.core.errors import ConfigError, StateError
from medflare.core.hyper import param
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, text
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.data.loading import Batch
from medflare.methods.aggregation import Aggregation
from medflare.methods.base import MEASURED, Capability, Plan, ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import FedAvgSite
from medflare.methods.fedsm.formulas import ensemble_output, extra_labels
from medflare.methods.fedsm.personalization import (
    ADAPTED,
    LOSSES,
    META,
    PERSONAL,
    PERSONAL_OF,
    PersonalServerHyper,
    PersonalSiteHyper,
    ServerPersonal,
    SitePersonal,
)
from medflare.methods.fedsm.selector import SelectorLoss, ServerSelector, SiteSelector, selector_entries
from medflare.methods.fedsm.server import SoftPull, members, with_members
from medflare.methods.fedsm.site import GLOBAL, MODEL, SUPER, UPDATE, delivered_models, other_super_model
from medflare.methods.fedsm.super_model import SuperModel, super_model_parts
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

_FROZEN = TensorSpec("frozen/")  # the frozen models in a site's memory
_COMBINE = MetaSpec("combine", "whether one model answers, or all by their scores", text("extra", "ensemble"))
_SELECTOR, _SENT, _GRADIENT = selector_entries(lambda plan: len(plan.sites) + 1)  # one score for the global model and one for every site


@dataclass(frozen=True, config=STRICT)
class FedSMExtraSiteHyper(PersonalSiteHyper):
    """The site of FedSM-extra and the ensemble."""

    selector: Literal["auto", "compact_selector", "vgg11"] = param(
        "auto", "trained selector; auto: VGG-11 or, where that is larger than the task's network, the compact one"
    )
    combine: Literal["extra", "ensemble"] = param("extra", "label by the best model, or learn the weighted output", source="Sec. 3.1")


@dataclass(frozen=True, config=STRICT)
class FedSMExtraServerHyper(PersonalServerHyper):
    """The server of FedSM-extra and the ensemble; their K + 1 scores include the global model, so there is no γ."""

    selector_rounds: int = param(50, "extra rounds for the selector", source="Sec. 4", low=1)


class FedSMExtraSite(FedAvgSite[FedSMExtraSiteHyper]):
    """Trains the global and the personal model, then the selector alone."""

    Hyper: ClassVar[type] = FedSMExtraSiteHyper
    server_hyper: ClassVar[type] = FedSMExtraServerHyper
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase("train", request=(GLOBAL, PERSONAL, META), reply=(MODEL, PERSONAL, META), reply_meta=(*MEASURED, LOSSES)),
        Phase("validate", request=(GLOBAL, PERSONAL, META), reply=(ADAPTED,), reply_meta=MEASURED),
        Phase(
            "train_selector",
            request=(GLOBAL.as_optional(), PERSONAL_OF, _SENT),
            reply=(_GRADIENT,),
            request_meta=(*(item.as_optional() for item in (*SUPER, _COMBINE)), UPDATE),  # the frozen models come once
            reply_meta=MEASURED,
        ),
    )
    delivery: ClassVar[Phase | None] = Phase("finalize", request=(GLOBAL, PERSONAL_OF, _SELECTOR), request_meta=(*SUPER, _COMBINE))

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    dp_unsupported_reason = "the selector's gradient leaves the site without noise"

    def __init__(self, site: Site, plan: Plan[FedSMExtraSiteHyper, Any]):
        super().__init__(site, plan)
        self.personal = SitePersonal(self)
        self.selector = SiteSelector(self, len(plan.sites) + 1)

    @classmethod
    def check(cls, task: TaskConfig, hyper: FedSMExtraSiteHyper, server_hyper: Any) -> None:
        """Raises ConfigError for labels of whole images (combine "extra") if the selector reads patches."""
        super().check(task, hyper, server_hyper)
        if hyper.combine == "extra" and task.image_mode == "patch":
            raise ConfigError(
                "fedsm_extra: combine=extra labels whole images, image_mode 'patch' has none; set combine=ensemble, or take fedsm"
            )

    def validate_request(self, incoming: Message) -> str | None:
        """Refuses a super model of other sites, or with another selector, than the plan's."""
        return other_super_model(self.plan, incoming)

    def train(self, round: int, incoming: Message) -> Message:
        """Global and personal model."""
        return self.personal.train(round, incoming, super().train(round, incoming))

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming models."""
        return self.personal.validate(round, incoming, super().validate(round, incoming))

    def train_selector(self, round: int, incoming: Message) -> Message:
        """A round of the selector alone. The frozen models come with its first message; the site keeps them or the labels by them."""
        labelled = self.hyper.combine == "extra"
        if GLOBAL in incoming.states:
            models = {entry: state for entry, state in incoming.states.items() if not entry.startswith("selector_")}
            if labelled:
                self.memory.meta["labels"] = self._labels(self._networks_of(Message(models, incoming.meta)))
            else:
                self.memory.states |= {_FROZEN.of(entry): state for entry, state in models.items()}
                self.memory.meta["frozen"] = incoming.meta
        if ("labels" if labelled else "frozen") not in self.memory.meta:
            raise StateError(f"site {self.site.name}: the selector cannot be trained before the finished models have come")
        if labelled:
            loss = self._best_model_loss()
        else:
            loss = self._ensemble_loss(self._networks_of(Message(_FROZEN.family(self.memory.states), self.memory.meta["frozen"])))
        states, value = self.selector.gradient(round, incoming, loss)
        return Message(states, self.meta(loss=value, validation={}))

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """The global model, this site's personal model (inside), and the super model."""
        return delivered_models(self.site.name, incoming, "super_extra")

    def _networks_of(self, models: Message) -> list[nn.Module]:
        networks, _, _ = super_model_parts(self.site.task, models, self.selector.outputs)
        return [network.to(self.site.device) for network in networks]

    @torch.no_grad()
    def _labels(self, networks: list[nn.Module]) -> list[int]:
        """Each training image's best model, computed once: the models are frozen and the images are not augmented."""
        losses = []
        for images, targets, _ in self.site.ordered("train"):
            outputs = [network(images) for network in networks]
            for row in range(len(images)):
                losses.append(torch.stack([self.site.loss(output[row : row + 1], targets[row : row + 1]) for output in outputs]))
        return extra_labels(torch.stack(losses).cpu()).tolist()

    def _best_model_loss(self) -> SelectorLoss:
        """Cross entropy with each training image's best model."""
        labels = torch.tensor(self.memory.meta["labels"])
        return lambda logits, batch: F.cross_entropy(logits, labels[batch.index.cpu()].to(logits.device))

    def _ensemble_loss(self, networks: list[nn.Module]) -> SelectorLoss:
        """The task's loss of the weighted output; gradients flow through the scores only."""

        def loss(logits: Tensor, batch: Batch) -> Tensor:
            with torch.no_grad():
                outputs = torch.stack([self.site.task.probabilities(network(batch.images)) for network in networks], dim=1)
            mixed = ensemble_output(outputs, logits.softmax(dim=1)).clamp(1e-6, 1 - 1e-6)
            # the task's loss takes logits: the inverse of its activation
            return self.site.loss(mixed.log() if self.site.task.target == "multiclass" else mixed.logit(), batch.targets)

        return loss


class FedSMExtraServer(FedAvgServer[FedSMExtraServerHyper]):
    """The selector's rounds come after the federation's; a site is sent the frozen models once."""

    Hyper: ClassVar[type] = FedSMExtraServerHyper
    site_hyper: ClassVar[type] = FedSMExtraSiteHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = SoftPull
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.personal = ServerPersonal(context, self.memory, self.model)
        self.selector = ServerSelector(context, self.memory, len(context.sites) + 1)

    def steps(self) -> list[Step]:
        """FedSM's rounds without a selector, then `selector_rounds` of the selector alone."""
        extra = [Step("train_selector", self.context.rounds + i, everyone=True) for i in range(self.hyper.selector_rounds)]
        return [*super().steps(), *extra]

    @property
    def _sites_with_models(self) -> list[str]:
        """Sites that have the frozen models."""
        return self.memory.meta.get("sites_with_models", [])

    def configure(self, step: Step, site: str) -> Message:
        """The site's models; in the selector's rounds the selector, and the frozen models if the site does not have them yet."""
        if step.phase != "train_selector":
            return Message({**super().configure(step, site).states, **self.personal.sent(site)})
        models = Message() if site in self._sites_with_models else self.configure_final(site)
        return Message({**models.states, **self.selector.sent}, {**models.meta, UPDATE: 0})

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """The next models, or the next selector."""
        if step.phase == "train_selector":
            self.memory.meta["sites_with_models"] = sorted({*self._sites_with_models, *replies})
            self.selector.step(replies)
        else:
            super().aggregate(step, replies)
            self.personal.aggregate(step, replies, self.aggregation)

    def configure_final(self, site: str) -> Message:
        """The whole super model, and how it combines its members."""
        message = with_members(super().configure_final(site), self.context, self.personal, self.selector.state)
        message.meta[_COMBINE] = self.context.plan.site_hyper.combine
        return message

    def models(self) -> dict[str, Message]:
        """The global model, every site's personal one, and the super model as "deployed"."""
        return {**super().models(), **members(self.configure_final(self.context.sites[0]), self.context, "super_extra")}


class ExtraSuperModel(SuperModel):
    """The most probable of K + 1 models predicts each image (combine "extra"), or all of them by their scores ("ensemble").

    The selector gives logits (N, K + 1); other arguments as of `SuperModel`.
    """

    def __init__(self, task: TaskConfig, networks: list[nn.Module], selector: nn.Module, names: list[str], combine: str = "extra"):
        super().__init__(task, networks, selector, names, gamma=0.0)
        self.combine = combine

    def choose(self, scores: Tensor) -> Tensor:
        """The most probable model (N,)."""
        return scores.argmax(dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to probabilities."""
        if self.combine == "extra":
            return super().forward(images)
        scores = self.scores(images)
        self.note(self.choose(scores), scores)
        return self.combined(self.every_answer(images), scores)

    def combined(self, answers: Tensor, scores: Tensor) -> Tensor:
        """The chosen prediction, or the mean of all (N, K + 1, ...) weighted by the scores (N, K + 1)."""
        return ensemble_output(answers, scores) if self.combine == "ensemble" else super().combined(answers, scores)


def extra_super_model(task: TaskConfig, message: Message) -> ExtraSuperModel:
    """The deployed model of FedSM-extra or the ensemble, by the metadata item "combine"."""
    parts = super_model_parts(task, message, outputs=len(message.meta["sites"]) + 1)
    return ExtraSuperModel(task, *parts, combine=message.meta["combine"]).eval()
