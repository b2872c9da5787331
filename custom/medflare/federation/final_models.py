"""What a site does with its final models: measure them on its own test images, and keep them with their cards."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.events import EventLog
from medflare.core.message import Message
from medflare.core.packages import installed
from medflare.core.store import write_atomically, write_json
from medflare.data.acquisition import TRAINED_ON
from medflare.data.local import PLACE, PROGRESS
from medflare.evaluation.presentation import format_metric, metric_label
from medflare.evaluation.report import SiteReport, patient_values, render_site_report, value_label
from medflare.evaluation.results import REPORT_FILE
from medflare.federation.update_validation.suppression import tells_of_few
from medflare.inference.deployed import KEPT, save_model
from medflare.methods.catalogue import build_deployed
from medflare.methods.fedavg.site import SELECTED_ROUND
from medflare.methods.method import MODEL_ROLES, Method
from medflare.tasks.classes import Cases, class_report
from medflare.tasks.config import TaskConfig
from medflare.training.constant import constant_value, is_at_chance
from medflare.training.epochs import finite_or_none
from medflare.training.montage import fullest_row, overlay
from medflare.training.site import Site

SCORES = "scores"  # below a site's folder: what each model scored patient by patient; not beside the models, which may be handed on
Metrics = dict[str, float | None]
Keep = Callable[[str, Message, Mapping[str, Any], Cases], None]  # (role, delivered model, metrics, what they are made of)


@runtime_checkable
class SelfReporting(Protocol):
    """A deployed model that can say how it came to its answers, for example which member answered how often."""

    def report(self) -> dict[str, Any]:
        """What there is to say, as JSON values."""


@runtime_checkable
class Noticing(Protocol):
    """A deployed model that took back its own adaptation, and says so."""

    def notices(self) -> list[str]:
        """One line each; each becomes an event."""


class ArtifactStore:
    """What becomes of a participant's work at its own site. This one keeps nothing; an engine gives one that does."""

    def keep(self, role: str, model: Message, metrics: Mapping[str, Any], cases: Cases) -> None:
        """Take a delivered model.

        Args:
            role: "global", "personal", "deployed" or another that the method compares.
            model: the delivered model.
            metrics: metric -> test value or None.
            cases: what they are made of, patient by patient.
        """

    def show(self, title: str, png: bytes) -> None:
        """Take a picture (PNG) that the method makes for the site itself."""

    def finish(self, site: Site, role: str, models: Mapping[str, Message], events: Sequence[Mapping[str, Any]]) -> None:
        """Everything was delivered: the moment for a report of the site's own."""

    def tell(self, phase: str, round: int, rounds: int, begins: bool) -> None:
        """A step of a run of so many rounds begins, or has been answered."""


@dataclass(frozen=True)
class SiteFolder(ArtifactStore):
    """A site's own folder in a run: delivered models with their cards, scores, pictures, the site's report, and the step at hand.

    Scores of single patients, pictures and the report speak of patients: they stay here.

    Attributes:
        delivered: role -> metrics and scores of the models kept so far.
        pictures: title -> PNG shown so far.
    """

    folder: Path
    site: str
    method: Method
    task: TaskConfig
    seed: int
    delivered: dict[str, tuple[Mapping[str, Any], Cases]] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)

    def keep(self, role: str, model: Message, metrics: Mapping[str, Any], cases: Cases) -> None:
        """Write a delivered model and its card into a folder of the role's name, and what it scored patient by patient."""
        card = {"method": self.method.name, "site": self.site, "role": role, "seed": self.seed, "metrics": dict(metrics)}
        card["round"] = model.meta.get(SELECTED_ROUND)
        told = {name: model.meta[name] for name in (KEPT, TRAINED_ON) if name in model.meta}
        save_model(self.folder / role, self.task, model, {**card, **told})
        write_json(self.folder / SCORES / f"{role}.json", cases.to_dict())
        self.delivered[role] = metrics, cases

    def show(self, title: str, png: bytes) -> None:
        """Write a picture."""
        write_atomically(self.folder / "pictures" / f"{title}.png", png)
        self.pictures[title] = png

    def finish(self, site: Site, role: str, models: Mapping[str, Message], events: Sequence[Mapping[str, Any]]) -> None:
        """Write the site's own report, of what was kept and shown; none where nothing was delivered."""
        if not self.delivered:
            return
        metrics = {name: found for name, (found, _) in self.delivered.items()}
        cases = {name: found for name, (_, found) in self.delivered.items()}
        pictures = {**examples(site, models, cases), **self.pictures}
        told = EventLog()
        told.extend(events, site=self.site)
        report = SiteReport(self.method.name, self.site, role, self.task, site.n, metrics, cases, pictures, told.to_list())
        write_atomically(self.folder / REPORT_FILE, render_site_report(report).encode())

    def tell(self, phase: str, round: int, rounds: int, begins: bool) -> None:
        """Note the step at hand, for `medflare site status`. A full disk stops no training for the sake of a note."""
        note = {"phase": phase, "round": round, "rounds": rounds, "working": begins, "time": f"{datetime.now():%F %T}"}
        with suppress(OSError):
            write_json(self.folder / PROGRESS, note)


