"""Rows that a method has to beat: the constant prediction, sites alone, one model of all images,
and FedAvg changed in one thing: normalized by the test batch, stronger augmentation, more epochs.

A study runs where all data are, so it keeps scores of single patients, which a federation leaves at
the sites.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from medflare.adaptation.dsbn import with_batch_statistics
from medflare.adaptation.registry import check_adaptable
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.numbers import finite_or_none
from medflare.core.text import Json, JsonDict
from medflare.data.loading import SiteData, Split, joined
from medflare.evaluation.findings import findings, validation_curves
from medflare.evaluation.results import (
    FAILED,
    RunRecord,
    SiteRecord,
    build_results,
    mean_over_sites,
)
from medflare.federation.final_models import metric_of
from medflare.federation.local.loop import run_local
from medflare.federation.settings import CROSS_SITE
from medflare.methods.catalogue import build_deployed
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.constant import best_constant, score_constant
from medflare.training.opening import open_site
from medflare.training.site import Site

CONSTANT = "constant"
SINGLE_SITE = "single-site"
CENTRALISED = "centralised"
BATCH_STATISTICS = "batch-statistics"
AUGMENTATION = "augmentation"
EQUAL_COMPUTE = "equal-compute"
PARTICIPATING = "participating"  # the oracle of outside sites: no method has to beat it
# The method that references train with by default; they take its hyper-parameters.
TRAINED_AS = "fedavg"
POOLED = "all-sites"  # the one site of centralised training
# In a results dict: model -> site -> [rounds of training, validation metric] each.
CURVES = "curves"
SCORES = "scores"  # in a results dict: site -> model -> `Cases.to_dict`
TASK_CHANGES = "task_changes"  # in a run's settings: what a reference changed in the task
APPEARANCE: Sequence[Json] = (  # contrast, brightness, noise of other scanners
    {"name": "RandAdjustContrast", "prob": 0.5, "gamma": [0.5, 2.0]},
    {"name": "RandShiftIntensity", "prob": 0.5, "offsets": 0.5},
    {"name": "RandScaleIntensity", "prob": 0.5, "factors": 0.5},
    {"name": "RandGaussianNoise", "prob": 0.5, "std": 0.1},
)
_NO_TRAFFIC: Mapping[str, int] = {"down_bytes": 0, "up_bytes": 0}


@dataclass(frozen=True)
class Setting:
    """What all runs of a study share."""

    task: TaskConfig
    sites: tuple[str, ...]
    rounds: int
    cross_site: bool = False  # also test every site's model on every site's test images


@dataclass(frozen=True)
class Draw:
    """What the runs of all rows with one seed share; the seed also draws the split by patient."""

    setting: Setting
    seed: int
    outside: tuple[str, ...] = ()  # sites that do not train

    @property
    def task(self) -> TaskConfig:
        """The study's task with this split."""
        return replace(self.setting.task, resplit=self.seed)

    @property
    def inside(self) -> list[str]:
        """The sites that train."""
        return [site for site in self.setting.sites if site not in self.outside]

    def role(self, site: str) -> str:
        return "outside" if site in self.outside else "inside"

    def open(self, site: str) -> Site:
        """A site in its role in the study: without a test list, all images of an outside site are
        test images, those of an inside site are not. `POOLED` has the images of all inside sites.
        """
        if site == POOLED:
            parts = [self.open(name).data for name in self.inside]
            return Site(POOLED, self.task, pooled_images(parts), self.seed)
        return open_site(site, self.task, seed=self.seed, role=self.role(site))


def recorded_run(
    method: str,
    draw: Draw,
    sites: Sequence[str],
    *,
    models: dict[str, dict[str, Message]] | None = None,
    **options: Any,
) -> JsonDict:
    """The results of `run_local` with `CURVES` and `SCORES`.

    `models` receives site -> name -> final model; `options`: further arguments of `run_local`, and
    hyper-parameters.
    """
    setting = draw.setting
    scores: dict[str, dict[str, Json]] = {}

    def store_final_model(site: str, name: str, model: Message, cases: Cases) -> None:
        scores.setdefault(site, {})[name] = cases.to_dict()
        final.setdefault(site, {})[name] = model

    final = {} if models is None else models
    opened = cache(draw.open)
    results = run_local(
        method,
        setting.task,
        sites,
        rounds=setting.rounds,
        seed=draw.seed,
        resplit=draw.seed,
        delivered=store_final_model,
        opener=lambda name, _: opened(name),
        **options,
    )
    results[CURVES] = {}
    for model, curves in validation_curves(results.history).items():
        results[CURVES][model] = {}
        for site, curve in curves.items():
            points = [[at, round(value, 5)] for at, value in sorted(curve.items())]
            results[CURVES][model][site] = points
    results[SCORES] = scores
    if setting.cross_site:
        results[CROSS_SITE] = cross_site(final, {name: opened(name) for name in setting.sites})
    return results


