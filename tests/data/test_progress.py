"""Long work says how far it is: in the log under FLARE, and on the console of every command."""

import itertools
import logging
from types import SimpleNamespace

import pytest

from medflare.cli import main
from medflare.data import progress
from medflare.data.progress import counted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at it is ten seconds after the one before."""
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


@pytest.mark.usefixtures("clock")
def test_a_line_after_five_seconds_and_then_every_thirty(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(progress.__name__), "propagate", True)
    with caplog.at_level(logging.INFO, progress.__name__):
        assert list(counted("abcdefgh", 8, "site A, images read")) == list("abcdefgh")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"site A, images read: {done} of 8 after {seconds} s" for done, seconds in ((0, 10), (4, 50))]


def test_short_work_says_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(progress.__name__), "propagate", True)
    with caplog.at_level(logging.INFO, progress.__name__):
        assert list(counted([1, 2], 2, "two")) == [1, 2]
    assert not caplog.records


def test_commands_print_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as a command is called in one process, and on the standard error of the moment."""
    log = logging.getLogger(progress.__name__)
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(log, name, getattr(log, name))
    for _ in range(2):
        assert main(["methods"]) == 0
        capsys.readouterr()
        log.info("%s: %d of %d", "images", 1, 2)
        assert capsys.readouterr().err == "medflare: images: 1 of 2\n"
