"""A job that carries its code, where nothing but torch, MONAI and FLARE and what these bring along is installed."""

import subprocess
import sys
from importlib.metadata import distributions, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from e2e.provisioned import SCRIPTS, SERVER, ProvisionedFederation
from e2e.simulation import MACHINE, ROOT, Simulate, environment
from helpers.small_tasks import tiny_phantom
from medflare.evaluation.results import load_results
from medflare.federation.local.loop import run_local
from medflare.flare.jobs.building import build_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = 1
SEED = 5


def brought_along(names: set[str]) -> set[str]:
    """The distributions and everything that they require, extras aside."""
    actual: set[str] = set()
    open_names = {canonicalize_name(name) for name in names}
    while open_names:
        actual |= open_names
        needed = [Requirement(line) for name in open_names for line in requires(name) or ()]
        open_names = {
            canonicalize_name(one.name)
            for one in needed
            if one.marker is None or one.marker.evaluate({"extra": ""})
        } - actual
    return actual


def missing_modules() -> set[str]:
    """Top-level modules of every other distribution that is installed here."""
    there = brought_along({"torch", "monai", "nvflare"})
    owners = {
        module: {canonicalize_name(name) for name in names}
        for module, names in packages_distributions().items()
    }
    assert len(there) < len({canonicalize_name(one.name) for one in distributions()}), (
        "this environment has nothing to hide"
    )
    return {module for module, names in owners.items() if not names & there} - {"medflare"}


def bare_site() -> dict[str, str]:
    """Environment variables of a process to which all of that, and this checkout, is not installed."""
    missing = ",".join(sorted(missing_modules()))
    return {
        "MISSING_PACKAGES": missing,
        "MISSING_FOLDER": str(ROOT / "custom"),
        "PYTHONPATH": str(MACHINE),
    }


@pytest.fixture(scope="module")
def tiny_task() -> dict[str, Any]:
    """With a network, loss and metrics of MONAI, which is there; scikit-learn, for those of classes, is not."""
    return tiny_phantom(name="phantom_tiny", batch_size=16)


@pytest.fixture(scope="module")
def plain(tiny_task: dict[str, Any]) -> dict[str, Any]:
    return run_local("fedsm", tiny_task, 2, rounds=ROUNDS, seed=SEED)


def without_hd95(content: Any) -> Any:
    """Results but the boundary distance, which MONAI measures with SciPy."""
    return (
        {name: without_hd95(value) for name, value in content.items() if name != "hd95"}
        if isinstance(content, dict)
        else content
    )


def test_a_job_with_its_code_gives_the_installed_packages_results(
    simulate: Simulate, tiny_task: dict[str, Any], plain: dict[str, Any], tmp_path: Path
) -> None:
    hidden = {"PIL", "sklearn", "scipy", "matplotlib", "rich", "nibabel", "pydicom", "tensorboard"}
    assert hidden <= missing_modules()
    done = subprocess.run(
        [sys.executable, "-c", "import PIL"],
        env=environment(**bare_site()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'PIL'" in done.stderr, "a bare site is bare"
    job = build_job(
        "fedsm", tiny_task, rounds=ROUNDS, seed=SEED, embed_code=True, out=tmp_path / "a job"
    )
    simulation = simulate(job, "-n", "2", "-t", "2", **bare_site()).wait()
    results = simulation.results
    assert (results["status"], results["reason"]) == ("COMPLETED", None)
    assert (
        without_hd95(results["sites"]) == without_hd95(plain["sites"])
        and results["traffic"] == plain["traffic"]
    )
    assert results["sites"]["site-1"]["metrics"]["global"]["hd95"] is None
    assert (
        "No module named" not in simulation.console
        and "see results.json and report.html" in simulation.console
    )
    assert "matplotlib is not installed" in (simulation.folder / "report.html").read_text()


def test_parties_that_allow_code_run_it(
    tiny_task: dict[str, Any],
    plain: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    """Provisioned, with `--bring-code` at server and sites, which are bare; test_provisioned.py has parties that refuse."""
    job = build_job(
        "fedsm",
        tiny_task,
        rounds=ROUNDS,
        seed=SEED,
        embed_code=True,
        min_sites=2,
        out=tmp_path / "job",
    )
    federation = ProvisionedFederation(tmp_path_factory.mktemp("federation"), ("site-1", "site-2"))
    federation.provision()
    parties = (SERVER, *federation.sites)
    lead = federation.environment
    site, *others = (federation.kit(party) for party in reversed(parties))
    federation.command(sys.executable, SCRIPTS / "party.py", "setup", site, "--bring-code")
    for kit in others:  # the same command, in one process
        federation.medflare("site", "setup", kit, "--bring-code")
    try:
        federation.environment = {**lead, **bare_site()}
        federation.start(*parties)
        federation.environment = lead
        identity = federation.submit(job)
        federation.watch(identity)
        federation.fetch(identity, tmp_path / "fetched")
    finally:
        federation.stop()
    results = load_results(tmp_path / "fetched")
    assert results["status"] == "COMPLETED" and without_hd95(results["sites"]) == without_hd95(
        plain["sites"]
    )
    assert list(
        (federation.kit("site-1") / identity).rglob("custom/medflare/flare/executors.py")
    ), "the code came with the job"
