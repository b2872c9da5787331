"""One federation, three engines: the plain loop, the simulator with a process per site, the simulator with a process per task."""

import shutil
from pathlib import Path

import pytest

from e2e.simulation import ROOT, Simulate, Simulation, rewire
from medflare import run_local
from medflare.core.store import read_message
from medflare.flare.jobs import build_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

SITES = ("site-1", "site-2", "site-3")


def largest_difference(one: Path, other: Path) -> float:
    """Over all tensors of two stored models."""
    states, others = read_message(one).states, read_message(other).states
    assert {entry: list(state) for entry, state in states.items()} == {entry: list(state) for entry, state in others.items()}
    pairs = [(state[name], others[entry][name]) for entry, state in states.items() for name in state]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


def assert_equal_to_local(simulation: Simulation, local: Path, sites: tuple[str, ...]) -> None:
    """Every model, at the server and at the sites, and every number of the results."""
    assert simulation.results["status"] == "COMPLETED"
    models = sorted(path.relative_to(local) for path in local.rglob("model.safetensors"))
    assert {path.parts[0] for path in models} == {"models", "sites"}
    for path in models:
        here = simulation.site(path.parts[1]).joinpath(*path.parts[2:]) if path.parts[0] == "sites" else simulation.folder / path
        assert largest_difference(local / path, here) == 0, path  # bitwise; what is promised is 1e-6
    results = read_local(local)
    for part in ("sites", "mean", "traffic"):
        assert simulation.results[part] == results[part]
    assert set(simulation.results["sites"]) == set(sites)


def read_local(local: Path) -> dict:
    from medflare.evaluation.results import load_results

    return load_results(local)


CASES = {
    "fedavg": ("phantom", 3, ()),
    "fedsm": ("phantom", 3, ()),
    "prr": ("phantom_grades", 2, ("site-3",)),
    "grace": ("phantom", 2, ()),
    "iop_fl": ("phantom", 2, ("site-3",)),
    "feddag": ("phantom_grades", 2, ()),
}


@pytest.mark.parametrize("method", CASES)
def test_engines_end_in_the_same_weights(method: str, simulate: Simulate, tmp_path: Path) -> None:
    task, rounds, outside = CASES[method]
    local = tmp_path / "local"
    run_local(method, task, [site for site in SITES if site not in outside], rounds=rounds, seed=5, outside=outside, out=local)
    job = build_job(method, task, out=tmp_path / "job", rounds=rounds, seed=5, outside=outside)
    assert_equal_to_local(simulate(job, "-n", "3", "-t", "3").wait(), local, SITES)
    assert_equal_to_local(simulate(job, "-n", "3", "-t", "1").wait(), local, SITES)


def test_the_shortest_command_works(simulate: Simulate, tmp_path: Path) -> None:
    """`nvflare simulator jobs/fedsm`, from a folder that holds jobs/: two sites, one thread, FLARE's own workspace."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    rewire(tmp_path / "jobs" / "fedsm", "server", lambda config: config["workflows"][0]["args"].update(rounds=1))
    simulation = simulate(Path("jobs/fedsm"), workspace=tmp_path / "simulator_workspace").wait()
    run_local("fedsm", "phantom", SITES[:2], rounds=1, seed=0, out=tmp_path / "local")
    assert_equal_to_local(simulation, tmp_path / "local", SITES[:2])
