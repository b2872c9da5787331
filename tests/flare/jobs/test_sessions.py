"""The jobs of a federation: found by name and id; their table; which can be resumed; those that a killed server left."""

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus
from nvflare.fuel.flare_api.api_spec import AuthorizationError, JobNotRunning
from nvflare.private.fed.server.job_runner import JobRunner

from flare.jobs.sessions import Served, job
from medflare.cli import main
from medflare.core.errors import ConfigError, MedflareError
from medflare.flare.components import UnfinishedJobs
from medflare.flare.jobs import sessions
from medflare.flare.jobs.sessions import (
    _name,
    found_job,
    id_of,
    interrupted_job,
    job_table,
    jobs_of,
)

OLD = "11112222-old"
NEW = "11113333-new"
OTHER = "44445555-other"


def props(**about: Any) -> dict[str, Any]:
    return {"custom_props": {"medflare": about}}


def test_a_job_is_found_by_id_and_its_beginning() -> None:
    jobs = [job(OLD), job(NEW, name="4444"), job(OTHER, name=OLD)]
    for required, expected in (
        (NEW, NEW),
        ("11113", NEW),
        ("44445555-OTHER", OTHER),
        ("4444", OTHER),
        (OLD, OLD),
    ):
        assert id_of(found_job(jobs, required)) == expected


def test_a_name_that_another_lead_gave_is_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Served("RUNNING")
    monkeypatch.setattr(server, "list_jobs", lambda detailed: [job(OLD, name="a\x1b[2Jb\u202e")])
    assert list(map(_name, jobs_of(cast(Any, server)))) == [r"a\x1b[2Jb\u202e"]


def test_of_a_name_the_newest_that_runs() -> None:
    jobs = [job(OLD, status="FINISHED:COMPLETED"), job(NEW), job(OTHER)]
    assert id_of(found_job(jobs, "fedsm-brain")) == OTHER
    assert id_of(found_job(jobs[:1], "fedsm-brain")) == OLD


def test_what_is_not_found_or_not_clear_is_one_line() -> None:
    done = [job(OLD, status="FINISHED:COMPLETED"), job(NEW, status="FINISHED:ABORTED")]
    for required, token in (
        ("fedsm-brain", "11113333"),
        ("1111", "1111"),
        ("fedsm-brian", "fedsm-brian"),
        ("", "job"),
    ):
        with pytest.raises(ConfigError, match=token):
            found_job(done if required else [], required)


def test_the_table_says_who_takes_up_whom() -> None:
    about = {"method": "fedsm", "rounds": 20}
    jobs = [
        job(OLD, **props(**about)),
        job(NEW, **props(**about, resume=OLD)),
        job(OTHER, duration="N/A"),
    ]
    heading, *rows = job_table(jobs).splitlines()
    assert heading.split() == [
        "name",
        "id",
        "state",
        "method",
        "rounds",
        "submitted",
        "by",
        "at",
        "took",
    ]
    first = ["fedsm-brain", "11112222", "RUNNING", "fedsm", "20", "lead@coordination.org"]
    assert rows[0].split()[:6] == first and rows[0].endswith("0:01:05")
    assert rows[1].endswith("resumes 11112222")
    assert rows[2].split()[3:5] == ["-", "-"], "of a job that says nothing of itself"
    assert len({row.index("RUNNING") for row in rows}) == 1
    assert job_table([]) == "no jobs"
    for odd in ("x", None, 5, {"resume": 5}, {"resume": None, "method": [1]}):
        (heading, row) = job_table([job(OLD, custom_props={"medflare": odd})]).splitlines()
        assert row.split()[1] == "11112222", "another lead's job says what it likes"
    table = job_table([job(OLD, name="x" * 10_000), job(NEW)])
    assert max(map(len, table.splitlines())) < 400


