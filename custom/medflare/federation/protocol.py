"""Validation of messages: the form of any message, the metadata of every run, and a server's requests at a site.

The server checks every reply and every site every request before a method sees it. The parties are honest, but may have a full disk,
another version or a different method.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import AfterValidator, ConfigDict, Field
from torch import Tensor
from typing_extensions import Required, TypedDict

from medflare.core.errors import MessageError
from medflare.core.events import OF_SITES
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, count, listing, models, negative, non_finite, number, table, text, violation
from medflare.core.message import Message
from medflare.core.text import printable
from medflare.data.acquisition import TRAINED_ON, check_range
from medflare.evaluation.verdicts import OF_TRAINING
from medflare.federation.settings import CROSS_SITE, ENROL, FINALIZE, META_LIMIT
from medflare.methods.base import Plan, SiteAlgorithm
from medflare.privacy.settings import Cost
from medflare.tasks.class_metrics import ONE_CLASS
from medflare.tasks.classes import FALSE_ALARMS, MOST_CLASSES
from medflare.tasks.metrics_table import metric_table
from medflare.tasks.summaries import MOST_LABELS

_DEPTH: Final = 8  # of tables within tables
_LARGEST_INT: Final = 2**63
_LONGEST_NAME: Final = 500  # characters; tensors deep in a network have long names
_LONGEST_REASON: Final = 2_000  # characters of an event or an error
_REQUEST_LIMIT: Final = 2**18  # bytes of metadata of a request: names of all sites and their rounds


def message_problem(message: Message, site: str) -> str | None:
    """Why a site's reply cannot be used, whatever its phase, in words, or None."""
    try:
        return state_problem(message.states) or meta_problem(message.meta) or event_problem(message.meta.get("events", []), site)
    except Exception as error:  # a method that only the site has may have put anything into it
        return f"it cannot be read ({type(error).__name__})"


def state_problem(states: object) -> str | None:
    """Which tensor is not a dense, detached tensor in memory, or which name is too long or not printable, in words, or None."""
    if not isinstance(states, Mapping):
        return f"its states are {type(states).__name__}"
    for entry, state in states.items():
        if not _is_name(entry) or not isinstance(state, Mapping):
            return f"entry {shown(entry)} is not a state ({type(state).__name__})"
        for name, tensor in state.items():
            dense = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
            if not _is_name(name) or not dense or tensor.requires_grad:
                return f"{entry}/{shown(name)} is not a dense, detached tensor in memory ({type(tensor).__name__})"
    return None


def meta_problem(meta: object, limit: int = META_LIMIT) -> str | None:
    """Why metadata are not plain JSON values with printable text in at most `limit` bytes, in words, or None.

    Texts of events need not be printable: `core.events` makes them so.
    """
    if not isinstance(meta, dict):
        return f"its metadata are {type(meta).__name__}"
    try:
        _check_plain({name: value for name, value in meta.items() if name != "events"}, 0)
        size = len(json.dumps(meta))
    except (TypeError, ValueError) as error:
        return f"metadata: {error}"
    return f"{size} bytes of metadata, more than {limit}" if size > limit else None


def _check_plain(value: object, depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError(f"nested more than {_DEPTH} deep")
    if isinstance(value, dict):
        for name in value:
            if not _is_name(name):
                raise ValueError(f"a name is {shown(name)}")
    if isinstance(value, str) and not value.isprintable():
        raise ValueError(f"text with characters that cannot be printed: {shown(value)}")
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise ValueError(f"a number of {value.bit_length()} bits")
    inner: Iterable[object] = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        _check_plain(item, depth + 1)


def event_problem(events: object, site: str) -> str | None:
    """Why the events of a reply cannot be recorded, in words, or None; a site may send events in its name only."""
    if problem := _EVENTS.problem(list(events) if isinstance(events, tuple) else events):
        return f"events: {problem}"
    other = next((event["site"] for event in events if event.get("site") not in (None, site)), None)  # type: ignore[attr-defined]
    return None if other is None else f"an event in the name of {shown(other)}"


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) <= _LONGEST_NAME and name.isprintable()


def shown(value: object) -> str:
    """A value of another party for a message: the beginning of a text, else its type."""
    if isinstance(value, str):
        return repr(value[:60])
    return str(value) if isinstance(value, int) and abs(value) < _LARGEST_INT else type(value).__name__


def reason_line(text: object) -> str:
    """A site's reason as one printable line of limited length."""
    line = printable(str(text)[: 2 * _LONGEST_REASON])
    return line[:_LONGEST_REASON] or "no reason given"


def declaration_problem(message: Message, declared: tuple[MetaSpec, ...], required: Iterable[str] = ()) -> str | None:
    """Which item of plain metadata is not declared, missing or of another type, in words, or None; events need no declaration."""
    if extra := sorted(message.meta.keys() - {*declared, "events"}):
        return f"unexpected item {shown(extra[0])}"
    if missing := [name for name in required if name not in message.meta]:
        return f"item {missing[0]!r} is missing"
    for item in declared:
        if item in message.meta and (problem := item.problem(message.meta[item])):
            return f"{item}: {problem}"
    return None


