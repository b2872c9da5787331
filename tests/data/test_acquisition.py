import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.data.acquisition import (
    Acquisition,
    TrainedOn,
    acquisition_of,
    check_range,
    joined_range,
    outside,
    range_of,
    read_range,
)
from medflare.data.geometry import Grid
from medflare.data.reading import Image as Read
from medflare.data.reading import read_image

VOLUMES = small_task(
    spatial_dims=3, size=[8, 8, 8], network={"name": "unet", "channels": [4, 8]}, spacing=[1, 1, 1]
)
RANGE = TrainedOn(
    9,
    ((30.0, 30.0, 20.0), (60.0, 60.0, 40.0)),
    ((1.0, 1.0, 1.0), (1.0, 1.0, 2.0)),
    ((30.0, 30.0, 20.0), (60.0, 60.0, 60.0)),
    ((10.0,), (40.0,)),
    ((80.0,), (100.0,)),
    (False,),
)
WITHIN = Acquisition((40.0, 40.0, 30.0), (1.0, 1.0, 1.0), (25.0,), (90.0,), False)


def test_a_volume_is_measured_along_the_axes_of_the_task_as_stored() -> None:
    # Stored along A, S, R.
    affine = np.array([[0.0, 0, 5, 0], [2, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 1]])
    values = np.arange(4 * 6 * 8, dtype=np.float32).reshape(1, 4, 6, 8)
    actual = acquisition_of(Read(values, Grid((4, 6, 8), affine)), VOLUMES)
    assert (
        actual.sides == (8, 4, 6) and actual.spacing == (5, 2, 3) and actual.extent == (40, 8, 18)
    )
    assert actual.medians == (95.5,) and actual.contrasts[0] == pytest.approx(0.9 * 191)
    unknown = acquisition_of(Read(values, Grid((4, 6, 8), np.eye(4), has_affine=False)), VOLUMES)
    assert unknown.spacing is None and unknown.extent is None and unknown.sides == (4, 6, 8)


def test_a_picture_is_as_large_however_it_is_turned_and_a_cut_volume_as_its_slices() -> None:
    task = small_task()
    assert (
        acquisition_of(Read(np.zeros((1, 30, 20))), task).sides
        == acquisition_of(Read(np.zeros((1, 20, 30))), task).sides
        == (20, 30)
    )
    assert acquisition_of(Read(np.zeros((1, 30, 20, 99))), task).sides == (20, 30)
    assert acquisition_of(
        Read(np.zeros((1, 30, 20, 99))), small_task(slices={"axis": 0})
    ).sides == (20, 99)


def test_colours_of_the_channels_or_of_the_file(tmp_path: Path) -> None:
    grey = np.full((3, 8, 8), 100.0)
    grey[:, 2:4] = 30
    task = small_task(channels=3)
    assert not acquisition_of(Read(grey), task).coloured
    assert acquisition_of(Read(grey * np.array([1, 0.6, 0.3])[:, None, None]), task).coloured
    assert not acquisition_of(
        Read(grey * np.array([1, 0.6, 0.3])[:, None, None]),
        small_task(channels=["t1", "t2", "flair"]),
    ).coloured
    for name, pixels in (("grey", grey), ("red", grey * np.array([1, 0.2, 0.2])[:, None, None])):
        Image.fromarray(pixels.transpose(1, 2, 0).astype(np.uint8)).save(tmp_path / f"{name}.png")
    assert [
        read_image([tmp_path / f"{name}.png"], small_task()).coloured for name in ("grey", "red")
    ] == [False, True]


def ranged(images: list[Acquisition], minimum: int = 0) -> TrainedOn:
    actual = range_of({str(number): [image] for number, image in enumerate(images)}, minimum)
    assert actual is not None
    return actual


def test_a_range_has_percentiles_and_none_below_the_minimum_of_patients() -> None:
    images = [WITHIN._replace(medians=(float(number),)) for number in range(101)]
    whole = ranged(images)
    assert (
        whole.medians == ((5.0,), (95.0,))
        and whole.images == 101
        and whole.extent == ((40, 40, 30), (40, 40, 30))
    )
    assert ranged(images, minimum=5).medians == ((10.0,), (90.0,))
    assert range_of({name: [WITHIN] for name in "abcd"}, minimum=5) is None and range_of({}) is None


def test_a_patient_of_many_images_decides_as_much_as_another() -> None:
    images = {str(patient): [WITHIN] for patient in range(29)}
    images["many"] = [WITHIN._replace(medians=(250.0,), sides=(9.0, 9.0, 9.0))] * 900
    actual = range_of(images)
    assert actual is not None and actual.images == 929
    assert actual.medians == (WITHIN.medians, WITHIN.medians)
    assert actual.sides == (WITHIN.sides, WITHIN.sides)


def test_colours_of_a_few_images_are_not_in_the_range() -> None:
    both = (False, True)
    for coloured, minimum, expected in (
        (0, 0, both[:1]),
        (2, 0, both[:1]),
        (9, 0, both),
        (50, 0, both),
        (101, 0, (True,)),
        (9, 5, both[:1]),
    ):
        images = [WITHIN._replace(coloured=number < coloured) for number in range(101)]
        assert ranged(images, minimum).coloured == expected


