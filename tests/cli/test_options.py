"""The command line becomes hyper-parameters, settings of the task, or one line that says what is wrong."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.pair import EMPTY, PAIR
from helpers import small_tasks
from medflare.cli import main
from medflare.cli.options import environment, set_values, site_names, task_with
from medflare.cli.run import FederationOptions, hyper_and_task
from medflare.core.errors import ConfigError
from medflare.inference.deployed import plain_message, save_model
from medflare.methods.method import Method
from medflare.networks.catalogue import initial_network

ROOT = "MEDFLARE_DATA_ROOT"


def read(*settings: str, method: Method = PAIR, **more: Any) -> tuple[Mapping[str, Any], Any]:
    """What `medflare run pair --set ...` makes of its settings."""
    return hyper_and_task(FederationOptions("pair", set=list(settings), **more), method)


def test_a_name_goes_to_the_half_that_owns_it_or_that_it_says() -> None:
    hyper, task = read("lam=0.3", "selection=last", "warm=false")
    assert hyper == {"site": {"lam": 0.3}, "server": {"selection": "last", "warm": False}}
    assert task == task_with("phantom", {})
    hyper, _ = read("site.beta=1", "server.beta=0.2", "site.lam=none")
    assert hyper == {"site": {"beta": 1, "lam": None}, "server": {"beta": 0.2}}
    assert read("rounds=3")[0]["site"] == {"rounds": 3}, "also a setting of the run"


def test_the_last_one_of_a_name_counts() -> None:
    assert set_values(["lam=1", "beta=2", "lam=3"]) == {"lam": 3, "beta": 2}
    assert set_values(["text=a=b", "list=1,2"]) == {"text": "a=b", "list": (1, 2)}


def test_settings_of_the_task_reach_into_it() -> None:
    hyper, task = read("task.batch_size=8", "task.optimizer.lr=0.5", resplit=4)
    assert hyper == {"site": {}, "server": {}}
    assert (task.batch_size, task.optimizer["lr"], task.resplit) == (8, 0.5, 4)
    assert task.optimizer["name"] == task_with("phantom", {}).optimizer["name"]


def test_training_goes_on_from_a_delivered_model(tmp_path: Path) -> None:
    """With its own task, which names the file by its hash and no place; one of another network is refused before a job is written."""
    task = task_with(small_tasks.tiny_phantom(), {})
    save_model(tmp_path, task, plain_message(initial_network(task, 3).state_dict()), {})
    _, actual = read(model=tmp_path)
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    weights = {"file": "model.safetensors", "sha256": digest, "format": "medflare", "part": "all"}
    assert actual.network == {**task.network, "weights": weights} and actual.size == task.size
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        read("task.network.channels=8,16", model=tmp_path)


@pytest.mark.parametrize(
    ("setting", "method", "named"),
    [
        ("beta=1", PAIR, "site.beta"),
        ("lamm=1", PAIR, "lam"),
        ("server.lam=1", PAIR, "'server.lam'"),
        ("rounds=3", EMPTY, "--rounds"),
        ("data_root=x", PAIR, "--data-root"),
        ("site_algorithm=moon", PAIR, "--site-algorithm"),
        ("task.batch_sice=8", PAIR, "batch_size"),
        ("optimizer.lr=0.1", PAIR, "did you mean task.optimizer.lr?"),
        ("warmup_rounds=2", PAIR, "did you mean task.schedule.warmup_rounds?"),
        ("metric=dice", PAIR, "did you mean task.metric?"),
        ("task.batch_size.x=8", PAIR, "batch_size"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(setting: str, method: Method, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(setting, method=method)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_sites_by_name_or_number() -> None:
    assert site_names("2") == ["site-1", "site-2"]
    assert site_names("B, A,") == ["B", "A"]
    for text in ("0", "", ",", "A,A"):
        with pytest.raises(ConfigError, match="--sites"):
            site_names(text)


def test_the_data_root_is_set_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ROOT, raising=False)
    monkeypatch.chdir(tmp_path)
    with environment(data_root=Path("data")):
        assert os.environ[ROOT] == str(tmp_path / "data")
    assert ROOT not in os.environ
    monkeypatch.setenv(ROOT, "before")
    with pytest.raises(KeyError, match="failed"), environment(data_root=tmp_path):  # noqa: PT012 (what it leaves behind when it fails)
        assert os.environ[ROOT] == str(tmp_path)
        raise KeyError("failed")
    assert os.environ[ROOT] == "before"


def test_the_device_is_set_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEDFLARE_DEVICE", raising=False)
    with environment(device="cpu:0"):
        assert os.environ["MEDFLARE_DEVICE"] == "cpu:0"
    assert "MEDFLARE_DEVICE" not in os.environ
    with pytest.raises(ConfigError, match=r"--device.*cuda:77"), environment(device="cuda:77"):
        pass


def test_a_question_that_is_interrupted_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise typer.Abort

    monkeypatch.setattr("medflare.cli.command._invoke", interrupted)
    assert main(["task", "init", "DATA"]) == 130
    assert capsys.readouterr().err == "medflare: interrupted\n"
