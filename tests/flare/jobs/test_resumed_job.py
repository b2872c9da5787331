"""The job that takes up an interrupted one: both sides name it, the submitted folder stays as it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.flare.controller import MedflareController
from medflare.flare.exchange.participants import interrupted
from medflare.flare.executors import FedSMExecutor
from medflare.flare.jobs.building import build_job, resumed_job


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return build_job("fedsm", "phantom", rounds=3, out=tmp_path / "job", byoc=False)


def arguments(folder: Path) -> tuple[dict, dict]:
    server, client = (json.loads((folder / "app" / "config" / f"config_fed_{side}.json").read_text()) for side in ("server", "client"))
    return server["workflows"][0]["args"], client["executors"][0]["executor"]["args"]


def test_both_sides_name_the_interrupted_job(job: Path, tmp_path: Path) -> None:
    before = arguments(job)
    server, client = arguments(resumed_job(job, "0-1-2", tmp_path / "again"))
    assert arguments(job) == before
    assert server == {**before[0], "resume": "0-1-2"} and client == {**before[1], "resume": "0-1-2"}
    about = json.loads((tmp_path / "again" / "meta.json").read_text())["custom_props"]["medflare"]
    assert about == {"method": "fedsm", "rounds": 3, "resume": "0-1-2"}, "what a list of jobs shows"
    assert MedflareController(**server).resume == FedSMExecutor(**client).resume == "0-1-2"


@pytest.mark.parametrize("job_id", ["..", "../other", "/etc", ""])
def test_an_id_leads_nowhere_else(job_id: str) -> None:
    with pytest.raises(ConfigError, match="is no job id"):
        interrupted(job_id)


def test_command_line(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(job), "--job", "0-1-2"]) == 0
    assert arguments(job.with_name("job-resumed"))[0]["resume"] == "0-1-2"
    assert "nvflare job submit -j" in capsys.readouterr().out


def wrong_meta(job: Path) -> None:
    (job / "meta.json").unlink()


def cut_short(job: Path) -> None:
    (job / "meta.json").write_text('{"name": ')


def anothers(job: Path) -> None:
    (job / "app" / "config" / "config_fed_server.json").write_text("{}")


def list_of_none(job: Path) -> None:
    (job / "meta.json").write_text("[]")


@pytest.mark.parametrize("spoil", [wrong_meta, cut_short, anothers, list_of_none])
def test_what_is_no_job_of_medflares_is_one_line(spoil: Callable[[Path], None], job: Path, tmp_path: Path) -> None:
    spoil(job)
    with pytest.raises(ConfigError, match=r"is no job folder of medflare's .*; name the folder that was submitted") as refused:
        resumed_job(job, "0-1-2", tmp_path / "again")
    assert "\n" not in str(refused.value) and not (tmp_path / "again").exists()


def test_refusals(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="exists; choose another folder"):
        resumed_job(job, "0-1-2", job)
    with pytest.raises(ConfigError, match="is no job folder"):
        resumed_job(tmp_path / "nothing", "0-1-2", tmp_path / "again")
    assert main(["resume", str(tmp_path)]) == 1
    assert "no checkpoint in" in capsys.readouterr().err
