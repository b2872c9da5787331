"""Which values the masks of images hold, and which of them is the background."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from medflare.core.errors import DataError
from medflare.data.progress import with_progress
from medflare.data.reading import label_values, read_stored

# Values of noise and of a border lie below and above these.
_LOW = 20
_HIGH = 200
_MOST_NESTED = 3  # structures of which each needs the ones before
_MANY_VALUES = 8
_MOST_MISSING = 0.2  # share of the numbers of objects, as of objects at a border
_MAX_VALUES = 20  # a mask with more has grey levels, not labels


class UnclearValuesError(DataError):
    """Masks have values that mean nothing without a task."""


def mask_values(files: Sequence[Path], *, named: bool) -> tuple[int, list[int]]:
    """The value of the background, and the other values of masks, sorted.

    Raises:
        UnclearValuesError: values of noise, of a border as in Pascal VOC, or below 0, unless the
            user has `named` all.

    The background is 0, or the value of all corners of all masks, as in REFUGE, where it is 255 and
    0 is the cup.
    """
    values = set()
    file_of: dict[int, Path] = {}  # value -> the first mask with it
    corners = set()
    with_255 = set()  # values of the masks that have 255
    of_masks = set()
    for file in with_progress(files, len(files), "masks read for their values"):
        mask = label_values(read_stored(file, mask=True).array, file)
        if len(mask) > 1:
            raise DataError(
                f"{file}: a mask with {len(mask)} channels (colours, or volumes of a "
                "4-D file); store label numbers in one grey mask, or in a 3-D file"
            )
        shown = set(np.unique(mask).tolist())
        values |= shown
        of_masks.add(tuple(sorted(shown - {0})))
        file_of = dict.fromkeys(shown, file) | file_of
        if 255 in shown:
            with_255 |= shown
        corners.update(mask[0][np.ix_(*[[0, -1]] * (mask.ndim - 1))].ravel().tolist())
        if len(values) > _MAX_VALUES:
            raise UnclearValuesError(
                f"{file}: masks have more than {_MAX_VALUES} values (soft edges, or a number for "
                "each object?); store the numbers of structures, or say which values are the "
                "structure: data init --threshold 128"
            )
    if not named and _count_objects(of_masks):
        raise UnclearValuesError(
            f"{file_of[max(values)]}: masks seem to number objects, as they hold values up to "
            f"{max(values)}, others fewer; write 1 for each object, or name the structure of each "
            "value with --labels"
        )
    if values == {0, 1, 255} and with_255 <= {0, 255}:
        values = {0, 1}  # `targets.encode_mask` reads 255 as 1 in masks of 0 and 255
    background = 0
    if len(corners) == 1 and len(values) > 1:
        background = corners.pop()
    values.discard(background)
    lowest = min(values, default=0)
    listed = ", ".join(map(str, sorted(values)))
    if not named and lowest < 0:
        raise UnclearValuesError(
            f"{file_of[lowest]}: masks hold a value below 0 ({listed}); if it marks what is not "
            "annotated, store 0 there, otherwise name a structure for each value with --labels"
        )
    if not named and lowest < _LOW < _HIGH < max(values, default=0):
        raise UnclearValuesError(
            f"{file_of[lowest]}: masks hold values near 0 and near 255 ({listed}); store 0 "
            "for noise and for a border that does not count, and one value for each structure, or "
            "name a structure for each value with --labels"
        )
    if not values:
        raise DataError(f"{files[0]}: all of {len(files)} masks are empty; are these the masks?")
    return background, sorted(values)


def _count_objects(of_masks: Collection[tuple[int, ...]]) -> bool:
    """Whether masks have the values 1, 2, ..., few of them missing, to a highest one that differs:
    numbers of objects, as in GlaS. Or many values of which none is in most masks. `of_masks`: the
    values of masks without 0.

    Examples:
        >>> _count_objects({(1,), (1, 2), (1, 2, 4, 5)}), _count_objects({(1,), (1, 2), (1, 5)})
        (True, False)
        >>> _count_objects({(1, 2, 3), (3, 4, 5), (5, 6, 7), (8, 9, 1)})
        True
    """
    highest = [max(values) for values in of_masks if values]
    if max(highest, default=0) <= _MOST_NESTED:
        return False
    masks_with = Counter(chain.from_iterable(of_masks))
    in_few = masks_with.most_common(1)[0][1] <= len(of_masks) / 2
    if in_few and len(masks_with) >= _MANY_VALUES:
        return True
    differ = len(set(highest)) > max(2, len(highest) / 2)
    missing = 1 - sum(map(len, of_masks)) / sum(highest)
    return differ and missing < _MOST_MISSING
