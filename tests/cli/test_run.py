"""`medflare run`, `resume`, `job` and `study` hand on what was asked for; the engines have tests of their own."""

import csv
import fcntl
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import small_tasks
from helpers.downloaded_folders import classes
from helpers.fixture_types import Refused, SiteOf, TaskOf
from medflare.cli import main
from medflare.evaluation.report import write_results
from medflare.evaluation.results import RunRecord, SiteRecord
from medflare.inference.deployed import plain_message, save_model
from medflare.methods.fedavg.site import FedAvgSite
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import load_task

ROOT = "MEDFLARE_DATA_ROOT"
ALGORITHMS = {"site_algorithm": None, "server_algorithm": None}


class Engine:
    """Takes the place of an engine's function and keeps what it was called with, and the data root at that time."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], str | None]] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append((arguments, named, os.environ.get(ROOT)))
        return self.answer


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Stands for the plain loop; what it leaves behind counts as completed."""
    actual = Engine()
    monkeypatch.delenv(ROOT, raising=False)
    monkeypatch.setattr("medflare.federation.local.loop.run_local", actual)
    monkeypatch.setattr("medflare.federation.local.loop.resume_local", actual)
    monkeypatch.setattr("medflare.evaluation.console.show_results", lambda path: True)
    return actual


class Simulator(Engine):
    """Stands for FLARE's recipe, and keeps its settings."""

    def recipe(self, **settings: Any) -> "Simulator":
        self.settings = settings
        return self

    def simulate(self, *arguments: Any, **named: Any) -> None:
        self(*arguments, **named)


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    actual = Simulator()
    monkeypatch.setattr("medflare.flare.recipes.MedflareRecipe", actual.recipe)
    return actual


def test_the_plain_loop_gets_everything(engine: Engine, tmp_path: Path) -> None:
    options = [
        "--sites",
        "A,B,X",
        "--outside",
        "X,Y",
        "--rounds",
        "3",
        "--seed",
        "5",
        "--min-sites",
        "1",
        "--sites-per-round",
        "2",
    ]
    settings = ["--set", "server.selection=last", "--set", "task.batch_size=4"]
    where = [
        "--data-root",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--engine",
        "local",
        "--workers",
        "2",
    ]
    (tmp_path / "datalist.json").touch()  # serves sites of every name
    assert main(["run", "fedavg", "--server-algorithm", "grace", *options, *settings, *where]) == 0
    (((), named, root),) = engine.calls
    task = named.pop("task")
    assert (task.name, task.batch_size, named.pop("say")) == ("phantom", 4, print)
    assert named.pop("out") == tmp_path / "out" / "fedavg+grace-phantom-seed5"
    expected = {
        "rounds": 3,
        "seed": 5,
        "outside": ["X", "Y"],
        "min_sites": 1,
        "sites_per_round": 2,
        "sites": ["A", "B", "X", "Y"],
    }
    algorithms = {
        "method": "fedavg",
        "site_algorithm": None,
        "server_algorithm": "grace",
        "site": {},
        "server": {"selection": "last"},
    }
    assert named == {**expected, **algorithms, "workers": 2}
    assert root == str(tmp_path) and ROOT not in os.environ


def test_sites_are_the_folders_of_the_data_root(engine: Engine, tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "datalist.json").touch()
    run = ["run", "fedavg", "--engine", "local", "--out", str(tmp_path / "out")]
    assert main([*run, "--data-root", str(tmp_path)]) == main(run) == 0
    assert [named["sites"] for _, named, _ in engine.calls] == [
        ["north", "south"],
        ["site-1", "site-2", "site-3", "site-4"],
    ]


