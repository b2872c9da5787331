"""Fixtures of startup kits, and a command that fails."""

from pathlib import Path

import pytest

from cli.fake_kits import Root, make_kit
from helpers.fixture_types import Refused
from medflare.cli import main
from medflare.cli.startup_kit import Kit


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """`refused("run", ...)`: the one line that a command which fails ends with."""

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main(words) == 1
        line = capsys.readouterr().err
        assert line.startswith("medflare: ") and line.count("\n") == 1
        return line

    return run


@pytest.fixture(scope="session")
def root() -> Root:
    return Root()


@pytest.fixture
def site(tmp_path: Path, root: Root) -> Kit:
    return make_kit(tmp_path / "site-1", root)


@pytest.fixture
def server(tmp_path: Path, root: Root) -> Kit:
    return make_kit(tmp_path / "server", root, "server")
