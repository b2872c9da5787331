"""The tables of a study for a paper, in LaTeX."""

import math
from collections.abc import Collection, Sequence

import pandas as pd
from pandas.io.formats.style import Styler

from medflare.evaluation.presentation import UNDEFINED, format_metric, lower_is_better, metric_label
from medflare.studies.differences import differences
from medflare.studies.markdown import spread
from medflare.studies.references import PARTICIPATING
from medflare.studies.statistics import ALL_SITES
from medflare.studies.tables import StudyTables
from medflare.studies.tasks_compared import mean_ranks, task_means

_MARKS = {1: r"\textbf{%s}", 2: r"\underline{%s}"}  # by rank in a column
_OF_DIFFERENCES = ("95 % over seeds", "95 % over patients", "p over seeds, Holm", "verdict")
_Columns = dict[str, tuple[str, str, str]]  # heading -> metric, role and site


def latex_tables(study: StudyTables) -> str:
    """A booktabs table of all metrics, means over the sites of a role, a table of every metric by
    site, and one of the differences to the first row with 95 % intervals.

    A row is what a row of the study deploys: mean ± standard deviation over seeds. The best mean of
    a column is bold, the second underlined, except the oracle of outside sites.
    """
    means: _Columns = {}
    tables = {"means over sites": means}
    for metric in study.metrics:
        heading = metric_label(metric)
        for role, site in study.places:
            tables.setdefault(heading, {})[f"{site or 'mean'}, {role}"] = (metric, role, site)
            if site == ALL_SITES:
                means[f"{heading}, {role}"] = (metric, role, site)
    parts = ["% needs \\usepackage{booktabs}; mean ± standard deviation over seeds\n"]
    for title, columns in tables.items():
        parts.append(f"% {title}\n{_table(study, columns)}")
    if study.metric in study.metrics:
        title = f"{metric_label(study.metric)}, differences, 95 % intervals"
        parts.append(f"% {title}\n{_differences(study)}")
    return "\n".join(parts)


def latex_ranking(studies: Sequence[StudyTables]) -> str:
    """A booktabs table of several tasks: mean ± standard deviation over seeds by row and task, and
    mean ranks; the best of a column is bold, the second underlined.
    """
    means = task_means(studies)
    ranks = mean_ranks(means)
    table = pd.DataFrame(index=list(ranks.index))
    for study, (task, metric) in zip(studies, means.index, strict=True):
        values = [study.series(row, study.roles[0], metric) for row in table.index]
        table[f"{task}, {metric_label(metric)}"] = _marked_means(metric, values)
    texts = [f"{rank:.2f}" for rank in ranks]
    table["mean rank"] = _marked(texts, list(map(float, texts)), lower_is_best=True)
    return _latex(table.style, "l" + "r" * table.shape[1])


def _differences(study: StudyTables) -> str:
    headings, *lines = differences(study).lines
    frame = pd.DataFrame(lines, columns=headings)
    deployed = frame[frame["model"].str.contains("deployed")]
    table = deployed[["method", "sites", headings[3], *_OF_DIFFERENCES]]
    styler = table.style.hide(axis="index").format(escape="latex")
    return _latex(styler, "ll" + "r" * (table.shape[1] - 2))


def _table(study: StudyTables, columns: _Columns) -> str:
    table = pd.DataFrame(index=list(study.groups))
    methods = [runs[0]["method"] for runs in study.groups.values()]
    oracles = [number for number, method in enumerate(methods) if method == PARTICIPATING]
    for heading, (metric, role, site) in columns.items():
        values = [study.series(row, role, metric, site) for row in study.groups]
        table[heading] = _marked_means(metric, values, oracles)
    return _latex(table.style, "l" + "r" * len(columns))


def _marked_means(
    metric: str, values: Sequence["pd.Series[float]"], oracles: Collection[int] = ()
) -> list[str]:
    """The cells of a column: mean ± standard deviation over the seeds of each row; `oracles`:
    numbers of rows without a rank.
    """
    texts = [spread(metric, by_seed).replace("±", r"$\pm$") for by_seed in values]
    means = [float(format_metric(metric, by_seed.mean())) for by_seed in values]
    for number in oracles:
        means[number] = math.nan
    return _marked(texts, means, lower_is_best=lower_is_better(metric))


def _marked(texts: Sequence[str], values: Sequence[float], *, lower_is_best: bool) -> list[str]:
    """The texts of a column, of which the best is bold and the second underlined; `values`: as
    printed.
    """
    ranks = pd.Series(values).rank(method="dense", ascending=lower_is_best)
    marks = _MARKS if ranks.max() > 1 else {}
    return [marks.get(rank, "%s") % text for rank, text in zip(ranks, texts, strict=True)]


def _latex(styler: Styler, alignment: str) -> str:
    """A table with cells in LaTeX; the index and the headings are plain text."""
    styler.format_index(escape="latex").format_index(escape="latex", axis=1)
    text = styler.to_latex(hrules=True, column_format=alignment)
    return text.replace(UNDEFINED, "--")
