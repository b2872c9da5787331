"""What a party is doing, read from what FLARE and medflare leave in its kit."""

import os
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from cli.kits.fake import JOB, party, script
from medflare.cli.federation.kits import status
from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.processes import running, stop
from medflare.cli.federation.kits.status import Left, party_state
from medflare.core.store import write_json
from medflare.federation.delivery import SiteFolder
from medflare.flare.names import BUILT, REFUSED
from medflare.methods.catalogue import get_method
from small import small_task

NOW = datetime(2026, 11, 22, 12, 0, 0)
REGISTERED = "Successfully registered client:site-1"
UNREACHABLE = "[ME=site-1 D=server CH=task TP=heart_beat SEQ=0] cannot send to 'server': target_unreachable"
ANOTHER = "[ME=site-1 D=site-1.0b6f CH=aux TP=fed.event SEQ=0] cannot send to 'site-1.0b6f': target_unreachable"
CONNECTOR = "Connector [CH1 ACTIVE grpc://localhost:1] failed with exception OSError: refused"
HEADER = "time,phase,round,entry,tensors,bytes,purpose,sent\n"


def _line(seconds: float, text: str) -> str:
    """A line of FLARE's log, so many seconds before now."""
    return f"{NOW - timedelta(seconds=seconds):%F %T},123 - Communicator - INFO - {text}\n"


def _job(kit: Kit) -> Path:
    folder = kit.folder / JOB
    own = SiteFolder(kit.folder / "medflare" / JOB, kit.name, get_method("fedavg"), small_task(), 0)
    own.tell("train", 1, 20, True)
    folder.mkdir()
    (kit.folder / "medflare" / JOB / "outbound.csv").write_text(
        f"{HEADER}t,train,0,model,3,2000,update,yes\nt,train,0,facts,0,100,loss,yes\nt,train,1,everything,,,too large,no\n"
    )
    write_json(folder / "meta.json", {"name": "fedsm-brain"})
    for role in ("deployed", "personal"):
        write_json(kit.folder / "medflare" / JOB / role / "card.json", {})
    return folder


def test_a_kit_that_never_ran(site: Kit) -> None:
    state = party_state(site)
    assert (state.up_since, state.contact, state.trouble, state.jobs) == ("", "", "", ())


def test_a_running_job(site: Kit) -> None:
    _job(site)
    (site.folder / "not-a-job-at-all").mkdir()
    with party(site), party(site, "job"):
        state = party_state(site)
    (job,) = state.jobs
    assert (job.id, job.name, job.running, job.step, job.round, job.rounds, job.working) == (JOB, "fedsm-brain", True, "train", 1, 20, True)
    assert job.left == Left(entries=2, bytes=2100, withheld=1) and job.models == ("deployed", "personal")
    assert state.up_since.startswith(f"{datetime.now():%F}")
    assert state.to_dict()["jobs"][0]["left"]["bytes"] == 2100


def test_why_the_party_refused_a_job(site: Kit) -> None:
    """FLARE removes the folder of such a job; the party's own log keeps the reason. A line of another job's is not taken for it."""
    lines = (
        f"[E:1][R:{JOB}][T:2026-11-22 11:00:00][U:site-1][A:{REFUSED}]component os.system refused: it is not listed",
        f"[E:2][R:{JOB}][T:2026-11-22 11:00:00][U:site-1][A:{BUILT}]component mine.Executor",
    )
    (site.folder / "audit.log").write_text("\n".join(lines) + "\n")
    (job,) = party_state(site).jobs
    assert (job.id, job.refused, job.running) == (JOB, ("component os.system refused: it is not listed",), False)
    _job(site)
    (job,) = party_state(site).jobs
    assert job.refused and job.round == 1 and job.folder == str(site.folder / "medflare" / JOB)


def test_a_job_without_a_process_works_on_nothing(site: Kit) -> None:
    _job(site)
    (job,) = party_state(site).jobs
    assert not job.running and not job.working and job.round == 1


