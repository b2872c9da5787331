"""Starts simulations and ends those that a failed test leaves behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.simulation import Simulate, Simulation, environment


@pytest.fixture
def simulate(tmp_path: Path) -> Iterator[Simulate]:
    """Starts `nvflare simulator JOB ...` in its own process group; `Simulation.wait` for its end."""
    started: list[Simulation] = []

    def start(job: Path, *options: str, cwd: Path = tmp_path, workspace: Path | None = None, **variables: str) -> Simulation:
        place = workspace or tmp_path / f"workspace-{len(started)}"
        given = ["-w", str(place)] if workspace is None else []
        log = tmp_path / f"console-{len(started)}.txt"
        command = [sys.executable, "-m", "nvflare.cli", "simulator", str(job), *given, *options]
        with log.open("w") as console:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment(**variables), stdout=console, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        started.append(Simulation(place, process, log))
        return started[-1]

    yield start
    for simulation in started:
        if simulation.process.poll() is None:
            os.killpg(simulation.process.pid, 9)
            simulation.process.wait()
