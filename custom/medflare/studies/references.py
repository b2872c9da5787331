"""Rows that a method has to beat: the constant answer, sites alone, one model of all images, FedAvg changed.

FedAvg is changed in one thing: normalized by the test batch, stronger augmentation, more epochs.

A study runs where all data are, so it keeps scores of single patients, which a federation leaves at the sites.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from medflare.adaptation.dsbn import with_batch_statistics
from medflare.adaptation.registry import check_adaptable
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.loading import SiteData, joined
from medflare.evaluation.results import FAILED, RunRecord, SiteRecord, build_results, mean_over_sites
from medflare.evaluation.verdicts import findings
from medflare.federation.final_models import metric_of
from medflare.federation.local.loop import run_local
from medflare.federation.outcome import StepReport
from medflare.federation.settings import CROSS_SITE
from medflare.methods.catalogue import build_deployed
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.constant import best_constant, score_constant
from medflare.training.epochs import finite_or_none
from medflare.training.opening import open_site
from medflare.training.site import Site

CONSTANT, SINGLE_SITE, CENTRALISED, BATCH_STATISTICS = "constant", "single-site", "centralised", "batch-statistics"
AUGMENTATION, EQUAL_COMPUTE = "augmentation", "equal-compute"
TRAINED_AS: Final = "fedavg"  # the method that references train with by default; they take its hyper-parameters
POOLED: Final = "all-sites"  # the one site of centralised training
CURVES = "curves"  # in a results dict: model -> site -> [rounds of training, validation metric] each
SCORES = "scores"  # in a results dict: site -> model -> `Cases.to_dict`
TASK_CHANGES: Final = "task_changes"  # in a run's settings: what a reference changed in the task
APPEARANCE: Final[Sequence[Mapping[str, Any]]] = (  # contrast, brightness, noise of other scanners
    {"name": "RandAdjustContrast", "prob": 0.5, "gamma": [0.5, 2.0]},
    {"name": "RandShiftIntensity", "prob": 0.5, "offsets": 0.5},
    {"name": "RandScaleIntensity", "prob": 0.5, "factors": 0.5},
    {"name": "RandGaussianNoise", "prob": 0.5, "std": 0.1},
)
EPOCHS_FACTOR: Final = 2  # of the reference "equal-compute"; FedSM and Ditto train two models


@dataclass(frozen=True)
class Setting:
    """What all runs of a study share."""

    task: TaskConfig
    sites: tuple[str, ...]
    rounds: int
    data_root: Path | None = None  # folder with a subfolder per site; None: MEDFLARE_DATA_ROOT, else the task's embedded images
    cross_site: bool = False  # also test every site's model on every site's test images

    def open(self, site: str, role: str, seed: int) -> Site:
        return open_site(site, replace(self.task, resplit=seed), seed=seed, role=role, data_root=self.data_root)


def recorded_run(
    method: str,
    setting: Setting,
    seed: int,
    sites: Sequence[str],
    *,
    models: dict[str, dict[str, Message]] | None = None,
    opened: dict[str, Site] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The results of `run_local` with `CURVES` and `SCORES`; the seed also draws the split by patient.

    `models` receives site -> role -> final model, `opened` the sites; `options`: further arguments of `run_local`, and hyper-parameters.
    """
    curves: dict[str, dict[str, dict[int, float]]] = {}
    scores: dict[str, dict[str, dict[str, Any]]] = {}

    def observe(report: StepReport) -> None:
        for site, meta in report.meta.items():
            for model, value in (meta.get("validation") or {}).items():
                if value is not None:
                    curves.setdefault(model, {}).setdefault(site, {})[report.step.round] = round(value, 5)

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
    points = {model: {site: sorted(map(list, curve.items())) for site, curve in of_sites.items()} for model, of_sites in curves.items()}
    results |= {CURVES: points, SCORES: scores}
    if setting.cross_site:
        results[CROSS_SITE] = cross_site(final, {name: sites_by_name.get(name) or opener(name, "outside") for name in setting.sites})
    return results


