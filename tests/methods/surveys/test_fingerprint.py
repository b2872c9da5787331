"""The method that trains nothing: the fingerprints that sites send or hold back, and which the server rejects."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.small_tasks import tiny_phantom
from helpers.volume_sites import TASK, make_volumes
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.local import LocalSettings
from medflare.evaluation.results import validate_results
from medflare.federation.local import loop
from medflare.federation.local.loop import run_local
from medflare.federation.participant import Participant
from medflare.methods.catalogue import get_method, method_names
from medflare.methods.surveys.fingerprint import FILE, FINGERPRINT
from medflare.preparation.fingerprint import fingerprints, read_fingerprints, to_json
from medflare.preparation.planning import plan
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site

CUBES = load_task(TASK)
METHOD = get_method("fingerprint")


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites of three training volumes each."""
    root = tmp_path_factory.mktemp("cubes")
    for name in ("A", "B"):
        make_volumes(root / name, shape=(16, 16, 16))
    return root


def run(task: TaskConfig, sites: list[str], folder: Path, **more: Any) -> dict[str, Any]:
    return run_local("fingerprint", task, sites, rounds=0, seed=0, out=folder, **more)


def content(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / FILE).read_text()))


def test_the_file_is_that_of_the_data_command(volumes: Path, tmp_path: Path) -> None:
    results = run(CUBES, ["A", "B"], tmp_path, data_root=volumes)
    validate_results(results)
    assert (results["status"], results["rounds"], results["events"]) == ("COMPLETED", 0, [])
    assert content(tmp_path) == to_json(fingerprints(volumes, CUBES))
    assert plan(read_fingerprints([tmp_path / FILE])).settings["spacing"] == [2.0, 1.0, 3.0]
    assert results["tables"]["Training images"]["A"] == {
        "images": 3,
        "patients": 3,
        "median size": "16 x 16 x 16",
    }
    assert not (tmp_path / "models").exists()


def test_a_site_with_too_few_patients_sends_no_fingerprint(
    volumes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Callable[..., Participant] = Participant
    monkeypatch.setattr(
        loop,
        "Participant",
        lambda name, *rest, **more: make(
            name, *rest, **{**more, "local": LocalSettings(minimum_patients=4 * (name == "A"))}
        ),
    )
    results = run(CUBES, ["A", "B"], tmp_path, data_root=volumes)
    assert results["status"] == "COMPLETED"
    assert [site["site"] for site in content(tmp_path)["sites"]] == ["B"]
    assert results["tables"]["Training images"]["A"] == {"images": None}, "three patients"
    assert any(
        "minimum_patients" in event["message"]
        for event in results["events"]
        if event["site"] == "A"
    )


def test_numbers_of_single_patients_are_held_back(volumes: Path) -> None:
    algorithm = METHOD.make_site(
        open_site("A", CUBES, data_root=volumes), METHOD.plan(CUBES, ("A", "B"), {})
    )
    whole = algorithm.perform("describe", 0, Message())[FINGERPRINT]
    algorithm.site.minimum_patients = 3
    guarded = algorithm.perform("describe", 0, Message())[FINGERPRINT]
    assert guarded["sizes"]["minimum"] == guarded["sizes"]["p10"] == whole["sizes"]["p10"]
    assert guarded["classes"] == whole["classes"], "three patients have the class"
    algorithm.site.minimum_patients = 4
    assert algorithm.perform("describe", 0, Message()) == Message.of({FINGERPRINT: {}})


@pytest.mark.parametrize(
    ("change", "token"),
    [({"images": -1}, "images"), ({"zeros": float("nan")}, ""), ({"names": ["smith"]}, "names")],
)
def test_invalid_fingerprints_are_refused(
    volumes: Path, change: dict[str, Any], token: str
) -> None:
    numbers = dict(to_json(fingerprints(volumes / "A", CUBES))["sites"][0])
    assert FINGERPRINT.problem(numbers) is None and FINGERPRINT.problem({}) is None
    problem = FINGERPRINT.problem({**numbers, **change})
    assert problem and token in problem


def test_it_cannot_train_or_be_paired() -> None:
    assert "fingerprint" not in method_names()
    with pytest.raises(ConfigError, match="rounds"):
        run_local("fingerprint", tiny_phantom(), 2, rounds=2, seed=0)
    for name, server in (("fedavg", "fingerprint"), ("fingerprint", "fedavg")):
        with pytest.raises(ConfigError, match="fingerprint"):
            get_method(name, server=server)
