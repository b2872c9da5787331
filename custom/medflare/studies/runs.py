"""What tables say of the runs of a row: task, selected round, learning curves, findings."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from medflare.core.errors import StateError
from medflare.core.text import Json
from medflare.evaluation.findings import KINDS, UNUSABLE, Finding, validation_curve
from medflare.evaluation.presentation import scoring_sites, task_metric
from medflare.studies.references import SINGLE_SITE
from medflare.studies.statistics import Groups, Results, all_runs


def task_of(groups: Groups) -> Json:
    """The task's configuration, from the first run that has one; raises StateError if none has."""
    for run in all_runs(groups):
        if run["configuration"]["task"]:
            return run["configuration"]["task"]
    raise StateError("no run of this study has a task; see the reason in each results.json")


def selection(run: Results) -> str:
    """How the deployed round was selected: "last", or "best dice" (on validation images) and how
    the sites' values were joined, or that each site selected alone.
    """
    rule = run["configuration"]["hyper"]["server"].get("selection", "")
    joined = {
        "best": "",
        "median": ", median of sites",
        "paired": ", paired over sites",
        "mean": ", mean of sites",
    }
    if rule not in joined:
        return rule
    best = f"best {task_metric(run)}".strip()
    sites = _scoring_sites(run)
    if run["method"] == SINGLE_SITE or sites == set():
        return f"{best}, each site its own"
    if sites is not None and len(sites) == 1:
        return best
    return best + joined[rule]


def _scoring_sites(run: Results) -> set[str] | None:
    """The sites whose values selected a round at the server; None for a run that did not record it,
    since it failed or is of an older version.
    """
    if run["reason"] or "model_selection" not in run:
        return None
    return set[str]().union(*map(scoring_sites, run["model_selection"].values()))


def curve_of(runs: Sequence[Results], model: str) -> dict[int, float]:
    """Rounds of training -> validation metric, mean over sites (`validation_curve`) and runs, where
    all runs have one.
    """
    curves = []
    for run in runs:
        curve = validation_curve(run, model)
        if curve and not run["reason"]:  # a failed run ended early
            curves.append(curve)
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    return {int(at): fmean(curve[at] for curve in curves) for at in rounds}


def summed_up(run_findings: Sequence[Finding], runs: int) -> list[str]:
    """The findings of several runs in a few words, the gravest first: their sites, and in how many
    runs if not in all.

    A finding that does not make the model unusable is left out if it is in fewer than half of the
    runs.
    """
    lines = []
    for kind in KINDS:
        same = [finding for finding in run_findings if finding.kind == kind]
        is_rare = 2 * len(same) < runs
        if not same or (is_rare and kind not in UNUSABLE):
            continue
        sites = set[str]().union(*(finding.sites for finding in same))
        some = f" ({len(same)} of {runs} runs)" if len(same) < runs else ""
        lines.append(replace(same[0], sites=tuple(sorted(sites))).at_sites + some)
    return lines
