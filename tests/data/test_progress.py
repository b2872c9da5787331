import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.fixture_types import SiteOf, TaskOf
from helpers.picture_sites import numbered_site
from medflare.cli import main
from medflare.data import progress
from medflare.data.progress import RoundsLeft, with_progress
from medflare.preparation.check import check_site
from medflare.preparation.proposing import TaskHints, propose


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
    assert list(with_progress("abcd", 4, "site A, images read")) == list("abcd")
    assert lines() == [
        "site A, images read: 0 of 4 after 10 s",
        "site A, images read: 1 of 4 after 20 s, about 1 min 00 s left",
        "site A, images read: 2 of 4 after 30 s, about 30 s left",
        "site A, images read: 3 of 4 after 40 s, about 13 s left",
    ]


def test_slow_items_are_not_silent_for_more_than_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    clock = itertools.count(0.0, 4.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    list(with_progress(range(7), 7, "images"))
    # Items begin after 4, 8, 12, ... s.
    assert [line.split()[5] for line in lines()] == ["8", "16", "24"]


def test_a_run_says_once_a_round_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 110.0, 160.0, 165.0, 240.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    left = RoundsLeft(5)
    # 60 s for round 2 of 5 and three to go; then 140 s for two, and two to go
    assert list(map(left.after, (1, 1, 2, 2, 3))) == [
        "",
        "",
        "about 3 min 00 s left",
        "",
        "about 2 min 20 s left",
    ]


def test_batches_count_for_their_images(lines: Callable[[], list[str]], make_task: TaskOf) -> None:
    numbered_site(make_task(), train=42).score(lambda images: images[:, :1] * 0, "train")
    shown = [line.partition(" after ")[0] for line in lines()]
    assert shown == [f"site A, train images measured: {done} of 42" for done in range(0, 42, 8)]


def test_every_long_phase_of_a_check_and_a_proposal_has_its_line(
    lines: Callable[[], list[str]], make_site: SiteOf, make_task: TaskOf, tmp_path: Path
) -> None:
    for name in "AB":
        make_site(kind="classification", name=f"DATA/{name}")
    root = tmp_path / "DATA"
    check_site(root, make_task("classification"), out=tmp_path / "out")
    propose(root, TaskHints())
    text = "\n".join(lines())
    for phase in (
        "site A, images checked: 1 of",
        "site B, images compared with other sites: 1 of",
        "site B, images for the scale of thumbnails: 1 of",
        "site A, thumbnails: 1 of",
        "images read for their channels: 1 of",
        "site B, training images read: 1 of",
        "measuring a training step on this device: ",
    ):
        assert phase in text


def test_commands_print_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # several commands in one process
        assert main(["methods"]) == 0
        capsys.readouterr()
        logging.getLogger(progress.__name__).info("%s: %d of %d", "images", 1, 2)
        assert capsys.readouterr().err == "medflare: images: 1 of 2\n"
