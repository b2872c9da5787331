"""Machines whose clocks are wrong: what happens during a job, and what happens where no certificate is valid yet."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.provisioned import SERVER, ProvisionedFederation, text_of, wait_until
from e2e.simulation import END_TO_END, importing
from medflare.evaluation.results import load_results
from medflare.federation.local.loop import run_local
from medflare.flare.jobs.building import build_job

pytestmark = END_TO_END

ROUNDS, SEED = 3, 7
HOUR = 3600.0
CLOCKS = {"site-2": 2 * HOUR, "site-3": -2 * HOUR}  # ahead, behind


def clock(seconds: float) -> dict[str, str]:
    """Environment of processes whose clock is ahead by so many seconds; medflare stays importable."""
    return {"CLOCK_SKEW": str(seconds), **importing(Path(__file__).parent / "components" / "skewed")}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProvisionedFederation]:
    """Provisioned half a day ago; each party runs by its own clock."""
    running = ProvisionedFederation(tmp_path_factory.mktemp("federation"), ("site-1", "site-2", "site-3"))
    usual = running.environment
    running.environment = {**usual, **clock(-12 * HOUR)}
    running.provision()
    try:
        for party in (SERVER, *running.sites):
            running.environment = {**usual, **clock(CLOCKS.get(party, 0))}
            running.start(party)
        running.environment = usual
        yield running
    finally:
        running.stop()


def test_wrong_clocks_change_nothing(federation: ProvisionedFederation, tiny_task: dict[str, Any], tmp_path: Path) -> None:
    """One site is two hours ahead, another two hours behind, in all of their processes: nobody takes them for silent or late."""
    identity = federation.submit(build_job("fedsm", tiny_task, rounds=ROUNDS, seed=SEED, byoc=False, out=tmp_path / "job"))
    federation.watch(identity)
    federation.script("fetch.sh", federation.kit("lead"), identity, tmp_path / "fetched")
    results = load_results(tmp_path / "fetched")
    assert (results["status"], results["events"]) == ("COMPLETED", [])
    assert results["sites"] == run_local("fedsm", tiny_task, federation.sites, rounds=ROUNDS, seed=SEED)["sites"]
    ahead = {site: _ahead(federation.kit(site) / identity / "log.txt") for site in federation.sites}
    assert ahead == pytest.approx({site: CLOCKS.get(site, 0) for site in federation.sites}, abs=300), "a job's process had another clock"


def _ahead(log: Path) -> float:
    """Seconds by which the clock of a log's last line is ahead of the file system's."""
    written = [line[:19] for line in log.read_text().splitlines() if line[:2] == "20"][-1]
    return datetime.strptime(written, "%Y-%m-%d %H:%M:%S").timestamp() - log.stat().st_mtime


@pytest.mark.parametrize("party", [SERVER, "site-1"])
@pytest.mark.parametrize(("days", "remedy"), [(-1, "set the clock"), (4000, "set the clock, or have a new kit provisioned if it is right")])
def test_a_clock_by_which_no_certificate_is_valid_is_named_at_the_start(
    federation: ProvisionedFederation, party: str, days: int, remedy: str
) -> None:
    usual, federation.environment = federation.environment, {**federation.environment, **clock(24 * HOUR * days)}
    try:
        done = federation.script("start.sh", federation.kit(party), check=False)
    finally:
        federation.environment = usual
    assert done.returncode != 0
    assert done.stderr.startswith(f"{party}: ") and " is valid from " in done.stderr and done.stderr.strip().endswith(f"; {remedy}")


def test_flare_refuses_a_certificate_that_is_not_valid_yet(federation: ProvisionedFederation) -> None:
    """What `start.sh` foretells does happen."""
    federation.kill(SERVER)
    log = federation.kit(SERVER) / "log.txt"
    before = len(text_of(log))
    federation.environment = {**federation.environment, **clock(-24 * HOUR)}
    federation.launch(SERVER)
    wait_until(lambda: "cert is not valid at validation time" in text_of(log)[before:], f"no word of the certificate in {log}")