_FORBID: Final = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(strict=True, ge=0, le=10**9)]
_Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
_Reason = Annotated[str, Field(strict=True, min_length=1, max_length=_LONGEST_REASON)]


class _Event(TypedDict, total=False):
    __pydantic_config__ = _FORBID  # type: ignore[misc]  # where pydantic reads it
    kind: Required[Literal[OF_SITES]]  # type: ignore[valid-type]  # a tuple of texts
    message: Required[_Reason]
    site: str | None
    round: _Count | None


class _Counts(TypedDict, total=False):
    """A split of too few patients is missing."""

    __pydantic_config__ = _FORBID  # type: ignore[misc]
    train: _Count
    validation: _Count
    test: _Count


class _Curve(TypedDict):
    __pydantic_config__ = _FORBID  # type: ignore[misc]
    auc: _Fraction | None
    low: _Fraction | None
    high: _Fraction | None
    sensitivity: list[_Fraction]


def _check_square(matrix: list[list[int]]) -> list[list[int]]:
    if not all(len(row) == len(matrix) <= MOST_CLASSES for row in matrix):
        raise ValueError(f"not a square of at most {MOST_CLASSES} classes")
    return matrix


def _check_curve(curve: Any) -> Any:
    if len(curve["sensitivity"]) not in (0, len(FALSE_ALARMS)):
        raise ValueError(f"sensitivity must have {len(FALSE_ALARMS)} values")
    return curve


class _Classes(TypedDict):
    """See `tasks.classes.class_report`; suppressed lists are empty."""

    __pydantic_config__ = _FORBID  # type: ignore[misc]
    confusion: Annotated[list[Annotated[list[list[_Count]], AfterValidator(_check_square)]], Field(max_length=MOST_CLASSES)]
    roc: Annotated[list[Annotated[_Curve, AfterValidator(_check_curve)]], Field(max_length=MOST_CLASSES)]


METRIC: Final = MetaSpec("metric", "a metric from 0 to 1", number(0.0, 1.0, optional=True))


def _check_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    for name, value in metrics.items():
        for bound in value if isinstance(value, list) else [value]:
            if problem := _bounds(name).problem(bound):
                raise ValueError(f"{shown(name)}: {problem}")
    return metrics


def _bounds(name: str) -> MetaSpec:
    if name not in metric_table() and name not in ONE_CLASS:
        raise ValueError(f"{shown(name)} is not a metric")
    return MetaSpec("metric", "", number(*metric_table()[name].bounds, optional=True)) if name in metric_table() else METRIC


_Version = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_.+!-]{1,64}$")]
_EVENTS: Final = MetaSpec("events", "what the site noticed", listing(_Event, 100))
VERSIONS: Final = MetaSpec("versions", "of the packages that results depend on", table(_Version))
_Range = Annotated[Any, AfterValidator(check_range)]
_RANGE_OF = "range of size, spacing and intensities of the training images, for the models' cards"
RANGE: Final = MetaSpec(TRAINED_ON, _RANGE_OF, _Range, "train", optional=True)
ENROLS: Final = (
    MetaSpec("n", "images by split", _Counts),
    MetaSpec("class_counts", "training images or pixels by class; empty if suppressed", listing(count())),
    VERSIONS,
    RANGE,
)
_Metrics = Annotated[dict[str, Annotated[float, Field(strict=True)] | None], AfterValidator(_check_metrics)]
_ByLabel = table(_Metrics, MOST_LABELS)
_Intervals = table(Annotated[dict[str, Annotated[list[float], Field(max_length=2)]], AfterValidator(_check_metrics)], MOST_LABELS + 1)
DELIVERS: Final = (
    MetaSpec("metrics", "model -> metric -> value on test images", models(_Metrics, 1000), "test"),
    MetaSpec("by_label", "model -> structure or class -> metric -> value on test images", models(_ByLabel, 1000), "test"),
    MetaSpec(
        "intervals", "model -> structure, class or all -> metric -> 95 % interval over test patients", models(_Intervals, 1000), "test"
    ),
    MetaSpec("constant", "the task's metric of the constant prediction on test images", number(0.0, 1.0, optional=True), "test"),
    MetaSpec("n", "images by split", _Counts),
    MetaSpec("reports", "what models report of their predictions", models(table(), 1000), "test"),
    MetaSpec("classes", "model -> confusion counts and ROC curves of test images", models(_Classes, 1000), "test"),
    MetaSpec("privacy", "privacy cost of the run for the site's patients", Cost),
)

SHARED: Final = TensorSpec("personal", "personal model, to be tested at the other sites")
_Tested = table(number(0.0, 1.0, optional=True))
_TESTED: Final = MetaSpec(CROSS_SITE, "site of the model -> the task's metric on test images", _Tested, "test")
CROSS: Final = Phase(CROSS_SITE, request=(TensorSpec(f"{SHARED}/"),), reply_meta=(_TESTED,))

