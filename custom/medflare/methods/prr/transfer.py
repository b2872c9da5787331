"""Deputy-Enhanced Transfer: a site's two models train on the same batches and teach each other in stages (PRR, Sec. III-C)."""

import math

from torch import Tensor, nn

from medflare.core.states import StateDict, copy_state
from medflare.methods.prr.formulas import EXCHANGE, RECOVER, SUBLIMATE, distillation_loss, halvings, next_stage
from medflare.methods.prr.hyper import PRRSiteHyper
from medflare.methods.prr.supervision import SitePrototypes, Supervision, class_logits
from medflare.networks.features import FeatureNetwork
from medflare.training.accumulation import Steps
from medflare.training.epochs import epochs, trainable, weighted_sum
from medflare.training.site import Site


class Transfer:
    """One round of training at a site.

    Args:
        personal: P_k, trained in place; the same network as `deputy` where DET is off.
        deputy: D_k, trained in place.
        prototypes: the site's own of the round before, empty at the start; `run` brings them up to date every epoch.

    Attributes:
        stages: of every epoch; none with DET off.
        gammas: (G, C) γ of every epoch, as nested lists; none where the loss has no refinement.
    """

    def __init__(
        self,
        site: Site,
        hyper: PRRSiteHyper,
        personal: FeatureNetwork,
        deputy: FeatureNetwork,
        supervision: Supervision,
        width: int,
        prototypes: StateDict,
    ):
        self.site = site
        self.hyper = hyper
        self.personal = personal
        self.deputy = deputy
        self.supervision = supervision
        self.width = width
        self.prototypes = prototypes
        self.stages: list[int] = []
        self.gammas: list[list[list[float]]] = []

    def run(self, round: int, validation: dict[str, float | None]) -> float:
        """The round's local epochs; returns the personal model's mean loss over all images seen.

        Args:
            validation: metric of the deputy ("global") and the personal model ("personal") as the round begins.
        """
        models = [self.personal] if self._alone else [self.personal, self.deputy]
        rate = self.site.task.optimizer["lr"] * 0.5 ** self._halvings(round, 0)
        optimizers = [self.site.optimizer(trainable(model), lr=rate) for model in models]  # one each: a clipped norm is a model's own
        steps, own, sizes = [Steps(optimizer, self.site) for optimizer in optimizers], list[Tensor](), list[int]()
        for epoch, batches in enumerate(epochs(self.site, round, "model")):
            if self._halvings(round, epoch) > self._halvings(round, max(0, epoch - 1)):
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    group["lr"] *= 0.5
            gathered = self._begin_epoch(validation)
            for model in models:
                model.train()
            for images, targets, _ in batches:
                losses = self._losses(images, targets, gathered)
                for stepping, loss in zip(steps, losses, strict=True):
                    stepping.follow(loss, len(images))
                own.append(losses[0].detach())
                sizes.append(len(images))
            for stepping in steps:
                stepping.finish()
            if gathered is not None:
                self.prototypes = copy_state(gathered.state())
        return weighted_sum(own, sizes) / sum(sizes)

    def _halvings(self, round: int, epoch: int) -> int:
        return halvings(self.hyper.halve_every, round, epoch, self.site.task.local_epochs)

    @property
    def _alone(self) -> bool:
        return self.personal is self.deputy

    def _begin_epoch(self, validation: dict[str, float | None]) -> SitePrototypes | None:
        """Choose the stage and weigh the classes; returns what gathers prototypes meanwhile, if anything does."""
        if not self._alone:
            self.stages.append(self._stage(self.stages[-1] if self.stages else 0, validation))
        if not self.hyper.refines:
            return None
        gathered = SitePrototypes(self.site.task, self.width, self.site.device)
        self.supervision.refine(self.prototypes.get("prototypes"))
        if self.supervision.gamma is not None:
            self.gammas.append(self.supervision.gamma.tolist())
        return gathered

    def _stage(self, stage: int, validation: dict[str, float | None]) -> int:
        """The stage of the coming epoch; `stage` is that of the one before, 0 at the start of a round."""
        hyper, several = self.hyper, self.site.task.local_epochs > 1
        if hyper.det_steps == "E":
            return EXCHANGE
        if several and stage == 0:
            return RECOVER
        metrics = validation if stage == 0 else {"global": self._metric(self.deputy), "personal": self._metric(self.personal)}
        phi = {role: math.nan if value is None else value for role, value in metrics.items()}
        # of a single epoch of recovery none would be left in which the deputy teaches: there the printed thresholds decide
        found = next_stage(stage, phi["global"], phi["personal"], hyper.lam1, hyper.lam2, "official" if several else "threshold")
        return min(found, EXCHANGE) if hyper.det_steps == "RE" else found

    def _metric(self, model: nn.Module) -> float | None:
        metric = self.site.task.metric
        return self.site.score(self.site.predictor(model), "validation", [metric]).values[metric]

    def _losses(self, images: Tensor, targets: Tensor, gathered: SitePrototypes | None) -> list[Tensor]:
        """[L_P, L_D] of a batch (Eq. 5-6), or [L_sup] of the only model."""
        features, logits = self.personal.features_and_output(images)
        if gathered is not None:
            gathered.add(features, targets)
        own = self.supervision(logits, targets)
        if self._alone:
            return [own]
        answer = self.deputy(images)
        other = self.supervision(answer, targets)
        own_logits, other_logits = (class_logits(output, self.site.task).flatten(0, 1) for output in (logits, answer))
        if self.stages[-1] in (EXCHANGE, SUBLIMATE):
            own = own + distillation_loss(own_logits, other_logits)
        if self.stages[-1] in (RECOVER, EXCHANGE):
            other = other + distillation_loss(other_logits, own_logits)
        return [own, other]
