"""IOP-FL's site algorithm: FedAvg's with a local adapted model P_k; outside, a network routed over
all of them.
"""

from dataclasses import replace

from medflare.adaptation.registry import with_tent
from medflare.core.errors import StateError
from medflare.core.states import batch_norm_entries
from medflare.inference.deployed import Repeated
from medflare.methods import (
    MODEL,
    N_SAMPLES,
    SELECTED_ROUND,
    FedAvgHyper,
    Message,
    PersistentState,
    StateDict,
    TensorSpec,
    param,
    phase,
    plain_message,
    strict_dataclass,
)
from medflare.methods.families.second_models.site import SecondModelSite
from medflare.methods.iop_fl.formulas import local_adapted
from medflare.methods.iop_fl.outside import (
    EXPERTS,
    ROUTER,
    OutsideHyper,
    routed_message,
    routed_model,
)
from medflare.methods.iop_fl.routing import Statistics

ADAPTED = TensorSpec(
    "adapted", "the site's local adapted model, an expert of the routed models of outside sites"
)


@strict_dataclass
class IOPHyper(OutsideHyper, FedAvgHyper):
    """Training inside, routing outside."""

    tau: float = param(
        0.9,
        "accumulation rate; 1 gives the local model of the round",
        symbol="τ",
        source="Eq. 4, Fig. 6",
        low=0,
        high=1,
    )


class IOPSite(SecondModelSite[IOPHyper]):
    """FedAvg's site algorithm with a local adapted model P_k; the site uses the one of the best
    round by its own validation.
    """

    selection_name = "adapted"
    personal = PersistentState("adapted")  # P_k

    def personalize(self, round: int, shared: StateDict, trained: StateDict) -> None:
        """Updates P_k (Eq. 4); P_k^0 is the incoming global model."""
        self.personal = local_adapted(self.personal or shared, trained, self.hyper.tau)

    @phase(reply=(ADAPTED,), meta=(N_SAMPLES, SELECTED_ROUND))
    def submit(self, round: int, incoming: Message) -> Message:
        """Sends P_k, once, at the end, if there are outside sites.

        Raises:
            StateError: the site has not trained.
        """
        if self.personal is None:
            raise StateError(
                f"site {self.site.name} has not trained and has no local adapted model to submit"
            )
        model = self.selection.final(self.personal)
        reply = Message.of({ADAPTED: model[MODEL], N_SAMPLES: self.site.n["train"]})
        reply[SELECTED_ROUND] = model[SELECTED_ROUND]
        return reply

    @phase(request=(MODEL, EXPERTS), request_meta=(SELECTED_ROUND.as_optional(),))
    def finalize(self, incoming: Message) -> dict[str, Message]:
        """The global model and, inside, P_k; outside, the routed model, fitted to this site's test
        images.
        """
        models = super().finalize(incoming)
        if not self.inside and incoming.family(EXPERTS):
            models["deployed"] = self._routed(incoming, self.hyper)
            if self.hyper.comparisons:
                models |= self._comparisons(incoming)
        return models

    def _routed(self, incoming: Message, hyper: IOPHyper) -> Message:
        message = routed_message(incoming, hyper, self.site.seed)
        model = routed_model(self.site.task, message).to(self.site.device)
        size = self.site.scoring_batch
        batches = Repeated(lambda: (batch.images for batch in self.site.ordered("test", size)))
        model.adapt(batches)
        message[ROUTER] = model.network.adapted_state()
        message.meta["adaptation"] = model.adaptation
        return message

    def _comparisons(self, incoming: Message) -> dict[str, Message]:
        """Comparators of routing: the rows of Table II, and controls without adaptation.

        Table II: every personal model (their mean metric is "Average"), their ensemble, and Tent.
        Routing by the printed objective ("printed_objective"). Controls: w_g with the statistics of
        the test batch ("batch_statistics"), and the uniform mixture with these ("mixture") or with
        w_g's own ("mixture_running").
        """
        experts = incoming.family(EXPERTS)
        shared = plain_message(incoming[MODEL])
        task = self.site.task
        models = {"ensemble": Message(dict(experts), {"kind": "ensemble"})}
        for site, state in experts.items():
            models[f"personal/{site}"] = plain_message(state)
        if batch_norm_entries(self.network("model", incoming[MODEL])):
            models["tent"] = with_tent(shared, task)
            models["batch_statistics"] = with_tent(shared, task, steps=0, episodic=True)
            models["mixture_running"] = self._mixture(incoming, "running")
        models["mixture"] = self._mixture(incoming, self.hyper.bn_statistics)
        if self.hyper.objective != "paper":
            printed = replace(self.hyper, objective="paper")
            models["printed_objective"] = self._routed(incoming, printed)
        return models

    def _mixture(self, incoming: Message, statistics: Statistics) -> Message:
        """The routed model before any step."""
        hyper = replace(self.hyper, route_epochs=0, bn_statistics=statistics)
        return routed_message(incoming, hyper, self.site.seed)
