"""Rows over several tasks, against the worked example of Demšar, JMLR 7, 2006, Sec. 3.2."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import friedmanchisquare, wilcoxon

from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.figures import ranks_drawing
from medflare.studies.study import write_run
from medflare.studies.tables import StudyTables
from medflare.studies.tasks_compared import critical_difference, ranks_of, task_means, tasks_report

# Table 6 of the paper; the tie of "voting" is one of rounding, its ranks are 2 and 3.
AREAS = """
adult 0.763 0.768 0.771 0.798
breast-cancer 0.599 0.591 0.590 0.569
wisconsin 0.954 0.971 0.968 0.967
cmc 0.628 0.661 0.654 0.657
ionosphere 0.882 0.888 0.886 0.898
iris 0.936 0.931 0.916 0.931
liver 0.661 0.668 0.609 0.685
lung 0.583 0.583 0.563 0.625
lymphography 0.775 0.838 0.866 0.875
mushroom 1.000 1.000 1.000 1.000
tumor 0.940 0.962 0.965 0.962
rheum 0.619 0.666 0.614 0.669
voting 0.972 0.981 0.9751 0.975
wine 0.957 0.978 0.946 0.970
"""
ROWS = ("C4.5", "C4.5+m", "C4.5+cf", "C4.5+m+cf")


def example() -> pd.DataFrame:
    lines = [line.split() for line in AREAS.split("\n") if line]
    index = pd.MultiIndex.from_tuples([(name, "auc_macro") for name, *_ in lines])
    return pd.DataFrame([list(map(float, values)) for _, *values in lines], index, list(ROWS))


def study(record: RunRecord, task: str, **dice: float) -> StudyTables:
    assert record.task is not None
    record = dataclasses.replace(record, task=dataclasses.replace(record.task, name=task))
    groups = {}
    for label, value in dice.items():
        sites = {"A": SiteRecord("inside", metrics={"deployed": {"dice": value, "hd95": value}})}
        groups[label] = [build_results(dataclasses.replace(record, method=label, sites=sites))]
    return StudyTables(groups)


def test_the_example_of_the_paper() -> None:
    ranks = ranks_of(example()).mean()
    assert ranks.round(3).tolist() == [3.143, 2.0, 2.893, 1.964]
    tasks = 14
    rows = 4
    chi2 = 12 * tasks / (rows * (rows + 1)) * (np.sum(ranks**2) - rows * (rows + 1) ** 2 / 4)
    assert chi2 == pytest.approx(9.28, abs=0.01), "as printed, without correction for ties"
    # SciPy divides by 1 - sum(t^3 - t) / (N k (k^2 - 1)): three pairs and one tie of four.
    corrected = friedmanchisquare(*example().to_numpy().T).statistic
    assert corrected * (1 - (3 * 6 + 60) / (14 * 4 * 15)) == pytest.approx(chi2)
    assert critical_difference(tasks, rows) == pytest.approx(1.25, abs=0.005)
    # Demsar: "not powerful enough to detect any significant differences" at 5 %.
    assert max(ranks) - min(ranks) < critical_difference(tasks, rows)


def test_lower_is_better_where_a_metric_says_so() -> None:
    means = pd.DataFrame({"a": [0.9, 9.0], "b": [0.5, 5.0]}, [("x", "dice"), ("x", "hd95")])
    assert ranks_of(means).mean().to_dict() == {"a": 1.5, "b": 1.5}


def test_the_report_says_what_few_tasks_could_have_shown(record: RunRecord) -> None:
    values = {"one": (0.5, 0.6, 0.7), "two": (0.4, 0.6, 0.5), "three": (0.1, 0.2, 0.3)}
    studies = []
    for task, (fedavg, fedsm, prr) in values.items():
        studies.append(study(record, task, fedavg=fedavg, fedsm=fedsm, prr=prr, constant=0.0))
    report = tasks_report(studies)
    lines = report.splitlines()
    assert "| fedsm | 0.600 | 0.600 | 0.200 | 1.67 |" in lines
    assert "| prr | 0.700 | 0.500 | 0.300 | 1.33 |" in lines
    assert "| fedavg | 0.500 | 0.400 | 0.100 | 3.00 |" in lines and "constant" not in report
    chi2, p = friedmanchisquare(*np.array(list(values.values())).T)
    assert f"chi2 {chi2:.2f}, p {p:.3f}." in report
    # q of three rows is 3.314 / sqrt(2): CD = 2.343 sqrt(12 / 18).
    assert "differ at 5 % from 1.91 on" in report
    assert "smallest p of Wilcoxon's test is 0.250: no pair" in report
    assert "differ by at most 2, so Nemenyi's test can find a difference." in report
    p = wilcoxon([0.2, 0.1, 0.2]).pvalue
    assert f"| prr | fedavg | 1.67 | {p:.3f} | {3 * p:.3f} |" in lines
    with pytest.raises(ConfigError, match="task one is in two studies"):
        task_means([studies[0], studies[0]])
    with pytest.raises(ConfigError, match="fewer than two rows"):
        task_means([studies[0], study(record, "four", fedavg=0.5, other=0.5)])
    with_other = [studies[0], study(record, "four", fedavg=0.5, fedsm=0.5, other=0.5)]
    assert "Not in all studies, or undefined: other, prr." in tasks_report(with_other)


def test_the_oracle_of_outside_sites_is_not_called_missing(record: RunRecord) -> None:
    rows = {"fedavg": 0.5, "fedsm": 0.6, "participating": 0.7}
    report = tasks_report([study(record, "one", **rows), study(record, "two", **rows)])
    assert "participating" not in report


def test_six_tasks_can_show_a_pair(record: RunRecord) -> None:
    studies = [study(record, f"task{i}", fedavg=0.5, fedsm=0.6 + i / 100) for i in range(6)]
    report = tasks_report(studies)
    assert "| fedsm | fedavg | 1.00 | 0.031 | 0.031 |" in report
    assert "smallest p" not in report and "Friedman" not in report


def test_the_command_compares_folders(
    record: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for task in ("one", "two"):
        folders.append(str(tmp_path / task))
        for label, runs in study(record, task, fedavg=0.5, fedsm=0.6).groups.items():
            write_run(tmp_path / task, f"{label}/seed7", runs[0])
    figures = tmp_path / "figures"
    assert main(["study", "table", *folders, "--figures", str(figures)]) == 0
    assert "# 2 tasks, 2 rows" in capsys.readouterr().out
    pdf = (figures / "ranks.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf
    assert main(["study", "table", *folders, "--latex"]) == 0
    printed = capsys.readouterr().out
    assert r"fedsm & \textbf{0.600} & \textbf{0.600} & \textbf{1.00} \\" in printed
    assert r"fedavg & \underline{0.500} & \underline{0.500} & \underline{2.00} \\" in printed
    assert main(["study", "table", *folders, "--csv", "all.csv"]) != 0
    assert "--csv is of one study" in capsys.readouterr().err


@pytest.mark.figures
def test_the_diagram_names_every_row_and_the_critical_difference() -> None:
    svg = ranks_drawing(ranks_of(example()), 1.25).svg("ranks") or ""
    places = [svg.index(f">{label}<") for label in ("C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5")]
    assert places == sorted(places), "the best mean rank is first"
    assert "critical difference 1.25" in svg
