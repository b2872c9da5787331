"""The plain loop with the sites' training as one batch: the models of separate training, site by site, and what is refused."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import small
from interrupted import in_pieces
from medflare import run_local
from medflare.core.errors import ConfigError, DataError
from medflare.data.sites.computing import Computing
from medflare.data.sites.site import Site
from medflare.federation.local import loop
from methods import squares

COUNTS = {"A": (12, 4, 5), "B": (7, 4, 5), "C": (5, 4, 5), "O": (4, 4, 5)}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
UNET = squares.task(batch_size=4, optimizer=SGD)
CNN = squares.task("classification", batch_size=4)
Opener = Callable[[str, str], Site]


def opener(task: Any = UNET, change: Callable[[Site], None] = lambda site: None) -> Opener:
    """Sites of three sizes; `change` is what is odd about them."""

    def opened(name: str, role: str) -> Site:
        site = squares.site(name, task, COUNTS[name])
        change(site)
        return site

    return opened


def run(method: str = "fedavg", task: Any = UNET, **settings: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"rounds": 2, "seed": squares.SEED, "opener": opener(task), "together": True}
    return run_local(method, task, squares.SITES, **{**usual, **settings})


def numbers(found: Any, place: str = "") -> dict[str, Any]:
    """Every number and text of a results dict by its place, but for times and for what the run says of its engine."""
    if isinstance(found, dict):
        parts = (numbers(value, f"{place}/{name}") for name, value in found.items() if name not in ("seconds", "settings"))
    elif isinstance(found, list):
        parts = (numbers(value, f"{place}/{row}") for row, value in enumerate(found))
    else:
        return {place: found}
    return {name: value for part in parts for name, value in part.items()}


def assert_close(found: Any, wanted: Any) -> None:
    ours, theirs = numbers(found), numbers(wanted)
    assert ours.keys() == theirs.keys()
    for place, value in theirs.items():
        assert ours[place] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), place


def models(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What was delivered, and what sites remember, by place."""
    files = (path for path in sorted(folder.rglob("*.safetensors")) if "checkpoint" not in path.name)
    return {str(path.relative_to(folder)): load_file(path) for path in files}


@pytest.mark.parametrize(
    ("method", "task", "settings"),
    [
        ("fedavg", UNET, {"reset_optimizer": False}),
        ("fedavg", squares.task(batch_size=4, optimizer=SGD, network=small.INSTANCE_UNET, freeze={"parts": ["head"], "rounds": 1}), {}),
        ("fedprox", CNN, {"mu": 1.0}),
        ("iop_fl", squares.task(batch_size=4, optimizer=SGD, schedule={"name": "cosine"}, clip={"norm": 0.5}), {"outside": ["O"]}),
    ],
)
def test_models_metrics_and_records_stay(method: str, task: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    found = run(method, task, out=tmp_path / "together", **settings)
    wanted = run(method, task, out=tmp_path / "apart", together=False, **settings)
    assert found["status"] == "COMPLETED", found["reason"]
    assert_close(found, wanted)
    ours, theirs = models(tmp_path / "together"), models(tmp_path / "apart")
    assert ours.keys() == theirs.keys() and any("models/global" in name for name in ours)
    for name, state in theirs.items():
        torch.testing.assert_close(ours[name], state, rtol=1e-5, atol=1e-5)
    assert [found["configuration"]["settings"].get("together"), wanted["configuration"]["settings"].get("together")] == [True, None]


def test_killed_within_every_step_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    run("iop_fl", out=tmp_path / "whole")
    begin = partial(run, "iop_fl", out=tmp_path / "pieces")
    killed, times = in_pieces(lambda say: begin(say=say), lambda say: begin(say=say, resume=True))
    assert killed["status"] == "COMPLETED" and times > 1
    whole, pieces = models(tmp_path / "whole"), models(tmp_path / "pieces")
    delivered = [name for name in whole if name.endswith("model.safetensors")]
    assert delivered and all(pieces[name][key].equal(tensor) for name in delivered for key, tensor in whole[name].items())


def test_an_interrupted_run_is_taken_up_as_one_batch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(out=tmp_path, rounds=1)
    monkeypatch.setattr(loop, "open_site", lambda name, task, **_: opener()(name, "inside"))
    assert loop.resume_local(tmp_path, together=True)["configuration"]["settings"]["together"] is True


def test_a_sites_own_error_is_its_own() -> None:
    """The others train on without it, and are told apart as they always are."""

    def broken(site: Site) -> None:
        if site.name == "B":
            site.batches = gone  # type: ignore[method-assign]

    def gone(*_: Any, **__: Any) -> Any:
        raise DataError("site B: its disk is gone")

    results = run(opener=opener(change=broken), min_sites=2, rounds=1)
    assert results["status"] == "COMPLETED"
    failed = {(event["site"], event["message"]) for event in results["events"] if event["kind"] == "failed"}
    assert failed == {("B", "site B: its disk is gone")}


def test_an_error_of_the_code_ends_the_run_and_leaves_no_thread() -> None:
    def broken(site: Site) -> None:
        if site.name == "B":
            site.abort = lambda: 1 // 0 > 0

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        run(opener=opener(change=broken))
    assert threading.active_count() == before


def test_seconds_are_shared_out() -> None:
    results = run(rounds=1)
    costs = [cost["seconds"] for cost in results["costs"].values()]
    assert all(seconds > 0 for seconds in costs) and sum(costs) <= results["seconds"]["total"]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fedsm", {}, "sites of method 'fedsm' train in a way of their own; leave it out, or run one of fedavg, fedprox, iop_fl, robust"),
        ("fedavg", {"server_half": "sha"}, "sites of method 'fedavg\\+sha' train in a way of their own"),
        ("fedavg", {"dp_noise": 1.0, "task": squares.WITHOUT_BATCH_NORM}, "with dp_noise every site draws and clips on its own"),
        ("fedavg", {"task": squares.task(accumulate=2)}, "task.accumulate is 2, set 1"),
        ("fedavg", {"workers": 2}, "with workers = 2 each in its own; leave out one"),
    ],
)
def test_refused_before_anything_runs(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^together: .*{message}"):
        run(method, **settings)


@pytest.mark.parametrize(
    ("computing", "setting"),
    [
        ({"further": (torch.device("cpu"),)}, "several devices"),
        ({"compiled": True}, "compile"),
    ],
)
def test_a_site_that_computes_otherwise_is_refused_as_it_enrols(computing: dict[str, Any], setting: str) -> None:
    def other(site: Site) -> None:
        if site.name == "B":
            site.computing = Computing(site.device, **computing)

    results = run(opener=opener(change=other))
    assert results["status"] == "FAILED"
    assert f"site B: together takes plain networks on one device; leave {setting} out of local/medflare.json" in results["reason"]
