"""The survey that trains nothing: what sites say of their images, what they keep back, and what no server takes from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flare.server import SITES, Server, in_this_process
from helpers.killed_runs import Killed
from helpers.small_tasks import tiny_phantom
from helpers.volume_sites import TASK, make_volumes
from medflare.core.errors import Aborted, ConfigError, DataError
from medflare.core.message import Message
from medflare.data.checking.fingerprint import fingerprints, read_fingerprints, to_json
from medflare.data.checking.planning import plan
from medflare.evaluation.contract import validate_results
from medflare.evaluation.results import load_results
from medflare.federation.exchange import Reply
from medflare.federation.local import loop
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.local.loop import resume_local, run_local
from medflare.federation.participant import Participant
from medflare.federation.settings import FINALIZE
from medflare.flare import messages
from medflare.flare.aggregators import WeightedAggregator
from medflare.flare.controller import MedflareController
from medflare.methods.base import ServerContext, Step
from medflare.methods.baselines.fingerprint import FILE, FINGERPRINT, FingerprintServer, FingerprintSite
from medflare.methods.catalogue import get_method, method_names
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site

CUBES = load_task(TASK)
PHANTOM = load_task(tiny_phantom())
METHOD = get_method("fingerprint")


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites of three training volumes each."""
    root = tmp_path_factory.mktemp("cubes")
    for name in ("A", "B"):
        make_volumes(root / name, shape=(16, 16, 16))
    return root


def looked_at(task: TaskConfig, sites: list[str], folder: Path, **more: Any) -> dict[str, Any]:
    return run_local("fingerprint", task, sites, rounds=0, seed=0, out=folder, **more)


def found_in(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / FILE).read_text())
    return content


# ---- what it is for ------------------------------------------------------------------------------------------------------


def test_volumes_as_if_each_site_had_written_its_own(volumes: Path, tmp_path: Path) -> None:
    results = looked_at(CUBES, ["A", "B"], tmp_path, data_root=volumes)
    validate_results(results)
    assert (results["status"], results["rounds"], results["events"]) == ("COMPLETED", 0, [])
    assert found_in(tmp_path) == to_json(fingerprints(volumes, CUBES))
    assert plan(read_fingerprints([tmp_path / FILE])).settings["spacing"] == [2.0, 1.0, 3.0]
    row = results["tables"]["Training images"]["A"]
    assert (row["images"], row["patients"], row["size"], row["spacing, mm"]) == (3, 3, "16 x 16 x 16", "2 x 1 x 3")
    assert row.keys() >= {"channel pre", "channel flair", "class cube"} and row["class cube"].startswith("3 (")
    assert "class cube" in (tmp_path / "report.html").read_text() and not (tmp_path / "models").exists()


def test_pictures_whatever_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each in a process of its own, and under FLARE's controller."""
    for workers in (None, 2):
        looked_at(PHANTOM, list(SITES), tmp_path / f"{workers}", workers=workers)
    method, server = METHOD, Server(tmp_path / "flare", WeightedAggregator(method="fingerprint"), PHANTOM)
    monkeypatch.setattr(messages, "MessageExchange", in_this_process(method, PHANTOM, {}, 0))
    server.run(MedflareController(rounds=0, seed=0))
    results = load_results(tmp_path / "flare")
    assert (results["status"], results["method"], server.panics) == ("COMPLETED", "fingerprint", [])
    alone, apart, flare = (found_in(tmp_path / name) for name in ("None", "2", "flare/job/medflare"))
    assert alone == apart == flare and [site["site"] for site in alone["sites"]] == list(SITES)


