"""FedSM-extra and the ensemble (FedSM paper, Sec. 3.1.1 and 3.1.2): the selector is trained last.

The federation's rounds train the global and the personal models; then these are frozen, every site
receives all K + 1 of them, and a selector with K + 1 outputs (0 = global) is trained for extra
rounds. FedSM-extra labels every training image with the model of the smallest loss and deploys the
most probable model; the ensemble minimises the loss of the weighted output and deploys this output.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medflare.core.errors import StateError
from medflare.core.message import FinalModels
from medflare.data.loading import Batch
from medflare.methods import (
    MEASURED,
    MODEL,
    ConfigError,
    Message,
    MetaSpec,
    Replies,
    Step,
    TaskConfig,
    TensorSpec,
    asks,
    phase,
    text,
)
from medflare.methods.fedsm.formulas import ensemble_output, extra_labels
from medflare.methods.fedsm.hyper import FedSMExtraServerHyper, FedSMExtraSiteHyper
from medflare.methods.fedsm.personalization import PERSONALS
from medflare.methods.fedsm.selector import (
    GRADIENT,
    TRAINED_SELECTOR,
    UPDATE,
    SelectorLoss,
    selector_outputs,
)
from medflare.methods.fedsm.server import SuperModelServer
from medflare.methods.fedsm.site import COMMON_META, SUPER_MODEL, SuperModelSite
from medflare.methods.fedsm.super_model import CLASSES, SuperModel, super_model_parts

FROZEN = TensorSpec("frozen")  # the frozen models in a site's memory
COMBINE = MetaSpec[str](
    "combine", "whether one model answers, or all by their scores", text("extra", "ensemble")
)
# The frozen models come once.
FROZEN_MODELS = (MODEL.as_optional(), PERSONALS, TRAINED_SELECTOR)
FROZEN_META: tuple[MetaSpec, ...] = tuple(item.as_optional() for item in (*COMMON_META, COMBINE))


class FedSMExtraSite(SuperModelSite[FedSMExtraSiteHyper]):
    """Trains the global and the personal model, then the selector alone."""

    server_hyper = FedSMExtraServerHyper
    kind = "super_extra"
    dp_unsupported_reason = "the selector's gradient leaves the site without noise"

    @classmethod
    def check(cls, task: TaskConfig, hyper: FedSMExtraSiteHyper, server_hyper: Any) -> None:
        """Also raises ConfigError for combine "extra", which labels whole images, if the selector
        reads patches.
        """
        super().check(task, hyper, server_hyper)
        if hyper.combine == "extra" and task.image_mode == "patch":
            raise ConfigError(
                "fedsm_extra: combine=extra labels whole images, image_mode 'patch' has none; "
                "set combine=ensemble, or take fedsm"
            )

    @phase(
        request=FROZEN_MODELS, request_meta=(*FROZEN_META, UPDATE), reply=(GRADIENT,), meta=MEASURED
    )
    def train_selector(self, round: int, incoming: Message) -> Message:
        """A round of the selector alone.

        The frozen models come with the first request; the site stores them, or the labels by them.
        """
        if MODEL in incoming:
            self._keep(incoming)
        return self.selector_reply(round, incoming, self._selector_loss())

    def _keep(self, incoming: Message) -> None:
        """Store the frozen models, or each training image's best one."""
        if self.hyper.combine == "extra":
            self.memory.meta["labels"] = self._labels(self._networks_of(incoming))
            return
        for entry, state in incoming.states.items():
            self.memory[FROZEN.member(entry)] = state
        self.memory.meta["frozen"] = incoming.meta

    def _selector_loss(self) -> SelectorLoss:
        if "labels" in self.memory.meta:
            return self._best_model_loss
        if "frozen" not in self.memory.meta:
            raise StateError(
                f"site {self.site.name}: the selector cannot be trained before the finished models "
                "have come"
            )
        models = Message(self.memory.family(FROZEN), self.memory.meta["frozen"])
        return partial(self._ensemble_loss, self._networks_of(models))

    @phase(request=SUPER_MODEL, request_meta=(*COMMON_META, COMBINE))
    def finalize(self, incoming: Message) -> FinalModels:
        """The global model, this site's personal model (inside), and the super model."""
        return super().finalize(incoming)

    def _networks_of(self, models: Message) -> list[nn.Module]:
        networks, _, _ = super_model_parts(self.site.task, models, selector_outputs(self.plan))
        return [network.to(self.site.device) for network in networks]

    @torch.no_grad()
    def _labels(self, networks: list[nn.Module]) -> list[int]:
        """Each training image's best model, computed once: the models are frozen and the images are
        not augmented.
        """
        losses = []
        for images, targets, _ in self.site.ordered("train"):
            outputs = [network(images) for network in networks]
            for row in range(len(images)):
                target = targets[row : row + 1]
                of_image = [self.site.loss(output[row : row + 1], target) for output in outputs]
                losses.append(torch.stack(of_image))
        return extra_labels(torch.stack(losses).cpu()).tolist()

    def _best_model_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross entropy with each training image's best model."""
        labels = torch.tensor(self.memory.meta["labels"])
        return F.cross_entropy(logits, labels[batch.index.cpu()].to(logits.device))

    def _ensemble_loss(self, networks: list[nn.Module], logits: Tensor, batch: Batch) -> Tensor:
        """The task's loss of the weighted output; gradients flow through the scores only."""
        task = self.site.task
        with torch.no_grad():
            probabilities = [task.probabilities(network(batch.images)) for network in networks]
            outputs = torch.stack(probabilities, dim=1)
        mixed = ensemble_output(outputs, logits.softmax(dim=1)).clamp(1e-6, 1 - 1e-6)
        # The task's loss takes logits: the inverse of its activation.
        inverse = mixed.log() if task.target == "multiclass" else mixed.logit()
        return self.site.loss(inverse, batch.targets)


