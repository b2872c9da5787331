"""From volumes to a task on the command line: fingerprints of two sites, and the task that they suggest."""

import json
from pathlib import Path

import pytest

from medflare.cli import main
from medflare.tasks.config import load_task
from volumes import TASK, make_volumes


def test_fingerprints_and_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("A", "B"):
        make_volumes(tmp_path / "data" / name, shape=(16, 16, 16))
    task = tmp_path / "cubes.json"
    task.write_text(json.dumps(TASK))
    sites, planned = tmp_path / "out" / "sites.json", tmp_path / "task.json"

    assert main(["data", "fingerprint", str(tmp_path / "data"), "--task", str(task), "--out", str(sites)]) == 0
    assert "A: 3 training images of 3 patients\nB: 3 training" in capsys.readouterr().out
    assert main(["plan", str(sites), "--memory", "4", "--name", "planned_cubes", "--out", str(planned)]) == 0
    said = capsys.readouterr().out
    assert "spacing: [2.0, 1.0, 3.0]\n    median spacing" in said and "planned from 6 training images (A, B)" in said
    found = load_task(planned)
    assert (found.name, found.spacing, found.labels) == ("planned_cubes", (2.0, 1.0, 3.0), ("cube",))
    assert main(["plan", str(planned), "--out", str(planned)]) == 1
    assert "task.json" in capsys.readouterr().err


def test_a_federation_finds_the_fingerprints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("A", "B"):
        make_volumes(tmp_path / "data" / name, shape=(16, 16, 16))
    task = tmp_path / "cubes.json"
    task.write_text(json.dumps(TASK))
    common = ["--task", str(task), "--sites", "A,B", "--data-root", str(tmp_path / "data"), "--engine", "local", "--out", str(tmp_path)]
    assert main(["run", "fingerprint", *common]) == 0
    said = capsys.readouterr().out
    assert "fingerprint on cubes, 0 rounds" in said and "Training images" in said and "spacing, mm" in said
    found = tmp_path / "fingerprint-cubes-seed0" / "fingerprints.json"
    assert main(["plan", str(found), "--memory", "4", "--out", str(tmp_path / "task.json")]) == 0
    assert "planned from 6 training images (A, B)" in capsys.readouterr().out


def test_without_a_file_the_numbers_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "cubes.json"
    task.write_text(json.dumps(TASK))
    assert main(["data", "fingerprint", str(make_volumes(tmp_path / "A")), "--task", str(task)]) == 0
    assert json.loads(capsys.readouterr().out)["sites"][0]["site"] == "A"
