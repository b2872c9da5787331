"""What really goes wrong in a running federation: processes are killed, the network is cut, a job is aborted, a site is gone."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.components.cable import Cable
from e2e.provisioned import (
    PATIENCE,
    SCRIPTS,
    SERVER,
    ProvisionedFederation,
    said,
    text_of,
    wait_until,
)
from e2e.simulation import END_TO_END
from helpers.final_models import same_weights
from medflare.core.store import StateStore
from medflare.evaluation.results import load_results
from medflare.federation.checkpoint import CHECKPOINT
from medflare.federation.local.loop import run_local
from medflare.flare.jobs.building import build_job

pytestmark = END_TO_END

ROUNDS, SEED = (
    30,
    7,
)  # short rounds: before a fault a process stands still, so that the job waits for it
CUT = 40.0  # seconds without network: longer than a lost answer takes to be noticed


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_task: dict[str, Any]) -> Path:
    return build_job(
        "fedsm",
        tiny_task,
        rounds=ROUNDS,
        seed=SEED,
        byoc=False,
        out=tmp_path_factory.mktemp("jobs") / "fedsm",
    )


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_task: dict[str, Any],
    federation: ProvisionedFederation,
) -> tuple[dict[str, Any], Path]:
    """Results and folder of the same federation in the plain loop, where nothing goes wrong."""
    folder = tmp_path_factory.mktemp("plain")
    return run_local(
        "fedsm", tiny_task, federation.sites, rounds=ROUNDS, seed=SEED, out=folder
    ), folder


def steps_done(federation: ProvisionedFederation, job: str) -> int:
    """Steps that a running job has finished and kept, so that a killed server does not repeat them."""
    kept = StateStore(federation.kit(SERVER) / "medflare" / job).load(CHECKPOINT)
    return kept.meta["run"]["finished"] if kept else 0


def test_faults_cost_time_and_nothing_else(
    federation: ProvisionedFederation,
    job: Path,
    uninterrupted: tuple[dict[str, Any], Path],
    tmp_path: Path,
) -> None:
    """One run: kill -9 for the server in the middle of a round; the lead stops the job; the network of a site is cut, another's job process is killed."""
    interrupted = federation.submit(job)
    wait_until(lambda: steps_done(federation, interrupted) >= 2, "the job does not get anywhere")
    log = federation.kit(SERVER) / "log.txt"
    with standing_still(federation, "site-1", interrupted):
        watching = federation.begin(SCRIPTS / "watch.sh", federation.kit("lead"), interrupted)
        assert watching.stdout is not None
        first = watching.stdout.readline()
        before = len(text_of(log))
        federation.kill(SERVER)
    federation.start(SERVER)
    for site in federation.sites:
        back = partial(said, f"Re-activate the client: {site}", log, before)
        wait_until(back, f"{site} does not come back to the new server")

    lead = federation.kit("lead")
    taken_up = steps_done(federation, interrupted)
    aborted = federation.script("resume.sh", lead, job, interrupted).stdout.strip()
    wait_until(
        lambda: steps_done(federation, aborted) > taken_up, "the resumed job does not get anywhere"
    )
    abort(federation, aborted)

    done = steps_done(federation, aborted)
    with through_a_cable(federation, "site-2") as cable:
        identity = resume(federation, job, aborted, tmp_path / "job")
        wait_until(
            lambda: steps_done(federation, identity) > done, "the resumed job does not get anywhere"
        )
        with standing_still(federation, "site-2", identity):
            time.sleep(1)  # its next request is there: it will reply into the cut
            cable.pull()
        for process in job_processes(federation, "site-1", identity):
            process.kill()
        time.sleep(CUT)
        cable.plug()
        results = fetched(federation, identity, tmp_path / "fetched")
    expected, plain = uninterrupted
    assert results["status"] == "COMPLETED"
    assert results["sites"] == expected["sites"]
    events = [event for event in results["events"] if event["kind"] == "resumed"]
    resumed = [event["message"] for event in events]
    finished = [int(word) for message in resumed for word in message.split() if word.isdigit()]
    assert federation.status(interrupted) == "FINISHED:ABANDONED", (
        "the new server closes what the old one left"
    )
    output = first + watching.communicate(timeout=PATIENCE)[0]
    assert (
        watching.returncode == 1
        and "600" in output
        and "the server is back" in output
        and "FINISHED:ABANDONED" in output
    ), output
    assert len(finished) == 2 and 2 <= finished[0] < finished[1], (
        "steps that were seen before were done again"
    )
    assert same_weights(next((tmp_path / "fetched").rglob("medflare/models")), plain / "models")
    assert not (federation.kit(SERVER) / "medflare" / identity).exists(), (
        "a completed job needs no checkpoint any more"
    )


