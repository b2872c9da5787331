"""Runs side by side: the settings that differ, and the deployed models' test metric by site with paired differences over patients."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from medflare.core.errors import StateError
from medflare.evaluation.presentation import UNDEFINED, format_metric, format_setting, metric_label, ordered_sites
from medflare.evaluation.results import ROLES, load_results
from medflare.federation.final_models import SCORES as SCORES_FOLDER
from medflare.studies.references import SCORES
from medflare.studies.statistics import Comparison, Run, compare_patients

_MODEL: Final = "deployed"
_SAME: Final = ("kind", "labels", "metric")  # settings of the task without which two values are not of the same quantity


def read_run(path: Path) -> dict[str, Any]:
    """The results of a run with the deployed models' scores by patient, as far as they are on this machine.

    Raises:
        StateError: there are no results, or a file is damaged.
    """
    results = load_results(path)
    folder = path if path.is_dir() else path.parent
    files = [file for file in folder.glob(f"**/{SCORES_FOLDER}/{_MODEL}.json") if file.is_file()]
    scores: dict[str, dict[str, Any]] = {}
    for site in results["sites"]:
        of_site = [file for file in files if site in file.relative_to(folder).parts]
        if len(of_site) == 1:  # several are of several runs
            try:
                scores[site] = {_MODEL: json.loads(of_site[0].read_text(encoding="utf-8"))}
            except ValueError as error:
                raise StateError(f"{of_site[0]}: not valid JSON ({error}); delete it to compare without it") from error
    return {**results, SCORES: scores}


def differing_settings(runs: Mapping[str, Run]) -> pd.DataFrame:
    """A row for each setting that is not the same in all runs, a column for each run; UNDEFINED where a run has no such setting."""
    columns = {}
    for name, run in runs.items():
        first = {key: run[key] for key in ("method", "seed", "rounds", "status")}
        inside = [site for site, content in ordered_sites(run).items() if content["role"] == "inside"]
        content = {**first, "sites": inside, **run["configuration"]}
        flat = pd.json_normalize(content).to_dict("records")[0]
        columns[name] = {setting: format_setting(value) for setting, value in flat.items()}
    table = pd.DataFrame(columns).fillna(UNDEFINED)
    return table[table.nunique(axis=1) > 1]


def metric_of_runs(runs: Mapping[str, Run]) -> pd.DataFrame:
    """A row for each site and the mean of each role; a column for each run, and the difference to the first run for each other one.

    A difference has its 95 % interval over patients, see `compare_patients`, which leaves out classes of few patients: it can deviate
    from the shown values. It is UNDEFINED unless both runs have scores of the same patients for the same labels.
    """
    first_name, first = next(iter(runs.items()))
    metric = first["configuration"]["task"].get("metric", "")
    sites: dict[str, str] = {}
    for run in runs.values():
        sites |= {site: content["role"] for site, content in ordered_sites(run).items() if site not in sites}
    rows: list[dict[str, str]] = []
    for role in ROLES:
        of_role = [site for site, role_of_site in sites.items() if role_of_site == role]
        places = [[site] for site in of_role] + ([of_role] if len(of_role) > 1 else [])
        for place in places:
            mean = len(place) > 1
            row = {"site": f"mean, {role}" if mean else place[0]}
            for name, run in runs.items():
                row[name] = format_metric(metric, _value(run, place, role, metric))
            for name, run in runs.items():
                if name != first_name:
                    row[f"{name} - {first_name}"] = _difference(_compared(first, run, place, role, metric))
            rows.append(row)
    return pd.DataFrame(rows).set_index("site")


def comparison(runs: Mapping[str, Run]) -> str:
    """Both tables as text."""
    settings = differing_settings(runs)
    metric = next(iter(runs.values()))["configuration"]["task"].get("metric", "metric")
    parts = ["Settings that differ", settings.to_string() if len(settings) else "none"]
    parts += ["", f"{metric_label(metric)} of the deployed model on test images; differences with 95 % intervals over patients"]
    parts.append(metric_of_runs(runs).reset_index().to_string(index=False))
    return "\n".join(parts)


def _value(run: Run, place: Sequence[str], role: str, metric: str) -> float | None:
    if len(place) > 1:
        value = run["mean"][role][_MODEL].get(metric)
    else:
        site = run["sites"].get(place[0])
        value = None if site is None or site["role"] != role else site["metrics"][_MODEL].get(metric)
    return None if value is None else float(value)


def _compared(first: Run, second: Run, place: Sequence[str], role: str, metric: str) -> Comparison:
    """The second run against the first at some sites; a comparison without a difference if they measured other things."""
    tasks = [run["configuration"]["task"] for run in (first, second)]
    if any(tasks[0].get(name) != tasks[1].get(name) for name in _SAME):
        return Comparison()
    parts = []
    for run in (first, second):
        here = {site: content for site, content in run["sites"].items() if site in place and content["role"] == role}
        if len(here) < len(place) or any(site not in run[SCORES] for site in here):
            return Comparison()
        parts.append({**run, "sites": here, "seed": 0})  # patients are paired, not seeds
    return compare_patients(([parts[0]], _MODEL), ([parts[1]], _MODEL), metric, role=role)


def _difference(compared: Comparison) -> str:
    if compared.difference is None:
        return UNDEFINED
    interval = "" if compared.interval is None else " ({:+.3f} to {:+.3f})".format(*compared.interval)
    return f"{compared.difference:+.3f}{interval}, n = {compared.n}"
