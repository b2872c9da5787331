"""The two algorithms of a method, which know nothing of FLARE, files or processes; an engine
carries messages between them.
"""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, get_args

from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.events import EventLog
from medflare.core.hyper import param, refuse_undecorated
from medflare.core.message import FinalModels, Message
from medflare.core.numbers import finite_or_none
from medflare.core.phases import ASKS, HANDLES, Phase, declared_phases, methods_by_phase
from medflare.core.settings import strict_dataclass
from medflare.core.specs import Manifest, MetaSpec, TensorSpec
from medflare.core.states import StateDict
from medflare.core.text import Json, JsonDict
from medflare.methods.aggregation import Aggregation, NoAggregation
from medflare.methods.parts.measured import LOSS, N_SAMPLES, VALIDATION
from medflare.methods.parts.selection import ModelSelector, Selection
from medflare.networks.catalogue import initial_network, meta_network
from medflare.networks.features import FeatureNetwork, copied_state
from medflare.networks.foreign import NetworkSpec
from medflare.privacy.ledger import Account
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site


@strict_dataclass
class SiteHyper:
    """Hyper-parameters of a site algorithm; none by itself."""


@strict_dataclass
class ServerHyper:
    """Hyper-parameters of every server algorithm."""

    selection: Selection = param(
        "median",
        "deliver the best round by the sites' median, median gain (paired), weighted mean; "
        "or the last",
    )


Replies: TypeAlias = Mapping[str, Message]  # site -> its reply, in sorted order
S = TypeVar("S", bound=SiteHyper)
V = TypeVar("V", bound=ServerHyper)


