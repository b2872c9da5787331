"""FedSM-extra and the ensemble (FedSM paper, Sec. 3.1.1 and 3.1.2): the selector is trained last.

The federation's rounds train the global and the personal models; then these are frozen, every site
receives all K + 1 of them, and a selector with K + 1 outputs (0 = global) is trained for extra
rounds. FedSM-extra labels every training image with the model of the smallest loss and deploys the
most probable model; the ensemble minimises the loss of the weighted output and deploys this output.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from medflare.core.errors import ConfigError, StateError
from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.phases import asks, handles, phase
from medflare.core.settings import STRICT
from medflare.core.specs import MetaSpec, TensorSpec, text
from medflare.core.states import StateDict
from medflare.data.loading import Batch
from medflare.methods.aggregation import Aggregation
from medflare.methods.base import Plan, ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import MODEL, FedAvgSite
from medflare.methods.fedsm.formulas import ensemble_output, extra_labels
from medflare.methods.fedsm.personalization import (
    ADAPTED,
    LOSSES,
    META,
    PERSONAL,
    PERSONALS,
    PersonalServerHyper,
    PersonalSiteHyper,
    ServerPersonal,
    SitePersonal,
    SoftPull,
)
from medflare.methods.fedsm.selector import (
    UPDATE,
    SelectorEntries,
    SelectorLoss,
    ServerSelector,
    SiteSelector,
)
from medflare.methods.fedsm.server import add_members, members
from medflare.methods.fedsm.site import SUPER, TRAINED_GLOBAL, delivered_models, other_super_model
from medflare.methods.fedsm.super_model import CLASSES, SuperModel, super_model_parts
from medflare.methods.parts.measured import MEASURED
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

FROZEN = TensorSpec("frozen")  # the frozen models in a site's memory
COMBINE = MetaSpec[str](
    "combine", "whether one model answers, or all by their scores", text("extra", "ensemble")
)
# One score for the global model and one for every site.
OF_ALL = SelectorEntries(lambda plan: len(plan.sites) + 1)
SUPER_MODEL = (MODEL, PERSONALS, OF_ALL.weights)
MODELS = (MODEL, PERSONAL, META)
# The frozen models come once.
FROZEN_MODELS = (MODEL.as_optional(), PERSONALS, OF_ALL.trained)
FROZEN_META: tuple[MetaSpec[Any], ...] = tuple(item.as_optional() for item in (*SUPER, COMBINE))


@dataclass(frozen=True, config=STRICT)
class FedSMExtraSiteHyper(PersonalSiteHyper):
    """The site of FedSM-extra and the ensemble."""

    selector: Literal["auto", "compact_selector", "vgg11"] = param(
        "auto",
        "trained selector; auto: VGG-11 or, where that is larger than the task's network, "
        "the compact one",
    )
    combine: Literal["extra", "ensemble"] = param(
        "extra", "label by the best model, or learn the weighted output", source="Sec. 3.1"
    )


@dataclass(frozen=True, config=STRICT)
class FedSMExtraServerHyper(PersonalServerHyper):
    """The server of FedSM-extra and the ensemble.

    Their K + 1 scores include the global model, so there is no γ.
    """

    selector_rounds: int = param(50, "extra rounds for the selector", source="Sec. 4", low=1)


class FedSMExtraSite(FedAvgSite[FedSMExtraSiteHyper]):
    """Trains the global and the personal model, then the selector alone."""

    server_hyper: ClassVar[type] = FedSMExtraServerHyper
    accumulates = False
    freezes = False
    dp_unsupported_reason = "the selector's gradient leaves the site without noise"

    def __init__(self, site: Site, plan: Plan[FedSMExtraSiteHyper, Any]):
        super().__init__(site, plan)
        self.personal = SitePersonal(self)
        self.selector = SiteSelector(self, OF_ALL)

    @classmethod
    def check(cls, task: TaskConfig, hyper: FedSMExtraSiteHyper, server_hyper: Any) -> None:
        """Also raises ConfigError for labels of whole images if the selector reads patches.

        Those are the labels of combine "extra".
        """
        super().check(task, hyper, server_hyper)
        if hyper.combine == "extra" and task.image_mode == "patch":
            raise ConfigError(
                "fedsm_extra: combine=extra labels whole images, image_mode 'patch' has none; "
                "set combine=ensemble, or take fedsm"
            )

    def validate_request(self, incoming: Message) -> str | None:
        """Refuses a super model of other sites, or with another selector, than the plan's."""
        return other_super_model(self.plan, incoming)

    @phase(request=MODELS, reply=(TRAINED_GLOBAL, PERSONAL, META), meta=(*MEASURED, LOSSES))
    def train(self, round: int, incoming: Message) -> Message:
        """Global and personal model."""
        reply = super().train(round, incoming)
        self.personal.train(round, incoming, reply)
        return reply

    @phase(request=MODELS, reply=(ADAPTED,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming models."""
        reply = super().validate(round, incoming)
        self.personal.validate(round, incoming, reply)
        return reply

    @phase(
        request=FROZEN_MODELS,
        request_meta=(*FROZEN_META, UPDATE),
        reply=(OF_ALL.gradient,),
        meta=MEASURED,
    )
    def train_selector(self, round: int, incoming: Message) -> Message:
        """A round of the selector alone.

        The frozen models come with its first message; the site keeps them or the labels by them.
        """
        if MODEL in incoming:
            self._keep(incoming)
        gradient, value = self.selector.gradient(round, incoming, self._selector_loss())
        reply = Message.of(self.measured(loss=value, validation={}))
        reply[OF_ALL.gradient] = gradient
        return reply

    def _keep(self, incoming: Message) -> None:
        """Store the frozen models, or each image's best one."""
        models: dict[str, StateDict] = {}
        for entry, state in incoming.states.items():
            if not entry.startswith("selector_"):
                models[entry] = state
        if self.hyper.combine == "extra":
            networks = self._networks_of(Message(models, incoming.meta))
            self.memory.meta["labels"] = self._labels(networks)
        else:
            for entry, state in models.items():
                self.memory[FROZEN.member(entry)] = state
            self.memory.meta["frozen"] = incoming.meta

    def _selector_loss(self) -> SelectorLoss:
        labelled = self.hyper.combine == "extra"
        kept = "labels" if labelled else "frozen"
        if kept not in self.memory.meta:
            raise StateError(
                f"site {self.site.name}: the selector cannot be trained before the finished models "
                "have come"
            )
        if labelled:
            return self._best_model_loss()
        models = Message(self.memory.family(FROZEN), self.memory.meta["frozen"])
        return self._ensemble_loss(self._networks_of(models))

    @phase(request=SUPER_MODEL, request_meta=(*SUPER, COMBINE))
    def finalize(self, incoming: Message) -> dict[str, Message]:
        """The global model, this site's personal model (inside), and the super model."""
        return delivered_models(self.site.name, incoming, "super_extra")

    def _networks_of(self, models: Message) -> list[nn.Module]:
        networks, _, _ = super_model_parts(self.site.task, models, self.selector.outputs)
        return [network.to(self.site.device) for network in networks]

    @torch.no_grad()
    def _labels(self, networks: list[nn.Module]) -> list[int]:
        """Each training image's best model.

        Computed once: the models are frozen and the images are not augmented.
        """
        losses: list[Tensor] = []
        for images, targets, _ in self.site.ordered("train"):
            outputs = [network(images) for network in networks]
            for row in range(len(images)):
                target = targets[row : row + 1]
                of_image = [self.site.loss(output[row : row + 1], target) for output in outputs]
                losses.append(torch.stack(of_image))
        return extra_labels(torch.stack(losses).cpu()).tolist()

    def _best_model_loss(self) -> SelectorLoss:
        """Cross entropy with each training image's best model."""
        labels = torch.tensor(self.memory.meta["labels"])

        def loss(logits: Tensor, batch: Batch) -> Tensor:
            return F.cross_entropy(logits, labels[batch.index.cpu()].to(logits.device))

        return loss

    def _ensemble_loss(self, networks: list[nn.Module]) -> SelectorLoss:
        """The task's loss of the weighted output; gradients flow through the scores only."""
        task = self.site.task

        def loss(logits: Tensor, batch: Batch) -> Tensor:
            with torch.no_grad():
                answers = [task.probabilities(network(batch.images)) for network in networks]
                outputs = torch.stack(answers, dim=1)
            mixed = ensemble_output(outputs, logits.softmax(dim=1)).clamp(1e-6, 1 - 1e-6)
            # The task's loss takes logits: the inverse of its activation.
            inverse = mixed.log() if task.target == "multiclass" else mixed.logit()
            return self.site.loss(inverse, batch.targets)

        return loss


class FedSMExtraServer(FedAvgServer[FedSMExtraServerHyper]):
    """The selector's rounds come after the federation's; a site is sent the frozen models once."""

    site_algorithm = FedSMExtraSite
    aggregation_class: ClassVar[type[Aggregation[Any]]] = SoftPull
    freezes = False

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.personal = ServerPersonal(context, self.memory, self.model)
        self.selector = ServerSelector(context, self.memory, OF_ALL)

    def steps(self) -> list[Step]:
        """FedSM's rounds without a selector, then `selector_rounds` of the selector alone."""
        steps = super().steps()
        first = self.context.rounds
        for round in range(first, first + self.hyper.selector_rounds):
            steps.append(Step.of(FedSMExtraSite.train_selector, round, everyone=True))
        return steps

    def request_of_model(self, step: Step, site: str) -> Message:
        """The global and the site's personal model."""
        message = super().request_of_model(step, site)
        self.personal.add_request(site, message)
        return message

    def select_model(self, step: Step, replies: Mapping[str, Message]) -> None:
        """The measured models are candidates."""
        super().select_model(step, replies)
        self.personal.validated(step, replies)

    def aggregate_models(self, step: Step, replies: Mapping[str, Message]) -> None:
        """The next global and personal models."""
        super().aggregate_models(step, replies)
        self.personal.trained(step, replies, self.aggregation)

    @property
    def _sites_with_models(self) -> list[str]:
        """Sites that have the frozen models."""
        return self.memory.meta.get("sites_with_models", [])

    @asks(FedSMExtraSite.train_selector)
    def request_of_selector(self, step: Step, site: str) -> Message:
        """The selector, and the frozen models if the site does not have them yet."""
        message = Message()
        if site not in self._sites_with_models:
            message = self.configure_final(site)
        self.selector.add_request(message)
        message[UPDATE] = 0
        return message

    @handles(FedSMExtraSite.train_selector)
    def step_selector(self, step: Step, replies: Mapping[str, Message]) -> None:
        """The next selector."""
        self.memory.meta["sites_with_models"] = sorted({*self._sites_with_models, *replies})
        self.selector.step(replies)

    def configure_final(self, site: str) -> Message:
        """The whole super model, and how it combines its members."""
        message = super().configure_final(site)
        add_members(message, self.context, self.personal, OF_ALL, self.selector.state)
        message[COMBINE] = self.context.plan.site_hyper.combine
        return message

    def models(self) -> dict[str, Message]:
        """The global model, every site's personal one, and the super model as "deployed"."""
        whole = self.configure_final(self.context.sites[0])
        return {**super().models(), **members(whole, self.context, "super_extra")}


class ExtraSuperModel(SuperModel):
    """The most probable of K + 1 models predicts each image, or all of them by their scores.

    The former is combine "extra", the latter "ensemble". The selector gives logits (N, K + 1);
    other arguments as of `SuperModel`.
    """

    def __init__(
        self,
        task: TaskConfig,
        networks: list[nn.Module],
        selector: nn.Module,
        names: list[str],
        combine: str = "extra",
    ):
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
        """The chosen prediction, or the mean of all (N, K + 1, ...) by the scores (N, K + 1)."""
        if self.combine == "ensemble":
            return ensemble_output(answers, scores)
        return super().combined(answers, scores)


def extra_super_model(task: TaskConfig, message: Message) -> ExtraSuperModel:
    """The deployed model of FedSM-extra or the ensemble, by the metadata item "combine"."""
    outputs = len(message[CLASSES]) + 1
    networks, selector, names = super_model_parts(task, message, outputs)
    return ExtraSuperModel(task, networks, selector, names, combine=message[COMBINE]).eval()
