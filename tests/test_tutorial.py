"""The tutorial as it stands: every command of the page on an archive of small pictures, and every cell of the notebook."""

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cli.parsing import parsed
from helpers.downloaded_folders import classes
from medflare.cli import main

DOCS = Path(__file__).parents[1] / "docs"


def commands(language: str) -> list[list[str]]:
    """The command lines of the page's blocks in a language."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / "tutorial.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def archive(path: Path, folder: Path) -> None:
    """What the page says the archive holds."""
    classes(folder, patients=24, names=("healthy", "pneumonia"))
    with zipfile.ZipFile(path, "w") as file:
        for picture in sorted(folder.rglob("*.png")):
            file.write(picture, picture.relative_to(folder))


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    home.mkdir()
    archive(home / "chest.zip", tmp_path / "drawn")
    monkeypatch.chdir(home)
    said = {}
    for program, *arguments in commands("console"):
        if program == "python":
            subprocess.run([sys.executable, *arguments], check=True)
        else:
            assert program == "medflare" and main(arguments) == 0, capsys.readouterr()
            said[" ".join(arguments[:2])] = capsys.readouterr().out
    assert "WARNING" not in said["data init"] and "site-3  test" in said["data init"]
    assert said["data check"].rstrip().endswith("OK") and (home / "check" / "thumbnails.png").is_file()
    run = home / "runs" / "fedavg-chest-seed0"
    (results,) = run.rglob("results.json")
    assert json.loads(results.read_text())["status"] == "COMPLETED" and (run / "report.html").is_file()
    assert "healthy" in (home / "predictions" / "predictions.csv").read_text().splitlines()[0]


def test_the_other_commands_of_the_page_exist() -> None:
    assert [parsed(arguments)[1]["engine"] for _, *arguments in commands("sh")] == ["flare"]


def test_the_help_leads_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "medflare data init FOLDER" in said and "docs/tutorial.md" in said


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "kept without outputs, which change from machine to machine"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"tutorial.ipynb {cell['id']}", "exec"), names)
    said = capsys.readouterr().out
    assert "COMPLETED" in said and "site-3 Dice of the global model" in said
    assert len(list((tmp_path / "predictions").glob("*.png"))) == 4
    assert os.listdir(tmp_path / "runs" / "discs" / "models")
