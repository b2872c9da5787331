"""What a study adds to its runs: at each site the best model by test images, which shows what could
be gained, and the constant prediction, which runs of older versions lack.
"""

from collections.abc import Iterable, Mapping

from medflare.core.text import Json
from medflare.evaluation.presentation import sites_of_role
from medflare.studies.references import CONSTANT, REFERENCES, SCORES
from medflare.studies.statistics import Groups, Results, all_runs

ORACLE = "oracle"
# Of IOP-FL's experts at an outside site.
BEST_EXPERT = "best expert"
EXPERT_SPREAD = "spread of experts"
_CHOSEN_ON_TEST = (ORACLE, BEST_EXPERT)
# No models that a site could have.
UNATTAINABLE = {*_CHOSEN_ON_TEST, EXPERT_SPREAD}


def with_further_models(groups: Groups, metric: str) -> dict[str, list[Results]]:
    """All runs with everything that this module adds, chosen by a metric."""
    constants = {}  # seed, site and role -> metric of the constant prediction
    for run in all_runs(groups):
        if run["method"] == CONSTANT:
            for name, site in run["sites"].items():
                constants[run["seed"], name, site["role"]] = site["metrics"]["deployed"].get(metric)
    further: dict[str, list[Results]] = {}
    for row, runs in groups.items():
        further[row] = []
        for run in runs:
            if run["method"] != CONSTANT:
                sites = {}
                for name, site in run["sites"].items():
                    constant = constants.get((run["seed"], name, site["role"]))
                    sites[name] = {"constant": constant, **site}
                run = {**run, "sites": sites}
            further[row].append(_with_best_expert(_with_oracle(run, metric), metric))
    return further


def _with_oracle(run: Results, metric: str) -> Results:
    """The run with one more model: at every site the one of global and personal model with the
    better test metric.

    References and runs with one model for all purposes stay as they are.
    """
    if run["method"] in REFERENCES or not any(map(_has_personal_model, run["sites"].values())):
        return run
    for name, site in run["sites"].items():
        values = {model: site["metrics"][model].get(metric) for model in ("global", "personal")}
        if None not in values.values():
            run = _with_best(run, name, ORACLE, values)
    return run


def _has_personal_model(site: Json) -> bool:
    personal = site["metrics"]["personal"]
    return personal not in (site["metrics"]["global"], dict.fromkeys(personal))


def _with_best_expert(run: Results, metric: str) -> Results:
    """The run with two more rows at outside sites that got several experts: the best by test
    images, and how far best and worst differ.

    They say what routing could gain, see the sites' `personal/SITE` models of `iop_fl
    comparisons=true`.
    """
    for name in sites_of_role(run, "outside"):
        values = {}
        for model, model_metrics in run["sites"][name]["metrics"].items():
            if model.startswith("personal/") and model_metrics.get(metric) is not None:
                values[model] = model_metrics[metric]
        if len(values) >= 2:
            run = _with_best(run, name, BEST_EXPERT, values)
            difference = max(values.values()) - min(values.values())
            run["sites"][name]["metrics"][EXPERT_SPREAD] = {metric: difference}
    return run


def _with_best(run: Results, site: str, name: str, values: Mapping[str, float]) -> Results:
    """The run with a further name for the model of the largest value at a site."""
    model = max(values, key=values.__getitem__)
    content = run["sites"][site]
    metrics = {**content["metrics"], name: content["metrics"][model]}
    scores = dict(run.get(SCORES, {}))
    if model in scores.get(site, {}):
        scores[site] = {**scores[site], name: scores[site][model]}
    sites = {**run["sites"], site: {**content, "metrics": metrics}}
    return {**run, "sites": sites, SCORES: scores}


def model_list(models: Iterable[str]) -> str:
    notes = dict.fromkeys(_CHOSEN_ON_TEST, " (chosen on test)")
    return ", ".join(model + notes.get(model, "") for model in models)
