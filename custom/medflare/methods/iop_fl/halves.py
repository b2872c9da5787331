"""IOP-FL (Jiang et al., IEEE TMI 2023): personal models for sites inside and outside the federation.

Inside, FedAvg runs unchanged and every site keeps a local adapted model beside it, P_k <- (1 - τ) P_k + τ w_k (Eq. 4), which is
never sent while training goes on. Outside, a site that never trained receives {P_1, ..., P_K, w_g} and mixes their layers by
coefficients that it fits to its unlabelled images (Eq. 5-10, `iop_outside.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from medflare.core.errors import StateError
from medflare.core.hyper import param
from medflare.core.manifest import Manifest
from medflare.core.message import Message
from medflare.core.states import StateDict, batch_norm_entries, copy_state, difference
from medflare.inference.deployed import plain_message
from medflare.methods.base import Plan, ServerContext, Step, plain_entry
from medflare.methods.fedavg import FedAvgHyper, FedAvgServer, FedAvgServerHyper, FedAvgSite
from medflare.methods.grace.adaptation import AdaptationHyper, with_adaptation
from medflare.methods.iop_fl.formulas import (
    consistency_loss,
    entropy_loss,
    local_adapted,
    local_adapted_explicit,
    local_adapted_incremental,
    shape_loss,
)
from medflare.methods.iop_fl.outside import EXPERT, ROUTER, OutsideHyper, experts_of, routed_message, routed_model
from medflare.methods.parts.selection import Best
from medflare.methods.parts.training import finite_or_none
from medflare.sites.site import Site

__all__ = ["IOPHyper", "IOPServer", "IOPSite", "consistency_loss", "entropy_loss", "local_adapted", "shape_loss"]


@dataclass(frozen=True)
class IOPHyper(OutsideHyper, FedAvgServerHyper, FedAvgHyper):
    tau: float = param(0.9, "accumulation rate; 1 gives the local model of the round", symbol="τ", source="Eq. 4, Fig. 6", low=0, high=1)
    reading: str = param(
        "ema_local",
        "what P_k moves to: w_k; this round's w_g and then the local step; or both steps without averaging",
        source="Eq. 4",
        choices=("ema_local", "explicit", "incremental"),
    )
    start: str = param(
        "global", "P_k^0: the initial global model, or the first local one as in the code", source="Alg. 1", choices=("global", "local")
    )


class IOPSite(FedAvgSite):
    """FedAvg's site with a local adapted model P_k, chosen over the rounds by the site's own validation."""

    Hyper: ClassVar[type] = IOPHyper
    phases = ("train", "validate", "submit")

    def __init__(self, site: Site, hyper: IOPHyper, sites: tuple[str, ...]):
        super().__init__(site, hyper, sites)
        self.adapted: StateDict | None = None  # P_k
        self.best = Best()
        self.local_step: StateDict | None = None  # reading "explicit": a step that waits for its round's global model
        self.last_global: StateDict | None = None  # reading "incremental": the global model of the last round that was seen

    @classmethod
    def outbound(cls, phase: str, plan: Plan) -> Manifest:
        if phase == "submit":
            return {"adapted": plain_entry(plan, "the site's local adapted model, of which outside sites route their own")}
        return super().outbound(phase, plan)

    def train(self, round: int, incoming: Message) -> Message:
        global_ = incoming.states["model"]
        personal = self._look(round, global_)
        reply = super().train(round, incoming)
        if self.adapted is None and self.hyper.start == "global":  # P_k^0 = w_g, which has just been measured
            self.adapted, personal = copy_state(global_), reply.facts["validation"]["global"]
        self._accumulate(global_, reply.states["model"])
        reply.facts["validation"]["personal"] = personal
        return reply

    def validate(self, round: int, incoming: Message) -> Message:
        personal = self._look(round, incoming.states["model"])
        reply = super().validate(round, incoming)
        reply.facts["validation"]["personal"] = personal
        return reply

    def _look(self, round: int, global_: StateDict) -> float | None:
        """P_k as of this round's start, measured and offered for delivery; None while there is none."""
        if self.adapted is None:
            return None
        if self.local_step is not None:
            self.adapted = local_adapted_explicit(self.adapted, global_, self.local_step, self.hyper.tau)
            self.local_step = None
        value = finite_or_none(self.validation(self.network("model", self.adapted)))
        self.best.offer(value, round, self.adapted)
        return value

    def _accumulate(self, global_: StateDict, local: StateDict) -> None:
        """Eq. 4 after local training, in the chosen reading."""
        tau, last, self.last_global = self.hyper.tau, self.last_global, None
        if self.adapted is None:
            self.adapted = copy_state(local)  # start "local"
        elif self.hyper.reading == "ema_local":
            self.adapted = local_adapted(self.adapted, local, tau)
        elif self.hyper.reading == "explicit":
            self.local_step = difference(local, global_)
        else:
            global_step = difference(global_, global_ if last is None else last)
            self.adapted = local_adapted_incremental(self.adapted, difference(local, global_), global_step, tau)
        if self.hyper.reading == "incremental":
            self.last_global = copy_state(global_)

    @property
    def selected(self) -> StateDict | None:
        return self.best.state if self.hyper.selection == "best" and self.best.state is not None else self.adapted

    def submit(self, round: int, incoming: Message) -> Message:
        """P_k leaves the site once, at the end, and only where an outside site takes part."""
        if self.selected is None:
            raise StateError(f"site {self.site.name} took part in no round and has no local adapted model to submit")
        return Message({"adapted": self.selected}, {"n_samples": self.site.n["train"], "selected_round": self.best.round})

    def deliver(self, incoming: Message) -> dict[str, Message]:
        """Inside: the global model and P_k. Outside: the global model and the routed one, fitted to this site's test images."""
        models = {"global": plain_message(incoming.states["model"])}
        if self.site.name in self.sites:
            if self.selected is not None:
                models["personal"] = plain_message(self.selected, selected_round=self.best.round)
            models["deployed"] = models.get("personal", models["global"])
        elif experts_of(incoming.states):
            models["deployed"] = self._routed(incoming)
            if self.hyper.comparisons:
                models |= self._comparisons(incoming)
        else:
            models["deployed"] = models["global"]
        return models

    def _routed(self, incoming: Message) -> Message:
        message = routed_message(incoming, self.hyper, self.site.seed)
        model = routed_model(self.site.task, message).to(self.site.device)
        model.adapt([batch.images for batch in self.site.ordered("test", self.site.scoring_batch)])
        message.states[ROUTER] = model.network.adapted_state()
        message.facts["adaptation"] = model.adaptation
        return message

    def _comparisons(self, incoming: Message) -> dict[str, Message]:
        """Table II beside routing: every personal model by itself (their mean metric is "Average"), their ensemble, and Tent."""
        experts, global_ = experts_of(incoming.states), incoming.states["model"]
        members = {**experts, "global": global_} if self.hyper.ensemble_global else experts
        models = {"ensemble": Message(dict(members), {"kind": "ensemble"})}
        models |= {f"personal/{site}": plain_message(state) for site, state in experts.items()}
        if batch_norm_entries(self.network("model", global_)):
            models["tent"] = with_adaptation(plain_message(global_), self.site.task, AdaptationHyper(tta="tent"))
        return models

    def state(self) -> Message:
        message = super().state()
        kept = {"adapted": self.adapted, "local_step": self.local_step, "last_global": self.last_global}
        message.states |= {entry: state for entry, state in kept.items() if state is not None}
        self.best.pack("adapted", message)
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        self.adapted, self.local_step, self.last_global = (state.states.get(entry) for entry in ("adapted", "local_step", "last_global"))
        self.best.unpack("adapted", state)