def check_choice(site: Site, role: str, keep: str | None) -> None:
    """Before anything is trained, refuse a choice that the site cannot make, see `LocalSettings.keep`.

    Raises:
        ConfigError: a personal model of a site that never trains.
    """
    if keep == "personal" and role == "outside":
        raise ConfigError(f"site {site.name}: keep in its {PLACE} is 'personal', but a site that never trains has no model of its own")


def chosen_here(models: Mapping[str, Message], keep: str | None) -> tuple[dict[str, Message], list[str]]:
    """The final models with the one that the site deploys by its own choice, and what is to be said of it, one line each."""
    if keep is None or "deployed" not in models:
        return dict(models), []
    if keep not in models:
        return dict(models), [f"there is no {keep} model to keep, as its {PLACE} asks; deployed is what the method deploys"]
    message = Message(models[keep].states, {**models[keep].meta, KEPT: {"keep": keep, "model": keep, "validation": {}}})
    return {**models, "deployed": message}, [f"deployed is its {keep} model: its {PLACE} says keep {keep!r}"]


def evaluated(
    site: Site, models: Mapping[str, Message], keep: Keep, minimum_patients: int = 0, *, method: Method, inside: bool = True
) -> dict[str, Any]:
    """Build the final models, measure them on the site's test images and hand them to `keep`.

    Args:
        site: measures with its test images.
        models: role -> delivered model. A method may deliver further roles, to be compared with its own; equal objects are
            measured once.
        keep: called with (role, model, metrics, cases) for every delivered model. Cases are not metadata: metadata leaves the site.
        minimum_patients: confusion counts and curves stay here where a class, or its contrary, has patients, but fewer.
        method: says which models a site of its has; one that is missing is null in the metrics, with an event that says why.
        inside: whether the site trained.

    Returns:
        Metadata: "metrics" (role -> metric -> value or None), "reports" (role -> what models say of their own work, and under `KEPT` which
            of the site's models it is, where it was chosen), of classification "classes" (role -> see `tasks.classes.class_report`), "n"
            and "events", which name no site: the server knows whose they are.
    """
    log = EventLog()
    metrics: dict[str, Metrics] = {}
    seen: dict[int, tuple[Metrics, Cases, tuple[str, ...]]] = {}
    reports: dict[str, Any] = {}
    classes: dict[str, Any] = {}
    for role in dict.fromkeys([*MODEL_ROLES, *models]) if method.trains else ():
        if role not in models:
            metrics[role] = dict.fromkeys(site.task.metrics)
            log.add("undefined", f"{role}: {_why_missing(role, method, inside)}")
            continue
        if id(models[role]) not in seen:
            module = build_deployed(site.task, models[role]).to(site.device)
            seen[id(models[role])] = _measured(site, module, role, log)
            if isinstance(module, SelfReporting):
                reports[role] = module.report()
            if KEPT in models[role].meta:
                reports[role] = {**reports.get(role, {}), KEPT: models[role].meta[KEPT]["model"]}
            if isinstance(module, Noticing):
                for line in module.notices():
                    log.add("reverted", f"{role}: {line}")
        metrics[role], cases, constant = seen[id(models[role])]
        keep(role, models[role], metrics[role], cases)
        few = tells_of_few(cases, site.task, minimum_patients)
        if site.task.kind == "classification" and not few:
            classes[role] = class_report(cases, site.task.target, site.task.labels)
        if role == "deployed":
            _doubt(site, metrics[role], constant, log, named=not few)
    told = {"classes": found} if (found := {role: report for role, report in classes.items() if report}) else {}
    return {"metrics": metrics, "n": site.n, "reports": reports, "events": log.to_list(), **told}


