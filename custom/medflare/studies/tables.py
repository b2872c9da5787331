"""The tables of a study, each in Markdown."""

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property, partial

import pandas as pd

from medflare.evaluation.presentation import UNDEFINED, best_value, format_metric, label_metric
from medflare.evaluation.results import confusion
from medflare.federation.settings import CROSS_SITE
from medflare.studies.differences import delong_differences, differences, differences_within
from medflare.studies.markdown import Table, spread, table_unless_empty
from medflare.studies.references import SINGLE_SITE
from medflare.studies.statistics import (
    ALL_SITES,
    Groups,
    Results,
    all_runs,
    all_sites,
    pooled_values,
)
from medflare.studies.values import StudyValues, sign_of
from medflare.tasks.summaries import ALL

_PERSONAL = ""  # beside the sites that a selector recognized: the share of personal models
HARM = 0.02  # routing that ends this far below its start has done harm


class StudyTables(StudyValues):
    """The tables of a study, of all metrics or of some; `further`: title -> table, shown last."""

    def __init__(
        self,
        groups: Groups,
        metrics: Sequence[str] = (),
        further: Mapping[str, Table] | None = None,
    ) -> None:
        super().__init__(groups, metrics)
        self.further = further or {}

    @property
    def makers(self) -> dict[str, Callable[[], Table | None]]:
        """Title -> what makes the table: for every metric, the task's own first, what each site
        reached and what the mean hides; then, of the task's metric, paired differences to the first
        row and to training alone, areas under ROC curves, the selector and routing.
        """
        makers: dict[str, Callable[[], Table | None]] = {}
        for metric in self.metrics:
            makers[metric] = partial(self.sites, metric)
            makers[f"{metric}, what the mean hides"] = partial(self.summary, metric)
        if "auc_macro" in self.metrics:
            makers["AUC by class, DeLong's test"] = partial(delong_differences, self)
        if self.metric in self.metrics:
            title = f"{label_metric(self.metric)} by structure or class, deployed model"
            makers[title] = self.by_label
            makers[f"{self.metric}, differences"] = partial(differences, self)
            for row, runs in list(self.groups.items())[1:]:
                if runs[0]["method"] == SINGLE_SITE:
                    title = f"{self.metric}, differences to {row}"
                    makers[title] = partial(differences, self, row)
            makers[f"{self.metric}, differences within a row"] = partial(differences_within, self)
            makers[f"{self.metric}, cross-site"] = self.cross_site
            makers[f"{self.metric}, routing"] = self.routing
        makers["selector"] = self.selector
        return makers

    @cached_property
    def everything(self) -> dict[str, Table]:
        """Title -> table."""
        tables = {}
        for title, make in self.makers.items():
            table = make()
            if table is not None:
                tables[title] = table
        return {**tables, **self.further}

    def sites(self, metric: str) -> Table:
        """A line per row and model, a column per site and per mean of a role: mean ± standard
        deviation over seeds.

        The best mean of a column is bold, except those of `UNATTAINABLE` rows.
        """
        shown = self.equal_models(metric)
        means = pd.DataFrame([equal.values.mean(axis=1) for equal in shown if equal.is_attainable])
        best = {place: best_value(metric, row_means.dropna()) for place, row_means in means.items()}
        lines = [["method", "model", "selection", *self._headings(), "runs"]]
        for equal in shown:
            mean = equal.values.mean(axis=1)
            cells = equal.cells
            for place, values in equal.values.iterrows():
                cell = spread(metric, values)
                if equal.is_attainable and mean[place] == best.get(place):
                    cell = f"**{cell}**"
                cells.append(cell)
            lines.append([*cells, str(len(equal.runs))])
        return Table(lines, left=3)

    def summary(self, metric: str) -> Table:
        """A line per row, model and role: mean over sites, worst site, all images as of one site,
        sites below training alone, warnings.

        Warnings are the findings of its runs, see `warnings`.
        """
        headings = ["method", "model", "selection", "sites", "mean", "worst site", "all images"]
        lines = [[*headings, "below training alone", "warnings"]]
        for equal in self.equal_models(metric):
            gains = self.gains(equal.row, equal.models[0], metric)
            below = [site for site, gain in gains.items() if gain < 0]
            losses = f"{len(below)} of {len(gains)}"
            if below:
                losses += f" ({', '.join(below)})"
            for role in self.roles:
                sites = equal.values.loc[role].mean(axis=1).drop(ALL_SITES).dropna()
                if sites.empty:
                    continue
                worst = (sign_of(metric) * sites).idxmin()
                line = [
                    *equal.cells,
                    role,
                    spread(metric, equal.values.loc[(role, ALL_SITES)]),
                    f"{format_metric(metric, sites[worst])} ({worst})",
                    spread(metric, pooled_values(equal.runs, equal.models[0], metric, role)),
                    losses if gains and role == "inside" else UNDEFINED,
                    "; ".join(self.warnings(equal.row, equal.models, role)) or UNDEFINED,
                ]
                lines.append(line)
        return Table(lines, left=4)

    def by_label(self) -> Table | None:
        """A line per row and structure or class, a column per site and per mean of a role; None if
        there is at most one of them.
        """
        table = self.frame
        deployed = (table["label"] != ALL) & (table["model"] == "deployed")
        table = table[deployed & (table["metric"] == label_metric(self.metric))]
        if table["label"].nunique() < 2:
            return None
        keys = ["row", "label", "role", "seed"]
        # A site that is inside in several runs of a seed counts once.
        table = table.groupby([*keys, "site"], as_index=False, sort=False)["value"].mean()
        means = table.groupby(keys, as_index=False)["value"].mean().assign(site=ALL_SITES)
        keys.insert(3, "site")
        values = pd.concat([table, means]).groupby(keys)["value"].mean().unstack("seed")
        lines = [["method", "structure or class", *self._headings()]]
        for row, label in table[["row", "label"]].drop_duplicates().itertuples(index=False):
            places = values.reindex([(row, label, *place) for place in self.places])
            cells = [spread(self.metric, by_seed) for _, by_seed in places.iterrows()]
            lines.append([row, label, *cells])
        return Table(lines, left=2)

    def _headings(self) -> list[str]:
        headings = []
        for role, site in self.places:
            if site == ALL_SITES:
                headings.append(f"mean {role}")
            elif role == "inside":
                headings.append(site)
            else:
                headings.append(f"{site} ({role})")
        return headings

    def cross_site(self) -> Table | None:
        """Every site's model (rows) on every site's test images (columns), its own site in bold;
        None without `references.cross_site`.
        """
        sites = all_sites(all_runs(self.groups))
        lines = [["method", "model of", *sites, "runs"]]
        for row, runs in self.groups.items():
            metrics_by_owner = defaultdict(list)
            for run in runs:
                for owner, by_site in run.get(CROSS_SITE, {}).items():
                    metrics_by_owner[owner].append(by_site)
            for owner, run_metrics in sorted(metrics_by_owner.items()):
                rows = pd.DataFrame(run_metrics, columns=sites, dtype=float)
                cells = {site: spread(self.metric, rows[site]) for site in sites}
                if owner in cells:
                    cells[owner] = f"**{cells[owner]}**"
                lines.append([row, owner, *cells.values(), str(len(rows))])
        return table_unless_empty(lines, left=2)

    def selector(self) -> Table | None:
        """Balanced accuracy of each row's selector on test images, and how many images a personal
        model predicted; None without one.
        """
        recognized = defaultdict(list)  # of every run with a selector
        tested: set[str] = set()
        for row, runs in self.groups.items():
            for run in runs:
                table = confusion(run["sites"])
                if table:
                    tested |= table.keys()
                    recognized[row].append(_recognized(run, table))
        sites = sorted(tested)
        headings = ["method", "balanced accuracy", *(f"{site} recognised" for site in sites)]
        lines = [[*headings, "answered by a personal model", "runs"]]
        for row, fractions in recognized.items():
            columns = pd.DataFrame(fractions, columns=[*sites, _PERSONAL], dtype=float)
            cells = [spread("share", columns[sites].mean(axis=1))]
            cells += [spread("share", column) for _, column in columns.items()]
            lines.append([row, *cells, str(len(fractions))])
        return table_unless_empty(lines, left=1)

    def routing(self) -> Table | None:
        """Routing against its start at every left-out site: means, worst run, runs with harm, and
        how many of these have an event.
        """
        headings = ["method", "outside", "start", "end", "worst run", f"more than {HARM} below"]
        lines = [[*headings, "of these with an event", "runs"]]
        for row, runs in self.groups.items():
            if "mixture" not in self.models(row) or "outside" not in self.roles:
                continue
            reverted = set()  # site and seed
            for run in runs:
                for event in run["events"]:
                    if event["kind"] == "reverted":
                        reverted.add((event["site"], run["seed"]))
            values = {}
            for model in ("mixture", "deployed"):
                values[model] = self.by_site_and_seed(row, model, "outside", self.metric)
            moves = pd.DataFrame(values).dropna()
            for site, site_moves in moves.groupby(level=0, sort=False):
                lines.append([row, str(site), *_routing_cells(site_moves, reverted)])
            if len(moves):
                lines.append([row, "all", *_routing_cells(moves, reverted)])
        return table_unless_empty(lines, left=2)


def _routing_cells(moves: pd.DataFrame, reverted: Container[tuple[str, int]]) -> list[str]:
    """Moves: index (site, seed), columns "mixture", the start, and "deployed", the end."""
    gain = moves["deployed"] - moves["mixture"]
    harmed = gain.index[gain < -HARM]
    return [
        f"{moves['mixture'].mean():.3f}",
        f"{moves['deployed'].mean():.3f}",
        f"{gain.min():+.3f}",
        str(len(harmed)),
        str(sum(place in reverted for place in harmed)),
        str(len(moves)),
    ]


def _recognized(run: Results, table: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Site -> the fraction of its test images that the selector recognised; `_PERSONAL` -> that of
    all that a personal model predicted; empty without images.

    `table`: see `confusion`.
    """
    fractions = {}
    for site, row in table.items():
        images = sum(row.values())
        if images:
            fractions[site] = row.get(site, 0) / images
    reports = [run["sites"][site]["reports"]["deployed"] for site in table]
    counts = pd.DataFrame(reports).drop(columns="selector").sum()
    if counts.sum():
        fractions[_PERSONAL] = float(1 - counts.get("global", 0) / counts.sum())
    return fractions
