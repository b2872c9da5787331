"""FedFomo (Zhang et al., "Personalized federated learning with first order model optimization",
ICLR 2021).

    w_n = max(0, (L_k(θ_k) - L_k(θ_n)) / ‖θ_n - θ_k‖),  normalized to Σ_n w_n = 1     (Sec. 3)
    θ_k <- θ_k + Σ_n w_n (θ_n - θ_k)

L_k is the loss on the site's validation images, θ_k the site's model at the start of the last
round, θ_n the models trained in it, the site's included. If no model is better, θ_k stays. Without
validation images, or with few patients, a site trains alone. The paper draws M of many sites; here
every site gets all models. Thus every hospital receives the models of every other hospital by name:
agree on it before.
"""

import math

import torch
from torch import Tensor

from medflare.methods import (
    MEASURED,
    FedAvgSiteHyper,
    Message,
    PersistentState,
    ServerHyper,
    StateDict,
    Step,
    TensorSpec,
    copied_state,
    phase,
    weighted_mean,
)
from medflare.methods.families.personalized_aggregation.personalized import (
    PERSONALS,
    PersonalizedServer,
    PersonalizedSite,
    family_message,
)
from medflare.methods.families.server_rules.rule import inner_products

SHOWN = TensorSpec("model", "the site's trained model, which all other sites receive")


def first_order_weights(losses: Tensor, loss: float, distances: Tensor) -> Tensor:
    """w_n (Sec. 3), (N,) with sum 1; zeros if no model is better.

    Args:
        losses: L_k(θ_n), (N,).
        loss: L_k(θ_k), finite.
        distances: ‖θ_n - θ_k‖, (N,); an equal model gets no weight.
    """
    gains = torch.where(distances > 0, (loss - losses) / distances, 0.0).clamp(min=0)
    return gains / gains.sum() if gains.any() else gains


class FedFomoSite(PersonalizedSite[FedAvgSiteHyper]):
    """Combines the sites' models by its validation loss, then trains the combination."""

    combined = PersistentState("combined")  # θ_k

    def start(self, incoming: Message) -> StateDict:
        """θ_k, moved towards those of the incoming models that are better; none come with the final
        request.
        """
        before = self.combined or copied_state(self.site.network())
        self.combined = self._moved(before, incoming.family(PERSONALS))
        return self.combined

    def _moved(self, before: StateDict, models: dict[str, StateDict]) -> StateDict:
        if not models:
            return before
        patients = set(self.site.data.validation.patients)
        if len(patients) < self.minimum_patients:  # the mean would tell their losses
            return models.get(self.site.name, before)
        loss = self.mean_loss(before, "validation")
        if not math.isfinite(loss):
            return models.get(self.site.name, before)
        losses = [self.mean_loss(state, "validation") for state in models.values()]
        trained = dict(self.plan.network().named_parameters())
        squared = inner_products(models.values(), before, trained).diagonal()
        losses_of_all = torch.tensor(losses, dtype=torch.float64)
        weights = first_order_weights(losses_of_all, loss, squared.sqrt())
        if not weights.any():
            return before
        return weighted_mean(models, dict(zip(models, weights.tolist(), strict=True)))

    @phase(request=(PERSONALS,), reply=(SHOWN,), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        return super().train(round, incoming)

    @phase(request=(PERSONALS,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        return super().validate(round, incoming)


class FedFomoServer(PersonalizedServer[ServerHyper]):
    """Sends the last models of all sites to every site."""

    site_algorithm = FedFomoSite

    def request(self, step: Step, site: str) -> Message:
        """All models that have been trained; none in the first round."""
        return family_message(self.memory, PERSONALS)
