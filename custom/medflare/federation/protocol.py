"""What the declarations of phases mean.

The messages of every run, and whether a message is as declared.

The server checks every reply and every site every request before a method sees it, and the guard
checks again what leaves a site. The parties are honest, but may have a full disk, another version
or a different method.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictFloat
from torch import Tensor
from typing_extensions import Required, TypedDict

from medflare.adaptation.labelshift import CLASS_SHARES
from medflare.core.errors import MessageError
from medflare.core.events import SENT_BY_SITES
from medflare.core.message import Message
from medflare.core.phases import Items, Phase, name_difference
from medflare.core.specs import (
    Manifest,
    MetaSpec,
    TensorSpec,
    by_model,
    count,
    listing,
    number,
    table,
    text,
)
from medflare.core.states import StateDict
from medflare.core.text import JsonDict, is_site_name, printable
from medflare.data.acquisition import TRAINED_ON, check_range
from medflare.evaluation.findings import OF_TRAINING
from medflare.federation.settings import CROSS_SITE, ENROL, FINALIZE, META_LIMIT, step_name
from medflare.methods.base import Plan, SiteAlgorithm
from medflare.privacy.rounds import PrivacyCost
from medflare.tasks.class_metrics import ONE_CLASS
from medflare.tasks.classes import FALSE_ALARMS, MOST_CLASSES
from medflare.tasks.metrics_table import metric_table
from medflare.tasks.summaries import MOST_LABELS

_DEPTH = 8  # of tables within tables
_LARGEST_INT = 2**63
_LONGEST_NAME = 500  # characters; tensors deep in a network have long names
_LONGEST_REASON = 2_000  # characters of an event or an error
_REQUEST_LIMIT = 2**18  # bytes of metadata of a request: names of all sites and their rounds


def message_problem(message: Message, site: str) -> str | None:
    """Why a site's reply cannot be used, whatever its phase, in words, or None."""
    try:
        return (
            state_problem(message.states)
            or meta_problem(message.meta)
            or event_problem(message.meta.get(EVENTS.name, []), site)
        )
    except Exception as error:  # a method that only the site has may have put anything into it
        return f"it cannot be read ({type(error).__name__})"


def state_problem(states: object) -> str | None:
    """Which tensor is not dense, detached and in memory, in words, or None.

    Or which name is too long or not printable.
    """
    if not isinstance(states, Mapping):
        return f"its states are {type(states).__name__}"
    for entry, state in states.items():
        if not _is_name(entry) or not isinstance(state, Mapping):
            return f"entry {shown(entry)} is not a state ({type(state).__name__})"
        for name, tensor in state.items():
            if not _is_name(name) or not _is_plain_tensor(tensor):
                return (
                    f"{entry}/{shown(name)} is not a dense, detached tensor in memory "
                    f"({type(tensor).__name__})"
                )
    return None


def _is_plain_tensor(tensor: object) -> bool:
    if type(tensor) is not Tensor:
        return False
    dense = tensor.layout == torch.strided and not tensor.is_quantized
    return dense and not tensor.is_meta and not tensor.requires_grad


def meta_problem(meta: object, limit: int = META_LIMIT) -> str | None:
    """Why metadata are not plain JSON values with printable text, in words, or None.

    They have at most `limit` bytes.

    Texts of events need not be printable: `core.events` makes them so.
    """
    if not isinstance(meta, dict):
        return f"its metadata are {type(meta).__name__}"
    try:
        _check_plain({name: value for name, value in meta.items() if name != EVENTS.name}, 0)
        size = len(json.dumps(meta))
    except (TypeError, ValueError) as error:
        return f"metadata: {error}"
    return f"{size} bytes of metadata, more than {limit}" if size > limit else None


def _check_plain(value: object, depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError(f"nested more than {_DEPTH} deep")
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = value.values()
        for name in value:
            if not _is_name(name):
                raise ValueError(f"a name is {shown(name)}")
    elif isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, str) and not value.isprintable():
        raise ValueError(f"text with characters that cannot be printed: {shown(value)}")
    elif isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise ValueError(f"a number of {value.bit_length()} bits")
    for item in inner:
        _check_plain(item, depth + 1)


def event_problem(events: Any, site: str) -> str | None:
    """Why the events of a reply cannot be recorded, in words, or None.

    A site may send events in its name only.
    """
    problem = EVENTS.problem(events)
    if problem:
        return f"events: {problem}"
    for event in events:
        if event.get("site") not in (None, site):
            return f"an event in the name of {shown(event['site'])}"
    return None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) <= _LONGEST_NAME and name.isprintable()


