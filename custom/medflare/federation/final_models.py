"""A site's final models: evaluated on its test images, and stored with their cards."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import nn

from medflare.core.events import EventLog
from medflare.core.message import Message
from medflare.core.packages import installed
from medflare.core.store import write_atomically, write_json
from medflare.data.acquisition import TRAINED_ON
from medflare.data.local import PLACE, PROGRESS
from medflare.data.targets import scarce_classes, scarce_line
from medflare.evaluation.presentation import format_metric, metric_label
from medflare.evaluation.report import SiteReport, patient_values, render_site_report, value_label
from medflare.evaluation.results import REPORT_FILE
from medflare.federation.update_validation.suppression import counts_of_splits, has_small_cell, has_small_class, most_images, small_report
from medflare.inference.deployed import KEPT, save_model
from medflare.methods.catalogue import build_deployed
from medflare.methods.fedavg.site import SELECTED_ROUND
from medflare.methods.method import MODEL_ROLES, Method
from medflare.tasks.classes import class_report, most_wrong
from medflare.tasks.config import TaskConfig
from medflare.tasks.summaries import Summary, summarize
from medflare.training.constant import constant_value, is_at_chance
from medflare.training.epochs import finite_or_none
from medflare.training.montage import fullest_row, overlay, photograph
from medflare.training.site import Site

PICTURES = "pictures"  # folder of a site's pictures
SCORES = "scores"  # folder of scores by patient; not beside the models, which may leave the site
Metrics = Mapping[str, float | None]
Keep = Callable[[str, Message, Summary], None]  # (role, final model, its test results)


class ArtifactStore:
    """Stores what stays at a participant's site. This one stores nothing; engines supply others."""

    def keep(self, role: str, model: Message, summary: Summary) -> None:
        """Store a final model of a role ("global", "personal", "deployed", ...) and its test results."""

    def show(self, title: str, png: bytes) -> None:
        """Store a picture that the method makes for the site itself."""

    def finish(
        self,
        site: Site,
        role: str,
        models: Mapping[str, Message],
        events: Sequence[Mapping[str, Any]],
        constant: float | None = None,
        of_training: Sequence[str] = (),
    ) -> None:
        """Write the site's report, after all final models.

        `constant`: the metric of the constant answer, None if it is suppressed; `of_training`: see `verdicts.kinds_of_training`.
        """

    def note_step(self, phase: str, round: int, rounds: int, begins: bool) -> None:
        """A step begins, or has ended."""


@dataclass(frozen=True)
class SiteFolder(ArtifactStore):
    """A site's folder in a run: final models with their cards, scores by patient, pictures, the site's report, and the current step."""

    folder: Path
    site: str
    method: Method
    task: TaskConfig
    seed: int
    delivered: dict[str, Summary] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)

    def keep(self, role: str, model: Message, summary: Summary) -> None:
        """Write a final model and its card into a folder of the role's name, and its scores by patient."""
        card = {"method": self.method.name, "site": self.site, "role": role, "seed": self.seed, "metrics": dict(summary.metrics)}
        card["round"] = model.meta.get(SELECTED_ROUND)
        card |= {name: model.meta[name] for name in (KEPT, TRAINED_ON) if name in model.meta}
        save_model(self.folder / role, self.task, model, card)
        write_json(self.folder / SCORES / f"{role}.json", summary.cases.to_dict())
        self.delivered[role] = summary

    def show(self, title: str, png: bytes) -> None:
        """Write a picture."""
        write_atomically(self.folder / PICTURES / f"{title}.png", png)
        self.pictures[title] = png

    def finish(
        self,
        site: Site,
        role: str,
        models: Mapping[str, Message],
        events: Sequence[Mapping[str, Any]],
        constant: float | None = None,
        of_training: Sequence[str] = (),
    ) -> None:
        """Write the site's report, if it has a final model."""
        if not self.delivered:
            return
        pictures = {**examples(site, models, self.delivered), **self.pictures}
        log = EventLog()
        log.extend(events, site=self.site)
        if few := scarce_classes(site.data.train.targets, site.task, site.data.annotated):
            log.add("rare_class", scarce_line(few), site=self.site)
        about = (self.method.name, self.site, role, self.task, site.n)
        report = SiteReport(*about, self.delivered, pictures, log.to_list(), constant, of_training)
        write_atomically(self.folder / REPORT_FILE, render_site_report(report).encode())

    def note_step(self, phase: str, round: int, rounds: int, begins: bool) -> None:
        """Note the current step for `medflare site status`; a full disk does not stop the training."""
        note = {"phase": phase, "round": round, "rounds": rounds, "working": begins, "time": f"{datetime.now():%F %T}"}
        with suppress(OSError):
            write_json(self.folder / PROGRESS, note)


