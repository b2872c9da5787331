"""`--help` is there at once, and every example that it shows is one; what the command line does not know is refused in one line."""

import errno
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
from typer.main import get_command

import medflare
from cli.parsing import command_names, parsed
from helpers.fixture_types import Refused
from medflare.cli import main
from medflare.cli.command import app
from medflare.federation.settings import RunSettings


@pytest.mark.parametrize("command", command_names())
def test_every_example_is_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*command.split(), "--help"])
    output = capsys.readouterr().out
    examples = re.findall(
        r"^ +(medflare .+)$", output.partition("\n  examples:\n")[2], re.MULTILINE
    )
    assert examples
    for example in examples:
        path, _ = parsed(shlex.split(example, comments=True)[1:])
        assert path.split()[1] == example.split()[1] and len(example) < 120
    assert "%(" not in output and "%%" not in output


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("job fedsm --out x", "job create"),
        ("job watch x --kit k", "job watch"),
        ("study fedavg --out x", "study run"),
        ("study table x", "study table"),
    ],
)
def test_the_first_action_of_a_group_may_be_left_out(short: str, whole: str) -> None:
    assert parsed(short.split())[0] == f"medflare {whole}"


def test_the_settings_of_a_run_are_options() -> None:
    for command in ("run", "job"):
        _, options = parsed(
            [command, "fedavg", "--out", "x", "--heartbeat-timeout", "3", "--outside", "A, B"]
        )
        assert options.keys() >= {
            name for name in RunSettings.__dataclass_fields__ if name != "resume"
        }
        assert (options["heartbeat_timeout"], options["rounds"]) == (3.0, None)


def test_help_loads_nothing_heavy() -> None:
    heavy = {"torch", "monai", "nvflare", "numpy", "jinja2", "matplotlib", "rich"}
    code = f"import sys; from medflare.cli import main\ntry: main(['run', '--help'])\nfinally: assert not {heavy} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
    )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("dta init", "'data'"),
        ("run --rouds 3", "--rounds"),  # what is misspelt comes before what is missing
        ("run fedavg --engine lokal", "local"),
        ("job fedavg --out j --sites 4", "--sites"),  # no beginning of --sites-per-round
        ("run fedavg fedsm", "fedsm"),
        ("predict model image", "--out"),
    ],
)
def test_what_is_misspelt_is_one_line_that_names_it(
    line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    output = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and output.startswith("medflare")
        and output.count("\n") == 1
        and named in output
    )


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"medflare {medflare.__version__}\n"


def test_processes_of_a_command_import_nothing_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be a folder that somebody else has filled, such as results that were fetched."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "argv", ["medflare", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["PYTHONSAFEPATH"] == "1" and "GOMP_SPINCOUNT" in os.environ


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """`medflare results` raises this error."""
    monkeypatch.setattr("medflare.evaluation.console.show_results", Mock(side_effect=error))


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EIO]
)
def test_a_place_that_cannot_be_used_is_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    failing(monkeypatch, OSError(number, "what the system says", "place"))
    assert refused("results", "place").startswith("medflare: place: what the system says; ")


def test_an_error_that_is_about_no_file_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, ConnectionError("what the system says"))
    with pytest.raises(ConnectionError):
        main(["results", "place"])


def test_a_question_without_an_answer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    failing(monkeypatch, EOFError())
    assert "--yes" in refused("results", "place")


def test_letters_that_the_terminal_lacks_are_shown_as_escapes() -> None:
    command = [sys.executable, "-m", "medflare.cli", "methods", "fedprox"]
    ended = subprocess.run(
        command,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert rb"mu = 0.1  [\u03bc" in ended.stdout


@pytest.mark.parametrize(("line", "command"), [("", "run"), ("data", "init"), ("job", "watch")])
def test_a_group_without_arguments_prints_its_help(
    line: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(line.split())
    assert re.search(rf"^  {command} ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("command", command_names())
def test_every_argument_and_option_has_a_help_text(command: str) -> None:
    actual: Any = get_command(app)
    for word in command.split():
        actual = actual.commands[word]
    assert [item.name for item in actual.params if not item.help] == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["task", "init", "DATA", "--network"], "(medflare task init --help shows what it takes)"),
        (["results", "RUN", "--csv"], "(medflare results --help shows what it takes)"),
        (["data", "init", "F", "--kind", "x"], "'--kind': 'x' is not one of"),
        (["study", "fedavg", "--processes", "0", "--out", "x"], "--processes 0: give 1 or more"),
    ],
)
def test_a_wrong_option_names_the_help_of_its_command(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        main(words)
    assert line in capsys.readouterr().err
