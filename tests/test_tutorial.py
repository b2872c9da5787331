"""Every command of the tutorial, and every cell of its notebook."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cli.parsing import parsed
from helpers.forked_trial import fork_trials
from medflare.cli import main

SHORTER = {"20": "4"}  # rounds; Dice is above 0.8 after two
DOCS = Path(__file__).parents[1] / "docs"


def commands(language: str) -> list[list[str]]:
    """The command lines of the page's blocks in a language."""
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```$",
        (DOCS / "tutorial.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    lines: list[str] = []
    for block in blocks:
        lines += block.splitlines()
    return list(map(shlex.split, lines))


def test_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_trials(monkeypatch)
    monkeypatch.chdir(tmp_path)
    printed: dict[str, str] = {}
    for program, *arguments in commands("console"):
        arguments = [SHORTER.get(argument, argument) for argument in arguments]
        assert program == "medflare" and main(arguments) == 0, capsys.readouterr()
        printed.setdefault(" ".join(arguments[:2]), capsys.readouterr().out)
    assert "WARNING" not in printed["data init"]
    assert "\nOK\nnext: medflare run fedavg --task task.json " in printed["data check"]
    run = tmp_path / "runs" / "fedavg-photographs-seed0"
    results = json.loads((run / "results.json").read_text())
    assert (
        results["status"] == "COMPLETED"
        and results["mean"]["inside"]["global"]["dice"] > 0.7
        and (run / "report.html").is_file()
    )
    assert len([*(tmp_path / "predictions").glob("*_seg.png")]) == 98
    for name, sites in (("table", {"north", "south", "west"}), ("dicom", {"site-1", "site-2"})):
        results = json.loads(
            (tmp_path / "runs" / f"fedavg-{name}-seed0" / "results.json").read_text()
        )
        assert results["status"] == "COMPLETED" and results["sites"].keys() == sites


def test_other_commands_of_the_page_exist() -> None:
    names = ["medflare run", "medflare data init", "medflare task init", "medflare run"]
    assert [parsed(arguments)[0] for _, *arguments in commands("sh")] == names


def test_help_names_the_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert "medflare data init FOLDER" in output and "docs/tutorial.md" in output


def test_cells_of_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_trials(monkeypatch)
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "kept without outputs, which change from machine to machine"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"tutorial.ipynb {cell['id']}", "exec"), names)
    assert names["results"]["status"] == "COMPLETED" and {*names["table"]["site"]} == {
        "site-1",
        "site-2",
        "site-3",
    }
    assert len(list((tmp_path / "predictions").glob("*.png"))) == 4
    assert os.listdir(tmp_path / "runs" / "discs" / "models")
