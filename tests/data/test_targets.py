"""Stored values as targets, and class numbers of a site as those of the task."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from medflare.core.errors import DataError
from medflare.data.datalist import class_numbers
from medflare.data.targets import encode_label, encode_mask, renumbering
from medflare.tasks.config import TaskConfig

TaskOf = Callable[..., TaskConfig]
STORED = np.array([[[0, 1], [2, 1]]])


def test_binary_masks(make_task: TaskOf) -> None:
    np.testing.assert_array_equal(encode_mask(np.array([[[0, 1]]]), make_task(), "m"), [[[0, 1]]])
    other = make_task(label_values={"square": [1, 2]})
    np.testing.assert_array_equal(encode_mask(STORED, other, "m"), [[[0, 1], [1, 1]]])
    with pytest.raises(DataError, match=r"m\.png.* 2 "):
        encode_mask(STORED, make_task(), "m.png")
    with pytest.raises(DataError, match="255"):
        encode_mask(np.array([[[0, 255]]]), make_task(), "m.png")
    np.testing.assert_array_equal(encode_mask(STORED, make_task(unlisted_labels="drop"), "m"), [[[0, 1], [0, 1]]])


def test_multiclass_masks(make_task: TaskOf) -> None:
    task = make_task(target="multiclass", labels=["background", "a", "b"])
    np.testing.assert_array_equal(encode_mask(STORED, task, "m"), STORED)
    swapped = make_task(target="multiclass", labels=["background", "a", "b"], label_values={"background": [0], "a": [2], "b": [1]})
    np.testing.assert_array_equal(encode_mask(STORED, swapped, "m"), [[[0, 2], [1, 2]]])
    with pytest.raises(DataError, match=" 3 "):
        encode_mask(STORED + 1, task, "m")
    with pytest.raises(DataError, match=" -1 "):
        encode_mask(STORED - 1, task, "m")


def test_nested_multilabel_masks(make_task: TaskOf) -> None:
    task = make_task(target="multilabel", labels=["disc", "cup"], label_values={"disc": [1, 2], "cup": [2]})
    np.testing.assert_array_equal(encode_mask(STORED, task, "m"), [[[0, 1], [1, 1]], [[0, 0], [1, 0]]])


def test_multilabel_masks_in_files(make_task: TaskOf) -> None:
    task = make_task(target="multilabel", labels=["disc", "cup"])
    masks = np.array([[[1, 0]], [[1, 1]]])
    np.testing.assert_array_equal(encode_mask(masks, task, "m"), masks)
    with pytest.raises(DataError, match="disc, cup"):
        encode_mask(masks[:1], task, "m")
    with pytest.raises(DataError, match="2 masks"):
        encode_mask(masks, make_task(), "m")


def test_class_labels(make_task: TaskOf) -> None:
    task = make_task("classification")
    assert encode_label(2, task, "x") == 2
    for wrong in (3, -1):
        with pytest.raises(DataError, match=f" {wrong} "):
            encode_label(wrong, task, "x")
    for odd in ("nv", 1.0, True, [1]):
        with pytest.raises(DataError, match="whole number"):
            encode_label(odd, task, "x")


def test_label_subset(make_task: TaskOf) -> None:
    subset = {"dark": [5], "medium": [2, 3], "bright": [4]}
    dropping = make_task("classification", label_values=subset, unlisted_labels="drop")
    assert [None if label is None else int(label) for label in (encode_label(value, dropping, "x") for value in range(6))] == [
        *(None, None, 1, 1),
        *(2, 0),
    ]
    with pytest.raises(DataError, match="2, 3, 4, 5"):
        encode_label(0, make_task("classification", label_values=subset), "x")


def test_binary_and_multilabel_labels(make_task: TaskOf) -> None:
    binary = make_task("classification", target="binary", labels=["sick"], label_values={"sick": [2, 3]}, unlisted_labels="error")
    assert [int(encode_label(value, binary, "x")) for value in (0, 2, 3)] == [0, 1, 1]  # type: ignore[arg-type]
    several = make_task("classification", target="multilabel", labels=["a", "b"])
    np.testing.assert_array_equal(encode_label([0, 1], several, "x"), [0, 1])
    for wrong in ([0], [0, 2], 1):
        with pytest.raises(DataError, match="a, b"):
            encode_label(wrong, several, "x")


GREY = {"0": "dark", "1": "grey", "2": "bright"}
BINARY: dict[str, Any] = {"target": "binary", "labels": ["ill"]}
CIRCLES: dict[str, Any] = {"target": "multiclass", "labels": ["bg", "circle", "square"]}


@pytest.mark.parametrize(
    ("names", "settings", "numbers"),
    [
        ({"0": "Dark", "1": "bright", "2": "quite bright"}, {"labels": ["dark", "medium", "bright", "quite_bright"]}, {1: 2, 2: 3}),
        ({"0": "dunkel", "1": "mittel", "2": "hell"}, {}, {}),  # all in another language
        ({"0": "0", "1": "1", "2": "2"}, {}, {}),
        ({"dark": 0, "medium": 1, "bright": 2}, {}, {}),
        ({"0": "dark", "7": "red"}, {}, {}),
        ({"odd": None}, {}, {}),
        (GREY, {"labels": ["dark", "other"], "label_values": {"dark": [0], "other": [1, 2]}}, {}),
        (GREY, {"labels": ["dark", "bright"], "label_values": {"dark": [0], "bright": [2]}, "unlisted_labels": "drop"}, {}),
        ({"0": "healthy", "1": "ill"}, {**BINARY, "label_values": {"ill": [1, 2]}}, {}),
        ({"0": "dark", "1": "bright", "2": "red"}, {}, "1 'bright'"),
        ({"0": "dark", "1": "bright"}, {}, "1 'bright'"),  # images of class 2 have no name
        ({"0": "dark", "1": "green", "2": "bright"}, {}, "1 'green'"),
        ({"0": "dunkel", "1": "hell"}, {}, "0 'dunkel'"),  # one class fewer in another language: it is unknown which
        ({"0": "0", "1": "2", "2": "4"}, {"labels": ["none", "mild", "moderate", "severe", "worst"]}, "1 '2'"),
        ({"0": "ill", "1": "healthy"}, BINARY, "0 'ill'"),
    ],
)
def test_class_numbers_by_name(names: dict[str, object], settings: dict[str, Any], numbers: Any, make_task: TaskOf) -> None:
    task = make_task("classification", **settings)
    if isinstance(numbers, str):
        with pytest.raises(DataError, match=numbers):
            renumbering(class_numbers(names), {0, 1, 2}, task, "site A")
    else:
        assert renumbering(class_numbers(names), {0, 1, 2}, task, "site A")[0] == numbers


@pytest.mark.parametrize(
    ("names", "settings", "error"),
    [
        ({"0": "background", "1": "square"}, {}, ""),
        ({"0": "circle", "1": "box"}, {}, ""),
        ({"1": "circle", "2": "square"}, {}, "2 'square'"),
        ({"1": "square"}, {"labels": ["circle", "square"], "target": "multiclass"}, ""),
        ({"0": "background", "1": "box"}, {"labels": ["background", "square"], "target": "multiclass"}, ""),
        ({"1": "square"}, CIRCLES, "1 'square'"),
        ({"0": "background", "1": "square"}, {"target": "multilabel"}, ""),
        ({"0": "circle", "1": "square"}, {"target": "multilabel"}, "1 'square'"),
    ],
)
def test_structures_are_not_renumbered(names: dict[str, object], settings: dict[str, Any], error: str, make_task: TaskOf) -> None:
    if error:
        with pytest.raises(DataError, match=error):
            renumbering(class_numbers(names), (), make_task(**settings), "site A")
    else:
        assert renumbering(class_numbers(names), (), make_task(**settings), "site A")[0] == {}
