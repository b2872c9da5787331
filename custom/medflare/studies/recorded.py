"""A run of the plain loop with what a study wants to know beside its results: learning curves, updates side by side, patients' scores.

A study runs on its maker's own data, where nothing leaves a site: it may keep what a federation leaves at the hospitals.
"""

from statistics import fmean
from typing import Any, TypeAlias

from medflare.core.message import Message
from medflare.federation.local.loop import run_local
from medflare.federation.outcome import StepReport
from medflare.tasks.cases import Cases

CURVES = "curves"  # in a results dict: model -> site -> [rounds of training, value of the task's metric on validation images] each
SCORES = "scores"  # in a results dict: site -> model -> `Cases.to_dict`
SIMILARITY = "similarity"  # in a results dict: entry -> site -> site -> cosine of their updates, mean over the rounds of both
Models: TypeAlias = dict[str, dict[str, Message]]  # site -> role -> delivered model


def recorded_run(*arguments: Any, models: Models | None = None, **settings: Any) -> dict[str, Any]:
    """As `run_local`; the results dict has `CURVES`, `SCORES` and, of several sites, `SIMILARITY` too.

    Args:
        arguments: of `run_local`.
        models: takes the delivered models, where given.
        settings: of `run_local`.
    """
    curves: dict[str, dict[str, dict[int, float]]] = {}
    scores: dict[str, dict[str, dict[str, Any]]] = {}
    pairs: dict[str, dict[str, dict[str, list[float]]]] = {}  # entry -> site -> site -> a cosine for every round

    def observe(report: StepReport) -> None:
        for site, facts in report.facts.items():
            for model, value in (facts.get("validation") or {}).items():
                if value is not None:
                    curves.setdefault(model, {}).setdefault(site, {})[report.step.round] = round(value, 5)
        for entry, sites in report.similarity().items():
            for site, row in sites.items():
                for other, value in row.items():
                    pairs.setdefault(entry, {}).setdefault(site, {}).setdefault(other, []).append(value)

    def delivered(site: str, role: str, model: Message, cases: Cases) -> None:
        scores.setdefault(site, {})[role] = cases.to_dict()
        if models is not None:
            models.setdefault(site, {})[role] = model

    results = run_local(*arguments, observe=observe, delivered=delivered, **settings)
    points = {model: {site: [[at, of[at]] for at in sorted(of)] for site, of in sites.items()} for model, sites in curves.items()}
    similarity = {
        entry: {site: {other: round(fmean(found), 4) for other, found in row.items()} for site, row in sites.items()}
        for entry, sites in pairs.items()
        if len(sites) > 1
    }
    return results | {CURVES: points, SCORES: scores} | ({SIMILARITY: similarity} if similarity else {})
