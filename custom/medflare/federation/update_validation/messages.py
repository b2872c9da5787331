"""What a message may hold, whoever sent it: plain tensors by name, the meta that are declared, and a site's events in its own name.

The server checks every reply and every site every request before a method sees it. A party is believed to be honest and may still be
wrong: a full disk, a wrong version, a method of one's own. Nothing that it sends may raise an error behind these checks.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final

import torch
from pydantic import AfterValidator, ConfigDict, Field
from torch import Tensor
from typing_extensions import Required, TypedDict

from medflare.core.errors import MessageError
from medflare.core.events import OF_SITES
from medflare.core.manifest import (
    MetaSpec,
    Phase,
    StateSpec,
    TensorSpec,
    Validator,
    count,
    listing,
    models,
    negative,
    non_finite,
    number,
    table,
    text,
    violation,
)
from medflare.core.message import Message
from medflare.core.text import printable
from medflare.data.acquisition import TRAINED_ON, no_range
from medflare.federation.settings import ENROL, FACTS_LIMIT, FINALIZE
from medflare.federation.update_validation.rounding import WIRE, Rounding
from medflare.methods.base import Plan, SiteAlgorithm
from medflare.privacy.settings import cost
from medflare.tasks.classes import FALSE_ALARMS, MOST_CLASSES
from medflare.tasks.metrics_table import METRICS

_DEPTH: Final = 8  # of tables within tables
_LARGEST: Final = 2**63  # of numbers; larger ones are no counts, and break what computes with them
_NAME: Final = 500  # characters of a name; those of tensors deep in a network are long
_EVENTS: Final = 100
_EVENT: Final = ("kind", "message", "round", "site")
_MESSAGE: Final = 2_000  # characters of an event
_ROUNDS: Final = 10**6
_TOLD: Final = 2**18  # bytes of meta of a server's message: names of all sites and their rounds, and no model

# -- the form of any message -------------------------------------------------------------------------------------------------


def unreadable(message: Message, site: str) -> str | None:
    """What of a site's reply nobody can work with, in words, or None.

    Args:
        site: that sent it; it speaks for itself alone.
    """
    try:
        return not_states(message.states) or not_plain(message.meta) or not_events(message.meta.get("events", []), site)
    except Exception as error:  # whatever it is made of, it is the site's
        return f"it cannot be read ({type(error).__name__})"


def not_states(states: object) -> str | None:
    """What in the states of a message nobody can compute with, in words, or None."""
    if not isinstance(states, Mapping):
        return f"its states are {type(states).__name__}"
    for entry, state in states.items():
        if not _is_name(entry):
            return f"an entry's name is {shown(entry)}"
        if not isinstance(state, Mapping):
            return f"entry {shown(entry)} is {type(state).__name__}, not a state"
        for name, tensor in state.items():
            if not _is_name(name):
                return f"{shown(entry)} holds a tensor of the name {shown(name)}"
            if type(tensor) is not Tensor:
                return f"{entry}/{name} is {type(tensor).__name__}, not a tensor"
            if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
                return f"{entry}/{name} holds no numbers of its own (it is sparse, nested, quantized or without memory)"
            if tensor.requires_grad or tensor.is_neg() or tensor.is_conj():
                return f"{entry}/{name} is a step of a computation (detach and clone it)"
    return None


def not_plain(meta: object, most: int = FACTS_LIMIT) -> str | None:
    """What in the meta of a message is neither number nor printable text, or more than `most` bytes of JSON, in words, or None."""
    if not isinstance(meta, dict):
        return f"its meta are {type(meta).__name__}"
    for place, value in enumerate(_walk(meta, 0)):
        if problem := _no_leaf(value):
            return problem
        if place > most // 2:  # each takes two bytes at least; few objects may be millions when they are written down
            return f"over {most} bytes of meta, more than counts and metrics need"
    named = {name: value for name, value in meta.items() if name != "events"}  # whose text `core.events` makes printable
    if wrong := next((value for value in _walk(named, 0) if isinstance(value, str) and not value.isprintable()), None):
        return f"meta hold text with characters that cannot be printed: {shown(wrong)}"
    size = len(json.dumps(meta))
    return f"{size} bytes of meta, more than the {most} that counts and metrics need" if size > most else None


_TOO_DEEP: Final[list[object]] = []  # stands for what lies deeper; told apart by identity


def _walk(value: object, depth: int) -> Iterator[object]:
    """A value and all within it, however nested, but none deeper than the limit."""
    if depth > _DEPTH:
        yield _TOO_DEEP
        return
    yield value
    inner: Iterable[object] = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        yield from _walk(item, depth + 1)


def _no_leaf(value: object) -> str | None:
    """Why a value, taken by itself, is neither plain nor a list or table, or None."""
    if value is _TOO_DEEP:
        return f"meta are nested more than {_DEPTH} deep"
    if isinstance(value, dict):
        return next((f"meta have the name {shown(name)}" for name in value if not _is_name(name)), None)
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"meta hold a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return None if _is_unicode(value) else "meta hold text that is no Unicode"
    if value is None or isinstance(value, int | float | list | tuple):
        return None
    return f"meta hold something that is neither number nor text ({type(value).__name__})"


def not_events(events: object, site: str) -> str | None:
    """Which event of a reply the record cannot take, in words, or None.

    Args:
        events: of a reply.
        site: that sent them; it speaks for itself alone.
    """
    if not isinstance(events, list | tuple):
        return f"its events are {type(events).__name__}, expected a list"
    if len(events) > _EVENTS:
        return f"{len(events)} events, more than {_EVENTS}"
    return next((problem for event in events if (problem := _no_event(event, site))), None)


def _no_event(event: object, site: str) -> str | None:
    if not isinstance(event, dict):
        return f"an event is {type(event).__name__}, expected an object"
    if other := sorted(event.keys() - set(_EVENT)):
        return f"an event with {shown(other[0])}, expected {', '.join(_EVENT)}"
    if event.get("kind") not in OF_SITES:
        return f"an event of the kind {shown(event.get('kind'))}; a site's are {', '.join(OF_SITES)}"
    message, round = event.get("message"), event.get("round")
    if not isinstance(message, str) or not message.strip() or len(message) > _MESSAGE:
        return f"an event without a message of up to {_MESSAGE} characters"
    if event.get("site") not in (None, site):
        return f"an event in the name of {shown(event['site'])}; a site speaks for itself alone"
    if round is not None and (type(round) is not int or not 0 <= round <= _ROUNDS):
        return f"an event in round {shown(round)}"
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) <= _NAME and name.isprintable()


def shown(value: object) -> str:
    """What somebody sent, for a message: a text in part, of anything else its kind.

    Examples:
        >>> shown("all"), shown(7), shown([1])
        ("'all'", '7', 'list')
    """
    if isinstance(value, str):
        return repr(value[:60])
    return str(value) if isinstance(value, int) and abs(value) < _LARGEST else type(value).__name__


def one_line(text: object) -> str:
    """A reason in a site's own words as an event may say it: one printable line, not too long.

    Examples:
        >>> one_line("no\\n data"), one_line(""), len(one_line("x" * 9999))
        ('no data', 'it does not say why', 2000)
    """
    if not isinstance(text, str):
        return f"its reason is {type(text).__name__}, expected text"
    line = printable(text[: 2 * _MESSAGE])
    if not line:
        return "it does not say why"
    return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 3]}..."


# -- meta that every method has ---------------------------------------------------------------------------------------------


def unfit(message: Message, declared: tuple[MetaSpec, ...], required: tuple[str, ...] = ()) -> str | None:
    """Which item of a message is not what its declaration takes, in words, or None.

    Args:
        message: whose meta are known to be plain.
        declared: meta by name, with what they take; events need no declaration.
        required: names of meta that must be there.
    """
    if extra := sorted(message.meta.keys() - {*declared, "events"}):
        return f"unexpected item {shown(extra[0])}"
    if missing := [name for name in required if name not in message.meta]:
        return f"item {missing[0]!r} is missing"
    for item in declared:
        if item in message.meta and (problem := item.validator(message.meta[item])):
            return f"{item}: {problem}"
    return None


def stateful(message: Message) -> str | None:
    """The first state of a reply to a phase that has none, in words, or None."""
    return f"unexpected entry {shown(sorted(message.states)[0])}" if message.states else None


METRIC: Final = number(0.0, 1.0, optional=True)
_DISTANCE: Final = number(0.0, 1e6, optional=True)  # pixels or millimetres
_Images = Annotated[int, Field(strict=True, ge=0, le=10**9)]  # more than any hospital has, and few enough for sums of their pixels
_Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


_FORBID: Final = ConfigDict(extra="forbid")


def _measured(value: dict[str, Any]) -> dict[str, Any]:
    for name, found in value.items():
        if name not in METRICS:
            raise ValueError(f"{shown(name)} is no metric")
        if problem := (_DISTANCE if METRICS[name].lower_is_better else METRIC)(found):
            raise ValueError(f"{name}: {problem}")
    return value


def _square(matrix: list[list[int]]) -> list[list[int]]:
    if not all(len(row) == len(matrix) <= MOST_CLASSES for row in matrix):
        raise ValueError(f"no square of at most {MOST_CLASSES} classes")
    return matrix


def _whole_curve(curve: Any) -> Any:
    if len(curve["sensitivity"]) not in (0, len(FALSE_ALARMS)):
        raise ValueError(f"sensitivity has not {len(FALSE_ALARMS)} places")
    return curve


class _Counts(TypedDict, total=False):
    __pydantic_config__ = _FORBID  # type: ignore[misc]  # pydantic's place for it
    train: Required[_Images]
    validation: _Images
    test: _Images


class _Curve(TypedDict):
    __pydantic_config__ = _FORBID  # type: ignore[misc]
    auc: _Share | None
    low: _Share | None
    high: _Share | None
    sensitivity: list[_Share]


class _Classes(TypedDict):
    """See `tasks.classes.class_report`; lists are empty where the site keeps them back."""

    __pydantic_config__ = _FORBID  # type: ignore[misc]
    confusion: Annotated[list[Annotated[list[list[_Images]], AfterValidator(_square)]], Field(max_length=MOST_CLASSES)]
    roc: Annotated[list[Annotated[_Curve, AfterValidator(_whole_curve)]], Field(max_length=MOST_CLASSES)]


_Metrics = Annotated[dict[str, Any], AfterValidator(_measured)]
_Version = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_.+!-]{1,64}$")]
VERSIONS: Final = MetaSpec(
    "versions", "of the packages that its results depend on; medflare 0.2.0 does not tell them", table(Validator(_Version))
)
RANGE: Final = MetaSpec(
    TRAINED_ON, "range of size, spacing and intensities of the training images, for the models' cards", no_range, "train"
)
ENROLS: Final = (
    MetaSpec("n", "images by split", Validator(_Counts)),
    MetaSpec("class_counts", "training images or pixels by class; none where the site keeps them", listing(count())),
    VERSIONS,
    RANGE,
)
DELIVERS: Final = (
    MetaSpec("metrics", "model -> metric -> value on test images", models(Validator(_Metrics), 1000), "test"),
    MetaSpec("n", "images by split", Validator(_Counts)),
    MetaSpec("reports", "what models say of their own work", models(table(), 1000), "test"),
    MetaSpec("classes", "model -> confusion counts and ROC curves of test images", models(Validator(_Classes), 1000), "test"),
    MetaSpec("privacy", "what the run has cost the site's patients", cost),
)

# -- the server's messages at a site -----------------------------------------------------------------------------------------

ROLE, SITES, FINISHED, STEPS = "role", "sites", "finished", "steps"  # what an invitation says
INVITES: Final = (
    MetaSpec(ROLE, "what the site is to be", text("inside", "outside")),
    MetaSpec(SITES, "the inside sites, sorted", listing(text(), 10_000)),
    MetaSpec(FINISHED, "steps that were done before", count(), optional=True),
    MetaSpec(STEPS, "steps of the run", count(10**9), optional=True),
    MetaSpec("method", "whose algorithms run", text(), optional=True),
    MetaSpec("hyper", "all hyper-parameters", table(), optional=True),
    MetaSpec("task", "the task's fingerprint", text(), optional=True),
    MetaSpec("seed", "of the run", number(), optional=True),
)
NUMBERED: Final = (MetaSpec("step", "its number in the run", count(10**9)), MetaSpec("run_rounds", "rounds of the run", count(10**9)), WIRE)


class SiteGate:
    """Checks the messages of a server at one site; a MessageError names the site, the step and what is wrong."""

    def __init__(self, name: str):
        self.name = name
        self._known: Incoming | None = None

    def refuse_invitation(self, round: int, message: Message) -> None:
        """Check an invitation, as far as is possible before the site's task is known.

        Raises:
            MessageError: a metadata item that is not declared, or a list of sites that does not fit the role.
        """
        self._refuse(ENROL, round, _unreadable(round, message) or _untold(message, INVITES))
        sites, inside = message.meta[SITES], message.meta[ROLE] == "inside"
        if not sites or sorted(set(sites)) != list(sites):
            self._refuse(ENROL, round, f"item {SITES!r} is no sorted list of different names")
        if inside != (self.name in sites):
            self._refuse(ENROL, round, f"item {SITES!r} and the role {message.meta[ROLE]!r} of {self.name} do not agree")

    def refuse_start(self, round: int, message: Message, plan: Plan[Any, Any], start: str) -> None:
        """Check that an invitation's entry `start` holds weights that fit the network, if the task names some, and else nothing.

        Raises:
            MessageError: it does not.
        """
        sends = (TensorSpec(start),) if plan.task.network.get("weights") else ()
        self._refuse(ENROL, round, Incoming(plan).refusal(Phase(ENROL, request=sends, request_meta=INVITES), message))

    def numbers(self, phase: str, round: int, message: Message, steps: int | None = None) -> tuple[int, int, bool]:
        """(number of the step in the run, rounds of the run, whether weights are rounded), which are taken out of the message.

        Args:
            steps: of the run, as the site was told when it enrolled; None: it was not told.

        Raises:
            MessageError: the message cannot be read, has no such numbers, or a step that the run does not have.
        """
        told = Message({}, {item: message.meta[item] for item in NUMBERED if item in message.meta})
        self._refuse(phase, round, _unreadable(round, message) or _untold(told, NUMBERED))
        step, rounds, wire = (message.meta.pop(item, None) for item in NUMBERED)
        if steps is not None and step > steps:
            self._refuse(phase, round, f"its step is {step}, the run that the site enrolled in has {steps} and a delivery")
        return step, rounds, wire is not None

    def trained_on(self, phase: str, round: int, message: Message) -> dict[str, Any] | None:
        """What the final models were trained on, taken out of the message that comes with them; None where it does not say.

        Raises:
            MessageError: the message cannot be read, or holds something else there.
        """
        self._refuse(phase, round, _unreadable(round, message))
        if phase != FINALIZE or RANGE not in message.meta:
            return None
        self._refuse(phase, round, unfit(Message({}, {RANGE: message.meta[RANGE]}), (RANGE,)))
        return message.meta.pop(RANGE)

    def refuse(self, phase: str, round: int, message: Message, algorithm: SiteAlgorithm[Any], rounded: bool = False) -> None:
        """Check a message against the declaration of its phase and the algorithm's plan.

        Args:
            phase: of the step; "finalize" for the final models.
            message: the server's, without what `numbers` takes out.
            algorithm: that will work with it.
            rounded: whether its weights are, see `Rounding`.

        Raises:
            MessageError: it does not fit.
        """
        declared = algorithm.delivery if phase == FINALIZE else algorithm.phase(phase)
        if declared is None:
            return
        if self._known is None or self._known.plan is not algorithm.plan:
            self._known = Incoming(algorithm.plan)
        self._refuse(phase, round, self._known.refusal(declared, message, rounded) or algorithm.validate_request(message))

    def _refuse(self, phase: str, round: int, problem: str | None) -> None:
        if problem is not None:
            raise MessageError(f"site {self.name} does not take what the server sent for '{phase}' of round {round}: {problem}")


def _unreadable(round: object, message: Message) -> str | None:
    unusable = not_states(message.states) or not_plain(message.meta, _TOLD)
    return unusable or (None if type(round) is int and round >= 0 else "its round is no count")


def _untold(message: Message, request_meta: tuple[MetaSpec, ...]) -> str | None:
    return unfit(message, request_meta, tuple(item for item in request_meta if not item.optional))


class Incoming:
    """What a server's messages may hold under a plan.

    Args:
        plan: of the site's algorithm.
    """

    def __init__(self, plan: Plan[Any, Any]):
        self.plan = plan
        self._specs: dict[tuple[str, int, bool], StateSpec] = {}  # the networks behind them are built once, not once a step

    def refusal(self, phase: Phase, message: Message, rounded: bool = False) -> str | None:
        """What of a message is not as its phase declares, in words, or None.

        Args:
            phase: says what the server sends and request_meta.
            message: the server's, without what `federation.exchange.numbered` adds.
            rounded: whether its weights are, see `Rounding`.
        """
        sent = {place: entry for place, entry in enumerate(phase.request) if entry.when(self.plan)}
        needed = [entry for entry in sent.values() if not entry.optional and not entry.endswith("/")]
        if missing := [entry for entry in needed if entry not in message.states]:
            return f"missing entry {shown(missing[0])}"
        for name in message.states:
            places = [place for place, entry in sent.items() if self._covers(entry, name)]
            if problem := self._misfit(phase, places, name, message, rounded):
                return problem
        return _untold(message, phase.request_meta)

    def _covers(self, entry: TensorSpec, name: str) -> bool:
        """Whether it is this entry, or one of its family's; a family has a member for every inside site."""
        return entry.covers(name) and (not entry.endswith("/") or name.removeprefix(entry) in self.plan.sites)

    def _misfit(self, phase: Phase, places: list[int], name: str, message: Message, rounded: bool) -> str | None:
        """Why an entry is none of those that the phase declares at these places, in words, or None."""
        part, problem = Message({name: message.states[name]}), f"unexpected entry {shown(name)}"
        for place in places:
            manifest = {name: self._spec(phase, place, rounded)}
            problem = violation(part, manifest) or non_finite(part) or negative(part, manifest) or ""
            if not problem:
                break
        return problem or None

    def _spec(self, phase: Phase, place: int, rounded: bool) -> StateSpec:
        """What the phase declares at a place, as it travels."""
        asked = phase.name, place, rounded
        if asked not in self._specs:
            spec = phase.request[place].spec(self.plan)
            self._specs[asked] = Rounding(self.plan).sent(phase.request[place], spec) if rounded else spec
        return self._specs[asked]
