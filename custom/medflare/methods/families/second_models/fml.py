"""FML (Shen et al. 2020, Alg. 1): personal model P and deputy D learn from each other on a batch.

    L_P = α L(P) + (1 - α) KL(D || P)
    L_D = β L(D) + (1 - β) KL(P || D)

The deputy starts every round as the global model and leaves the site for the weighted mean. β = 1
is FedAvg's global model, α = 1 a personal model that learns alone.
"""

from torch import Tensor
from torch.optim import Optimizer

from medflare.methods import FeatureNetwork, FedAvgSiteHyper, copied_state, param, strict_dataclass
from medflare.methods.families.second_models.site import SecondModelSite
from medflare.methods.parts.class_groups import class_logits
from medflare.methods.prr.formulas import distillation_loss


@strict_dataclass
class FMLHyper(FedAvgSiteHyper):
    """The weights of the task's loss against imitation of the other model."""

    alpha: float = param(
        0.5, "the task's part in the personal loss", symbol="α", source="Alg. 1", low=0, high=1
    )
    beta: float = param(
        0.5, "the task's part in the deputy's loss", symbol="β", source="Alg. 1", low=0, high=1
    )


class FMLSite(SecondModelSite[FMLHyper]):
    """Trains the global model as deputy, and the personal model beside it."""

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        personal = self.network("personal", self.personal or model.state_dict())
        personal.train()
        model.train()

        def mutual(student: Tensor, teacher: Tensor, targets: Tensor, part: float) -> Tensor:
            imitation = distillation_loss(
                class_logits(student, self.site.task).flatten(0, 1),
                class_logits(teacher, self.site.task).flatten(0, 1),
            )
            return part * self.site.loss(student, targets) + (1 - part) * imitation

        def losses(images: Tensor, targets: Tensor) -> list[Tensor]:
            p = personal(images)
            d = model(images)
            return [mutual(p, d, targets, self.hyper.alpha), mutual(d, p, targets, self.hyper.beta)]

        loss = self.fit_both(personal, optimizer, round, losses)
        self.personal = copied_state(personal)
        return loss
