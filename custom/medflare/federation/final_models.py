"""A site's final models: evaluated on its test images, and stored with their cards."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

from torch import nn

from medflare.adaptation.registry import NONE, adapted_at, parsed, remark
from medflare.core.errors import ConfigError, StateError
from medflare.core.events import EventLog
from medflare.core.files import write_atomically, write_json
from medflare.core.message import FinalModels, Message, Messages
from medflare.core.numbers import finite_or_none
from medflare.core.packages import installed
from medflare.core.text import JsonDict, is_name
from medflare.data.acquisition import TRAINED_ON
from medflare.data.class_counts import scarce_classes, scarce_line
from medflare.data.local import PLACE, PROGRESS
from medflare.evaluation.findings import NO_BETTER, standing
from medflare.evaluation.presentation import format_metric, metric_label
from medflare.evaluation.report import SiteReport, patient_values, render_site_report, value_label
from medflare.evaluation.results import REPORT_FILE
from medflare.federation.builtin_messages import CONSTANT, EVENTS
from medflare.federation.suppression import (
    counts_of_splits,
    has_small_cell,
    has_small_class,
    most_images,
    small_report,
)
from medflare.inference.deployed import KEPT, save_model
from medflare.methods.base import SiteAlgorithm
from medflare.methods.catalogue import build_deployed
from medflare.methods.fedavg.site import SELECTED_ROUND
from medflare.methods.method import FINAL_MODELS, Method
from medflare.tasks.classes import most_wrong
from medflare.tasks.config import TaskConfig
from medflare.tasks.summaries import ALL, Interval, Summary, summarize
from medflare.training.constant import constant_value
from medflare.training.montage import fullest_row, overlay, photograph
from medflare.training.site import Site

PICTURES = "pictures"  # folder of a site's pictures
SCORES_FOLDER = "scores"  # of patients; not beside the models, which may leave the site
Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class SiteFolder:
    """A site's folder in a run, whose content stays at the site: final models with their cards,
    scores by patient, pictures, the site's report and the current step.
    """

    folder: Path
    site: str
    method: Method
    task: TaskConfig
    seed: int
    summaries: dict[str, Summary] = field(default_factory=dict)

    def store(self, model_name: str, model: Message, summary: Summary) -> None:
        """Write a final model and its card into a folder of its name, and its scores."""
        if not all(is_name(part) for part in model_name.split("/")):
            raise StateError(f"model {model_name!r} would lie outside of the site's folder")
        card = {
            "method": self.method.name,
            "site": self.site,
            "role": model_name,
            "seed": self.seed,
            "metrics": dict(summary.metrics),
            "round": model.get(SELECTED_ROUND),
        }
        for name in (KEPT, TRAINED_ON):
            if name in model.meta:
                card[name] = model.meta[name]
        save_model(self.folder / model_name, self.task, model, card)
        write_json(self.folder / SCORES_FOLDER / f"{model_name}.json", summary.cases.to_dict())
        self.summaries[model_name] = summary

    def finish(
        self,
        algorithm: SiteAlgorithm,
        models: Messages,
        reply: Message,
        of_training: Sequence[str],
        pictures: Mapping[str, bytes],
    ) -> None:
        """Write pictures and, after all final models, the site's report, if it has one.

        Args:
            reply: with the events, and the constant prediction's metric if it is not suppressed.
            of_training: see `findings.kinds_of_training`.
            pictures: title -> PNG that the method makes for the site itself.
        """
        for title, png in pictures.items():
            write_atomically(self.folder / PICTURES / f"{title}.png", png)
        if not self.summaries:
            return
        site = algorithm.site
        pictures = {**examples(site, models, self.summaries), **pictures}
        log = EventLog()
        log.extend(reply[EVENTS], site=self.site)
        scarce = scarce_classes(site.data.train.targets, site.task, site.data.annotated)
        if scarce:
            log.add("rare_class", scarce_line(scarce), site=self.site)
        report = SiteReport(
            method=self.method.name,
            site=self.site,
            role="inside" if algorithm.inside else "outside",
            task=self.task,
            n=site.n,
            models=self.summaries,
            pictures=pictures,
            events=log.to_list(),
            constant=reply.get(CONSTANT),
            of_training=of_training,
            groups=site.data.test_groups,
            minimum_patients=site.minimum_patients,
        )
        write_atomically(self.folder / REPORT_FILE, render_site_report(report).encode())

    def note_step(self, phase: str, round: int, rounds: int, begins: bool) -> None:
        """Note the step for `medflare site status`; a full disk does not stop the training."""
        note = {
            "phase": phase,
            "round": round,
            "rounds": rounds,
            "working": begins,
            "time": f"{datetime.now():%F %T}",
        }
        with suppress(OSError):
            write_json(self.folder / PROGRESS, note)


def with_choice(models: Messages, keep: str | None) -> tuple[FinalModels, list[str]]:
    """The final models with the site's choice as "deployed", and notes about it."""
    final = dict(models)
    if keep is None or "deployed" not in models:
        return final, []
    if keep not in models:
        note = (
            f"there is no {keep} model to deploy, as its {PLACE} asks; "
            "the method's choice is deployed"
        )
        return final, [note]
    origin = {"keep": keep, "model": keep, "validation": {}}
    final["deployed"] = Message(models[keep].states, {**models[keep].meta, KEPT: origin})
    return final, [f"deployed is its {keep} model: its {PLACE} has keep {keep!r}"]


