"""Sites that share a machine's cores: threads that wait for each other soon sleep, unless the user says how they are to wait."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from medflare.flare.executors import Preload
from medflare.flare.simulator.relay import Relay

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
SOON = {"GOMP_SPINCOUNT": "1000"}
WORDS = [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "3"}]


@pytest.fixture(params=WORDS, ids=str)
def said(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """What the user says of threads."""
    before = dict(os.environ)
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(request.param)
    yield request.param
    os.environ.clear()
    os.environ.update(before)


def of_threads(environment: Any) -> dict[str, str]:
    return {name: environment[name] for name in NAMES if name in environment}


def expected(said: dict[str, str]) -> dict[str, str]:
    return said if said.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} else {**said, **SOON}


def test_in_the_simulators_host(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, *, env, **options: started.append(env))
    relay = Relay(0)
    try:
        relay.start("fedavg")
    finally:
        shutil.rmtree(relay.folder)
    assert [of_threads(one) for one in started] == [expected(said)]
    assert of_threads(os.environ) == said, "FLARE's own process stays as it is"


@pytest.mark.parametrize("sites", [1, 3])
def test_in_a_sites_own_process(said: dict[str, str], sites: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone on its machine, as a hospital's is, it is left as it is."""
    words = ["python", "-u", "-m", "nvflare.private.fed.app.client.client_train", "-m", "/workspace"]

    def gone() -> list[str]:
        raise psutil.NoSuchProcess(1)

    others = [SimpleNamespace(cmdline=gone), SimpleNamespace(cmdline=lambda: ["python"])]
    monkeypatch.setattr(psutil, "process_iter", lambda: [*others, *[SimpleNamespace(cmdline=lambda: words)] * sites])
    monkeypatch.setattr(Preload, "_load", lambda preload: None)
    Preload("fedavg").finish()
    assert of_threads(os.environ) == (expected(said) if sites > 1 else said)
