"""Rows that a method has to beat: the constant answer, sites alone, one model of everybody's images, FedAvg with each batch's statistics.

A study runs on its maker's own data, where nothing leaves a site: it may keep what a federation leaves at the hospitals.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from medflare.adaptation.dsbn import with_batch_statistics
from medflare.adaptation.registry import check_adaptable
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.loading import SiteData, joined
from medflare.evaluation.results import FAILED, RunRecord, SiteRecord, build_results, mean_over_sites
from medflare.federation.local.loop import run_local
from medflare.federation.outcome import StepReport
from medflare.methods.catalogue import build_deployed
from medflare.studies.setting import Setting
from medflare.tasks.classes import Cases
from medflare.training.constant import best_constant, score_constant
from medflare.training.epochs import finite_or_none
from medflare.training.opening import open_site
from medflare.training.site import Site

CONSTANT, SINGLE_SITE, CENTRALISED, BATCH_STATISTICS = "constant", "single-site", "centralised", "batch-statistics"
TRAINED_AS: Final = "fedavg"  # the method whose algorithms the references train with unless told, and whose hyper-parameters they take
POOLED: Final = "all-sites"  # name of the one site that centralised training has
CURVES = "curves"  # in a results dict: model -> site -> [rounds of training, value of the task's metric on validation images] each
SCORES = "scores"  # in a results dict: site -> model -> `Cases.to_dict`
Models: TypeAlias = dict[str, dict[str, Message]]  # site -> role -> delivered model


def recorded_run(*arguments: Any, models: Models | None = None, **settings: Any) -> dict[str, Any]:
    """As `run_local`; the results dict has `CURVES` and `SCORES` too.

    Args:
        models: takes the delivered models, where given.
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
        if models is not None:
            models.setdefault(site, {})[role] = model

    results = run_local(*arguments, observe=observe, delivered=delivered, **settings)
    points = {model: {site: [[at, of[at]] for at in sorted(of)] for site, of in sites.items()} for model, sites in curves.items()}
    return results | {CURVES: points, SCORES: scores}


