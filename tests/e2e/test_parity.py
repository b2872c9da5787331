"""One federation, three engines: the plain loop, the simulator with a process per site, the simulator with a process per task."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from e2e.simulation import END_TO_END, ROOT, Simulate, Simulation, importing, rewire
from medflare import run_local
from medflare.core.store import read_message
from medflare.flare.jobs.building import build_job
from medflare.tasks.config import load_task

pytestmark = END_TO_END

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


def assert_engines_agree(
    method: str,
    task: dict[str, Any],
    sites: tuple[str, ...],
    outside: tuple[str, ...],
    rounds: int,
    simulate: Simulate,
    folder: Path,
    hyper: Mapping[str, Any] = MappingProxyType({}),
    **variables: str,
) -> None:
    """The plain loop, a process per site and a process per task; side by side, for they wait more than they compute."""
    settings: dict[str, Any] = {"rounds": rounds, "seed": 5, "outside": outside}
    job = build_job(method, task, out=folder / "job", hyper=dict(hyper), **settings)
    n = str(len(sites))
    simulations = [simulate(job, "-n", n, "-t", threads, **variables) for threads in (n, "1")]
    run_local(method, task, [site for site in sites if site not in outside], out=folder / "local", **settings, **hyper)
    for simulation in simulations:
        assert_equal_to_local(simulation.wait(), folder / "local", sites)


def read_local(local: Path) -> dict[str, Any]:
    from medflare.evaluation.results import load_results

    return load_results(local)


# method -> task, the sites from inside, the sites from outside, rounds
CASES = {
    "fedavg": ("phantom", 2, 0, 2),
    "fedsm": ("phantom", 3, 0, 2),
    "prr": ("phantom_grades", 2, 1, 2),
    "grace": ("phantom", 2, 0, 2),
    "iop_fl": ("phantom", 2, 1, 2),
    "feddag": ("phantom_grades", 2, 0, 2),
    "scaffold": ("phantom", 2, 0, 2),  # what a site remembers counts only once the server has it
    "fedrep": ("phantom", 2, 1, 1),  # a part of the model stays at its site, and is asked for in the end
}


@pytest.mark.parametrize("method", CASES)
def test_engines_end_in_the_same_weights(method: str, simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path) -> None:
    name, inside, beyond, rounds = CASES[method]
    task = tiny_task if name == "phantom" else {**load_task(name).to_dict(), "batch_size": 32}
    sites = SITES[: inside + beyond]
    assert_engines_agree(method, task, sites, sites[inside:], rounds, simulate, tmp_path)


def test_a_method_of_another_distribution(
    foreign: str, packages: Path, simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    """Every process finds it where PYTHONPATH says that it is installed, the warm host of `-t 1` too."""
    assert_engines_agree(foreign, tiny_task, SITES[:2], (), 1, simulate, tmp_path, {"selection": "last"}, **importing(packages))
    run_local("fedavg", tiny_task, SITES[:2], rounds=1, seed=5, selection="last", out=tmp_path / "fedavg")
    damped, whole = (tmp_path / name / "models" / "global" / "model.safetensors" for name in ("local", "fedavg"))
    assert largest_difference(damped, whole) > 0, "the step is its own"


def test_the_shortest_command_works(simulate: Simulate, tmp_path: Path) -> None:
    """`nvflare simulator jobs/fedsm`, from a folder that holds jobs/: two sites, one thread, FLARE's own workspace."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    rewire(tmp_path / "jobs" / "fedsm", "server", lambda config: config["workflows"][0]["args"].update(rounds=1))
    simulation = simulate(Path("jobs/fedsm"), workspace=tmp_path / "simulator_workspace").wait()
    run_local("fedsm", "phantom", SITES[:2], rounds=1, seed=0, out=tmp_path / "local")
    assert_equal_to_local(simulation, tmp_path / "local", SITES[:2])
