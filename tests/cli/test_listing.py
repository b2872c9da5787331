"""`medflare methods`: complete, and readable in every window and in a pipe."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import medflare
from medflare.cli import main
from medflare.cli.listing import method_listing
from medflare.methods.catalogue import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_every_hyper_parameter_is_there_and_fits(name: str) -> None:
    method = METHODS[name]
    plain, narrow = method_listing(method), method_listing(method, 60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert plain.split() == narrow.split()  # the same words
    lines = plain.splitlines()
    assert lines[0] == f"{name}: {method.paper}"
    for hyper in (method.site_class.Hyper, method.server_class.Hyper):
        for field in dataclasses.fields(hyper):
            (place,) = [place for place, line in enumerate(lines) if line.startswith(f"  {field.name} = ")]
            assert lines[place + 1].strip() == field.metadata["text"]


def test_an_entry_by_hand() -> None:
    lines = method_listing(METHODS["fedsm"]).splitlines()
    (entry,) = [line for line in lines if line.startswith("  lam ")]
    assert entry == "  lam = 0.7  [λ, Eq. 11; 0 to 1; site and server]"
    assert any(line.startswith("  reset_optimizer = false  [") for line in lines)


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "grace"]) == 0
    assert capsys.readouterr().out == method_listing(METHODS["grace"]) + "\n"
    assert main(["methods"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{method.name}: " in f"\n{said}" for method in METHODS.values())


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(medflare.__file__).parents[1])}
    command = [sys.executable, "-m", "medflare.cli", "methods"]
    listing = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert listing.stdout is not None and listing.stderr is not None
    listing.stdout.close()
    assert listing.stderr.read() == b""
    listing.stderr.close()
    assert listing.wait() == 1


def test_a_terminal_gets_lines_of_its_width(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods", "grace"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= 80 and len(said) > len(method_listing(METHODS["grace"]).splitlines())