def cross_site(models: Mapping[str, Mapping[str, Message]], sites: Mapping[str, Site]) -> dict[str, dict[str, float | None]]:
    """The task's metric of every site's model on every site's test images: site of the model -> site of the images -> value.

    A site's model is its personal one, or without one the deployed one; models that are the same object have the same row.
    """
    owners = sorted(models.keys() & sites.keys())
    chosen = {owner: model for owner in owners if (model := models[owner].get("personal") or models[owner].get("deployed"))}
    different = {id(model): model for model in chosen.values()}
    rows = {key: {name: metric_of(model, site) for name, site in sorted(sites.items())} for key, model in different.items()}
    return {owner: rows[id(model)] for owner, model in chosen.items()}


def constant_answer(setting: Setting, seed: int, outside: Sequence[str] = ()) -> dict[str, Any]:
    """The best answer that ignores the image, see `training.constant`; nothing is trained.

    "global" comes from the training images of all inside sites, "personal" from a site's own. Inside sites deploy the personal answer,
    outside sites the global one.
    """
    started, task = time.monotonic(), replace(setting.task, resplit=seed)
    sites = {name: setting.open(name, "outside" if name in outside else "inside", seed) for name in setting.sites}
    training = {name: site.data.train for name, site in sites.items() if name not in outside}
    everything = joined(list(training.values()), list(training))
    records: dict[str, SiteRecord] = {}
    scores: dict[str, dict[str, Any]] = {}
    for name, site in sites.items():
        judges = [site] if name in training else [sites[other] for other in training]
        answers = {"global": best_constant(task, everything, judges)}
        if name in training:
            answers["personal"] = best_constant(task, training[name], judges)
        measured = {model: score_constant(site, answer, "test", task.test_metrics) for model, answer in answers.items()}
        measured["deployed"] = measured.get("personal", measured["global"])
        values = {model: {name: finite_or_none(value) for name, value in result.values.items()} for model, result in measured.items()}
        records[name] = SiteRecord("inside" if name in training else "outside", site.n, values)
        scores[name] = {model: result.cases.to_dict() for model, result in measured.items()}
    seconds = {"total": time.monotonic() - started}
    return build_results(RunRecord(CONSTANT, task, seed, setting.rounds, records, seconds=seconds)) | {SCORES: scores}


def single_site(
    setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None, method: str = TRAINED_AS
) -> dict[str, Any]:
    """Every inside site runs `method` alone, as a federation of one, and is tested on its own images: one results dict of all sites."""
    runs = {site: recorded_run(method, setting, seed, [site], **(hyper or {})) for site in setting.sites if site not in outside}
    merged = next(iter(runs.values()))
    merged["sites"] = {site: run["sites"][site] for site, run in runs.items()}
    merged[SCORES] = {site: run[SCORES].get(site, {}) for site, run in runs.items()}
    if setting.cross_site:
        merged[CROSS_SITE] = {site: row for run in runs.values() for site, row in run[CROSS_SITE].items()}
    models = dict.fromkeys(model for run in runs.values() for model in run[CURVES])
    merged[CURVES] = {model: {site: run[CURVES][model][site] for site, run in runs.items() if model in run[CURVES]} for model in models}
    merged["events"] = [event for run in runs.values() for event in run["events"]]
    merged["seconds"] = {"total": sum(run["seconds"]["total"] for run in runs.values())}
    failed = [f"{site}: {run['reason']}" for site, run in runs.items() if run["reason"]]
    return _reference(SINGLE_SITE, merged) | ({"status": FAILED, "reason": "; ".join(failed)} if failed else {})


