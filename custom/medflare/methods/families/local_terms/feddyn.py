"""FedDyn (Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Alg. 1).

    w_k <- argmin_w  F_k(w) - <h_k, w> + α/2 ||w - w_g||²
    h_k <- h_k - α (w_k - w_g)
    h <- h - (α/N) Σ_{k in S} (w_k - w_g),   w_g <- (1/|S|) Σ_{k in S} w_k - h/α

The minimum is approached by the task's local epochs. N are all inside sites, S those of the round,
so h is the mean of all h_k. Site and server store c_k = -h_k/α and c = -h/α, sums of changes, as
SCAFFOLD its control variates: c_k stays at its site and changes once the server has used the site's
model. If update validation clips a model, c moves by the clipped change, c_k by the whole one.
Entries that are not trained, such as running statistics, are averaged.

The first round's training is FedProx's with μ = α. α = 0 is refused: c moves the mean by all
earlier changes whatever α is, so that it would not be FedAvg, and would diverge.
"""

from medflare.core.states import difference, moved
from medflare.methods import (
    MEASURED,
    MODEL,
    FeatureNetwork,
    FedAvgSiteHyper,
    Message,
    Replies,
    StateDict,
    Step,
    param,
    phase,
    proximal_term,
    strict_dataclass,
)
from medflare.methods.families.local_terms.scaffold import COUNTED, CountedServer, CountedSite
from medflare.training.graph import Hook


@strict_dataclass
class FedDynHyper(FedAvgSiteHyper):
    """The dynamic regularizer."""

    alpha: float = param(
        0.01,
        "weight of the regularizer",
        symbol="α",
        source="Eq. 1; 0.01 as in the authors' CIFAR-10 example",
        low=1e-4,
    )


def shifted(state: StateDict, control: StateDict, scale: float) -> StateDict:
    """The entries of `control` in a model, plus scale * control."""
    return moved({name: state[name] for name in control}, control, scale)


class FedDynSite(CountedSite[FedDynHyper]):
    """FedAvg's site algorithm with the dynamic regularizer."""

    @phase(request=(MODEL,), request_meta=(COUNTED,), reply=(MODEL,), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training; the change of the model is c_k's update."""
        control = self.current_control(incoming)
        reply = super().train(round, incoming)
        trained = {name: reply[MODEL][name] for name in control}
        self.remember_update(round, difference(trained, incoming[MODEL]))
        return reply

    @classmethod
    def proximal_strength(cls, hyper: FedDynHyper) -> float:
        return hyper.alpha

    def round_hook(self, model: FeatureNetwork, round: int) -> Hook:
        """The hook that adds the regularizer's gradient; the loss that is reported is the task's.

        -h_k + α (w - w_g) is α (w - anchor) with the anchor w_g + h_k/α = w_g - c_k.
        """
        control = self.site.computing.state_on_device(self.control)
        anchor = shifted(model.state_dict(), control, -1.0)
        return proximal_term(model, anchor, self.hyper.alpha)


class FedDynServer(CountedServer):
    """FedAvg's server algorithm, whose mean moves by c = -h/α."""

    site_algorithm = FedDynSite

    def update_of(self, reply: Message, start: StateDict) -> StateDict:
        """w_k - w_g."""
        return difference({name: reply[MODEL][name] for name in self.control_sum}, start)

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """FedAvg's aggregation, then the step by c."""
        super().aggregate_models(step, replies)
        self.model = {**self.model, **shifted(self.model, self.control, 1.0)}
