"""Starts simulations and ends those that a failed test leaves behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.provisioned import HOUR, SERVER, ProvisionedFederation
from e2e.simulation import Simulate, importing, simulations
from foreign.install import METHOD, install
from helpers.small_tasks import tiny_grades
from medflare.methods import catalogue


@pytest.fixture
def simulate(tmp_path: Path) -> Iterator[Simulate]:
    """Starts `nvflare simulator JOB ...` in its own process group; `Simulation.wait` for its end."""
    with simulations(tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with another distribution's method; who imports from it, see `importing`, finds the method."""
    return install(tmp_path_factory.mktemp("packages"))


@pytest.fixture
def foreign(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of that method, which this process finds as well until the test ends."""

    def look_again() -> None:
        for cached in (catalogue._foreign, catalogue._builder):
            cached.cache_clear()

    monkeypatch.syspath_prepend(packages)
    look_again()
    yield METHOD
    look_again()


@pytest.fixture(scope="module")
def federation(
    tmp_path_factory: pytest.TempPathFactory, packages: Path
) -> Iterator[ProvisionedFederation]:
    """Provisioned and running: a server and two sites, at which another distribution than medflare is installed too.

    One site's clock is two hours ahead, the other's two hours behind, in all of their processes; nobody takes them for silent or late.
    More sites than two are the simulator's: here every job costs a process a site.
    """
    clocks = {"site-1": 2 * HOUR, "site-2": -2 * HOUR}
    running = ProvisionedFederation(
        tmp_path_factory.mktemp("federation"), ("site-1", "site-2"), clocks
    )
    running.environment = {**running.environment, **importing(packages)}
    running.provision()
    running.send_small_counts()
    try:
        running.start(SERVER, *running.sites)
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def tiny_task() -> dict[str, Any]:
    """Small images and a small network of ours: seconds, not minutes."""
    return tiny_grades(name="phantom_tiny")