def test_short_options_are_settings_of_the_task(engine: Engine, tmp_path: Path) -> None:
    short = ["--lr", "0.5", "--epochs", "3", "--batch-size", "7"]
    assert (
        main(
            [
                "run",
                "fedavg",
                "--engine",
                "local",
                *short,
                "--set",
                "task.local_epochs=4",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    ((_, named, _),) = engine.calls
    task = named["task"]
    assert (task.optimizer["lr"], task.local_epochs, task.batch_size) == (0.5, 4, 7), (
        "--set is more specific"
    )


def test_flares_simulator_gets_everything(
    engine: Engine, simulator: Simulator, tmp_path: Path
) -> None:
    (tmp_path / "datalist.json").touch()
    options = ["--sites", "2", "--outside", "X", "--step-timeout", "9", "--heartbeat-timeout", "30"]
    options += ["--threads", "1", "--set", "selection=last"]
    assert (
        main(["run", "fedavg", *options, "--data-root", str(tmp_path), "--out", str(tmp_path)]) == 0
    )
    assert simulator.settings.pop("task").name == "phantom"
    run = {
        "method": "fedavg",
        "rounds": 10,
        "seed": 0,
        "outside": ["X"],
        "step_timeout": 9.0,
        "heartbeat_timeout": 30.0,
    }
    assert simulator.settings == {**run, **ALGORITHMS, "site": {}, "server": {"selection": "last"}}
    folder = tmp_path / "fedavg-phantom-seed0"
    assert simulator.calls == [((["site-1", "site-2", "X"], folder), {"threads": 1}, str(tmp_path))]
    assert not engine.calls and ROOT not in os.environ


def test_results_and_models_of_the_simulator_are_where_the_plain_loop_has_them(
    engine: Engine, simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulate(sites: list[str], workspace: Path, **_: Any) -> None:
        deep = workspace / "fedavg-phantom" / "server" / "simulate_job" / "medflare"
        (deep / "models" / "global").mkdir(parents=True)
        for name in ("results.json", "checkpoint.safetensors", "models/global/card.json"):
            (deep / name).write_text(name)

    monkeypatch.setattr(simulator, "simulate", simulate)
    for _ in range(2):
        assert main(["run", "fedavg", "--sites", "2", "--out", str(tmp_path)]) == 0
    for folder in (tmp_path / "fedavg-phantom-seed0", tmp_path / "fedavg-phantom-seed0.1"):
        assert {path.name for path in folder.iterdir()} == {
            "fedavg-phantom",
            "results.json",
            "models",
        }
        for name in ("results.json", "models/global/card.json"):
            assert (folder / name).read_text() == name


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "fedsm", "--set", "rounds=3", "--engine", "local"], "--rounds"),
        (["run", "fedsm", "--sites", "0"], "--sites '0'"),
        (["run", "fedsm", "--sites", "two"], "--sites 'two' is one name"),
        (["study", "fedsm", "--sites", "two", "--out", "x"], "--sites 'two' is one name"),
        (["run", "fedsm", "--task", "no-such-task"], "no-such-task"),
        (["resume", "nowhere", "--out", "x"], "--job"),
        (["run", "evaluate"], "--model"),
        (["run", "fedavg", "--set", "lr=0.01"], "--lr"),
        (["run", "fedavg", "--set", "task.lr=0.01"], "--lr"),
        (["study", "fedavg", "--set", "task.lr=0.01", "--out", "x"], "--lr"),
        (["study", "fedavg", "--set", "lr=0.01", "--out", "x"], "--lr"),
        (["run", "fedavg", "--task", "task.jsn"], "unknown task file or preset 'task.jsn'"),
        (["run", "fedavg", "--sites", "4", "--sites-per-round", "9"], "--sites-per-round 9"),
        (["run", "fedavg", "--workers", "2"], "--workers"),
        *(
            (["run", "fedavg", "--engine", "local", "--dry-run", option, value], named)
            for option, value, named in (
                ("--rounds", "-1", "--rounds -1: 1 or more"),
                ("--rounds", "0", "--rounds 0: 1 or more"),
                ("--sites", "b,../x", "'../x'"),
                ("--workers", "0", "--workers"),
            )
        ),
        (["resume", "jobs/fedsm", "--job", "1", "--workers", "2"], "--workers"),
        *(
            (["run", "fedavg", "--engine", "local", option, "3"], option)
            for option in ("--step-timeout", "--enrol-timeout", "--heartbeat-timeout", "--threads")
        ),
    ],
)
def test_wrong_commands_say_so_in_one_line(
    words: list[str], named: str, engine: Engine, refused: Refused
) -> None:
    assert named in refused(*words) and not engine.calls


