"""The model that a site uses itself: that of its best round, by its own validation images."""

from typing import Any, ClassVar

from medflare.core.message import FinalModels, Message
from medflare.core.states import StateDict
from medflare.methods.base import Plan, SiteAlgorithm
from medflare.methods.fedavg.site import F, FedAvgSite, final_models, trained_model
from medflare.methods.parts.measured import VALIDATION
from medflare.methods.parts.selection import Best, Selection
from medflare.training.site import Site


class PersonalModel(Best):
    """The selection of a site algorithm's personal model, in the algorithm's memory.

    Args:
        name: of the selection in the memory.
    """

    def __init__(self, algorithm: SiteAlgorithm, name: str = "personal"):
        super().__init__(algorithm.memory, name)
        self._algorithm = algorithm
        self._rule: Selection = algorithm.plan.server_hyper.selection

    def validated(
        self, round: int, state: StateDict | None, purpose: str = "model"
    ) -> float | None:
        """The validation metric of the model at the start of a round, a candidate; None without a
        model.

        Args:
            purpose: of the network that computes it, see `SiteAlgorithm.network`.
        """
        if state is None:
            return None
        value = self._algorithm.validation(self._algorithm.network(purpose, state))
        self.add(value, round, state)
        return value

    def add(self, value: float | None, rounds_trained: int, state: StateDict) -> None:
        """Add a candidate with its validation metric, which does not count by the rule "last"."""
        if self._rule == "last":
            value = None
        self.propose(value, rounds_trained, state)

    def add_trained(self, round: int, state: StateDict, reply: Message) -> None:
        """Add a candidate that this round has trained; its metric enters the reply."""
        value = self._algorithm.validation(self._algorithm.network("model", state))
        reply[VALIDATION]["personal"] = value
        self.add(value, round + 1, state)

    def final(self, last: StateDict, rounds_trained: int | None = None) -> Message:
        """The selected model; by the rule "last" it is `last`, with its `rounds_trained`."""
        return trained_model(*self.chosen(self._rule, last, rounds_trained))

    def best(self) -> Message | None:
        """The best candidate; None without any."""
        if self.state is None:
            return None
        return trained_model(self.state, self.round)


class PersonalSite(FedAvgSite[F]):
    """FedAvg's site algorithm with a model of the site alone, which the site uses.

    Attributes:
        selection: selects that model; its name in the memory is `selection_name`.
    """

    freezes = False
    selection_name: ClassVar[str] = "personal"

    def __init__(self, site: Site, plan: Plan[F, Any]):
        super().__init__(site, plan)
        self.selection = PersonalModel(self, self.selection_name)

    def finalize(self, incoming: Message) -> FinalModels:
        """The best personal model inside (the global one if the site never trained); the global
        model outside.
        """
        models = final_models(incoming, self.selection.best())
        if self.inside:
            models.setdefault("personal", models["global"])
        return models