def with_adapted(site: Site, models: Messages, adapt: str) -> tuple[FinalModels, list[str]]:
    """The final models with the deployed one adapted to the site's test images, without their
    labels, under the adaptation's name; and notes about it.
    """
    final = dict(models)
    try:
        name, _ = parsed(adapt)
        if name == NONE or "deployed" not in models:
            return final, []
        adapted = adapted_at(site, models["deployed"], adapt, partial(build_deployed, site.task))
    except (ConfigError, StateError) as error:
        return final, [f"the adapted model is not tested: {error}"]
    final[name] = adapted
    note = remark(adapted)
    return final, [note] if note else []


def evaluate_final_models(
    site: Site,
    models: Messages,
    store: Callable[[str, Message, Summary], None],
    *,
    method: Method,
    inside: bool = True,
    private: bool = False,
) -> JsonDict:
    """Build the final models, evaluate them on the site's test images and pass them to `store`.

    Args:
        models: name -> final model, of `FINAL_MODELS` and others to compare; the same object is
            evaluated once, its report stands under its first name.
        store: (name, model, test results) -> stores them; scores by patient are not metadata: they
            do not leave the site.
        inside: whether the site trained.
        private: whether DP-SGD protects training images; then the constant prediction is not
            theirs.

    Returns:
        Metadata: "metrics" (model -> metric -> value; None for all metrics of a missing one),
            "reports" (model -> what the model reports, and under `KEPT` which of the site's models
            it is), "n", "events"; for classification "classes" (model -> `class_report`); of
            `FINAL_MODELS` "by_label" and "intervals", see `Summary`; "constant", the task's metric
            of the constant prediction.
    """
    log = EventLog()
    minimum_patients = site.minimum_patients
    metrics: dict[str, Metrics] = {}
    reports: dict[str, JsonDict] = {}
    meta = {"metrics": metrics, "n": counts_of_splits(site), "reports": reports}
    tables: dict[str, JsonDict] = defaultdict(dict)  # item of metadata -> model -> content
    measured: dict[int, tuple[Summary, tuple[str, ...]]] = {}
    # A smaller count may be of fewer patients.
    least_images = minimum_patients * most_images(site.data.test.patients)
    for model_name in dict.fromkeys([*FINAL_MODELS, *models]) if method.roles else ():
        if model_name not in models:
            metrics[model_name] = dict.fromkeys(site.task.test_metrics)
            log.add("undefined", f"{model_name}: {_why_missing(model_name, method, inside)}")
            continue
        model = models[model_name]
        if id(model) not in measured:
            module = build_deployed(site.task, model).to(site.device)
            measured[id(model)] = _test_summary(site, module, model_name, log)
            report = _report(module, model, model_name, least_images, log)
            if report is not None:
                reports[model_name] = report
        summary, outputs = measured[id(model)]
        store(model_name, model, summary)
        metrics[model_name] = _of_enough_patients(summary, model_name, minimum_patients, log)
        small = has_small_class(summary.cases, site.task, minimum_patients)
        if not small:
            _add_tables(tables, model_name, summary, site)
        if model_name == "deployed":
            constant = constant_value(site, of_training=not private)
            interval = None if small else summary.intervals.get(ALL, {}).get(site.task.metric)
            _doubt(site, metrics[model_name], outputs, constant, interval, log, named=not small)
            if not small:
                meta["constant"] = constant
    meta["events"] = log.to_list()
    for name, by_model in tables.items():
        defined = {model_name: content for model_name, content in by_model.items() if content}
        if defined:
            meta[name] = defined
    return meta


def _add_tables(
    tables: Mapping[str, JsonDict], model_name: str, summary: Summary, site: Site
) -> None:
    """Add the tables by class and label and the intervals; a confusion matrix that has a cell of
    few patients is left empty.
    """
    classes = dict(summary.classes)
    if classes and has_small_cell(summary.cases, site.task, site.minimum_patients):
        classes["confusion"] = []
    tables["classes"][model_name] = classes
    if model_name in FINAL_MODELS:
        tables["by_label"][model_name] = summary.by_label
        # As JSON has them.
        tables["intervals"][model_name] = json.loads(json.dumps(summary.intervals))


