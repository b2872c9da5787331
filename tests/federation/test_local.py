"""The plain loop end to end on the phantom: results, what each site keeps, reproducibility, defined failures."""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import medflare
from helpers.final_models import same_weights
from helpers.fixture_types import SiteOf
from helpers.picture_sites import SEGMENTATION
from helpers.small_tasks import tiny_phantom
from medflare.core.errors import ConfigError, DataError, StepFailed
from medflare.core.store import StateStore
from medflare.data.local import Bounds, LocalSettings
from medflare.evaluation.results import load_results, validate_results
from medflare.evaluation.run_results import RunResults
from medflare.federation.local import loop
from medflare.federation.local.loop import SITES_FOLDER, STATE, resume_local
from medflare.inference.deployed import load_model
from medflare.methods.catalogue import build_deployed, get_method
from medflare.methods.fedavg.site import FedAvgSite
from medflare.tasks.config import load_task
from medflare.training.opening import open_site
from medflare.training.site import Site

TINY = tiny_phantom(batch_size=32)
Kept = tuple[RunResults, Path]  # the results of a run and its folder


def run(method: str = "fedsm", sites: Any = 3, **options: Any) -> RunResults:
    return medflare.run_local(method, TINY, sites, **{"rounds": 2, "seed": 3, **options})


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("run")
    return run(outside=["site-9"], out=folder), folder


def test_what_a_run_returns_and_leaves_behind(kept: Kept) -> None:
    results, folder = kept
    validate_results(results)
    assert results["status"] == "COMPLETED"
    assert json.loads((folder / "results.json").read_text()) == results
    assert {name: site["role"] for name, site in results["sites"].items()}["site-9"] == "outside"
    assert results["sites"]["site-9"]["metrics"]["deployed"]["dice"] is not None
    assert results["sites"]["site-9"]["metrics"]["personal"]["dice"] is None
    assert {path.name for path in folder.iterdir()} >= {
        "results.json",
        "metrics.jsonl",
        "report.html",
        "models",
        "sites",
    }
    assert (folder / "models" / "personal" / "site-2" / "card.json").exists()
    assert not (folder / "sites" / "site-9" / "personal").exists()
    assert set(results["costs"]) == set(results["sites"])
    for way in ("down_bytes", "up_bytes"):
        assert sum(cost[way] for cost in results["costs"].values()) == results["traffic"][way]
    for cost in results["costs"].values():
        assert cost["seconds"] > 0


def test_results_show_themselves_in_a_notebook(kept: Kept) -> None:
    results, folder = kept
    assert isinstance(results, dict) and isinstance(results, RunResults)
    short = repr(results)
    mean = results["mean"]["inside"]["deployed"]["dice"]
    assert f"Dice {mean:.3f} inside" in short and str(folder) in short and len(short) < 300
    page = results._repr_html_()
    for site in (*results["sites"], "mean"):
        assert f"<td>{site}</td>" in page
    assert page.count("<svg") >= 2
    for finding in results["findings"]:
        assert finding["kind"] in page
    assert f"<td>{results['sites']['site-9']['metrics']['deployed']['dice']:.3f}</td>" in page
    again = copy.deepcopy(results)  # as between processes of a study
    assert again == results and again.folder == folder and again.history == results.history


