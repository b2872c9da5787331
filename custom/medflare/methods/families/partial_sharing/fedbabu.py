"""FedBABU (Oh et al., ICLR 2022, Alg. 1): the body alone is trained and averaged.

The head keeps its common random start in all rounds. After the last one every site fine-tunes the
whole model, see `fedavg.fine_tuning`.
"""

from typing import Any

import torch

from medflare.core.message import Message
from medflare.core.phases import phase
from medflare.core.specs import TensorSpec
from medflare.core.states import StateDict, copy_state
from medflare.methods.base import Plan
from medflare.methods.fedavg.fine_tuning import FineTunedSite, FineTuningHyper
from medflare.methods.fedavg.site import MODEL
from medflare.methods.parts.measured import MEASURED
from medflare.methods.parts.partial import LocalPart
from medflare.networks.features import FeatureNetwork


def _body(plan: Plan[Any, Any]) -> StateDict:
    return LocalPart.of_paths(plan.network(), ["head"]).shared(plan.template())


BODY = TensorSpec(
    "model", "the site's locally trained body, for the weighted mean", _body, rest="initial"
)


class FedBABUSite(FineTunedSite[FineTuningHyper]):
    """Trains the body under the common head."""

    uses_features = True

    def whole(self, body: StateDict) -> StateDict:
        """The body with the initial head."""
        return {**copy_state(self.site.network().state_dict()), **body}

    @phase(request=(BODY,), reply=(BODY,), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training with a frozen head; the reply holds the body."""
        reply = super().train(round, Message.of({MODEL: self.whole(incoming[BODY])}))
        reply[BODY] = {name: reply[MODEL][name] for name in incoming[BODY]}
        return reply

    def fit(
        self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int
    ) -> float | None:
        with model.frozen(["head"]):
            return super().fit(model, optimizer, round)

    @phase(request=(BODY,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metric of the incoming body under the common head."""
        return super().validate(round, Message.of({MODEL: self.whole(incoming[BODY])}))
