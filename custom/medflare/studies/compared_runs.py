"""Runs side by side: the settings that differ, and the deployed models' test metric by site with
paired differences over patients.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pandas as pd

from medflare.core.errors import StateError
from medflare.core.text import JsonDict, read_json
from medflare.evaluation.presentation import (
    UNDEFINED,
    format_setting,
    metric_label,
    ordered_sites,
    sites_of_role,
    task_metric,
)
from medflare.evaluation.results import ROLES, load_results
from medflare.federation.final_models import SCORES_FOLDER
from medflare.studies.differences import delong_text, interval_text
from medflare.studies.markdown import spread
from medflare.studies.references import SCORES
from medflare.studies.statistics import (
    ALL_SITES,
    Comparison,
    Results,
    RunModel,
    compare_patients,
    delong_by_class,
    metrics_frame,
    study_values,
)

_MODEL = "deployed"
# Settings of the task without which two values are not of the same quantity.
_SAME = ("kind", "labels", "metric")


def read_run(path: Path) -> JsonDict:
    """The results of a run with the deployed models' scores by patient, as far as they are on this
    machine.

    Raises:
        StateError: there are no results, or a file is damaged.
    """
    results = load_results(path)
    folder = path if path.is_dir() else path.parent
    files = [file for file in folder.glob(f"**/{SCORES_FOLDER}/{_MODEL}.json") if file.is_file()]
    scores = {}
    for site in results["sites"]:
        site_files = [file for file in files if site in file.relative_to(folder).parts]
        if len(site_files) == 1:  # several are of several runs
            try:
                scores[site] = {_MODEL: read_json(site_files[0])}
            except ValueError as error:
                raise StateError(
                    f"{site_files[0]}: not valid JSON ({error}); delete it to compare without it"
                ) from error
    return {**results, SCORES: scores}


def differing_settings(runs: Mapping[str, Results]) -> pd.DataFrame:
    """A row for each setting that is not the same in all runs, a column for each run; UNDEFINED
    where a run has no such setting.
    """
    columns = {}
    for name, run in runs.items():
        content = {key: run[key] for key in ("method", "seed", "rounds", "status")}
        content |= {"sites": sites_of_role(run, "inside"), **run["configuration"]}
        flat = pd.json_normalize(content).to_dict("records")[0]
        for key in content.keys() & {"seed", "rounds"}:  # the settings repeat them
            flat.pop(f"settings.{key}", None)
        columns[name] = {setting: format_setting(value) for setting, value in flat.items()}
    table = pd.DataFrame(columns).fillna(UNDEFINED)
    return table[table.nunique(axis=1) > 1]


def metric_of_runs(runs: Mapping[str, Results]) -> pd.DataFrame:
    """A row for each site and the mean of each role; a column for each run, and the difference to
    the first run for each other one.

    A difference has its 95 % interval over patients, see `compare_patients`, which leaves out
    classes of few patients: it can deviate from the shown values. It is UNDEFINED unless both runs
    have scores of the same patients for the same labels.
    """
    (first_name, first), *others = runs.items()
    metric = task_metric(first)
    sites: dict[str, str] = {}
    for run in runs.values():
        for site, content in ordered_sites(run).items():
            sites.setdefault(site, content["role"])
    values = study_values(metrics_frame({name: [run] for name, run in runs.items()}))
    rows = []
    for role in ROLES:
        site_names = [site for site in sites if sites[site] == role]
        groups = {site: [site] for site in site_names}
        if len(site_names) > 1:
            groups[ALL_SITES] = site_names
        for site, group in groups.items():
            row = {"site": site or f"mean, {role}"}
            for name in runs:
                key = (name, _MODEL, role, metric, site)
                row[name] = spread(metric, values.reindex([key]).iloc[0])
            for name, run in others:
                compared = _compared(first, run, group, role, metric)
                row[f"{name} - {first_name}"] = _difference(compared)
            rows.append(row)
    return pd.DataFrame(rows, columns=None if rows else ["site"]).set_index("site")


def comparison(runs: Mapping[str, Results]) -> str:
    """Both tables as text."""
    settings = differing_settings(runs)
    metric = task_metric(next(iter(runs.values()))) or "metric"
    parts = [
        "Settings that differ",
        settings.to_string() if len(settings) else "none",
        "",
        (
            f"{metric_label(metric)} of the deployed model on test images; "
            "differences with 95 % intervals over patients"
        ),
        metric_of_runs(runs).reset_index().to_string(index=False),
    ]
    areas = delong_of_runs(runs) if metric == "auc_macro" else pd.DataFrame()
    if len(areas):
        parts += ["", "AUC by class, DeLong's test", areas.to_string(index=False)]
    return "\n".join(parts)


def delong_of_runs(runs: Mapping[str, Results]) -> pd.DataFrame:
    """A row for each site and class, a column for each run but the first: its AUC minus that of the
    first run, see `delong_by_class`; empty without scores of the same patients.
    """
    (first_name, first), *others = runs.items()
    labels = first["configuration"]["task"].get("labels", [])
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for name, run in others:
        if not _is_same_task(first, run):
            continue
        for role in ROLES:
            common = set(sites_of_role(first, role)) & set(sites_of_role(run, role))
            before = _deployed(first, common)
            after = _deployed(run, common)
            for (site, class_index), compared in delong_by_class(before, after, role).items():
                cells = {"site": site, "class": labels[class_index]}
                row = rows.setdefault((site, class_index), cells)
                row[f"{name} - {first_name}"] = delong_text(compared)
    return pd.DataFrame(rows.values()).fillna(UNDEFINED)


def _is_same_task(first: Results, second: Results) -> bool:
    task = first["configuration"]["task"]
    other_task = second["configuration"]["task"]
    return all(task.get(name) == other_task.get(name) for name in _SAME)


def _compared(
    first: Results, second: Results, sites: Sequence[str], role: str, metric: str
) -> Comparison:
    """The comparison of the second run with the first at some sites, without a difference if they
    measured other things.
    """
    if not _is_same_task(first, second):
        return Comparison()
    models = []
    for run in (first, second):
        measured = run[SCORES].keys() & sites_of_role(run, role)
        if not measured.issuperset(sites):
            return Comparison()
        models.append(_deployed(run, sites))
    return compare_patients(models[0], models[1], metric, role=role)


def _deployed(run: Results, places: Collection[str]) -> RunModel:
    """The run as if it had these sites only; patients are paired, not seeds."""
    sites = {site: run["sites"][site] for site in places}
    return [{**run, "sites": sites, "seed": 0}], _MODEL


def _difference(compared: Comparison) -> str:
    if compared.difference is None:
        return UNDEFINED
    text = f"{compared.difference:+.3f}"
    if compared.interval is not None:
        text += f" ({interval_text(compared)})"
    return f"{text}, n = {compared.n}"
