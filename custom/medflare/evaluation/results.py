"""results.json and metrics.jsonl: their content, the schema that every reader can rely on, and how
they are read.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

import medflare
from medflare.core.errors import StateError
from medflare.core.events import KINDS, Event
from medflare.core.files import appending, refuse_link, write_atomically
from medflare.core.numbers import fractions
from medflare.core.packages import code_versions, extension_modules, installed_versions
from medflare.core.text import NAME, Json, JsonDict, printable_json
from medflare.data.datalist import SPLITS
from medflare.data.local import FOLDER
from medflare.evaluation.findings import findings
from medflare.evaluation.presentation import CLASSES, STRUCTURES, labels_of, named_metrics
from medflare.tasks.config import Name, TaskConfig
from medflare.tasks.summaries import ALL, Values

if TYPE_CHECKING:
    import pandas as pd

MODELS = ("global", "personal", "deployed")
ROLES = ("inside", "outside")
COMPLETED = "COMPLETED"
FAILED = "FAILED"
UNKNOWN = "unknown"  # the method or the task of a job that could not be read
RESULTS_FILE = "results.json"
ROUNDS_FILE = "metrics.jsonl"
REPORT_FILE = "report.html"


@dataclass
class SiteRecord:
    """What is known about one site when a run ends.

    Attributes:
        role: "inside" (trains) or "outside" (never trains).
        n: split -> number of images, of the splits that the site reported.
        metrics: model ("global", "personal", "deployed", or another that the method compares) ->
            metric -> test value; None: undefined.
        reports: model -> what it reports of its predictions, for example how often each network of
            a super model was used.
        privacy: cost of differential privacy ("epsilon", "delta", "steps"); empty without it.
        classes: model -> `tasks.classes.class_report` of the test images; empty for segmentation.
        constant: the task's metric of the constant prediction, see `training.constant`.
        by_label: model -> structure or class -> metric -> test value.
        intervals: model -> structure or class, or `ALL` -> metric -> [low, high] over test
            patients, see `tasks.summaries`.
    """

    role: str
    n: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, Values] = field(default_factory=dict)
    reports: Json = field(default_factory=dict)
    privacy: Json = field(default_factory=dict)
    classes: Json = field(default_factory=dict)
    by_label: Mapping[str, Mapping[str, Values]] = field(default_factory=dict)
    intervals: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]] = field(
        default_factory=dict
    )
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
        model_selection: model -> {"round": of the final model, "rule", "candidates": [{"round",
            "value", "votes": site -> metric}]}.
        tables: title -> site -> column -> number or text that the method reports.
        cross_site: site of a personal model -> site of the test images -> the task's metric.
        selector: of a model that selects one of several networks per image: {"gamma",
            "temperature", "candidates": values of γ, "votes": site -> mean paired gain over the
            global model for each candidate, "mean_gain": of γ}; else empty.
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
    hyper: Mapping[str, Json] = field(default_factory=lambda: {"site": {}, "server": {}})
    settings: Json = field(default_factory=dict)
    history: list[JsonDict] = field(default_factory=list)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    model_selection: Json = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    cross_site: Mapping[str, Values] = field(default_factory=dict)
    selector: Json = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    citation: str = ""


def build_results(record: RunRecord) -> JsonDict:
    """The content of results.json, see `json_ready`: every site and mean has the same models and
    metrics; undefined values are None.

    "findings" are those of `findings.findings`.
    """
    task = record.task
    models = dict.fromkeys(MODELS)
    samples = {}
    for name, site in record.sites.items():
        models |= dict.fromkeys(site.metrics)
        if site.role == "inside" and "train" in site.n:
            samples[name] = site.n["train"]
    weights = fractions(samples)
    sites = {}
    for name, site in sorted(record.sites.items()):
        sites[name] = site_results(site, models, task, weights.get(name))
    metrics = task.test_metrics if task else ()
    settings = {**record.hyper, "run": {"adapt": record.settings.get("adapt")}}
    results = {
        "schema": 1,
        "method": record.method,
        "task": task.name if task else UNKNOWN,
        "seed": record.seed,
        "rounds": record.rounds,
        "status": FAILED if record.reason else COMPLETED,
        "reason": record.reason or None,
        "sites": sites,
        "mean": mean_over_sites(sites, dict.fromkeys(models, metrics)),
        "traffic": {"down_bytes": record.down_bytes, "up_bytes": record.up_bytes},
        "seconds": dict(record.seconds),
        "costs": dict(sorted(record.costs.items())),
        "model_selection": record.model_selection,
        "events": list(record.events),
        "versions": installed_versions() | versions_of_run(record.method, task, settings),
        "configuration": {
            "hyper": record.hyper,
            "settings": record.settings,
            "task": task.to_dict() if task else {},
        },
    }
    for name in ("citation", "tables", "cross_site"):
        if getattr(record, name):
            results[name] = getattr(record, name)
    if record.selector:
        results["selector"] = {**record.selector, "confusion": confusion(sites)}
    ready = json_ready(results)
    about_model = findings(ready, json_ready(record.history))
    ready["findings"] = [finding.to_dict() for finding in about_model]
    return ready


def versions_of_run(method: str, task: TaskConfig | None, settings: Json) -> dict[str, str]:
    """Version and code, see `code_versions`, of medflare and of the other distributions whose
    method ("a+b": a pair), metrics, network, loss, optimizer or transforms a run uses, or whose
    rule or adaptation one of its settings, by algorithm, names.
    """
    names = set(method.split("+"))
    for algorithm_settings in settings.values():
        values = filter(None, map(str, algorithm_settings.values()))
        names.update(value.partition(":")[0] for value in values)
    modules = {"medflare"}
    if task is not None:
        names.update(task.test_metrics)
        named = (task.network, task.loss, task.optimizer, task.intensity, *task.augment)
        for spec in named:
            module, imported, _ = str(spec["name"]).partition(":")
            names.add(module)
            if imported:
                modules.add(module)
    modules |= extension_modules(names)
    return code_versions(modules) | {"medflare": medflare.__version__}


def site_results(
    site: SiteRecord, models: Iterable[str], task: TaskConfig | None, share: float | None = None
) -> Json:
    """A site's part of results.json."""
    metrics = task.test_metrics if task else ()
    values = {}
    for model in models:
        model_metrics = site.metrics.get(model, {})
        values[model] = {metric: model_metrics.get(metric) for metric in metrics}
        values[model] |= _of_labels(site.by_label.get(model, {}), task)
    intervals = {}
    for model, content in site.intervals.items():
        limits = content.get(ALL, {}).items()
        bounds = {metric: low_high for metric, low_high in limits if low_high and metric in metrics}
        bounds |= _of_labels(content, task)
        if bounds:
            intervals[model] = bounds
    results: JsonDict = {
        "role": site.role,
        "n": {split: site.n.get(split) for split in SPLITS},
        "metrics": values,
    }
    optional = {
        "intervals": intervals,
        "share": share,
        "reports": site.reports,
        "privacy": site.privacy,
        "classes": site.classes,
    }
    for name, part in optional.items():
        if part:
            results[name] = part
    if site.constant is not None:
        results["constant"] = site.constant
    return results


