"""`--help` is there at once, and every example that it shows is one."""

import argparse
import re
import shlex
import subprocess
import sys

import pytest

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
