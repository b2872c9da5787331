"""FedSM (Xu et al., CVPR 2022): a "super model" of a global model, one personal model per site and a selector between them.

Every round a site trains three models on the same images: the global model w_g (averaged as in FedAvg), its personal model
w_p,k (pulled towards the others' by SoftPull, Eq. 11) and the selector w_s (cross entropy with the site's own label, Eq. 2).
For an image from anywhere the selector's most probable site k serves its personal model if the probability exceeds γ, else the
global model answers. Its relatives whose selector learns after the other models stand in `fedsm_extra.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medflare.core.hyper import param
from medflare.core.manifest import EntrySpec, Manifest
from medflare.core.message import Message
from medflare.core.states import StateDict, blend, copy_state, weighted_mean
from medflare.inference.deployed import plain_message
from medflare.methods.base import Plan, ServerContext, Step, plain_entry, sample_weights
from medflare.methods.fedavg import FedAvgServer, FedAvgServerHyper, FedAvgSite
from medflare.methods.fedsm.personalization import train_apfl, train_meta
from medflare.methods.fedsm.selector import (
    MOMENTS,
    SelectorLoss,
    accumulate_gradient,
    adam_step,
    adam_with_moments,
    gradient_of,
    initial_moments,
    moments_of,
    parameter_names,
    selector_rate,
    selector_spec,
    train_selector,
)
from medflare.methods.fedsm.super_model import choose_model as choose_model
from medflare.methods.fedsm.super_model import metric_by_gamma, super_model, tuned_gamma
from medflare.methods.parts.selection import Best, mean_validation
from medflare.methods.parts.training import train_epochs
from medflare.sites.site import Batch, Site

SHARED_META = ("perfedavg", "pfedme")  # personalizations whose sites also share a model of their own beside w_g


# -- the paper's mathematics ---------------------------------------------------------------------------------------------------


def soft_pull(states: Mapping[str, StateDict], lam: float) -> dict[str, StateDict]:
    """w_p,k <- λ w_p,k + (1 - λ) / (K - 1) Σ_{k' ≠ k} w_p,k'  (FedSM, Eq. 11).

    The mean over sites stays where it is and deviations from it shrink by (λK - 1)/(K - 1): λ = 1 leaves every model alone,
    λ = 1/K gives everybody the uniform mean, λ < 1/K overshoots it. Accumulated in float64, sites in sorted order. Integer
    entries keep each site's own value. One site alone is left as it is (the formula is undefined for K = 1).

    Args:
        states: site -> personal model; all with the same names and shapes.
        lam: λ in [0, 1].
    """
    sites = sorted(states)
    count = len(sites)
    if count < 2:
        return {site: dict(states[site]) for site in sites}
    pulled: dict[str, StateDict] = {site: {} for site in sites}
    for name, first in states[sites[0]].items():
        if not first.is_floating_point():
            for site in sites:
                pulled[site][name] = states[site][name].clone()
            continue
        total = torch.zeros_like(first, dtype=torch.float64)
        for site in sites:
            total += states[site][name].to(torch.float64)
        for site in sites:
            own = states[site][name].to(torch.float64)
            pulled[site][name] = (lam * own + (1 - lam) / (count - 1) * (total - own)).to(first.dtype)
    return pulled


# -- hyper-parameters ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedSMHyper(FedAvgServerHyper):
    """Both halves share one set of settings: the server must know what the sites send."""

    personalization: str = param(
        "softpull", "where personal models come from", source="Table 6", choices=("softpull", "finetune", "apfl", "perfedavg", "pfedme")
    )
    selector: str = param("auto", "selector; auto: VGG-11 unless larger than the task's", choices=("auto", "compact_selector", "vgg11"))
    selector_lr: float | str = param("auto", "Adam rate of the selector; auto: 0.001 for VGG-11, 0.01 for the compact one", low=0)
    selector_steps: str = param(
        "server",
        "server: one Adam step with the sites' mean gradient; fullbatch: one at each site; minibatch: one a batch",
        source="code / Alg. 1",
        choices=("server", "fullbatch", "minibatch"),
    )
    selector_updates: int = param(1, "selector updates a round; each further one is an exchange of the selector alone", low=1)
    sync_moments: bool = param(True, "fullbatch, minibatch: average Adam's moments; a site sees one label only", source="code")
    reset_optimizer: bool = param(False, "fresh optimizers every round; false keeps the moments of w_g and w_p", source="code")
    apfl_share: float = param(0.5, "APFL's share of the local model", symbol="α", source="Table 6", low=0, high=1)
    adapt_steps: int = param(1, "Per-FedAvg's adaptation steps", source="Table 6", low=1)
    adapt_lr: float = param(1e-3, "rate of Per-FedAvg's and pFedMe's inner steps", symbol="α", low=0)
    meta_lr: float = param(1e-3, "rate of their outer steps", symbol="β, η", low=0)
    pfedme_lambda: float = param(15.0, "pFedMe's pull to the shared model", symbol="λ", low=0)
    pfedme_steps: int = param(5, "pFedMe's inner steps per batch", symbol="K", low=1)

    lam: float = param(
        0.7, "SoftPull's share of the own model; 1/K is the mean, 1 leaves models alone", symbol="λ", source="Eq. 11", low=0, high=1
    )
    gamma: float | str = param(
        "tune", "confidence below which the global model answers, or tune on validation", symbol="γ", source="Sec. 3.2"
    )
    pfedme_beta: float = param(1.0, "pFedMe's server mixing", symbol="β", source="Table 6", low=0, high=1)


# -- site half -----------------------------------------------------------------------------------------------------------------


class FedSMSite(FedAvgSite):
    """Trains the global model, the site's personal model and the selector, one after the other, on the same images."""

    Hyper: ClassVar[type] = FedSMHyper
    phases = ("train", "train_selector", "validate", "tune")
    unprotected = "the selector learns from the same images, and its gradient or weights leave the site without noise"
    kind: ClassVar[str] = "super"  # of the deployed model

    def __init__(self, site: Site, hyper: FedSMHyper, sites: tuple[str, ...]):
        super().__init__(site, hyper, sites)
        self.plan = Plan(site.task, sites, hyper)
        self.selector_step = 0
        self.selector_moments: dict[str, StateDict] = {}
        self.apfl_local: StateDict | None = None

    @classmethod
    def outbound(cls, phase: str, plan: Plan) -> Manifest:
        entries: Manifest = {}
        if phase == "train_selector":
            return cls.selector_entries(plan)
        if phase == "train":
            entries["model"] = plain_entry(plan, "the site's locally trained global model, for the weighted mean")
            entries["personal"] = plain_entry(plan, "the site's personal model, a part of everybody's super model")
            if plan.hyper.personalization in SHARED_META:
                entries["meta"] = plain_entry(plan, "the site's copy of the model that personal models start from")
            entries |= cls.selector_entries(plan)
        return entries

    @classmethod
    def selector_outputs(cls, sites: Sequence[str]) -> int:
        """One score for every site."""
        return len(sites)

    @classmethod
    def selector_entries(cls, plan: Plan) -> Manifest:
        outputs = cls.selector_outputs(plan.sites)
        state = plan.template(selector_spec(plan), outputs)
        names = parameter_names(plan, outputs)
        parameters = {name: tensor for name, tensor in state.items() if name in names}
        if plan.hyper.selector_steps == "server":
            return {"selector_gradient": EntrySpec.like(parameters, "the gradient of the selector, which tells sites apart")}
        entries = {"selector": EntrySpec.like(state, "the selector that tells sites apart")}
        if plan.hyper.sync_moments:
            purpose = "Adam's {} of the selector: a site sees one label only, the mean has seen all"
            entries |= {f"selector_{m}": EntrySpec.like(parameters, purpose.format(m)) for m in MOMENTS}
        return entries

    def train(self, round: int, incoming: Message) -> Message:
        validation = self._validations(incoming)
        model = self.network("model", incoming.states["model"])
        losses = {"global": self._fit(model, round, "model")}
        states = {"model": copy_state(model.state_dict()), **self._personal(round, incoming)}
        if "selector" in incoming.states:
            selector, losses["selector"] = self.selector_round(round, incoming, self._own_label_loss)
            states |= selector
        return Message(states, self.facts(loss=losses["global"], validation=validation, losses=losses))

    def train_selector(self, round: int, incoming: Message) -> Message:
        """A further update of the selector alone within a round."""
        states, loss = self.selector_round(round, incoming, self._own_label_loss)
        return Message(states, self.facts(loss=loss, validation={}))

    def validate(self, round: int, incoming: Message) -> Message:
        return Message({}, self.facts(validation=self._validations(incoming)))

    def _validations(self, incoming: Message) -> dict[str, float | None]:
        """The incoming models on this site's validation images; the selector's is its accuracy for the site's own label."""
        found = {"global": self.validation(self.network("model", incoming.states["model"]))}
        found["personal"] = self.validation(self.network("personal", incoming.states["personal"]))
        if "selector" in incoming.states and len(self.site.data.validation):
            choices = self._selector_scores(incoming.states["selector"], "validation").argmax(dim=1)
            found["selector"] = float((choices == self.sites.index(self.site.name)).float().mean())
        return found

    def _fit(self, model: nn.Module, round: int, purpose: str) -> float:
        return self.optimized(model, purpose, lambda optimizer: train_epochs(model, optimizer, self.site, round, purpose))

    def _personal(self, round: int, incoming: Message) -> dict[str, StateDict]:
        """One round of the personal model (and of the shared model it starts from), by the chosen personalization."""
        kind, hyper, site = self.hyper.personalization, self.hyper, self.site
        start = incoming.states["model"] if kind == "finetune" else incoming.states["personal"]
        personal = self.network("personal", start)
        if kind in ("softpull", "finetune"):
            self._fit(personal, round, "personal")
        elif kind == "apfl":
            local = start if self.apfl_local is None else self.apfl_local
            self.apfl_local, mixture = train_apfl(personal, local, incoming.states["model"], site, round, hyper.apfl_share)
            return {"personal": mixture}
        else:
            meta = self.network("meta", incoming.states["meta"])
            train_meta(meta, personal, site, round, hyper)
            return {"personal": copy_state(personal.state_dict()), "meta": copy_state(meta.state_dict())}
        return {"personal": copy_state(personal.state_dict())}

    # the selector

    def _own_label_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """y_s = one_hot(k) for all images of site k (Eq. 2)."""
        return F.cross_entropy(logits, torch.full((len(logits),), self.sites.index(self.site.name), device=logits.device))

    def _selector(self, state: StateDict) -> nn.Module:
        return self.network("selector", state, selector_spec(self.plan), self.selector_outputs(self.sites))

    def _selector_scores(self, state: StateDict, split: str) -> Tensor:
        """Softmax scores (N, K or K + 1) of the split's images, on the CPU."""
        selector = self._selector(state).eval()
        with torch.no_grad():
            return torch.cat([selector(batch.images).softmax(dim=1).cpu() for batch in self.site.ordered(split)])

    def selector_round(self, round: int, incoming: Message, loss: SelectorLoss) -> tuple[dict[str, StateDict], float]:
        """One update of the selector: its gradient for the server, or local steps with the server's (else the site's) moments."""
        selector = self._selector(incoming.states["selector"])
        keys = (round, "selector", incoming.facts.get("update", 0))
        if self.hyper.selector_steps == "server":
            value = accumulate_gradient(selector, self.site, (*keys, 0), loss)
            return {"selector_gradient": gradient_of(selector)}, value
        synced = self.hyper.sync_moments
        moments = {m: incoming.states[f"selector_{m}"] for m in MOMENTS} if synced else self.selector_moments
        optimizer = adam_with_moments(selector, selector_rate(self.plan), moments, self.selector_step)
        value = train_selector(selector, optimizer, self.site, keys, loss, self.hyper.selector_steps)
        moments, self.selector_step = moments_of(selector, optimizer)
        states = {"selector": copy_state(selector.state_dict())}
        if not synced:
            self.selector_moments = moments
            return states, value
        return {**states, **{f"selector_{m}": state for m, state in moments.items()}}, value

    # gamma, delivery, state

    def tune(self, round: int, incoming: Message) -> Message:
        """The whole super model's validation metric for every candidate γ."""
        model = super_model(self.site.task, incoming).to(self.site.device)
        found = {"gammas": metric_by_gamma(model, self.site), "n_validation": self.site.n["validation"]}
        return Message({}, {**self.facts(validation={}), **found})

    def deliver(self, incoming: Message) -> dict[str, Message]:
        """The global model, this site's personal model (inside), and the super model."""
        models = {"global": plain_message(incoming.states["model"])}
        own = f"personal/{self.site.name}"
        if own in incoming.states:
            models["personal"] = plain_message(incoming.states[own])
        models["deployed"] = Message(incoming.states, {**incoming.facts, "kind": self.kind})
        return models

    def state(self) -> Message:
        message = super().state()
        message.facts["selector_step"] = self.selector_step
        if self.apfl_local is not None:
            message.states["apfl_local"] = self.apfl_local
        message.states.update({f"selector_{m}": state for m, state in self.selector_moments.items()})
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        self.selector_step = state.facts["selector_step"]
        self.apfl_local = state.states.get("apfl_local")
        self.selector_moments = {m: state.states[f"selector_{m}"] for m in MOMENTS if f"selector_{m}" in state.states}


# -- server half ---------------------------------------------------------------------------------------------------------------


class FedSMServer(FedAvgServer):
    """Averages the global model, the selector and its Adam moments; pulls the personal models towards each other."""

    Hyper: ClassVar[type] = FedSMHyper
    site_class: ClassVar[type[FedSMSite]] = FedSMSite

    def __init__(self, context: ServerContext, hyper: FedSMHyper):
        super().__init__(context, hyper)
        self.plan = Plan(context.task, context.sites, hyper)
        outputs = self.site_class.selector_outputs(context.sites)
        selector = context.initial_state("selector", selector_spec(self.plan), outputs)
        self.personal: dict[str, StateDict] = {site: copy_state(self.model) for site in context.sites}
        self.meta = copy_state(self.model)
        self.selector = {"selector": selector}
        moments = initial_moments(selector, parameter_names(self.plan, outputs))
        self.server_moments, self.selector_step = (moments, 0) if hyper.selector_steps == "server" else ({}, 0)
        if hyper.selector_steps != "server" and hyper.sync_moments:
            self.selector |= {f"selector_{moment}": state for moment, state in moments.items()}
        self.best_personal = {site: Best() for site in context.sites}
        self.best_selector = Best()
        self.gamma = 0.0 if hyper.gamma == "tune" else float(hyper.gamma)
        if hyper.personalization == "softpull" and hyper.lam * len(context.sites) < 1 < len(context.sites):
            context.events.add("warning", f"lam = {hyper.lam:g} is below 1/K = {1 / len(context.sites):.3g}: SoftPull overshoots the mean")

    def steps(self) -> list[Step]:
        steps = []
        for step in super().steps():
            further = self.hyper.selector_updates - 1 if step.phase == "train" else 0
            steps += [step, *(Step("train_selector", step.round, part=part + 1) for part in range(further))]
        tune = [Step("tune", self.context.rounds, everyone=True)] if self.hyper.gamma == "tune" else []
        return [*steps, *tune]

    def outgoing(self, step: Step, site: str) -> Message:
        if step.phase == "tune":
            return self.delivery(site)
        if step.phase == "train_selector":
            return Message(dict(self.selector), {"update": step.part})
        message = Message({"model": self.model, "personal": self.personal[site], **self.selector})
        if self.hyper.personalization in SHARED_META:
            message.states["meta"] = self.meta
        return message

    def accept(self, step: Step, replies: Mapping[str, Message]) -> None:
        if step.phase == "tune":
            self.gamma = tuned_gamma({site: reply.facts for site, reply in replies.items()})
            return
        if step.phase == "train_selector":
            self.aggregate_selector(replies)
            return
        self._select(step, replies)
        super().accept(step, replies)
        if step.phase == "train":
            self._aggregate_personal(replies)
            self.aggregate_selector(replies)

    def _select(self, step: Step, replies: Mapping[str, Message]) -> None:
        for site, reply in replies.items():
            self.best_personal[site].offer(reply.facts["validation"].get("personal"), step.round, self.personal[site])
        self.best_selector.offer(mean_validation(replies, "selector"), step.round, self.selector["selector"])

    def _aggregate_personal(self, replies: Mapping[str, Message]) -> None:
        """SoftPull among the sites that answered; the others keep their models."""
        answered = {site: reply.states["personal"] for site, reply in replies.items()}
        self.personal |= soft_pull(answered, self.hyper.lam) if self.hyper.personalization == "softpull" else answered
        if self.hyper.personalization in SHARED_META:
            mean = weighted_mean({s: r.states["meta"] for s, r in replies.items()}, sample_weights(replies, self.hyper.weighting))
            self.meta = blend(self.meta, mean, self.hyper.pfedme_beta) if self.hyper.personalization == "pfedme" else mean

    def aggregate_selector(self, replies: Mapping[str, Message]) -> None:
        """The selector (and its moments) averaged with the weights of the global model, or one step along the mean gradient."""
        weights = sample_weights(replies, self.hyper.weighting)
        if self.hyper.selector_steps == "server":
            mean = weighted_mean({site: reply.states["selector_gradient"] for site, reply in replies.items()}, weights)
            self.selector_step += 1
            stepped = adam_step(self.selector["selector"], mean, self.server_moments, self.selector_step, selector_rate(self.plan))
            self.selector["selector"], self.server_moments = stepped
            return
        for entry in self.selector:
            self.selector[entry] = weighted_mean({site: reply.states[entry] for site, reply in replies.items()}, weights)

    def delivery(self, site: str) -> Message:
        """The whole super model: every site may meet images that another site's model knows better."""
        best = self.hyper.selection == "best"
        message = super().delivery(site)
        message.states["selector"] = (best and self.best_selector.state) or self.selector["selector"]
        for name, state in self.personal.items():
            message.states[f"personal/{name}"] = (best and self.best_personal[name].state) or state
        message.facts |= {"gamma": self.gamma, "sites": list(self.context.sites), "selector": dict(selector_spec(self.plan))}
        message.facts |= {"rounds": {name: found.round for name, found in sorted(self.best_personal.items())}} if best else {}
        return message

    def models(self) -> dict[str, Message]:
        whole = self.delivery(self.context.sites[0])
        personal = {f"personal/{site}": plain_message(whole.states[f"personal/{site}"]) for site in self.context.sites}
        return {**super().models(), **personal, "deployed": Message(whole.states, {**whole.facts, "kind": self.site_class.kind})}

    def state(self) -> Message:
        message = super().state()
        message.facts |= {"gamma": self.gamma, "selector_step": self.selector_step}
        message.states |= {"meta": self.meta, **self.selector, **{f"personal/{site}": s for site, s in self.personal.items()}}
        message.states |= {f"server_{moment}": state for moment, state in self.server_moments.items()}
        self.best_selector.pack("selector", message)
        for site, found in self.best_personal.items():
            found.pack(f"personal/{site}", message)
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        self.gamma, self.meta = state.facts["gamma"], state.states["meta"]
        self.selector_step = state.facts["selector_step"]
        self.server_moments = {moment: state.states[f"server_{moment}"] for moment in self.server_moments}
        self.selector = {entry: state.states[entry] for entry in self.selector}
        self.personal = {site: state.states[f"personal/{site}"] for site in self.personal}
        self.best_selector.unpack("selector", state)
        for site, found in self.best_personal.items():
            found.unpack(f"personal/{site}", state)
