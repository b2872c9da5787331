"""PRR-Imbalance (Chen et al., IEEE TMI 2022): personalized models that do not lose what they knew at every exchange.

The server gives every site a model of its own (Progressive Fourier Aggregation): low frequencies averaged, high ones the
site's. It lands in a deputy model D_k; the personal model P_k is never overwritten. Deputy-Enhanced Transfer trains both on
the same batches and lets them teach each other in stages. The CPA loss balances classes by their counts over all sites and by
how far a site's class prototypes are from the others'. Batch normalisation stays at the site. The formulas stand in
`prr_fourier.py` and `prr_math.py`, the loss on images and pixels in `prr_supervision.py`, the training in `prr_transfer.py`.

Without any of the three parts (pfa=false det=false cpa=off) this is FedBN (Li et al., ICLR 2021).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.manifest import EntrySpec, Manifest
from medflare.core.message import Message
from medflare.core.rng import torch_generator
from medflare.core.states import StateDict, batch_norm_entries, copy_state, split_state, weighted_mean
from medflare.inference.deployed import plain_message
from medflare.methods.base import Plan, ServerContext, ServerHalf, Step
from medflare.methods.fedavg import FedAvgSite
from medflare.methods.parts.selection import Best
from medflare.methods.parts.training import finite_or_none
from medflare.methods.prr.formulas import conjoint_mask, cpa_loss, global_prototypes, most_representative, next_stage, prototype_gamma
from medflare.methods.prr.fourier import aggregate_models, fourier_aggregate, frequency_ratio, treatments
from medflare.methods.prr.supervision import SitePrototypes, Supervision, class_names, class_totals, meta_network, prototype_width
from medflare.methods.prr.transfer import Transfer
from medflare.networks.features import FeatureNetwork
from medflare.sites.site import Site

__all__ = [
    "PRRHyper",
    "PRRServer",
    "PRRSite",
    "conjoint_mask",
    "cpa_loss",
    "fourier_aggregate",
    "frequency_ratio",
    "next_stage",
    "prototype_gamma",
]


@dataclass(frozen=True)
class PRRHyper:
    """One set of settings for both halves: the server must know what the sites send."""

    pfa: bool = param(True, "Fourier aggregation at the server; false is the plain mean, as FedBN", source="Eq. 1-4, Table IV")
    r0: float = param(0.35, "low-frequency threshold of the first round", symbol="r_0", source="Table VII", low=0, high=0.5)
    r1: float = param(0.48, "threshold it grows to; the official code ends at 0.475", symbol="r_1", source="Table VII", low=0, high=0.5)
    components: str = param("both", "what is averaged", source="Table V", choices=("both", "amplitude", "phase"))
    phase_mean: str = param(
        "arithmetic", "mean of the angles, or angle of the mean phasor", source="Eq. 4", choices=("arithmetic", "circular")
    )
    window: str = param(
        "closed", "low band |k| <= rN, or the code's half-open one", symbol="M", source="Eq. 2", choices=("closed", "official")
    )
    layout: str = param(
        "in_major", "a convolution's matrix: the code's (I kh, kw O) or the printed (O kh, I kw)", choices=("in_major", "out_major")
    )

    det: bool = param(True, "a deputy beside the personal model; false: one model, replaced every round", source="Eq. 5-6, Table IV")
    det_steps: str = param("RES", "Exchange; Recover + Exchange; + Sublimate", source="Table VI", choices=("E", "RE", "RES"))
    lam1: float = param(0.7, "share of the personal metric from which the deputy teaches", symbol="λ_1", source="Table VIII", low=0)
    lam2: float = param(0.9, "share from which the deputy learns from labels alone", symbol="λ_2", source="Table VIII", low=0)
    stage_rule: str = param("official", "the code's stage machine or the printed thresholds", choices=("official", "threshold"))
    metric_split: str = param(
        "validation", "images on which the two models are compared; the code takes train", choices=("validation", "train")
    )
    distillation: str = param("kl", "what a student pays for differing", source="Eq. 5-6", choices=("kl", "mse10"))

    cpa: str = param("both", "CPA loss, one of its parts, or off", source="Eq. 13, Table IV", choices=("both", "global", "local", "off"))
    beta: float = param(0.8, "exponent of the conjoint objective", symbol="β", source="Eq. 9, Table IX", low=0)
    tau: float = param(3.0, "smoothing of the prototype distance", symbol="τ", source="Eq. 12, Table IX", low=1)
    plain_loss: str = param("task", "L_sup where cpa is off", source="Table XI", choices=("task", "ce", "focal", "fedeamc"))
    segmentation_loss: str = param(
        "paper", "CPA + Dice, or the code's (CPA + CE) / 2 + Dice", source="Sec. IV-A", choices=("paper", "official")
    )
    prototypes: str = param(
        "gaussian", "global prototypes: sampled, sampled with the code's clamp, or the mean", choices=("gaussian", "clamped", "mean")
    )
    prototype_pass: str = param(
        "training", "local prototypes from the training pass or a pass of their own", choices=("training", "separate")
    )
    embedding: str = param("features", "what a prototype is the mean of", source="Eq. 10", choices=("features", "logits"))
    warm_up: int = param(1, "first rounds without refinement; the code: 15 of 50, segmentation 1", low=0)

    halve_every: int = param(0, "rounds after which the learning rate halves, 0 never; the paper: 5", source="Sec. IV-A", low=0)
    selection: str = param("best", "each site keeps its best round by its own validation, or the last", choices=("best", "last"))
    outside: str = param(
        "mean", "model for outside sites: mean deputy, or the most representative site's personal model", choices=("mean", "personal")
    )

    def __post_init__(self) -> None:
        for low, high in (("r0", "r1"), ("lam1", "lam2")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(
                    f"hyper-parameters {low} = {getattr(self, low)}, {high} = {getattr(self, high)}: {low} must not be larger"
                )

    @property
    def supervision(self) -> str:
        return self.plain_loss if self.cpa == "off" else self.cpa

    @property
    def refines(self) -> bool:
        """Whether prototypes travel."""
        return self.cpa in ("both", "local")


class PRRSite(FedAvgSite):
    """Trains the deputy and the personal model together; only the deputy, without batch normalisation, leaves the site.

    With DET off there is one model: the incoming one with the site's own batch normalisation.
    """

    Hyper: ClassVar[type] = PRRHyper
    phases = ("train", "validate", "share")
    unprotected = "class prototypes are means of image features that leave the site, and two models teach each other on every batch"

    def __init__(self, site: Site, hyper: PRRHyper, sites: tuple[str, ...]):
        super().__init__(site, hyper, sites)
        self.local = batch_norm_entries(meta_network(site.task))
        self.width = prototype_width(site.task, hyper.embedding) if hyper.refines else 0
        self.personal: StateDict | None = None  # P_k, None before the first training
        self.normalisation: StateDict | None = None  # the deputy's batch normalisation
        self.prototypes: StateDict = {}
        self.best = {role: Best() for role in ("global", "personal")}

    @classmethod
    def outbound(cls, phase: str, plan: Plan) -> Manifest:
        state = plan.template()
        normalisation, deputy = split_state(state, batch_norm_entries(meta_network(plan.task)))
        if phase == "share" and plan.hyper.outside == "personal":
            return {"personal": EntrySpec.like(state, "the site's personal model, a candidate for outside sites")}
        if phase == "share":
            return {"normalisation": EntrySpec.like(normalisation, "the deputy's batch normalisation, for the mean that outside sites get")}
        if phase != "train":
            return {}
        manifest = {"model": EntrySpec.like(deputy, "the site's deputy model without batch normalisation, for the Fourier aggregation")}
        if plan.hyper.refines:
            purpose = "mean embedding of each class, and of how many training images or pixels it is the mean"
            width = prototype_width(plan.task, plan.hyper.embedding)
            manifest["prototypes"] = EntrySpec.like(SitePrototypes(plan.task, width, plan.hyper.embedding, "meta").state(), purpose)
        return manifest

    # a round

    def train(self, round: int, incoming: Message) -> Message:
        personal, deputy = self._models(incoming)
        validation = self._measure(round, personal, deputy)
        prototypes = incoming.states.get("prototypes", {}).get("prototypes")
        supervision = Supervision(
            self.site,
            self.hyper.supervision,
            beta=self.hyper.beta,
            tau=self.hyper.tau,
            totals=torch.tensor(incoming.facts["class_totals"]),
            global_=prototypes if round >= self.hyper.warm_up else None,
            mix=self.hyper.segmentation_loss,
        )
        transfer = Transfer(self.site, self.hyper, personal, deputy, supervision, self.width, self.prototypes)
        loss = transfer.run(round, validation)
        self.prototypes = transfer.prototypes
        self.personal = copy_state(personal.state_dict())
        self.normalisation, shared = split_state(copy_state(deputy.state_dict()), self.local)
        states = {"model": shared, "prototypes": self.prototypes} if self.hyper.refines else {"model": shared}
        return Message(states, self.facts(loss=loss, validation=validation, stages=transfer.stages))

    def validate(self, round: int, incoming: Message) -> Message:
        return Message({}, self.facts(validation=self._measure(round, *self._models(incoming))))

    def share(self, round: int, incoming: Message) -> Message:
        """What the model for outside sites is made of: asked for once, after the last round, where there are such sites."""
        if self.hyper.outside == "personal":
            return Message({"personal": self._delivered(incoming)["personal"]}, self.facts(validation={}))
        return Message({"normalisation": split_state(self._deputy_state(incoming), self.local)[0]}, self.facts(validation={}))

    def _deputy_state(self, incoming: Message) -> StateDict:
        """S_k with the site's own batch normalisation; that of the common initial model before the first training."""
        if self.normalisation is None:
            self.normalisation = split_state(copy_state(self.site.network().state_dict()), self.local)[0]
        return {**self.normalisation, **incoming.states["model"]}

    def _models(self, incoming: Message) -> tuple[FeatureNetwork, FeatureNetwork]:
        """(P_k, D_k); P_k starts as the first model that the site is sent. With DET off both are the deputy."""
        state = self._deputy_state(incoming)
        deputy = cast(FeatureNetwork, self.network("model", state))
        if not self.hyper.det:
            return deputy, deputy
        return cast(FeatureNetwork, self.network("personal", self.personal or state)), deputy

    def _measure(self, round: int, personal: nn.Module, deputy: nn.Module) -> dict[str, float | None]:
        """Validation metric of both models as the round begins; the site itself keeps its best ones."""
        models = {"global": deputy, "personal": personal}
        found = {"global": finite_or_none(self.validation(deputy))}
        found["personal"] = found["global"] if personal is deputy else finite_or_none(self.validation(personal))
        for role, model in models.items():
            self.best[role].offer(found[role], round, model.state_dict())
        return found

    # delivery, state

    def _delivered(self, incoming: Message) -> dict[str, StateDict]:
        """The site's final deputy and personal model: of its best round or of the last one."""
        deputy = self._deputy_state(incoming)
        last = {"global": deputy, "personal": self.personal if self.hyper.det and self.personal else deputy}
        chosen = {role: self.best[role].state if self.hyper.selection == "best" else None for role in last}
        return {role: chosen[role] or state for role, state in last.items()}

    def deliver(self, incoming: Message) -> dict[str, Message]:
        """Inside, a site uses its personal model; "global" is its deputy. A site that never trained uses what it is sent."""
        if self.personal is None:
            return dict.fromkeys(("global", "deployed"), plain_message(self._deputy_state(incoming)))
        models = {role: plain_message(state) for role, state in self._delivered(incoming).items()}
        return {**models, "deployed": models["personal"]}

    def state(self) -> Message:
        entries = {"personal": self.personal, "normalisation": self.normalisation, "prototypes": self.prototypes}
        message = Message({entry: state for entry, state in entries.items() if state is not None})
        for role, best in self.best.items():
            best.pack(role, message)
        return message

    def restore(self, state: Message) -> None:
        self.personal, self.normalisation = state.states.get("personal"), state.states.get("normalisation")
        self.prototypes = state.states["prototypes"]
        for role, best in self.best.items():
            best.unpack(role, state)


