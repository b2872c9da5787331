"""A federation as hospitals run it: provisioned startup kits, separate processes, mutual TLS, roles and policies."""

import contextlib
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from e2e.provisioned import PEOPLE, SERVER, ProvisionedFederation, said, text_of, wait_until
from e2e.simulation import END_TO_END, edit
from helpers.final_models import same_weights
from medflare.evaluation.results import load_results
from medflare.federation.local.loop import run_local
from medflare.flare.jobs.building import build_job

pytestmark = END_TO_END

ROUNDS = 2
SEED = 3
ROLES = ("global", "personal", "deployed")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_task: dict[str, Any]) -> Path:
    """jobs/fedsm with fewer rounds and smaller images, in the form that hospitals accept."""
    settings = {"rounds": ROUNDS, "seed": SEED, "cross_site": True, "byoc": False}
    return build_job("fedsm", tiny_task, out=tmp_path_factory.mktemp("jobs") / "fedsm", **settings)


@pytest.fixture(scope="module")
def plain(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_task: dict[str, Any],
    federation: ProvisionedFederation,
) -> Path:
    """The same federation in the plain loop."""
    folder = tmp_path_factory.mktemp("plain")
    results = run_local(
        "fedsm", tiny_task, federation.sites, rounds=ROUNDS, seed=SEED, cross_site=True, out=folder
    )
    assert results["status"] == "COMPLETED"
    return folder


def test_a_job_gives_the_plain_loops_models_and_metrics(
    federation: ProvisionedFederation, job: Path, plain: Path, tmp_path: Path
) -> None:
    """By any clock. One site agrees that its personal model is tested at the others."""
    sharing = federation.sites[0]
    with changed(
        federation.kit(sharing) / "local" / "medflare.json",
        lambda local: local.update(share_model=True),
    ):
        identity = federation.script("submit.sh", federation.kit("lead"), job).stdout.strip()
        watched = federation.script("watch.sh", federation.kit("lead"), identity).stdout
    assert all(
        f"round {round}/{ROUNDS} train: site-1 loss" in watched for round in range(1, ROUNDS + 1)
    ), "every step, the last ones too"
    shown = federation.script("fetch.sh", federation.kit("lead"), identity, tmp_path / "fetched")
    assert "COMPLETED" in shown.stdout and "site-2" in shown.stdout

    actual = load_results(tmp_path / "fetched")
    expected = load_results(plain)
    assert actual["cross_site"] == {sharing: expected["cross_site"][sharing]}
    unshared = [event for event in actual["events"] if "share_model" in event["message"]]
    assert [event["site"] for event in unshared] == [
        site for site in federation.sites if site != sharing
    ]
    size = sum(
        tensor.nbytes
        for tensor in load_file(
            plain / "models" / "personal" / sharing / "model.safetensors"
        ).values()
    )
    for direction, copies in (
        ("down_bytes", len(unshared) * len(federation.sites)),
        ("up_bytes", len(unshared)),
    ):
        difference = expected["traffic"][direction] - actual["traffic"][direction]
        assert difference == copies * size, "a personal model for each site that tests it"
    actual["events"] = [event for event in actual["events"] if event not in unshared]
    _same_results({**actual, "traffic": {}}, {**expected, "traffic": {}})
    assert same_weights(next((tmp_path / "fetched").rglob("medflare/models")), plain / "models")
    for site in federation.sites:
        own = federation.kit(site) / "medflare" / identity
        # Each hospital holds its own models; nothing was fetched from the server for them.
        for role in ROLES:
            assert same_weights(own / role, plain / "sites" / site / role)
            assert json.loads((own / role / "card.json").read_text())["site"] == site
        assert not [
            path
            for path in (federation.kit(site) / identity).rglob("*")
            if path.name in {"medflare", "report.html", "scores"}
        ]
        assert "component medflare.flare.executors.FedSMExecutor" in text_of(
            federation.kit(site) / "audit.log"
        )
    ahead = {site: _ahead(federation.kit(site) / identity / "log.txt") for site in federation.sites}
    assert ahead == pytest.approx(
        {site: federation.clocks.get(site, 0) for site in federation.sites}, abs=300
    ), "a job had another clock"


