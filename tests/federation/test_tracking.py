"""What a run writes for TensorBoard, MLflow and Weights & Biases; what happens when it cannot."""

import errno
import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from medflare import run_local
from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.federation import tracking
from medflare.federation.outcome import StepReport
from medflare.federation.tracking import TENSORBOARD, Tracker, check_track, flat_settings
from medflare.methods.base import Step
from medflare.tasks.config import load_task

SCHEDULED = load_task("phantom").to_dict() | {
    "schedule": {"name": "step", "every": 1, "factor": 0.5},
    "local_epochs": 1,
}
RATES = [(0, pytest.approx(0.01)), (1, pytest.approx(0.005))]


def federated(folder: Path, **options: Any) -> dict[str, Any]:
    return run_local("fedavg", SCHEDULED, 2, rounds=2, seed=0, out=folder, **options)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


def test_what_may_be_named_and_what_may_not() -> None:
    for track in (
        "tensorboard",
        "none",
        "mlflow",
        "mlflow=https://ml.example:5000/x",
        "wandb",
        "wandb=a.study-1",
    ):
        check_track(track, here=False)
    for track in (
        "",
        "tensorboard=x",
        "mlflow=",
        "mlflow=sqlite:///x.db",
        "mlflow=file:///x",
        "wandb=a/b",
        "mlflow http://x",
    ):
        with pytest.raises(ConfigError, match="track"):
            check_track(track, here=False)


