from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from helpers.fixture_types import TaskOf
from medflare.core.errors import DataError
from medflare.data.datalist import class_numbers
from medflare.data.targets import (
    SiteStructures,
    differing_structures,
    encode_label,
    encode_mask,
    renumbering,
)


def refused(expected: Any) -> AbstractContextManager[Any]:
    """An error that matches the text `expected`; no error for another value."""
    return pytest.raises(DataError, match=expected) if isinstance(expected, str) else nullcontext()


STORED = np.array([[[0, 1], [2, 1]]])
SEVERAL = np.array([[[1, 0]], [[1, 1]]])
THREE: dict[str, Any] = {"target": "multiclass", "labels": ["background", "a", "b"]}
TWO: dict[str, Any] = {"target": "multilabel", "labels": ["disc", "cup"]}


@pytest.mark.parametrize(
    ("settings", "masks", "expected"),
    [
        ({}, STORED % 2, [[[0, 1], [0, 1]]]),
        ({"label_values": {"square": [1, 2]}}, STORED, [[[0, 1], [1, 1]]]),
        ({"unlisted_labels": "drop"}, STORED, [[[0, 1], [0, 1]]]),
        (THREE, STORED, STORED),
        (
            {**THREE, "label_values": {"background": [0], "a": [2], "b": [1]}},
            STORED,
            [[[0, 2], [1, 2]]],
        ),
        # One within the other.
        (
            {**TWO, "label_values": {"disc": [1, 2], "cup": [2]}},
            STORED,
            [[[0, 1], [1, 1]], [[0, 0], [1, 0]]],
        ),
        (TWO, SEVERAL, SEVERAL),
        ({}, STORED, r"m\.png.* 2 "),
        ({}, STORED * 255, "255"),
        ({}, STORED % 2 * 255, [[[0, 1], [0, 1]]]),
        ({}, np.full((1, 2, 2), 255), [[[1, 1], [1, 1]]]),
        ({}, np.array([[[0, 1], [0, 255]]]), "255"),
        ({"unlisted_labels": "drop"}, STORED % 2 * 255, np.zeros((1, 2, 2))),
        (TWO, SEVERAL * [[[255]], [[1]]], SEVERAL),  # each mask has its numbers
        (TWO, SEVERAL * [[[76]], [[2]]], SEVERAL),
        (TWO, SEVERAL * [[[64, 255]], [[1, 128]]], r"m\.png: .* holds 1, 128; "),
        (TWO, -SEVERAL, " -1"),
        ({**TWO, "label_values": {"disc": [1], "cup": [2]}}, STORED % 2 * 255, "255"),
        (THREE, STORED + 1, " 3 "),
        (THREE, STORED - 1, " -1 "),
        (TWO, SEVERAL[:1], "disc, cup"),
        ({}, SEVERAL, "2 masks"),
    ],
)
def test_masks(
    settings: dict[str, Any], masks: np.ndarray, expected: Any, make_task: TaskOf
) -> None:
    with refused(expected):
        np.testing.assert_array_equal(
            encode_mask(masks, make_task(**settings), ["m.png"]), expected
        )


SUBSET = {"label_values": {"dark": [5], "medium": [2, 3], "bright": [4]}}
SICK: dict[str, Any] = {
    "target": "binary",
    "labels": ["sick"],
    "label_values": {"sick": [2, 3]},
    "unlisted_labels": "error",
}


@pytest.mark.parametrize(
    ("settings", "labels", "expected"),
    [
        ({}, [2], [2]),
        ({**SUBSET, "unlisted_labels": "drop"}, range(6), [None, None, 1, 1, 2, 0]),
        (SICK, [0, 2, 3], [0, 1, 1]),
        (TWO, [[0, 1]], [[0, 1]]),
        ({}, [3], " 3 "),
        ({}, [-1], " -1 "),
        ({}, ["nv", 1.0, True, [1]], "whole number"),
        (SUBSET, [0], "2, 3, 4, 5"),
        (TWO, [[0], [0, 2], 1], "disc, cup"),
    ],
)
def test_labels(
    settings: dict[str, Any], labels: list[Any], expected: Any, make_task: TaskOf
) -> None:
    task = make_task("classification", **settings)
    for number, label in enumerate(labels):
        with refused(expected):
            code = encode_label(label, task, "x")
            assert (None if code is None else code.tolist()) == expected[number]


GREY = {"0": "dark", "1": "grey", "2": "bright"}
BINARY: dict[str, Any] = {"target": "binary", "labels": ["ill"]}
CIRCLES: dict[str, Any] = {"target": "multiclass", "labels": ["bg", "circle", "square"]}