def with_choice(models: Mapping[str, Message], keep: str | None) -> tuple[dict[str, Message], list[str]]:
    """The final models with the site's choice as "deployed", and notes about it."""
    if keep is None or "deployed" not in models:
        return dict(models), []
    if keep not in models:
        return dict(models), [f"there is no {keep} model to deploy, as its {PLACE} asks; the method's choice is deployed"]
    message = Message(models[keep].states, {**models[keep].meta, KEPT: {"keep": keep, "model": keep, "validation": {}}})
    return {**models, "deployed": message}, [f"deployed is its {keep} model: its {PLACE} has keep {keep!r}"]


def evaluated(
    site: Site, models: Mapping[str, Message], keep: Keep, minimum_patients: int = 0, *, method: Method, inside: bool = True
) -> dict[str, Any]:
    """Build the final models, evaluate them on the site's test images and pass them to `keep`.

    Args:
        models: role -> final model, of `MODEL_ROLES` and others to compare; equal objects are evaluated once.
        keep: stores a model with its scores by patient, which are not metadata: they do not leave the site.
        minimum_patients: see `suppression`.
        inside: whether the site trained.

    Returns:
        Metadata: "metrics" (role -> metric -> value; None for all metrics of a missing role), "reports" (role -> what the model reports,
            and under `KEPT` which of the site's models it is), "n", "events"; for classification "classes" (role -> `class_report`); of
            `MODEL_ROLES` "by_label" and "intervals", see `Summary`; "constant", the task's metric of the constant prediction.
    """
    log, constant = EventLog(), {}
    metrics, reports, classes, by_label, intervals = (dict[str, Any]() for _ in range(5))
    measured: dict[int, tuple[Summary, tuple[str, ...]]] = {}
    least_images = minimum_patients * most_images(site.data.test.patients)  # a smaller count may be of fewer patients
    for role in dict.fromkeys([*MODEL_ROLES, *models]) if method.roles else ():
        if role not in models:
            metrics[role] = dict.fromkeys(site.task.test_metrics)
            log.add("undefined", f"{role}: {_why_missing(role, method, inside)}")
            continue
        if id(models[role]) not in measured:
            module = build_deployed(site.task, models[role]).to(site.device)
            measured[id(models[role])] = _measured(site, module, role, log, minimum_patients)
            if (report := _report(module, role, least_images, log)) is not None:
                reports[role] = report
            if KEPT in models[role].meta:
                reports[role] = {**reports.get(role, {}), KEPT: models[role].meta[KEPT]["model"]}
            if notices := getattr(module, "notices", None):  # one line for each adaptation that the model reverted
                for line in notices():
                    log.add("reverted", f"{role}: {line}")
        summary, outputs = measured[id(models[role])]
        metrics[role] = summary.metrics
        keep(role, models[role], summary)
        small = has_small_class(summary.cases, site.task, minimum_patients)
        if site.task.kind == "classification" and not small:
            classes[role] = class_report(summary.cases, site.task.target, site.task.labels)
            if classes[role] and has_small_cell(summary.cases, site.task, minimum_patients):
                classes[role]["confusion"] = []
        if role in MODEL_ROLES and not small:
            by_label[role] = summary.by_label
            intervals[role] = {label: {metric: [*bounds] for metric, bounds in of.items()} for label, of in summary.intervals.items()}
        if role == "deployed":
            least = constant_value(site)
            _doubt(site, metrics[role], outputs, least, log, named=not small)
            constant = {} if small else {"constant": least}
    parts = {"classes": classes, "by_label": by_label, "intervals": intervals}
    defined = {name: {role: content for role, content in part.items() if content} for name, part in parts.items()}
    meta = {**constant, "metrics": metrics, "n": counts_of_splits(site, minimum_patients), "reports": reports, "events": log.to_list()}
    return meta | {name: part for name, part in defined.items() if part}