def shown(value: object) -> str:
    """A value of another party for a message: the beginning of a text, else its type."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, int) and abs(value) < _LARGEST_INT:
        return str(value)
    return type(value).__name__


def reason_line(text: object) -> str:
    """A site's reason as one printable line of limited length."""
    line = printable(str(text)[: 2 * _LONGEST_REASON])
    return line[:_LONGEST_REASON] or "no reason given"


def declaration_problem(
    message: Message, declared: Items, required: Iterable[MetaSpec] = ()
) -> str | None:
    """Which item of plain metadata is not declared, missing or of another type, in words, or None.

    Events need no declaration.
    """
    extra = sorted(message.meta.keys() - {item.name for item in (*declared, EVENTS)})
    if extra:
        return f"unexpected item {shown(extra[0])}"
    for item in required:
        if item not in message:
            return f"item {item.name!r} is missing"
    for item in declared:
        if item in message:
            problem = item.problem(message[item])
            if problem:
                return f"{item.name}: {problem}"
    return None


_FORBID = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(strict=True, ge=0, le=10**9)]
_Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
_Reason = Annotated[str, Field(strict=True, min_length=1, max_length=_LONGEST_REASON)]


class _Event(TypedDict, total=False):
    __pydantic_config__ = _FORBID  # type: ignore[misc]  # where pydantic reads it
    kind: Required[Literal[SENT_BY_SITES]]  # type: ignore[valid-type]  # a tuple of texts
    message: Required[_Reason]
    site: str | None
    round: _Count | None


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
    ends = (curve["low"], curve["high"])
    if ends != (None, None) and None in (curve["auc"], *ends):
        raise ValueError("the interval of an area has two ends, or none")
    return curve


def _check_interval(ends: list[float]) -> list[float]:
    if len(ends) == 1:
        raise ValueError("an interval has two ends, or is empty")
    return ends


class _Classes(TypedDict):
    """See `tasks.classes.class_report`; suppressed lists are empty."""

    __pydantic_config__ = _FORBID  # type: ignore[misc]
    confusion: Annotated[
        list[Annotated[list[list[_Count]], AfterValidator(_check_square)]],
        Field(max_length=MOST_CLASSES),
    ]
    roc: Annotated[
        list[Annotated[_Curve, AfterValidator(_check_curve)]], Field(max_length=MOST_CLASSES)
    ]


METRIC = MetaSpec[float | None]("metric", "a metric from 0 to 1", number(0.0, 1.0, optional=True))


def _check_metrics(metrics: JsonDict) -> JsonDict:
    known = metric_table()
    for name, value in metrics.items():
        if name not in known and name not in ONE_CLASS:
            raise ValueError(f"{shown(name)} is not a metric")
        low, high = known[name].bounds if name in known else (0.0, 1.0)
        for bound in value if isinstance(value, list) else [value]:
            if bound is not None and not low <= bound <= high:
                raise ValueError(f"{shown(name)}: {bound:g} is not from {low:g} to {high:g}")
    return metrics


_Version = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_.+!-]{1,64}$")]
_Metrics = Annotated[dict[str, StrictFloat | None], AfterValidator(_check_metrics)]
_Interval = Annotated[list[StrictFloat], Field(max_length=2), AfterValidator(_check_interval)]
_Intervals = Annotated[dict[str, _Interval], AfterValidator(_check_metrics)]
_Range = Annotated[Any, AfterValidator(check_range)]
# A split of too few patients is missing.
_Counts = dict[Literal["train", "validation", "test"], _Count]

EVENTS = MetaSpec[list[JsonDict]]("events", "what the site noticed", listing(_Event, 100))

# -- enrollment: an invitation and its reply ------------------------------------------------------

START = TensorSpec("start")  # the initial weights, if the task names a weights file
ROLE = MetaSpec[str]("role", "whether the site trains", text("inside", "outside"))
SITES = MetaSpec[list[str]]("sites", "the inside sites, sorted", listing(text(), 10_000))
COMBINED = MetaSpec[int](
    "combined_sites",
    "the fewest inside sites whose updates a step combines",
    Annotated[int, Field(strict=True, ge=1)],
    optional=True,
)
FINISHED = MetaSpec[int]("finished", "steps that were done before", count(), optional=True)
INVITATION_META = (
    ROLE,
    SITES,
    COMBINED,
    FINISHED,
    MetaSpec[str]("method", "name of the method", text(), optional=True),
    MetaSpec[JsonDict]("hyper", "all hyper-parameters", table(), optional=True),
    MetaSpec[str]("task", "hash of the task", text(), optional=True),
    MetaSpec[float]("seed", "of the run", number(), optional=True),
)
COUNTS = MetaSpec[dict[str, int]]("n", "images by split", _Counts)
CLASS_COUNTS = MetaSpec[list[int]](
    "class_counts", "training images or pixels by class; empty if suppressed", listing(count())
)
VERSIONS = MetaSpec[dict[str, str]](
    "versions", "of the packages that results depend on", table(_Version)
)
RANGE = MetaSpec[JsonDict](
    TRAINED_ON,
    "range of size, spacing and intensities of the training images, for the models' cards",
    _Range,
    "train",
    optional=True,
)
ENROL_REPLY_META = (COUNTS, CLASS_COUNTS, VERSIONS, RANGE)