class FedSMExtraServer(SuperModelServer[FedSMExtraServerHyper]):
    """The selector's rounds come after the federation's; a site is sent the frozen models once."""

    site_algorithm = FedSMExtraSite

    def steps(self) -> list[Step]:
        """FedSM's rounds without a selector, then `selector_rounds` of the selector alone."""
        steps = super().steps()
        first = self.context.rounds
        for round in range(first, first + self.hyper.selector_rounds):
            steps.append(Step.of(FedSMExtraSite.train_selector, round, everyone=True))
        return steps

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
        message[TRAINED_SELECTOR] = self.selector
        message[UPDATE] = 0
        return message

    def step_selector(self, step: Step, replies: Replies) -> None:
        """Note which sites have the frozen models, then step the selector."""
        self.memory.meta["sites_with_models"] = sorted({*self._sites_with_models, *replies})
        super().step_selector(step, replies)

    def configure_final(self, site: str) -> Message:
        """The whole super model, and how it combines its members."""
        message = super().configure_final(site)
        message[COMBINE] = self.context.plan.site_hyper.combine
        return message


class ExtraSuperModel(SuperModel):
    """The most probable of K + 1 models predicts each image (FedSM-extra).

    The selector gives logits (N, K + 1); the other arguments are those of `SuperModel` without γ.
    """

    def choose(self, scores: Tensor) -> Tensor:
        """The most probable model (N,)."""
        return scores.argmax(dim=1)


class EnsembleSuperModel(ExtraSuperModel):
    """All K + 1 models predict each image, weighted by their scores."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to probabilities."""
        scores = self.scores(images)
        self.note(self.choose(scores), scores)
        return self.combined(self.predict_all(images), scores)

    def combined(self, probabilities: Tensor, scores: Tensor) -> Tensor:
        """The mean of all predictions (N, K + 1, ...) by the scores (N, K + 1)."""
        return ensemble_output(probabilities, scores)


def extra_super_model(task: TaskConfig, message: Message) -> SuperModel:
    """The deployed model of FedSM-extra or the ensemble, by the metadata item "combine"."""
    parts = super_model_parts(task, message, outputs=len(message[CLASSES]) + 1)
    combined = EnsembleSuperModel if message[COMBINE] == "ensemble" else ExtraSuperModel
    return combined(task, *parts).eval()