class PRRServer(ServerHalf):
    """Gives every site a model of its own by Fourier aggregation, and samples the global prototypes.

    A site that misses a round keeps its last model; one that comes later starts from the mean of the others' deputies.
    """

    Hyper: ClassVar[type] = PRRHyper

    def __init__(self, context: ServerContext, hyper: PRRHyper):
        super().__init__(context, hyper)
        network = meta_network(context.task)
        self.treatments = treatments(network)
        self.complete = not batch_norm_entries(network)  # whether `outside` has batch normalisation of its own, where it needs any
        self.aggregated: dict[str, StateDict] = {}  # S_k of the sites that have trained
        self.outside: StateDict = context.initial_state()
        self.mean: StateDict = split_state(self.outside, batch_norm_entries(network))[1]
        self.prototypes: StateDict = {}
        if self.complete:
            context.events.add("warning", f"network {context.task.network['name']} has no batch normalisation: PRR keeps none local")

    def steps(self) -> list[Step]:
        share = Step("share", self.context.rounds, everyone=True)
        needed = self.context.outside and (self.hyper.outside == "personal" or "local" in {t.kind for t in self.treatments.values()})
        return [*super().steps(), share] if needed else super().steps()

    @property
    def class_totals(self) -> Tensor:
        """(G, C) training images or pixels of each class over the inside sites that have enrolled."""
        counts = self.context.site_counts
        return class_totals(self.context.task, {site: counts[site] for site in self.context.sites if site in counts})

    def outgoing(self, step: Step, site: str) -> Message:
        message = Message({"model": self.aggregated.get(site, self.mean)}, {"class_totals": self.class_totals.tolist()})
        if self.prototypes:
            message.states["prototypes"] = self.prototypes
        return message

    def accept(self, step: Step, replies: Mapping[str, Message]) -> None:
        if step.phase == "train":
            self._aggregate(step.round, replies)
        elif step.phase == "share":
            self.outside, self.complete = self._outside(replies), True

    def _aggregate(self, round: int, replies: Mapping[str, Message]) -> None:
        hyper = self.hyper
        if round == 0:
            self._note_absent_classes(self.class_totals)
        deputies = {site: reply.states["model"] for site, reply in replies.items()}
        r = frequency_ratio(round, self.context.rounds, hyper.r0, hyper.r1)
        options = {name: getattr(hyper, name) for name in ("layout", "window", "components", "phase_mean")}
        self.aggregated |= aggregate_models(deputies, self.treatments, r, fourier=hyper.pfa, **options)
        self.mean = weighted_mean(deputies, dict.fromkeys(deputies, 1.0))
        self.outside = {**self.outside, **self.mean}
        if hyper.refines:
            local = torch.stack([reply.states["prototypes"]["prototypes"] for reply in replies.values()])
            counts = torch.stack([reply.states["prototypes"]["counts"] for reply in replies.values()])
            noise = torch.randn(local.shape[1:], generator=torch_generator(self.context.seed, "server", round, "prototypes"))
            self.prototypes = {"prototypes": global_prototypes(local, counts > 0, noise, hyper.prototypes)}

    def _note_absent_classes(self, totals: Tensor) -> None:
        for names, counts in zip(class_names(self.context.task), totals, strict=True):
            for name, count in zip(names, counts, strict=True):
                if count == 0:
                    self.context.events.add("warning", f"class {name} is in no site's training images: the CPA loss leaves it as it is")

    def _outside(self, replies: Mapping[str, Message]) -> StateDict:
        """The model for sites that never trained: the mean deputy, or the personal model of the most representative site."""
        if self.hyper.outside == "mean":
            parts = {site: reply.states["normalisation"] for site, reply in replies.items()}
            return {**self.mean, **weighted_mean(parts, dict.fromkeys(parts, 1.0))}
        counts = self.context.site_counts
        chosen = most_representative({site: class_totals(self.context.task, {site: counts[site]}) for site in replies})
        return replies[chosen].states["personal"]

    def delivery(self, site: str) -> Message:
        return Message({"model": self.outside if site in self.context.outside else self.aggregated.get(site, self.outside)})

    def models(self) -> dict[str, Message]:
        """The model for sites that never trained, where the sites have given what it is made of."""
        return {"global": plain_message(self.outside)} if self.complete else {}

    def state(self) -> Message:
        models = {f"model/{site}": state for site, state in self.aggregated.items()}
        entries = {"mean": self.mean, "outside": self.outside, "prototypes": self.prototypes}
        return Message({**entries, **models}, {"complete": self.complete})

    def restore(self, state: Message) -> None:
        self.mean, self.outside, self.prototypes = (state.states[entry] for entry in ("mean", "outside", "prototypes"))
        self.complete = state.facts["complete"]
        self.aggregated = {site: state.states[f"model/{site}"] for site in self.context.sites if f"model/{site}" in state.states}
