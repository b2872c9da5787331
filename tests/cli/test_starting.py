"""`medflare data init` and `medflare task init` hand on what was asked for, ask on a terminal, and say what comes next."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from downloads import classes
from medflare.cli import main


def test_from_a_folder_to_sites_and_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, task = tmp_path / "DATA", tmp_path / "task.json"
    options = ["--patient", r"^(p\d+)", "--sites", "2", "--out", str(data), "--seed", "3", "--shares", "50,25,25"]
    assert main(["data", "init", str(classes(tmp_path / "pets")), *options]) == 0
    said = capsys.readouterr().out
    assert "site-2  training" in said and said.splitlines()[-1] == f"next: medflare task init {shlex.quote(str(data))} --out task.json"
    assert main(["task", "init", str(data), "--yes", "--name", "pets", "--size", "32,16", "--out", str(task)]) == 0
    said = capsys.readouterr().out
    assert "size: [32, 16]\n    as said" in said and "--sites site-1,site-2 --engine local" in said
    assert json.loads(task.read_text())["name"] == "pets"
    assert main(["data", "check", str(data), "--task", str(task)]) == 0


def test_on_a_terminal_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes(tmp_path / "pets", patients=6)
    assert main(["data", "init", str(tmp_path / "pets")]) == 0
    answers = {"labels [cat,dog]: ": "", "size [16,16]: ": "32,32", "network [small_cnn]: ": "DenseNet121"}
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answers.pop)
    task = tmp_path / "task.json"
    assert main(["task", "init", str(tmp_path / "pets"), "--name", "pets", "--out", str(task)]) == 0
    settings = json.loads(task.read_text())
    assert not answers and (settings["size"], settings["network"]["name"], settings["labels"]) == ([32, 32], "DenseNet121", ["cat", "dog"])


def test_a_place_that_cannot_be_written_is_said_before_images_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("medflare.data.starting.proposing.propose", None)
    monkeypatch.setattr("medflare.data.checking.fingerprint.fingerprints", None)
    (tmp_path / "file").write_text("")
    for command in (["task", "init"], ["data", "fingerprint"]):
        assert main([*command, str(tmp_path), "--out", str(tmp_path)]) == 1
        assert "a folder stands where a file is needed" in capsys.readouterr().err
        assert main([*command, str(tmp_path), "--out", str(tmp_path / "file" / "task.json")]) == 1
        assert "correct the path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("data", "init", "{root}", "--copy"), "--copy"),
        (("data", "init", "{root}", "--sites", "2", "--site-column", "a", "--out", "x"), "--site-column"),
        (("data", "init", "{root}", "--sites", "0", "--out", "x"), "--sites"),
        (("data", "init", "{root}", "--shares", "1"), "--shares"),
        (("task", "init", "{root}", "--size", "big", "--out", "{root}/t.json"), "--size"),
        (("task", "init", "{root}", "--out", "{root}/cat/p00_0.png"), "--force"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes(tmp_path, patients=6)
    assert main([option.format(root=tmp_path) for option in options]) == 1
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1 and not (tmp_path / "datalist.json").exists()