def _report(
    module: nn.Module, model: Message, model_name: str, least_images: int, log: EventLog
) -> JsonDict | None:
    """What a model reports of its predictions, for example how often each member answered, and
    under `KEPT` which of the site's models it is; None if there is neither.

    Each adaptation that the model reverted becomes an event.
    """
    report = None
    make_report = getattr(module, "report", None)
    if make_report is not None:
        report = dict(make_report())
        if getattr(module, "counts_images", True) and small_report(report, least_images):
            log.add(
                "warning",
                f"{model_name}: no report leaves the site: "
                "a count in it is of fewer patients than minimum_patients",
            )
            report = {}
    if KEPT in model.meta:
        report = {**(report or {}), KEPT: model.meta[KEPT]["model"]}
    for line in getattr(module, "notices", list)():
        log.add("reverted", f"{model_name}: {line}")
    return report


def metric_of(model: Message, site: Site) -> float | None:
    """The task's metric of a final model on the site's test images; None if it is undefined, or
    defined for fewer patients than the site's `minimum_patients`.
    """
    metric = site.task.metric
    module = build_deployed(site.task, model).to(site.device)
    scores = site.score(module, "test", [metric])
    if scores.cases.has_few(metric, site.minimum_patients):
        return None
    return finite_or_none(scores.values[metric])


def _why_missing(model_name: str, method: Method, inside: bool) -> str:
    if model_name not in method.roles:
        return f"method {method.name} has no {model_name} model"
    if not inside and model_name == "personal":
        return "a site that did not train has no personal model"
    return f"method {method.name} made no {model_name} model for this site"


def examples(site: Site, models: Messages, summaries: Mapping[str, Summary]) -> dict[str, bytes]:
    """Title -> PNG of test images with the deployed model's prediction.

    Segmentation: overlays of the worst, the median and the best patient. Classification: of the
    wrong images those with the lowest probabilities of their true classes.
    """
    if "deployed" not in models or not (installed("PIL") and installed("scipy")):
        return {}
    pictures = {}
    cases = summaries["deployed"].cases
    if site.task.kind == "classification":
        for row, text in most_wrong(cases, site.task).items():
            title = f"{site.data.test.patients[row]}, test image {row + 1}: {text}"
            pictures[title] = photograph(site, row)
        return pictures
    values = patient_values(cases, site.task)
    ranked = sorted(values, key=lambda name: (values[name], name))
    if not ranked:
        return {}
    # One or two patients have the last of their words.
    words = {ranked[0]: "worst", ranked[len(ranked) // 2]: "median", ranked[-1]: "best"}
    module = build_deployed(site.task, models["deployed"]).to(site.device)
    for name, word in words.items():
        title = f"{word}: {name}, {value_label(site.task)} {format_metric('', values[name])}"
        pictures[title] = overlay(site, module, fullest_row(site, name))
    return pictures


def _doubt(
    site: Site,
    metrics: Metrics,
    outputs: Sequence[str],
    constant: float | None,
    interval: Interval | None,
    log: EventLog,
    *,
    named: bool,
) -> None:
    """Add events that question the deployed model; they hold class names and values if `named`.

    `outputs`: the constant ones; `constant`: the metric of the constant prediction, see `standing`.
    """
    if outputs:
        predicted = ", ".join(outputs) if named else "one class"
        images = f"all {site.n['test']} test images"
        log.add("constant_output", f"the deployed model predicts {predicted} for {images}")
    kind, metric, value, reference = standing(metrics, site.task.metric, constant, interval)
    if kind != NO_BETTER:
        return
    text = f"{metric_label(metric)} of the deployed model is {format_metric(metric, value)}"
    text += " on the test images, no better than the constant prediction"
    log.add("at_chance", f"{text} {format_metric(metric, reference)}" if named else text)


def _of_enough_patients(summary: Summary, model_name: str, minimum: int, log: EventLog) -> Metrics:
    """The metrics of a summary; None for those that are defined for too few patients."""
    metrics = dict(summary.metrics)
    for name in metrics:
        if summary.cases.has_few(name, minimum):
            metrics[name] = None
            log.add("undefined", f"{model_name} {name}: too few patients")
    return metrics


def _test_summary(
    site: Site, module: nn.Module, model_name: str, log: EventLog
) -> tuple[Summary, tuple[str, ...]]:
    """The summary of a model on the site's test images, and the outputs that are constant."""
    measured = site.measure(site.predictions(module, "test"), "test", site.task.test_metrics)
    scores = measured.scores(site.data.test.patients)
    for metric, reason in scores.undefined.items():
        log.add("undefined", f"{model_name} {metric}: {reason}")
    metrics_of_count = defaultdict(list)
    for metric, count in scores.left_out.items():
        if count:
            metrics_of_count["some" if site.minimum_patients > 1 else count].append(metric)
    for number, names in metrics_of_count.items():
        log.add(
            "undefined",
            f"{model_name} {', '.join(names)}: undefined for {number} patients and structures, "
            "left out of the means",
        )
    metrics = {metric: finite_or_none(value) for metric, value in scores.values.items()}
    return summarize(metrics, scores.cases, site.task), measured.constant_outputs()
