from collections.abc import Callable

import numpy as np
import pytest

from medflare.core.errors import DataError
from medflare.data.targets import encode_label, encode_mask
from medflare.tasks.config import TaskConfig

MaskOf = Callable[..., TaskConfig]
STORED = np.array([[[0, 1], [2, 1]]])


def test_binary_masks(make_task: MaskOf) -> None:
    np.testing.assert_array_equal(encode_mask(np.array([[[0, 1]]]), make_task(), "m"), [[[0, 1]]])
    other = make_task(label_values={"square": [1, 2]})
    np.testing.assert_array_equal(encode_mask(STORED, other, "m"), [[[0, 1], [1, 1]]])
    with pytest.raises(DataError, match=r"m.png: label value 2 out of range, the task knows 0, 1"):
        encode_mask(STORED, make_task(), "m.png")
    with pytest.raises(DataError, match=r"label value 255 .*label_values"):
        encode_mask(np.array([[[0, 255]]]), make_task(), "m.png")
    np.testing.assert_array_equal(encode_mask(STORED, make_task(unlisted_labels="drop"), "m"), [[[0, 1], [0, 1]]])


def test_multiclass_masks(make_task: MaskOf) -> None:
    task = make_task(target="multiclass", labels=["background", "a", "b"])
    np.testing.assert_array_equal(encode_mask(STORED, task, "m"), STORED)
    swapped = make_task(target="multiclass", labels=["background", "a", "b"], label_values={"background": [0], "a": [2], "b": [1]})
    np.testing.assert_array_equal(encode_mask(STORED, swapped, "m"), [[[0, 2], [1, 2]]])
    with pytest.raises(DataError, match="label value 3"):
        encode_mask(STORED + 1, task, "m")
    with pytest.raises(DataError, match="label value -1"):
        encode_mask(STORED - 1, task, "m")


def test_nested_multilabel_masks(make_task: MaskOf) -> None:
    task = make_task(target="multilabel", labels=["disc", "cup"], label_values={"disc": [1, 2], "cup": [2]})
    np.testing.assert_array_equal(encode_mask(STORED, task, "m"), [[[0, 1], [1, 1]], [[0, 0], [1, 0]]])


def test_multilabel_masks_in_files(make_task: MaskOf) -> None:
    task = make_task(target="multilabel", labels=["disc", "cup"])
    masks = np.array([[[1, 0]], [[1, 1]]])
    np.testing.assert_array_equal(encode_mask(masks, task, "m"), masks)
    with pytest.raises(DataError, match=r"1 mask\(s\) or channel\(s\) for 2 labels \(disc, cup\)"):
        encode_mask(masks[:1], task, "m")
    with pytest.raises(DataError, match="2 masks or colour channels where one is expected"):
        encode_mask(masks, make_task(), "m")


def test_class_labels(make_task: MaskOf) -> None:
    task = make_task("classification")
    assert encode_label(2, task, "x") == 2
    for wrong in (3, -1):
        with pytest.raises(DataError, match=f"label value {wrong} out of range, the task knows 0, 1, 2"):
            encode_label(wrong, task, "x")
    for odd in ("nv", 1.0, True, [1]):
        with pytest.raises(DataError, match="must be a whole number"):
            encode_label(odd, task, "x")


def test_label_subset(make_task: MaskOf) -> None:
    subset = {"dark": [5], "medium": [2, 3], "bright": [4]}
    dropping = make_task("classification", label_values=subset, unlisted_labels="drop")
    assert [None if label is None else int(label) for label in (encode_label(value, dropping, "x") for value in range(6))] == [
        *(None, None, 1, 1),
        *(2, 0),
    ]
    with pytest.raises(DataError, match="the task knows 2, 3, 4, 5"):
        encode_label(0, make_task("classification", label_values=subset), "x")


def test_binary_and_multilabel_labels(make_task: MaskOf) -> None:
    binary = make_task("classification", target="binary", labels=["sick"], label_values={"sick": [2, 3]}, unlisted_labels="error")
    assert [int(encode_label(value, binary, "x")) for value in (0, 2, 3)] == [0, 1, 1]  # type: ignore[arg-type]
    several = make_task("classification", target="multilabel", labels=["a", "b"])
    np.testing.assert_array_equal(encode_label([0, 1], several, "x"), [0, 1])
    for wrong in ([0], [0, 2], 1):
        with pytest.raises(DataError, match=r"list of 2 zeros and ones \(a, b\)"):
            encode_label(wrong, several, "x")
