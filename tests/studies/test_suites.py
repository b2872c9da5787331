"""Suites: the rows of a paper's table are run, kept, and shown beside the paper's numbers with every setting that differs."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from helpers.fixture_types import SiteOf
from helpers.small_tasks import SEGMENTATION
from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.data.mechanisms import photographs
from medflare.evaluation.presentation import UNDEFINED
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.networks.dry_run import check_network
from medflare.preparation.dataset_import.papers.catalogue import PREPARATIONS
from medflare.studies.candidates import Candidate
from medflare.studies.references import REFERENCES
from medflare.studies.study import read_runs
from medflare.studies.suites import MEAN, beside_the_paper, load_suite, suites
from medflare.tasks.config import TaskConfig, load_task

MECHANISMS = tuple(name for name in suites() if name.startswith("mechanisms/"))
PAPER_TABLES = tuple(name for name in suites() if name not in MECHANISMS)
ROUTING: dict[str, str] = {  # row -> our model
    "FedAvg, batch statistics": "batch_statistics",
    "Uniform mixture": "mixture",
    "Uniform mixture, running statistics": "mixture_running",
}
TABLE2: dict[str, str] = {"Average": "personal/*", "Ensemble": "ensemble", "Tent": "tent"}
SUITES_OF_ROUTING = (
    "grace_table3_isic",
    "grace_table3_prostate",
    "iop_table2_fundus",
    "iop_table2_prostate",
    "iop_table3",
)
# Training alone gives no model to the outside sites in the columns, and these papers do not ask how it is inside.
WITHOUT_TRAINING_ALONE = {
    *(f"feddag_table{table}" for table in range(1, 6)),
    *(f"grace_table4g_{data}" for data in ("isic", "prostate")),  # grace_table4p_* has it
    *SUITES_OF_ROUTING,
}
TINY: dict[str, Any] = {
    "paper": "A paper",
    "table": "Table 1",
    "data": "none",
    "sites": ["A", "B"],
    "methods": {"FedAvg": "fedavg", "Blind": "constant"},
    "settings": {"rounds": 1, "metric": "dice", "percent": True},
    "seeds": [0, 1],
    "numbers": {"FedAvg": {"A": 80.5, "mean": 81}, "Theirs": {"mean": 82.25}, "Blind": {}},
    "source": "Table 1, column Dice",
    "differences": ["images are synthetic"],
}


def written(folder: Path, **changes: Any) -> str:
    """A JSON file of `TINY` with some settings changed."""
    task = folder / "task.json"
    suite = folder / "suite.json"
    task.write_text(json.dumps(SEGMENTATION))
    suite.write_text(json.dumps({**TINY, "task": str(task), **changes}))
    return str(suite)


CHECKED: set[str] = set()


def check(label: str, task: TaskConfig) -> None:
    """Raises ConfigError if a task cannot have a row.

    Rows whose methods differ in numbers alone are checked once, and so are tasks with the same network and kind of target: each
    check builds networks.
    """
    row = Candidate.parse(label)
    key = [row.trained_as if row.method in REFERENCES else row.method]
    key += [str(row.site_algorithm), str(row.server_algorithm)]
    key += [json.dumps(dict(task.network)), task.kind, task.target]
    for values in row.hyper.values():
        key += [
            f"{name}={value}" for name, value in values.items() if type(value) not in (int, float)
        ]
    identity = " ".join(key)
    if identity not in CHECKED:
        row.check(task)
        CHECKED.add(identity)


@pytest.mark.parametrize("name", sorted({load_suite(name).task for name in PAPER_TABLES}))
def test_every_task_of_a_suite_fits_its_network(name: str) -> None:
    check_network(load_task(name))


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_every_suite_can_run(name: str) -> None:
    suite = load_suite(name)
    task = load_task(load_suite(name).task)
    for text in suite.methods.values():
        check(text, task)
    preparation = PREPARATIONS[suite.data]
    assert set(suite.sites) <= set(preparation.counts) or preparation.name in (
        "camelyon17",
        "gdrbench",
        "prostate_fedsm",
    )
    assert preparation.kind == task.kind and suite.settings.metric in task.test_metrics
    assert preparation.classes in ((), task.labels)
    assert suite.settings.model in ("deployed", "global")
    assert suite.source.startswith("Table")
    assert (
        any(suite.numbers[row] for row in suite.methods)
        or "numbers are not legible" in suite.source
    )


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_every_table_of_a_paper_holds_what_its_method_has_to_beat(name: str) -> None:
    suite = load_suite(name)
    rows = set(suite.methods.values())
    nulls = {"constant", "equal-compute"}
    if suite.settings.role == "outside":
        nulls.add("augmentation")
        if any(label.startswith("iop_fl") for label in rows):
            nulls |= {"iop_fl:comparisons=true", "iop_fl:objective=paper"}
    if name not in WITHOUT_TRAINING_ALONE:
        alone_as_prr = "single-site:method=prr,halve_every=0"  # with the method's loss and deputy
        nulls.add(alone_as_prr if suite.paper.startswith("PRR") else "single-site")
    assert nulls <= rows


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_suite_of_a_mechanism_can_run(name: str) -> None:
    suite = load_suite(name)
    task = load_task(suite.task)
    for text in suite.methods.values():
        check(text, task)
    assert task.embedded == suite.task and suite.settings.metric in task.test_metrics
    for site in suite.sites:
        splits = Counter(image.split for image in photographs(task.embedded, site))
        assert set(splits) == {"training", "validation", "test"}
    assert not suite.numbers and not suite.data
    assert {"fedavg", "constant", "single-site"} <= set(suite.methods.values())


def test_a_suite_of_a_mechanism_prints_the_tables_of_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = {"FedAvg": "fedavg", "Blind": "constant"}
    suite = {
        "paper": "A paper",
        "task": "mechanisms/two_disks",
        "sites": ["A", "B", "X"],
        "methods": methods,
        "seeds": [0],
    }
    suite["settings"] = {"rounds": 1, "metric": "dice", "leave_out": ["X"], "role": "outside"}
    (tmp_path / "suite.json").write_text(json.dumps(suite))
    out = tmp_path / "out"
    assert main(["study", "--suite", str(tmp_path / "suite.json"), "--out", str(out)]) == 0
    assert (out / "table.md").read_text() in capsys.readouterr().out
    assert not (out / "beside_the_paper.md").exists()
    runs = read_runs(out)
    assert {name: site["role"] for name, site in runs["fedavg/seed0-X"]["sites"].items()} == {
        "A": "inside",
        "B": "inside",
        "X": "outside",
    }


def test_the_documentation_names_every_suite() -> None:
    page = (Path(__file__).parents[2] / "docs" / "papers.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1]
        for line in page.split("\n## Suites\n")[1].splitlines()
        if line.startswith("| `")
    ]
    assert set(re.findall(r"`([\w/]+)`", " ".join(rows))) == set(suites())


@pytest.mark.parametrize("name", SUITES_OF_ROUTING)
def test_suites_of_routing_hold_its_controls(name: str) -> None:
    suite = load_suite(name)
    expected = {**TABLE2, **ROUTING} if name.startswith("iop_table2") else ROUTING
    assert suite.models == expected
    assert {suite.methods[row] for row in suite.models} == {"iop_fl:comparisons=true"}


def test_means_in_the_suites_are_means_of_their_columns() -> None:
    for name in suites():
        suite = load_suite(name)
        for row, numbers in suite.numbers.items():
            if set(numbers) == {*suite.sites, MEAN}:
                mean = sum(value for column, value in numbers.items() if column != MEAN) / len(
                    suite.sites
                )
                assert mean == pytest.approx(numbers[MEAN], rel=7e-3), f"{name}, {row}"


def beside(out: Path) -> tuple[str, list[list[str]]]:
    """The numbers beside the paper's as text, and the cells of their table."""
    text = (out / "beside_the_paper.md").read_text()
    return text, cells(text)


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_suite_runs_and_resumes(
    tmp_path: Path, make_site: SiteOf, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ABC":
        make_site(name=name)
    run = ["study", "--data-root", str(tmp_path), "--suite", written(tmp_path)]
    out = tmp_path / "out"
    assert main([*run, "--out", str(out)]) == 0
    assert "[4/4]" in capsys.readouterr().out
    table, lines = beside(out)
    assert lines[0] == ["row", "of", "A", MEAN]
    assert lines[2] == ["FedAvg", "paper", "80.50", "81.00"] and lines[3][:2] == ["", "fedavg"]
    assert [line[:2] for line in lines[4:]] == [
        ["Theirs", "paper"],
        ["Blind", "paper"],
        ["", "constant"],
    ]
    runs = [read_runs(out)[f"fedavg/seed{seed}"] for seed in (0, 1)]
    ours = [run["sites"]["A"]["metrics"]["deployed"]["dice"] for run in runs]
    assert (
        lines[3][2].startswith(f"{50 * sum(ours):.2f} [")
        and "- images are synthetic\n" in table
        and "the suite has" not in table
    )
    assert main([*run, "--out", str(out), "--seeds", "0"]) == 0
    again = capsys.readouterr().out
    assert (
        "[1/" not in again and "- seeds: 0, the suite has 0, 1" in again and "rounds:" not in again
    )
    options = ["--seeds", "0", "--set", "task.batch_size=8", "--rounds", "2"]
    assert main([*run, "--out", str(out), *options]) == 1
    assert "task.batch_size = 4" in capsys.readouterr().err
    assert main([*run, "--out", str(tmp_path / "other"), *options, "--sites", "A,B,C"]) == 0
    other = capsys.readouterr().out
    assert (
        "- rounds: 2, the suite has 1" in other and "- sites: A, B, C, the suite has A, B" in other
    )
    assert "- batch_size of the task: 8, the suite has 4" in other


def test_rows_of_the_command_line_are_beside_the_suites_rows(
    tmp_path: Path, make_site: SiteOf
) -> None:
    for name in "AB":
        make_site(name=name)
    out = tmp_path / "out"
    suite = written(tmp_path, seeds=[0])
    run = [
        "study",
        "fedprox",
        "fedavg",
        "--reference",
        "constant,equal-compute",
        "--suite",
        suite,
        "--out",
        str(out),
    ]
    assert main([*run, "--data-root", str(tmp_path)]) == 0
    text, lines = beside(out)
    assert [line[:2] for line in lines[6:]] == [
        ["", "constant"],
        ["not in the suite", "fedprox"],
        ["not in the suite", "equal-compute"],
    ]
    runs = read_runs(out)
    assert sorted(runs) == [
        f"{label}/seed0" for label in ("constant", "equal-compute", "fedavg", "fedprox")
    ]
    ours = runs["fedprox/seed0"]["sites"]["A"]["metrics"]["deployed"]["dice"]
    assert lines[7][2] == f"{100 * ours:.2f}"
    assert "- images are synthetic\n" in text and "of the task" not in text
    table = (out / "table.md").read_text()
    for label in ("fedprox", "constant", "equal-compute"):
        assert f"| {label} |" in table
    assert main([*run, "--data-root", str(tmp_path)]) == 0, (
        "kept runs have the settings of this study"
    )


def test_a_row_of_the_paper_can_be_a_model_of_one_method(tmp_path: Path) -> None:
    label = "iop_fl:comparisons=true"
    rows = {"Average": label, "Ensemble": label, "IOP-FL": label}
    suite = load_suite(
        written(
            tmp_path,
            sites=["A", "B", "X"],
            methods=rows,
            models={"Average": "personal/*", "Ensemble": "ensemble"},
            settings={"rounds": 1, "metric": "dice", "role": "outside"},
            numbers={"Average": {"X": 0.5}, "Ensemble": {}, "IOP-FL": {}},
        )
    )
    values = {"deployed": 0.9, "ensemble": 0.7, "personal/A": 0.2, "personal/B": 0.6}
    outside = SiteRecord(
        "outside", metrics={model: {"dice": value} for model, value in values.items()}
    )
    inside = {name: SiteRecord("inside", metrics={"deployed": {"dice": 0.1}}) for name in "AB"}
    run = build_results(RunRecord("iop_fl", load_task(suite.task), 0, 1, {**inside, "X": outside}))
    assert cells(beside_the_paper(suite, {label: [run]}))[2:] == [
        ["Average", "paper", "0.5000"],
        ["", f"{label}, personal/*", "0.4000"],
        ["Ensemble", "paper", UNDEFINED],
        ["", f"{label}, ensemble", "0.7000"],
        ["IOP-FL", "paper", UNDEFINED],
        ["", label, "0.9000"],
    ]


def test_a_suite_with_a_left_out_site_and_without_legible_numbers(
    tmp_path: Path, make_site: SiteOf
) -> None:
    for name in "ABC":
        make_site(name=name)
    settings = {"rounds": 1, "metric": "dice", "leave_out": ["C"], "role": "outside"}
    changes = {
        "sites": ["A", "B", "C"],
        "methods": {"FedAvg": "fedavg"},
        "settings": settings,
        "seeds": [0],
        "numbers": {"FedAvg": {}},
    }
    out = tmp_path / "out"
    assert (
        main(
            [
                "study",
                "--data-root",
                str(tmp_path),
                "--suite",
                written(tmp_path, **changes),
                "--out",
                str(out),
            ]
        )
        == 0
    )
    _, lines = beside(out)
    assert ["row", "of", "A", "B", "C", MEAN] in lines and [
        "FedAvg",
        "paper",
        *4 * [UNDEFINED],
    ] in lines
    (run,) = read_runs(out).values()
    assert {name: site["role"] for name, site in run["sites"].items()} == {
        "A": "inside",
        "B": "inside",
        "C": "outside",
    }
    ours = f"{run['sites']['C']['metrics']['deployed']['dice']:.4f}"
    assert ["", "fedavg", UNDEFINED, UNDEFINED, ours, ours] in lines


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"settings": {"rounds": 1, "metric": "dice", "leave_out": ["BB"]}}, "BB"),
        (
            {
                "settings": {
                    "rounds": 1,
                    "metric": "dice",
                    "leave_one_out": True,
                    "leave_out": ["B"],
                }
            },
            "leave_one_out",
        ),
        ({"methods": {"FedAvgg": "fedavg"}}, "FedAvgg"),
        ({"numbers": {"FedAvg": {"meen": 1}, "Blind": {}}}, "meen"),
        ({"models": {"Theirs": "global"}}, "Theirs"),
        ({"seeds": []}, "seeds"),
        ({"seed": 1}, "seed"),
    ],
)
def test_a_wrong_suite_raises_an_error(changes: dict[str, Any], token: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=token):
        load_suite(written(tmp_path, **changes))


def test_an_option_that_the_suite_sets_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = written(tmp_path)
    for options in (["--leave-one-out"], ["--leave-out", "A"], ["--selection", "last"]):
        assert main(["study", *options, "--suite", suite, "--out", str(tmp_path / "out")]) == 1
        assert suite in capsys.readouterr().err
    assert main(["study", "--suite", "fedsm_table33", "--out", str(tmp_path / "out")]) == 1
    assert "fedsm_table33" in capsys.readouterr().err
