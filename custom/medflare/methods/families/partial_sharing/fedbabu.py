"""FedBABU (Oh et al., ICLR 2022, Alg. 1): the body alone is trained and averaged.

The head keeps its common random start in all rounds. After the last one every site fine-tunes the
whole model, see `fedavg.fine_tuning`.
"""

from torch.optim import Optimizer

from medflare.methods import (
    MEASURED,
    MODEL,
    FeatureNetwork,
    LocalPart,
    Message,
    StateDict,
    TensorSpec,
    copied_state,
    phase,
)
from medflare.methods.fedavg.fine_tuning import FineTunedSite, FineTuningHyper

BODY = TensorSpec(
    "model",
    "the site's locally trained body, for the weighted mean",
    lambda plan: LocalPart.of_paths(plan.network(), ["head"]).shared(plan.template()),
    rest="initial",
)


class FedBABUSite(FineTunedSite[FineTuningHyper]):
    """Trains the body under the common head."""

    uses_features = True

    def whole(self, body: StateDict) -> StateDict:
        """The body with the initial head."""
        return {**copied_state(self.site.network()), **body}

    @phase(request=(BODY,), reply=(BODY,), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training with a frozen head; the reply holds the body."""
        reply = super().train(round, Message.of({MODEL: self.whole(incoming[BODY])}))
        reply[BODY] = {name: reply[MODEL][name] for name in incoming[BODY]}
        return reply

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        with model.frozen(["head"]):
            return super().fit(model, optimizer, round)

    @phase(request=(BODY,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metric of the incoming body under the common head."""
        return super().validate(round, Message.of({MODEL: self.whole(incoming[BODY])}))