def _hyper_class(algorithm: Any) -> type:
    """The class's own `Hyper`, the one in `class MySite(FedAvgSite[MyHyper])`, or the inherited."""
    if "Hyper" not in vars(algorithm):
        for base in vars(algorithm).get("__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and argument is not Any:
                    return argument
    return algorithm.Hyper


def _not_json(meta: Json, place_of_tensors: str) -> str | None:
    """Which metadata item JSON cannot hold, in words, or None."""
    for name, value in meta.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            return f"item {name!r}: {error}; metadata are numbers and text, {place_of_tensors}"
        if not _has_text_keys(value):
            return f"item {name!r}: JSON turns a key into text; write str(key)"
    return None


def _has_text_keys(value: object) -> bool:
    """Whether all tables in it, at any depth, have texts as keys."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(value[key]) for key in value)
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


_OF_TENSORS = "a PersistentState is a dict of tensors, numbers and text belong into memory.meta"


def memory_problem(memory: Message) -> str | None:
    """What of an algorithm's memory cannot be stored, in words, or None."""
    for entry, state in memory.states.items():
        if not isinstance(state, Mapping):
            return f"state {entry!r} of its memory is a {type(state).__name__}; {_OF_TENSORS}"
        for name, value in state.items():
            if not isinstance(value, Tensor):
                wrong = f"{name!r} of state {entry!r} of its memory is a {type(value).__name__}"
                return f"{wrong}; {_OF_TENSORS}"
    problem = _not_json(memory.meta, "tensors belong into a PersistentState")
    return problem and f"memory.meta: {problem}"


@dataclasses.dataclass(frozen=True)
class Step:
    """One exchange with the sites.

    Attributes:
        phase: name of the phase, and of the site algorithm's method that replies: "train",
            "validate", ...
        round: 0-based; steps after the last round carry the number of rounds.
        everyone: ask all inside sites, also in a round for which only some were drawn.
        part: 0-based number of the exchange if a phase comes more than once in a round.
    """

    phase: str
    round: int
    everyone: bool = False
    part: int = 0

    @classmethod
    def of(
        cls, replying: Callable[..., Any], round: int, *, everyone: bool = False, part: int = 0
    ) -> "Step":
        """The step to which `replying`, a method of a site algorithm, replies."""
        return cls(replying.__name__, round, everyone, part)


@dataclasses.dataclass(frozen=True)
class Plan(Generic[S, V]):
    """What both algorithms know before training; both may read both hyper-parameters.

    Attributes:
        sites: names of the inside sites, sorted; a site's index is its label.
    """

    task: TaskConfig
    sites: tuple[str, ...]
    site_hyper: S
    server_hyper: V
    _templates: dict[str, StateDict] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def network(
        self, spec: NetworkSpec | None = None, outputs: int | None = None
    ) -> FeatureNetwork:
        """The task's network, or one by `spec`, on the meta device."""
        return meta_network(self.task, spec, outputs)

    def template(self, spec: NetworkSpec | None = None, outputs: int | None = None) -> StateDict:
        """That network's state on the meta device: names, shapes and dtypes."""
        key = repr((spec, outputs))
        if key not in self._templates:
            self._templates[key] = self.network(spec, outputs).state_dict()
        return dict(self._templates[key])


@dataclasses.dataclass
class ServerContext:
    """What a server algorithm is given.

    Attributes:
        phases: of the site algorithm, by name; empty if unknown.
        aggregation: the formula to aggregate with (that of FLARE's aggregator component); None: the
            algorithm's own.
        site_counts: site -> its reply to "enrol": {"n": {"train", "validation", "test"},
            "class_counts": [...]}; filled as sites enrol.
        notes: site -> numbers of this step's aggregation, see `note`.
        start: the task's initial weights if they are not random, see
            `networks.weights.starting_state`.
        weights: file or folder of weights at the server; None: see `networks.weights.find_weights`.
        counted_fraction: site -> fraction of its training images that counts, if the maximum client
            weight limits it, see `aggregation.capped`.
    """

    plan: Plan
    seed: int
    rounds: int
    outside: tuple[str, ...] = ()
    phases: Mapping[str, Phase] = dataclasses.field(default_factory=dict)
    aggregation: Aggregation | None = None
    site_counts: dict[str, JsonDict] = dataclasses.field(default_factory=dict)
    events: EventLog = dataclasses.field(default_factory=EventLog)
    notes: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    start: StateDict | None = None
    weights: Path | None = None
    counted_fraction: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def task(self) -> TaskConfig:
        return self.plan.task

    @property
    def sites(self) -> tuple[str, ...]:
        return self.plan.sites

    def reply_spec(self, phase: str, entry: TensorSpec) -> TensorSpec | None:
        """The site algorithm's declaration of an entry of its replies to a phase; None if it
        declares none of that name.
        """
        if phase not in self.phases:
            return None
        return self.phases[phase].replied(self.plan).get(entry.name)

    def note(self, **numbers: Mapping[str, float]) -> None:
        """Adds numbers by site to the record of this step, for example `note(weight={"A": 0.4, "B":
        0.6})`.
        """
        for name, by_site in numbers.items():
            for site, value in by_site.items():
                self.notes.setdefault(site, {})[name] = finite_or_none(value)

    def warn(self, text: str, **place: Any) -> None:
        """Adds a warning to the events; `place`: its site and round, as of `EventLog.add`."""
        self.events.add("warning", text, **place)

    def initial_state(
        self, purpose: str = "model", spec: NetworkSpec | None = None, outputs: int | None = None
    ) -> StateDict:
        """The initial weights that every site would draw from the same seed.

        Arguments as of `SiteAlgorithm.network`.
        """
        network = initial_network(self.task, self.seed, purpose, spec, outputs, self.start)
        return copied_state(network)


class PersistentState:
    """A state dict as an attribute of an algorithm, stored in its `memory`, None if absent:
    `personal = PersistentState("personal")`.
    """

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

    Each method with `@phase` replies to the phase of its name: (round, message) -> reply. An
    algorithm may be rebuilt in another process after any task: its state between tasks is `memory`.
    Random numbers are keyed by (seed, site, round, purpose).

    Attributes:
        Hyper: the class of its hyper-parameters, by default the class's type parameter.
        server_hyper: the class that the server algorithm's hyper-parameters must have.
        phases: name -> declaration, from the methods with `@phase`.
        accumulates: whether all optimizer steps go through `training.epochs.Steps`, which supports
            `TaskConfig.accumulate` and fp16.
        freezes: whether it supports `TaskConfig.freeze`.
        dp_unsupported_reason: why there is no DP-SGD, unless `Hyper` is a `privacy.PrivacyHyper`.
        uses_features: whether it uses a network's features or head, whatever its settings.
        uses_training: whether replies depend on training images; else sites with a privacy budget
            take part without DP-SGD.
        memory: states and meta that are kept until the next task; empty if every round starts from
            the incoming message alone.
        account: the privacy ledger, stored by the participant.
    """

    Hyper: ClassVar[type] = SiteHyper
    server_hyper: ClassVar[type] = ServerHyper
    phases: ClassVar[dict[str, Phase]] = {}
    accumulates: ClassVar[bool] = False
    freezes: ClassVar[bool] = False
    dp_unsupported_reason: ClassVar[str] = "its training takes no gradient of each patient's own"
    uses_features: ClassVar[bool] = False
    uses_training: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.Hyper = _hyper_class(cls)
        refuse_undecorated(cls.Hyper)
        cls.phases = declared_phases(cls)

    def __init__(self, site: Site, plan: Plan[S, Any]):
        self.site = site
        self.plan = plan
        self.hyper: S = plan.site_hyper
        self.memory = Message()
        self.account = Account()
        self._networks: dict[str, FeatureNetwork] = {}

    @property
    def inside(self) -> bool:
        """Whether the site trains."""
        return self.site.name in self.plan.sites

    @property
    def minimum_patients(self) -> int:
        """The site's `minimum_patients`; numbers of fewer patients are suppressed."""
        return self.site.minimum_patients

    @classmethod
    def check(cls, task: TaskConfig, hyper: S, server_hyper: Any) -> None:
        """Raises ConfigError, before anything starts, for a task or settings that the algorithm
        does not support.
        """

    @classmethod
    def needs_features(cls, hyper: S) -> bool:
        """Whether the algorithm, with these settings, uses a network's features or head and so
        refuses networks without them.
        """
        return cls.uses_features

    @classmethod
    def proximal_strength(cls, hyper: S) -> float:
        """The strength λ of a term λ (θ - w) to an earlier model w in the gradient of a model that
        leaves the site.

        Sites with `minimum_patients` bound it: with λ = 1 / lr a model is its last step's.
        """
        return 0.0

    @classmethod
    def phase(cls, name: str) -> Phase:
        """The declaration of a phase; ConfigError if there is none."""
        if name not in cls.phases:
            known = ", ".join(cls.phases)
            raise ConfigError(f"{cls.__name__} has no phase {name!r}; it has {known}")
        return cls.phases[name]

    def validate_request(self, incoming: Message) -> str | None:
        """What in a well-formed message does not fit this run, so that it is refused; or None."""
        return None

    @classmethod
    def manifest(cls, phase: str, plan: Plan) -> Manifest:
        """All states of a reply to `phase`: nothing else may leave the hospital."""
        return cls.phase(phase).manifest(plan)

    def perform(self, phase: str, round: int, incoming: Message) -> Message:
        """The reply to one step, from the method that declares the phase.

        Raises:
            ConfigError: an unknown phase, or a reply that is no message or differs from the
                phase's declaration.
        """
        declared = self.phase(phase)
        reply = getattr(self, declared.name)(round, incoming)
        if not isinstance(reply, Message):
            raise ConfigError(
                f"{type(self).__name__}: {declared.name} returns {type(reply).__name__}; "
                "return a Message, see `reply`"
            )
        problem = declared.undeclared(reply, self.plan)
        if problem is None:
            problem = _not_json(reply.meta, "declare a TensorSpec")
        if problem:
            raise ConfigError(
                f"{type(self).__name__}: the reply to '{phase}' differs from its declaration: "
                f"{problem}"
            )
        return reply

    @abstractmethod
    def finalize(self, incoming: Message) -> FinalModels:
        """Makes the final models by role ("global", "personal", "deployed"), messages from which
        `Method.models` builds modules.

        Outside sites call it too; roles that a site cannot have are left out. `@phase` declares the
        server's message.
        """

    def reply(
        self,
        entries: Mapping[Any, Any] | None = None,
        *,
        validation: Mapping[str, float | None] | None = None,
        loss: float | None = None,
    ) -> Message:
        """A reply with the metadata `MEASURED`.

        Args:
            entries: its further ones, as of `Message.of`.
            validation: role -> metric of the incoming model; None if undefined.
            loss: mean training loss, also if it is not finite; None if the phase does not train.
        """
        measured = self.measured(validation=validation or {}, loss=loss)
        return Message.of({**measured, **(entries or {})})

    def measured(
        self, *, validation: Mapping[str, float | None], loss: float | None = None
    ) -> dict[MetaSpec, Any]:
        """The metadata `MEASURED` of a reply; arguments as of `reply`."""
        by_role = {role: finite_or_none(value) for role, value in validation.items()}
        return {N_SAMPLES: self.site.n["train"], LOSS: loss, VALIDATION: by_role}

    def pictures(self, incoming: Message) -> dict[str, bytes]:
        """PNG files by name, of the site's own images, made with the final models; they never leave
        the site.
        """
        return {}

    def privacy(self) -> JsonDict | None:
        """The privacy cost of this run, see `privacy.rounds.privacy_cost`; None without
        differential privacy.
        """
        return None

    def restore(self, memory: Message) -> None:
        """Continues with the memory of an earlier object."""
        self.memory.states = memory.states
        self.memory.meta = memory.meta

    def network(
        self,
        purpose: str,
        state: StateDict,
        spec: NetworkSpec | None = None,
        outputs: int | None = None,
    ) -> FeatureNetwork:
        """A network with the weights `state`, built once per process and purpose.

        Args:
            purpose: names the network within the algorithm, and keys its initial weights.
            spec: the network, see `networks.catalogue`; None: the task's.
            outputs: output channels; None: the task's.
        """
        if purpose not in self._networks:
            self._networks[purpose] = self.site.network(purpose, spec, outputs)
        self._networks[purpose].load_state_dict(self.site.computing.state_on_device(state))
        return self._networks[purpose]

    def frozen(self, state: StateDict, purpose: str = "frozen") -> FeatureNetwork:
        """A network in evaluation mode without gradients; two that are used at once need two
        purposes.
        """
        network = self.network(purpose, state)
        network.eval().requires_grad_(False)
        return network

    def validation(self, model: nn.Module, metric: str | None = None) -> float | None:
        """A metric, by default the task's, of a network of logits on this site's validation images;
        None if undefined, or defined for fewer than `minimum_patients` patients.
        """
        name = metric or self.site.task.metric
        scores = self.site.score(self.site.predictor(model), "validation", [name])
        if scores.cases.has_few(name, self.minimum_patients):
            return None
        return finite_or_none(scores.values[name])


class ServerAlgorithm(ABC, Generic[V]):
    """A method's work at the server.

    Methods with `@asks` make the requests of a phase, methods with `@handles` process its replies.

    Attributes:
        Hyper: the class of its hyper-parameters, by default the class's type parameter.
        site_algorithm: the class that the site algorithm must have.
        aggregation_class: the formula that aggregates models; FLARE's aggregators run the same one.
        freezes: whether it supports `TaskConfig.freeze`.
        site_extension: a class that is mixed into any site algorithm (`method.extended`), for
            requests beside training.
        warmup: first rounds whose models are not selected, and do not stop training early.
        memory: all state between steps, for a new server process; `state` adds what the aggregation
            packs.
    """

    Hyper: ClassVar[type] = ServerHyper
    site_algorithm: ClassVar[type[SiteAlgorithm]] = SiteAlgorithm  # type: ignore[type-abstract]
    aggregation_class: ClassVar[type[Aggregation]] = NoAggregation
    freezes: ClassVar[bool] = False
    site_extension: ClassVar[type[SiteAlgorithm] | None] = None
    warmup: int = 0
    _requests: ClassVar[Mapping[str, str]] = {}
    _handlers: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.Hyper = _hyper_class(cls)
        refuse_undecorated(cls.Hyper)
        cls._requests = methods_by_phase(cls, ASKS)
        cls._handlers = methods_by_phase(cls, HANDLES)

    def __init__(self, context: ServerContext):
        self.context = context
        self.hyper: V = context.plan.server_hyper
        self.memory = Message()
        self.aggregation = context.aggregation or self.aggregation_class(self.hyper)
        self.aggregation.prepare(context.task, context.rounds)

    @classmethod
    def fewest_combined(cls, hyper: Any, sites: int) -> int:
        """The fewest of so many sites whose updates are combined in a model that other sites
        receive; a site demands `bounds.inside_sites`.
        """
        return sites

    def steps(self) -> list[Step]:
        """The whole schedule: by default a training step per round and a validation of the last
        round's models.
        """
        rounds = [Step("train", round) for round in range(self.context.rounds)]
        return [*rounds, Step("validate", self.context.rounds, everyone=True)]

    def final_step(self, replying: Callable[..., Any], part: int = 0) -> Step:
        """A step of all inside sites after the last round, see `Step.of`."""
        return Step.of(replying, self.context.rounds, everyone=True, part=part)

    def configure(self, step: Step, site: str) -> Message:
        """The request to a site for a step; empty if no method makes the phase's requests."""
        if step.phase not in self._requests:
            return Message()
        return getattr(self, self._requests[step.phase])(step, site)

    def aggregate(self, step: Step, replies: Replies) -> None:
        """Processes the valid replies of a step, by site in sorted order.

        Raises:
            ConfigError: the replies have states, and no method handles the phase.
        """
        if step.phase in self._handlers:
            getattr(self, self._handlers[step.phase])(step, replies)
        elif any(reply.states for reply in replies.values()):
            raise ConfigError(
                f"{type(self).__name__} does nothing with the models of '{step.phase}'; "
                "mark the method that does with @handles"
            )

    @abstractmethod
    def configure_final(self, site: str) -> Message:
        """The message with a site's final models; for outside sites too."""

    def models(self) -> FinalModels:
        """Final models that the server stores, by path below its `models` folder."""
        return {}

    def documents(self) -> JsonDict:
        """Files beside the results: name -> JSON content."""
        return {}

    def tables(self) -> dict[str, dict[str, JsonDict]]:
        """Tables of the results: title -> site -> column -> number or text."""
        return {}

    def selector_summary(self) -> JsonDict:
        """How the deployed model selects a network for an image (`RunRecord.selector`); empty if it
        does not.
        """
        return {}

    def model_selectors(self) -> dict[str, ModelSelector]:
        """Model -> its selection by all sites; empty if each site selects alone, or the last
        round's model is final.
        """
        return {}

    def state(self) -> Message:
        """The algorithm's state, for `restore`; ConfigError for a memory that cannot be stored."""
        problem = memory_problem(self.memory)
        if problem:
            raise ConfigError(f"{type(self).__name__}: {problem}")
        stored = Message(dict(self.memory.states), dict(self.memory.meta))
        self.aggregation.pack(stored)
        return stored

    def restore(self, state: Message) -> None:
        """Continues from an earlier object's `state`."""
        self.memory.states = state.states
        self.memory.meta = state.meta
        self.aggregation.unpack(state)
