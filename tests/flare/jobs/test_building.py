"""Job folders: the committed ones are what the builder writes, and what it writes is what FLARE reads."""

import errno
import filecmp
import json
import os
import shutil
from pathlib import Path

import pytest

from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.flare.jobs.building import build_job
from medflare.flare.jobs.placing import put_in_place
from medflare.tasks.config import load_task

JOBS = Path(__file__).resolve().parents[3] / "jobs"
COMMITTED = sorted(folder.name for folder in JOBS.iterdir() if folder.is_dir())


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def config(folder: Path, side: str) -> dict:
    return json.loads((folder / "app" / "config" / f"config_fed_{side}.json").read_text())


def component(folder: Path, name: str) -> dict:
    return next(part for part in config(folder, "server")["components"] if part["id"] == name)


def test_the_main_jobs_are_committed() -> None:
    assert {"fedavg", "fedsm", "prr", "grace", "iop_fl", "feddag"} <= set(COMMITTED)


@pytest.mark.parametrize("method", COMMITTED)
def test_committed_job_is_not_stale(method: str, tmp_path: Path) -> None:
    task = load_task(JOBS / method / "app" / "config" / "task.json").name
    built = build_job(method, task, out=tmp_path / method)
    remedy = f"write it anew: medflare job {method} --task {task} --out jobs/{method}"
    assert files(built) == files(JOBS / method), remedy
    different = filecmp.cmpfiles(built, JOBS / method, files(built), shallow=False)[1]
    assert not different, remedy


def test_settings_reach_the_components(tmp_path: Path) -> None:
    settings = {"rounds": 20, "seed": 7, "hyper": {"lam": 0.3}, "outside": ["HT"], "min_sites": 2, "patience": 4, "step_timeout": 600.0}
    folder = build_job("fedsm", "brain_lgg", out=tmp_path / "job", **settings)
    workflow = config(folder, "server")["workflows"][0]
    assert workflow["path"] == "medflare.flare.controller.MedflareController"
    assert workflow["args"] == {"rounds": 20, "seed": 7, "outside": ["HT"], "min_sites": 2, "patience": 4, "step_timeout": 600.0}
    assert component(folder, "aggregator")["path"] == "medflare.flare.aggregators.SoftPullAggregator"
    hyper = component(folder, "aggregator")["args"]["hyper"]
    assert hyper["server"]["lam"] == 0.3 and hyper["server"]["gamma"] == "tune"  # what is not set is there with its default
    assert hyper["site"]["personalization"] == "softpull"
    executor = config(folder, "client")["executors"][0]["executor"]
    assert executor == {"path": "medflare.flare.executors.FedSMExecutor", "args": {"seed": 7, "hyper": hyper}}
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["min_clients"] == 2 and meta["custom_props"] == {"medflare": {"method": "fedsm", "rounds": 20}}
    assert load_task(folder / "app" / "config" / "task.json") == load_task("brain_lgg")


def test_a_job_that_asks_what_sites_have(tmp_path: Path) -> None:
    assert main(["job", "fingerprint", "--task", "phantom", "--no-byoc", "--out", str(tmp_path / "job")]) == 0
    folder = tmp_path / "job"
    assert config(folder, "server")["workflows"][0]["args"] == {"rounds": 0, "seed": 0}
    assert component(folder, "aggregator")["args"]["method"] == "fingerprint"
    executor = config(folder, "client")["executors"][0]["executor"]
    assert executor["args"] == {"method": "fingerprint", "seed": 0, "hyper": {"server": {}, "site": {}}}
    assert config(folder, "client")["np_download_chunk_size"] == 0
    with pytest.raises(ConfigError, match="rounds is 10, and method 'fingerprint' trains nothing; give 0"):
        build_job("fingerprint", "phantom", out=tmp_path / "other")


def test_curves_may_go_to_mlflow_too(tmp_path: Path) -> None:
    folder = build_job("fedavg", "phantom", out=tmp_path / "job", track="mlflow=http://mlflow.example:5000")
    tracker = component(folder, "mlflow")
    assert tracker["path"] == "medflare.flare.exchange.tracking.MLflowTracker"
    assert tracker["args"] == {"tracking_uri": "http://mlflow.example:5000", "experiment": "medflare phantom", "run_name": "fedavg"}
    assert component(folder, "tensorboard")
    assert main(["job", "fedavg", "--track", "mlflow", "--out", str(tmp_path / "local")]) == 0
    assert "tracking_uri" not in component(tmp_path / "local", "mlflow")["args"]
    for wrong in ("wandb", "mlflow=", "mlflow http://x"):
        with pytest.raises(ConfigError, match="track must be mlflow, or mlflow=URI with the address of an MLflow server, got"):
            build_job("fedavg", "phantom", out=tmp_path / "other", track=wrong)


