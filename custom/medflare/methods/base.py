"""The two halves of a method. They know nothing of FLARE, files or processes; an engine carries messages between them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from medflare.core.errors import ConfigError, UpdateError
from medflare.core.events import EventLog
from medflare.core.hyper import NoHyper
from medflare.core.manifest import EntrySpec, Manifest
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.methods.parts.training import finite_or_none
from medflare.networks.catalogue import build_network, initial_network
from medflare.sites.site import Site
from medflare.tasks.config import TaskConfig


@dataclass(frozen=True)
class Step:
    """One exchange with the sites.

    Attributes:
        phase: the name of the site half's method that answers: "train", "validate", ...
        round: 0-based; steps after the last round carry the number of rounds.
        everyone: ask all inside sites, also in a round for which only some were drawn.
        part: 0-based number of the exchange where a phase comes more than once in a round.
    """

    phase: str
    round: int
    everyone: bool = False
    part: int = 0


@dataclass(frozen=True)
class Plan:
    """What both halves know before anything is trained.

    Attributes:
        sites: names of the inside sites, sorted; a site's place in it is its label for as long as the federation lasts.
    """

    task: TaskConfig
    sites: tuple[str, ...]
    hyper: Any

    def template(self, spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> StateDict:
        """Shapes and dtypes of a network's state, without memory or random numbers (meta device)."""
        with torch.device("meta"):
            network = build_network(spec or self.task.network, self.task.channels, outputs or self.task.outputs)
        return network.state_dict()


