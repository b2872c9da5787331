"""Long work says how far it is: in the log under FLARE, and on the console of every command."""

import itertools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from helpers.picture_sites import numbered_site
from medflare.cli import main
from medflare.data import progress
from medflare.data.progress import counted
from medflare.tasks.config import TaskConfig


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The lines' own, as nobody has set it up; commands of other tests have."""
    log = logging.getLogger(progress.__name__)
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", False)
    before = log.level
    log.setLevel(logging.INFO)  # and not by the attribute: the logger remembers what is enabled
    yield log
    log.setLevel(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at it finds it ten seconds later."""
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


@pytest.fixture
def said(log: logging.Logger) -> list[str]:
    """What the log was told."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    return lines


@pytest.mark.usefixtures("clock")
def test_a_line_after_five_seconds_and_then_every_thirty(said: list[str]) -> None:
    assert list(counted("abcdefgh", 8, "site A, images read")) == list("abcdefgh")
    assert said == [f"site A, images read: {done} of 8 after {after} s" for done, after in ((0, 10), (4, 50))]


@pytest.mark.usefixtures("clock")
def test_an_item_may_count_for_several(said: list[str]) -> None:
    assert list(counted(["ab", "cde", "f", "g", "h", "i"], 9, "letters", size=len))
    assert said == ["letters: 0 of 9 after 10 s", "letters: 7 of 9 after 50 s"]


@pytest.mark.usefixtures("clock")
def test_a_site_that_measures_a_model_counts_images(said: list[str], make_task: Callable[..., TaskConfig]) -> None:
    site = numbered_site(make_task(), train=42)
    site.score(lambda images: images[:, :1] * 0, "train")
    assert said == [f"site A, train images measured: {done} of 42 after {after} s" for done, after in ((0, 10), (4 * 8, 50))]


def test_short_work_says_nothing(said: list[str]) -> None:
    assert list(counted([1, 2], 2, "two")) == [1, 2]
    assert not said


def test_commands_print_it(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """As often as a command is called in one process, and on the standard error of the moment."""
    for _ in range(2):
        assert main(["methods"]) == 0
        capsys.readouterr()
        log.info("%s: %d of %d", "images", 1, 2)
        assert capsys.readouterr().err == "medflare: images: 1 of 2\n"