# -- the end: the request for final models and its reply ------------------------------------------

METRICS = MetaSpec[JsonDict](
    "metrics", "model -> metric -> value on test images", by_model(_Metrics, 1000), "test"
)
CONSTANT = MetaSpec[float | None](
    "constant", "the task's metric of the constant prediction on test images", METRIC.type, "test"
)
PRIVACY_COST = MetaSpec[JsonDict](
    "privacy", "privacy cost of the run for the site's patients", PrivacyCost
)
FINAL_REPLY_META = (
    METRICS,
    MetaSpec[JsonDict](
        "by_label",
        "model -> structure or class -> metric -> value on test images",
        by_model(table(_Metrics, MOST_LABELS), 1000),
        "test",
    ),
    MetaSpec[JsonDict](
        "intervals",
        "model -> structure, class or all -> metric -> 95 % interval over test patients",
        by_model(table(_Intervals, MOST_LABELS + 1), 1000),
        "test",
    ),
    CONSTANT,
    COUNTS,
    MetaSpec[JsonDict](
        "reports", "what models report of their predictions", by_model(table(), 1000), "test"
    ),
    MetaSpec[JsonDict](
        "classes",
        "model -> confusion counts and ROC curves of test images",
        by_model(_Classes, 1000),
        "test",
    ),
    PRIVACY_COST,
)
PERSONAL_MODEL = TensorSpec("personal", "personal model, to be tested at the other sites")
PERSONAL_MODELS = TensorSpec("personal", of=lambda plan: plan.sites)
TESTED = MetaSpec[dict[str, float | None]](
    CROSS_SITE, "site of the model -> the task's metric on test images", table(METRIC.type), "test"
)
CROSS_SITE_PHASE = Phase(CROSS_SITE, request=(PERSONAL_MODELS,), meta=(TESTED,))

# -- every step: items beside those of the method -------------------------------------------------

STEP = MetaSpec[int]("step", "its number in the run", count(10**9))
RUN_ROUNDS = MetaSpec[int]("run_rounds", "rounds of the run", count(10**9))
TEST_PERSONAL = MetaSpec[bool](
    "share", "whether the other sites test the personal model", StrictBool, optional=True
)
TRAINING_FINDINGS = MetaSpec[list[str]](
    "training_findings",
    "kinds of the findings of the training that concern the site, for its page",
    listing(text(*OF_TRAINING), len(OF_TRAINING)),
    optional=True,
)
ADAPT = MetaSpec[str](
    "adapt", "adaptation of the deployed model, which is tested too", text(), optional=True
)
FEDERATION_SHARES = MetaSpec[list[float]](
    CLASS_SHARES,
    "class shares of all training images, for the final models",
    listing(number(0.0, 1.0), MOST_CLASSES),
    optional=True,
)
RUN_META = (STEP, RUN_ROUNDS, RANGE, TEST_PERSONAL, TRAINING_FINDINGS, ADAPT, FEDERATION_SHARES)
# Phase of every run -> (metadata of a reply, those that it must have).
BUILTIN_REPLY_META = {
    ENROL: (ENROL_REPLY_META, (COUNTS, CLASS_COUNTS)),
    FINALIZE: (FINAL_REPLY_META, (METRICS,)),
    CROSS_SITE: (CROSS_SITE_PHASE.meta, (TESTED,)),
}


# -- states as declared ---------------------------------------------------------------------------


