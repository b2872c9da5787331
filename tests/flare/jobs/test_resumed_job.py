"""The job that takes up an interrupted one: both sides name it, the submitted folder stays as it is."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from nvflare.fuel.flare_api.api_spec import JobNotRunning

import medflare
from flare.jobs.sessions import Served
from flare.jobs.sessions import job as listed
from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.flare.controller import MedflareController
from medflare.flare.exchange.participants import interrupted
from medflare.flare.executors import FedSMExecutor
from medflare.flare.jobs.building import build_job, resumed_job
from medflare.flare.jobs.resuming import resumable


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


def test_a_full_disk_leaves_no_half_of_a_job(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, place: str, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        resumed_job(job, "0-1-2", tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


class Several(Served):
    """A server with jobs in several states; of those that are called running one has a process."""

    def list_jobs(self, detailed: bool) -> list[dict[str, Any]]:
        states = ("FINISHED:COMPLETED", "SUBMITTED", "RUNNING", "RUNNING", "FINISHED:ABORTED", "FINISHED:ABANDONED")
        return [listed(f"{number}000aaaa-full", f"job-{number}", state) for number, state in enumerate(states)]

    def show_stats(self, identity: str, target: str) -> dict[str, Any]:
        if identity != "2000aaaa-full":
            raise JobNotRunning("job is not running")
        return {}


@pytest.mark.parametrize("wanted", ["3000", "4000aaaa", "5000aaaa-full", "job-4"])
def test_an_interrupted_job_is_found_by_what_a_list_shows(wanted: str) -> None:
    """Job 3 is one that a server which was started again calls running for ever."""
    number = wanted[-1] if wanted.startswith("job") else wanted[0]
    assert resumable(cast(Any, Several()), wanted) == f"{number}000aaaa-full"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("nonsense", "^unknown job 'nonsense'"),
        ("0000aaaa", "^job 0000aaaa-full has completed and needs no resuming"),
        ("1000aaaa", r"^job 1000aaaa-full has not begun yet \(SUBMITTED\)"),
        ("2000aaaa", "^job 2000aaaa-full is running; .* abort it before you resume it"),
    ],
)
def test_another_job_is_not_taken_up(wanted: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resumable(cast(Any, Several()), wanted)


@pytest.mark.parametrize("script", ["submit.sh", "watch.sh", "fetch.sh", "resume.sh", "start.sh", "stop.sh"])
def test_a_script_without_arguments_says_what_it_takes(script: str) -> None:
    place = Path(__file__).resolve().parents[3] / "poc_workspace" / script
    done = subprocess.run(["bash", str(place)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"usage: {script} KIT") and done.stderr.count("\n") == 1


def test_the_script_refuses_a_kit_of_nobody_in_one_line(tmp_path: Path) -> None:
    place = Path(__file__).resolve().parents[3] / "poc_workspace" / "resume.sh"
    path = {**os.environ, "PYTHONPATH": str(Path(medflare.__file__).parents[1])}
    done = subprocess.run(["bash", str(place), str(tmp_path), "job", "id"], capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"resume.sh: {tmp_path} is no startup kit of a person")