def _report(module: nn.Module, role: str, least_images: int, log: EventLog) -> dict[str, Any] | None:
    """What a model reports of its predictions, for example how often each member answered; None if it reports nothing."""
    if not hasattr(module, "report"):
        return None
    report: dict[str, Any] = module.report()  # type: ignore[operator]  # a Tensor to mypy, as every attribute of a module
    if getattr(module, "counts_images", True) and small_report(report, least_images):
        log.add("warning", f"{role}: no report leaves the site: a count in it is of fewer patients than minimum_patients")
        return {}
    return report


def metric_of(model: Message, site: Site) -> float | None:
    """The task's metric of a final model on the site's test images; None if undefined."""
    metric, module = site.task.metric, build_deployed(site.task, model).to(site.device)
    return finite_or_none(site.score(module, "test", [metric]).values[metric])


def _why_missing(role: str, method: Method, inside: bool) -> str:
    if role not in method.roles:
        return f"method {method.name} has no {role} model"
    if not inside and role == "personal":
        return "a site that did not train has no personal model"
    return f"method {method.name} made no {role} model for this site"


def examples(site: Site, models: Mapping[str, Message], summaries: Mapping[str, Summary]) -> dict[str, bytes]:
    """Title -> PNG of test images with the deployed model's prediction: the worst, the median and the best patient, or the most wrong.

    Segmentation: overlays. Classification: the images with the lowest probabilities of their true classes among the wrong ones.
    """
    if "deployed" not in models or not (installed("PIL") and installed("scipy")):
        return {}
    cases = summaries["deployed"].cases
    if site.task.kind == "classification":
        wrong = most_wrong(cases, site.task)
        return {f"{site.data.test.patients[row]}, test image {row + 1}: {text}": photograph(site, row) for row, text in wrong.items()}
    values = patient_values(cases, site.task)
    ranked = sorted(values, key=lambda name: (values[name], name))
    if not ranked:
        return {}
    chosen = dict(zip(("worst", "median", "best"), (ranked[0], ranked[len(ranked) // 2], ranked[-1]), strict=True))
    module = build_deployed(site.task, models["deployed"]).to(site.device)
    titles = {name: f"{word}: {name}, {value_label(site.task)} {format_metric('', values[name])}" for word, name in chosen.items()}
    return {title: overlay(site, module, fullest_row(site, name)) for name, title in titles.items()}


def _doubt(site: Site, metrics: Metrics, constant: Sequence[str], least: float | None, log: EventLog, *, named: bool) -> None:
    """Events that question the deployed model; `named` unless counts by class are suppressed."""
    if constant:
        text = ", ".join(constant) if named else "one class"
        log.add("constant_output", f"the deployed model answers {text} in all {site.n['test']} test images")
    metric = site.task.metric
    value = metrics[metric]
    if value is not None and least is not None and is_at_chance(value, least):
        constant_metric = f" {format_metric(metric, least)}" if named else ""
        text = f"{metric_label(metric)} of the deployed model is {format_metric(metric, value)} on the test images"
        log.add("at_chance", f"{text}, not above the constant answer{constant_metric}")


def _measured(site: Site, module: nn.Module, role: str, log: EventLog, minimum_patients: int) -> tuple[Summary, tuple[str, ...]]:
    measured = site.measure(site.predictions(module, "test"), "test", site.task.test_metrics)
    scores = measured.scores(site.data.test.patients)
    for metric, reason in scores.undefined.items():
        log.add("undefined", f"{role} {metric}: {reason}")
    distance = "hd95" if site.task.spatial_dims == 2 else "hd95_mm"
    for metric, count in (("dice and iou", scores.left_out), (distance, scores.hd95_left_out)):
        if count:
            shown = "some" if minimum_patients > 1 else count
            log.add("undefined", f"{role} {metric}: undefined for {shown} patients and structures, left out of the means")
    metrics = {metric: finite_or_none(value) for metric, value in scores.values.items()}
    return summarize(metrics, scores.cases, site.task), measured.constant_outputs()
