"""IOP-FL's site half: FedAvg's, with a local adapted model P_k beside it; outside, a network routed over all of them."""

from dataclasses import replace
from typing import Any, ClassVar

from medflare.core.errors import ConfigError, StateError
from medflare.core.manifest import Entry, Phase
from medflare.core.message import Message
from medflare.core.states import StateDict, batch_norm_entries, copy_state, difference
from medflare.data.sites.site import Site
from medflare.inference.adaptation import with_tent
from medflare.inference.deployed import Repeated, plain_message
from medflare.inference.routing import Statistics, routed_layers
from medflare.methods.base import N_SAMPLES, Capability, Kept, Plan
from medflare.methods.fedavg.site import GLOBAL, MODEL, SELECTED_ROUND, TRAIN, VALIDATE, FedAvgSite, received, trained_model
from medflare.methods.iop_fl.formulas import local_adapted, local_adapted_explicit, local_adapted_incremental, site_step
from medflare.methods.iop_fl.hyper import IOPHyper
from medflare.methods.iop_fl.outside import EXPERT, ROUTER, SHARES, routed_message, routed_model
from medflare.methods.parts.selection import Best
from medflare.methods.parts.training import finite_or_none
from medflare.networks.catalogue import meta_network
from medflare.tasks.config import TaskConfig

ADAPTED = Entry("adapted", "the site's local adapted model, of which outside sites route their own")


class IOPSite(FedAvgSite[IOPHyper]):
    """FedAvg's site with a local adapted model P_k, chosen over the rounds by the site's own validation."""

    Hyper: ClassVar[type] = IOPHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset({"accumulate"})
    phases: ClassVar[tuple[Phase, ...]] = (TRAIN, VALIDATE, Phase("submit", answers=(ADAPTED,), reports=(N_SAMPLES, SELECTED_ROUND)))
    delivery: ClassVar[Phase | None] = Phase("deliver", sends=(GLOBAL, EXPERT), tells=(SELECTED_ROUND.maybe(), SHARES.maybe()))
    adapted = Kept("adapted")  # P_k
    local_step = Kept("site_step")  # reading "explicit": a `site_step` that waits for its round's global model
    last_global = Kept("last_global")  # reading "incremental": the global model of the last round that was seen

    def __init__(self, site: Site, plan: Plan[IOPHyper, Any]):
        super().__init__(site, plan)
        self.best = Best(self.memory, "adapted")
        self.learnt = frozenset(name for name, _ in plan.network().named_parameters())

    @classmethod
    def check(cls, task: TaskConfig, hyper: IOPHyper, server_hyper: Any) -> None:
        """As FedAvg's; layers that keep their coefficients are layers of the network that are routed.

        Raises:
            ConfigError: one that is not.
        """
        super().check(task, hyper, server_hyper)
        if fixed := hyper.routed(0).fixed_layers:
            found = [name for name, _ in routed_layers(meta_network(task))]
            if unknown := sorted(set(fixed) - set(found)):
                network = f"network {task.network['name']} has no layer {', '.join(unknown)} to route"
                raise ConfigError(f"fixed_layers: {network}; layers found: {', '.join(found) or 'none'}")

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training; its local model goes into P_k (Eq. 4), whose metric is measured before."""
        global_ = incoming.states[GLOBAL]
        personal = self._look(round, global_)
        reply = super().train(round, incoming)
        if self.adapted is None and self.hyper.start == "global":  # P_k^0 = w_g, which has just been measured
            self.adapted, personal = copy_state(global_), reply.facts["validation"]["global"]
        self._accumulate(global_, reply.states[MODEL])
        reply.facts["validation"]["personal"] = personal
        return reply

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming global model and of P_k."""
        personal = self._look(round, incoming.states[GLOBAL])
        reply = super().validate(round, incoming)
        reply.facts["validation"]["personal"] = personal
        return reply

    def _look(self, round: int, global_: StateDict) -> float | None:
        """P_k as of this round's start, measured and offered for delivery; None while there is none."""
        if self.adapted is None:
            return None
        if self.local_step is not None:
            self.adapted = local_adapted_explicit(self.adapted, global_, self.local_step, self.hyper.tau, self.learnt)
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
            self.local_step = site_step(local, global_, self.learnt)
        else:
            global_step = difference(global_, global_ if last is None else last)
            self.adapted = local_adapted_incremental(self.adapted, site_step(local, global_, self.learnt), global_step, tau, self.learnt)
        if self.hyper.reading == "incremental":
            self.last_global = copy_state(global_)

    def submit(self, round: int, incoming: Message) -> Message:
        """P_k leaves the site once, at the end, and only where an outside site takes part.

        Raises:
            StateError: the site has trained in no round.
        """
        if self.adapted is None:
            raise StateError(f"site {self.site.name} took part in no round and has no local adapted model to submit")
        selected, behind = self.best.chosen(self.plan.server_hyper.selection, self.adapted)
        return Message({ADAPTED: selected}, {N_SAMPLES: self.site.n["train"], SELECTED_ROUND: behind})

    def deliver(self, incoming: Message) -> dict[str, Message]:
        """Inside: the global model and P_k. Outside: the global model and the routed one, fitted to this site's test images."""
        models = {"global": received(incoming)}
        if self.inside:
            if self.adapted is not None:
                rule = self.plan.server_hyper.selection
                behind = incoming.facts.get(SELECTED_ROUND) if rule == "last" else None  # of an elected model it says nothing of P_k
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
        message.facts["adaptation"] = model.adaptation
        return message

    def _comparisons(self, incoming: Message) -> dict[str, Message]:
        """What routing has to beat: Table II's rows, and the controls that take no step.

        Table II: every personal model by itself (their mean metric is "Average"), their ensemble, and Tent. Controls: w_g with the
        statistics of the test batch ("batch_statistics"), and the uniform mixture ("mixture") with those, or with w_g's own
        ("mixture_running").
        """
        experts, global_ = EXPERT.family(incoming.states), incoming.states[GLOBAL]
        members = {**experts, "global": global_} if self.hyper.ensemble_global else experts
        models = {"ensemble": Message(dict(members), {"kind": "ensemble"})}
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
