"""A run of the plain loop with what a study wants to know beside its results: learning curves, and scores patient by patient.

A study runs on its maker's own data, where nothing leaves a site: it may keep what a federation leaves at the hospitals.
"""

from typing import Any, TypeAlias

from medflare.core.message import Message
from medflare.federation.local.loop import run_local
from medflare.federation.outcome import StepReport
from medflare.tasks.cases import Cases

CURVES = "curves"  # in a results dict: model -> site -> [rounds of training, value of the task's metric on validation images] each
SCORES = "scores"  # in a results dict: site -> model -> `Cases.to_dict`
Models: TypeAlias = dict[str, dict[str, Message]]  # site -> role -> delivered model


def recorded_run(*arguments: Any, models: Models | None = None, **settings: Any) -> dict[str, Any]:
    """As `run_local`; the results dict has `CURVES` and `SCORES` too.

    Args:
        arguments: of `run_local`.
        models: takes the delivered models, where given.
        settings: of `run_local`.
    """
    curves: dict[str, dict[str, dict[int, float]]] = {}
    scores: dict[str, dict[str, dict[str, Any]]] = {}

    def observe(report: StepReport) -> None:
        for site, facts in report.facts.items():
            for model, value in (facts.get("validation") or {}).items():
                if value is not None:
                    curves.setdefault(model, {}).setdefault(site, {})[report.step.round] = round(value, 5)

    def delivered(site: str, role: str, model: Message, cases: Cases) -> None:
        scores.setdefault(site, {})[role] = cases.to_dict()
        if models is not None:
            models.setdefault(site, {})[role] = model

    results = run_local(*arguments, observe=observe, delivered=delivered, **settings)
    points = {model: {site: [[at, of[at]] for at in sorted(of)] for site, of in sites.items()} for model, sites in curves.items()}
    return results | {CURVES: points, SCORES: scores}
