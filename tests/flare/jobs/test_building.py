"""Job folders: the committed ones are what the builder writes, and what it writes is what FLARE reads."""

import filecmp
import json
import os
from pathlib import Path
from typing import Any

import pytest
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE

import medflare
from medflare.cli import main
from medflare.core.errors import ConfigError, StateError
from medflare.flare.controller import MedflareController
from medflare.flare.executors import FedSMExecutor
from medflare.flare.jobs import building
from medflare.flare.jobs.building import build_job, resumed_job
from medflare.tasks.config import load_task

JOBS = Path(__file__).resolve().parents[3] / "jobs"
COMMITTED = sorted(folder.name for folder in JOBS.iterdir() if folder.is_dir())


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def config(folder: Path, side: str) -> dict:
    return json.loads((folder / "app" / "config" / f"config_fed_{side}.json").read_text())


def arguments(folder: Path) -> tuple[dict, dict]:
    """Those of the controller and those of the executor."""
    return config(folder, "server")["workflows"][0]["args"], config(folder, "client")["executors"][
        0
    ]["executor"]["args"]


def component(folder: Path, name: str) -> dict:
    return next(part for part in config(folder, "server")["components"] if part["id"] == name)


@pytest.mark.parametrize("method", COMMITTED)
def test_committed_job_is_not_stale(method: str, tmp_path: Path) -> None:
    task = load_task(JOBS / method / "app" / "config" / "task.json").name
    built = build_job(method, task, out=tmp_path / method)
    remedy = (
        f"write it anew: medflare job create {method} --task {task} --out jobs/{method} --force"
    )
    assert files(built) == files(JOBS / method), remedy
    different = filecmp.cmpfiles(built, JOBS / method, files(built), shallow=False)[1]
    assert not different, remedy


def test_a_task_may_have_any_name(tmp_path: Path) -> None:
    task = {**load_task("phantom").to_dict(), "name": "Böse Bilder"}
    build_job("fedavg", task, rounds=1, seed=0, out=tmp_path / "job")
    meta = json.loads((tmp_path / "job" / "meta.json").read_text())
    assert meta["name"] == "fedavg-B_se_Bilder"


def test_settings_reach_the_components(tmp_path: Path) -> None:
    settings = {
        "rounds": 20,
        "seed": 7,
        "hyper": {"lam": 0.3},
        "outside": ["HT"],
        "min_sites": 2,
        "patience": 4,
        "step_timeout": 600.0,
    }
    folder = build_job("fedsm", "brain_lgg", out=tmp_path / "job", **settings)
    workflow = config(folder, "server")["workflows"][0]
    assert workflow["path"] == "medflare.flare.controller.MedflareController"
    assert workflow["args"] == {
        "rounds": 20,
        "seed": 7,
        "outside": ["HT"],
        "min_sites": 2,
        "patience": 4,
        "step_timeout": 600.0,
    }
    assert (
        component(folder, "aggregator")["path"] == "medflare.flare.aggregators.SoftPullAggregator"
    )
    hyper = component(folder, "aggregator")["args"]["hyper"]
    # What is not set is there with its default.
    assert hyper["server"]["lam"] == 0.3 and hyper["server"]["gamma"] == "tune"
    assert hyper["site"]["personalization"] == "softpull"
    executor = config(folder, "client")["executors"][0]["executor"]
    assert executor == {
        "path": "medflare.flare.executors.FedSMExecutor",
        "args": {"seed": 7, "hyper": hyper},
    }
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["min_clients"] == 2 and meta["custom_props"] == {
        "medflare": {"method": "fedsm", "rounds": 20}
    }
    assert load_task(folder / "app" / "config" / "task.json") == load_task("brain_lgg")


def test_a_job_that_asks_what_sites_have(tmp_path: Path) -> None:
    assert (
        main(
            ["job", "fingerprint", "--task", "phantom", "--no-byoc", "--out", str(tmp_path / "job")]
        )
        == 0
    )
    folder = tmp_path / "job"
    assert arguments(folder) == (
        {"rounds": 0, "seed": 0},
        {"method": "fingerprint", "seed": 0, "hyper": {"server": {}, "site": {}}},
    )
    assert component(folder, "aggregator")["args"]["method"] == "fingerprint"
    assert (
        config(folder, "client")["np_download_chunk_size"] == 0
        and not (folder / "app" / "custom").exists()
    )
    with pytest.raises(ConfigError, match="rounds"):
        build_job("fingerprint", "phantom", out=tmp_path / "other")


def test_curves_go_where_the_job_says(tmp_path: Path) -> None:
    folder = build_job(
        "fedavg", "phantom", out=tmp_path / "job", track="mlflow=http://mlflow.example:5000"
    )
    tracker = component(folder, "mlflow")
    assert tracker["path"] == "medflare.flare.tracking.MLflowTracker" and tracker["args"] == {
        "track": "mlflow=http://mlflow.example:5000"
    }
    assert "track" not in arguments(folder)[0]
    # Whose package is needed at the server only.
    build_job("fedavg", "phantom", out=tmp_path / "wandb", track="wandb=study")
    assert arguments(tmp_path / "wandb")[0]["track"] == "wandb=study"
    assert [part["id"] for part in config(tmp_path / "wandb", "server")["components"]] == [
        "aggregator"
    ]
    with pytest.raises(ConfigError, match="track"):
        build_job("fedavg", "phantom", out=tmp_path / "other", track="mlflow=")


def test_halves_of_two_methods(tmp_path: Path) -> None:
    folder = build_job("grace", "phantom", out=tmp_path / "job", site_algorithm="moon")
    controller, executor = arguments(folder)
    assert controller["site_algorithm"] == executor["method"] == "moon"
    assert (
        component(folder, "aggregator")["path"]
        == "medflare.flare.aggregators.ConsistencyAggregator"
    )


