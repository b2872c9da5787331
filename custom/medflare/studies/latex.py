"""The tables of a study for a paper, in LaTeX."""

from collections.abc import Sequence

import pandas as pd

from medflare.evaluation.presentation import UNDEFINED, format_metric, lower_is_better, metric_label
from medflare.studies.statistics import ALL_SITES
from medflare.studies.tables import StudyTables, spread
from medflare.studies.tasks_compared import ranking, task_means

_UNDEFINED = "--"
_MARKS = {1: r"\textbf{%s}", 2: r"\underline{%s}"}  # by rank in a column
_OF_DIFFERENCES = ("95 % over seeds", "95 % over patients", "p over seeds, Holm", "verdict")
_Columns = dict[str, tuple[str, str, str]]  # heading -> metric, role and site


def latex_tables(study: StudyTables) -> str:
    """A booktabs table of all metrics, means over the sites of a role, a table of every metric by
    site, and one of the differences to the first row with 95 % intervals.

    A row is what a row of the study deploys: mean ± standard deviation over seeds. The best mean of
    a column is bold, the second underlined.
    """
    means: _Columns = {}
    tables = {"means over sites": means}
    for metric in study.metrics:
        words = metric_label(metric)
        for role, site in study.places:
            tables.setdefault(words, {})[f"{site or 'mean'}, {role}"] = (metric, role, site)
            if site == ALL_SITES:
                means[f"{words}, {role}"] = (metric, role, site)
    parts = ["% needs \\usepackage{booktabs}; mean ± standard deviation over seeds\n"]
    for title, columns in tables.items():
        parts.append(f"% {title}\n{_table(study, columns)}")
    if study.metric in study.metrics:
        title = f"{metric_label(study.metric)}, differences, 95 % intervals"
        parts.append(f"% {title}\n{_differences(study)}")
    return "\n".join(parts)


def latex_ranking(studies: Sequence[StudyTables]) -> str:
    """A booktabs table of several tasks: means of the rows, and mean ranks."""
    headings, *lines = ranking(task_means(studies)).lines
    return _plain(pd.DataFrame(lines, columns=headings), left=1)


def _differences(study: StudyTables) -> str:
    headings, *lines = study.differences().lines
    frame = pd.DataFrame(lines, columns=headings)
    deployed = frame[frame["model"].str.contains("deployed")]
    return _plain(deployed[["method", "sites", headings[3], *_OF_DIFFERENCES]], left=2)


def _plain(frame: pd.DataFrame, left: int) -> str:
    """A booktabs table of texts; all columns but the first `left` ones are right-aligned."""
    styler = frame.replace(UNDEFINED, _UNDEFINED).style.hide(axis="index")
    styler.format(escape="latex").format_index(escape="latex", axis=1)
    alignment = "l" * left + "r" * (frame.shape[1] - left)
    return styler.to_latex(hrules=True, column_format=alignment)


def _table(study: StudyTables, columns: _Columns) -> str:
    table = pd.DataFrame(index=list(study.groups))
    for heading, (metric, role, site) in columns.items():
        texts = []
        means = []
        for label in study.groups:
            values = study.series(label, "deployed", role, metric, site)
            texts.append(spread(metric, values).replace("±", r"$\pm$"))
            means.append(float(format_metric(metric, values.mean())))  # ranked as printed
        ranks = pd.Series(means).rank(method="dense", ascending=lower_is_better(metric))
        marks = _MARKS if ranks.max() > 1 else {}
        pairs = zip(ranks, texts, strict=True)
        table[heading] = [marks.get(rank, "%s") % text for rank, text in pairs]
    styler = table.replace(UNDEFINED, _UNDEFINED).style
    styler.format_index(escape="latex").format_index(escape="latex", axis=1)
    return styler.to_latex(hrules=True, column_format="l" + "r" * len(columns))