def _why_missing(role: str, method: Method, inside: bool) -> str:
    if role not in method.roles:
        return f"method {method.name} has no {role} model"
    if not inside and role == "personal":
        return "a site that did not train has no personal model"
    return f"method {method.name} delivered no {role} model to this site, though it declares one"


def examples(site: Site, models: Mapping[str, Message], cases: Mapping[str, Cases]) -> dict[str, bytes]:
    """Outlines of the deployed model on an image of its worst, its median and its best test patient; nothing for classification.

    Returns:
        Title -> PNG; empty without Pillow and SciPy.
    """
    if not _has_masks_to_draw(site, models):
        return {}
    values = patient_values(cases["deployed"], site.task)
    ranked = sorted(values, key=lambda name: (values[name], name))
    if not ranked:
        return {}
    chosen = dict(zip(("worst", "median", "best"), (ranked[0], ranked[len(ranked) // 2], ranked[-1]), strict=True))
    module = build_deployed(site.task, models["deployed"]).to(site.device)
    titles = {name: f"{word}: {name}, {value_label(site.task)} {format_metric('', values[name])}" for word, name in chosen.items()}
    return {title: overlay(site, module, fullest_row(site, name)) for name, title in titles.items()}


def _has_masks_to_draw(site: Site, models: Mapping[str, Message]) -> bool:
    return site.task.kind == "segmentation" and "deployed" in models and installed("PIL") and installed("scipy")


def _doubt(site: Site, metrics: Metrics, constant: Sequence[str], log: EventLog, *, named: bool) -> None:
    """What makes the deployed model doubtful, as events; neither class nor constant answer is `named` where counts by class stay here."""
    if constant:
        text = ", ".join(constant) if named else "one class"
        log.add("constant_output", f"the deployed model answers {text} in all {site.n['test']} test images")
    metric = site.task.metric
    value, least = metrics[metric], constant_value(site)
    if value is not None and least is not None and is_at_chance(value, least):
        told = f" {format_metric(metric, least)}" if named else ""
        text = f"{metric_label(metric)} of the deployed model is {format_metric(metric, value)} on the test images"
        log.add("at_chance", f"{text}, not above the constant answer{told}")


def _measured(site: Site, module: nn.Module, role: str, log: EventLog) -> tuple[Metrics, Cases, tuple[str, ...]]:
    measured = site.measure(site.predictions(module, "test"), "test", site.task.metrics)
    scores = measured.scores(site.data.test.patients)
    for metric, reason in scores.undefined.items():
        log.add("undefined", f"{role} {metric}: {reason}")
    distance = "hd95" if site.task.spatial_dims == 2 else "hd95_mm"
    for metric, count in (("dice and iou", scores.left_out), (distance, scores.hd95_left_out)):
        if count:
            log.add("undefined", f"{role} {metric}: undefined for {count} patients and structures, left out of the means")
    constant = measured.constant_outputs(site.annotation.names if site.task.kind == "segmentation" else ())
    return {metric: finite_or_none(value) for metric, value in scores.values.items()}, scores.cases, constant
