"""Three lines of Python: the same recipe in FLARE's simulator and in a proof-of-concept federation of real processes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.simulation import END_TO_END, FINISHED_AFTER, environment
from medflare import run_local
from medflare.evaluation.results import load_results

pytestmark = END_TO_END

THREE_LINES = """
from medflare.flare.recipes import FedSMRecipe
from nvflare.recipe import PocEnv, SimEnv
run = FedSMRecipe(task={task}, num_rounds=1, lam=0.3).execute({environment})
print("results in", run.get_result(timeout={patience}, clean_up=False), flush=True)
"""


@pytest.fixture(scope="module")
def local(tiny_task: dict[str, Any]) -> dict[str, Any]:
    """The results of the plain loop."""
    return run_local("fedsm", tiny_task, 2, rounds=1, seed=0, lam=0.3)


@pytest.mark.parametrize("kind", ["SimEnv(num_clients=2)", "PocEnv(num_clients=2)"])
def test_recipe(kind: str, local: dict[str, Any], tiny_task: dict[str, Any], tmp_path: Path) -> None:
    places = {
        "HOME": str(tmp_path),
        "NVFLARE_POC_WORKSPACE": str(tmp_path / "poc"),
        "NVFLARE_SIMULATOR_WORKSPACE_ROOT": str(tmp_path / "sim"),
    }
    code = THREE_LINES.format(environment=kind, task=tiny_task, patience=float(FINISHED_AFTER / 2))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**places),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=FINISHED_AFTER,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("results in")]
    assert said, done.stdout[-3000:] + done.stderr[-3000:]
    results = load_results(Path(said[-1].removeprefix("results in ")))
    assert results["status"] == "COMPLETED"
    assert results["sites"] == local["sites"]
    assert results["traffic"] == local["traffic"]
