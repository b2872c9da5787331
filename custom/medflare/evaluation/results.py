"""results.json and metrics.jsonl: their content, the schema that every reader can rely on, and how they are read."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from medflare.core.errors import StateError
from medflare.core.events import KINDS, Event
from medflare.core.packages import installed_versions
from medflare.core.text import NAME, is_name, printable_json
from medflare.evaluation.labels import CLASSES, STRUCTURES, labels_of, named_metrics
from medflare.evaluation.verdicts import findings
from medflare.tasks.config import TaskConfig
from medflare.tasks.summaries import ALL

if TYPE_CHECKING:
    import pandas as pd

MODELS: Final = ("global", "personal", "deployed")
ROLES: Final = ("inside", "outside")
SPLITS: Final = ("train", "validation", "test")
COMPLETED, FAILED = "COMPLETED", "FAILED"
UNKNOWN: Final = "unknown"  # the method or the task of a job that could not be read
FOLDER: Final = "medflare"  # below the server's job folder
RESULTS_FILE, ROUNDS_FILE, REPORT_FILE = "results.json", "metrics.jsonl", "report.html"


@dataclass
class SiteRecord:
    """What is known about one site when a run ends.

    Attributes:
        role: "inside" (trains) or "outside" (never trains).
        n: split -> number of images, of the splits that the site reported.
        metrics: model ("global", "personal", "deployed", or another that the method compares) -> metric -> test value; None: undefined.
        reports: model -> what it reports of its predictions, for example how often each network of a super model was used.
        privacy: cost of differential privacy ("epsilon", "delta", "steps"); empty without it.
        classes: model -> `tasks.classes.class_report` of the test images; empty for segmentation.
        constant: the task's metric of the constant prediction, see `training.constant`.
        by_label: model -> structure or class -> metric -> test value.
        intervals: model -> structure or class, or `ALL` -> metric -> [low, high] over test patients, see `tasks.summaries`.
    """

    role: str
    n: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    reports: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, Any] = field(default_factory=dict)
    by_label: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)
    intervals: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]] = field(default_factory=dict)
    constant: float | None = None


@dataclass
class RunRecord:
    """What is known of a run when it ends.

    Attributes:
        task: None if it could not be read.
        reason: why the run failed, one line; "" for a completed run.
        down_bytes, up_bytes: tensors sent to all sites and received from them.
        seconds: stage ("training", "total", ...) -> wall-clock seconds.
        hyper: "site" and "server" -> all hyper-parameters.
        costs: site -> {"down_bytes", "up_bytes", "seconds" of work}.
        history: one mapping per step, see `append_round`.
        pictures: title -> PNG file, shown in the report.
        model_selection: model -> {"round": of the final model, "rule", "candidates": [{"round", "value", "votes": site -> metric}]}.
        tables: title -> site -> column -> number or text that the method reports.
        cross_site: site of a personal model -> site of the test images -> the task's metric.
        selector: of a model that selects one of several networks per image: {"gamma", "temperature", "candidates": values of γ,
            "votes": site -> mean paired gain over the global model for each candidate, "mean_gain": of γ}; else empty.
        citation: the method's paper.
    """

    method: str
    task: TaskConfig | None
    seed: int
    rounds: int
    sites: Mapping[str, SiteRecord]
    reason: str = ""
    events: Iterable[Event] = ()
    down_bytes: int = 0
    up_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    hyper: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"site": {}, "server": {}})
    settings: Mapping[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    model_selection: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    cross_site: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    selector: Mapping[str, Any] = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    citation: str = ""


def build_results(record: RunRecord) -> dict[str, Any]:
    """The content of results.json, see `json_ready`: every site and mean has the same models and metrics; undefined values are None.

    "findings" are those of `verdicts.findings`.
    """
    metrics = record.task.test_metrics if record.task else ()
    models = tuple(dict.fromkeys([*MODELS, *(model for site in record.sites.values() for model in site.metrics)]))
    weights = shares({name: site.n["train"] for name, site in record.sites.items() if site.role == "inside" and "train" in site.n})
    sites = {name: site_results(record.sites[name], models, record.task, weights.get(name)) for name in sorted(record.sites)}
    results = {
        "schema": 1,
        "method": record.method,
        "task": record.task.name if record.task else UNKNOWN,
        "seed": record.seed,
        "rounds": record.rounds,
        "status": FAILED if record.reason else COMPLETED,
        "reason": record.reason or None,
        "sites": sites,
        "mean": mean_over_sites(sites, dict.fromkeys(models, metrics)),
        "traffic": {"down_bytes": record.down_bytes, "up_bytes": record.up_bytes},
        "seconds": dict(record.seconds),
        "costs": {site: record.costs[site] for site in sorted(record.costs)},
        "model_selection": record.model_selection,
        "events": list(record.events),
        "versions": installed_versions(),
        "configuration": {"hyper": record.hyper, "settings": record.settings, "task": record.task.to_dict() if record.task else {}},
    }
    optional = {"citation": record.citation, "tables": record.tables, "cross_site": record.cross_site}
    results |= {name: content for name, content in optional.items() if content}
    if record.selector:
        results["selector"] = {**record.selector, "confusion": confusion(sites)}
    ready: dict[str, Any] = json_ready(results)
    ready["findings"] = [finding.to_dict() for finding in findings(ready, json_ready(record.history))]
    return ready


def site_results(site: SiteRecord, models: tuple[str, ...], task: TaskConfig | None, share: float | None = None) -> dict[str, Any]:
    """A site's part of results.json."""
    metrics, labels = (task.test_metrics, task.labels) if task else ((), ())
    kind = STRUCTURES if task and task.kind == "segmentation" else CLASSES

    def of_labels(content: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The metrics of the task's labels under `kind`; without any, nothing."""
        shown = {label: {metric: value for metric, value in content[label].items() if value != []} for label in labels if label in content}
        return {kind: shown} if any(shown.values()) else {}

    values = {model: {metric: site.metrics.get(model, {}).get(metric) for metric in metrics} for model in models}
    intervals = {
        model: {metric: bounds for metric, bounds in content.get(ALL, {}).items() if bounds and metric in metrics} | of_labels(content)
        for model, content in site.intervals.items()
    }
    intervals = {model: content for model, content in intervals.items() if content}
    optional = {"intervals": intervals, "share": share, "reports": site.reports, "privacy": site.privacy, "classes": site.classes}
    return {
        "role": site.role,
        "n": {split: site.n.get(split) for split in SPLITS},
        "metrics": {model: values[model] | of_labels(site.by_label.get(model, {})) for model in models},
        **{name: content for name, content in optional.items() if content},
        **({} if site.constant is None else {"constant": site.constant}),
    }


def shares(samples: Mapping[str, float]) -> dict[str, float]:
    """Site -> its share of all training images, by which means over the sites are weighted.

    Examples:
        >>> shares({"A": 30, "B": 10}), shares({"A": 0})
        ({'A': 0.75, 'B': 0.25}, {'A': 0.0})
    """
    total = sum(samples.values())
    return {site: count / total if total else 0.0 for site, count in samples.items()}


def confusion(sites: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Inside site -> site predicted by the selector -> number of test images; only sites that report counts."""
    reports = {name: site.get("reports", {}).get("deployed") or {} for name, site in sites.items() if site["role"] == "inside"}
    rows = {name: report["selector"] for name, report in reports.items() if isinstance(report.get("selector"), Mapping)}
    return {name: dict(row) for name, row in rows.items() if all(type(count) is int and count >= 0 for count in row.values())}


def mean_over_sites(sites: Mapping[str, Any], shape: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """Role -> model -> metric -> unweighted mean of the defined values of the sites of that role; `shape`: model -> its metrics."""

    def mean(values: Iterable[float | None]) -> float | None:
        defined = [value for value in values if value is not None and math.isfinite(value)]
        return fmean(defined) if defined else None

    metrics = {role: [site["metrics"] for site in sites.values() if site["role"] == role] for role in ROLES}
    return {
        role: {model: {name: mean(site[model][name] for site in of_sites) for name in shape[model]} for model in shape}
        for role, of_sites in metrics.items()
    }


def json_ready(value: Any) -> Any:
    """The content in JSON types: keys as text, tuples and sets as lists, NumPy's numbers as Python's, NaN and infinity as None.

    Raises TypeError for a value that JSON has no type for.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written to results.json")


def results_frame(results: Mapping[str, Any]) -> "pd.DataFrame":
    """The test metrics of a run as a table: one row per site, model, label and metric, NaN for undefined values.

    Columns site, role, model, label (a structure or class; `ALL` for the metric of the model), metric, value, and low and high, the 95 %
    interval over test patients.
    """
    import pandas as pd  # not needed to write results: a job that carries its code runs without it

    rows = [
        (name, site["role"], model, label, metric, value, *(bounds.get(metric) or (None, None)))
        for name, site in results["sites"].items()
        for model, metrics in site["metrics"].items()
        for label, values, bounds in [(ALL, named_metrics(metrics), site.get("intervals", {}).get(model, {})), *labels_of(site, model)]
        for metric, value in values.items()
    ]
    numbers = ["value", "low", "high"]
    return pd.DataFrame(rows, columns=["site", "role", "model", "label", "metric", *numbers]).astype(dict.fromkeys(numbers, float))


# -- the schema of results.json: further keys are allowed, every number is finite or null ------------------------------------

_Values = dict[str, float | None]
_Metrics = dict[str, float | dict[str, _Values] | None]
_Count = Annotated[int, Field(ge=0)]
_Text = Annotated[str, Field(min_length=1)]


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    return kind


def _site_name(name: str) -> str:
    if not is_name(name):
        raise ValueError("not the name of a site")
    return name


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Models(_Open):
    global_: _Metrics = Field(alias="global")
    personal: _Metrics
    deployed: _Metrics


class _Site(_Open):
    role: Literal["inside", "outside"]
    n: dict[Literal["train", "validation", "test"], _Count | None]
    metrics: _Models


class _Traffic(_Open):
    down_bytes: _Count
    up_bytes: _Count


class _Cost(_Traffic):
    seconds: Annotated[float, Field(ge=0)]


class _Event(_Open):
    round: int | None
    site: str | None
    kind: Annotated[str, AfterValidator(_known_kind)]
    message: _Text


class _Finding(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: _Text
    problem: _Text
    where: str
    remedy: str
    sites: list[str]
    brief: str


class _HyperParameters(_Open):
    site: dict[str, Any]
    server: dict[str, Any]


class _Configuration(_Open):
    hyper: _HyperParameters
    settings: dict[str, Any]
    task: dict[str, Any]


class _Results(_Open):
    schema_: Literal[1] = Field(alias="schema")
    method: _Text
    task: _Text
    seed: int
    rounds: _Count
    status: Literal["COMPLETED", "FAILED"]
    reason: str | None
    sites: dict[Annotated[str, AfterValidator(_site_name)], _Site]
    mean: dict[Literal["inside", "outside"], _Models]
    traffic: _Traffic
    seconds: dict[str, float]
    costs: dict[str, _Cost] = Field(default_factory=dict)  # missing in results of earlier versions
    events: list[_Event]
    findings: list[_Finding] = Field(default_factory=list)  # missing in results of earlier versions
    versions: dict[str, str]
    configuration: _Configuration

    @model_validator(mode="after")
    def _status_and_reason_agree(self) -> "_Results":
        if (self.status == FAILED) != bool(self.reason):
            raise ValueError(f"a failed run has a reason and a completed one has none, got {self.status} and {self.reason!r}")
        return self


def validate_results(results: Mapping[str, Any]) -> None:
    """Check a results dict against the schema; raises ValueError with every violation and its location, on one line."""
    try:
        _Results.model_validate(results)
    except ValidationError as error:
        problems = [f"{'.'.join(str(part)[:NAME] for part in problem['loc']) or 'results'}: {problem['msg']}" for problem in error.errors()]
        raise ValueError("not valid results: " + "; ".join(problems)) from None


def find_results(path: Path) -> Path:
    """The results.json at `path`, or the newest one below the folder of a run, a simulator or POC; raises StateError if there is none."""
    if path.is_file():
        return path
    patterns = (f"*/{RESULTS_FILE}", f"**/{FOLDER}/{RESULTS_FILE}")  # runs of the plain loop, and workspaces of FLARE
    files = [path / RESULTS_FILE] if (path / RESULTS_FILE).is_file() else [file for pattern in patterns for file in path.glob(pattern)]
    if not files:
        raise StateError(
            f"{path}: no {RESULTS_FILE} here; name the folder of a run. If the run has not ended, its log says why; `medflare resume` "
            "continues a run of the plain loop"
        )
    return max(files, key=lambda file: file.stat().st_mtime)


def load_results(path: Path) -> dict[str, Any]:
    """The results dict of a run, validated; `path` as for `find_results`. Raises StateError also if the file is damaged."""
    file = find_results(Path(path))
    try:
        return parse_results(file.read_bytes())
    except ValueError as error:
        raise StateError(f"{file}: not the {RESULTS_FILE} of a run: {error}") from error


def parse_results(content: bytes) -> dict[str, Any]:
    """The results dict of a file's content, validated; all its text is printable, since another party may have written it.

    Raises ValueError for anything else.
    """
    try:
        results = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None
    validate_results(results)
    printed: dict[str, Any] = printable_json(results)
    return printed


def append_round(folder: Path, line: Mapping[str, Any]) -> None:
    """Append one step to metrics.jsonl; it is on disk when this returns. After a line that a crash cut short, a new line begins.

    `line`: {"step", "phase", "round", "seconds", "sites": {site: metadata of its reply}, "aggregation": {site: {name: number}}}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(json_ready(line), allow_nan=False).encode() + b"\n"
    with (folder / ROUNDS_FILE).open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else b"\n" + text
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The steps of metrics.jsonl in order; the last line of a step counts (a resumed run repeats steps), damaged lines are skipped."""
    path = folder / ROUNDS_FILE
    steps: dict[int, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):  # the rest of a damaged line can be a number
            steps[line["step"]] = line
    return [steps[step] for step in sorted(steps)]
