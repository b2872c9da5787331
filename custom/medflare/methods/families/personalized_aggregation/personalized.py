"""What the methods of this package share: a model for every site, selected by its site alone."""

import math
from typing import TypeVar

import torch

from medflare.core.message import FinalModels
from medflare.methods import (
    MEASURED,
    MODEL,
    SELECTED_ROUND,
    VALIDATION,
    Message,
    PersonalSite,
    Replies,
    ServerAlgorithm,
    ServerContext,
    ServerHyper,
    StateDict,
    Step,
    TensorSpec,
    asks,
    handles,
    phase,
)
from medflare.methods.fedavg.site import F
from medflare.training.epochs import MeanLoss

G = TypeVar("G", bound=ServerHyper)
TRAINED = TensorSpec("model", "the site's trained model, to be combined with those of other sites")
# In the server's memory: each site's last trained model.
PERSONALS = TensorSpec("personal", of=lambda plan: plan.sites)


def family_message(memory: Message, family: TensorSpec) -> Message:
    """A message with all members of a family that the memory holds."""
    members = memory.family(family)
    return Message({family.member(name).name: state for name, state in members.items()})


class PersonalizedSite(PersonalSite[F]):
    """Trains a personal model; the site uses the one of the best round by its validation images."""

    dp_unsupported_reason = (
        "models are compared or chosen without noise, and the validation metric leaves the site"
    )

    def start(self, incoming: Message) -> StateDict:
        """The site's model at the start of a round, from what the server sent."""
        return incoming[MODEL]

    @phase(request=(MODEL,), reply=(TRAINED,), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """Validates the site's model, which becomes a candidate, and trains it as FedAvg."""
        start = self.start(incoming)
        reply = super().train(round, Message.of({MODEL: start}))
        value = reply[VALIDATION]["global"]
        self.selection.add(value, round, start)
        reply[VALIDATION] = {"personal": value}
        return reply

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metric of the site's model, which becomes a candidate."""
        value = self.selection.validated(round, self.start(incoming))
        return self.reply(validation={"personal": value})

    def finalize(self, incoming: Message) -> FinalModels:
        """The model of the best round; if the site never trained, its model as it is now."""
        model = self.selection.final(self.start(incoming), incoming.get(SELECTED_ROUND))
        return dict.fromkeys(("personal", "deployed"), model)

    def mean_loss(self, state: StateDict, split: str) -> float:
        """The task's loss of a model on a split of the site, in evaluation mode: the mean over the
        images, infinity without images or if it is not finite.
        """
        model = self.frozen(state)
        mean = MeanLoss()
        with torch.no_grad():
            for batch in self.site.ordered(split, self.site.scoring_batch):
                mean.add(self.site.loss(model(batch.images), batch.targets), len(batch.images))
        loss = mean.value()
        return loss if math.isfinite(loss) else math.inf


class PersonalizedServer(ServerAlgorithm[G]):
    """Stores every site's last trained model, which still counts if the site misses a round."""

    site_algorithm = PersonalizedSite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.initial = context.initial_state()

    def personal(self, site: str) -> StateDict:
        """The site's last trained model; the initial one if it has not trained."""
        return self.memory.get(PERSONALS.member(site)) or self.initial

    @asks(PersonalizedSite.train, PersonalizedSite.validate)
    def request(self, step: Step, site: str) -> Message:
        """The site's model."""
        return Message.of({MODEL: self.personal(site)})

    @handles(PersonalizedSite.train)
    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """Stores the trained models."""
        for site, reply in replies.items():
            self.memory[PERSONALS.member(site)] = reply[TRAINED]

    def configure_final(self, site: str) -> Message:
        """The site's last model."""
        rounds = self.context.rounds if PERSONALS.member(site) in self.memory else 0
        return Message.of({MODEL: self.personal(site), SELECTED_ROUND: rounds})