def violation(message: Message, manifest: Manifest) -> str | None:
    """How the states differ from the manifest in names, shapes or dtypes.

    None if they match exactly.
    """
    problem = name_difference("entry", manifest, message.states)
    if problem is not None:
        return problem
    for entry, spec in manifest.items():
        state = message.states[entry]
        problem = name_difference("tensor", spec.tensors, state)
        if problem is not None:
            return f"{entry}: {problem}"
        for name, (shape, dtype) in spec.tensors.items():
            tensor = state[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                return (
                    f"{entry}/{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, "
                    f"expected {shape} and {dtype}"
                )
    return None


def non_finite(message: Message) -> str | None:
    """The first tensor that holds NaN or infinity, in words, or None."""
    for entry, state in sorted(message.states.items()):
        for name, tensor in state.items():
            if not tensor.is_floating_point():
                continue
            # A finite sum is ten times as fast to check; the sum of finite values may overflow.
            if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                return f"{entry}/{name} holds NaN or infinity"
    return None


def negative(message: Message, manifest: Manifest) -> str | None:
    """The first nonnegative tensor with a value below 0, in words, or None.

    The message must match the manifest.
    """
    for entry, spec in manifest.items():
        for name in sorted(spec.nonnegative):
            if (message.states[entry][name] < 0).any():
                return (
                    f"{entry}/{name} holds a value below 0, "
                    "which a variance or a mean square cannot be"
                )
    return None


def tensor_problem(message: Message, manifest: Manifest) -> str | None:
    """Why the states are not as declared or hold impossible values, in words, or None."""
    return violation(message, manifest) or non_finite(message) or negative(message, manifest)


# -- requests at a site ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestValidator:
    """Checks the server's message for one step of a site.

    Every method raises MessageError with the site, the step and the problem.
    """

    site: str
    phase: str
    round: int

    def check_invitation(self, message: Message) -> None:
        """Check an invitation, as far as is possible before the site's task is loaded."""
        self._check_form(message)
        self._check(_request_meta_problem(message, INVITATION_META))
        if len(set(message[SITES])) < len(message[SITES]):
            self._check(f"item {SITES.name!r} has a name twice")
        for name in message[SITES]:
            if not is_site_name(name):  # it is also that of a folder here
                self._check(f"item {SITES.name!r} has a text that is no name of a site")
        role = message[ROLE]
        if (role == "inside") != (self.site in message[SITES]):
            self._check(f"item {SITES.name!r} and the role {role!r} of {self.site} do not agree")

    def check_start(self, message: Message, plan: Plan) -> None:
        """Check that an invitation holds no tensors but the initial weights.

        It holds these if the task names a weights file.
        """
        request = (START,) if plan.task.network.get("weights") else ()
        invitation = Phase(ENROL, request=request, request_meta=INVITATION_META)
        self._check(request_problem(invitation, plan, message))

    def pop_run_items(self, message: Message) -> Message:
        """The items of `RUN_META`, which do not belong to the method.

        They are removed from the message.
        """
        self._check_form(message)
        numbers = Message()
        for item in RUN_META:
            if item in message:
                numbers[item] = message.meta.pop(item.name)
        self._check(_request_meta_problem(numbers, RUN_META))
        return numbers

    def check_request(self, message: Message, algorithm: SiteAlgorithm) -> None:
        """Check a message, without the items of `RUN_META`, against its phase's declaration."""
        if self.phase == CROSS_SITE:
            self._check(request_problem(CROSS_SITE_PHASE, algorithm.plan, message))
        elif self.phase != FINALIZE or FINALIZE in algorithm.phases:
            problem = request_problem(algorithm.phase(self.phase), algorithm.plan, message)
            self._check(problem or algorithm.validate_request(message))

    def _check_form(self, message: Message) -> None:
        self._check(state_problem(message.states) or meta_problem(message.meta, _REQUEST_LIMIT))
        if type(self.round) is not int or self.round < 0:
            self._check(f"its round is {shown(self.round)}")

    def _check(self, problem: str | None) -> None:
        if problem is not None:
            step = f"'{self.phase}'"
            if type(self.round) is int:
                step = step_name(self.phase, self.round)
            raise MessageError(
                f"site {self.site} rejects the server's message for {step}: {problem}"
            )


def _request_meta_problem(message: Message, declared: Items) -> str | None:
    required = [item for item in declared if not item.optional]
    return declaration_problem(message, declared, required)


def request_problem(phase: Phase, plan: Plan, message: Message) -> str | None:
    """How a server's message differs from its phase's declaration, in words, or None.

    The message is without the items of `RUN_META`.
    """
    entries: dict[str, list[TensorSpec]] = {}
    for spec in phase.request:
        if not spec.when(plan):
            continue
        for name, member in spec.members(plan).items():
            entries.setdefault(name, []).append(member)
        required = spec.of is None and not spec.optional
        if required and spec not in message:
            return f"missing entry {shown(spec.name)}"
    for name, state in message.states.items():
        if name not in entries:
            return f"unexpected entry {shown(name)}"
        problem = _entry_problem(name, state, entries[name], plan)
        if problem:
            return problem
    return _request_meta_problem(message, phase.request_meta)


def _entry_problem(
    name: str, state: StateDict, specs: Iterable[TensorSpec], plan: Plan
) -> str | None:
    """Why a state is as none of its specs declares, in words, or None."""
    part = Message({name: state})
    problem = None
    for spec in specs:
        problem = tensor_problem(part, {name: spec.spec(plan)})
        if problem is None:
            return None
    return problem
