"""What a check found, as text."""

from collections.abc import Callable
from pathlib import Path

from medflare.data.checking.report import CheckReport, SiteReport
from medflare.tasks.config import TaskConfig

TaskOf = Callable[..., TaskConfig]

SOUND = SiteReport(
    splits={"train": (5, 4), "validation": (2, 2), "test": (3, 2)},
    sizes={"16 x 16": 7, "32 x 16": 3},
    classes={"not square": 1200, "square": 80},
    intensity={"minimum": 20.0, "mean": 41.25, "deviation": 12.5, "maximum": 210.0},
    notes=["an odd thing"],
)


def test_a_sound_pair_of_sites(make_task: TaskOf) -> None:
    report = CheckReport(make_task(), Path("/data"), {"A": SOUND, "B": SiteReport()}, shift=0.875, thumbnails=Path("out/thumbnails.png"))
    assert report.ok
    assert report.render().splitlines() == [
        "/data, task squares",
        "",
        "A",
        "  train            5 images of 4 patients",
        "  validation       2 images of 2 patients",
        "  test             3 images of 2 patients",
        "  stored sizes     16 x 16 (7), 32 x 16 (3)",
        "  training pixels  not square 1200, square 80",
        "  intensities      20 to 210, mean 41.25, sd 12.5",
        "  note: an odd thing",
        "",
        "B",
        "",
        "shift between sites: 0.88 balanced accuracy of telling the site from a thumbnail (chance 0.50)",
        "thumbnails: out/thumbnails.png",
        "OK",
    ]


def test_problems_are_the_verdict(make_task: TaskOf) -> None:
    broken = SiteReport(problems=["0.png: file not found", "... and 3 more"])
    report = CheckReport(make_task("classification"), Path("/data"), {"A": broken}, shift_reason="it takes two sites")
    assert not report.ok
    assert report.render().splitlines()[3:] == [
        "  PROBLEM: 0.png: file not found",
        "  PROBLEM: ... and 3 more",
        "",
        "shift between sites: not measured, it takes two sites",
        "NOT OK: solve the problems above and check again",
    ]


def test_many_sizes_are_counted(make_task: TaskOf) -> None:
    sizes = {f"{side} x {side}": 1 for side in (8, 16, 32, 64, 128)}
    report = CheckReport(make_task("classification"), Path("/data"), {"A": SiteReport(sizes=sizes, classes={"dark": 2})})
    assert "stored sizes     8 x 8 (1), 16 x 16 (1), 32 x 32 (1) and 2 more" in report.render()
    assert "training images  dark 2" in report.render()
