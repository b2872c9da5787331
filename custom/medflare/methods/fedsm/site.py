"""FedSM's site algorithm: every round a site trains two models on the same images, first the global
model w_g (FedAvg's training), then its personal model w_p,k (`SitePersonal`).

The server pulls the personal model towards the others (Eq. 11). For a selector w_s that is trained,
the reply also has its gradient (cross entropy with the site's own label, Eq. 2). After the last
round the site sends the statistics of the ridge selector, and evaluates the selector's calibration
and the candidates of γ on validation images.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from medflare.core.message import FinalModels
from medflare.core.rng import seeded
from medflare.data.loading import Batch
from medflare.methods import (
    MEASURED,
    MODEL,
    SELECTED_ROUND,
    VALIDATION,
    Message,
    MetaSpec,
    StateDict,
    copy_state,
    count,
    extends,
    listing,
    number,
    phase,
    received,
    table,
    trained_model,
)
from medflare.methods.fedsm.formulas import TEMPERATURES, UNLIKELY, calibration_losses
from medflare.methods.fedsm.hyper import FedSMServerHyper, FedSMSiteHyper
from medflare.methods.fedsm.personalization import LOSSES, PERSONALS, F, SitePersonal
from medflare.methods.fedsm.selector import (
    GRADIENT,
    SELECTOR,
    STATISTICS,
    TRAINED_SELECTOR,
    UPDATE,
    SelectorLoss,
    is_ridge,
    selector_outputs,
    selector_spec,
    site_statistics,
)
from medflare.methods.fedsm.super_model import (
    CHOOSE_BY,
    CLASSES,
    GAMMA,
    SPEC,
    gain_by_gamma,
    super_model,
)
from medflare.training.epochs import samples_of_pass, weighted_sum

CALIBRATION = MetaSpec[list[float]](
    "calibration",
    "mean loss of the selector on validation images at each of a list of temperatures",
    listing(number(0.0, -math.log(UNLIKELY) + 0.01), len(TEMPERATURES)),
    "validation",
)
GAINS = MetaSpec[dict[str, float | None]](
    "gains",
    "γ -> the super model's mean gain over the global one on validation images",
    table(number(-1.0, 1.0, optional=True)),
    "validation",
)
ROUNDS = MetaSpec[dict[str, int | None]](
    "rounds",
    "site -> rounds of training behind its model",
    table(count(optional=True)),
    optional=True,
)
# Metadata of both super models, FedSM's and that of `extra`.
COMMON_META = (CLASSES, SPEC, ROUNDS, SELECTED_ROUND.as_optional())
SUPER_MODEL = (MODEL, PERSONALS, SELECTOR)
SUPER_MODEL_META = (*COMMON_META, GAMMA, CHOOSE_BY)


class SuperModelSite(SitePersonal[F]):
    """FedAvg's global model, a personal model, and a part in the selector.

    Attributes:
        kind: of the deployed super model, one of `Method.models`.
    """

    kind: ClassVar[str]

    def validate_request(self, incoming: Message) -> str | None:
        """Which item of a super model is of other sites, or of another selector, than the plan's;
        or None.
        """
        expected = {CLASSES: list(self.plan.sites), SPEC: dict(selector_spec(self.plan))}
        for item, value in expected.items():
            if item in incoming and incoming[item] != value:
                return f"item {item.name!r} is {incoming[item]!r:.100}, this run has {value!r:.100}"
        return None

    @property
    def label(self) -> int:
        """The site's class in the selector."""
        return self.plan.sites.index(self.site.name)

    def selector(self, state: StateDict) -> nn.Module:
        """The selector with these weights."""
        return self.network(
            "selector", state, selector_spec(self.plan), selector_outputs(self.plan)
        )

    @torch.no_grad()
    def selector_logits(self, state: StateDict, split: str) -> Tensor:
        """Logits (N, outputs) of the split's images, with `image_mode` "patch" of their windows, on
        the CPU.
        """
        selector = self.selector(state).eval()
        return torch.cat([selector(batch.images).cpu() for batch in self.site.ordered(split)])

    def selector_gradient(
        self, round: int, incoming: Message, loss: SelectorLoss
    ) -> tuple[StateDict, float]:
        """(gradient, value) of the mean loss over all training images."""
        site = self.site
        selector = self.selector(incoming[TRAINED_SELECTOR]).train()
        keys = (round, "selector", incoming.get(UPDATE) or 0, 0)
        total = samples_of_pass(site)
        values = []
        fractions = []
        selector.zero_grad()
        with seeded(site.seed, site.name, *keys, "dropout"):
            for batch in site.batches("train", *keys):
                value = loss(selector(batch.images), batch)
                fraction = len(batch.images) / total
                (value * fraction).backward()
                values.append(value.detach())
                fractions.append(fraction)
        weights = selector.named_parameters()
        gradients = {name: w.grad for name, w in weights if w.grad is not None}
        return copy_state(gradients), weighted_sum(values, fractions)

    def selector_reply(self, round: int, incoming: Message, loss: SelectorLoss) -> Message:
        """A reply with the selector's gradient alone."""
        gradient, value = self.selector_gradient(round, incoming, loss)
        return self.reply({GRADIENT: gradient}, loss=value)

    def finalize(self, incoming: Message) -> FinalModels:
        """The global model, this site's personal model (inside), and the super model."""
        models = {"global": received(incoming)}
        personal = PERSONALS.member(self.site.name)
        if personal in incoming:
            rounds = incoming.get(ROUNDS) or {}
            rounds_trained = rounds.get(self.site.name, incoming.get(SELECTED_ROUND))
            models["personal"] = trained_model(incoming[personal], rounds_trained)
        models["deployed"] = Message(incoming.states, {**incoming.meta, "kind": self.kind})
        return models


