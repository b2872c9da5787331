"""The plain loop with a process a site: the same bits, and what becomes of processes that die, fail or are left alone."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from medflare import run_local
from medflare.core.errors import ConfigError
from medflare.data.sites.opening import open_site
from medflare.data.sites.site import Site
from medflare.federation.local.parcels import Parcel, receive, send
from medflare.federation.local.workers import threads_of_a_site
from medflare.tasks.config import load_task
from small import tiny_phantom

TINY = tiny_phantom(size=[16, 16])
SITES = ("A", "B", "C")


def run(method: str = "fedavg", **settings: Any) -> dict[str, Any]:
    return run_local(method, TINY, SITES, **{"rounds": 2, "seed": 3, **settings})


def delivered(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("model.safetensors"))}


def at_work(name: str, phase_is: Callable[[int], bool], what: Callable[[], None]) -> Callable[[str, str], Site]:
    """An opener whose site `name` does `what` before the batches that `phase_is` chooses by their number in its process."""
    batches = iter(range(10_000))

    def opener(site: str, role: str) -> Site:
        opened = open_site(site, load_task(TINY), seed=3, role=role)
        if site == name:
            opened.abort = lambda: what() is not None if phase_is(next(batches)) else False  # type: ignore[func-returns-value]
        return opened

    return opener


@pytest.mark.parametrize(("method", "settings"), [("fedsm", {}), ("iop_fl", {"outside": ["D"]})])
def test_any_number_of_workers_gives_the_same_bits(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    runs = {workers: run(method, workers=workers, out=tmp_path / str(workers), **settings) for workers in (1, 3)}
    assert delivered(tmp_path / "1") == delivered(tmp_path / "3") != {}
    for part in ("status", "sites", "mean", "traffic", "events"):
        assert runs[1][part] == runs[3][part]
    reports = [(tmp_path / str(workers) / "report.html").read_text() for workers in runs]
    assert reports[0].count("<img") == reports[1].count("<img")  # what sites show reaches the report from their processes, too


def test_a_killed_process_is_a_failure_of_its_site(tmp_path: Path) -> None:
    """The others go on; a new process takes up what the killed one had written."""
    opener = at_work("B", lambda batch: batch == 0 and not (tmp_path / "killed").exists(), lambda: kill_once(tmp_path / "killed"))
    results = run(workers=2, rounds=3, min_sites=2, opener=opener, out=tmp_path / "out")
    assert results["status"] == "COMPLETED"
    (failure,) = [event for event in results["events"] if event["kind"] == "failed"]
    assert failure["site"] == "B" and "its process ended in" in failure["message"] and "(signal 9)" in failure["message"]
    assert results["sites"]["B"]["metrics"]["deployed"]["dice"] is not None


def kill_once(mark: Path) -> None:
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_of_the_code_ends_the_run_with_its_traceback() -> None:
    before = psutil.Process().children()  # other tests leave ended ones, which Python takes note of when it starts the next one
    with pytest.raises(RuntimeError, match=r"site B failed in '\w+' of round 0:(.|\n)*ZeroDivisionError"):
        run(workers=2, opener=at_work("B", lambda batch: True, lambda: divide(0)))
    assert not set(psutil.Process().children()) - set(before)


def divide(number: int) -> None:
    _ = 1 / number


def test_what_is_not_possible() -> None:
    with pytest.raises(ConfigError, match="workers"):
        run(workers=0)


@pytest.mark.slow
def test_interrupted_from_the_keyboard_nothing_stays_behind(tmp_path: Path) -> None:
    code = f"""
import signal
from medflare import run_local
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
run_local('fedavg', {TINY!r}, 3, rounds=1000, seed=0, workers=2, say=lambda line: print(line, flush=True))
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)
    assert process.stdout is not None
    assert "round 0" in process.stdout.readline()
    sites = psutil.Process(process.pid).children()
    assert len(sites) == 3
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    errors = process.communicate(timeout=60)[1]
    assert errors.count("Traceback") <= 1 and "KeyboardInterrupt" in errors
    end = time.monotonic() + 10
    while any(site.is_running() and site.status() != psutil.STATUS_ZOMBIE for site in sites):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_parcels() -> None:
    numbers = {"count": torch.tensor(7), "none": torch.zeros(0, 3), "half": torch.tensor([1.5], dtype=torch.bfloat16)}
    states = {"model": {"w": torch.arange(12.0).reshape(3, 4).T, **numbers}, "flags": {"on": torch.tensor([True, False])}, "empty": {}}
    here, there = socket.socketpair()
    with here, there:
        send(here, Parcel({"facts": {"n": 3}}, states))
        send(here, Parcel({"facts": {}}))
        first, second = receive(there), receive(there)
        here.close()
        with pytest.raises(EOFError, match="closed"):
            receive(there)
    assert first.message.facts == {"n": 3} and second.states == {}
    assert first.states.keys() == states.keys()
    for entry, state in states.items():
        assert [(name, one.dtype) for name, one in first.states[entry].items()] == [(name, one.dtype) for name, one in state.items()]
        assert all(torch.equal(first.states[entry][name], tensor) for name, tensor in state.items())
    first.states["model"]["w"].mul_(2)  # nobody else's any more


def no_room(*full: Path) -> Callable[[int, int, int], None]:
    """What takes the place of `os.posix_fallocate` where these folders are full: a file without a name knows its folder's device."""
    devices = {folder.stat().st_dev for folder in full}

    def allocate(file: int, offset: int, size: int) -> None:
        if os.fstat(file).st_dev in devices:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(file, size)

    return allocate


SHARED = Path("/dev/shm")
apart = pytest.mark.skipif(
    not SHARED.is_dir() or SHARED.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev, reason="needs shared memory of its own"
)


@apart
def test_a_parcel_goes_round_memory_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_room(SHARED))
    here, there = socket.socketpair()
    with here, there:
        send(here, Parcel({"facts": {}}, {"model": {"w": torch.arange(5)}}))
        assert receive(there).states["model"]["w"].tolist() == [0, 1, 2, 3, 4]


@apart
@pytest.mark.parametrize("full_at", ["the site", "the server"])
def test_without_room_anywhere_a_run_says_so(full_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a site that is a failure of the site."""
    everywhere, here = no_room(SHARED, Path(tempfile.gettempdir())), os.getpid()
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *file: (everywhere if (os.getpid() == here) == (full_at == "the server") else no_room())(*file)
    )
    results = run(workers=2, rounds=1)
    said = results["reason"] if full_at == "the server" else results["events"][0]["message"]
    assert results["status"] == "FAILED" and "takes no message of" in said and "--shm-size" in said
    assert full_at == "the server" or said.startswith("site A: ")


def test_shared_memory_of_a_container_is_enough() -> None:
    """With 1 MB of it, writing beyond its end used to kill the process (SIGBUS), which no mock shows."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs a file system of its own")
    code = """
import socket, torch
from medflare.federation.local.parcels import Parcel, receive, send
here, there = socket.socketpair()
send(here, Parcel({"facts": {}}, {"model": {"w": torch.ones(1_000_000)}}))
print(receive(there).states["model"]["w"].sum().item())
"""
    shell = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", shell, sys.executable, code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "1000000.0\n"), ended.stderr


# ---- threads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "threads"), [("4,2", 4), (" 3", 3), ("", 1), (None, 1)])
def test_threads_are_those_of_the_first_level(said: str | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    with threads_of_a_site():
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize("said", ["many", "0", "-2", ",4"])
def test_threads_that_are_no_number(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
        run(workers=2)
