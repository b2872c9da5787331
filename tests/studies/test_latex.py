"""Tables of a study in LaTeX against numbers worked out by hand."""

import dataclasses
from pathlib import Path

import pytest

from medflare.cli import main
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.latex import latex_tables
from medflare.studies.statistics import Results
from medflare.studies.study import write_run
from medflare.studies.tables import StudyTables


def row(record: RunRecord, *values: tuple[float, float | None]) -> list[Results]:
    """A run for each seed with Dice and HD95 at the site a_1."""
    runs: list[Results] = []
    for seed, (dice, hd95) in enumerate(values):
        metrics = {"deployed": {"dice": dice, "hd95": hd95}}
        sites = {"a_1": SiteRecord("inside", metrics=metrics)}
        runs.append(build_results(dataclasses.replace(record, seed=seed, sites=sites)))
    return runs


@pytest.fixture
def groups(record: RunRecord) -> dict[str, list[Results]]:
    return {
        "fedavg:a_b=1": row(record, (0.5, 4.0), (0.7, 6.0)),
        "fedsm": row(record, (0.8, 9.0), (0.8, 9.0)),
        "50% & more": row(record, (0.1, None), (0.1, None)),
    }


def test_means_the_best_bold_the_second_underlined(groups: dict[str, list[Results]]) -> None:
    text = latex_tables(StudyTables(groups, ["dice", "hd95"]))
    means, by_dice, by_hd95, differences = text.split("\\begin{tabular}")[1:]
    # fedsm - fedavg: 0.3 and 0.1, mean 0.2, t(0.975, 1) = 12.706, error 0.1.
    assert r"fedsm & inside & +0.200 & -1.071 to +1.471 & -- &" in differences
    assert r"95 \% over seeds" in differences
    assert means.splitlines()[:6] == [
        "{lrr}",
        r"\toprule",
        r" & Dice, inside & HD95 (px), inside \\",
        r"\midrule",
        # 0.5 and 0.7: standard deviation 0.141; HD95 is better if it is lower.
        r"fedavg:a\_b=1 & \underline{0.600 $\pm$ 0.141} & \textbf{5.0 $\pm$ 1.4} \\",
        r"fedsm & \textbf{0.800 $\pm$ 0.000} & \underline{9.0 $\pm$ 0.0} \\",
    ]
    assert r"50\% \& more & 0.100 $\pm$ 0.000 & -- \\" in means and r"\bottomrule" in means
    assert r" & a\_1, inside & mean, inside \\" in by_dice and "5.0" not in by_dice
    assert "0.600" not in by_hd95


def test_means_that_are_printed_alike_are_marked_alike(record: RunRecord) -> None:
    groups = {"fedavg": row(record, (0.5, 4.0)), "fedsm": row(record, (0.5001, 4.0))}
    text = latex_tables(StudyTables(groups, ["dice"]))
    assert "0.500" in text and "textbf" not in text and "underline" not in text


def test_an_oracle_is_not_the_best(record: RunRecord) -> None:
    record = dataclasses.replace(record, method="fedavg")
    oracle = dataclasses.replace(record, method="participating")
    groups = {
        "fedavg": row(record, (0.5, 4.0)),
        "participating": row(oracle, (0.9, 1.0)),
        "fedsm": row(record, (0.6, 5.0)),
    }
    means = latex_tables(StudyTables(groups, ["dice"])).split("\\begin{tabular}")[1]
    assert r"participating & 0.900 \\" in means
    assert r"fedavg & \underline{0.500} \\" in means and r"fedsm & \textbf{0.600} \\" in means


def test_the_command_prints_latex_of_some_metrics(
    groups: dict[str, list[Results]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in groups["fedsm"]:
        write_run(tmp_path, f"fedsm/seed{run['seed']}", run)
    assert main(["study", "table", str(tmp_path), "--latex", "--metrics", "hd95"]) == 0
    printed = capsys.readouterr().out
    assert r"\toprule" in printed and "HD95" in printed
    assert "Dice" not in printed and "## " not in printed
    assert main(["study", "table", str(tmp_path), "--metrics", "hd59"]) != 0
    assert "did you mean hd95" in capsys.readouterr().err
