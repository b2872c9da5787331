"""ConDist (Wang et al., "ConDistFL: Conditional Distillation for Federated Learning from Partially
Annotated Data", MICCAI workshops 2023, arXiv 2308.04070).

    L = L_sup + λ L_ConDist

L_sup is the task's loss, marginal over the structures F_k that site k annotated
(`Annotation.loss`). In L_ConDist the global model of the round teaches all other classes, by their
probabilities under the condition that no structure of F_k is there. A site that annotated all
trains as in FedAvg.

Ours: each other structure is a group of its own, while the paper joins those that another site
annotated together. Structures that may overlap (multilabel) need no condition and no mask.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medflare.methods import (
    ConfigError,
    FeatureNetwork,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSiteHyper,
    Loss,
    Replies,
    Step,
    TaskConfig,
    param,
    strict_dataclass,
)
from medflare.methods.families.teachers.site import ANNOTATED, TeacherSite

_FIRST = 0.01  # fraction of λ in round 0, authors' code


def conditional_probabilities(
    logits: Tensor, annotated: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """p_c / (1 - sum of p_j over the annotated classes j), for all other classes c.

    With p = softmax(logits / τ); this is the softmax of the other logits alone.

    Args:
        logits: (N, classes, ...).
        annotated: classes F_k.
        temperature: τ.

    Returns:
        (N, classes - len(annotated), ...), in the order of the classes.
    """
    others = [channel for channel in range(logits.shape[1]) if channel not in annotated]
    return (logits[:, others] / temperature).softmax(dim=1)


def unannotated_area(teacher: Tensor, targets: Tensor, annotated: Sequence[int]) -> Tensor:
    """1 where neither the mask nor the teacher's most probable class is annotated, else 0.

    Args:
        teacher: logits (N, classes, ...).
        targets: classes (N, ...), long.

    Returns:
        float (N, 1, ...).
    """
    classes = torch.tensor(annotated, device=targets.device)
    shown = torch.isin(targets, classes) | torch.isin(teacher.argmax(dim=1), classes)
    return (~shown).float().unsqueeze(1)


@strict_dataclass
class ConDistHyper(FedAvgSiteHyper):
    """The conditional distillation."""

    lam: float = param(
        1.0,
        "largest weight of the distillation; 0: FedAvg",
        symbol="λ",
        source="authors' code",
        low=0,
    )
    ramp_rounds: int = param(
        10,
        "rounds in which the weight rises from a hundredth to lam",
        source="ours; the authors' are all rounds",
        low=0,
    )
    temperature: float = param(
        2.0, "of student and teacher", symbol="τ", source="authors' code", low=1e-6
    )

    def weight(self, round: int) -> float:
        """λ of a round, which rises linearly."""
        progress = min(round / self.ramp_rounds, 1.0) if self.ramp_rounds else 1.0
        return self.lam * (_FIRST + (1 - _FIRST) * progress)


class ConDistSite(TeacherSite[ConDistHyper]):
    """Adds the distillation from the round's global model, at a site that lacks structures."""

    dp_unsupported_reason = "the Dice loss of the distillation pools the images of a batch"

    @classmethod
    def check(cls, task: TaskConfig, hyper: ConDistHyper, server_hyper: Any) -> None:
        """Also raises ConfigError for a task of which a site cannot annotate a part."""
        super().check(task, hyper, server_hyper)
        if task.kind != "segmentation" or len(task.structures) < 2:
            raise ConfigError(
                f"condist needs structures that some sites did not annotate, and task {task.name} "
                "is a classification or has one structure; run fedavg"
            )

    def round_loss(self, model: FeatureNetwork, round: int) -> Loss | None:
        """L_sup + λ L_ConDist."""
        weight = self.hyper.weight(round)
        if self.site.annotation.complete or not weight:
            return None
        teacher = self.frozen(model.state_dict())

        def loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
            logits = network(images)
            with torch.no_grad():
                taught = teacher(images)
            return self.site.loss(logits, targets) + weight * self._distil(logits, taught, targets)

        return loss

    def _distil(self, logits: Tensor, taught: Tensor, targets: Tensor) -> Tensor:
        """L_ConDist, the soft Dice loss of the batch between student and teacher."""
        from monai.losses.dice import MaskedDiceLoss

        temperature = self.hyper.temperature
        outputs = self.site.annotation.outputs
        if self.site.task.target == "multilabel":
            others = [channel for channel in range(logits.shape[1]) if channel not in outputs]
            student = (logits[:, others] / temperature).sigmoid()
            teacher = (taught[:, others] / temperature).sigmoid()
            mask = torch.ones_like(targets[:, :1])
        else:
            annotated = outputs[1:]  # without the background
            student = conditional_probabilities(logits, annotated, temperature)
            teacher = conditional_probabilities(taught, annotated, temperature)
            mask = unannotated_area(taught, targets, annotated)
        return MaskedDiceLoss(smooth_nr=0.0, batch=True)(student, teacher, mask)


class ConDistServer(FedAvgServer[FedAvgServerHyper]):
    """FedAvg's server algorithm; it warns where the method is FedAvg."""

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        structures = len(self.context.task.structures)
        complete = [reply.get(ANNOTATED) == structures for reply in replies.values()]
        if step.round == 0 and all(complete):
            self.context.warn(
                "every site annotated every structure, so condist trains as fedavg; "
                'run fedavg, or list in "annotated" of datalist.json what a site annotated'
            )
        super().aggregate_models(step, replies)
