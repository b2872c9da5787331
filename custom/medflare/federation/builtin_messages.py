"""The messages of every run beside those of its method: enrollment, final models, cross-site tests
and items of every step.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictFloat
from typing_extensions import Required, TypedDict

from medflare.adaptation.labelshift import CLASS_SHARES
from medflare.core.events import SENT_BY_SITES
from medflare.core.phases import Items, Phase
from medflare.core.specs import MetaSpec, TensorSpec, by_model, count, listing, number, table, text
from medflare.core.text import LONGEST_REASON, JsonDict, shown
from medflare.data.acquisition import TRAINED_ON, check_range
from medflare.evaluation.findings import OF_TRAINING
from medflare.federation.settings import CROSS_SITE, ENROL, FINALIZE
from medflare.privacy.rounds import PrivacyCost
from medflare.tasks.class_metrics import ONE_CLASS
from medflare.tasks.classes import FALSE_ALARMS, MOST_CLASSES
from medflare.tasks.metrics_table import metric_table
from medflare.tasks.summaries import MOST_LABELS

_FORBID = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(strict=True, ge=0, le=10**9)]
_Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
_Reason = Annotated[str, Field(strict=True, min_length=1, max_length=LONGEST_REASON)]


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
INVITATION_META: Items = (
    ROLE,
    SITES,
    COMBINED,
    FINISHED,
    MetaSpec("method", "name of the method", text(), optional=True),
    MetaSpec("hyper", "all hyper-parameters", table(), optional=True),
    MetaSpec("task", "hash of the task", text(), optional=True),
    MetaSpec("seed", "of the run", number(), optional=True),
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
FINAL_REPLY_META: Items = (
    METRICS,
    MetaSpec(
        "by_label",
        "model -> structure or class -> metric -> value on test images",
        by_model(table(_Metrics, MOST_LABELS), 1000),
        "test",
    ),
    MetaSpec(
        "intervals",
        "model -> structure, class or all -> metric -> 95 % interval over test patients",
        by_model(table(_Intervals, MOST_LABELS + 1), 1000),
        "test",
    ),
    CONSTANT,
    COUNTS,
    MetaSpec("reports", "what models report of their predictions", by_model(table(), 1000), "test"),
    MetaSpec(
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