def test_taken_up_after_the_sites_have_answered(volumes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, asked = LocalExchange.__call__, []

    def dying(exchange: LocalExchange, step: Step, outgoing: dict[str, Message]) -> dict[str, Reply]:
        asked.append(step.phase)
        if step.phase == FINALIZE and asked.count(FINALIZE) == 1:
            raise Killed
        return call(exchange, step, outgoing)

    monkeypatch.setattr(LocalExchange, "__call__", dying)
    with pytest.raises(Killed):
        looked_at(CUBES, ["A", "B"], tmp_path, data_root=volumes)
    assert not (tmp_path / FILE).exists()
    assert resume_local(tmp_path, data_root=volumes)["status"] == "COMPLETED"
    assert asked.count("describe") == 1 and found_in(tmp_path) == to_json(fingerprints(volumes, CUBES))


# ---- what a site keeps back ----------------------------------------------------------------------------------------------


def test_of_too_few_patients_nothing_is_told(volumes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make: Callable[..., Participant] = Participant
    monkeypatch.setattr(loop, "Participant", lambda name, *rest, **more: make(name, *rest, **more, minimum_patients=4 * (name == "A")))
    results = looked_at(CUBES, ["A", "B"], tmp_path, data_root=volumes)
    assert results["status"] == "COMPLETED"
    assert [site["site"] for site in found_in(tmp_path)["sites"]] == ["B"]
    assert results["tables"]["Training images"]["A"] == {"images": 3, "patients": "not told"}
    said = [event["message"] for event in results["events"] if event["site"] == "A"]
    assert any("tells no numbers of its training images" in message for message in said)


def test_what_single_patients_show_is_not_told(volumes: Path) -> None:
    algorithm = METHOD.make_site(open_site("A", CUBES, data_root=volumes), METHOD.plan(CUBES, ("A", "B"), {}))
    whole = algorithm.perform("describe", 0, Message()).meta[FINGERPRINT]
    algorithm.minimum_patients = 3
    guarded = algorithm.perform("describe", 0, Message()).meta[FINGERPRINT]
    assert guarded["sizes"]["minimum"] == guarded["sizes"]["p10"] == whole["sizes"]["p10"]
    assert guarded["classes"] == whole["classes"], "three patients show it"
    algorithm.minimum_patients = 4
    assert algorithm.perform("describe", 0, Message()).meta == {FINGERPRINT: {}}


def test_images_in_memory_have_no_fingerprint(squares: Any) -> None:
    algorithm = METHOD.make_site(squares.site("A"), METHOD.plan(squares.SEGMENTATION, squares.SITES, {}))
    assert isinstance(algorithm, FingerprintSite)
    with pytest.raises(DataError, match="site A"):
        algorithm.perform("describe", 0, Message())


def test_a_site_that_is_stopped_reads_no_further(volumes: Path) -> None:
    site, answers = open_site("A", CUBES, data_root=volumes), iter((False, True))
    site.abort = lambda: next(answers)
    with pytest.raises(Aborted, match="site A"):
        METHOD.make_site(site, METHOD.plan(CUBES, ("A", "B"), {})).perform("describe", 0, Message())
    assert list(answers) == []


# ---- what no server takes ------------------------------------------------------------------------------------------------


@pytest.fixture
def numbers(volumes: Path) -> dict[str, Any]:
    """What site A says."""
    (item,) = to_json(fingerprints(volumes / "A", CUBES))["sites"]
    return {name: value for name, value in item.items() if name not in ("site", "learnt")}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": -1}, "images"),
        ({"zeros": float("nan")}, ""),
        ({"site": "B"}, ""),
        ({"names": ["smith"]}, "names"),
    ],
)
def test_numbers_of_another_shape_are_refused(numbers: dict[str, Any], change: dict[str, Any], said: str) -> None:
    assert FINGERPRINT.validator(numbers) is None and FINGERPRINT.validator({}) is None
    problem = FINGERPRINT.validator({**numbers, **change})
    assert problem and said in problem


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": 5}, "5"),
        ({"channels": []}, "channels"),
        ({"classes": {"smith": {"images": 1, "share": 0.5}}}, "classes"),
    ],
)
def test_numbers_of_other_images_are_left_out(numbers: dict[str, Any], change: dict[str, Any], said: str) -> None:
    context = ServerContext(METHOD.plan(CUBES, ("A", "B"), {}), 0, 0)
    context.site_counts = {site: {"n": {"train": 3}} for site in ("A", "B")}
    server = FingerprintServer(context)
    replies = {"A": Message({}, {FINGERPRINT: {**numbers, **change}}), "B": Message({}, {FINGERPRINT: numbers})}
    server.aggregate(server.steps()[0], replies)
    (event,) = context.events.of("rejected")
    assert event["site"] == "A" and said in event["message"]
    assert [item["site"] for item in server.documents()[FILE]["sites"]] == ["B"]


# ---- what it is not ------------------------------------------------------------------------------------------------------


def test_it_is_no_method_to_train_with() -> None:
    assert "fingerprint" not in method_names()
    with pytest.raises(ConfigError, match="rounds"):
        run_local("fingerprint", PHANTOM, 2, rounds=2, seed=0)
    for name, server in (("fedavg", "fingerprint"), ("fingerprint", "fedavg")):
        with pytest.raises(ConfigError, match="fingerprint"):
            get_method(name, server=server)
    with pytest.raises(ConfigError, match="fingerprnt"):
        get_method("fingerprnt")