def test_a_member_who_submits_is_told_to_take_the_leads_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "startup").mkdir()
    kit_file = tmp_path / "startup" / "fed_admin.json"
    kit_file.write_text(json.dumps({"admin": {"username": "member@hospital.org"}}))
    connection = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(sessions, "new_secure_session", lambda *_: connection)
    with pytest.raises(MedflareError, match="a lead's may"), sessions.session(tmp_path):
        raise AuthorizationError("user not authorized for the action 'submit_job'")


@pytest.mark.parametrize("content", [None, {"admin": {}}, {"admin": None}, []])
def test_a_folder_that_is_no_kit_of_a_person_is_refused_in_one_line(
    content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "startup").mkdir()
        (tmp_path / "startup" / "fed_admin.json").write_text(json.dumps(content))
    assert main(["job", "list", "--kit", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert str(tmp_path) in message and message.count("\n") == 1


class Several(Served):
    """A server with jobs in several states; of those that are called running one has a process."""

    def list_jobs(self, detailed: bool) -> list[dict[str, Any]]:
        states = (
            "FINISHED:COMPLETED",
            "SUBMITTED",
            "RUNNING",
            "RUNNING",
            "FINISHED:ABORTED",
            "FINISHED:ABANDONED",
        )
        return [
            job(f"{number}000aaaa-full", f"job-{number}", state)
            for number, state in enumerate(states)
        ]

    def show_stats(self, identity: str, target: str) -> dict[str, Any]:
        if identity != "2000aaaa-full":
            raise JobNotRunning("job is not running")
        return {}


def test_an_interrupted_job_is_found_by_what_a_list_shows_and_no_other_is_taken_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Job 3 is one that a server which was started again calls running for ever."""
    monkeypatch.setattr("medflare.flare.jobs.sessions.session", lambda kit: nullcontext(Several()))
    for shown, number in (("3000", 3), ("4000aaaa", 4), ("5000aaaa-full", 5), ("job-4", 4)):
        assert interrupted_job(Path("kit"), shown) == f"{number}000aaaa-full"
    for shown, token in (
        ("nonsense", "nonsense"),
        ("0000aaaa", "completed"),
        ("1000aaaa", "SUBMITTED"),
        ("2000aaaa", "RUNNING"),
    ):
        with pytest.raises(ConfigError, match=token):
            interrupted_job(Path("kit"), shown)


@pytest.mark.parametrize(
    "script", ["submit.sh", "watch.sh", "fetch.sh", "resume.sh", "start.sh", "stop.sh"]
)
def test_a_script_without_arguments_says_what_it_takes(script: str) -> None:
    place = Path(__file__).resolve().parents[3] / "poc_workspace" / script
    done = subprocess.run(["bash", str(place)], capture_output=True, text=True, check=False)
    assert (
        (done.returncode, done.stdout) == (2, "")
        and done.stderr.startswith(f"usage: {script} KIT")
        and done.stderr.count("\n") == 1
    )


class Manager:
    """FLARE's, with a job in every state."""

    def __init__(self) -> None:
        self.states = {status.name: status for status in RunStatus}

    def get_jobs_by_status(
        self, states: list[RunStatus], fl_ctx: FLContext
    ) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(job_id=job) for job, state in self.states.items() if state in states
        ]

    def set_status(self, job: str, state: RunStatus, fl_ctx: FLContext) -> None:
        self.states[job] = state


def test_what_ran_when_the_server_died_is_closed_when_it_starts() -> None:
    manager = Manager()
    components = {SystemComponents.JOB_MANAGER: manager}
    engine = SimpleNamespace(job_runner=JobRunner(workspace_root=""), get_component=components.get)
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    for event in (EventType.SYSTEM_START, EventType.START_RUN):
        UnfinishedJobs().handle_event(event, fl_ctx)
    for name, state in manager.states.items():
        assert state.name == name
    UnfinishedJobs().handle_event(EventType.SYSTEM_BOOTSTRAP, fl_ctx)
    changed = {job for job, state in manager.states.items() if state.name != job}
    assert changed == {"RUNNING", "DISPATCHED"} and manager.states["RUNNING"] is RunStatus.ABANDONED
