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
    lines = report.render().splitlines()
    for shown in (
        "5 images of 4 patients",
        "16 x 16 (7), 32 x 16 (3)",
        "not square 1200, square 80",
        "an odd thing",
        "0.88",
        "thumbnails.png",
    ):
        assert len([line for line in lines if shown in line]) == 1


def test_problems_are_the_verdict(make_task: TaskOf) -> None:
    report = CheckReport(
        make_task(), Path("/data"), {"A": SiteReport(problems=["0.png: file not found"])}, shift_reason="it takes two sites"
    )
    assert not report.ok and "0.png: file not found" in report.render()


def test_many_sizes_are_counted(make_task: TaskOf) -> None:
    sizes = {f"{side} x {side}": 1 for side in (8, 16, 32, 64, 128)}
    report = CheckReport(make_task("classification"), Path("/data"), {"A": SiteReport(sizes=sizes, classes={"dark": 2})})
    assert "stored sizes     8 x 8 (1), 16 x 16 (1), 32 x 32 (1) and 2 more" in report.render()
    assert "training images  dark 2" in report.render()
