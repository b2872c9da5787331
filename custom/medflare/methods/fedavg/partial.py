"""FedAvg of a part of the model: the entries of a `LocalPart` never leave their site, as in FedBN and FedRep.

An inside site uses the shared part with its own. For outside sites every inside site sends its part once, after the last round, and they
get the mean. `FedAvgServer` does the server's side for every site algorithm that declares a smaller model.
"""

from typing import Any, ClassVar, TypeVar

from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.manifest import Phase, TensorSpec
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods.base import MEASURED, Capability, PersistentState, Plan
from medflare.methods.fedavg.site import GLOBAL, LOCAL, MODEL, SELECTED_ROUND, FedAvgSite, FedAvgSiteHyper, received, trained_model
from medflare.methods.parts.partial import LocalPart
from medflare.methods.parts.selection import Best
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

F = TypeVar("F", bound=FedAvgSiteHyper)


class PartialSite(FedAvgSite[F]):
    """Trains the shared part together with the site's own; a subclass defines `local_part`, from which its phases follow.

    The site keeps its model of the best round by its own validation, both parts together.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset({"accumulate"})
    dp_unsupported_reason = "the local part is trained on the same images without being counted"
    local = PersistentState("local")  # the local part

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "phases" in vars(cls):
            return

        def shared(plan: Plan[Any, Any]) -> StateDict:
            return cls.local_part(plan.network()).shared(plan.template())

        def local(plan: Plan[Any, Any]) -> StateDict:
            return cls.local_part(plan.network()).kept(plan.template())

        model = TensorSpec(MODEL, "the shared part of the site's model, for the weighted mean", shared)
        local_state = TensorSpec(LOCAL, "the local part, for the mean that outside sites get", local)
        cls.phases = (
            Phase("train", request=(model,), reply=(model,), reply_meta=MEASURED),
            Phase("validate", request=(model,), reply_meta=MEASURED),
            Phase("share", reply=(local_state,), reply_meta=MEASURED),
        )

    def __init__(self, site: Site, plan: Plan[F, Any]):
        super().__init__(site, plan)
        self.part = self.local_part(plan.network())
        self.best = Best(self.memory, "personal")

    @classmethod
    def local_part(cls, network: nn.Module) -> LocalPart:
        """The entries of a network that stay at the site."""
        raise NotImplementedError

    @classmethod
    def check(cls, task: TaskConfig, hyper: F, server_hyper: Any) -> None:
        """Also raises ConfigError if nothing of the network would be shared."""
        super().check(task, hyper, server_hyper)
        network = Plan(task, (), hyper, server_hyper).network()
        if not cls.local_part(network).shared(network.state_dict()):
            raise ConfigError(f"task {task.name}: all of network {task.network['name']} would stay at the site, nothing is left to share")

    def joined(self, shared: StateDict) -> StateDict:
        """The site's model: the shared entries with its own, which are those of the common initial model before the first training."""
        if self.local is None:
            self.local = self.part.kept(copy_state(self.site.network().state_dict()))
        return {**shared, **self.local}

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training of both parts together; the reply holds the shared one."""
        start = self.joined(incoming.states[GLOBAL])
        reply = super().train(round, Message({GLOBAL: start}, incoming.meta))
        self.best.offer(reply.meta["validation"]["global"], round, start)
        trained = reply.states[MODEL]
        self.local = self.part.kept(trained)
        return Message({MODEL: self.part.shared(trained)}, reply.meta)

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metric of the site's whole model, which also enters the selection."""
        model = self.joined(incoming.states[GLOBAL])
        reply = super().validate(round, Message({GLOBAL: model}, incoming.meta))
        self.best.offer(reply.meta["validation"]["global"], round, model)
        return reply

    def share(self, round: int, incoming: Message) -> Message:
        return Message({LOCAL: self.part.kept(self.joined({}))}, self.meta(validation={}))

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """Inside, the site's own model in all roles. Outside, the global model with the mean of the local parts."""
        if not self.inside:
            return dict.fromkeys(("global", "deployed"), received(incoming))
        last = self.joined(self.part.shared(incoming.states[GLOBAL]))
        selected = self.best.chosen(self.plan.server_hyper.selection, last, incoming.meta.get(SELECTED_ROUND))
        return dict.fromkeys(("global", "personal", "deployed"), trained_model(*selected))