@pytest.mark.parametrize(
    ("names", "settings", "numbers"),
    [
        (
            {"0": "Dark", "1": "bright", "2": "quite bright"},
            {"labels": ["dark", "medium", "bright", "quite_bright"]},
            {1: 2, 2: 3},
        ),
        ({"0": "dunkel", "1": "mittel", "2": "hell"}, {}, {}),  # all in another language
        ({"0": "0", "1": "1", "2": "2"}, {}, {}),
        ({"dark": 0, "medium": 1, "bright": 2}, {}, {}),
        ({"0": "dark", "7": "red"}, {}, {}),
        ({"odd": None}, {}, {}),
        (GREY, {"labels": ["dark", "other"], "label_values": {"dark": [0], "other": [1, 2]}}, {}),
        (
            GREY,
            {
                "labels": ["dark", "bright"],
                "label_values": {"dark": [0], "bright": [2]},
                "unlisted_labels": "drop",
            },
            {},
        ),
        ({"0": "healthy", "1": "ill"}, {**BINARY, "label_values": {"ill": [1, 2]}}, {}),
        ({"0": "dark", "1": "bright", "2": "red"}, {}, "1 'bright'"),
        ({"0": "dark", "1": "bright"}, {}, "1 'bright'"),  # images of class 2 have no name
        ({"0": "dark", "1": "green", "2": "bright"}, {}, "1 'green'"),
        # One class fewer in another language: it is unknown which.
        ({"0": "dunkel", "1": "hell"}, {}, "0 'dunkel'"),
        (
            {"0": "0", "1": "2", "2": "4"},
            {"labels": ["none", "mild", "moderate", "severe", "worst"]},
            "1 '2'",
        ),
        ({"0": "ill", "1": "healthy"}, BINARY, "0 'ill'"),
    ],
)
def test_class_numbers_by_name(
    names: dict[str, object], settings: dict[str, Any], numbers: Any, make_task: TaskOf
) -> None:
    with refused(numbers):
        assert (
            renumbering(
                class_numbers(names), {0, 1, 2}, make_task("classification", **settings), "site A"
            )[0]
            == numbers
        )


@pytest.mark.parametrize(
    ("names", "settings", "numbers"),
    [
        ({"0": "background", "1": "square"}, {}, {}),
        ({"0": "circle", "1": "box"}, {}, {}),
        ({"1": "circle", "2": "square"}, {}, "2 'square'.*; number them so in its masks"),
        ({"1": "square"}, {"labels": ["circle", "square"], "target": "multiclass"}, {}),
        (
            {"0": "background", "1": "box"},
            {"labels": ["background", "square"], "target": "multiclass"},
            {},
        ),
        ({"1": "square"}, CIRCLES, "1 'square'"),
        ({"0": "background", "1": "square"}, {"target": "multilabel"}, {}),
        (
            {"0": "circle", "1": "square"},
            {"target": "multilabel"},
            "1 'square'.*; list its masks and labels in this order",
        ),
    ],
)
def test_structures_are_not_renumbered(
    names: dict[str, object], settings: dict[str, Any], numbers: Any, make_task: TaskOf
) -> None:
    with refused(numbers):
        assert renumbering(class_numbers(names), (), make_task(**settings), "site A")[0] == numbers


@pytest.mark.parametrize(
    ("labels", "of_other", "changes", "text"),
    [
        ("123", "132", {}, "it numbers its structures 1 a, 2 b, 3 c, Oslo 1 a, 2 c, 3 b; renumber"),
        ("12", "21", {"mask_each": True}, "1 a, 2 b, Oslo 1 b, 2 a; list its masks so, then"),
        # A site that lacks one, and DICOM segments, which have names.
        (
            "13",
            "123",
            {"mask_each": True},
            "structures: a, c; those of Oslo: a, b, c; give data init",
        ),
        ("123", "132", {"segments": True}, "structures: a, b, c; those of Oslo: a, c, b; give"),
        ("", "12", {}, "its structures: no names; those of Oslo: a, b; give"),
        ("12", "", {}, "its structures: a, b; those of Oslo: no names; give"),
        ("", "12", {"structure": "b"}, "its structures: b; those of Oslo: a, b; give"),
    ],
)
def test_structures_of_two_sites(
    labels: str, of_other: str, changes: dict[str, Any], text: str
) -> None:
    rome = named_structures("Rome", labels)._replace(**changes)
    oslo = named_structures("Oslo", of_other)
    if not rome.structure:
        oslo = oslo._replace(**changes)
    assert text in differing_structures(rome, oslo)
    one_mask = oslo._replace(mask_each=not rome.mask_each)
    assert "--structure NAME=OTHER" in differing_structures(rome, one_mask)


def named_structures(site: str, numbers: str) -> SiteStructures:
    """The structures a, b, c, ... of these digits, numbered from 1 in this order."""
    names = {}
    for row, digit in enumerate(numbers, start=1):
        names["_abc"[int(digit)]] = [row]
    return SiteStructures(site, names, "", mask_each=False, segments=False)