def test_tensorboard_has_a_run_for_each_site(tmp_path: Path) -> None:
    results = federated(tmp_path)
    for site in ("site-1", "site-2"):
        events = EventAccumulator(str(tmp_path / TENSORBOARD / site)).Reload()
        curves = {}
        for tag in events.Tags()["scalars"]:
            curves[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
        assert curves["learning_rate"] == RATES and [step for step, _ in curves["loss"]] == [0, 1]
        assert [step for step, _ in curves["validation_global"]] == [0, 1, 2]
        dice = results["sites"][site]["metrics"]["deployed"]["dice"]
        assert curves["test_deployed_dice"] == [(2, pytest.approx(dice))]
        data = HParamsPluginData.FromString(
            events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        )
        settings = data.session_start_info.hparams
        assert (
            settings["task.optimizer.lr"].number_value == 0.01
            and settings["settings.engine"].string_value == "local"
        )
        assert any(name.startswith("hyper.server.") for name in settings)
    assert not [event for event in results["events"] if event["kind"] == "warning"]


@pytest.mark.parametrize("options", [{"track": "none"}, {"out": None}])
def test_no_files(tmp_path: Path, options: dict[str, Any]) -> None:
    federated(
        **{"folder": tmp_path}
        | {"folder" if name == "out" else name: value for name, value in options.items()}
    )
    assert not (tmp_path / TENSORBOARD).exists()


def test_mlflow_has_curves_tests_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="mlflow is not installed with its database")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    results = federated(tmp_path, track="mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("medflare phantom").experiment_id])
    assert (run.info.run_name, run.info.status) == ("fedavg-seed0", "FINISHED")
    assert [
        (point.step, point.value)
        for point in client.get_metric_history(run.info.run_id, "site-1/learning_rate")
    ] == RATES
    assert run.data.metrics["site-2/test_deployed_dice"] == pytest.approx(
        results["sites"]["site-2"]["metrics"]["deployed"]["dice"]
    )
    assert run.data.params["task.optimizer.lr"] == "0.01" and not (tmp_path / TENSORBOARD).exists()


def test_wandb_is_offline_in_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    results = federated(tmp_path, track="wandb=study")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert (
        b"site-1/test_deployed_dice" in content
        and b"site-2/learning_rate" in content
        and b"task.optimizer.lr" in content
    )
    assert not [event for event in results["events"] if event["kind"] == "warning"]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The package as far as a run calls it; it is the run, too."""
    fake = MagicMock()
    fake.init.return_value = fake
    module(monkeypatch, "wandb", init=fake.init, Settings=SimpleNamespace)
    return fake


def test_the_calls_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: MagicMock
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "")
    results = federated(tmp_path, track="wandb")
    opened = wandb.init.call_args.kwargs
    curves = [call.args[0] for call in wandb.log.call_args_list]
    own = opened.pop("settings")
    assert opened == {
        "project": "medflare",
        "group": "medflare phantom",
        "name": "fedavg-seed0",
        "dir": str(tmp_path),
        "mode": "offline",
    }
    assert own.console == "off" and own.disable_git and not own.save_code
    wandb.define_metric.assert_called_once_with("*", step_metric="round")
    assert [
        (line["round"], line["site-1/learning_rate"])
        for line in curves
        if "site-1/learning_rate" in line
    ] == RATES
    assert curves[-1]["site-2/test_deployed_dice"] == pytest.approx(
        results["sites"]["site-2"]["metrics"]["deployed"]["dice"]
    )
    wandb.config.update.assert_called_once_with(flat_settings(results["configuration"]))
    wandb.finish.assert_called_once_with(exit_code=0)
    monkeypatch.setenv("WANDB_MODE", "online")
    Tracker("wandb=study", None, "a task", "a run", pytest.fail)
    assert {
        "project": "study",
        "mode": "online",
        "dir": None,
    }.items() <= wandb.init.call_args.kwargs.items()


def test_the_calls_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uris = list[Any]()
    batches = list[dict[str, Any]]()
    ended = list[Any]()

    def client(tracking_uri: str | None) -> Any:
        uris.append(tracking_uri)
        return SimpleNamespace(
            get_experiment_by_name=lambda name: SimpleNamespace(experiment_id=name),
            create_run=lambda experiment, run_name: SimpleNamespace(
                info=SimpleNamespace(run_id=f"{experiment}/{run_name}")
            ),
            log_batch=lambda run, **entities: batches.append(entities),
            set_terminated=lambda run, status: ended.append((run, status)),
        )

    entities = {
        "Metric": lambda *parts: (parts[0], parts[3], parts[1]),
        "Param": lambda *parts: parts,
    }
    module(monkeypatch, "mlflow.entities", **entities)
    module(monkeypatch, "mlflow", MlflowClient=client, entities=SimpleNamespace(**entities))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = Tracker("mlflow=http://ml.example", tmp_path, "medflare brain", "fedsm", pytest.fail)
    tracker.step(
        StepReport(
            Step("train", 1),
            1,
            {"A": {"loss": 0.5}},
            {},
            1.0,
            {"B": {"weight": 0.25, "score": None}},
        ),
        0.01,
    )
    tracker.end(
        {
            "sites": {},
            "configuration": {"task": dict.fromkeys(map(str, range(150)))},
            "rounds": 2,
            "status": "FAILED",
        }
    )
    assert batches[0]["metrics"] == [("A/loss", 1, 0.5), ("A/learning_rate", 1, 0.01)]
    assert batches[1]["metrics"] == [("B/aggregation_weight", 1, 0.25)]
    assert [len(batch["params"]) for batch in batches[2:]] == [100, 50] and ended == [
        ("medflare brain/fedsm", "FAILED")
    ]
    Tracker("mlflow", tmp_path, "a task", "a run", pytest.fail)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://of.this.machine")
    Tracker("mlflow", tmp_path, "a task", "a run", pytest.fail)
    assert uris == ["http://ml.example", f"sqlite:///{tmp_path / 'mlflow.db'}", None], (
        "None: MLflow reads the environment"
    )


def test_what_fails_in_a_writer_does_not_end_the_run(tmp_path: Path, wandb: MagicMock) -> None:
    wandb.log.side_effect = OSError(errno.ENOSPC, "no space left on device")
    results = federated(tmp_path, track="wandb")
    assert results["status"] == "COMPLETED" and wandb.log.call_count == 1
    (event,) = (event for event in results["events"] if event["kind"] == "warning")
    assert "no space" in event["message"]


def test_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`medflare run` says so first; at the server of a job it is a warning; TensorBoard is left out unless it was asked for."""
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        federated(tmp_path / "local", track="wandb")
    for engine in ("local", "flare"):
        assert (
            main(
                [
                    "run",
                    "fedavg",
                    "--engine",
                    engine,
                    "--track",
                    "wandb",
                    "--out",
                    str(tmp_path / "cli"),
                ]
            )
            != 0
        )
        assert "pip install wandb" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    problems: list[str] = []
    Tracker(None, tmp_path, "a task", "a run", problems.append)
    assert not problems
    Tracker("tensorboard", tmp_path, "a task", "a run", problems.append).end(
        {"sites": {}, "configuration": {}, "rounds": 1, "status": "FAILED"}
    )
    assert len(problems) == 1 and "pip install tensorboard" in problems[0]


def test_a_failed_run_keeps_its_curves(tmp_path: Path) -> None:
    results = federated(tmp_path, absent={1: ["site-1", "site-2"]})
    assert results["status"] == "FAILED"
    events = EventAccumulator(str(tmp_path / TENSORBOARD / "site-1")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [0]
    assert json.loads((tmp_path / "results.json").read_text())["status"] == "FAILED"


def test_a_password_of_the_tracking_server_is_in_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's errors repeat the address."""

    def refused(*_: object) -> None:
        raise ConnectionError("no answer of https://ana:se@cret@ml.example:5000/x")

    monkeypatch.setitem(tracking._WRITERS, "tensorboard", refused)
    messages = [event["message"] for event in federated(tmp_path)["events"]]
    [message] = [message for message in messages if "not tracked" in message]
    assert "cret" not in message and message.endswith("ConnectionError")
