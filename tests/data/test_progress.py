import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from helpers.fixture_types import TaskOf
from helpers.picture_sites import numbered_site
from medflare.cli import main
from medflare.data import progress
from medflare.data.progress import RoundsLeft, counted


@pytest.fixture
def lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[], list[str]]:
    """The logged lines; every reading of the clock is ten seconds later."""
    monkeypatch.setattr(logging.getLogger(progress.__name__), "propagate", True)
    caplog.set_level(logging.INFO, progress.__name__)
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_line_after_five_seconds_and_then_every_ten_with_the_time_left(
    lines: Callable[[], list[str]],
) -> None:
    assert list(counted("abcdef", 6, "site A, images read")) == list("abcdef")
    assert lines() == [
        "site A, images read: 0 of 6 after 10 s",
        "site A, images read: 2 of 6 after 30 s, about 60 s left",
        "site A, images read: 4 of 6 after 50 s, about 25 s left",
    ]


def test_a_run_says_once_a_round_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 110.0, 160.0, 165.0, 240.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    left = RoundsLeft(5)
    # 60 s for round 2 of 5 and three to go; then 140 s for two, and two to go
    assert [left.after(round) for round in (1, 1, 2, 2, 3)] == [
        "",
        "",
        "about 3 min left",
        "",
        "about 2 min left",
    ]


def test_batches_count_for_their_images(lines: Callable[[], list[str]], make_task: TaskOf) -> None:
    numbered_site(make_task(), train=42).score(lambda images: images[:, :1] * 0, "train")
    shown = [line.partition(" after ")[0] for line in lines()]
    assert shown == [f"site A, train images measured: {done} of 42" for done in (0, 2 * 8, 4 * 8)]


def test_commands_print_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # several commands in one process
        assert main(["methods"]) == 0
        capsys.readouterr()
        logging.getLogger(progress.__name__).info("%s: %d of %d", "images", 1, 2)
        assert capsys.readouterr().err == "medflare: images: 1 of 2\n"
