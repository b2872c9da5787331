"""Job folders that an older medflare wrote: hyper-parameters without their halves, some by names that are gone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.utils.class_loader import load_class

from flare.server import SITES, Server
from medflare.core.errors import ConfigError
from medflare.core.store import write_json
from medflare.evaluation.results import load_results
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.local.loop import run_local
from medflare.flare.exchange.participants import ParticipantSpec
from medflare.flare.jobs.building import build_job
from medflare.tasks.config import load_task
from small import tiny_phantom

SEED = 3
HINT = "(a job that an older medflare wrote is written anew by `medflare job`)"

# What it wrote into both sides of jobs/fedsm; gamma was "tune", which takes long.
FEDSM: dict[str, Any] = {
    "adapt_steps": 1,
    "apfl_share": 0.5,
    "gamma": 0.5,
    "lam": 0.3,
    "personalization": "softpull",
    "pfedme_lambda": 15.0,
    "pfedme_steps": 5,
    "reset_optimizer": False,
    "selection": "best",
    "weighting": "samples",
}
# Names of jobs/prr and jobs/grace that are gone; GRACE's is spelt like a half.
GONE: dict[str, dict[str, Any]] = {"prr": {"lam1": 0.7, "outside": "mean"}, "grace": {"client": "coral", "server": "grace"}}


def old_job(method: str, hyper: dict[str, Any], folder: Path) -> Path:
    """A job as it was written then: the same values, flat, at the server and at the sites."""
    build_job(method, tiny_phantom(size=[16, 16]), rounds=1, seed=SEED, out=folder)
    server, client = (json.loads(file(folder, side).read_text()) for side in ("server", "client"))
    next(part for part in server["components"] if part["id"] == "aggregator")["args"]["hyper"] = hyper
    client["executors"][0]["executor"]["args"]["hyper"] = hyper
    write_json(file(folder, "server"), server)
    write_json(file(folder, "client"), client)
    return folder


def file(job: Path, side: str) -> Path:
    return job / "app" / "config" / f"config_fed_{side}.json"


def participants(job: Path, root: Path) -> Callable[[str], ParticipantSpec]:
    """What a site's process makes of the job: its executor, and with it the seat of the site's participant."""
    part = json.loads(file(job, "client").read_text())["executors"][0]["executor"]
    executor = load_class(part["path"])(**part["args"])
    task = str(job / "app" / "config" / "task.json")

    def of(site: str) -> ParticipantSpec:
        own = root / "sites" / site
        return ParticipantSpec(
            site,
            executor.method_name,
            executor.server_half,
            executor.seed,
            task,
            str(own / "medflare.json"),
            str(own),
            hyper=executor.hyper,
        )

    return of


def run_job(job: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The job's own components, server and sites, in this process."""
    config = json.loads(file(job, "server").read_text())
    part = next(part for part in config["components"] if part["id"] == "aggregator")
    spec = participants(job, root)
    exchange = LocalExchange(SITES, lambda site: spec(site).participant(lambda: False))
    monkeypatch.setattr("medflare.flare.exchange.messages.MessageExchange", lambda *arguments, **options: exchange)
    server = Server(root, load_class(part["path"])(**part["args"]), load_task(job / "app" / "config" / "task.json"))
    workflow = config["workflows"][0]
    server.run(load_class(workflow["path"])(**workflow["args"]))
    return server


def test_known_names_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = old_job("fedsm", FEDSM, tmp_path / "job")
    server = run_job(job, tmp_path / "run", monkeypatch)
    assert not server.panics
    results = load_results(tmp_path / "run")
    different = {name: FEDSM[name] for name in ("lam", "gamma")}  # from today's defaults
    plain = run_local("fedsm", tiny_phantom(size=[16, 16]), SITES, rounds=1, seed=SEED, out=tmp_path / "plain", **different)
    assert results["status"] == "COMPLETED" and results["sites"] == plain["sites"]
    assert results["configuration"]["hyper"] == plain["configuration"]["hyper"]
    models = sorted((tmp_path / "plain" / "models").rglob("model.safetensors"))
    found = tmp_path / "run" / "job" / "medflare" / "models"
    assert models and all((found / path.relative_to(tmp_path / "plain" / "models")).read_bytes() == path.read_bytes() for path in models)


@pytest.mark.parametrize(("method", "remedy"), [("prr", "did you mean 'outside_model'?"), ("grace", "did you mean 'server_rate'?")])
def test_a_name_that_is_gone_is_refused_with_the_remedy(method: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server before anybody is asked, and by a site whose copy of the job is the old one."""
    job = old_job(method, GONE[method], tmp_path / "job")
    server = run_job(job, tmp_path / "run", monkeypatch)
    results = load_results(tmp_path / "run")
    assert results["status"] == "FAILED" and server.panics == [results["reason"]]
    assert remedy in results["reason"] and results["reason"].endswith(HINT) and "\n" not in results["reason"]
    with pytest.raises(ConfigError) as refused:
        participants(job, tmp_path / "run")("site-1").participant(lambda: False)
    assert str(refused.value) == results["reason"]