def test_the_others_go_on_without_a_site_which_takes_part_again_once_the_job_is_resumed(
    federation: ProvisionedFederation, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    """FLARE has no way back into a running job for a site that registered anew; the lead stops the job and takes it up with all sites."""
    job = build_job(
        "fedsm",
        tiny_task,
        rounds=ROUNDS,
        seed=SEED,
        byoc=False,
        heartbeat_timeout=40.0,
        min_sites=1,
        out=tmp_path / "job",
    )
    for site in ("site-1", "site-2"):
        local = federation.kit(site) / "local" / "medflare.json"
        settings = json.loads(local.read_text())
        settings["bounds"]["inside_sites"] = 1  # a step may use one site's update
        local.write_text(json.dumps(settings))
    interrupted = federation.submit(job)
    wait_until(lambda: steps_done(federation, interrupted) >= 1, "the job does not get anywhere")
    federation.kill("site-2")
    done = steps_done(federation, interrupted)
    federation.start("site-2")
    wait_until(
        lambda: steps_done(federation, interrupted) > done + 1,
        "the job does not go on without the site",
    )
    assert not any(
        interrupted in word
        for process in federation.processes("site-2")
        for word in process.cmdline()
    )
    abort(federation, interrupted)
    identity = resume(federation, job, interrupted, tmp_path / "resumed")
    results = fetched(federation, identity, tmp_path / "fetched")
    assert results["status"] == "COMPLETED"
    (resumed,) = (
        place for place, event in enumerate(results["events"]) if event["kind"] == "resumed"
    )
    missing = [place for place, event in enumerate(results["events"]) if event["kind"] == "missing"]
    assert (
        missing
        and max(missing) < resumed
        and {results["events"][place]["site"] for place in missing} == {"site-2"}
    )
    assert results["sites"]["site-2"]["metrics"]["personal"][tiny_task["metric"]] is not None
    for site in federation.sites:
        card = federation.kit(site) / "medflare" / identity / "personal" / "card.json"
        assert json.loads(card.read_text())["site"] == site


def job_processes(federation: ProvisionedFederation, site: str, job: str) -> list[psutil.Process]:
    actual = [
        process
        for process in federation.processes(site)
        if any(job in word for word in process.cmdline())
    ]
    assert actual, f"{site} has no process for job {job}"
    return actual


@contextmanager
def standing_still(federation: ProvisionedFederation, site: str, job: str) -> Iterator[None]:
    """A site's process of a job does nothing meanwhile: the job must not end before a fault, which takes the test seconds."""
    processes = job_processes(federation, site, job)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


@contextmanager
def through_a_cable(federation: ProvisionedFederation, site: str) -> Iterator[Cable]:
    """The site is started again and reaches the server through a cable."""
    cable = Cable(federation.port)
    config = federation.kit(site) / "startup" / "fed_client.json"
    direct = config.read_text()
    federation.kill(site)
    config.write_text(direct.replace(f":{federation.port}", f":{cable.port}"))
    try:
        federation.start(site)
        yield cable
    finally:
        cable.close()
        config.write_text(direct)
        federation.kill(site)
        federation.start(site)


def resume(federation: ProvisionedFederation, job: Path, interrupted: str, folder: Path) -> str:
    """As resume.sh does: the id of the job that goes on with an interrupted one."""
    federation.medflare("resume", job, "--job", interrupted, "--out", folder)
    return federation.submit(folder)


def abort(federation: ProvisionedFederation, job: str) -> None:
    """The lead stops a job."""
    lead = federation.kit("lead")
    with standing_still(federation, "site-1", job):
        federation.command("nvflare", "job", "abort", job, "--force", "--startup-kit", lead)
    wait_until(lambda: federation.status(job) == "FINISHED:ABORTED", "the job is not aborted")


def fetched(federation: ProvisionedFederation, job: str, folder: Path) -> dict[str, Any]:
    """The results of a job, once it has completed."""
    federation.watch(job)
    federation.fetch(job, folder)
    return load_results(folder)