@dataclass
class ServerContext:
    """What a server half is given.

    Attributes:
        site_counts: site -> its answer to "enrol": {"n": {"train", "validation", "test"}, "class_counts": [...]}; filled as sites enrol.
        events: where the half reports what it noticed.
        aggregation: site -> what this step's aggregation made of it, see `note`; the schedule takes it up after every step.
    """

    task: TaskConfig
    seed: int
    rounds: int
    sites: tuple[str, ...]
    outside: tuple[str, ...] = ()
    site_counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: EventLog = field(default_factory=EventLog)
    aggregation: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def note(self, **numbers: Mapping[str, float]) -> None:
        """Leave numbers about the sites in the record of this step, for example `note(weight={"A": 0.4, "B": 0.6})`."""
        for name, by_site in numbers.items():
            for site, value in by_site.items():
                self.aggregation.setdefault(site, {})[name] = finite_or_none(value)

    def initial_state(self, purpose: str = "model", spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> StateDict:
        """The initial weights that every site would build itself from the same seed."""
        return {n: t.clone() for n, t in initial_network(self.task, self.seed, purpose, spec, outputs).state_dict().items()}


class SiteHalf(ABC):
    """A method's work at one site.

    A half may be thrown away after any task and rebuilt in another process: whatever it must remember goes through `state` and
    `restore`. Everything random is keyed by (seed, site, round, purpose).

    Attributes:
        unprotected: why the half cannot train with differential privacy, where its `Hyper` is no `privacy.PrivacyHyper`.
    """

    Hyper: ClassVar[type] = NoHyper
    phases: ClassVar[tuple[str, ...]] = ("train", "validate")
    unprotected: ClassVar[str] = "its training takes no gradient of each patient's own"

    def __init__(self, site: Site, hyper: Any, sites: tuple[str, ...]):
        self.site = site
        self.hyper = hyper
        self.sites = sites
        self._networks: dict[str, nn.Module] = {}

    @classmethod
    @abstractmethod
    def outbound(cls, phase: str, plan: Plan) -> Manifest:
        """Everything that a reply to `phase` holds: what leaves the hospital, and nothing else may."""

    @classmethod  # noqa: B027 (most halves work with every task)
    def check(cls, task: TaskConfig, hyper: Any) -> None:
        """Before anything starts: ConfigError where the half cannot work with this task and these settings."""

    def privacy(self) -> dict[str, Any] | None:
        """What this run has cost the site's training patients, see `privacy.spent`; None without differential privacy."""
        return None

    def perform(self, phase: str, round: int, incoming: Message) -> Message:
        if phase not in self.phases:
            raise ConfigError(f"{type(self).__name__} has no phase {phase!r}; it knows {', '.join(self.phases)}")
        return getattr(self, phase)(round, incoming)

    @abstractmethod
    def deliver(self, incoming: Message) -> dict[str, Message]:
        """Final models by role ("global", "personal", "deployed"), each a message from which `deployed` builds a module.

        An outside site calls it on a half that never trained; a role it cannot have is left out.
        """

    def pictures(self, incoming: Message) -> dict[str, bytes]:
        """PNG files by name, made of the site's own images at delivery: kept at the site, never sent."""
        return {}

    def state(self) -> Message:
        """What must survive until the next task; empty where every round starts from the incoming message alone."""
        return Message()

    def restore(self, state: Message) -> None:  # noqa: B027 (a half without memory has nothing to take up)
        """Take up a state that `state` gave, in this or another process."""

    def network(self, purpose: str, state: StateDict, spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> nn.Module:
        """The half's network for a purpose, built once per process, holding `state`."""
        if purpose not in self._networks:
            self._networks[purpose] = self.site.network(purpose, spec, outputs)
        self._networks[purpose].load_state_dict(state)
        return self._networks[purpose]

    def validation(self, model: nn.Module) -> float | None:
        """The task's metric of a network of logits on this site's validation images; None where it is undefined."""
        metric = self.site.task.metric
        return self.site.score(self.site.predictor(model), "validation", [metric]).values[metric]


class ServerHalf(ABC):
    """A method's work at the server: what each site is sent, and what becomes of the answers.

    Attributes:
        site_extension: what the half asks of any site beside training, as a class that is mixed into the site half (see `extended`).
    """

    Hyper: ClassVar[type] = NoHyper
    site_extension: ClassVar[type[SiteHalf] | None] = None

    def __init__(self, context: ServerContext, hyper: Any):
        self.context = context
        self.hyper = hyper

    def steps(self) -> list[Step]:
        """The whole schedule; by default a training step per round and a look at the last round's models."""
        rounds = [Step("train", round) for round in range(self.context.rounds)]
        return [*rounds, Step("validate", self.context.rounds, everyone=True)]

    @abstractmethod
    def outgoing(self, step: Step, site: str) -> Message: ...

    @abstractmethod
    def accept(self, step: Step, replies: Mapping[str, Message]) -> None:
        """Take the screened replies, keyed by site in sorted order, into account."""

    @abstractmethod
    def delivery(self, site: str) -> Message:
        """What the site needs for its final models; for an outside site too."""

    def models(self) -> dict[str, Message]:
        """Delivered models that the server holds, by path below its `models` folder; not those that never leave their site."""
        return {}

    @abstractmethod
    def state(self) -> Message:
        """Everything a new server process needs to go on after the last finished step."""

    @abstractmethod
    def restore(self, state: Message) -> None: ...


def extended(site_class: type[SiteHalf], extension: type[SiteHalf] | None) -> type[SiteHalf]:
    """The site half with a server half's `site_extension` mixed in: its phases and hyper-parameters join the site's own."""
    if extension is None or issubclass(site_class, extension):
        return site_class
    name = f"{extension.__name__}{site_class.__name__}"
    hyper: type = dataclass(frozen=True)(type(f"{name}Hyper", (extension.Hyper, site_class.Hyper), {}))
    return type(name, (extension, site_class), {"Hyper": hyper, "phases": (*site_class.phases, *extension.phases)})


def sample_weights(replies: Mapping[str, Message], weighting: str = "samples") -> dict[str, float]:
    """Aggregation weight of each site: its number of training samples n_k, or 1 for each ("uniform")."""
    if weighting == "uniform":
        return dict.fromkeys(replies, 1.0)
    try:
        return {site: float(reply.facts["n_samples"]) for site, reply in replies.items()}
    except KeyError as error:
        raise UpdateError("a reply without the fact 'n_samples' cannot be weighted by samples; use weighting=uniform") from error


def plain_entry(plan: Plan, purpose: str) -> EntrySpec:
    """The spec of an entry that is a state of the task's own network."""
    return EntrySpec.like(plan.template(), purpose)