class FedSMSite(SuperModelSite[FedSMSiteHyper]):
    """FedAvg's global model, a personal model and a selector; at the end it measures for the
    selector's calibration and the tuning of γ.
    """

    server_hyper = FedSMServerHyper
    kind = "super"
    dp_unsupported_reason = (
        "what the selector learns from (statistics of the images, or a gradient) "
        "leaves the site without noise"
    )

    @extends(request=(TRAINED_SELECTOR,), reply=(GRADIENT,))
    def train(self, round: int, incoming: Message) -> Message:
        """Trains the global and the personal model; adds a trained selector's gradient."""
        reply = super().train(round, incoming)
        self._measure_selector(incoming, reply)
        if not is_ridge(self.plan):
            gradient, value = self.selector_gradient(round, incoming, self.own_label_loss)
            reply[GRADIENT] = gradient
            reply[LOSSES]["selector"] = value
        return reply

    @phase(request=(TRAINED_SELECTOR,), request_meta=(UPDATE,), reply=(GRADIENT,), meta=MEASURED)
    def train_selector(self, round: int, incoming: Message) -> Message:
        """A further gradient of the selector alone within a round."""
        return self.selector_reply(round, incoming, self.own_label_loss)

    def own_label_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross entropy with y_s = one_hot(k) for all images of site k (Eq. 2)."""
        labels = torch.full((len(logits),), self.label, device=logits.device)
        return nn.functional.cross_entropy(logits, labels)

    @extends(request=(TRAINED_SELECTOR,))
    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming models, and the selector's accuracy."""
        reply = super().validate(round, incoming)
        self._measure_selector(incoming, reply)
        return reply

    def _measure_selector(self, incoming: Message, reply: Message) -> None:
        """Adds the share of validation images that are recognized as the site's."""
        if len(self.site.data.validation) and TRAINED_SELECTOR in incoming:
            logits = self.selector_logits(incoming[TRAINED_SELECTOR], "validation")
            recognized = logits.argmax(dim=1) == self.label
            reply[VALIDATION]["selector"] = float(recognized.float().mean())

    @phase(reply=(STATISTICS,), meta=MEASURED)
    def selector_features(self, round: int, incoming: Message) -> Message:
        """Mean and mean product of the training images' features, for the ridge selector."""
        return self.reply({STATISTICS: site_statistics(self.site)})

    @phase(request=(SELECTOR,), meta=(*MEASURED, CALIBRATION))
    def selector_confidence(self, round: int, incoming: Message) -> Message:
        """The selector's loss on validation images at each temperature; [] without images."""
        losses = []
        if len(self.site.data.validation):
            logits = self.selector_logits(incoming[SELECTOR], "validation")
            windows = self.site.task.image_mode == "patch"
            patients = None
            if self.plan.server_hyper.choose_by == "patient" and not windows:
                patients = self.site.data.validation.patients
            losses = calibration_losses(logits, self.label, patients)
        return self.reply({CALIBRATION: losses})

    @phase(request=SUPER_MODEL, request_meta=SUPER_MODEL_META, meta=(*MEASURED, GAINS))
    def evaluate_gamma(self, round: int, incoming: Message) -> Message:
        """The super model's gain over the global model on validation images, for every γ."""
        model = super_model(self.site.task, incoming).to(self.site.device)
        return self.reply({GAINS: gain_by_gamma(model, self.site)})

    @phase(request=SUPER_MODEL, request_meta=SUPER_MODEL_META)
    def finalize(self, incoming: Message) -> FinalModels:
        """The global model, this site's personal model (inside), and the super model."""
        return super().finalize(incoming)
