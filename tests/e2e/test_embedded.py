"""A job that carries its code, where nothing but torch, MONAI and FLARE and what these bring along is installed."""

import json
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
from medflare.evaluation.results import load_results
from medflare.federation.local.loop import run_local
from medflare.flare.jobs.building import build_job, copy_package

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS, SEED = 1, 5
SPLITS = ("training", "validation", "test")


def brought_along(names: set[str]) -> set[str]:
    """The distributions and everything that they require, extras aside."""
    found: set[str] = set()
    open_names = {canonicalize_name(name) for name in names}
    while open_names:
        found |= open_names
        needed = [Requirement(line) for name in open_names for line in requires(name) or ()]
        open_names = {canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})} - found
    return found


def missing_modules() -> set[str]:
    """Top-level modules of every other distribution that is installed here."""
    there = brought_along({"torch", "monai", "nvflare"})
    owners = {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}
    assert len(there) < len({canonicalize_name(one.name) for one in distributions()}), "this environment has nothing to hide"
    return {module for module, names in owners.items() if not names & there} - {"medflare"}


def bare_site() -> dict[str, str]:
    """Environment variables of a process to which all of that, and this checkout, is not installed."""
    missing = ",".join(sorted(missing_modules()))
    return {"MISSING_PACKAGES": missing, "MISSING_FOLDER": str(ROOT / "custom"), "PYTHONPATH": str(MACHINE)}


@pytest.fixture(scope="module")
def plain(tiny_task: dict[str, Any]) -> dict[str, Any]:
    return run_local("fedsm", tiny_task, 2, rounds=ROUNDS, seed=SEED)


def without_hd95(sites: dict[str, Any]) -> dict[str, Any]:
    """What sites report but the boundary distance, which MONAI measures with SciPy."""
    return {
        name: {**site, "metrics": {model: {**values, "hd95": None} for model, values in site["metrics"].items()}}
        for name, site in sites.items()
    }


def said(code: str, folder: Path) -> str:
    """The last line of what a bare site's Python says; in a file, so that nobody waits for the processes that it leaves."""
    words = folder / "said.txt"
    with words.open("w") as file:
        command = [sys.executable, "-c", code]
        subprocess.run(command, env=environment(**bare_site()), cwd=folder, stdout=file, stderr=subprocess.STDOUT, check=False)
    return words.read_text().strip().splitlines()[-1]


def test_the_bare_site_is_bare(tmp_path: Path) -> None:
    hidden = missing_modules()
    assert {"PIL", "sklearn", "scipy", "matplotlib", "rich", "nibabel", "pydicom", "tensorboard"} <= hidden
    assert "PIL" in said("import torch, monai, nvflare; import PIL", tmp_path)


def test_a_job_with_its_code_gives_the_installed_packages_results(
    simulate: Simulate, tiny_task: dict[str, Any], plain: dict[str, Any], tmp_path: Path
) -> None:
    job = build_job("fedsm", tiny_task, rounds=ROUNDS, seed=SEED, embed_code=True, out=tmp_path / "a job")
    simulation = simulate(job, "-n", "2", "-t", "2", **bare_site()).wait()
    results = simulation.results
    assert (results["status"], results["reason"]) == ("COMPLETED", None)
    assert without_hd95(results["sites"]) == without_hd95(plain["sites"]) and results["traffic"] == plain["traffic"]
    assert results["sites"]["site-1"]["metrics"]["global"]["hd95"] is None
    assert "No module named" not in simulation.console and "see results.json and report.html" in simulation.console
    assert "matplotlib is not installed" in (simulation.folder / "report.html").read_text()


def test_the_warm_host_finds_the_code_of_the_job(tmp_path: Path) -> None:
    """FLARE's simulator tells a site's process where the code is by `sys.path`, which a process of its own does not inherit."""
    copy_package(tmp_path / "app" / "custom")
    code = f"""
import os, sys
sys.path.append({str(tmp_path / "app" / "custom")!r})
from medflare.core.errors import MedflareError
from medflare.flare.participants import ParticipantSpec
from medflare.flare.messages import register_decomposers, to_shareable
from medflare.core.message import Message
from medflare.flare.simulator import Relay
register_decomposers()
relay = Relay(os.getpid())
relay.start("fedsm")
try:
    relay.answer(ParticipantSpec("A", "fedsm", "", 0, "none.json", "none.json", "."), "enrol", 0, to_shareable(Message()), lambda: False)
except MedflareError as error:
    print(error)
"""
    assert "none.json" in said(code, tmp_path)


def test_parties_that_allow_code_run_it_and_the_others_refuse(
    tiny_task: dict[str, Any], plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Provisioned, server and sites bare: refused in words by the policies that provision.sh installs, run with `--bring-code`."""
    job = build_job("fedsm", tiny_task, rounds=ROUNDS, seed=SEED, embed_code=True, min_sites=2, out=tmp_path / "job")
    federation = ProvisionedFederation(tmp_path_factory.mktemp("federation"), ("site-1", "site-2"))
    federation.provision()
    parties, leads = (SERVER, *federation.sites), federation.environment
    for party in parties:
        federation.command(sys.executable, SCRIPTS / "party.py", "setup", federation.kit(party), "--bring-code")
    closed = federation.kit("site-2") / "local" / "authorization.json"
    allowed = closed.read_text()
    closed.write_text((SCRIPTS / "local" / "site" / "authorization.json").read_text())
    try:
        federation.environment = {**leads, **bare_site()}
        federation.start(*parties)
        federation.environment = leads
        refused = federation.watch(federation.submit(job), check=False)
        assert refused.returncode != 0 and "site-2" in refused.stdout
        federation.kill("site-2")
        closed.write_text(allowed)
        federation.environment = {**leads, **bare_site()}
        federation.start("site-2")
        federation.environment = leads
        identity = federation.submit(job)
        federation.watch(identity)
        federation.script("fetch.sh", federation.kit("lead"), identity, tmp_path / "fetched")
    finally:
        federation.stop()
    results = load_results(tmp_path / "fetched")
    assert results["status"] == "COMPLETED" and without_hd95(results["sites"]) == without_hd95(plain["sites"])
    assert list((federation.kit("site-1") / identity).rglob("custom/medflare/flare/executors.py")), "the code came with the job"


def test_a_site_that_cannot_read_its_images_says_what_to_install(simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path) -> None:
    job = build_job("fedavg", tiny_task, rounds=1, embed_code=True, out=tmp_path / "job")
    for site in ("site-1", "site-2"):
        folder = tmp_path / "data" / site
        folder.mkdir(parents=True)
        splits = {split: [{"image": f"{split}.png", "label": f"{split}.png", "patient": split}] for split in SPLITS}
        (folder / "datalist.json").write_text(json.dumps(splits))
        for split in SPLITS:
            (folder / f"{split}.png").write_bytes(b"a picture")
    simulation = simulate(job, "-n", "2", "-t", "2", **bare_site(), MEDFLARE_DATA_ROOT=str(tmp_path / "data")).wait()
    assert simulation.results["status"] == "FAILED"
    assert "pillow" in simulation.results["reason"]
