"""Rows that a method has to beat: the constant answer, sites alone, one model of all images, FedAvg
changed.

FedAvg is changed in one thing: normalized by the test batch, stronger augmentation, more epochs.

A study runs where all data are, so it keeps scores of single patients, which a federation leaves at
the sites.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from medflare.adaptation.dsbn import with_batch_statistics
from medflare.adaptation.registry import check_adaptable
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.loading import SiteData, Split, joined
from medflare.evaluation.results import (
    FAILED,
    RunRecord,
    SiteRecord,
    build_results,
    mean_over_sites,
)
from medflare.evaluation.verdicts import findings
from medflare.federation.final_models import metric_of
from medflare.federation.local.loop import run_local
from medflare.federation.outcome import StepReport
from medflare.federation.settings import CROSS_SITE
from medflare.methods.catalogue import build_deployed
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.metrics import Scores
from medflare.training.constant import best_constant, score_constant
from medflare.training.epochs import finite_or_none
from medflare.training.opening import open_site
from medflare.training.site import Site

Results: TypeAlias = dict[str, Any]  # of a run, as a study keeps them

CONSTANT = "constant"
SINGLE_SITE = "single-site"
CENTRALISED = "centralised"
BATCH_STATISTICS = "batch-statistics"
AUGMENTATION = "augmentation"
EQUAL_COMPUTE = "equal-compute"
# The method that references train with by default; they take its hyper-parameters.
TRAINED_AS: Final = "fedavg"
POOLED: Final = "all-sites"  # the one site of centralised training
# In a results dict: model -> site -> [rounds of training, validation metric] each.
CURVES = "curves"
SCORES = "scores"  # in a results dict: site -> model -> `Cases.to_dict`
TASK_CHANGES: Final = "task_changes"  # in a run's settings: what a reference changed in the task
APPEARANCE: Final[Sequence[Mapping[str, Any]]] = (  # contrast, brightness, noise of other scanners
    {"name": "RandAdjustContrast", "prob": 0.5, "gamma": [0.5, 2.0]},
    {"name": "RandShiftIntensity", "prob": 0.5, "offsets": 0.5},
    {"name": "RandScaleIntensity", "prob": 0.5, "factors": 0.5},
    {"name": "RandGaussianNoise", "prob": 0.5, "std": 0.1},
)
_NO_TRAFFIC: Final[Mapping[str, int]] = {"down_bytes": 0, "up_bytes": 0}
EPOCHS_FACTOR: Final = 2  # of the reference "equal-compute"; FedSM and Ditto train two models


@dataclass(frozen=True)
class Setting:
    """What all runs of a study share."""

    task: TaskConfig
    sites: tuple[str, ...]
    rounds: int
    # Folder with a subfolder per site; None: MEDFLARE_DATA_ROOT, else the task's embedded images.
    data_root: Path | None = None
    cross_site: bool = False  # also test every site's model on every site's test images

    def open(self, site: str, role: str, seed: int) -> Site:
        task = replace(self.task, resplit=seed)
        return open_site(site, task, seed=seed, role=role, data_root=self.data_root)

    def inside(self, outside: Sequence[str]) -> list[str]:
        """The sites that train if these do not."""
        return [site for site in self.sites if site not in outside]


def recorded_run(
    method: str,
    setting: Setting,
    seed: int,
    sites: Sequence[str],
    *,
    models: dict[str, dict[str, Message]] | None = None,
    opened: dict[str, Site] | None = None,
    **options: Any,
) -> Results:
    """The results of `run_local` with `CURVES` and `SCORES`; the seed also draws the split by
    patient.

    `models` receives site -> role -> final model, `opened` the sites; `options`: further arguments
    of `run_local`, and hyper-parameters.
    """
    curves: dict[str, dict[str, dict[int, float]]] = {}
    scores: dict[str, dict[str, dict[str, Any]]] = {}

    def observe(report: StepReport) -> None:
        for site, meta in report.meta.items():
            for model, value in (meta.get("validation") or {}).items():
                if value is not None:
                    curve = curves.setdefault(model, {}).setdefault(site, {})
                    curve[report.step.round] = round(value, 5)

    def delivered(site: str, role: str, model: Message, cases: Cases) -> None:
        scores.setdefault(site, {})[role] = cases.to_dict()
        final.setdefault(site, {})[role] = model

    open_other = options.pop("opener", None) or partial(setting.open, seed=seed)
    final: dict[str, dict[str, Message]] = {} if models is None else models
    sites_by_name: dict[str, Site] = {} if opened is None else opened

    def opener(name: str, role: str) -> Site:
        sites_by_name[name] = open_other(name, role)
        return sites_by_name[name]

    results = run_local(
        method,
        setting.task,
        sites,
        rounds=setting.rounds,
        seed=seed,
        resplit=seed,
        data_root=setting.data_root,
        observe=observe,
        delivered=delivered,
        opener=opener,
        **options,
    )
    results[CURVES] = {}
    for model, of_sites in curves.items():
        results[CURVES][model] = {}
        for site, curve in of_sites.items():
            results[CURVES][model][site] = sorted(map(list, curve.items()))
    results[SCORES] = scores
    if setting.cross_site:
        tested: dict[str, Site] = {}
        for name in setting.sites:
            tested[name] = sites_by_name.get(name) or opener(name, "outside")
        results[CROSS_SITE] = cross_site(final, tested)
    return results


def cross_site(
    models: Mapping[str, Mapping[str, Message]], sites: Mapping[str, Site]
) -> dict[str, dict[str, float | None]]:
    """The task's metric of every site's model on every site's test images: site of the model ->
    site of the images -> value.

    A site's model is its personal one, or without one the deployed one; models that are the same
    object have the same row.
    """
    rows: dict[int, dict[str, float | None]] = {}  # by the model's id
    matrix: dict[str, dict[str, float | None]] = {}
    for owner in sorted(models.keys() & sites.keys()):
        model = models[owner].get("personal") or models[owner].get("deployed")
        if model is None:
            continue
        if id(model) not in rows:
            rows[id(model)] = {name: metric_of(model, site) for name, site in sorted(sites.items())}
        matrix[owner] = rows[id(model)]
    return matrix


def constant_answer(setting: Setting, seed: int, outside: Sequence[str] = ()) -> Results:
    """The best answer that ignores the image, see `training.constant`; nothing is trained.

    "global" comes from the training images of all inside sites, "personal" from a site's own.
    Inside sites deploy the personal answer, outside sites the global one.
    """
    started = time.monotonic()
    task = replace(setting.task, resplit=seed)
    roles = dict.fromkeys(setting.sites, "inside") | dict.fromkeys(outside, "outside")
    sites = {name: setting.open(name, roles[name], seed) for name in setting.sites}
    training = {name: sites[name].data.train for name in setting.inside(outside)}
    everything = joined(list(training.values()), list(training))
    records: dict[str, SiteRecord] = {}
    scores: dict[str, dict[str, Any]] = {}
    for name, site in sites.items():
        judges = [site] if name in training else [sites[other] for other in training]
        answers = {"global": best_constant(task, everything, judges)}
        if name in training:
            answers["personal"] = best_constant(task, training[name], judges)
        measured: dict[str, Scores] = {}
        for model, answer in answers.items():
            measured[model] = score_constant(site, answer, "test", task.test_metrics)
        measured["deployed"] = measured.get("personal", measured["global"])
        values: dict[str, dict[str, float | None]] = {}
        scores[name] = {}
        for model, result in measured.items():
            values[model] = _finite(result.values)
            scores[name][model] = result.cases.to_dict()
        records[name] = SiteRecord(roles[name], site.n, values)
    seconds = {"total": time.monotonic() - started}
    record = RunRecord(CONSTANT, task, seed, setting.rounds, records, seconds=seconds)
    return build_results(record) | {SCORES: scores}


def _finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {metric: finite_or_none(value) for metric, value in values.items()}


def single_site(
    setting: Setting,
    seed: int,
    outside: Sequence[str],
    hyper: Mapping[str, Any],
    method: str = TRAINED_AS,
) -> Results:
    """Every inside site runs `method` alone, as a federation of one, and is tested on its own
    images: one results dict of all sites.
    """
    runs: dict[str, Results] = {}
    opener = _opener_by_role(setting, seed, outside)
    for site in setting.inside(outside):
        runs[site] = recorded_run(method, setting, seed, [site], opener=opener, **hyper)
    merged: Results = {"sites": {}, SCORES: {}, CURVES: {}, "events": []}
    merged["traffic"] = _NO_TRAFFIC
    failed: list[str] = []
    for site, run in runs.items():
        merged["sites"][site] = run["sites"][site]
        merged[SCORES][site] = run[SCORES].get(site, {})
        for model, of_site in run[CURVES].items():
            merged[CURVES].setdefault(model, {}).update(of_site)
        merged["events"] += run["events"]
        if setting.cross_site:
            merged.setdefault(CROSS_SITE, {}).update(run[CROSS_SITE])
        if run["reason"]:
            failed.append(f"{site}: {run['reason']}")
    merged["seconds"] = {"total": sum(run["seconds"]["total"] for run in runs.values())}
    first = next(iter(runs.values()))
    results = _reference(SINGLE_SITE, first | merged)
    if failed:
        results |= {"status": FAILED, "reason": "; ".join(failed)}
    return results


def _opener_by_role(
    setting: Setting, seed: int, outside: Sequence[str]
) -> Callable[[str, str], Site]:
    """Opens sites in their role in the study: without a test list, all images of an outside site
    are test images, those of an inside site are not.
    """

    def opener(name: str, role: str) -> Site:
        return setting.open(name, "outside" if name in outside else "inside", seed)

    return opener


def centralised(
    setting: Setting, seed: int, outside: Sequence[str], hyper: Mapping[str, Any]
) -> Results:
    """One model of the pooled training images of the inside sites, tested at every site."""

    of_study = _opener_by_role(setting, seed, outside)

    def opener(name: str, role: str) -> Site:
        if name != POOLED:
            return of_study(name, role)
        parts = [setting.open(site, "inside", seed).data for site in setting.inside(outside)]
        return Site(POOLED, replace(setting.task, resplit=seed), pooled(parts), seed)

    results = recorded_run(
        TRAINED_AS, setting, seed, [POOLED], outside=setting.sites, opener=opener, **hyper
    )
    results["traffic"] = _NO_TRAFFIC
    del results["sites"][POOLED]
    results[SCORES].pop(POOLED, None)
    for name, site in results["sites"].items():
        site["role"] = "outside" if name in outside else "inside"
    return _reference(CENTRALISED, results)


def batch_statistics(
    setting: Setting, seed: int, outside: Sequence[str], hyper: Mapping[str, Any]
) -> Results:
    """FedAvg's model, and as "deployed" the same normalized by the test images; raises ConfigError
    if the network has no BatchNorm.
    """
    check_adaptable(setting.task)
    sites: dict[str, Site] = {}
    models: dict[str, dict[str, Message]] = {}
    results = _fedavg(setting, seed, outside, hyper, models=models, opened=sites)
    for name, of_site in models.items():
        site = sites[name]
        trained = build_deployed(setting.task, of_site["global"]).to(site.device)
        module, _ = with_batch_statistics(trained)
        scores = site.score(module, "test")
        results["sites"][name]["metrics"]["deployed"] = _finite(scores.values)
        results[SCORES][name]["deployed"] = scores.cases.to_dict()
        results["sites"][name].get("intervals", {}).pop("deployed", None)  # of FedAvg's model
    of_model = ("at_chance", "constant_output")  # of FedAvg's, too
    results["events"] = [event for event in results["events"] if event["kind"] not in of_model]
    return _reference(BATCH_STATISTICS, results)


def augmentation(
    setting: Setting, seed: int, outside: Sequence[str], hyper: Mapping[str, Any]
) -> Results:
    """FedAvg with `APPEARANCE` after the task's augmentation, for domain generalization."""
    augment = [*setting.task.augment, *APPEARANCE]
    run = partial(_fedavg, seed=seed, outside=outside, hyper=hyper)
    return _reference(AUGMENTATION, with_other_task({"augment": augment}, setting, run))


