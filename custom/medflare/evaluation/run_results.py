"""The results of a run as an object: the dict of results.json, which a notebook shows as a page."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medflare.core.text import Json
from medflare.evaluation import presentation as text
from medflare.evaluation.figures import training_curves
from medflare.evaluation.findings import findings_of, level_sentence
from medflare.evaluation.report import template
from medflare.evaluation.results import ROLES


class RunResults(dict[str, Any]):
    """The content of results.json as a dict; Jupyter shows its table, findings and curves.

    Attributes:
        history: one mapping per step, see `results.append_round`.
        folder: where results.json and report.html are; None if nothing was written.
    """

    def __init__(self, results: Json, history: Sequence[Json] = (), folder: Path | None = None):
        super().__init__(results)
        self.history = history
        self.folder = folder

    def __repr__(self) -> str:
        """The run and the deployed model's mean of the task's metric; `dict(results)` has
        everything.
        """
        rounds = text.with_number(self["rounds"], "round")
        about = f"{self['method']} on {self['task']}, {rounds}, seed {self['seed']}"
        parts = [f"{about}: {text.outcome(self)}"]
        metric = text.task_metric(self)
        for role in ROLES:
            value = self["mean"][role]["deployed"].get(metric)
            if value is not None:
                number = text.format_metric(metric, value)
                parts.append(f"{text.metric_label(metric)} {number} {role}")
        if self.folder is not None:
            parts.append(f"folder {self.folder}")
        return f"<{'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        """The table of results, the findings, and the curves as inline SVG."""
        return template("notebook.html").render(
            title=repr(self)[1:-1],
            results=self,
            level=level_sentence(self),
            findings=findings_of(self),
            curves=training_curves(self, self.history),
        )


def in_notebook() -> bool:
    """Whether an IPython kernel runs this code, so that what is printed appears below a cell."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    return getattr(ipython.get_ipython(), "kernel", None) is not None