def test_a_member_may_not_submit(federation: ProvisionedFederation, job: Path) -> None:
    member = federation.kit("member")
    refused = federation.medflare("job", "submit", job, "--kit", member, check=False)
    assert refused.returncode != 0
    assert "a lead's may" in refused.stderr


def test_a_person_reaches_no_site_past_the_server_and_is_none(
    federation: ProvisionedFederation,
) -> None:
    """FLARE alone relays the request, and the site deletes the folder of its settings. With any certificate it registers a client."""
    member = federation.kit("member")
    site = federation.sites[0]
    log = federation.kit(SERVER) / "log.txt"
    before = len(text_of(log))
    program = Path(__file__).parent / "components" / "intruder.py"
    federation.command(sys.executable, program, member, PEOPLE["member"], site)
    wait_until(partial(said, f"to {site}", log, before), "the server does not name the refusal")
    assert (federation.kit(site) / "local" / "medflare.json").exists()
    for topic in ("register", "heart_beat"):
        assert said(f"refused: {topic} from {PEOPLE['member']}", log, before)
    assert not said(f"client {PEOPLE['member']}", log, before)
    assert not said(f"the client: {PEOPLE['member']}", log, before)


def test_code_in_a_job_is_refused_in_words(
    federation: ProvisionedFederation, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    identity = federation.submit(
        build_job("fedsm", tiny_task, rounds=1, embed_code=True, out=tmp_path / "job")
    )
    watched = federation.watch(identity, check=False)
    assert watched.returncode != 0
    assert federation.status(identity) == "FINISHED:FAILED_TO_RUN"
    assert "--no-byoc" in watched.stdout


SITE = "config_fed_client.json"
SERVERS = "config_fed_server.json"


def test_large_models_of_jobs_at_the_same_time_stay_within_the_bounds_for_a_party(
    federation: ProvisionedFederation, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    """14 MB, which FLARE sends in parts and by reference."""
    task = {**tiny_task, "network": {"name": "small_cnn", "channels": [64, 256, 1408]}}
    plain = run_local("fedavg", task, federation.sites, rounds=2, seed=SEED, out=tmp_path / "plain")
    assert plain["traffic"]["up_bytes"] > 4 * 13e6
    jobs = []
    for number in range(2):
        folder = tmp_path / f"job-{number}"
        build_job("fedavg", task, out=folder, rounds=2, seed=SEED, byoc=False)
        jobs.append(federation.submit(folder))
    for identity in jobs:
        assert federation.watch(identity).returncode == 0
        assert federation.fetch(identity, tmp_path / identity).returncode == 0
        models = next((tmp_path / identity).rglob("medflare/models"))
        assert same_weights(models, tmp_path / "plain" / "models")


TRUST = "medflare.networks.foreign.trust"
BUILD = "medflare.networks.catalogue.build_network"
MAIN = "medflare.cli.command.main"
STREAMER = "nvflare.app_common.logging.job_log_streamer.JobLogStreamer"


def test_a_job_without_code_runs_none(
    federation: ProvisionedFederation, job: Path, tmp_path: Path
) -> None:
    """What the job names beside its own classes is called nowhere; lead and party learn its name, and audit.log has it."""
    marker = tmp_path / "marker"
    kit = federation.kit("site-1")
    network = {"name": "os:system", "command": f"id > {marker}"}
    command = {"command": f"id > {marker}"}
    setup = {
        "id": "a1",
        "path": MAIN,
        "args": {"arguments": ["site", "setup", str(kit), "--minimum-patients", "0"]},
    }
    argument = {"path": "os.system", "args": command}  # of the executor that the job has anyway
    filtering = {"tasks": ["*"], "filters": [{"class_path": "os.system", "args": command}]}
    building = {
        "id": "a2",
        "path": BUILD,
        "args": {"spec": network, "in_channels": 1, "out_channels": 1},
    }
    shell = [{"id": "a1", "path": TRUST, "args": {"module": "os"}}, building]
    streaming = {"id": "a1", "path": STREAMER, "args": {"log_file_name": "medflare/report.html"}}
    attacks: list[tuple[str, str, str, Callable[[dict[str, Any]], Any]]] = [
        ("site-1", MAIN, SITE, lambda config: config["components"].append(setup)),
        (
            "site-2",
            "os.system",
            SITE,
            lambda config: config["executors"][0]["executor"]["args"].update(hyper=argument),
        ),
        (
            "site-2",
            "os.system",
            SITE,
            lambda config: config["task_result_filters"].append(filtering),
        ),
        (SERVER, TRUST, SERVERS, lambda config: config["components"].extend(shell)),
        (SERVER, "os:system", "task.json", lambda task: task.update(network=network)),
        ("site-1", STREAMER, SITE, lambda config: config["components"].append(streaming)),
    ]
    before = (kit / "local" / "medflare.json").read_text()
    submitted = []
    for number, (party, name, file, change) in enumerate(attacks):
        evil = tmp_path / f"evil-{number}"
        shutil.copytree(job, evil)
        edit(evil / "app" / "config" / file, change)
        submitted.append((federation.submit(evil), party, name))
    for identity, party, name in submitted:
        watched = federation.watch(identity, check=False)
        assert watched.returncode != 0
        assert any(
            line.startswith("server" if party == SERVER else party) and name in line
            for line in watched.stdout.splitlines()
        )
        assert any(
            "refused" in line and name in line
            for line in text_of(federation.kit(party) / "audit.log").splitlines()
            if identity in line
        )
        status = federation.medflare("site", "status", "--json", federation.kit(party)).stdout
        (job_here,) = [one for one in json.loads(status)["jobs"] if one["id"] == identity]
        assert name in job_here["refused"][0]
    assert not marker.exists()
    assert (kit / "local" / "medflare.json").read_text() == before


HOCON = """format_version = 2
x { include %s }
y = ${?PATH}
executors = [ { tasks = ["*"], executor { path = ${%s}, args { seed = 0 } } } ]
"""


def test_further_configuration_is_refused_unread(
    federation: ProvisionedFederation, job: Path, tmp_path: Path
) -> None:
    """FLARE's HOCON includes files of the party, environment variables and pages of its network."""
    own_settings = 'file("../../../local/medflare.json")'
    asked: list[str] = []

    class Intranet(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    page = HTTPServer(("127.0.0.1", 0), Intranet)
    threading.Thread(target=page.serve_forever, daemon=True).start()
    url = f'url("http://127.0.0.1:{page.server_port}/page")'
    contents = {
        "settings": ("config_fed_client.conf", HOCON % (own_settings, "x")),
        "environment": ("config_fed_client.conf", HOCON % (own_settings, "y")),
        "page": ("config_fed_client.conf", HOCON % (url, "x")),
        "yaml": (
            "config_fed_client.yml",
            "executors: [{tasks: ['*'], executor: {path: '${oc.env:PATH}'}}]",
        ),
        "below": ("more/config_fed_client.conf.default", HOCON % (own_settings, "x")),
        "drivers": ("comm_config.json", '{"comm_driver_path": "."}'),
    }
    try:
        for case, (name, text) in contents.items():
            evil = _in_another_format(job, tmp_path / case, SITE, name, text)
            watched = federation.watch(federation.submit(evil), check=False)
            assert watched.returncode != 0
            refusal = f"configuration {Path(name).name}: beside its code a job has"
            assert refusal in watched.stdout, case
            assert "data_root" not in watched.stdout and "/bin" not in watched.stdout, case
            assert f"{Path(name).name} refused" in text_of(federation.kit("site-1") / "audit.log")
        for case, include in (("server", own_settings), ("server-page", url)):
            evil = _in_another_format(
                job, tmp_path / case, SERVERS, "config_fed_server.conf", HOCON % (include, "x")
            )
            lead = federation.kit("lead")
            refused = federation.medflare("job", "submit", evil, "--kit", lead, check=False)
            assert refused.returncode != 0 and "reads JSON only" in refused.stdout + refused.stderr
    finally:
        page.shutdown()
        page.server_close()
    assert not asked


def _in_another_format(job: Path, copy: Path, removed: str, name: str, text: str) -> Path:
    """A copy of a job whose sites' app has another file in the place of one of its configuration files."""
    shutil.copytree(job, copy)
    sites = copy / "app"
    if removed == SITE:
        sites = copy / "app_sites"
        shutil.copytree(job / "app", sites)
        edit(
            copy / "meta.json",
            lambda meta: meta.update(
                deploy_map={"app": ["server"], "app_sites": ["site-1", "site-2"]}
            ),
        )
    path = sites / "config" / name
    if path.parent.name == "config" and name.startswith("config_fed"):
        (path.parent / removed).unlink()
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return copy


def test_a_stranger_does_not_get_in(
    federation: ProvisionedFederation, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = type(federation)(tmp_path_factory.mktemp("stranger"), ["site-4"])
    other.port = federation.port
    other.provision()
    other.launch("site-4")
    try:
        server = federation.kit("localhost") / "log.txt"
        log = other.kit("site-4") / "log.txt"
        wait_until(
            lambda: (
                "CERTIFICATE_VERIFY_FAILED" in text_of(log)
                or "certificate verify failed" in text_of(log)
            ),
            f"no TLS error in {log}",
        )
    finally:
        other.stop()
    assert said("New client site-2", server) and not said("site-4", server)


def test_a_site_that_is_added_later_takes_part_in_what_it_allows(
    federation: ProvisionedFederation, foreign: str, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    """As docs/deployment.md says. The job's method is another distribution's: run once the new site lists its package, too."""
    (federation.folder / "site-4.yml").write_text(
        "name: site-4\ntype: client\norg: hospital_four\n"
    )
    provision = (
        "nvflare",
        "provision",
        "-p",
        "project.yml",
        "-w",
        "federation",
        "--add-client",
        "site-4.yml",
        "--force",
    )
    federation.command(*provision)
    later = type(federation)(federation.folder, ["site-4"])
    later.environment, later.kits = federation.environment, federation.kits.with_name("prod_01")
    federation.medflare("site", "setup", later.kit("site-4"))
    later.send_small_counts()
    job = build_job(
        foreign, tiny_task, rounds=1, seed=SEED, byoc=False, min_sites=3, out=tmp_path / "job"
    )
    try:
        later.start("site-4")
        with contextlib.ExitStack() as trusting:
            for party in (SERVER, *federation.sites):
                trusting.enter_context(
                    changed(
                        federation.kit(party) / "local" / "medflare.json",
                        lambda own: own.update(packages=[foreign]),
                    )
                )
            failed = federation.submit(job)
            refused = federation.watch(failed, check=False)
            assert refused.returncode != 0
            assert any(foreign in line and "site-4" in line for line in refused.stdout.splitlines())
            fetched = federation.fetch(failed, tmp_path / "failed", check=False)
            assert fetched.returncode != 0, "what failed leaves results, which say so"
            results = load_results(tmp_path / "failed")
            assert results["status"] == "FAILED" and foreign in results["reason"]
            assert set(results["sites"]) == {*federation.sites, "site-4"}
            with changed(
                later.kit("site-4") / "local" / "medflare.json",
                lambda own: own.update(packages=[foreign]),
            ):
                identity = federation.submit(job)
                federation.watch(identity)
    finally:
        later.stop()
    federation.fetch(identity, tmp_path / "fetched")
    plain = run_local(
        foreign,
        tiny_task,
        [*federation.sites, "site-4"],
        rounds=1,
        seed=SEED,
        out=tmp_path / "plain",
    )
    _same_results(load_results(tmp_path / "fetched"), plain)
    assert same_weights(
        next((tmp_path / "fetched").rglob("medflare/models")), tmp_path / "plain" / "models"
    )
    assert (later.kit("site-4") / "medflare" / identity / "personal" / "model.safetensors").exists()


# -- helpers -------------------------------------------------------------------------------------------------------------------


@contextmanager
def changed(file: Path, change: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """For a while a party has other policies or settings."""
    before = file.read_text() if file.exists() else "{}"  # a server has no settings of its own
    file.write_text(before)
    edit(file, change)
    try:
        yield
    finally:
        file.write_text(before)


def _ahead(log: Path) -> float:
    """Seconds by which the clock of a log's last line is ahead of the file system's."""
    written = [line[:19] for line in log.read_text().splitlines() if line[:2] == "20"][-1]
    return datetime.strptime(written, "%Y-%m-%d %H:%M:%S").timestamp() - log.stat().st_mtime


def _same_results(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["status"] == expected["status"] == "COMPLETED"
    assert actual["sites"] == expected["sites"]
    assert (actual["mean"], actual["traffic"], actual["events"]) == (
        expected["mean"],
        expected["traffic"],
        expected["events"],
    )