def equal_compute(
    setting: Setting, seed: int, outside: Sequence[str], hyper: Mapping[str, Any]
) -> Results:
    """FedAvg with twice the local epochs, for methods that train twice as long as FedAvg."""
    epochs = EPOCHS_FACTOR * setting.task.local_epochs
    run = partial(_fedavg, seed=seed, outside=outside, hyper=hyper)
    return _reference(EQUAL_COMPUTE, with_other_task({"local_epochs": epochs}, setting, run))


def _fedavg(
    setting: Setting, seed: int, outside: Sequence[str], hyper: Mapping[str, Any], **options: Any
) -> Results:
    """FedAvg of the inside sites; `options`: of `recorded_run`."""
    inside = setting.inside(outside)
    return recorded_run(TRAINED_AS, setting, seed, inside, outside=outside, **options, **hyper)


def with_other_task(
    changes: Mapping[str, Any], setting: Setting, run: Callable[[Setting], Results]
) -> Results:
    """The results of a run with some settings of the task changed.

    They have the task of the study, which all rows share, and the changes in the run's settings.
    """
    planned = setting.task.to_dict()
    results = run(replace(setting, task=load_task({**planned, **changes})))
    configuration = results["configuration"]
    for name in changes:
        configuration["task"][name] = planned[name]
    further = configuration["settings"].get(TASK_CHANGES, {})
    configuration["settings"][TASK_CHANGES] = {**changes, **further}
    return results