def _of_labels(content: Mapping[str, Json], task: TaskConfig | None) -> Json:
    """The metrics of the task's labels under "structures" or "classes"; an empty dict without
    any.
    """
    if task is None:
        return {}
    by_label = {}
    for label in task.labels:
        if label in content:
            values = content[label].items()
            by_label[label] = {metric: value for metric, value in values if value != []}
    if not any(by_label.values()):
        return {}
    return {STRUCTURES if task.kind == "segmentation" else CLASSES: by_label}


def confusion(sites: Json) -> dict[str, dict[str, int]]:
    """Inside site -> site predicted by the selector -> number of test images; only sites that
    report counts.
    """
    rows = {}
    for name, site in sites.items():
        if site["role"] != "inside":
            continue
        row = (site.get("reports", {}).get("deployed") or {}).get("selector")
        if not isinstance(row, Mapping):
            continue
        if all(type(count) is int and count >= 0 for count in row.values()):
            rows[name] = dict(row)
    return rows


def mean_over_sites(sites: Json, shape: Mapping[str, Iterable[str]]) -> Json:
    """Role -> model -> metric -> unweighted mean of the defined values of the sites of that role;
    `shape`: model -> its metrics.
    """

    means: dict[str, JsonDict] = {}
    for role in ROLES:
        means[role] = {}
        metrics_by_site = [site["metrics"] for site in sites.values() if site["role"] == role]
        for model, metrics in shape.items():
            model_means = means[role].setdefault(model, {})
            for metric in metrics:
                model_means[metric] = defined_mean(site[model][metric] for site in metrics_by_site)
    return means


def defined_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are finite; None if there is none."""
    defined = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(defined) if defined else None


def json_ready(value: Any) -> Any:
    """The content in JSON types: keys as text, tuples and sets as lists, NumPy's numbers as
    Python's, NaN and infinity as None.

    Raises:
        TypeError: a value has a type that JSON lacks.
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


