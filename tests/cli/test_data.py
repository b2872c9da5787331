"""`medflare data check` and `data fingerprint` without a task: one that lies with the data, or what `task init` would propose."""

import json
from pathlib import Path

import pytest

from downloads import classes
from medflare.cli import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sites of a classification."""
    data = tmp_path / "DATA"
    options = ["--patient", r"^(p\d+)", "--sites", "2", "--shares", "50,25,25", "--out", str(data)]
    assert main(["data", "init", str(classes(tmp_path / "pets")), *options]) == 0
    return data


@pytest.mark.parametrize("place", ["", "site-1"], ids=["of the sites", "of one site"])
def test_the_task_that_lies_with_the_data(root: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = root / "task.json"
    assert main(["task", "init", str(root), "--yes", "--name", "beside", "--size", "32,16", "--out", str(task)]) == 0
    capsys.readouterr()
    assert main(["data", "check", str(root / place)]) == 0
    said, told = capsys.readouterr()
    assert "task beside" in said and f"task: {task.resolve()}" in told.splitlines()


def test_a_task_is_proposed_where_none_lies_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["data", "check", str(root)]) == 0
    said, told = capsys.readouterr()
    assert "OK" in said and "task: pets, as medflare task init proposes it; name another with --task" in told.splitlines()
    assert main(["data", "fingerprint", str(root)]) == 0
    said, told = capsys.readouterr()
    assert [site["site"] for site in json.loads(said)["sites"]] == ["site-1", "site-2"], "JSON alone is printed"
    assert "as medflare task init proposes it" in told and not (root / "task.json").exists()


def test_what_no_task_can_be_proposed_for_is_one_line(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["data", "check", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in (told := capsys.readouterr().err) and told.count("\n") == 1
    next((root / "site-1").rglob("*.png")).write_bytes(b"no picture")
    assert main(["data", "check", str(root)]) == 1
    told = capsys.readouterr().err
    assert "no task can be proposed" in told and "name one with --task" in told and "Traceback" not in told
