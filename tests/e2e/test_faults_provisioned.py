"""What really goes wrong in a running federation: a site's process is killed, the server is killed and comes back."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from e2e.components.cable import Cable
from e2e.provisioned import SERVER, ProvisionedFederation, wait_until
from e2e.simulation import problems
from medflare.evaluation.results import load_results
from medflare.flare.jobs import build_job
from medflare.local import run_local

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

ROUNDS, SEED = 5, 7
CUT = 60.0  # seconds without network


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_task) -> Path:
    options = {"rounds": ROUNDS, "seed": SEED, "byoc": False, "silence": 15.0}
    return build_job("fedsm", tiny_task, out=tmp_path_factory.mktemp("jobs") / "fedsm", **options)


def steps_done(federation: ProvisionedFederation, job: str) -> int:
    """Finished steps, as the server's folder of the running job tells."""
    file = federation.kit(SERVER) / job / "medflare" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_killed_server_goes_on_after_its_last_step(federation, job, tiny_task, tmp_path):
    """kill -9 for the server and its job in the middle of a round; started again, the job is resumed; nothing is lost."""
    interrupted = federation.submit(job)
    wait_until(lambda: steps_done(federation, interrupted) >= 2, "the job does not get anywhere", 120)
    federation.kill(SERVER)
    federation.start(SERVER)
    wait_until(lambda: len(federation.connected()) == 3, "the sites do not come back to the new server", 120)

    identity = federation.script("resume.sh", federation.kit("lead"), job, interrupted).stdout.strip()
    results = fetched(federation, identity, tmp_path / "resumed")
    uninterrupted = run_local("fedsm", tiny_task, federation.sites, rounds=ROUNDS, seed=SEED, out=tmp_path / "plain")
    assert results["sites"] == uninterrupted["sites"]
    (resumed,) = (event for event in results["events"] if event["kind"] == "resumed")
    assert int(resumed["message"].split()[3]) >= 2, "at least the steps seen before the server was killed were not done again"
    folder = next((tmp_path / "resumed").rglob("medflare/models"))
    for model in sorted((tmp_path / "plain" / "models").rglob("model.safetensors")):
        expected, found = load_file(model), load_file(folder / model.relative_to(tmp_path / "plain" / "models"))
        assert all(found[name].equal(expected[name]) for name in expected), model


def test_an_aborted_job_can_be_taken_up(federation, job, tiny_task, tmp_path):
    """Stopped by the lead in the middle: it ends as aborted, at the sites too, and what was finished is not lost."""
    aborted = federation.submit(job)
    wait_until(lambda: steps_done(federation, aborted) >= 1, "the job does not get anywhere", 120)
    federation.command("nvflare", "job", "abort", aborted, "--force", "--startup-kit", federation.kit("lead"))
    wait_until(lambda: federation.meta(aborted)["status"] == "FINISHED:ABORTED", "the job is not aborted", 90)
    identity = federation.script("resume.sh", federation.kit("lead"), job, aborted).stdout.strip()
    results = fetched(federation, identity, tmp_path / "resumed")
    assert results["sites"] == run_local("fedsm", tiny_task, federation.sites, rounds=ROUNDS, seed=SEED)["sites"]
    assert not (federation.kit(SERVER) / "medflare" / identity).exists(), "a completed job needs no checkpoint any more"


def test_a_killed_site_is_started_again_and_loses_nothing(federation, job, tiny_task, tmp_path):
    """kill -9 for one site's job process while it trains: another process answers in its place, from what the site remembers."""
    identity = federation.submit(job)
    wait_until(lambda: steps_done(federation, identity) >= 1, "the job does not get anywhere", 120)
    kill_job(federation, "site-2", identity)
    results = fetched(federation, identity, tmp_path / "fetched")
    assert results["status"] == "COMPLETED"
    assert results["sites"] == run_local("fedsm", tiny_task, federation.sites, rounds=ROUNDS, seed=SEED)["sites"]
    assert "starting it again" in (federation.kit("site-2") / "log.txt").read_text()


def test_a_cut_network_costs_time_and_nothing_else(federation, tiny_task, tmp_path):
    """One site's connections are cut for a while shorter than `silence`: it is waited for, comes back and answers."""
    job = build_job("fedsm", tiny_task, rounds=ROUNDS, seed=SEED, byoc=False, silence=120.0, out=tmp_path / "job")
    cable = Cable(federation.port)
    config = federation.kit("site-2") / "startup" / "fed_client.json"
    direct = config.read_text()
    federation.kill("site-2")
    config.write_text(direct.replace(f":{federation.port}", f":{cable.port}"))
    try:
        federation.start("site-2")
        identity = federation.submit(job)
        wait_until(lambda: steps_done(federation, identity) >= 1, "the job does not get anywhere", 120)
        cable.pull()
        time.sleep(CUT)
        cable.plug()
        results = fetched(federation, identity, tmp_path / "fetched")
    finally:
        cable.close()
        config.write_text(direct)
        federation.kill("site-2")
        federation.start("site-2")
    assert results["status"] == "COMPLETED"
    assert results["sites"] == run_local("fedsm", tiny_task, federation.sites, rounds=ROUNDS, seed=SEED)["sites"]


def test_a_site_that_is_gone_for_good_is_named_and_the_others_go_on(federation, job, tmp_path):
    """kill -9 for everything of one site: no hang, no failed job; the rounds end without it, and it is named."""
    identity = federation.submit(job)
    wait_until(lambda: steps_done(federation, identity) >= 1, "the job does not get anywhere", 120)
    federation.kill("site-3")
    results = fetched(federation, identity, tmp_path / "fetched")
    assert results["status"] == "COMPLETED"
    assert set(problems(results, "missing")) == {"site-3"}
    assert results["sites"]["site-1"]["metrics"]["personal"]["dice"] is not None
    assert json.loads((federation.kit("site-1") / identity / "medflare" / "personal" / "card.json").read_text())["site"] == "site-1"


def kill_job(federation: ProvisionedFederation, site: str, job: str) -> None:
    victims = [process for process in federation.processes(site) if any(job in word for word in process.cmdline())]
    assert victims, f"{site} has no process for job {job}"
    for process in victims:
        process.kill()


def fetched(federation: ProvisionedFederation, job: str, folder: Path) -> dict[str, Any]:
    """The results of a job, once it has completed."""
    federation.script("watch.sh", federation.kit("lead"), job, 200, limit=220)
    federation.script("fetch.sh", federation.kit("lead"), job, folder)
    return load_results(folder)