def cross_site(
    models: Mapping[str, Mapping[str, Message]], sites: Mapping[str, Site]
) -> dict[str, dict[str, float | None]]:
    """The task's metric of every site's model on every site's test images: site of the model ->
    site of the images -> value.

    A site's model is its personal one, or without one the deployed one; models that are the same
    object have the same row.
    """
    rows = {}  # by the model's id
    matrix = {}
    for owner in sorted(models.keys() & sites.keys()):
        model = models[owner].get("personal") or models[owner].get("deployed")
        if model is None:
            continue
        if id(model) not in rows:
            rows[id(model)] = {name: metric_of(model, site) for name, site in sorted(sites.items())}
        matrix[owner] = rows[id(model)]
    return matrix


def constant_prediction(draw: Draw) -> JsonDict:
    """The best prediction that ignores the image, see `training.constant`; nothing is trained.

    "global" comes from the training images of all inside sites, "personal" from a site's own.
    Inside sites deploy the personal one, outside sites the global one.
    """
    started = time.monotonic()
    task = draw.task
    sites = {name: draw.open(name) for name in draw.setting.sites}
    training = {name: sites[name].data.train for name in draw.inside}
    everything = joined(list(training.values()), list(training))
    records = {}
    scores: dict[str, JsonDict] = {}
    for name, site in sites.items():
        judges = [site] if name in training else [sites[other] for other in training]
        predictions = {"global": best_constant(task, everything, judges)}
        if name in training:
            predictions["personal"] = best_constant(task, training[name], judges)
        measured = {
            model: score_constant(site, prediction, "test", task.test_metrics)
            for model, prediction in predictions.items()
        }
        measured["deployed"] = measured.get("personal", measured["global"])
        values = {model: result.values for model, result in measured.items()}
        scores[name] = {model: result.cases.to_dict() for model, result in measured.items()}
        records[name] = SiteRecord(draw.role(name), site.n, values)
    seconds = {"total": time.monotonic() - started}
    record = RunRecord(CONSTANT, task, draw.seed, draw.setting.rounds, records, seconds=seconds)
    return build_results(record) | {SCORES: scores}


def single_site(draw: Draw, hyper: Json, method: str = TRAINED_AS) -> JsonDict:
    """The results, in one dict, of all inside sites: each runs `method` alone, as a federation of
    one, and is tested on its own images.
    """
    runs = {site: recorded_run(method, draw, [site], **hyper) for site in draw.inside}
    merged: JsonDict = {"sites": {}, SCORES: {}, CURVES: {}, "events": []}
    merged["traffic"] = _NO_TRAFFIC
    failed = []
    for site, run in runs.items():
        merged["sites"][site] = run["sites"][site]
        merged[SCORES][site] = run[SCORES].get(site, {})
        for model, curves in run[CURVES].items():
            merged[CURVES].setdefault(model, {}).update(curves)
        merged["events"] += run["events"]
        if draw.setting.cross_site:
            merged.setdefault(CROSS_SITE, {}).update(run[CROSS_SITE])
        if run["reason"]:
            failed.append(f"{site}: {run['reason']}")
    merged["seconds"] = {"total": sum(run["seconds"]["total"] for run in runs.values())}
    first = next(iter(runs.values()))
    results = _reference(SINGLE_SITE, first | merged)
    if failed:
        results |= {"status": FAILED, "reason": "; ".join(failed)}
    return results


def centralised(draw: Draw, hyper: Json) -> JsonDict:
    """Results of one model of the pooled training images of the inside sites, tested at every
    site.
    """
    results = recorded_run(TRAINED_AS, draw, [POOLED], outside=draw.setting.sites, **hyper)
    results["traffic"] = _NO_TRAFFIC
    del results["sites"][POOLED]
    results[SCORES].pop(POOLED, None)
    for name, site in results["sites"].items():
        site["role"] = draw.role(name)
    return _reference(CENTRALISED, results)