def test_ranges_of_one_image_and_of_unknown_spacing() -> None:
    unknown = WITHIN._replace(spacing=None)
    one = ranged([unknown])
    assert one.spacing is None and one.extent is None and outside(unknown, one) == {}
    assert ranged([unknown, WITHIN]).spacing == ((1, 1, 1), (1, 1, 1))


def test_a_spacing_that_few_images_have_does_not_leave_the_site() -> None:
    unknown = WITHIN._replace(spacing=None)
    few = ranged([unknown] * 9 + [WITHIN], minimum=5)
    assert few.spacing is None and few.extent is None
    assert ranged([WITHIN] * 10, minimum=5).spacing == ((1, 1, 1), (1, 1, 1))
    # `predict` compares voxels instead of millimetres.
    assert outside(WITHIN, few) == {}
    large = WITHIN._replace(sides=(400.0, 400.0, 300.0))
    assert outside(large, few).keys() == {"size"}


def test_the_range_of_several_sites_is_the_widest() -> None:
    other = dataclasses.replace(
        RANGE, spacing=None, extent=None, medians=((-5.0,), (20.0,)), coloured=(True,)
    )
    both = joined_range([RANGE, other])
    assert (
        both is not None
        and both.images == 18
        and both.medians == ((-5.0,), (40.0,))
        and both.coloured == (False, True)
    )
    assert (
        both.spacing == RANGE.spacing
        and joined_range([]) is None
        and joined_range([RANGE]) == RANGE
    )
    assert joined_range([other, other]).spacing is None  # type: ignore[union-attr]


@pytest.mark.parametrize("others", [1, 2])
def test_a_site_widens_the_range_ten_times_at_most(others: int) -> None:
    far = dataclasses.replace(
        RANGE,
        sides=((1e-6, 1e-6, 40.0), (1e9, 1e9, 40.0)),
        medians=((-1e9,), (1e9,)),
        contrasts=((80.0,), (1e9,)),
    )
    joined = joined_range([far, *[RANGE] * others])
    assert joined is not None
    assert joined.sides == ((3.0, 3.0, 20.0), (600.0, 600.0, 40.0))
    assert joined.contrasts == ((80.0,), (1000.0,))
    assert joined.medians == ((10.0 - 1000,), (40.0 + 1000,)) and joined.spacing == RANGE.spacing


def test_a_range_is_read_back_and_another_value_is_an_error() -> None:
    assert (
        read_range(RANGE.to_dict()) == RANGE
        and check_range(RANGE.to_dict())
        and RANGE.misfit(VOLUMES) is None
    )
    changes: list[dict[str, object]] = [
        {"images": 0},
        {"sides": [[1, 1]]},
        {"medians": [["a"], [1.0]]},
        {"more": 1},
    ]
    changes += [
        {"spacing": [[-1.0, 1, 1], [1, 1, 1]]},
        {"contrasts": [[math.inf], [1.0]]},
        {"medians": [[0.0] * 65] * 2},
    ]
    values: list[object] = [None, [], *({**RANGE.to_dict(), **change} for change in changes)]
    for value in values:
        with pytest.raises(ValueError, match="trained_on"):
            check_range(value)
    with pytest.raises(ConfigError):
        read_range({})
    assert RANGE.misfit(small_task()) and dataclasses.replace(
        RANGE, medians=((1.0, 1.0), (2.0, 2.0))
    ).misfit(VOLUMES)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"sides": (240.0, 240.0, 30.0)}, ["field of view"]),
        ({"sides": (19.0, 40.0, 30.0)}, ["field of view"]),
        ({"sides": (10.0, 10.0, 8.0), "spacing": (4.0, 4.0, 4.0)}, ["spacing"]),
        ({"medians": (250.0,)}, ["intensities"]),
        ({"contrasts": (0.0,)}, ["intensities"]),
        ({"coloured": True}, ["colour"]),
        ({"sides": (88.0, 21.0, 20.0)}, []),
        ({"sides": (36.0, 36.0, 20.0), "spacing": (1.4, 1.4, 2.9)}, []),
        ({"medians": (89.0,)}, []),
        ({"contrasts": (290.0,)}, []),
        ({"spacing": None}, []),
    ],
)
def test_differences_beyond_the_limits_are_named(change: dict[str, Any], kinds: list[str]) -> None:
    assert list(outside(WITHIN._replace(**change), RANGE)) == kinds


def test_sizes_in_pixels_without_spacing_and_grey_pictures_among_coloured_ones() -> None:
    trained = dataclasses.replace(
        RANGE, sides=((100.0, 100.0), (200.0, 300.0)), spacing=None, extent=None
    )
    picture = Acquisition((90.0, 500.0), None, (25.0,), (90.0,), False)
    assert outside(picture, trained) == {} and list(
        outside(picture._replace(sides=(90.0, 601.0)), trained)
    ) == ["size"]
    assert outside(WITHIN, dataclasses.replace(RANGE, coloured=(True,))) == {}
    three = dataclasses.replace(
        RANGE,
        medians=((10.0,) * 3, (40.0,) * 3),
        contrasts=((80.0,) * 3, (100.0,) * 3),
        coloured=(True,),
    )
    grey = WITHIN._replace(medians=(25.0,) * 3, contrasts=(90.0,) * 3)
    assert (
        list(outside(grey, three)) == ["colour"]
        and outside(grey, dataclasses.replace(three, coloured=(False, True))) == {}
    )