@pytest.mark.parametrize("engine_name", ["local", "flare"])
def test_a_site_without_data_is_named_with_the_nearest(
    engine_name: str, engine: Engine, tmp_path: Path, refused: Refused
) -> None:
    for site in ("clinic-1", "clinic-2"):
        (tmp_path / site).mkdir()
        (tmp_path / site / "datalist.json").touch()
    where = ("--data-root", str(tmp_path), "--engine", engine_name)
    assert "'clinic2'" in refused("run", "fedavg", "--sites", "clinic-1,clinic2", *where)
    outside = refused("run", "fedavg", "--sites", "clinic-1", "--outside", "clinic3", *where)
    assert "'clinic3'; did you mean clinic-" in outside
    study = refused(
        "study",
        "fedavg",
        "--sites",
        "clinic-1,clinic2",
        "--data-root",
        str(tmp_path),
        "--out",
        str(tmp_path / "o"),
    )
    assert "'clinic2'" in study
    assert not engine.calls and not (tmp_path / "o").exists()


def test_a_dry_run_reads_an_image_of_each_site(
    make_site: SiteOf,
    make_task: TaskOf,
    tmp_path: Path,
    refused: Refused,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in "AB":
        make_site(name=f"data/{name}")
    task = tmp_path / "task.json"
    task.write_text(json.dumps(make_task().to_dict()))
    words = ("run", "fedavg", "--task", str(task), "--data-root", str(tmp_path / "data"))
    assert main([*words, "--dry-run"]) == 0
    assert "an image of each site" in capsys.readouterr().out
    damaged = tmp_path / "data/B/images/0.png"
    damaged.write_bytes(b"no image")
    assert str(damaged) in refused(*words, "--dry-run")
    task.write_text(json.dumps(make_task(unreadable="skip").to_dict()))
    assert main([*words, "--dry-run"]) == 0


def run_once(folder: Path, *options: str) -> int:
    """`medflare run fedavg` in the plain loop, with results below a folder."""
    return main(
        ["run", "fedavg", "--engine", "local", "--sites", "2", "--out", str(folder), *options]
    )


def test_an_earlier_run_is_kept(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "fedavg-phantom-seed0"

    def work(*_: Any, out: Path, **__: Any) -> None:
        assert not [*out.iterdir()]
        (out / "results.json").write_text(str(len([*tmp_path.iterdir()])))

    monkeypatch.setattr("medflare.federation.local.loop.run_local", work)
    assert [run_once(tmp_path) for _ in range(3)] == [0, 0, 0]
    kept = {path.name: (path / "results.json").read_text() for path in tmp_path.iterdir()}
    assert kept == {folder.name: "1", f"{folder.name}.1": "2", f"{folder.name}.2": "3"}, (
        "links to the earlier runs stay right"
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if "earlier" in line]
    assert lines == [
        f"an earlier run keeps the name {folder}; this run is {folder}.{number}"
        for number in (1, 2)
    ]
    assert run_once(tmp_path, "--adapt", "routing") == 1
    refused = capsys.readouterr()
    assert "earlier" not in refused.out and "routing" in refused.err
    assert run_once(tmp_path, "--dry-run") == 0
    assert f"{folder}.3" in capsys.readouterr().out and len([*tmp_path.iterdir()]) == 3


def test_an_earlier_run_that_failed_before_its_first_round_is_named(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fedavg-phantom-seed0"
    sites = {"A": SiteRecord("inside")}
    record = RunRecord("fedavg", load_task("phantom"), 0, 1, sites, reason="no image")
    write_results(folder, record)
    hint = f"{folder} (it failed before its first round; delete it to free the name); this run is"
    for rounds, hinted in (("", True), ("{}", False)):
        if rounds:
            (folder / "metrics.jsonl").write_text(rounds)
        assert run_once(tmp_path) == 0
        assert (hint in capsys.readouterr().out) == hinted


def test_a_run_may_start_from_the_earlier_one(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_task(small_tasks.tiny_phantom())
    model = tmp_path / "fedavg-phantom-seed0" / "models" / "global"
    save_model(model, task, plain_message(initial_network(task, 0).state_dict()), {})
    actual: list[Path] = []

    def work(*_: Any, out: Path, **__: Any) -> None:
        actual.append(Path(os.environ["MEDFLARE_WEIGHTS"]))
        (out / "results.json").touch()

    monkeypatch.setattr("medflare.federation.local.loop.run_local", work)
    assert run_once(tmp_path, "--from", str(model)) == 0
    assert (
        actual == [tmp_path / "fedavg-phantom-seed0" / "models" / "global"]
        and (actual[0] / "model.safetensors").is_file()
    )


def test_what_is_refused_moves_nothing(tmp_path: Path, refused: Refused) -> None:
    earlier = tmp_path / "fedavg-phantom-seed0" / "results.json"
    earlier.parent.mkdir()
    earlier.touch()
    assert "rounds" in refused(
        "run",
        "fedavg",
        "--engine",
        "local",
        "--sites",
        "2",
        "--rounds",
        "0",
        "--out",
        str(tmp_path),
    )
    assert [*tmp_path.rglob("*")] == [earlier.parent, earlier]


def test_a_folder_with_a_run_at_work_is_left_alone(
    engine: Engine, tmp_path: Path, refused: Refused
) -> None:
    folder = tmp_path / "fedavg-phantom-seed0"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    place = os.open(folder, os.O_RDONLY)
    fcntl.flock(place, fcntl.LOCK_EX)  # as the run at work has it
    for command in (
        ("run", "fedavg", "--engine", "local", "--sites", "2", "--out", str(tmp_path)),
        ("resume", str(folder)),
    ):
        assert str(folder) in refused(*command)
    os.close(place)
    assert not engine.calls and [*tmp_path.iterdir()] == [folder]
    assert run_once(tmp_path) == 0, "its end ends the lock"


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "two words" / "fedavg-phantom-seed0"

    def work(*_: Any, out: Path, **__: Any) -> None:
        (out / "checkpoint.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("medflare.federation.local.loop.run_local", work)
    assert run_once(folder.parent) == 130
    assert capsys.readouterr().err.endswith(f"medflare resume '{folder}'\n")
    (tmp_path / "datalist.json").touch()
    assert run_once(folder.parent, "--data-root", str(tmp_path)) == 130
    assert capsys.readouterr().err.endswith(
        f"medflare resume '{folder}.1' --data-root {tmp_path}\n"
    )
    assert run_once(folder.parent, "--track", "tensorboard", "--workers", "2") == 130
    words = shlex.split(capsys.readouterr().err)
    assert words[words.index("resume") + 1] == f"{folder}.2"
    assert [words[words.index(name) + 1] for name in ("--track", "--workers")] == [
        "tensorboard",
        "2",
    ]


def test_ctrl_c_before_the_first_checkpoint_says_that_nothing_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("medflare.federation.local.loop.run_local", work)
    assert run_once(tmp_path) == 130
    assert "nothing can be resumed" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_options_in_a_file(engine: Engine, tmp_path: Path, refused: Refused) -> None:
    file = tmp_path / "options.json"

    def written(content: Any) -> tuple[str, ...]:
        file.write_text(json.dumps(content))
        return "--options", str(file), "--out", str(tmp_path / "out")

    values = {
        "method": "fedsm",
        "engine": "local",
        "sites": ["A", "B"],
        "rounds": 7,
        "seed": 3,
        "set": ["lam=0.25"],
        "batch-size": 5,
    }
    assert main(["run", *written({**values, "outside": ["X"], "from": None}), "--rounds", "2"]) == 0
    ((_, named, _),) = engine.calls
    actual = {
        name: named[name] for name in ("method", "sites", "rounds", "seed", "outside", "server")
    }
    expected = {
        "method": "fedsm",
        "sites": ["A", "B", "X"],
        "rounds": 2,
        "seed": 3,
        "outside": ["X"],
        "server": {"lam": 0.25},
    }
    assert actual == expected and named["task"].batch_size == 5, "the command line has priority"
    for content, word in (
        ({"round": 3}, "unknown option 'round'; did you mean rounds"),
        ([1], "object"),
    ):
        assert word in refused("run", "fedavg", *written(content))
    file.write_text("{")
    assert "not valid JSON" in refused("run", "fedavg", "--options", str(file))


def test_resume_goes_on_in_its_own_folder(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"sites": ["A"], "outside": [], "task": load_task("phantom").to_dict()}
    monkeypatch.setattr("medflare.federation.checkpoint.stored_plan", lambda folder: plan)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "datalist.json").touch()
    assert (
        main(["resume", str(tmp_path), "--data-root", str(tmp_path / "data"), "--workers", "3"])
        == 0
    )
    assert engine.calls == [
        ((tmp_path,), {"workers": 3, "track": None, "say": print}, str(tmp_path / "data"))
    ]
    assert ROOT not in os.environ


def test_resume_replaces_no_results_before_it_can_go_on(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    plan = {
        "sites": ["A"],
        "outside": ["B"],
        "task": {**load_task("phantom").to_dict(), "embedded": ""},
    }
    monkeypatch.setattr("medflare.federation.checkpoint.stored_plan", lambda folder: plan)
    assert "--data-root" in refused("resume", str(tmp_path))
    record = RunRecord(
        "fedavg",
        load_task("phantom"),
        0,
        3,
        {"A": SiteRecord("inside", metrics={"deployed": {"dice": 0.625}})},
    )
    write_results(tmp_path, record)
    assert "medflare results" in refused("resume", str(tmp_path))
    assert not engine.calls


def test_a_job_gets_the_settings_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Engine(tmp_path)
    monkeypatch.setattr("medflare.flare.jobs.building.build_job", build)
    options = [
        "--heartbeat-timeout",
        "60",
        "--patience",
        "4",
        "--resplit",
        "3",
        "--track",
        "mlflow",
        "--no-byoc",
        "--out",
        str(tmp_path),
    ]
    assert main(["job", "moon", "--site-algorithm", "fedavg", *options]) == 0
    (((), named, _),) = build.calls
    assert named.pop("task").resplit == 3
    form = {
        "byoc": False,
        "embed_code": False,
        "out": tmp_path,
        "hyper": {"site": {}, "server": {}},
        "track": "mlflow",
    }
    run = {"method": "moon", "rounds": 10, "seed": 0, "heartbeat_timeout": 60.0, "patience": 4}
    assert named == {**form, **run, **ALGORITHMS, "site_algorithm": "fedavg"}
    assert f"medflare job submit {tmp_path}" in capsys.readouterr().out, (
        "FLARE's simulator refuses it"
    )
    assert main(["job", "moon", "--out", str(tmp_path)]) == 0
    assert f"nvflare simulator {tmp_path} -n 4" in capsys.readouterr().out
    (tmp_path / "meta.json").touch()
    assert main(["job", "moon", "--task", "brain_lgg", "--out", str(tmp_path), "--force"]) == 0
    assert "MEDFLARE_DATA_ROOT=DATA" in capsys.readouterr().out, "without data of its own"


def test_a_job_folder_is_not_replaced_without_force(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "meta.json").write_text("earlier")
    assert "--force" in refused("job", "fedavg", "--out", str(tmp_path))
    assert (tmp_path / "meta.json").read_text() == "earlier"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Stands for the grid of a study, which has written its table."""
    actual = Engine({})
    monkeypatch.setattr("medflare.studies.study.run_study", actual)
    monkeypatch.delenv(ROOT, raising=False)
    (tmp_path / "table.md").write_text("the table")
    return actual


def test_a_study_gets_its_grid(
    study: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study.answer = {"fedavg": [{"reason": None}, {"reason": "KeyError: x"}, {"reason": "other"}]}
    options = [
        "--sites",
        "2",
        "--rounds",
        "3",
        "--seeds",
        "4,5",
        "--leave-one-out",
        "--processes",
        "2",
        "--set",
        "task.batch_size=4",
        "--grid",
        "lr=0.5",
        "--rerun",
        "fedavg",
        "--cluster",
        "slurm",
    ]
    (tmp_path / "datalist.json").touch()
    assert (
        main(
            [
                "study",
                "fedavg",
                "single-site",
                *options,
                "--data-root",
                str(tmp_path),
                "--out",
                str(tmp_path),
            ]
        )
        == 1
    ), "a run failed"
    ((candidates, setting, seeds, out), named, root) = study.calls[0]
    assert [candidate.row for candidate in candidates] == ["fedavg", "single-site"]
    assert (setting.sites, setting.rounds, setting.task.batch_size, seeds, out) == (
        ("site-1", "site-2"),
        3,
        4,
        [4, 5],
        tmp_path,
    )
    grids = named.pop("grids")
    assert [cell.row for cell in grids["single-site"]] == ["single-site:lr=0.5"]
    assert named == {
        "left_out": ["site-1", "site-2"],
        "rerun": ["fedavg"],
        "processes": 2,
        "cluster": "slurm",
        "say": print,
    }
    assert root == str(tmp_path) and ROOT not in os.environ
    lines = capsys.readouterr().out.splitlines()
    assert "the table" in lines and "FAILED: fedavg, 2 of 3 runs: KeyError: x" in lines


def test_figures_show_the_rows_of_the_tables(
    study: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a grid that is the row selected on validation images."""
    tables = object()
    drawn = []
    monkeypatch.setattr("medflare.studies.study.study_tables", lambda out: tables)
    monkeypatch.setattr(
        "medflare.cli.studies._write_figures", lambda folder, study: drawn.append(study)
    )
    study.answer = {"fedavg": [{"reason": None}]}
    figures = ["--figures", str(tmp_path / "figures"), "--sites", "2", "--grid", "lr=0.1,0.2"]
    assert main(["study", "fedavg", *figures, "--out", str(tmp_path)]) == 0
    assert drawn == [tables]


def test_a_study_takes_the_options_of_run(study: Engine, tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "datalist.json").touch()
    options = ["--data-root", str(tmp_path), "--out", str(tmp_path)]
    assert main(["study", "fedavg", *options, "--network", "unet", "--lr", "0.25"]) == 0
    assert (
        main(["study", "fedavg", *options, "--lr", "0.25", "--set", "task.optimizer.lr=0.5"]) == 0
    )
    first, second = (call[0][1] for call in study.calls)
    assert first.sites == ("north", "south"), "the folders of the data root"
    assert (
        first.task.network["name"],
        first.task.optimizer["lr"],
        second.task.optimizer["lr"],
    ) == ("unet", 0.25, 0.5)


def in_new_process(code: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process that has imported nothing yet."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_results_are_shown_without_torch(tmp_path: Path) -> None:
    site = SiteRecord("inside", {"test": 20}, {"deployed": {"dice": 0.8}}, constant=0.5)
    write_results(tmp_path, RunRecord("fedavg", load_task("phantom"), 0, 1, {"site-1": site}))
    code = f"import sys; from medflare.cli import main; assert main(['results', {str(tmp_path)!r}]) == 0; assert 'torch' not in sys.modules"
    ended = in_new_process(code)
    assert ended.returncode == 0 and "above it" in ended.stdout, ended.stderr


def test_a_datalist_is_written_without_torch(tmp_path: Path) -> None:
    folder = classes(tmp_path / "raw", patients=12, names=("benign", "melanoma"))
    code = f"import sys; from medflare.cli import main; assert main(['data', 'init', {str(folder)!r}]) == 0; assert 'torch' not in sys.modules"
    ended = in_new_process(code)
    assert ended.returncode == 0 and "written" in ended.stdout, ended.stderr


def test_a_study_without_methods_is_refused_before_anything_large_is_imported() -> None:
    code = "import sys; from medflare.cli import main; assert main(['study', '--out', 'x']) == 1; assert 'torch' not in sys.modules"
    ended = in_new_process(code)
    assert ended.returncode == 0 and "name at least one method" in ended.stderr, ended.stderr


def test_a_study_leaves_out_the_sites_that_it_is_told(
    study: Engine, tmp_path: Path, refused: Refused
) -> None:
    named = ["study", "fedavg", "--sites", "3", "--out", str(tmp_path)]
    assert main([*named, "--leave-out", "site-3,site-1"]) == main(named) == 0
    assert [call[1]["left_out"] for call in study.calls] == [["site-3", "site-1"], []]
    assert "'site-4'" in refused(*named, "--leave-out", "site-4")


def test_a_study_takes_references_and_a_rule_of_selection(study: Engine, tmp_path: Path) -> None:
    def rows(*options: str) -> dict[str, Any]:
        assert main(["study", *options, "--sites", "2", "--out", str(tmp_path)]) == 0
        return {candidate.row: candidate.hyper for candidate in study.calls[-1][0][0]}

    uniform = "fedavg:weighting=uniform"
    assert list(rows("fedavg", "constant", "--reference", "single-site,constant")) == [
        "fedavg",
        "constant",
        "single-site",
    ]
    changed = ["augmentation", "equal-compute", uniform]
    assert list(rows("fedavg", "--reference", "all")) == [
        "fedavg",
        "constant",
        "single-site",
        "centralised",
        *changed,
    ], "no BatchNorm"
    assert list(rows("fedavg", "--reference", "uniform")) == ["fedavg", uniform]
    batch_norm = ("--set", "task.network.norm=batch")
    assert list(rows("--reference", "all", *batch_norm)) == [
        "constant",
        "single-site",
        "batch-statistics",
        "centralised",
        *changed,
    ]
    chosen = rows(
        "fedavg", "fedsm:selection=best", "--reference", "constant", "--selection", "last"
    )
    assert [hyper["server"] for hyper in chosen.values()] == [
        {"selection": "last"},
        {"selection": "best"},
        {},
    ]
    for rule, shown in (("paired", "paired"), ("mean", "mean"), ("iou", "median")):
        chosen = rows("fedavg", "--selection", rule)
        assert chosen["fedavg"]["server"] == {"selection": shown}
    assert study.calls[-1][0][1].task.metric == "iou"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["fedavg", "--seeds", "1,2.5"], "--seeds '1,2.5'"),
        (["fedavg", "--set", "lam=3"], "task.NAME"),
        ([], "method"),
        (["fedavg", "--reference", "batch-statistics"], "batch-statistics"),
        (["fedavg", "--selection", "hd95"], "'hd95'"),
        (["fedavg", "--leave-one-out", "--leave-out", "site-1"], "--leave-out"),
        (["--leave-one-out", "--suite", "prr_table3"], "--suite"),
    ],
)
def test_a_study_refuses_what_it_cannot_read(
    words: list[str], named: str, tmp_path: Path, refused: Refused
) -> None:
    assert named in refused("study", *words, "--sites", "2", "--out", str(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_evaluate_is_a_method_without_rounds(
    capsys: pytest.CaptureFixture[str], engine: Engine, tmp_path: Path
) -> None:
    task = load_task(small_tasks.tiny_phantom())
    save_model(tmp_path / "model", task, plain_message(initial_network(task, 0).state_dict()), {})
    assert (
        main(
            [
                "run",
                "evaluate",
                "--engine",
                "local",
                "--model",
                str(tmp_path / "model"),
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    ((), named, _) = engine.calls[0]
    actual = named["task"]
    assert (named["method"], named["rounds"], named["out"].name) == (
        "evaluate",
        0,
        f"evaluate-{task.name}-seed0",
    )
    assert (
        "weights" not in actual.network
        and actual.size == task.size
        and len(named["server"]["sha256"]) == 64
    )


@pytest.mark.parametrize(
    ("words", "optimizer"),
    [
        ((), {"name": "adam", "lr": 0.01}),
        (("optimizer.name=sgd",), {"name": "sgd", "lr": 0.1}),
        (("optimizer.name=adam",), {"name": "adam", "lr": 0.01}),
        (("optimizer.name=sgd", "optimizer.lr=0.3"), {"name": "sgd", "lr": 0.3}),
        (("optimizer.momentum=0.5", "optimizer.name=sgd"), {"lr": 0.1, "momentum": 0.5}),
        (("network.norm=instance",), {"name": "adam", "lr": 0.01}),
    ],
    ids=" ".join,
)
def test_another_optimizer_has_its_usual_rate_unless_one_is_set(
    words: tuple[str, ...], optimizer: dict[str, Any], engine: Engine, tmp_path: Path
) -> None:
    task = tmp_path / "task.json"
    task.write_text(json.dumps(small_tasks.SEGMENTATION | {"embedded": "phantom"}))
    changes = []
    for change in words:
        changes += ["--set", f"task.{change}"]
    command = ["run", "fedavg", "--engine", "local", "--task", str(task), *changes]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    ((_, named, _),) = engine.calls
    actual = named["task"].optimizer
    assert {name: actual[name] for name in optimizer} == optimizer


def test_a_dry_run_looks_for_the_initial_weights(
    engine: Engine, tmp_path: Path, refused: Refused
) -> None:
    weights = {"file": "w.safetensors", "sha256": "0" * 64, "format": "medflare", "part": "all"}
    task = small_tasks.tiny_phantom(network={**small_tasks.INSTANCE_UNET, "weights": weights})
    (tmp_path / "task.json").write_text(json.dumps(task))
    command = ("run", "fedavg", "--task", str(tmp_path / "task.json"), "--dry-run")
    assert "w.safetensors" in refused(*command, "--weights", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("method", "words", "named"),
    [("fedavg", ("--weights", "x"), "--from"), ("evaluate", ("--rounds", "5"), "--rounds")],
)
def test_what_disagrees_with_a_given_model_is_refused(
    method: str,
    words: tuple[str, ...],
    named: str,
    engine: Engine,
    tmp_path: Path,
    refused: Refused,
) -> None:
    task = load_task(small_tasks.tiny_phantom())
    save_model(tmp_path / "model", task, plain_message(initial_network(task, 0).state_dict()), {})
    call = ("run", method, "--engine", "local", "--from", str(tmp_path / "model"))
    assert named in refused(*call, *words, "--out", str(tmp_path)) and not engine.calls


def test_one_setting_of_a_file_needs_no_list(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text(json.dumps({"engine": "local", "set": "lam=0.3"}))
    words = ("--options", str(tmp_path / "options.json"), "--out", str(tmp_path))
    assert main(["run", "fedsm", *words]) == 0
    ((_, named, _),) = engine.calls
    assert named["server"] == {"lam": 0.3}


def test_a_table_may_be_written_into_a_new_folder(tmp_path: Path) -> None:
    site = SiteRecord("inside", metrics={"deployed": {"dice": 0.625}})
    write_results(tmp_path, RunRecord("fedavg", load_task("phantom"), 0, 3, {"A": site}))
    table = tmp_path / "nowhere" / "x.csv"
    assert main(["results", str(tmp_path), "--csv", str(table)]) == 0
    assert [row["value"] for row in csv.DictReader(table.open()) if row["value"]] == ["0.625"]


def test_an_error_of_the_methods_code_is_one_line_and_its_traceback_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FedAvgSite, "fit", lambda *arguments: 1 / 0)
    task = tmp_path / "task.json"
    task.write_text(json.dumps(small_tasks.tiny_grades()), encoding="utf-8")
    out = ("--out", str(tmp_path / "out"))
    run = ("run", "fedavg", "--engine", "local", "--sites", "2", "--rounds", "1")
    assert main([*run, "--task", str(task), *out]) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    file = errors.rpartition("traceback: ")[2].strip()
    line = "medflare: method 'fedavg' fails at site site-1 in 'train' of round 1: ZeroDivisionError"
    assert errors.splitlines()[-1].startswith(line)
    assert "Traceback" in Path(file).read_text(encoding="utf-8")
