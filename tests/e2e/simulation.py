"""What end-to-end tests share: FLARE's simulator as a user calls it, and a look at what a run left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Path(__file__).parent / "components" / "machine"
FINISHED_AFTER = 600  # seconds that any simulation may take, also on a busy machine
END_TO_END = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * FINISHED_AFTER)]


def importing(*folders: Path) -> dict[str, str]:
    """The environment variable with which these folders, and this checkout, are importable in every process."""
    return {"PYTHONPATH": os.pathsep.join(map(str, (MACHINE, *folders, ROOT / "custom")))}


def environment(**more: str) -> dict[str, str]:
    """The caller's environment with this checkout importable, one thread for every site, and no matplotlib: its figures take long."""
    paths = [str(MACHINE), str(ROOT / "custom"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MISSING_PACKAGES": "matplotlib",
    }
    return {
        **{name: value for name, value in os.environ.items() if name != "MEDFLARE_DATA_ROOT"},
        **own,
        **more,
    }


@dataclass
class Simulation:
    """A finished (or running) simulation."""

    workspace: Path
    process: "subprocess.Popen[str]"
    log: Path

    def wait(self) -> "Simulation":
        try:
            self.process.wait(FINISHED_AFTER)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, 9)
        return self

    @property
    def console(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def folder(self) -> Path:
        """The server's results."""
        return self.workspace / "server" / "simulate_job" / "medflare"

    @property
    def results(self) -> dict[str, Any]:
        file = self.folder / "results.json"
        assert file.exists(), f"no results; the console said:\n{self.console[-6000:]}"
        return json.loads(file.read_text())

    def site(self, name: str) -> Path:
        return self.workspace / name / "medflare" / "simulate_job"


Simulate = Callable[..., Simulation]


@contextmanager
def simulations(folder: Path) -> Iterator[Simulate]:
    """What starts simulations in a folder; those that a failed test leaves behind are ended."""
    started: list[Simulation] = []

    def start(
        job: Path,
        *options: str,
        cwd: Path = folder,
        workspace: Path | None = None,
        **variables: str,
    ) -> Simulation:
        place = workspace or folder / f"workspace-{len(started)}"
        given = ["-w", str(place)] if workspace is None else []
        log = folder / f"console-{len(started)}.txt"
        command = [sys.executable, "-m", "nvflare.cli", "simulator", str(job), *given, *options]
        with log.open("w") as console:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment(**variables),
                stdout=console,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        started.append(Simulation(place, process, log))
        return started[-1]

    try:
        yield start
    finally:
        for simulation in started:
            if simulation.process.poll() is None:
                os.killpg(simulation.process.pid, 9)
                simulation.process.wait()


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content of a JSON file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def use_executor(job: Path, source: Path, name: str, **args: Any) -> None:
    """Let a job run an executor of its own: a module in app/custom/, as a user would."""
    (job / "app" / "custom" / source.name).write_text(source.read_text())

    def change(config: dict[str, Any]) -> None:
        executor = config["executors"][0]["executor"]
        executor["path"] = f"{source.stem}.{name}"
        executor["args"] = {**executor["args"], **args}

    edit(job / "app" / "config" / "config_fed_client.json", change)


def problems(results: Mapping[str, Any], kind: str) -> dict[str | None, list[str]]:
    """site -> messages of the events of one kind; None: those that name no site."""
    actual: dict[str | None, list[str]] = {}
    for event in results["events"]:
        if event["kind"] == kind:
            actual.setdefault(event["site"], []).append(event["message"])
    return actual
