"""Three lines of Python: the same recipe in FLARE's simulator and in a proof-of-concept federation of real processes."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.provisioned import ProvisionedFederation, said, wait_until
from e2e.simulation import END_TO_END, FINISHED_AFTER, environment
from medflare import run_local
from medflare.evaluation.results import load_results

pytestmark = END_TO_END

THREE_LINES = """
from medflare.flare.recipes import FedSMRecipe
from nvflare.recipe import ProdEnv, SimEnv
run = FedSMRecipe(task={task}, num_rounds=1, lam=0.3).execute({environment})
print("results in", run.get_result(timeout={patience}, clean_up=False), flush=True)
"""
SITES = ("site-1", "site-2")


class PocFederation(ProvisionedFederation):
    """Two sites of poc_workspace/project_poc.yml, prepared and started by `nvflare poc`."""

    def __init__(self, folder: Path):
        super().__init__(folder, SITES)
        self.kits = folder / "poc" / "medflare" / "prod_00"
        self.environment = {**self.environment, "NVFLARE_POC_WORKSPACE": str(folder / "poc")}

    def kit(self, name: str) -> Path:
        return super().kit("server" if name == "localhost" else name)

    def start_all(self) -> None:
        self.command("nvflare", "poc", "prepare", "-i", self.project("project_poc.yml"), "--force")
        self.command("nvflare", "poc", "start", "--no-wait")
        for site in SITES:
            log = self.kit(site) / "log.txt"
            up = partial(said, "Successfully registered client", log)
            wait_until(up, f"{site} is not up, see {log}")

    def stop(self) -> None:
        """`nvflare poc start` leaves its processes to themselves: those that work in this folder are this federation's."""
        super().stop()
        self.end_all_below(self.kits)


@pytest.fixture
def poc(tmp_path: Path) -> Iterator[PocFederation]:
    running = PocFederation(tmp_path)
    try:
        running.start_all()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def local(tiny_task: dict[str, Any]) -> dict[str, Any]:
    """The results of the plain loop."""
    return run_local("fedsm", tiny_task, SITES, rounds=1, seed=0, lam=0.3)


def executed(where: str, variables: dict[str, str], task: dict[str, Any], folder: Path) -> Path:
    """The folder of the results of the three lines in one of FLARE's environments."""
    code = THREE_LINES.format(environment=where, task=task, patience=float(FINISHED_AFTER / 2))
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=FINISHED_AFTER,
        check=False,
    )
    output = [line for line in done.stdout.splitlines() if line.startswith("results in")]
    assert output and output[-1] != "results in None", done.stdout[-3000:] + done.stderr[-3000:]
    return Path(output[-1].removeprefix("results in "))


def assert_same(folder: Path, local: dict[str, Any]) -> None:
    results = load_results(folder)
    assert results["status"] == "COMPLETED"
    assert (results["sites"], results["traffic"]) == (local["sites"], local["traffic"])


def test_in_the_simulator(local: dict[str, Any], tiny_task: dict[str, Any], tmp_path: Path) -> None:
    variables = environment(
        HOME=str(tmp_path), NVFLARE_SIMULATOR_WORKSPACE_ROOT=str(tmp_path / "sim")
    )
    assert_same(executed("SimEnv(num_clients=2)", variables, tiny_task, tmp_path), local)


def test_in_a_proof_of_concept(
    poc: PocFederation, local: dict[str, Any], tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    lead = (
        f"ProdEnv(startup_kit_location={str(poc.kit('lead'))!r}, username='lead@coordination.org')"
    )
    assert_same(executed(lead, poc.environment, tiny_task, tmp_path), local)
    listed = poc.medflare("job", "list", "--kit", poc.kit("lead")).stdout
    assert "FINISHED:COMPLETED  fedsm   1" in listed
    identity, status = poc.watch("fedsm-phantom_tiny").stdout.split()[-2:]
    assert status == "FINISHED:COMPLETED", "by its name"
    poc.fetch(identity, tmp_path / "fetched")
    assert_same(tmp_path / "fetched", local)