def test_progress_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are printed if wanted, or in a notebook; `say` takes the place of `print`."""
    lines: list[str] = []
    results = run("fedavg", 2, rounds=1, say=lines.append, progress=True)
    assert capsys.readouterr().out == "" and len(lines) == len(results.history) > 1
    run("fedavg", 2, rounds=1)
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(
        sys.modules,
        "IPython",
        SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())),
    )
    run("fedavg", 2, rounds=1)
    assert "round 1/1 train" in capsys.readouterr().out
    run("fedavg", 2, rounds=1, progress=False)
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    run("fedavg", 2, rounds=1, progress=True)
    assert "round 1/1 train" in capsys.readouterr().out


def test_what_single_patients_scored_stays_at_the_site(kept: Kept) -> None:
    results, folder = kept
    home = folder / "sites" / "site-2"
    cases = json.loads((home / "scores" / "global.json").read_text())
    defined = [value for value in cases["values"]["dice"] if value is not None]
    assert sum(defined) / len(defined) == pytest.approx(
        results["sites"]["site-2"]["metrics"]["global"]["dice"], abs=1e-5
    )
    assert not [*home.glob("*/*scores*")], "not beside a model that may be handed on"
    for file in ("results.json", "metrics.jsonl", "report.html"):
        for patient in cases["patients"]:
            assert patient not in (folder / file).read_text()


def test_every_site_has_a_separate_report(kept: Kept) -> None:
    _, folder = kept
    for name in ("site-2", "site-9"):
        file = folder / "sites" / name / "report.html"
        page = file.read_text()
        scores = json.loads((file.parent / "scores" / "deployed.json").read_text())
        assert file.stat().st_mode & 0o777 == 0o600
        assert any(patient in page for patient in scores["patients"])
        assert page.count('src="data:image/png;base64,') == 3, (
            "the worst, the median and the best patient"
        )
        assert page.count("<svg") == 1


def test_a_delivered_model_answers_as_in_the_run(kept: Kept) -> None:
    results, folder = kept
    model = load_model(folder / "sites" / "site-1" / "deployed")
    site = open_site("site-1", model.task, seed=3)
    again = site.score(build_deployed(model.task, model.message), "test").values["dice"]
    assert again == results["sites"]["site-1"]["metrics"]["deployed"]["dice"]
    assert model.kind == "super" and model.kind in get_method("fedsm").models


def test_same_seed_same_bits_whatever_ran_before(tmp_path: Path) -> None:
    run(out=tmp_path / "a")
    torch.rand(7)  # somebody else's random numbers
    run(out=tmp_path / "b")
    assert same_weights(tmp_path / "a", tmp_path / "b")


def test_lambda_one_leaves_personal_models_alone(tmp_path: Path) -> None:
    for name, sites in (("two", ["site-1", "site-2"]), ("three", ["site-1", "site-2", "site-3"])):
        run(sites=sites, lam=1.0, selection="last", out=tmp_path / name)
    assert same_weights(
        *(tmp_path / name / "sites" / "site-1" / "personal" for name in ("two", "three"))
    )


def test_lambda_below_one_over_k_is_allowed_with_a_warning() -> None:
    events = run(sites=2, rounds=1, lam=0.1)["events"]
    assert any(event["kind"] == "warning" and "lam" in event["message"] for event in events)


def test_a_missing_data_root_is_an_error_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        run("fedavg", data_root=tmp_path / "nowhere", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_data_that_a_site_cannot_use_fails_the_run(make_site: SiteOf, tmp_path: Path) -> None:
    root = make_site().parent
    (root / "A" / "images/0.png").write_bytes(b"broken")
    results = medflare.run_local(
        "fedavg", SEGMENTATION, ["A"], rounds=1, seed=0, data_root=root, out=tmp_path / "out"
    )
    assert results["status"] == "FAILED" and "0.png" in results["reason"]
    (event,) = [event for event in results["events"] if event["kind"] == "failed"]
    assert event["site"] == "A", "the run has no failure of its own"
    assert "FAILED" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lamb": 0.3}, "did you mean lam"),
        ({"outside": ["site-1", "site-2", "site-3"]}, "outside"),
        ({"sites": []}, "at least one site"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(**options)


def test_an_outside_site_may_be_named_among_all() -> None:
    results = run("fedavg", sites=["site-1", "site-2", "site-3"], outside=["site-3"], rounds=1)
    assert [results["sites"][f"site-{number}"]["role"] for number in (1, 2, 3)] == [
        "inside",
        "inside",
        "outside",
    ]
    assert results["mean"] == run("fedavg", sites=2, outside=["site-3"], rounds=1)["mean"]


def test_a_bug_in_a_sites_code_is_raised_after_the_results_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one site alone: whoever writes a method is to see where it is. Over FLARE it costs that site's update."""
    fit = FedAvgSite.fit
    monkeypatch.setattr(
        FedAvgSite,
        "fit",
        lambda own, *rest: 1 / 0 if own.site.name == "site-2" else fit(own, *rest),
    )
    line = (
        r"^method 'fedavg' fails at site site-2 in 'train' of round 1: Zero.*\(\w+.py, line \d+, in"
    )
    with pytest.raises(StepFailed, match=line) as failed:
        run("fedavg", min_sites=1, out=tmp_path)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    results = load_results(tmp_path)
    assert results["status"] == "FAILED" and results["reason"] == str(failed.value)


def test_code_that_ends_the_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FedAvgSite, "fit", lambda own, *rest: exit(3))
    with pytest.raises(StepFailed, match="site-1 in 'train' of round 1: SystemExit: 3"):
        run("fedavg", out=tmp_path)
    assert load_results(tmp_path)["status"] == "FAILED"


def test_a_step_of_the_plain_loop_has_the_default_bound_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        loop, "LocalSettings", lambda **more: LocalSettings(**more, bounds=Bounds(minutes=1e-9))
    )
    results = medflare.run_local("fedavg", tiny_phantom(), 2, rounds=1, seed=0)
    assert results["status"] == "FAILED" and "bounds.minutes" in results["reason"]


