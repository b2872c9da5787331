"""What resizing loses of structures, and along which axes they keep an order."""

from typing import Any

import numpy as np
import pytest

from helpers.fixture_types import TaskOf
from medflare.preparation.fingerprint import fingerprints
from medflare.preparation.planning import ordered_axes
from medflare.preparation.structures import (
    LayoutOfImages,
    dice_after_resizing,
    standardised_distance,
)
from medflare.tasks.config import TaskConfig


@pytest.fixture
def two_structures(make_task: TaskOf) -> TaskConfig:
    return make_task(
        target="multiclass", labels=["background", "front", "back"], loss={"name": "dice_ce"}
    )


def test_thin_structures_lose_more_than_broad_ones() -> None:
    line = np.zeros((64, 64), bool)
    disc = np.zeros((64, 64), bool)
    line[:, 30] = True
    rows, columns = np.ogrid[:64, :64]
    disc[(rows - 32) ** 2 + (columns - 32) ** 2 < 20**2] = True
    # at a quarter of the size, every fourth column is kept, from 2 on: 30 is one of them, and comes back four columns wide
    assert dice_after_resizing(line, 16) == pytest.approx(2 * 64 / (64 + 4 * 64))
    assert dice_after_resizing(disc, 16) > 0.9


def test_halves_of_a_bar_are_2_4_apart() -> None:
    # centres at 49.5 and 149.5, variances of (100 ** 2 - 1) / 12
    halves = (np.array([49.5]), np.array([833.25])), (np.array([149.5]), np.array([833.25]))
    assert standardised_distance(*halves) == pytest.approx(100 / np.sqrt(2 * 10_000 / 12))


def bars(swapped: bool) -> np.ndarray:
    """A target (1, 40, 40): two structures, one after the other along the first axis."""
    target = np.zeros((1, 40, 40), np.int64)
    first, second = (2, 1) if swapped else (1, 2)
    target[0, 5:20, 10:20] = first
    target[0, 20:35, 10:20] = second
    return target


@pytest.mark.parametrize(
    ("swaps", "ordered"), [([False] * 6, (True, False)), ([False, True] * 3, (False, False))]
)
def test_structures_in_the_same_order_in_every_image(
    swaps: list[bool], ordered: Any, two_structures: TaskConfig
) -> None:
    layout = LayoutOfImages(two_structures)
    for patient, swapped in enumerate(swaps):
        layout.add(bars(swapped), str(patient))
    assert layout.summary().ordered == ordered


def test_numbers_of_few_patients_are_left_out(two_structures: TaskConfig) -> None:
    """Only one patient's image is larger than 32 pixels, and one patient alone shows both structures."""
    layout = LayoutOfImages(two_structures)
    layout.add(bars(swapped=False), "both")
    for patient in ("a", "b", "c"):
        small = np.zeros((1, 30, 30), np.int64)
        small[0, 5:20, 5:20] = 1
        layout.add(small, patient)
    assert layout.summary().detail.keys() == {32} and layout.summary().ordered == (True, False)
    assert layout.summary(minimum=3).detail == {} and layout.summary(minimum=3).ordered == (
        False,
        False,
    )


def test_a_structure_inside_another_has_no_order(two_structures: TaskConfig) -> None:
    layout = LayoutOfImages(two_structures)
    for patient in range(5):
        target = np.zeros((1, 40, 40), np.int64)
        target[0, 5:35, 5:35] = 1
        target[0, 12:30, 14:26] = 2  # a little off the centre, always to one side
        layout.add(target, str(patient))
    assert layout.summary().ordered == (False, False)


def test_a_sample_is_kept_until_something_changes(
    make_site: Any, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_site(
        {"training": [f"p{number}" for number in range(9)], "validation": ["v"], "test": ["t"]}
    )
    task = make_task()
    (sample,) = fingerprints(folder, task, sample=4)
    assert (sample.images, sample.patients, sample.sampled) == (9, 9, True)
    assert sample.classes["square"].images is None and sample.classes[
        "square"
    ].share == pytest.approx(16 / 256)
    assert sample.layout is not None and ordered_axes([sample]) == []
    with monkeypatch.context() as patch:
        patch.setattr(
            "medflare.data.decoding.Source.image",
            lambda *_: pytest.fail("the kept fingerprint is used"),
        )
        assert fingerprints(folder, task, sample=4) == [sample]
    (folder / "fingerprint.json").write_text("{", encoding="utf-8")
    assert fingerprints(folder, task, sample=4) == [sample]
    image = folder / "images/0.png"
    image.write_bytes((folder / "images/1.png").read_bytes() + b" ")
    assert fingerprints(folder, task, sample=4) != [sample]
