"""A round of training at a PRR site: Deputy-Enhanced Transfer under the CPA loss (Sec. III-C, D).

A task is seen as G softmax problems ("groups") of C classes each, so that one formula serves every
task: one problem over all classes (multiclass), one over (negative, positive) with logits (0, z)
(binary), or one such pair for each label (multilabel).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from medflare.data.loading import Batch
from medflare.methods import (
    FeatureNetwork,
    Site,
    StateDict,
    Steps,
    TaskConfig,
    copy_state,
    epochs,
    trainable,
)
from medflare.methods.parts.class_groups import (
    PatientsOfClasses,
    at_positions,
    class_logits,
    class_targets,
    groups_and_classes,
    totals_of_site,
)
from medflare.methods.prr import formulas
from medflare.methods.prr.hyper import PRRSiteHyper
from medflare.training.epochs import MeanLoss, train_together
from medflare.training.site_rules import check_class_weights

# Of the weights of two classes: with the paper's β and τ that of 65 times as many images.
_USUAL_RATIO = 30

# -- prototypes and loss --------------------------------------------------------------------------


class SitePrototypes:
    """Local prototypes f^(k) of every class (PRR, Eq. 10), collected batch by batch from the
    personal model's embeddings.

    Args:
        patients: of every training image, to count those who show a class; None: not counted.
    """

    def __init__(
        self,
        task: TaskConfig,
        width: int,
        device: torch.device | str,
        patients: Sequence[str] | None = None,
    ):
        self.task = task
        self.patients = None if patients is None else PatientsOfClasses(patients)
        groups, classes = groups_and_classes(task)
        self._means = [formulas.PrototypeMean(classes, width, device) for _ in range(groups)]

    def add(self, features: Tensor, targets: Tensor, rows: Tensor | None = None) -> None:
        """Adds a batch: features (N, D) or (N, D, ...), and the rows (N,) of the training images.

        Label maps are resized to the feature map (nearest).
        """
        targets = class_targets(at_positions(targets, features), self.task)
        if self.patients is not None and rows is not None:
            self.patients.add(targets, groups_and_classes(self.task)[1], rows)
        for mean, labels in zip(self._means, targets, strict=True):
            mean.add(features, labels)

    def state(self) -> StateDict:
        """{"prototypes": (G C, D), "present": (G C,) bool}; zero for a class without samples."""
        prototypes = torch.cat([mean.means() for mean in self._means])
        counts = torch.cat([mean.counts for mean in self._means])
        return {"prototypes": prototypes, "present": counts > 0}


class Supervision:
    """L_sup of a round at a site: (logits, targets) -> scalar (PRR, Sec. III-D and IV-A).

    `hyper.supervision` is "both", "global" or "local": the CPA loss, its conjoint objective alone
    or its refinement alone; or a loss that it is compared with: "task" (the task's own loss), "ce",
    "focal", "fedeamc". All but "task" add Dice in segmentation.

    Args:
        totals: (G, C) class counts over all sites.
        global_: (G C, D) prototypes from the server; None: gamma = 1.
    """

    def __init__(self, site: Site, hyper: PRRSiteHyper, totals: Tensor, global_: Tensor | None):
        self.site = site
        self.hyper = hyper
        self.kind = hyper.supervision
        self.counts: list[Tensor | None] = [None] * len(totals)
        if self.kind in ("both", "global"):
            self.counts = list(totals)
        self.gamma = _inverse_frequencies(site) if self.kind == "fedeamc" else None
        self._global = global_ if self.kind in ("both", "local") else None
        segmentation = site.task.kind == "segmentation"
        self._dice = site.annotation.loss({"name": "dice"}) if segmentation else None
        self._focal = site.annotation.loss({"name": "focal"}) if self.kind == "focal" else None
        heavy, light = self._extreme_weights(1)
        if heavy > _USUAL_RATIO * light or site.task.sampling.name != "shuffle":
            check_class_weights(site, self._extreme_weights)

    def _extreme_weights(self, few: int) -> tuple[float, float]:
        """See `check_class_weights`: those of an undecided network, with the largest possible γ."""
        if self.kind == "fedeamc":
            patients = len(set(self.site.data.train.patients))
            return 1 / few, 1 / (patients - few)
        weights: list[float] = []
        for counts in self.counts:
            if counts is not None:
                others = formulas.conjoint_mask(counts, self.hyper.beta).sum(dim=1) - 1
                weights += (others / (1 + others)).tolist()
        weights = weights or [1.0]
        largest = 1.0
        if self.kind in ("both", "local"):
            largest = (1 + self.hyper.tau) / max(self.hyper.tau - 1, 1e-3)
        return largest * max(weights), min(weights)

    def refine(self, local: Tensor | None) -> None:
        """Weights the classes by how far local prototypes are from global ones (Eq. 11-12).

        Args:
            local: (G C, D); None if the site has none yet.
        """
        if local is not None and self._global is not None:
            gamma = formulas.prototype_gamma(local, self._global, self.hyper.tau)
            self.gamma = gamma.reshape(groups_and_classes(self.site.task)).to(self.site.device)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.kind == "task":
            return self.site.loss(logits, targets)
        value = (self._focal or self._classification)(logits, targets)
        if self._dice is None:
            return value
        return value + self._dice(logits, targets)

    def _classification(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The CPA loss over the classes that the site annotated, mean over the groups; the cross
        entropy without counts and gamma.
        """
        annotation = self.site.annotation
        gammas = [None] * len(self.counts)
        if self.gamma is not None:
            gammas = list(self.gamma)
        groups = zip(
            class_logits(annotation.logits(logits), annotation.reduced),
            class_targets(annotation.targets(targets), annotation.reduced),
            self._annotated(self.counts),
            self._annotated(gammas),
            strict=True,
        )
        losses = [formulas.cpa_loss(*group, self.hyper.beta) for group in groups]
        return torch.stack(losses).mean()

    def _annotated(self, numbers: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The numbers (C,) of every group that the site annotated, of the classes that it
        annotated.
        """
        annotation = self.site.annotation
        if annotation.complete:
            return list(numbers)
        outputs = list(annotation.outputs)
        if annotation.task.target == "multilabel":
            return [numbers[output] for output in outputs]
        return [None if row is None else row[outputs] for row in numbers]


def _inverse_frequencies(site: Site) -> Tensor:
    """FedeAMC as PRR describes it (Sec. V-A): class weights inverse to the site's own counts, with
    mean 1 over its samples.
    """
    counts = totals_of_site(site)
    present = counts > 0
    classes = present.sum(dim=1, keepdim=True)
    weight = counts.sum(dim=1, keepdim=True) / (classes * counts.clamp(min=1))
    return torch.where(present, weight, 1.0).to(site.device)


@dataclass
class TransferResult:
    """What a round of training gives.

    Attributes:
        prototypes: the site's own of the last epoch.
        few: (G C,), the classes that fewer than the site's `minimum_patients` patients showed in
            it; None: not counted.
        loss: the personal model's mean over all images.
        stages: of every epoch; empty if DET is off.
        gammas: (G C,) γ of every epoch; empty without refinement.
        hidden: rows of γ that do not leave the site: each γ is of the prototypes of the epoch
            before, and in one of these epochs the class was in `few`.
    """

    prototypes: StateDict
    few: Tensor | None
    loss: float = math.nan
    stages: list[int] = field(default_factory=list)
    gammas: list[Tensor] = field(default_factory=list)
    hidden: set[int] = field(default_factory=set)


@dataclass
class Transfer:
    """One round of training at a site.

    Attributes:
        personal: P_k, trained in place; the same network as `deputy` if DET is off.
        deputy: D_k, trained in place.
        measure: the validation metric of a network.
        validation: metric of the deputy ("global") and the personal model ("personal") at the start
            of the round.
        width: of the prototypes.
        prototypes: the site's own of the round before, empty at the start.
        few: of the round before, see `TransferResult`.
    """

    site: Site
    hyper: PRRSiteHyper
    personal: FeatureNetwork
    deputy: FeatureNetwork
    supervision: Supervision
    measure: Callable[[nn.Module], float | None]
    validation: dict[str, float | None]
    width: int
    prototypes: StateDict
    few: Tensor | None

    @property
    def _single(self) -> bool:
        return self.personal is self.deputy

    def run(self, round: int) -> TransferResult:
        """Train for the round's local epochs."""
        result = TransferResult(self.prototypes, self.few)
        models = [self.personal]
        if not self._single:
            models.append(self.deputy)
        # One for each model: gradient norms are clipped by model.
        optimizers = [self.site.optimizer(trainable(model)) for model in models]
        rate = optimizers[0].param_groups[0]["lr"]
        count = self.site.task.local_epochs
        steps = [Steps(optimizer, self.site) for optimizer in optimizers]
        means = [MeanLoss() for _ in models]
        for epoch, batches in enumerate(epochs(self.site, round, "model")):
            halved = formulas.halvings(self.hyper.halve_every, round, epoch, count)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * 0.5**halved
            collected = self._begin_epoch(result)
            for model in models:
                model.train()
            train_together(steps, batches, partial(self._losses, result, collected), means)
            if collected is not None:
                result.prototypes = copy_state(collected.state())
                if collected.patients is not None:
                    result.few = collected.patients.few(self.site.minimum_patients)
        result.loss = means[0].value()
        return result

    def _begin_epoch(self, result: TransferResult) -> SitePrototypes | None:
        """Sets the stage and the class weights.

        Returns:
            The collector of this epoch's prototypes, if they are needed.
        """
        if not self._single:
            stage = result.stages[-1] if result.stages else 0
            result.stages.append(self._stage(stage))
        if not self.hyper.refines:
            return None
        self.supervision.refine(result.prototypes.get("prototypes"))
        if self.supervision.gamma is not None:
            result.gammas.append(self.supervision.gamma.flatten())
            if result.few is not None:
                result.hidden.update(result.few.nonzero().flatten().tolist())
        patients = self.site.data.train.patients if self.site.minimum_patients > 1 else None
        return SitePrototypes(self.site.task, self.width, self.site.device, patients)

    def _stage(self, stage: int) -> int:
        """The stage of the coming epoch; `stage` is the last one, 0 at the start of a round."""
        hyper = self.hyper
        several = self.site.task.local_epochs > 1
        if hyper.det_steps == "E":
            return formulas.EXCHANGE
        if stage == 0 and several:
            return formulas.RECOVER
        metrics = self.validation
        if stage != 0:
            metrics = {"global": self.measure(self.deputy), "personal": self.measure(self.personal)}
        deputy = _or_nan(metrics["global"])
        personal = _or_nan(metrics["personal"])
        # With one epoch a round, the official rule would stay in Recover: the printed one decides.
        rule: Literal["official", "threshold"] = "official" if several else "threshold"
        following = formulas.next_stage(stage, deputy, personal, hyper.lam1, hyper.lam2, rule)
        if hyper.det_steps == "RE":
            return min(following, formulas.EXCHANGE)
        return following

    def _losses(
        self, result: TransferResult, collected: SitePrototypes | None, batch: Batch
    ) -> list[Tensor]:
        """[L_P, L_D] of a batch (Eq. 5-6), or [L_sup] of the only model."""
        images, targets, rows = batch
        features, logits = self.personal.features_and_output(images)
        if collected is not None:
            collected.add(features, targets, rows)
        loss_p = self.supervision(logits, targets)
        if self._single:
            return [loss_p]
        deputy_logits = self.deputy(images)
        loss_d = self.supervision(deputy_logits, targets)
        p = class_logits(logits, self.site.task).flatten(0, 1)
        d = class_logits(deputy_logits, self.site.task).flatten(0, 1)
        if result.stages[-1] in (formulas.EXCHANGE, formulas.SUBLIMATE):
            loss_p = loss_p + formulas.distillation_loss(p, d)
        if result.stages[-1] in (formulas.RECOVER, formulas.EXCHANGE):
            loss_d = loss_d + formulas.distillation_loss(d, p)
        return [loss_p, loss_d]


def _or_nan(value: float | None) -> float:
    if value is None:
        return math.nan
    return value
