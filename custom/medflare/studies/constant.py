"""The constant answer as a reference of a study: a row that sits there has learnt nothing yet."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from medflare.data.sites.constant import best_answer, scores_of
from medflare.data.sites.opening import open_site
from medflare.data.splits import joined
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.methods.parts.training import finite_or_none
from medflare.studies.recorded import SCORES
from medflare.studies.setting import Setting

CONSTANT: Final = "constant"


def constant_answer(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The best answer that looks at no image, see `data.sites.constant`; nothing is trained.

    Args:
        setting: task, sites, data and rounds.
        seed: of the split.
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
        answers = {"global": best_answer(task, everybody, judges)}
        if name in training:
            answers["personal"] = best_answer(task, training[name], judges)
        found = {model: scores_of(site, answer, "test", task.metrics) for model, answer in answers.items()}
        found["deployed"] = found.get("personal", found["global"])
        values = {model: {metric: finite_or_none(value) for metric, value in of.values.items()} for model, of in found.items()}
        records[name] = SiteRecord(roles[name], site.n, values)
        scores[name] = {model: of.cases.to_dict() for model, of in found.items()}
    seconds = {"total": time.monotonic() - started}
    return build_results(RunRecord(CONSTANT, task, seed, setting.rounds, records, seconds=seconds)) | {SCORES: scores}