# -- schedule and MONAI's components -----------------------------------------------------------------------------------------

NAMED: dict[str, Any] = {
    "network": {"name": "BasicUNet", "features": [4, 4, 4, 4, 4, 4], "norm": "batch"},
    "loss": {"name": "DiceFocalLoss"},
    "optimizer": {"name": "NAdam", "lr": 0.01},
    "schedule": {"name": "cosine", "warmup_rounds": 1},
    "clip": {"norm": 1.0},
    "sampling": "balanced",
    "augment": [
        {"name": "RandGridDistortion", "prob": 0.5},
        {"name": "RandGibbsNoise", "prob": 0.5},
    ],
}


@pytest.mark.parametrize("method", ["fedsm", "grace", "prr"])
def test_methods_train_with_monais_network_loss_and_optimizer(method: str) -> None:
    results = medflare.run_local(method, tiny_phantom(**NAMED), 2, rounds=1, seed=0)
    assert results["status"] == "COMPLETED", results["reason"]


def test_the_learning_rate_follows_the_schedule_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    build = Site.optimizer

    def noted(site: Site, *arguments: Any, **override: Any) -> Any:
        optimizer = build(site, *arguments, **override)
        rates.append(optimizer.param_groups[0]["lr"])
        return optimizer

    monkeypatch.setattr(Site, "optimizer", noted)
    task = tiny_phantom(
        optimizer={"name": "sgd", "lr": 1.0}, schedule={"name": "polynomial", "power": 1.0}
    )

    def die(line: str) -> None:
        if len(rates) >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        medflare.run_local("fedavg", task, 2, rounds=4, seed=0, out=tmp_path, say=die)
    assert rates == [1.0, 1.0, 0.75, 0.75]
    resume_local(tmp_path)
    assert rates[-4:] == [0.5, 0.5, 0.25, 0.25]


# -- weights to start from ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model that a run delivered, and the task that goes on from it."""
    folder = tmp_path_factory.mktemp("first")
    medflare.run_local("fedavg", tiny_phantom(), 2, rounds=1, seed=3, out=folder)
    model = folder / "models" / "global"
    weights = {
        "file": "model.safetensors",
        "sha256": load_model(model).card["sha256"],
        "format": "medflare",
    }
    task = tiny_phantom()
    return model, {**task, "network": {**task["network"], "weights": weights}}


@pytest.mark.parametrize("method", ["fedavg", "prr"])
def test_every_site_starts_from_what_the_server_sends(
    tmp_path: Path, delivered: tuple[Path, dict[str, Any]], method: str
) -> None:
    model, task = delivered
    results = medflare.run_local(method, task, 2, rounds=1, seed=0, out=tmp_path, weights=model)
    assert results["status"] == "COMPLETED", results["reason"]
    start = load_model(model).message.states["model"]
    stored = StateStore(tmp_path / SITES_FOLDER / "site-1" / STATE).load("membership")
    assert stored is not None
    for name in start:
        assert torch.equal(stored.states["start"][name], start[name])
    step = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    site = open_site("site-1", load_task(task), seed=0)
    site.start = start
    expected = site.score(site.predictor(site.network()), "validation", ["dice"]).values["dice"]
    assert step["sites"]["site-1"]["validation"]["global"] == pytest.approx(expected)


def test_without_rounds_every_site_evaluates_the_weights(
    tmp_path: Path, delivered: tuple[Path, dict[str, Any]]
) -> None:
    model, task = delivered
    initial = load_model(model).message.states["model"]
    results = medflare.run_local(
        "fedavg", task, 2, rounds=0, seed=3, outside=["site-3"], out=tmp_path, weights=model
    )
    assert (
        results["status"] == "COMPLETED"
        and results["rounds"] == 0
        and results["traffic"]["up_bytes"] == 0
    )
    kept = load_model(tmp_path / "sites" / "site-3" / "deployed").message.states["model"]
    for name in initial:
        assert torch.equal(kept[name], initial[name])
    for name, result in results["sites"].items():
        site = open_site(name, load_task(task), seed=3, role=result["role"])
        site.start = initial
        expected = site.score(site.predictor(site.network()), "test", ["dice"]).values["dice"]
        assert result["metrics"]["global"]["dice"] == pytest.approx(expected)


def test_a_missing_weights_file_is_an_error_before_the_run(
    delivered: tuple[Path, dict[str, Any]],
) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        medflare.run_local("fedavg", delivered[1], 2, rounds=1, seed=0)
