"""A task whose intensity transform was made for other images is noticed before anything is trained."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from medflare.data.checking.check import check_site
from medflare.data.checking.intensity import IntensityCheck
from medflare.tasks.config import TaskConfig
from volumes import cube_task, make_volumes

TaskOf = Callable[..., TaskConfig]
PHOTOGRAPHS = {"name": "ScaleIntensityRange", "a_min": 0, "a_max": 255, "b_min": 0.0, "b_max": 1.0, "clip": True}
NORMALIZED = {"name": "NormalizeIntensity", "nonzero": True, "channel_wise": True}


@pytest.mark.parametrize(
    ("most", "intensity", "words"),
    [
        (255, PHOTOGRAPHS, None),
        (9e5, PHOTOGRAPHS, "clipped: 100 % of what is above the lowest number becomes 1"),
        (9e5, NORMALIZED, None),
        (9e5, {**PHOTOGRAPHS, "clip": False}, "too large: mean"),
        (0.5, PHOTOGRAPHS, "all alike: deviation 0.000"),
    ],
)
def test_volumes_of_other_scanners(make_task: TaskOf, most: float, intensity: dict[str, object], words: str | None) -> None:
    check = IntensityCheck(make_task(intensity=intensity))
    for seed in range(3):
        check.add(np.random.default_rng(seed).uniform(0, most, (1, 12, 12)).astype(np.float32))
    note = check.note()
    assert (note is None) if words is None else (note is not None and words in note and "3 of 3 images" in note)
    assert note is None or '{"name": "NormalizeIntensity"' in note


def test_masks_of_zeros_and_255_are_no_clipping(make_task: TaskOf) -> None:
    check = IntensityCheck(make_task(intensity=PHOTOGRAPHS))
    check.add(255 * (np.arange(144).reshape(1, 12, 12) % 4 > 0).astype(np.float32))
    assert check.note() is None


def test_nothing_looked_at(make_task: TaskOf) -> None:
    check = IntensityCheck(make_task())
    assert check.note() is None
    check.add(np.zeros((1, 12, 12), np.float32))
    assert check.note() is None


def test_the_report_of_a_site_says_so(tmp_path: Path) -> None:
    folder = make_volumes(tmp_path / "A")  # 0 to 130
    assert not any("intensity" in note for note in check_site(folder, cube_task()).sites["A"].notes)
    notes = check_site(folder, cube_task(intensity={**PHOTOGRAPHS, "a_max": 1})).sites["A"].notes
    assert any("the task's intensity (ScaleIntensityRange) does not suit 7 of 7 images looked at" in note for note in notes)
