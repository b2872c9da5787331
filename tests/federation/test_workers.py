"""The plain loop with a process a site: the same bits, and what becomes of processes that die, fail or are left alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from helpers.final_models import same_weights
from helpers.small_tasks import tiny_grades, tiny_phantom
from helpers.waiting import eventually
from medflare import run_local
from medflare.core.errors import ConfigError, StepFailed
from medflare.core.message import Message
from medflare.evaluation.results import load_results
from medflare.federation.exchange import SiteReply
from medflare.federation.local.local_exchange import ForkedExchange, threads_of_a_site
from medflare.methods.base import Step
from medflare.tasks.config import load_task
from medflare.training.opening import open_site
from medflare.training.site import Site

TINY = tiny_grades()
SITES = ("A", "B", "C")


def run(method: str = "fedavg", **settings: Any) -> dict[str, Any]:
    return run_local(method, TINY, SITES, **{"rounds": 2, "seed": 3, **settings})


def at_work(
    name: str, chosen: Callable[[int], bool], action: Callable[[], object]
) -> Callable[[str, str], Site]:
    """An opener whose site `name` does `action` before the batches that are chosen by their number in its process."""
    batches = iter(range(10_000))

    def opener(site: str, role: str) -> Site:
        opened = open_site(site, load_task(TINY), seed=3, role=role)
        if site == name:
            opened.abort = lambda: chosen(next(batches)) and action() is None
        return opened

    return opener


@pytest.mark.parametrize(("method", "settings"), [("fedsm", {}), ("iop_fl", {"outside": ["D"]})])
def test_any_number_of_workers_gives_the_same_bits(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    runs = {
        workers: run(method, workers=workers, out=tmp_path / str(workers), **settings)
        for workers in (1, 3)
    }
    assert same_weights(tmp_path / "1", tmp_path / "3")
    for part in ("status", "sites", "mean", "traffic", "events"):
        assert runs[1][part] == runs[3][part]
    reports = [(tmp_path / str(workers) / "report.html").read_text() for workers in runs]
    # What sites show reaches the report from their processes, too.
    assert reports[0].count("<img") == reports[1].count("<img")


def test_a_killed_process_is_a_failure_of_its_site_alone(tmp_path: Path) -> None:
    """The others continue; a new process continues from the stored state of the killed one."""

    def kill_once() -> None:
        (tmp_path / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    opener = at_work(
        "B", lambda batch: batch == 0 and not (tmp_path / "killed").exists(), kill_once
    )
    results = run(workers=2, rounds=3, min_sites=2, opener=opener, out=tmp_path / "out")
    assert results["status"] == "COMPLETED"
    (failure,) = [event for event in results["events"] if event["kind"] == "failed"]
    assert (
        failure["site"] == "B"
        and "its process ended in" in failure["message"]
        and "(signal 9)" in failure["message"]
    )
    assert results["sites"]["B"]["metrics"]["deployed"]["f1_macro"] is not None


def test_an_error_of_the_code_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    # Other tests leave ended ones, which Python takes note of when it starts the next one.
    before = psutil.Process().children()
    with pytest.raises(
        StepFailed, match=r"at site B in '\w+' of round 1: ZeroDivisionError"
    ) as failed:
        run(
            workers=2,
            min_sites=1,
            opener=at_work("B", lambda batch: True, lambda: 1 / 0),
            out=tmp_path,
        )
    assert "Traceback" in str(failed.value.__cause__)
    assert load_results(tmp_path)["status"] == "FAILED"
    assert not set(psutil.Process().children()) - set(before)


@pytest.mark.slow
def test_no_process_is_left_after_an_interrupt_from_the_keyboard(tmp_path: Path) -> None:
    code = f"""
import signal
from medflare import run_local
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
run_local('fedavg', {TINY!r}, 3, rounds=1000, seed=0, workers=2, say=lambda line: print(line, flush=True))
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)
    assert process.stdout is not None
    assert "round 1/" in process.stdout.readline()
    sites = psutil.Process(process.pid).children()
    assert len(sites) == 3
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    errors = process.communicate(timeout=60)[1]
    assert errors.count("Traceback") <= 1 and "KeyboardInterrupt" in errors
    assert eventually(
        lambda: (
            not any(site.is_running() and site.status() != psutil.STATUS_ZOMBIE for site in sites)
        ),
        seconds=10,
    )


@pytest.mark.slow
def test_a_process_at_work_ends_with_the_run(tmp_path: Path) -> None:
    """Killed, the run ends none of its processes; each has to notice."""
    code = f"""
import time
from medflare import run_local
def opener(name, role):
    print("opened", flush=True)
    time.sleep(60)
run_local('fedavg', {TINY!r}, 2, rounds=1, seed=0, workers=2, opener=opener)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "opened\n"
    sites = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    assert sites
    assert not psutil.wait_procs(sites, timeout=10)[1]


@pytest.mark.parametrize(
    ("value", "threads"), [("4,2", 4), (" 3", 3), ("", 1), ("many", 0), ("-2", 0)]
)
def test_threads_are_those_of_the_first_level(
    value: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    if not threads:
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
            run(workers=2)
        return
    with threads_of_a_site():
        assert torch.get_num_threads() == threads


def test_the_site_whose_last_reply_took_longest_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = ForkedExchange(SITES, lambda site: pytest.fail("forked"), workers=1)
    seconds = {"A": 1.0, "B": 3.0, "C": 2.0}
    begun = list[str]()

    def start(site: str, step: Step, message: Message) -> Connection:
        begun.append(site)
        here, there = Pipe()
        there.send(site)
        return here

    monkeypatch.setattr(exchange, "_start", start)
    monkeypatch.setattr(exchange, "_received", lambda site, step: SiteReply(seconds=seconds[site]))
    for _ in range(2):
        begun.clear()
        exchange(Step("train", 0), {site: Message() for site in SITES})
    assert begun == ["B", "C", "A"]
    seconds["A"] = 9.0
    exchange(Step("train", 1), {"A": Message()})
    begun.clear()
    exchange(Step("train", 2), {site: Message() for site in SITES})
    assert begun == ["A", "B", "C"]


@pytest.mark.slow
def test_sites_train_after_a_parallel_operation_of_the_parent() -> None:
    """Its other threads are in no process that it forks."""
    code = f"""
import torch
from medflare import run_local
torch.randn(1000, 1000) @ torch.randn(1000, 1000)
torch.randn(4_000_000).exp()
assert torch.get_num_threads() == 2
print(run_local('fedavg', {tiny_phantom()!r}, 2, rounds=1, seed=0, workers=2)['status'])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.communicate(timeout=120)[0] == "COMPLETED\n"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