def _reference(method: str, results: Results) -> Results:
    """The results under the reference's name, with means over its sites."""
    changed = results | {
        "method": method,
        "mean": mean_over_sites(results["sites"], results["mean"]["inside"]),
    }
    changed["findings"] = [finding.to_dict() for finding in findings(changed)]
    return changed


def pooled(parts: Sequence[SiteData]) -> SiteData:
    """The images of several sites as of one, patients with the site's number; raises ConfigError if
    annotated structures differ.
    """
    annotated = {part.annotated for part in parts}
    if len(annotated) > 1:
        raise ConfigError(
            f"the row {CENTRALISED} needs sites with the same annotated structures; leave it out"
        )
    numbers = list(map(str, range(len(parts))))
    splits: list[Split] = []
    for name in ("train", "validation", "test"):
        splits.append(joined([part.split(name) for part in parts], numbers))
    train, validation, test = splits
    return SiteData(train, validation, test, annotated=annotated.pop())


REFERENCES: Final = {
    CONSTANT: lambda setting, seed, outside, hyper: constant_answer(setting, seed, outside),
    SINGLE_SITE: single_site,
    BATCH_STATISTICS: batch_statistics,
    CENTRALISED: centralised,
    AUGMENTATION: augmentation,
    EQUAL_COMPUTE: equal_compute,
}
