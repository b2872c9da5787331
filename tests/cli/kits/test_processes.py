"""A kit's processes are known by their command lines, and none of anybody else's is touched."""

import os
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from cli.kits.fake import JOB, Root, make_kit, party, script
from medflare.cli.federation.kits import doctor, processes, starting
from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.processes import running, stop
from medflare.core.errors import ConfigError, StateError

SIGN = "Successfully registered client"
UP = f"$(date '+%F %T'),000 - FederatedClient - INFO - {SIGN}:site-1"  # a shell echoes it


def _wait(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_LOOK", 0.02)
    monkeypatch.setattr(processes, "_SHELL_PERIOD", 0.2)


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


@pytest.mark.parametrize(
    ("account", "remedy"),
    [("flare", r"process \d+, account flare\): stop it as that account, or as root"), ("", r"process \d+\): run the command again")],
)
def test_only_another_account_is_named(site: Kit, monkeypatch: pytest.MonkeyPatch, account: str, remedy: str) -> None:
    def refused(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    own = psutil.Process().username()
    with party(site):
        _wait(lambda: running(site).first is not None)
        for name in ("terminate", "kill"):
            monkeypatch.setattr(psutil.Process, name, refused)
        monkeypatch.setattr(psutil.Process, "username", lambda process: own if process.pid == os.getpid() else account or own)
        with pytest.raises(StateError, match=rf"^site-1 still runs \({remedy}"):
            stop(site, patience=0.1)
    assert (site.folder / "shutdown.fl").exists(), "FLARE's shell ends by it"


def test_who_reads_the_start_script_is_nobody_of_the_partys(site: Kit) -> None:
    script(site.folder / "startup" / "sub_start.sh", "sleep 60; :")
    shell = str(site.folder / "startup" / "sub_start.sh")
    with subprocess.Popen(["tail", "-f", shell]) as reader:
        try:
            _wait(lambda: psutil.Process(reader.pid).name() == "tail")
            assert running(site).first is None and stop(site) == 0 and reader.poll() is None
        finally:
            reader.kill()


@pytest.mark.parametrize("before", [(), ("bash",), ("/bin/sh",)])
def test_the_shell_is_known_by_its_script(site: Kit, before: tuple[str, ...]) -> None:
    script(site.folder / "startup" / "sub_start.sh", "sleep 60; :")
    with subprocess.Popen([*before, str(site.folder / "startup" / "sub_start.sh")]) as shell:
        try:
            _wait(lambda: [process.pid for process in running(site).shells] == [shell.pid])
        finally:
            assert stop(site) >= 1


def test_stop_right_after_start_ends_the_party_that_the_shell_starts_meanwhile(site: Kit, quick: None) -> None:
    _play(site, UP)
    inner = site.folder / "startup" / "sub_start.sh"
    end, (begun, rest) = site.folder / "shutdown.fl", inner.read_text().split("\n", 1)
    late = f"trap : TERM; touch {site.folder}/begun; until [[ -f {end} ]]; do sleep 0.05; done; sleep 0.5; rm {end}"
    inner.write_text(f"{begun}\n{late}\n{rest}")  # a party that starts removes FLARE's note to end
    subprocess.run([site.folder / "startup" / "start.sh"], check=True, start_new_session=True)
    _wait((site.folder / "begun").exists)
    stop(site, patience=1)
    time.sleep(0.3)
    assert running(site).first is None


def test_a_second_start_waits_for_a_party_that_has_not_registered(site: Kit, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    _play(site, "")
    try:
        for _ in range(2):
            with pytest.raises(StateError, match=rf"it keeps trying; end it with medflare site stop {site.folder}$"):
                starting.start(site, 0.5)
        assert capsys.readouterr().err == "site-1 is starting, not registered yet\n"
        assert len(running(site).shells) == 1, "it is not started twice"
        site.log.write_text(f"{datetime.now():%F %T},000 - FederatedClient - INFO - {SIGN}:site-1\n")
        assert starting.start(site, 0.5).startswith("site-1 is up already, since 20")
    finally:
        stop(site)


def test_a_ctrl_c_says_that_the_party_keeps_trying(site: Kit, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(seconds: float) -> None:
        raise KeyboardInterrupt

    _play(site, "")
    try:
        with monkeypatch.context() as patched:
            patched.setattr(starting.time, "sleep", pressed)
            with pytest.raises(KeyboardInterrupt, match=f"it keeps trying; end it with medflare site stop {site.folder}$"):
                starting.start(site, 5)
        _wait(lambda: bool(running(site).parties))  # which a busy machine starts a moment later
    finally:
        stop(site)


def test_no_start_in_a_path_with_blanks(tmp_path: Path, root: Root) -> None:
    kit = make_kit(tmp_path / "my kits" / "site-1", root)
    with pytest.raises(ConfigError, match=r"my kits/site-1: FLARE's scripts take no path with blanks; move the kit$"):
        starting.start(kit)
    assert not kit.output.exists()


def test_the_wait_ends_with_the_party(site: Kit, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_LAUNCH", 0.3)
    _play(site, "", "start.sh: line 32: no such file", loop=False)
    begun = time.monotonic()
    with pytest.raises(StateError, match=r"^site-1 has ended before it was up: ") as said:
        starting.start(site, 60)
    assert time.monotonic() - begun < 20 and "keeps trying" not in str(said.value)


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
    site.log.write_text(
        f"2026-11-21 07:00:00,000 - Client - INFO - {SIGN}:site-1\n2026-11-21 07:00:00,000 - Cell - ERROR - of an earlier start\n"
    )
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
