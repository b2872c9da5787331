"""A kit's processes are known by their command lines, and none of anybody else's is touched."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cli.kits.fake import JOB, Root, make_kit, party, script
from medflare.cli.federation.kits import doctor, starting
from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.processes import running, stop
from medflare.core.errors import ConfigError, StateError

UP = "2026-11-22 07:00:00,000 - FederatedClient - INFO - Successfully registered client:site-1"


def _wait(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_LOOK", 0.02)


def _play(kit: Kit, says: str, error: str = "", loop: bool = True) -> None:
    """FLARE's scripts in a kit: a shell in the background that starts a party, which writes to the log."""
    script(kit.folder / "startup" / "start.sh", 'DIR="$( cd "$( dirname "$0" )" && pwd )"\n$DIR/sub_start.sh &\n')
    command = f"bash -c 'sleep 60; :' python3 -m nvflare.private.fed.app.client.client_train -m {kit.folder} &"
    wait = f'until [[ -f "{kit.folder}/shutdown.fl" ]]; do sleep 0.05; done; rm -f {kit.folder}/*.fl'
    lines = [f"echo $$ > {kit.folder}/daemon_pid.fl", command if loop else "", f'echo "{error}"', f'echo "{says}" >> {kit.log}', wait]
    script(kit.folder / "startup" / "sub_start.sh", "\n".join(lines if loop else lines[:-1]))


def test_the_party_and_its_jobs_are_found_and_a_neighbours_are_not(site: Kit, tmp_path: Path, root: Root) -> None:
    neighbour = make_kit(tmp_path / "site-10", root)
    assert running(site).first is None
    with party(site) as own, party(site, "job") as job, party(neighbour), party(neighbour, "job"):
        _wait(lambda: len(running(site).all) == 2)
        found = running(site)
        assert [process.pid for process in found.parties] == [own.pid] and found.first == found.parties[0]
        assert {name: [process.pid for process in processes] for name, processes in found.jobs.items()} == {JOB: [job.pid]}


def test_a_pid_file_that_outlived_a_power_cut_is_no_sign_of_life(site: Kit, quick: None) -> None:
    (site.folder / "daemon_pid.fl").write_text(str(os.getpid()))  # FLARE's own start would take this process for its shell
    assert running(site).first is None
    _play(site, UP)
    try:
        assert starting.start(site, 20) == "site-1 is up"
    finally:
        stop(site)


def test_stop_ends_party_jobs_and_their_children_and_nobody_else(site: Kit, tmp_path: Path, root: Root) -> None:
    neighbour = make_kit(tmp_path / "site-10", root)
    with party(site) as own, party(site, "job") as job, party(neighbour) as other:
        _wait(lambda: len(psutil.Process(own.pid).children()) == len(psutil.Process(job.pid).children()) == 1)
        children = [child for process in (own, job) for child in psutil.Process(process.pid).children()]
        assert stop(site) == 4
        assert own.poll() is not None and job.poll() is not None and psutil.wait_procs(children, 5)[1] == []
        assert other.poll() is None and running(neighbour).first is not None
    assert stop(site) == 0 and not (site.folder / "shutdown.fl").exists(), "else the next start would end at once"


def test_what_is_another_accounts_is_said(site: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    with party(site):
        _wait(lambda: running(site).first is not None)
        for name in ("terminate", "kill"):
            monkeypatch.setattr(psutil.Process, name, refused)
        with pytest.raises(StateError, match=r"^site-1 still runs \(process \d+, account \w+\): stop it as that account"):
            stop(site, patience=0.1)
    assert (site.folder / "shutdown.fl").exists(), "FLARE's shell ends by it"


def test_started_once_and_stopped_with_its_shell(site: Kit, quick: None) -> None:
    _play(site, UP)
    try:
        assert starting.start(site, 20) == "site-1 is up"
        first = running(site).first
        assert first is not None and starting.start(site).startswith("site-1 is up already, since 20")
        assert len(running(site).shells) == 1 and (site.output.stat().st_mode & 0o077) == 0
    finally:
        assert stop(site) >= 2
    assert running(site).first is None and not list(site.folder.glob("*.fl"))


@pytest.mark.parametrize(
    ("log", "output", "reason"),
    [
        ("2026-11-22 07:00:00,000 - Cell - ERROR - [identity=a] - cert is not valid", "", "cert is not valid; see"),
        ("", "Traceback (most recent call last):\nValueError: no such option", "ValueError: no such option; see"),
        ("", "", "nothing listens at localhost port 1; ask the project admin whether the server is up; see"),
    ],
)
def test_the_reason_of_a_failed_start(site: Kit, quick: None, log: str, output: str, reason: str) -> None:
    site.log.write_text(f"{UP}\n2026-11-21 07:00:00,000 - Cell - ERROR - of an earlier start\n")
    _play(site, log, output, loop=False)
    with pytest.raises(StateError) as said:
        starting.start(site, 0.4)
    assert reason in str(said.value) and "\n" not in str(said.value)


def test_no_start_by_a_wrong_clock(tmp_path: Path, root: Root) -> None:
    kit = make_kit(tmp_path / "site-1", root, days=(-9, -2))
    with pytest.raises(ConfigError, match=r"^site-1: client\.crt is valid from .*; set the clock, or have a new kit provisioned"):
        starting.start(kit)


def test_no_preflight_on_a_live_kit(site: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, len(calls) - 1)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    with party(site):
        _wait(lambda: running(site).first is not None)
        with pytest.raises(ConfigError, match=r"^site-1 runs \(process \d+\): FLARE's preflight would register it a second time"):
            doctor.preflight(site)
    assert calls == []
    doctor.preflight(site)
    assert calls[0][-2:] == ["-p", site.folder]
    with pytest.raises(StateError, match="did not pass"):
        doctor.preflight(site)
