"""The two algorithms of a method. They know nothing of FLARE, files or processes; an engine carries messages between them."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.events import EventLog
from medflare.core.hyper import param
from medflare.core.manifest import Manifest, MetaSpec, Phase, StateSpec, models, number
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.states import StateDict
from medflare.methods.aggregation import Aggregation, NoAggregation
from medflare.methods.parts.selection import ModelSelector, Selection
from medflare.networks.catalogue import initial_network, meta_network
from medflare.networks.features import FeatureNetwork
from medflare.privacy.ledger import Account
from medflare.tasks.config import TaskConfig
from medflare.training.epochs import finite_or_none
from medflare.training.site import Site

Capability = Literal["accumulate", "freeze"]  # see `SiteAlgorithm.capabilities`


@dataclass(frozen=True, config=STRICT)
class SiteHyper:
    """Hyper-parameters of a site algorithm; by itself, none."""


@dataclass(frozen=True, config=STRICT)
class ServerHyper:
    """Hyper-parameters that every server algorithm has; site algorithms that keep models of their own go by them too."""

    selection: Selection = param(
        "median", "deliver the round of best validation by the sites' median, median gain (paired) or weighted mean, or the last one"
    )


# What every reply to training or validation reports, see `SiteAlgorithm.meta`. A bad metric costs the site its vote and not its update.
N_SAMPLES = MetaSpec("n_samples", "training images", Annotated[number(), Field(gt=0)])
LOSS = MetaSpec("loss", "mean training loss", number(-1e12, 1e12, optional=True), "train")
VALIDATION = MetaSpec(
    "validation",
    "model -> the task's metric on validation images before training; the server ignores values that no metric can have",
    models(Annotated[float, Field(strict=True)] | None),
    "validation",
)
MEASURED = (N_SAMPLES, LOSS, VALIDATION)
S = TypeVar("S", bound=SiteHyper)
V = TypeVar("V", bound=ServerHyper)


@dataclasses.dataclass(frozen=True)
class Step:
    """One exchange with the sites.

    Attributes:
        phase: the name of the phase, and of the site algorithm's method that answers: "train", "validate", ...
        round: 0-based; steps after the last round carry the number of rounds.
        everyone: ask all inside sites, also in a round for which only some were drawn.
        part: 0-based number of the exchange where a phase comes more than once in a round.
    """

    phase: str
    round: int
    everyone: bool = False
    part: int = 0


@dataclasses.dataclass(frozen=True)
class Plan(Generic[S, V]):
    """What both algorithms know before anything is trained.

    Attributes:
        sites: names of the inside sites, sorted; a site's place in it is its label for as long as the federation lasts.
        site_hyper, server_hyper: the hyper-parameters of the two algorithms. Each algorithm owns its own and may read the other's.
    """

    task: TaskConfig
    sites: tuple[str, ...]
    site_hyper: S
    server_hyper: V
    _templates: dict[str, StateDict] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def network(self, spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> FeatureNetwork:
        """The task's network, or one by `spec`, without memory or random numbers; see `meta_network`."""
        return meta_network(self.task, spec, outputs)

    def template(self, spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> StateDict:
        """Shapes and dtypes of that network's state, found out once."""
        asked = repr((spec, outputs))
        if asked not in self._templates:
            self._templates[asked] = self.network(spec, outputs).state_dict()
        return dict(self._templates[asked])


@dataclasses.dataclass
class ServerContext:
    """What a server algorithm is given.

    Attributes:
        phases: what the site algorithm declares, by phase; empty where nobody has said.
        aggregation: the formula to aggregate with (FLARE's aggregator component may hold it already); None: the algorithm's own.
        site_counts: site -> its answer to "enrol": {"n": {"train", "validation", "test"}, "class_counts": [...]}; filled as sites enrol.
        events: where the algorithm reports what it noticed.
        start: what the task's network starts from, where that is no random draw; see `networks.weights.starting_state`.
        notes: site -> what this step's aggregation made of it, see `note`; the schedule takes it up after every step.
        counted: site -> the part of its training images that counts, below 1 where the lead limits its share; all of those of others.
    """

    plan: Plan[Any, Any]
    seed: int
    rounds: int
    outside: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    aggregation: Aggregation[Any] | None = None
    site_counts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    events: EventLog = dataclasses.field(default_factory=EventLog)
    notes: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    start: StateDict | None = None
    counted: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def task(self) -> TaskConfig:
        """The task of the plan."""
        return self.plan.task

    @property
    def sites(self) -> tuple[str, ...]:
        """The inside sites."""
        return self.plan.sites

    def answer(self, phase: str, entry: str) -> StateSpec | None:
        """What the sites' entry of that name holds in a phase; None where the site algorithm declares none."""
        found = (answer for declared in self.phases if declared.name == phase for answer in declared.answered(self.plan) if answer == entry)
        return next((answer.spec(self.plan) for answer in found), None)

    def note(self, **numbers: Mapping[str, float]) -> None:
        """Leave numbers about the sites in the record of this step, for example `note(weight={"A": 0.4, "B": 0.6})`."""
        for name, by_site in numbers.items():
            for site, value in by_site.items():
                self.notes.setdefault(site, {})[name] = finite_or_none(value)

    def initial_state(self, purpose: str = "model", spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> StateDict:
        """The initial weights that every site would build itself from the same seed.

        Args:
            purpose: sets the weights apart from those of other networks, as for `Site.network`.
            spec: the network, see `networks.catalogue`; None: the task's.
            outputs: output channels; None: the task's.
        """
        network = initial_network(self.task, self.seed, purpose, spec, outputs, self.start)
        return {name: tensor.clone() for name, tensor in network.state_dict().items()}


class PersistentState:
    """A state that an algorithm remembers, as an attribute of it: what is assigned lies in `memory` and outlives the process."""

    def __init__(self, entry: str):
        self.entry = entry

    def __get__(self, algorithm: Any, owner: type | None = None) -> Any:
        return self if algorithm is None else algorithm.memory.states.get(self.entry)

    def __set__(self, algorithm: Any, state: StateDict | None) -> None:
        if state is None:
            algorithm.memory.states.pop(self.entry, None)
        else:
            algorithm.memory.states[self.entry] = state


class SiteAlgorithm(ABC, Generic[S]):
    """A method's work at one site.

    An algorithm may be thrown away after any task and rebuilt in another process: whatever it must remember lies in `memory`. Everything
    random is keyed by (seed, site, round, purpose).

    Attributes:
        Hyper: the hyper-parameters that this algorithm owns.
        server_hyper: the class of hyper-parameters that the server algorithm must have, since this one reads them.
        phases: what the algorithm answers and what its answers hold; each has a method of its name, (round, message) -> reply.
        delivery: what the server's message with the final models holds; None: the algorithm does not say.
        capabilities: "accumulate": every optimizer step is made by `training.accumulation`, which supports `TaskConfig.accumulate` and
            fp16; "freeze": supports `TaskConfig.freeze`. A subclass that trains in another way removes them.
        dp_unsupported_reason: why the algorithm cannot train with differential privacy, where its `Hyper` is no `privacy.PrivacyHyper`.
        memory: states and meta that survive until the next task; empty where every round starts from the incoming message alone.
        account: what the site has given away of its patients' privacy; the participant that owns it puts it on disk.
        minimum_patients: of how many a number must be for it to leave the site.
    """

    Hyper: ClassVar[type] = SiteHyper
    server_hyper: ClassVar[type] = ServerHyper
    phases: ClassVar[tuple[Phase, ...]] = ()
    delivery: ClassVar[Phase | None] = None
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    dp_unsupported_reason: ClassVar[str] = "its training takes no gradient of each patient's own"

    def __init__(self, site: Site, plan: Plan[S, Any]):
        self.site = site
        self.plan = plan
        self.hyper: S = plan.site_hyper
        self.memory = Message()
        self.account, self.minimum_patients = Account(), 0
        self._networks: dict[str, FeatureNetwork] = {}

    @property
    def inside(self) -> bool:
        """Whether the site trains."""
        return self.site.name in self.plan.sites

    @classmethod
    def check(cls, task: TaskConfig, hyper: S, server_hyper: Any) -> None:
        """Before anything starts, refuse what the algorithm cannot work with.

        Args:
            task: what is to be learnt.
            hyper: of this algorithm.
            server_hyper: of the server algorithm that it is paired with.

        Raises:
            ConfigError: the algorithm cannot work with this task and these settings.
        """

    @classmethod
    def needs_features(cls, hyper: S) -> bool:
        """Whether the algorithm works with a network's features or its head, under these settings; it is never given a network without."""
        return False

    @classmethod
    def phase(cls, name: str) -> Phase:
        """The declaration of a phase.

        Raises:
            ConfigError: the algorithm has none of that name.
        """
        for phase in cls.phases:
            if phase.name == name:
                return phase
        raise ConfigError(f"{cls.__name__} has no phase {name!r}; it knows {', '.join(phase.name for phase in cls.phases)}")

    def validate_request(self, incoming: Message) -> str | None:
        """What a message tells, though as it is declared, that is not so under this algorithm's plan, in words, or None."""
        return None

    @classmethod
    def manifest(cls, phase: str, plan: Plan[Any, Any]) -> Manifest:
        """Everything that a reply to `phase` holds: what leaves the hospital, and nothing else may."""
        return cls.phase(phase).manifest(plan)

    def perform(self, phase: str, round: int, incoming: Message) -> Message:
        """The reply to one step.

        Args:
            phase: name of a phase.
            round: 0-based.
            incoming: the server's message.

        Raises:
            ConfigError: an unknown phase, or a reply that is not what the phase declares.
        """
        declared = self.phase(phase)
        reply: Message = getattr(self, phase)(round, incoming)
        if problem := declared.undeclared(reply, self.plan):
            raise ConfigError(f"{type(self).__name__} answers '{phase}' with other things than it declares in `phases`: {problem}")
        return reply

    @abstractmethod
    def finalize(self, incoming: Message) -> dict[str, Message]:
        """Final models by role ("global", "personal", "deployed"), each a message from which a module is built, see `Method.models`.

        An outside site calls it on an algorithm that never trained; a role it cannot have is left out.
        """

    def meta(self, *, validation: Mapping[str, float | None], loss: float | None = None, **more: Any) -> dict[str, Any]:
        """`MEASURED` and more: an undefined metric travels as None, a loss that is not finite as it is, for the server to see.

        Args:
            validation: role -> metric of the incoming model of that role.
            loss: mean training loss; None where the phase does not train.
            more: further meta, as the phase declares them.
        """
        measured = {role: finite_or_none(value) for role, value in validation.items()}
        return {N_SAMPLES: self.site.n["train"], LOSS: loss, VALIDATION: measured, **more}

    def pictures(self, incoming: Message) -> dict[str, bytes]:
        """PNG files by name, made of the site's own images at delivery: kept at the site, never sent."""
        return {}

    def privacy(self) -> dict[str, Any] | None:
        """What this run has cost the site's training patients, see `privacy.settings.privacy_cost`; None without differential privacy."""
        return None

    def restore(self, memory: Message) -> None:
        """Take up a memory of the algorithm, in this or another process."""
        self.memory.states, self.memory.meta = memory.states, memory.meta

    def network(self, purpose: str, state: StateDict, spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> FeatureNetwork:
        """The algorithm's network for a purpose, built once per process, holding `state`.

        Args:
            purpose: names the network within the algorithm, and keys its initial weights.
            state: what it is loaded with.
            spec: the network, see `networks.catalogue`; None: the task's.
            outputs: output channels; None: the task's.
        """
        if purpose not in self._networks:
            self._networks[purpose] = self.site.network(purpose, spec, outputs)
        self._networks[purpose].load_state_dict(state)
        return self._networks[purpose]

    def frozen(self, state: StateDict, purpose: str = "frozen") -> FeatureNetwork:
        """A network that only looks: evaluation mode, no gradients. Two that are needed together need two purposes."""
        network = self.network(purpose, state)
        network.eval().requires_grad_(False)
        return network

    def validation(self, model: nn.Module) -> float | None:
        """The task's metric of a network of logits on this site's validation images; None where it is undefined."""
        metric = self.site.task.metric
        return self.site.score(self.site.predictor(model), "validation", [metric]).values[metric]


class ServerAlgorithm(ABC, Generic[V]):
    """A method's work at the server: what each site is sent, and what becomes of the answers.

    Attributes:
        Hyper: the hyper-parameters that this algorithm owns.
        site_hyper: the class of hyper-parameters that the site algorithm must have, since this one reads them.
        aggregation_class: the formula that the algorithm aggregates models with, if it does; FLARE's aggregators run the same one.
        capabilities: "freeze", as of a site algorithm.
        site_extension: what the algorithm asks of any site beside training: a class mixed into the site algorithm (`method.extended`).
        memory: everything a new server process needs to go on after the last finished step.
    """

    Hyper: ClassVar[type] = ServerHyper
    site_hyper: ClassVar[type] = SiteHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = NoAggregation
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    site_extension: ClassVar[type[SiteAlgorithm[Any]] | None] = None

    def __init__(self, context: ServerContext):
        self.context = context
        self.hyper: V = context.plan.server_hyper
        self.memory = Message()
        self.aggregation = context.aggregation or self.aggregation_class(self.hyper)
        self.aggregation.prepare(context.task, context.rounds)

    def steps(self) -> list[Step]:
        """The whole schedule; by default a training step per round and a look at the last round's models."""
        rounds = [Step("train", round) for round in range(self.context.rounds)]
        return [*rounds, Step("validate", self.context.rounds, everyone=True)]

    @abstractmethod
    def configure(self, step: Step, site: str) -> Message:
        """What a site is sent for a step."""

    @abstractmethod
    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """Take the screened replies, keyed by site in sorted order, into account.

        Args:
            step: what was asked.
            replies: site -> reply; sites without a usable one are left out.
        """

    @abstractmethod
    def configure_final(self, site: str) -> Message:
        """What the site needs for its final models; for an outside site too."""

    def models(self) -> dict[str, Message]:
        """Delivered models that the server holds, by path below its `models` folder; not those that never leave their site."""
        return {}

    def model_selectors(self) -> dict[str, ModelSelector]:
        """What the sites choose together, by model; empty where each chooses alone, or the last round is delivered."""
        return {}

    def state(self) -> Message:
        """The half as a message that `restore` takes up, in this or another process."""
        stored = Message(dict(self.memory.states), dict(self.memory.meta))
        self.aggregation.pack(stored)
        return stored

    def restore(self, state: Message) -> None:
        """Go on from what `state` gave."""
        self.memory.states, self.memory.meta = state.states, state.meta
        self.aggregation.unpack(state)
