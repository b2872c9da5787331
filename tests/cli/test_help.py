"""`--help` is there at once, and every example that it shows is one; what the command line does not know is refused in one line."""

import argparse
import errno
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import medflare
from medflare.cli import main
from medflare.cli.command import command_line
from medflare.federation.settings import RunSettings

OWN_DATA = ("data init", "task init", "data check", "data fingerprint")
SITE = tuple(f"site {action}" for action in ("setup", "doctor", "start", "stop", "restart", "status", "clean"))
RUNS = ("run", "resume", "job", "job watch", "job list", "study", "results")
COMMANDS = (*OWN_DATA, *SITE, *RUNS, "methods", "plan", "predict", "export")


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        command_line().parse_args([*command.split(), "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_is_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^  (medflare .+)$", help_of(command, capsys).partition("\nexamples:\n")[2], re.MULTILINE)
    assert examples
    for example in examples:
        assert example.startswith(f"medflare {command}")
        assert callable(command_line().parse_args(shlex.split(example, comments=True)[1:]).command)
        assert len(example) < 120


def test_no_command_is_missing_here(capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = (action for action in command_line()._actions if isinstance(action, argparse._SubParsersAction))
    assert {command.split()[0] for command in commands.choices} == {command.split()[0] for command in COMMANDS}
    with pytest.raises(SystemExit):
        command_line().parse_args(["data", "--help"])
    assert "medflare data check" in capsys.readouterr().out


def test_help_names_the_defaults_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(help_of("run", capsys).split())
    assert f"counts as gone (default: {RunSettings(rounds=1, seed=0).silence:g})" in said
    assert f"not ready by then (default: {RunSettings(rounds=1, seed=0).enrol_timeout:g};" in said
    assert RunSettings(rounds=1, seed=0).step_timeout == 0, "help says that a step waits"


def test_options_are_spelt_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--rounds", "--seed", "--outside", "--min-sites", "--sites-per-round", "--step-timeout", "--enrol-timeout", "--silence")
    for command in ("run", "job"):
        said = help_of(command, capsys)
        assert [
            option for option in (*settings, "--site-half", "--server-half", "--set", "--task", "--resplit") if option not in said
        ] == []
    for command in ("run", "resume", "study"):
        assert "--data-root" in help_of(command, capsys)


def test_help_loads_nothing_heavy() -> None:
    heavy = {"torch", "monai", "nvflare", "numpy", "pydantic", "jinja2", "matplotlib", "rich"}
    code = f"import sys, medflare.cli.command as cli; cli.command_line().format_help(); assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that the parser ends with."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "medflare: the following arguments are required: COMMAND; medflare --help"),
        ("dta init", "medflare: unknown command 'dta'; did you mean data"),
        ("data chek", "medflare data: unknown action 'chek'; did you mean check?"),
        ("--vrsion", "medflare: unknown option '--vrsion'; did you mean --version?"),
        ("run fedavg --rouds 3", "medflare run: unknown option '--rouds'; did you mean --rounds"),
        ("run --rouds 3", "unknown option '--rouds'"),  # what is misspelt comes before what is missing
        ("study fedavg --otu=x", "medflare study: unknown option '--otu'; did you mean --out"),
        ("run fedavg --engine lokal", "medflare run: argument --engine: unknown choice 'lokal'; did you mean local?"),
        ("run fedavg --site 2", "medflare run: unknown option '--site'; did you mean --sites"),
        ("job fedavg --out j --sites 4", "medflare job: unknown option '--sites'"),  # no beginning of --sites-per-round
        ("run fedavg --rounds x", "argument --rounds: invalid int value: 'x'; medflare run --help shows"),
        ("run fedavg fedsm", "medflare run: unrecognized arguments: fedsm;"),
    ],
)
def test_what_is_misspelt_is_named_with_the_nearest(line: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reason in refused(capsys, *line.split())


def test_values_of_options_are_no_misspelling() -> None:
    options = command_line().parse_args(["run", "fedavg", "--rounds", "3", "--sites=2", "--out", "--x y"])
    assert (options.rounds, options.sites, str(options.out)) == (3, "2", "--x y")
    assert [str(path) for path in command_line().parse_args(["predict", "--out", "o", "model", "--", "--odd.png"]).images] == ["--odd.png"]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"medflare {medflare.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_percent_is_written_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "%%" not in help_of(command, capsys)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "use a place that this account may read and write"),
        (errno.EROFS, "use a place that can be written"),
        (errno.ENOSPC, "make room"),
        (errno.ENOTDIR, "a file stands where a folder is needed"),
        (errno.EIO, "use another place"),
    ],
)
def test_a_place_that_cannot_be_used_is_one_line(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, "what the system says", path)

    monkeypatch.setattr("medflare.evaluation.console.show_results", fail)
    assert main(["results", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"medflare: {tmp_path}: what the system says; {remedy}") and said.count("\n") == 1


def test_an_error_that_is_about_no_file_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise ConnectionError("what the system says")

    monkeypatch.setattr("medflare.evaluation.console.show_results", fail)
    with pytest.raises(ConnectionError):
        main(["results", str(tmp_path)])


def test_letters_that_the_terminal_lacks_are_shown_as_escapes() -> None:
    command = [sys.executable, "-m", "medflare.cli", "methods", "fedprox"]
    ended = subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert rb"mu = 0.1  [\u03bc" in ended.stdout
