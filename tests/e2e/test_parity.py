"""One federation, two engines: the plain loop and FLARE's simulator end in the same weights."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from e2e.simulation import END_TO_END, ROOT, Simulate, Simulation, edit, importing
from helpers.final_models import same_weights
from helpers.small_tasks import tiny_phantom
from helpers.volume_sites import PATCHES, make_sites
from medflare import run_local
from medflare.evaluation.results import load_results
from medflare.flare.jobs.building import build_job
from medflare.methods.catalogue import get_method, method_names

pytestmark = END_TO_END

SITES = ("site-1", "site-2", "site-3")
SMALL_CNN = {"name": "small_cnn", "channels": [4, 8], "batch_norm": True}
# A transform of the presets needs no try in a process of its own (medflare.data.trial).
SMALL_PATCHES = {**PATCHES, "intensity": {"name": "NormalizeIntensity"}}
GRADES = "grades"
VOLUMES = "volumes"  # patches are drawn at the sites, whole volumes are scored
STRUCTURES = "structures"


class Case(NamedTuple):
    """A federation: numbers of sites, and threads of the simulator; with one, FLARE starts a process for each task."""

    task: str
    inside: int
    outside: int
    rounds: int = 2
    threads: int = 3
    hyper: Mapping[str, Any] = {}

    @property
    def sites(self) -> tuple[str, ...]:
        return SITES[: self.inside + self.outside]

    def settings(self, tiny_task: dict[str, Any]) -> dict[str, Any]:
        """What `build_job` and `run_local` take."""
        tasks = {
            GRADES: {**tiny_task, "network": SMALL_CNN},
            STRUCTURES: tiny_phantom(),
            VOLUMES: SMALL_PATCHES,
        }
        task = tasks[self.task]
        outside = self.sites[self.inside :]
        return {"task": task, "rounds": self.rounds, "seed": 5, "outside": outside}


CASES = {  # fedavg: see the method of another distribution below; fedsm: the shortest command
    "prr": Case(GRADES, 2, 1),
    "grace": Case(GRADES, 2, 0),
    "iop_fl": Case(VOLUMES, 2, 1, hyper={"route_epochs": 1, "radius": 1}),
    "feddag": Case(GRADES, 2, 0),
    # The state of a site counts only once the server has the reply.
    "scaffold": Case(GRADES, 2, 0, threads=1),
    # One of each family: part of the network, the server's optimizer, a second model, a survey
    # before the first round, a model for each site, statistics in place of training.
    "fedlora": Case(GRADES, 2, 0, hyper={"rank": 2}),
    "fedadam": Case(GRADES, 2, 0),
    "apfl": Case(GRADES, 2, 0),
    "elcfs": Case(GRADES, 2, 0),
    "ifca": Case(GRADES, 2, 0, hyper={"clusters": 2}),
    "fed_gaussian": Case(GRADES, 2, 0),
}


def other_cases() -> dict[str, Case]:
    """The other methods of the catalogue."""
    cases = {}
    for name in sorted({*method_names()} - {*CASES}):
        task = STRUCTURES if name == "condist" else GRADES
        hyper = {"selector_rounds": 2} if name == "fedsm_extra" else {}
        cases[name] = Case(task, 2, int(get_method(name).outside), hyper=hyper)
    return cases


OTHER_CASES = other_cases()


def assert_equal_to_local(simulation: Simulation, local: Path, sites: tuple[str, ...]) -> None:
    """Every model, at the server and at the sites, and every number of the results."""
    assert simulation.results["status"] == "COMPLETED", simulation.results["reason"]
    models = sorted(path.parent.relative_to(local) for path in local.rglob("model.safetensors"))
    at_server = simulation.folder.joinpath("models").is_dir()  # not of ifca: a model for each site
    assert {path.parts[0] for path in models} == ({"models", "sites"} if at_server else {"sites"})
    for path in models:
        here = (
            simulation.site(path.parts[1]).joinpath(*path.parts[2:])
            if path.parts[0] == "sites"
            else simulation.folder / path
        )
        assert same_weights(local / path, here), path  # bitwise; 1e-6 is promised
    results = load_results(local)
    assert all(simulation.results[part] == results[part] for part in ("sites", "mean", "traffic"))
    assert set(simulation.results["sites"]) == set(sites)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with volumes of every site."""
    return make_sites(tmp_path_factory.mktemp("volumes"), SITES)


@pytest.mark.parametrize(
    "method", [*CASES, *(pytest.param(name, marks=pytest.mark.weekly) for name in OTHER_CASES)]
)
def test_engines_end_in_the_same_weights(
    method: str, simulate: Simulate, tiny_task: dict[str, Any], volumes: Path, tmp_path: Path
) -> None:
    case = {**CASES, **OTHER_CASES}[method]
    root = volumes if case.task == VOLUMES else None
    job = build_job(
        method, **case.settings(tiny_task), hyper=dict(case.hyper), out=tmp_path / "job"
    )
    data = {"MEDFLARE_DATA_ROOT": str(root)} if root else {}
    simulation = simulate(
        job, "-n", str(len(case.sites)), "-t", str(min(case.threads, len(case.sites))), **data
    )
    local = tmp_path / "local"
    sites = case.sites[: case.inside]
    run_local(
        method, sites=sites, **case.settings(tiny_task), **case.hyper, data_root=root, out=local
    )
    assert_equal_to_local(simulation.wait(), local, case.sites)


def test_a_method_of_another_distribution(
    foreign: str, packages: Path, simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    """Every process finds it where PYTHONPATH says that it is installed, the simulator's host too."""
    settings: dict[str, Any] = {"task": tiny_task, "rounds": 1, "seed": 5}
    job = build_job(foreign, **settings, hyper={"selection": "last"}, out=tmp_path / "job")
    simulation = simulate(job, "-n", "2", "-t", "2", **importing(packages))
    for name in (foreign, "fedavg"):
        run_local(name, sites=SITES[:2], **settings, selection="last", out=tmp_path / name)
    assert_equal_to_local(simulation.wait(), tmp_path / foreign, SITES[:2])
    assert not same_weights(
        *(tmp_path / name / "models" / "global" for name in (foreign, "fedavg"))
    ), "the step is its own"


def test_the_shortest_command_works(simulate: Simulate, tmp_path: Path) -> None:
    """`nvflare simulator jobs/fedsm`, from a folder that holds jobs/: two sites, one thread, FLARE's own workspace."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    edit(
        tmp_path / "jobs/fedsm/app/config/config_fed_server.json",
        lambda config: config["workflows"][0]["args"].update(rounds=1),
    )
    simulation = simulate(
        Path("jobs/fedsm"), workspace=tmp_path / "simulator_workspace", MISSING_PACKAGES=""
    ).wait()
    assert "<svg" in (simulation.folder / "report.html").read_text(), (
        "nothing is missing: the report has its figures"
    )
    run_local("fedsm", "phantom", SITES[:2], rounds=1, seed=0, out=tmp_path / "local")
    assert_equal_to_local(simulation, tmp_path / "local", SITES[:2])