class IOPServer(FedAvgServer):
    """FedAvg's server; where outside sites take part, it collects every P_k at the end and hands them on with w_g."""

    def __init__(self, context: ServerContext, hyper: FedAvgServerHyper):
        super().__init__(context, hyper)
        self.experts: dict[str, StateDict] = {}

    def steps(self) -> list[Step]:
        submit = [Step("submit", self.context.rounds, everyone=True)] if self.context.outside else []
        return [*super().steps(), *submit]

    def outgoing(self, step: Step, site: str) -> Message:
        return Message() if step.phase == "submit" else super().outgoing(step, site)

    def accept(self, step: Step, replies: Mapping[str, Message]) -> None:
        if step.phase == "submit":
            self.experts = {site: reply.states["adapted"] for site, reply in replies.items()}
        else:
            super().accept(step, replies)

    def delivery(self, site: str) -> Message:
        message = super().delivery(site)
        if site in self.context.outside:
            message.states |= {f"{EXPERT}{name}": state for name, state in self.experts.items()}
        return message

    def models(self) -> dict[str, Message]:
        return {**super().models(), **{f"personal/{site}": plain_message(state) for site, state in self.experts.items()}}

    def state(self) -> Message:
        message = super().state()
        message.states |= {f"{EXPERT}{name}": state for name, state in self.experts.items()}
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        self.experts = experts_of(state.states)
