"""FedAvg of a part of the model: what a `LocalPart` names never leaves its site, as FedBN and FedRep need it.

Inside, a site's model is the shared part with the site's own. An outside site has no part of its own: where there is one, every
inside site sends its part once, after the last round, and the outside site gets their mean. `FedAvgServer` does the server's side for
every site algorithm that declares a smaller model.
"""

from typing import Any, ClassVar, TypeVar

from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.manifest import Phase, TensorSpec
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods.base import MEASURED, Capability, PersistentState, Plan
from medflare.methods.fedavg.site import GLOBAL, MODEL, OWN, SELECTED_ROUND, FedAvgSite, FedAvgSiteHyper, received, trained_model
from medflare.methods.parts.partial import LocalPart
from medflare.methods.parts.selection import Best
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

F = TypeVar("F", bound=FedAvgSiteHyper)


class PartialSite(FedAvgSite[F]):
    """Trains the shared part together with the site's own; a subclass says which part that is, and its phases follow from it.

    The site keeps its model of the best round by its own validation, both parts together.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset({"accumulate"})
    dp_unsupported_reason = "the part that stays at home is trained on the same images and is not counted"
    own = PersistentState("own")  # the part that stays

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "phases" not in vars(cls):
            cls.phases = phases_of(cls)

    def __init__(self, site: Site, plan: Plan[F, Any]):
        super().__init__(site, plan)
        self.part = self.local_part(plan.network())
        self.best = Best(self.memory, "personal")

    @classmethod
    def local_part(cls, network: nn.Module) -> LocalPart:
        """The entries of a network that stay at home.

        Raises:
            NotImplementedError: a subclass does not say.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, task: TaskConfig, hyper: F, server_hyper: Any) -> None:
        """Refuse a network of which nothing would be shared.

        Raises:
            ConfigError: every entry would stay at home.
        """
        super().check(task, hyper, server_hyper)
        network = Plan(task, (), hyper, server_hyper).network()
        if not cls.local_part(network).shared(network.state_dict()):
            raise ConfigError(f"task {task.name}: all of network {task.network['name']} would stay at home, nothing is left to share")

    def joined(self, shared: StateDict) -> StateDict:
        """The site's model: the shared part with its own, which is that of the common initial model before the first training.

        Args:
            shared: the entries that came from the server.

        Returns:
            All entries of the network.
        """
        if self.own is None:
            self.own = self.part.kept(copy_state(self.site.network().state_dict()))
        return {**shared, **self.own}

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training of both parts together; the reply holds the shared one."""
        start = self.joined(incoming.states[GLOBAL])
        reply = super().train(round, Message({GLOBAL: start}, incoming.meta))
        self.best.offer(reply.meta["validation"]["global"], round, start)
        trained = reply.states[MODEL]
        self.own = self.part.kept(trained)
        return Message({MODEL: self.part.shared(trained)}, reply.meta)

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metric of the site's whole model, a candidate for delivery."""
        model = self.joined(incoming.states[GLOBAL])
        reply = super().validate(round, Message({GLOBAL: model}, incoming.meta))
        self.best.offer(reply.meta["validation"]["global"], round, model)
        return reply

    def share(self, round: int, incoming: Message) -> Message:
        """The part that stays at home, asked for once, after the last round, where there are outside sites."""
        return Message({OWN: self.part.kept(self.joined({}))}, self.meta(validation={}))

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """Inside, all a site has is its own model. Outside, it is what the server made of everybody's parts."""
        if not self.inside:
            return dict.fromkeys(("global", "deployed"), received(incoming))
        last = self.joined(self.part.shared(incoming.states[GLOBAL]))
        chosen = self.best.chosen(self.plan.server_hyper.selection, last, incoming.meta.get(SELECTED_ROUND))
        return dict.fromkeys(("global", "personal", "deployed"), trained_model(*chosen))


def phases_of(site_class: type[PartialSite[Any]]) -> tuple[Phase, ...]:
    """The phases of an algorithm that shares all but its `local_part`."""

    def part(plan: Plan[Any, Any]) -> LocalPart:
        return site_class.local_part(plan.network())

    shared = TensorSpec(
        MODEL, "the shared part of the site's model, for the weighted mean", lambda plan: part(plan).shared(plan.template())
    )
    own = TensorSpec(OWN, "the part that stays at home, for the mean that outside sites get", lambda plan: part(plan).kept(plan.template()))
    return (
        Phase("train", request=(shared,), reply=(shared,), reply_meta=MEASURED),
        Phase("validate", request=(shared,), reply_meta=MEASURED),
        Phase("share", reply=(own,), reply_meta=MEASURED),
    )