def results_frame(results: Json) -> "pd.DataFrame":
    """The test metrics of a run as a table: one row per site, model, label and metric, NaN for
    undefined values.

    The columns are site, role, model, label (a structure or class; `ALL` for the metric of the
    model), metric, value, and low and high, the 95 % interval over test patients.
    """
    import pandas as pd  # not needed to write results: a job that carries its code runs without it

    rows = []
    for name, site in results["sites"].items():
        for model, metrics in site["metrics"].items():
            intervals = site.get("intervals", {}).get(model, {})
            parts = [(ALL, named_metrics(metrics), intervals), *labels_of(site, model)]
            for label, values, bounds in parts:
                for metric, value in values.items():
                    low, high = bounds.get(metric) or (None, None)
                    rows.append((name, site["role"], model, label, metric, value, low, high))
    columns = ["site", "role", "model", "label", "metric", "value", "low", "high"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[-3:], float))


# -- the schema of results.json: further keys are allowed, every number is finite or null ----------

_Values = dict[str, float | None]
_Metrics = dict[str, float | dict[str, _Values] | None]
_Text = Annotated[str, Field(min_length=1)]


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    return kind


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Models(_Open):
    global_: _Metrics = Field(alias="global")
    personal: _Metrics
    deployed: _Metrics


class _Site(_Open):
    role: Literal["inside", "outside"]
    n: dict[Literal["train", "validation", "test"], NonNegativeInt | None]
    metrics: _Models


class _Traffic(_Open):
    down_bytes: NonNegativeInt
    up_bytes: NonNegativeInt


class _Cost(_Traffic):
    seconds: NonNegativeFloat


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
    site: JsonDict
    server: JsonDict


class _Configuration(_Open):
    hyper: _HyperParameters
    settings: JsonDict
    task: JsonDict


class _Results(_Open):
    schema_: Literal[1] = Field(alias="schema")
    method: _Text
    task: _Text
    seed: int
    rounds: NonNegativeInt
    status: Literal["COMPLETED", "FAILED"]
    reason: str | None
    sites: dict[Name, _Site]
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
            raise ValueError(
                "a failed run has a reason and a completed one has none, "
                f"got {self.status} and {self.reason!r}"
            )
        return self


def validate_results(results: Json) -> None:
    """Check a results dict against the schema; raises ValueError with every violation and its
    location, on one line.
    """
    try:
        _Results.model_validate(results)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            location = ".".join(str(part)[:NAME] for part in problem["loc"])
            problems.append(f"{location or 'results'}: {problem['msg']}")
        raise ValueError("not valid results: " + "; ".join(problems)) from None


def find_results(path: Path) -> Path:
    """The results.json at `path`, or the newest one below the folder of a run, a simulator or POC;
    raises StateError if there is none.
    """
    return list_results(path)[0]


def list_results(path: Path) -> list[Path]:
    """All results from which `find_results` chooses, the newest first."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise StateError(f"{path}: there is no such folder or file; name the folder of a run")
    if (path / RESULTS_FILE).is_file():
        return [path / RESULTS_FILE]
    # Runs of the plain loop, and workspaces of FLARE.
    files = {*path.glob(f"*/{RESULTS_FILE}"), *path.glob(f"**/{FOLDER}/{RESULTS_FILE}")}
    if not files and (path / "study.html").is_file():
        raise StateError(f"{path}: a study's folder; its tables are in {path / 'study.html'}")
    if not files:
        raise StateError(
            f"{path}: no {RESULTS_FILE} here; name the folder of a run. A run writes it at its "
            "end; `medflare resume` continues one of the plain loop that was interrupted"
        )
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def load_results(path: Path) -> JsonDict:
    """The results dict of a run, validated; `path` as for `find_results`.

    Raises:
        StateError: there is none, or the file is damaged.
    """
    file = find_results(Path(path))
    try:
        return parse_results(file.read_bytes())
    except ValueError as error:
        raise StateError(f"{file}: not the {RESULTS_FILE} of a run: {error}") from error


def parse_results(content: bytes) -> JsonDict:
    """The results dict of a file's content, validated; all its text is printable, since another
    party may have written it.

    Raises:
        ValueError: the content is anything else.
    """
    try:
        results = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None
    validate_results(results)
    return printable_json(results)


def append_round(folder: Path, line: Json) -> None:
    """Append one step to metrics.jsonl; it is on disk when this returns. After a line that a crash
    cut short, a new line begins.

    `line`: {"step", "phase", "round", "seconds", "sites": {site: metadata of its reply},
    "aggregation": {site: {name: number}}}.
    """
    path = folder / ROUNDS_FILE
    refuse_link(path, folder)
    with appending(path, public=True) as file:
        file.write(_line_of(line))
        file.flush()
        os.fsync(file.fileno())


def write_rounds(folder: Path, history: Sequence[Json]) -> None:
    """Write metrics.jsonl with all steps, see `append_round`, of a run that is resumed: the folder
    may lack steps, or have one that is done again.
    """
    content = b"".join(map(_line_of, history))
    write_atomically(folder / ROUNDS_FILE, content, public=True)


def _line_of(line: Json) -> bytes:
    return json.dumps(json_ready(line), allow_nan=False).encode() + b"\n"
