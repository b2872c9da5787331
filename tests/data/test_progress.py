import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from helpers.fixture_types import TaskOf
from helpers.picture_sites import numbered_site
from medflare.cli import main
from medflare.data import progress
from medflare.data.progress import counted


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The logged lines; every reading of the clock is ten seconds later."""
    monkeypatch.setattr(logging.getLogger(progress.__name__), "propagate", True)
    caplog.set_level(logging.INFO, progress.__name__)
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_line_after_five_seconds_and_then_every_thirty(lines: Callable[[], list[str]]) -> None:
    assert list(counted("abcdefgh", 8, "site A, images read")) == list("abcdefgh")
    assert lines() == [f"site A, images read: {done} of 8 after {after} s" for done, after in ((0, 10), (4, 50))]


def test_batches_count_for_their_images(lines: Callable[[], list[str]], make_task: TaskOf) -> None:
    numbered_site(make_task(), train=42).score(lambda images: images[:, :1] * 0, "train")
    assert lines() == [f"site A, train images measured: {done} of 42 after {after} s" for done, after in ((0, 10), (4 * 8, 50))]


def test_commands_print_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # several commands in one process
        assert main(["methods"]) == 0
        capsys.readouterr()
        logging.getLogger(progress.__name__).info("%s: %d of %d", "images", 1, 2)
        assert capsys.readouterr().err == "medflare: images: 1 of 2\n"
