"""IOP-FL's site algorithm: FedAvg's, with a local adapted model P_k beside it; outside, a network routed over all of them."""

from dataclasses import replace
from typing import Any, ClassVar

from medflare.adaptation.registry import with_tent
from medflare.core.errors import StateError
from medflare.core.manifest import Phase, TensorSpec
from medflare.core.message import Message
from medflare.core.states import batch_norm_entries, copy_state
from medflare.inference.deployed import Repeated, plain_message
from medflare.methods.base import N_SAMPLES, Capability, PersistentState, Plan
from medflare.methods.fedavg.site import GLOBAL, MODEL, SELECTED_ROUND, TRAIN, VALIDATE, FedAvgSite, received, trained_model
from medflare.methods.iop_fl.formulas import local_adapted
from medflare.methods.iop_fl.hyper import IOPHyper
from medflare.methods.iop_fl.outside import EXPERT, ROUTER, SHARES, routed_message, routed_model
from medflare.methods.iop_fl.routing import Statistics
from medflare.methods.parts.selection import Best
from medflare.training.epochs import finite_or_none
from medflare.training.site import Site

ADAPTED = TensorSpec("adapted", "the site's local adapted model, of which outside sites route their own")


class IOPSite(FedAvgSite[IOPHyper]):
    """FedAvg's site with a local adapted model P_k, chosen over the rounds by the site's own validation."""

    Hyper: ClassVar[type] = IOPHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset({"accumulate"})
    phases: ClassVar[tuple[Phase, ...]] = (TRAIN, VALIDATE, Phase("submit", reply=(ADAPTED,), reply_meta=(N_SAMPLES, SELECTED_ROUND)))
    delivery: ClassVar[Phase | None] = Phase(
        "finalize", request=(GLOBAL, EXPERT), request_meta=(SELECTED_ROUND.as_optional(), SHARES.as_optional())
    )
    adapted = PersistentState("adapted")  # P_k

    def __init__(self, site: Site, plan: Plan[IOPHyper, Any]):
        super().__init__(site, plan)
        self.best = Best(self.memory, "adapted")

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training; its local model goes into P_k (Eq. 4), whose metric is measured before."""
        global_ = incoming.states[GLOBAL]
        personal = self._look(round)
        reply = super().train(round, incoming)
        if self.adapted is None:  # P_k^0 = w_g, which has just been measured
            self.adapted, personal = copy_state(global_), reply.meta["validation"]["global"]
        self.adapted = local_adapted(self.adapted, reply.states[MODEL], self.hyper.tau)
        reply.meta["validation"]["personal"] = personal
        return reply

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming global model and of P_k."""
        personal = self._look(round)
        reply = super().validate(round, incoming)
        reply.meta["validation"]["personal"] = personal
        return reply

    def _look(self, round: int) -> float | None:
        """P_k as of this round's start, measured and offered for delivery; None while there is none."""
        if self.adapted is None:
            return None
        value = finite_or_none(self.validation(self.network("model", self.adapted)))
        self.best.offer(value, round, self.adapted)
        return value

    def submit(self, round: int, incoming: Message) -> Message:
        """P_k leaves the site once, at the end, and only where an outside site takes part.

        Raises:
            StateError: the site has trained in no round.
        """
        if self.adapted is None:
            raise StateError(f"site {self.site.name} took part in no round and has no local adapted model to submit")
        selected, behind = self.best.chosen(self.plan.server_hyper.selection, self.adapted)
        return Message({ADAPTED: selected}, {N_SAMPLES: self.site.n["train"], SELECTED_ROUND: behind})

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """Inside: the global model and P_k. Outside: the global model and the routed one, fitted to this site's test images."""
        models = {"global": received(incoming)}
        if self.inside:
            if self.adapted is not None:
                rule = self.plan.server_hyper.selection
                behind = incoming.meta.get(SELECTED_ROUND) if rule == "last" else None  # of an elected model it says nothing of P_k
                models["personal"] = trained_model(*self.best.chosen(rule, self.adapted, behind))
            models["deployed"] = models.get("personal", models["global"])
        elif EXPERT.family(incoming.states):
            models["deployed"] = self._routed(incoming)
            if self.hyper.comparisons:
                models |= self._comparisons(incoming)
        else:
            models["deployed"] = models["global"]
        return models

    def _routed(self, incoming: Message) -> Message:
        message = routed_message(incoming, self.hyper, self.site.seed)
        model = routed_model(self.site.task, message).to(self.site.device)
        model.adapt(Repeated(lambda: (batch.images for batch in self.site.ordered("test", self.site.scoring_batch))))
        message.states[ROUTER] = model.network.adapted_state()
        message.meta["adaptation"] = model.adaptation
        return message

    def _comparisons(self, incoming: Message) -> dict[str, Message]:
        """What routing has to beat: Table II's rows, and the controls that take no step.

        Table II: every personal model by itself (their mean metric is "Average"), their ensemble, and Tent. Controls: w_g with the
        statistics of the test batch ("batch_statistics"), and the uniform mixture ("mixture") with those, or with w_g's own
        ("mixture_running").
        """
        experts, global_ = EXPERT.family(incoming.states), incoming.states[GLOBAL]
        models = {"ensemble": Message(dict(experts), {"kind": "ensemble"})}
        models |= {f"personal/{site}": plain_message(state) for site, state in experts.items()}
        if batch_norm_entries(self.network("model", global_)):
            models["tent"] = with_tent(plain_message(global_), self.site.task)
            models["batch_statistics"] = with_tent(plain_message(global_), self.site.task, steps=0, episodic=True)
            models["mixture_running"] = self._mixture(incoming, "running")
        models["mixture"] = self._mixture(incoming, self.hyper.bn_statistics)
        return models

    def _mixture(self, incoming: Message, statistics: Statistics) -> Message:
        """The routed model before any step."""
        return routed_message(incoming, replace(self.hyper, route_epochs=0, bn_statistics=statistics), self.site.seed)
