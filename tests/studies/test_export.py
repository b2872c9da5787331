"""A study as CSV files against numbers worked out by hand."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import t as student

from medflare.cli import main
from medflare.cli.run import write_csv
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.export import default_target, summary_table
from medflare.studies.statistics import Results
from medflare.studies.study import write_run
from medflare.studies.tables import StudyTables


def run(record: RunRecord, method: str, seed: int, dice: float, curve: list[float]) -> Results:
    """Dice of one site with two structures, 3 MB up, 1 MB down, and a validation curve."""
    site = SiteRecord(
        "inside",
        metrics={"deployed": {"dice": dice, "hd95": 5.0}},
        by_label={"deployed": {"disc": {"dice": dice}, "cup": {"dice": dice}}},
    )
    candidate = {"round": 1, "value": 0.5, "votes": {"A": 0.5, "B": 0.5}}
    results = build_results(
        dataclasses.replace(
            record,
            method=method,
            seed=seed,
            sites={"A": site},
            up_bytes=3_000_000,
            down_bytes=1_000_000,
            seconds={"training": 2.0, "total": 4.0 + seed},
            hyper={"site": {}, "server": {"selection": "median"}},
            model_selection={"global": {"round": 1, "rule": "median", "candidates": [candidate]}},
        )
    )
    points = [[place, value] for place, value in enumerate(curve)]
    label = {"settings": {"label": method}}
    return {
        **results,
        "configuration": {**results["configuration"], **label},
        "curves": {"global": {"A": points}},
    }


@pytest.fixture
def groups(record: RunRecord) -> dict[str, list[Results]]:
    slow = [0.1, 0.2, 0.3, 0.4, 0.4]
    return {
        "fedavg": [run(record, "fedavg", seed, 0.5 + seed / 10, slow) for seed in range(3)],
        "fedsm": [run(record, "fedsm", 0, 0.8, [0.1, 0.39, 0.5, 0.6, 0.6])],
    }


def test_a_line_for_every_row(groups: dict[str, list[Results]]) -> None:
    study = StudyTables(groups)
    value, source = default_target(study)
    assert value == pytest.approx(0.38) and source == "95% of fedavg"
    table = summary_table(study).set_index("method")
    fedavg = table.loc["fedavg"]
    assert fedavg["dice_inside"] == pytest.approx(0.6)
    low, high = student.interval(0.95, 2, 0.6, 0.1 / 3**0.5)  # of 0.5, 0.6, 0.7
    assert (fedavg["dice_inside_low"], fedavg["dice_inside_high"]) == pytest.approx((low, high))
    assert pd.isna(table.loc["fedsm", "dice_inside_low"]), "one seed"
    assert (fedavg["seeds"], fedavg["runs"], fedavg["rounds"]) == (3, 3, "2")
    assert (fedavg["traffic_MB"], fedavg["wall_seconds"]) == (4.0, 5.0)
    reached = table["rounds_to_dice_0.380 (95% of fedavg)"]
    assert reached.to_dict() == {"fedavg": 3, "fedsm": 1}
    assert fedavg["selection"] == "best dice, median of sites"
    assert fedavg["torch"] == groups["fedavg"][0]["versions"]["torch"]
    assert "peak_memory_MB" not in table and "processor_seconds" not in table
    without = StudyTables({"fedsm": groups["fedsm"]})
    value, source = default_target(without)
    assert value == pytest.approx(0.57) and source == "95% of fedsm"
    oracle = [{**run, "method": "participating"} for run in groups["fedsm"]]
    _, source = default_target(StudyTables({"participating": oracle, "fedsm": groups["fedsm"]}))
    assert source == "95% of fedsm", "no method has to reach an oracle"
    assert pd.isna(summary_table(without, 0.7)["rounds_to_dice_0.700 (set)"][0])


def test_a_failed_run_is_no_run_of_its_row(groups: dict[str, list[Results]]) -> None:
    failed = {"status": "FAILED", "reason": "no site", "traffic": {}, "seconds": {"total": 0.0}}
    first, *others = [
        {**run, "seconds": {"total": 9.0, "processor": 3.0}} for run in groups["fedavg"]
    ]
    broken = {"fedavg": [{**first, **failed}, *others], "fedsm": [{**groups["fedsm"][0], **failed}]}
    table = summary_table(StudyTables(broken)).set_index("method")
    columns = ["seeds", "runs", "traffic_MB", "processor_seconds"]
    assert table.loc["fedavg", columns].tolist() == [2, 2, 4.0, 3.0]
    assert table.loc["fedsm", "runs"] == table.loc["fedsm", "seeds"] == 0
    assert table.loc["fedsm", ["traffic_MB", "processor_seconds"]].isna().all()


def test_processor_time_and_memory_if_they_are_recorded(groups: dict[str, list[Results]]) -> None:
    recorded = [
        {**run, "seconds": {"total": 9.0, "processor": 3.0}, "peak_memory_bytes": 5_000_000}
        for run in groups["fedsm"]
    ]
    line = summary_table(StudyTables({"fedsm": recorded})).iloc[0]
    assert (line["processor_seconds"], line["peak_memory_MB"]) == (3.0, 5.0)
    assert "wall_seconds" not in line
    both = summary_table(StudyTables({**groups, "fedsm": recorded}))
    assert "processor_seconds" not in both, "not recorded by all runs"


def test_the_command_writes_both_tables(
    groups: dict[str, list[Results]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label, runs in groups.items():
        for of_seed in runs:
            write_run(tmp_path, f"{label}/seed{of_seed['seed']}", of_seed)
    files = {name: tmp_path / f"{name}.csv" for name in ("csv", "summary")}
    options = ["--csv", str(files["csv"]), "--summary", str(files["summary"])]
    command = ["study", "table", str(tmp_path), "--metrics", "dice", *options]
    assert main([*command, "--target", "0.5"]) == 0
    long = pd.read_csv(files["csv"])
    assert set(long["metric"]) == {"dice"} and set(long["label"].dropna()) == {"disc", "cup"}
    summary = pd.read_csv(files["summary"])
    assert list(summary["method"]) == ["fedavg", "fedsm"] and "hd95_inside" not in summary
    write_csv(tmp_path / "versions.csv", pd.DataFrame({"=HYPERLINK()": ["=1+1"]}))
    assert (tmp_path / "versions.csv").read_text() == "'=HYPERLINK()\n'=1+1\n"
    assert summary["rounds_to_dice_0.500 (set)"].tolist()[1] == 2
    capsys.readouterr()
    assert main(["study", "table", str(tmp_path), "--target", "0.5"]) != 0
    assert "--summary" in capsys.readouterr().err