def batch_statistics(draw: Draw, hyper: Json) -> JsonDict:
    """Results of FedAvg's model, and as "deployed" of the same normalized by the test images;
    raises ConfigError if the network has no BatchNorm.
    """
    check_adaptable(draw.task)
    models: dict[str, dict[str, Message]] = {}
    results = _fedavg(draw, hyper, models=models)
    for name, site_models in models.items():
        site = draw.open(name)
        trained = build_deployed(draw.task, site_models["global"]).to(site.device)
        module, _ = with_batch_statistics(trained)
        scores = site.score(module, "test")
        metrics = {metric: finite_or_none(value) for metric, value in scores.values.items()}
        results["sites"][name]["metrics"]["deployed"] = metrics
        results[SCORES][name]["deployed"] = scores.cases.to_dict()
        for item in ("intervals", "classes"):  # of FedAvg's model
            results["sites"][name].get(item, {}).pop("deployed", None)
    replaced = ("at_chance", "constant_output")  # of FedAvg's, too
    results["events"] = [event for event in results["events"] if event["kind"] not in replaced]
    return _reference(BATCH_STATISTICS, results)


def augmentation(draw: Draw, hyper: Json) -> JsonDict:
    """Results of FedAvg with `APPEARANCE` after the task's augmentation, for domain
    generalization.
    """
    changes = {"augment": [*draw.task.augment, *APPEARANCE]}
    return _reference(AUGMENTATION, with_other_task(changes, draw, partial(_fedavg, hyper=hyper)))


def equal_compute(draw: Draw, hyper: Json) -> JsonDict:
    """Results of FedAvg with twice the local epochs, for methods that train twice as long as
    FedAvg.
    """
    changes = {"local_epochs": 2 * draw.task.local_epochs}  # FedSM and Ditto train two models
    return _reference(EQUAL_COMPUTE, with_other_task(changes, draw, partial(_fedavg, hyper=hyper)))


def participating(draw: Draw, hyper: Json) -> JsonDict:
    """Results of FedAvg of all sites: what the outside sites would get if they took part."""
    results = _fedavg(replace(draw, outside=()), hyper)
    for name, site in results["sites"].items():
        site["role"] = draw.role(name)
    return _reference(PARTICIPATING, results)


def _fedavg(draw: Draw, hyper: Json, **options: Any) -> JsonDict:
    """Results of FedAvg of the inside sites; `options`: of `recorded_run`."""
    return recorded_run(TRAINED_AS, draw, draw.inside, outside=draw.outside, **options, **hyper)


def with_other_task(changes: Json, draw: Draw, run: Callable[[Draw], JsonDict]) -> JsonDict:
    """The results of a run with some settings of the task changed; they have the study's task,
    which all rows share, and the changes in the run's settings.
    """
    planned = draw.setting.task.to_dict()
    setting = replace(draw.setting, task=load_task({**planned, **changes}))
    results = run(replace(draw, setting=setting))
    configuration = results["configuration"]
    for name in changes:
        configuration["task"][name] = planned[name]
    further = configuration["settings"].get(TASK_CHANGES, {})
    configuration["settings"][TASK_CHANGES] = {**changes, **further}
    return results


def _reference(method: str, results: JsonDict) -> JsonDict:
    """The results under the reference's name, with means over its sites."""
    changed = results | {
        "method": method,
        "mean": mean_over_sites(results["sites"], results["mean"]["inside"]),
    }
    changed["findings"] = [finding.to_dict() for finding in findings(changed)]
    return changed


def pooled_images(parts: Sequence[SiteData]) -> SiteData:
    """The images of several sites as of one, patients with the site's number; raises ConfigError if
    annotated structures differ.
    """
    annotated = {part.annotated for part in parts}
    if len(annotated) > 1:
        raise ConfigError(
            f"the row {CENTRALISED} needs sites with the same annotated structures; leave it out"
        )
    numbers = list(map(str, range(len(parts))))

    def split(name: str) -> Split:
        return joined([part.split(name) for part in parts], numbers)

    return SiteData(split("train"), split("validation"), split("test"), annotated=annotated.pop())


REFERENCES = {
    CONSTANT: lambda draw, hyper: constant_prediction(draw),
    SINGLE_SITE: single_site,
    BATCH_STATISTICS: batch_statistics,
    CENTRALISED: centralised,
    AUGMENTATION: augmentation,
    EQUAL_COMPUTE: equal_compute,
    PARTICIPATING: participating,
}