def test_jobs_differ_in_their_components_only(tmp_path: Path) -> None:
    one, other = (build_job(method, "phantom", out=tmp_path / method) for method in ("fedavg", "fedsm"))
    for folder in (one, other):
        assert config(folder, "server")["server"]["task_request_interval"] <= 0.2
    servers = [config(folder, "server") for folder in (one, other)]
    for server in servers:
        server["components"] = [part for part in server["components"] if part["id"] != "aggregator"]
    assert servers[0] == servers[1]


def test_halves_of_two_methods(tmp_path: Path) -> None:
    folder = build_job("grace", "phantom", out=tmp_path / "job", site_half="moon")
    assert config(folder, "client")["executors"][0]["executor"]["args"]["method"] == "moon"
    assert component(folder, "aggregator")["path"] == "medflare.flare.aggregators.ConsistencyAggregator"
    assert config(folder, "server")["workflows"][0]["args"]["site_half"] == "moon"


def test_a_method_without_components_of_its_own_uses_those_it_extends(tmp_path: Path) -> None:
    folder = build_job("fedsm_extra", "phantom", out=tmp_path / "job")
    assert component(folder, "aggregator")["args"]["method"] == "fedsm_extra"
    assert component(folder, "aggregator")["path"] == "medflare.flare.aggregators.SoftPullAggregator"


def test_byoc_is_a_folder_in_the_job(tmp_path: Path) -> None:
    assert (build_job("fedavg", "phantom", out=tmp_path / "with") / "app" / "custom" / "README.md").exists()
    assert not (build_job("fedavg", "phantom", out=tmp_path / "without", byoc=False) / "app" / "custom").exists()


def test_large_updates_are_fetched_in_chunks(tmp_path: Path) -> None:
    small = build_job("fedsm", "phantom", out=tmp_path / "small")
    large = build_job("fedsm", "phantom", out=tmp_path / "large", hyper={"selector": "vgg11"})
    for side in ("server", "client"):
        assert config(small, side)["np_download_chunk_size"] == 0
        assert config(large, side)["np_download_chunk_size"] > 2**20


def test_an_older_job_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    folder = build_job("fedavg", "phantom", out=tmp_path / "job")
    (folder / "app/config/leftover.json").write_text("old")
    assert not (build_job("fedsm", "phantom", out=folder) / "app/config/leftover.json").exists()
    (folder / "notes.txt").write_text("the user's own")
    with pytest.raises(ConfigError, match=r"notes.txt would be lost"):
        build_job("fedsm", "phantom", out=folder)
    (folder / "notes.txt").unlink()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data.txt").write_text("not a job")
    with pytest.raises(ConfigError, match="is no job folder"):
        build_job("fedavg", "phantom", out=tmp_path / "precious")
    own = folder / "app" / "custom" / "filter.py"
    own.write_text("a class of the user's own")
    with pytest.raises(ConfigError, match=r"filter.py would be lost"):
        build_job("fedsm", "phantom", out=folder)
    assert own.exists()


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean fedsm"):
        build_job("fedms", "phantom", out=tmp_path / "job")
    with pytest.raises(ConfigError, match="no hyper-parameter 'lambda_'"):
        build_job("fedsm", "phantom", out=tmp_path / "job", hyper={"lambda_": 0.3})
    with pytest.raises(ConfigError, match="rounds is 0, which trains nothing, and task phantom starts from random weights; give 1 or more"):
        build_job("fedsm", "phantom", out=tmp_path / "job", rounds=0)
    assert not (tmp_path / "job").exists()


def full(source: str, place: str, **_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)


def test_a_full_disk_costs_no_earlier_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither half a job, which the next attempt would refuse, nor the loss of the one that was there."""
    command = ["job", "fedavg", "--out", str(tmp_path / "job")]
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        assert main(command) == 1
        assert not [*tmp_path.iterdir()]
    assert main(command) == 0
    before = files(tmp_path / "job")
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        assert main([*command, "--embed-code"]) == 1
    said = capsys.readouterr().err
    assert "No space left on device; make room on the disk" in said and said.count("\n") == 1
    assert files(tmp_path / "job") == before and [path.name for path in tmp_path.iterdir()] == ["job"]
    assert main([*command, "--embed-code"]) == 0


def test_a_folder_that_cannot_take_its_place_leaves_the_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "a").write_text("earlier")
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "nothing", tmp_path / "place")
    assert (tmp_path / "place" / "a").read_text() == "earlier" and len([*tmp_path.iterdir()]) == 1