@pytest.fixture
def up(site: Kit, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The site runs since ten minutes before now."""
    monkeypatch.setattr(status, "since", lambda process: NOW.timestamp() - 600)
    with party(site) as process:
        while running(site).first is None:
            assert process.poll() is None
        yield


@pytest.mark.parametrize(
    ("log", "contact", "trouble"),
    [
        (_line(500, REGISTERED), "2026-11-22 12:00:00", ""),
        (_line(500, REGISTERED) + _line(20, "Failed to send heartbeat. again"), "2026-11-22 11:51:40", "Failed"),
        (_line(500, REGISTERED) + _line(20, UNREACHABLE), "2026-11-22 11:51:40", UNREACHABLE),
        (_line(500, REGISTERED) + _line(20, CONNECTOR), "2026-11-22 11:51:40", "Connector [CH1"),
        (_line(500, REGISTERED) + _line(20, UNREACHABLE) + _line(10, "getTask: train"), "2026-11-22 12:00:00", ""),
        (_line(500, REGISTERED) + _line(20, ANOTHER), "2026-11-22 12:00:00", ""),
        (_line(500, "Failed to send heartbeat.") + _line(400, REGISTERED), "2026-11-22 12:00:00", ""),
        (_line(5, "get_task request authentication failed."), "", "not registered yet: get_task request authentication failed."),
        (_line(5, "something else"), "", "not registered yet"),
        (_line(700, REGISTERED), "2026-11-22 11:48:20", "not registered yet"),
        (_line(700, REGISTERED) + _line(650, UNREACHABLE), "2026-11-22 11:48:20", "not registered yet"),
    ],
)
def test_contact_with_the_server(site: Kit, up: None, log: str, contact: str, trouble: str) -> None:
    site.log.write_text(log)
    state = party_state(site, NOW)
    assert state.contact == contact and state.trouble.startswith(trouble) and bool(state.trouble) == bool(trouble)
    assert state.to_dict()["registered"] is ("not registered" not in trouble)


def test_a_registration_of_long_ago_counts_in_a_long_log(site: Kit, up: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_TAIL", 200)
    (site.folder / "log.txt.1").write_text(_line(500, REGISTERED))
    site.log.write_text(_line(400, "something else") * 10)
    state = party_state(site, NOW)
    assert state.registered and state.contact == "2026-11-22 12:00:00"


def test_a_shell_whose_party_is_gone_has_no_contact(site: Kit) -> None:
    script(site.folder / "startup" / "sub_start.sh", "sleep 60; :")
    site.log.write_text(f"{datetime.now() + timedelta(seconds=5):%F %T},000 - Client - INFO - {REGISTERED}\n")
    with subprocess.Popen([site.folder / "startup" / "sub_start.sh"]) as shell:
        try:
            while running(site).first is None:
                assert shell.poll() is None
            state = party_state(site)
            assert state.up_since and not state.registered and state.trouble == "not registered yet"
        finally:
            stop(site)


def test_the_server_tells_of_a_site_that_registered_twice(server: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "since", lambda process: NOW.timestamp() - 600)
    refused = "Failed to re-activate the client:site-1: already registered with another token."
    with party(server) as process:
        while running(server).first is None:
            assert process.poll() is None
        assert party_state(server, NOW).trouble == "not started yet"
        server.log.write_text(_line(500, "Server started") + _line(400, "Client: New site-1") + _line(9, refused))
        state = party_state(server, NOW)
    assert state.registered and state.trouble == refused


def test_one_that_does_not_run_had_contact_when_its_log_says(site: Kit) -> None:
    site.log.write_text(_line(500, REGISTERED))
    assert party_state(site, NOW).contact == "2026-11-22 11:51:40"


def test_one_that_was_killed_had_contact_as_long_as_its_job(site: Kit) -> None:
    site.log.write_text(_line(500, REGISTERED))
    folder = site.folder / JOB
    folder.mkdir()
    (folder / "log.txt").write_text(_line(100, "SubmitUpdate to: localhost"))
    assert party_state(site, NOW).contact == "2026-11-22 11:58:20"


def test_the_newest_job_comes_first(site: Kit) -> None:
    for day, start in enumerate("abc"):
        folder = site.folder / f"{start}{JOB[1:]}"
        folder.mkdir()
        os.utime(folder, (day * 86400, day * 86400))
    assert [job.id[0] for job in party_state(site).jobs] == ["c", "b", "a"]