def constant_answer(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The best answer that looks at no image, see `training.constant`; nothing is trained.

    Args:
        outside: sites that have no training images.
        hyper: none; a constant has no hyper-parameters.

    Returns:
        A results dict: "global" comes from the training images of all inside sites, "personal" from a site's own; an inside site deploys
        its own, an outside site the global one.
    """
    started, task = time.monotonic(), replace(setting.task, resplit=seed)
    roles = {site: "outside" if site in outside else "inside" for site in setting.sites}
    sites = {name: open_site(name, task, seed=seed, role=role, data_root=setting.data_root) for name, role in roles.items()}
    training = {name: site.data.train for name, site in sites.items() if roles[name] == "inside"}
    everybody = joined(list(training.values()), list(training))
    records: dict[str, SiteRecord] = {}
    scores: dict[str, dict[str, Any]] = {}
    for name, site in sites.items():
        judges = [site] if name in training else [sites[other] for other in training]
        answers = {"global": best_constant(task, everybody, judges)}
        if name in training:
            answers["personal"] = best_constant(task, training[name], judges)
        found = {model: score_constant(site, answer, "test", task.metrics) for model, answer in answers.items()}
        found["deployed"] = found.get("personal", found["global"])
        values = {model: {metric: finite_or_none(value) for metric, value in of.values.items()} for model, of in found.items()}
        records[name] = SiteRecord(roles[name], site.n, values)
        scores[name] = {model: of.cases.to_dict() for model, of in found.items()}
    seconds = {"total": time.monotonic() - started}
    return build_results(RunRecord(CONSTANT, task, seed, setting.rounds, records, seconds=seconds)) | {SCORES: scores}


def single_site(
    setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None, method: str = TRAINED_AS
) -> dict[str, Any]:
    """Every site trains alone, for as many epochs as in the federation, and is measured on its own test images.

    Args:
        outside: sites that are left out.
        method: what each site runs, as a federation of its own. What a method gains beyond this row comes from the other sites, and not
            from its loss or from a second model.

    Returns:
        One results dict for all sites.
    """
    runs = {
        site: recorded_run(
            method,
            setting.task,
            [site],
            rounds=setting.rounds,
            seed=seed,
            data_root=setting.data_root,
            resplit=seed,
            **(hyper or {}),
        )
        for site in setting.sites
        if site not in outside
    }
    merged = next(iter(runs.values()))
    merged["sites"] = {site: run["sites"][site] for site, run in runs.items()}
    merged[SCORES] = {site: run[SCORES].get(site, {}) for site, run in runs.items()}
    merged[CURVES] = _merged_curves(runs)
    merged["events"] = [event for run in runs.values() for event in run["events"]]
    merged["seconds"] = {"total": sum(run["seconds"]["total"] for run in runs.values())}
    failed = [f"{site}: {run['reason']}" for site, run in runs.items() if run["reason"]]
    return _reference(SINGLE_SITE, merged) | ({"status": FAILED, "reason": "; ".join(failed)} if failed else {})


def centralised(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One model trained on the pooled training images of all sites, measured at each: what privacy forbids, as an upper mark.

    Args:
        outside: sites whose training images are left out; the model is measured there too.

    Returns:
        The results dict of all sites, without the one that holds everybody's images.
    """
    task = replace(setting.task, resplit=seed)
    inside = [site for site in setting.sites if site not in outside]

    def opened(name: str, role: str) -> Site:
        def real(site: str, as_role: str) -> Site:
            return open_site(site, task, seed=seed, role=as_role, data_root=setting.data_root)

        return Site(name, task, pooled([real(site, "inside").data for site in inside]), seed) if name == POOLED else real(name, role)

    results = recorded_run(
        TRAINED_AS,
        task,
        [POOLED],
        rounds=setting.rounds,
        seed=seed,
        outside=setting.sites,
        opener=opened,
        **(hyper or {}),
    )
    del results["sites"][POOLED]
    results[SCORES].pop(POOLED, None)
    for name, site in results["sites"].items():
        site["role"] = "outside" if name in outside else "inside"
    return _reference(CENTRALISED, results)


def batch_statistics(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """FedAvg, whose model is also measured normalising by the test images at hand: "deployed" beside the plain "global".

    What adapts to a site's images at test time does this too; what it gains beyond this row is its own.

    Args:
        outside: sites that never train.

    Raises:
        ConfigError: the task's network has no BatchNorm.
    """
    check_adaptable(setting.task)
    task = replace(setting.task, resplit=seed)
    sites: dict[str, Site] = {}
    models: Models = {}

    def opened(name: str, role: str) -> Site:
        sites[name] = open_site(name, task, seed=seed, role=role, data_root=setting.data_root)
        return sites[name]

    inside = [site for site in setting.sites if site not in outside]
    results = recorded_run(
        TRAINED_AS,
        task,
        inside,
        rounds=setting.rounds,
        seed=seed,
        outside=outside,
        opener=opened,
        models=models,
        **(hyper or {}),
    )
    for name, delivered in models.items():
        module, _ = with_batch_statistics(build_deployed(task, delivered["global"]).to(sites[name].device))
        scores = sites[name].score(module, "test")
        results["sites"][name]["metrics"]["deployed"] = {metric: finite_or_none(value) for metric, value in scores.values.items()}
        results[SCORES][name]["deployed"] = scores.cases.to_dict()
    return _reference(BATCH_STATISTICS, results, results["traffic"])


def _merged_curves(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The curves of runs that have one site each."""
    curves: dict[str, dict[str, Any]] = {}
    for run in runs.values():
        for model, sites in run[CURVES].items():
            curves.setdefault(model, {}).update(sites)
    return curves


def _reference(method: str, results: dict[str, Any], traffic: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The results under the reference's name: the means are those of the sites that are left, and by default nothing was sent."""
    mean = mean_over_sites(results["sites"], results["mean"]["inside"])
    return results | {"method": method, "traffic": dict(traffic or {"down_bytes": 0, "up_bytes": 0}), "mean": mean}


def pooled(parts: Sequence[SiteData]) -> SiteData:
    """All sites' images as one site's; a patient's name carries the place of its site, so that equal names stay two patients.

    Raises:
        ConfigError: the sites annotated different structures.
    """
    annotated = {part.annotated for part in parts}
    if len(annotated) > 1:
        raise ConfigError("pooled images have one loss, and these sites annotated other structures; leave out the row centralised")
    places = [str(place) for place in range(len(parts))]
    train, validation, test = (joined([part.split(name) for part in parts], places) for name in ("train", "validation", "test"))
    return SiteData(train, validation, test, annotated=annotated.pop())