def centralised(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One model trained on the pooled training images of the inside sites and tested at every site."""
    inside = [site for site in setting.sites if site not in outside]

    def opener(name: str, role: str) -> Site:
        if name != POOLED:
            return setting.open(name, role, seed)
        return Site(POOLED, replace(setting.task, resplit=seed), pooled([setting.open(site, "inside", seed).data for site in inside]), seed)

    results = recorded_run(TRAINED_AS, setting, seed, [POOLED], outside=setting.sites, opener=opener, **(hyper or {}))
    del results["sites"][POOLED]
    results[SCORES].pop(POOLED, None)
    for name, site in results["sites"].items():
        site["role"] = "outside" if name in outside else "inside"
    return _reference(CENTRALISED, results)


def batch_statistics(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """FedAvg's model, and as "deployed" the same normalized by the test images; raises ConfigError if the network has no BatchNorm."""
    check_adaptable(setting.task)
    sites: dict[str, Site] = {}
    models: dict[str, dict[str, Message]] = {}
    inside = [site for site in setting.sites if site not in outside]
    results = recorded_run(TRAINED_AS, setting, seed, inside, outside=outside, models=models, opened=sites, **(hyper or {}))
    for name, of_site in models.items():
        module, _ = with_batch_statistics(build_deployed(setting.task, of_site["global"]).to(sites[name].device))
        scores = sites[name].score(module, "test")
        results["sites"][name]["metrics"]["deployed"] = {metric: finite_or_none(value) for metric, value in scores.values.items()}
        results[SCORES][name]["deployed"] = scores.cases.to_dict()
        results["sites"][name].get("intervals", {}).pop("deployed", None)  # of FedAvg's model
    return _reference(BATCH_STATISTICS, results, results["traffic"])


def augmentation(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """FedAvg with `APPEARANCE` after the task's augmentation, for methods of domain generalization."""
    augment = [*setting.task.augment, *APPEARANCE]
    return _with_other_task(AUGMENTATION, setting, seed, outside, hyper, {"augment": augment})


def equal_compute(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """FedAvg with twice the local epochs, for methods that train twice as long as FedAvg."""
    epochs = EPOCHS_FACTOR * setting.task.local_epochs
    return _with_other_task(EQUAL_COMPUTE, setting, seed, outside, hyper, {"local_epochs": epochs})


def _with_other_task(
    reference: str, setting: Setting, seed: int, outside: Sequence[str], hyper: Mapping[str, Any] | None, changes: dict[str, Any]
) -> dict[str, Any]:
    """FedAvg with some settings of the task changed.

    The results have the task of the study, which all rows share, and the changes in the run's settings.
    """
    changed = replace(setting, task=load_task({**setting.task.to_dict(), **changes}))
    inside = [site for site in setting.sites if site not in outside]
    results = recorded_run(TRAINED_AS, changed, seed, inside, outside=outside, **(hyper or {}))
    results["configuration"]["task"] |= {name: setting.task.to_dict()[name] for name in changes}
    results["configuration"]["settings"][TASK_CHANGES] = changes
    return _reference(reference, results, results["traffic"])


def _reference(method: str, results: dict[str, Any], traffic: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The results under the reference's name, with means over its sites and by default no traffic."""
    mean = mean_over_sites(results["sites"], results["mean"]["inside"])
    changed = results | {"method": method, "traffic": dict(traffic or {"down_bytes": 0, "up_bytes": 0}), "mean": mean}
    return changed | {"findings": [finding.to_dict() for finding in findings(changed)]}


def pooled(parts: Sequence[SiteData]) -> SiteData:
    """The images of several sites as of one, patients with the site's number; raises ConfigError if annotated structures differ."""
    annotated = {part.annotated for part in parts}
    if len(annotated) > 1:
        raise ConfigError(f"the row {CENTRALISED} needs sites with the same annotated structures; leave it out")
    numbers = [str(place) for place in range(len(parts))]
    train, validation, test = (joined([part.split(name) for part in parts], numbers) for name in ("train", "validation", "test"))
    return SiteData(train, validation, test, annotated=annotated.pop())


REFERENCES: Final = {
    CONSTANT: lambda setting, seed, outside, hyper: constant_answer(setting, seed, outside),
    SINGLE_SITE: single_site,
    BATCH_STATISTICS: batch_statistics,
    CENTRALISED: centralised,
    AUGMENTATION: augmentation,
    EQUAL_COMPUTE: equal_compute,
}
