"""FedAvg of a part of the model, as in FedBN and FedRep.

The entries of a `LocalPart` never leave their site. An inside site uses the shared part with its
own. For outside sites every inside site sends its part once, after the last round, and they get the
mean. `FedAvgServer` does the server's side for every site algorithm that declares a smaller model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from medflare.core.message import FinalModels, Message
from medflare.core.phases import phase
from medflare.core.specs import TensorSpec
from medflare.core.states import StateDict, split_state
from medflare.methods.base import PersistentState, Plan
from medflare.methods.fedavg.personal import PersonalSite
from medflare.methods.fedavg.site import MODEL, SELECTED_ROUND, F, received
from medflare.methods.parts.measured import MEASURED, VALIDATION
from medflare.methods.parts.partial import LocalPart
from medflare.networks.features import copied_state
from medflare.training.site import Site

# Their shapes follow from a subclass's `parts`.
SHARED = TensorSpec("model", "the shared part of the site's model, for the weighted mean")
LOCAL = TensorSpec("local", "the local part, for the mean that outside sites get")


class PartialSite(PersonalSite[F]):
    """Trains the shared part together with the site's own; a subclass defines `local_paths`
    or `local_part`.

    The site keeps its model of the best round by its own validation, both parts together.

    Attributes:
        local_paths: modules of the network that stay at the site.
    """

    dp_unsupported_reason = "the local part is trained on the same images without being counted"
    local_paths: ClassVar[Sequence[str]]
    local = PersistentState("local")  # the local part

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        local = replace(LOCAL, template=lambda plan: cls.parts(plan)[0])
        model = replace(SHARED, template=lambda plan: cls.parts(plan)[1])
        cls.phases |= {
            "train": replace(cls.phases["train"], request=(model,), reply=(model,)),
            "validate": replace(cls.phases["validate"], request=(model,)),
            "share": replace(cls.phases["share"], reply=(local,)),
        }

    def __init__(self, site: Site, plan: Plan[F, Any]):
        super().__init__(site, plan)
        local, _ = self.parts(plan)
        self.part = LocalPart(frozenset(local))

    @classmethod
    def local_part(cls, network: nn.Module) -> LocalPart:
        """The entries of a network that stay at the site."""
        return LocalPart.of_paths(network, cls.local_paths)

    @classmethod
    def parts(cls, plan: Plan[F, Any]) -> tuple[StateDict, StateDict]:
        """Shapes and dtypes of what stays at the site, and of what is shared."""
        return split_state(plan.template(), cls.local_part(plan.network()).names)

    def joined(self, shared: StateDict) -> StateDict:
        """The site's model: the shared entries and its own, which before the first training are
        those of the common initial model.
        """
        if self.local is None:
            self.local = self.part.local(copied_state(self.site.network()))
        return {**shared, **self.local}

    @phase(request=(SHARED,), reply=(SHARED,), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training of both parts together; the reply holds the shared one."""
        start = self.joined(incoming[SHARED])
        reply = super().train(round, Message.of({MODEL: start}))
        self.selection.add(reply[VALIDATION]["global"], round, start)
        trained = reply[MODEL]
        self.local = self.part.local(trained)
        reply[SHARED] = {name: trained[name] for name in incoming[SHARED]}
        return reply

    @phase(request=(SHARED,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metric of the site's whole model, which also enters the selection."""
        model = self.joined(incoming[SHARED])
        reply = super().validate(round, Message.of({MODEL: model}))
        self.selection.add(reply[VALIDATION]["global"], round, model)
        return reply

    @phase(reply=(LOCAL,), meta=MEASURED)
    def share(self, round: int, incoming: Message) -> Message:
        """Sends the local part, once, after the last round."""
        return self.reply({LOCAL: self.part.local(self.joined({}))})

    def finalize(self, incoming: Message) -> FinalModels:
        """The site's own model in all roles inside; the global model with the mean of the local
        parts outside.
        """
        if not self.inside:
            return dict.fromkeys(("global", "deployed"), received(incoming))
        last = self.joined(self.part.shared(incoming[MODEL]))
        model = self.selection.final(last, incoming.get(SELECTED_ROUND))
        return dict.fromkeys(("global", "personal", "deployed"), model)