START: Final = "start"  # entry of an invitation: the initial weights, if the task names a weights file
ROLE, SITES, FINISHED, STEP, RUN_ROUNDS = "role", "sites", "finished", "step", "run_rounds"
INVITES: Final = (
    MetaSpec(ROLE, "whether the site trains", text("inside", "outside")),
    MetaSpec(SITES, "the inside sites, sorted", listing(text(), 10_000)),
    MetaSpec(FINISHED, "steps that were done before", count(), optional=True),
    MetaSpec("method", "name of the method", text(), optional=True),
    MetaSpec("hyper", "all hyper-parameters", table(), optional=True),
    MetaSpec("task", "hash of the task", text(), optional=True),
    MetaSpec("seed", "of the run", number(), optional=True),
)
SHARE: Final = MetaSpec("share", "whether the other sites test the personal model", Annotated[bool, Field(strict=True)], optional=True)
_CONCERN: Final = "kinds of the findings of the training that concern the site, for its page"
TRAINING_FINDINGS: Final = MetaSpec("training_findings", _CONCERN, listing(text(*OF_TRAINING), len(OF_TRAINING)), optional=True)
NUMBERED: Final = (
    MetaSpec(STEP, "its number in the run", count(10**9)),
    MetaSpec(RUN_ROUNDS, "rounds of the run", count(10**9)),
    RANGE,
    SHARE,
    TRAINING_FINDINGS,
)


class RequestValidator:
    """Checks the messages of a server at one site; every method raises MessageError with the site, the step and the problem."""

    def __init__(self, site: str):
        self.site = site

    def check_invitation(self, round: int, message: Message) -> None:
        """Check an invitation, as far as is possible before the site's task is loaded."""
        self._check(ENROL, round, _form_problem(round, message) or _request_meta_problem(message, INVITES))
        if (message.meta[ROLE] == "inside") != (self.site in message.meta[SITES]):
            self._check(ENROL, round, f"item {SITES!r} and the role {message.meta[ROLE]!r} of {self.site} do not agree")

    def check_start(self, round: int, message: Message, plan: Plan[Any, Any]) -> None:
        """Check that an invitation holds the initial weights if the task names a weights file, and no other tensors."""
        request = (TensorSpec(START),) if plan.task.network.get("weights") else ()
        self._check(ENROL, round, request_problem(Phase(ENROL, request=request, request_meta=INVITES), plan, message))

    def pop_numbers(self, phase: str, round: int, message: Message) -> dict[str, Any]:
        """The items of `NUMBERED`, which do not belong to the method; they are removed from the message."""
        self._check(phase, round, _form_problem(round, message))
        numbers = {str(item): message.meta.pop(item) for item in NUMBERED if item in message.meta}
        self._check(phase, round, _request_meta_problem(Message({}, numbers), NUMBERED))
        return numbers

    def check_request(self, phase: str, round: int, message: Message, algorithm: SiteAlgorithm[Any]) -> None:
        """Check a message, without the items of `NUMBERED`, against the declaration of its phase."""
        if phase == CROSS_SITE:
            self._check(phase, round, request_problem(CROSS, algorithm.plan, message))
            return
        declared = algorithm.delivery if phase == FINALIZE else algorithm.phase(phase)
        if declared is not None:
            problem = request_problem(declared, algorithm.plan, message)
            self._check(phase, round, problem or algorithm.validate_request(message))

    def _check(self, phase: str, round: int, problem: str | None) -> None:
        if problem is not None:
            raise MessageError(f"site {self.site} rejects the server's message for '{phase}' of round {round}: {problem}")


def _form_problem(round: object, message: Message) -> str | None:
    problem = state_problem(message.states) or meta_problem(message.meta, _REQUEST_LIMIT)
    return problem or (None if type(round) is int and round >= 0 else f"its round is {shown(round)}")


def _request_meta_problem(message: Message, declared: tuple[MetaSpec, ...]) -> str | None:
    return declaration_problem(message, declared, tuple(item for item in declared if not item.optional))


def request_problem(phase: Phase, plan: Plan[Any, Any], message: Message) -> str | None:
    """How a server's message, without the items of `NUMBERED`, differs from its phase's declaration, in words, or None."""
    specs = [spec for spec in phase.request if spec.when(plan)]
    if missing := [spec for spec in specs if not (spec.optional or spec.endswith("/") or spec in message.states)]:
        return f"missing entry {shown(missing[0])}"
    for name in message.states:
        part, problem = Message({name: message.states[name]}), f"unexpected entry {shown(name)}"
        for spec in specs:
            if not spec.covers(name) or (spec.endswith("/") and name.removeprefix(spec) not in plan.sites):
                continue
            manifest = {name: spec.spec(plan)}
            problem = violation(part, manifest) or non_finite(part) or negative(part, manifest) or ""
            if not problem:
                break
        if problem:
            return problem
    return _request_meta_problem(message, phase.request_meta)