def test_large_updates_are_fetched_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedSM's model of the phantom has more than 100 kB: less than what is sent inside a message."""
    small = build_job("fedsm", "phantom", out=tmp_path / "small")
    monkeypatch.setattr(building, "_INLINE", 100_000)
    large = build_job("fedsm", "phantom", out=tmp_path / "large")
    for side in ("server", "client"):
        assert config(small, side)["np_download_chunk_size"] == 0
        assert config(large, side)["np_download_chunk_size"] > 2**20


def test_an_older_job_is_replaced_and_other_files_are_not_lost(tmp_path: Path) -> None:
    folder = build_job("fedavg", "phantom", out=tmp_path / "job")
    (folder / "app/config/leftover.json").write_text("old")
    for place in (folder, folder / "app" / "custom"):
        (place / NVFLARE_SIG_FILE).write_text("by FLARE, when the job was submitted")
    assert not (build_job("fedsm", "phantom", out=folder) / "app/config/leftover.json").exists()
    for place in (
        folder / "notes.txt",
        folder / "app" / "custom" / "filter.py",
        tmp_path / "precious" / "data.txt",
    ):
        place.parent.mkdir(exist_ok=True)
        place.write_text("the user's own")
        with pytest.raises(ConfigError, match=r"notes|filter|precious"):
            build_job(
                "fedsm", "phantom", out=folder if place.is_relative_to(folder) else place.parent
            )
        assert place.exists()
        place.unlink()


@pytest.mark.parametrize(
    ("method", "settings", "token"),
    [
        ("fedms", {}, "fedms"),
        ("fedsm", {"hyper": {"lambda_": 0.3}}, "lambda_"),
        ("fedsm", {"rounds": 0}, "rounds"),
    ],
)
def test_wrong_settings_are_refused(
    method: str, settings: dict[str, Any], token: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=token):
        build_job(method, "phantom", out=tmp_path / "job", **settings)
    assert not (tmp_path / "job").exists()


# -- a job that carries its code -------------------------------------------------------------------------------------------------

PACKAGE = Path(medflare.__file__).parent


def followed(folder: Path) -> set[str]:
    """Relative paths; tasks/presets is a link to app_configs/ in a checkout, hence a walk that follows links."""
    walk = os.walk(folder, followlinks=True)
    files = set()
    for place, _, names in walk:
        for name in names:
            files.add(os.path.relpath(os.path.join(place, name), folder))
    return files


def test_the_job_holds_the_package(tmp_path: Path) -> None:
    custom = build_job("fedsm", "phantom", out=tmp_path / "job", embed_code=True) / "app" / "custom"
    sources = {name for name in followed(PACKAGE) if "__pycache__" not in name}
    assert set(files(custom)) == {"README.md", *(f"medflare/{name}" for name in sources)}
    for name in sources:
        assert (custom / "medflare" / name).read_bytes() == (PACKAGE / name).read_bytes()
    assert medflare.__version__ in (custom / "README.md").read_text()


def test_with_code_and_without_app_custom_is_a_contradiction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", "fedsm", "--embed-code", "--no-byoc", "--out", str(tmp_path / "job")]) == 1
    output = capsys.readouterr().err.strip()
    assert "--embed-code" in output and "--no-byoc" in output and "\n" not in output
    assert not (tmp_path / "job").exists()


# -- the job that takes up an interrupted one -------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return build_job("fedsm", "phantom", rounds=3, out=tmp_path / "job", byoc=False)


def test_both_sides_name_the_interrupted_job(job: Path, tmp_path: Path) -> None:
    before = arguments(job)
    server, client = arguments(resumed_job(job, "0-1-2", tmp_path / "again"))
    assert arguments(job) == before
    assert server == {**before[0], "resume": "0-1-2"} and client == {**before[1], "resume": "0-1-2"}
    about = json.loads((tmp_path / "again" / "meta.json").read_text())["custom_props"]["medflare"]
    assert about == {"method": "fedsm", "rounds": 3, "resume": "0-1-2"}, "what a list of jobs shows"
    assert MedflareController(**server).resume == FedSMExecutor(**client).resume == "0-1-2"


def test_the_command_writes_the_job_that_resumes(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(job), "--job", "0-1-2"]) == 0
    assert arguments(job.with_name("job-resumed"))[0]["resume"] == "0-1-2"
    assert "medflare job submit" in capsys.readouterr().out


def test_a_link_in_a_job_folder_is_refused(job: Path, tmp_path: Path) -> None:
    """A copy of the job would upload the file behind it."""
    key = tmp_path / "id_rsa"
    key.write_text("secret")
    (job / "app" / "notes.txt").symlink_to(key)
    with pytest.raises(StateError, match="is a link"):
        resumed_job(job, "0-1-2", tmp_path / "again")


@pytest.mark.parametrize(
    ("file", "content"), [("meta.json", '{"name": '), ("app/config/config_fed_server.json", "{}")]
)
def test_a_spoilt_job_folder_is_refused_in_one_line(
    file: str, content: str, job: Path, tmp_path: Path
) -> None:
    (job / file).write_text(content)
    with pytest.raises(ConfigError, match="job") as refused:
        resumed_job(job, "0-1-2", tmp_path / "again")
    assert "\n" not in str(refused.value) and not (tmp_path / "again").exists()


def test_a_place_that_exists_and_a_folder_that_is_no_job_are_refused(
    job: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="exists"):
        resumed_job(job, "0-1-2", job)
    with pytest.raises(ConfigError, match="nothing"):
        resumed_job(tmp_path / "nothing", "0-1-2", tmp_path / "again")
