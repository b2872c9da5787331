"""The results of a run as an object: the dict of results.json, which a notebook shows as a page."""

import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from medflare.evaluation import presentation as text
from medflare.evaluation.figures import training_curves
from medflare.evaluation.results import ROLES
from medflare.evaluation.verdicts import findings_of, verdict


class RunResults(dict[str, Any]):
    """The content of results.json as a dict; Jupyter shows its table, findings and curves.

    Attributes:
        history: one mapping per step, see `results.append_round`.
        folder: where results.json and report.html are; None if nothing was written.
    """

    def __init__(self, results: Mapping[str, Any], history: Sequence[Mapping[str, Any]] = (), folder: Path | None = None):
        super().__init__(results)
        self.history, self.folder = history, folder

    def __repr__(self) -> str:
        """The run and the deployed model's mean of the task's metric; `dict(results)` has everything."""
        about = f"{self['method']} on {self['task']}, {text.counted(self['rounds'], 'round')}, seed {self['seed']}: {self['status']}"
        parts = [about + (f": {self['reason']}" if self["reason"] else "")]
        metric = self["configuration"]["task"].get("metric", "")
        for role in ROLES:
            value = self["mean"][role]["deployed"].get(metric)
            if value is not None:
                parts.append(f"{text.metric_label(metric)} {text.format_metric(metric, value)} {role}")
        if self.folder is not None:
            parts.append(f"folder {self.folder}")
        return f"<{'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        """The table of results, the findings, and the curves as inline SVG."""
        parts = [f"<p><b>{escape(repr(self)[1:-1])}</b></p>", self._table()]
        if sentence := verdict(self):
            parts.append(f"<p>{escape(sentence)}</p>")
        findings = [f"<li>{escape(finding.line)}</li>" for finding in findings_of(self)]
        if findings:
            parts.append(f"<ul>{''.join(findings)}</ul>")
        curves = training_curves(self, self.history)
        if curves:
            parts.append(f'<div style="max-width: 30em">{curves}</div>')
        return "\n".join(parts)

    def _table(self) -> str:
        """A row for each site and mean, a column for each metric and model."""
        metrics, columns = text.metric_names(self), text.model_columns(self)
        headings = ["site", "role"]
        for metric in metrics:
            headings += [f"{text.metric_label(metric)}, {heading}" for heading in columns]
        sites = text.ordered_sites(self)
        rows = [(name, site["role"], site["metrics"]) for name, site in sites.items()]
        roles = [site["role"] for site in sites.values()]
        rows += [("mean", role, self["mean"][role]) for role in ROLES if roles.count(role) > 1]
        lines = ["".join(f"<th>{escape(heading)}</th>" for heading in headings)]
        for name, role, models in rows:
            cells = [name, role]
            for metric in metrics:
                cells += [text.format_metric(metric, models[model][metric]) for model in columns.values()]
            lines.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def in_notebook() -> bool:
    """Whether an IPython kernel runs this code, so that what is printed appears below a cell."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
