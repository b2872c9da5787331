"""Lines, blurs, sizes and files of pictures in NumPy: what the embedded images are drawn with.

Every drawing operation gives the pixels that Pillow gives (the tests compare them), so a site needs no imaging library to have the
embedded federation, and its images do not depend on which version of one it has.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ONE = 1 << 24  # 1 in the fixed-point arithmetic of the blur
_PASSES = 3


@dataclass(frozen=True)
class Line:
    """A straight line from `start` to `end`, both (column, row) in whole pixels."""

    start: tuple[int, int]
    end: tuple[int, int]
    width: int
    value: int


def draw_lines(lines: Sequence[Line], side: int) -> np.ndarray:
    """A black square picture with the lines, uint8 (side, side); later lines lie over earlier ones, and what is outside is cut off."""
    thin = [number for number, line in enumerate(lines) if line.width == 1 or line.start == line.end]
    wide = [number for number, line in enumerate(lines) if line.width > 1 and line.start != line.end]
    last = np.zeros((side, side), int)  # number of the line on top, plus one
    for numbers, points in ((thin, _thin), (wide, _wide)):
        if numbers:
            place, rows, columns = points([lines[number] for number in numbers])
            seen = (rows >= 0) & (rows < side) & (columns >= 0) & (columns < side)
            np.maximum.at(last, (rows[seen], columns[seen]), np.array(numbers)[place[seen]] + 1)
    return np.array([0, *(line.value for line in lines)], np.uint8)[last]


_Points = tuple[np.ndarray, np.ndarray, np.ndarray]  # (place in the sequence of lines, row, column) of every pixel


def _thin(lines: Sequence[Line]) -> _Points:
    """Pixels of lines that are one pixel wide: one for each step along the longer axis."""
    start, delta = _geometry(lines)
    length = np.abs(delta)
    steps = length.max(axis=1)
    along = np.minimum(np.arange(steps.max() + 1), steps[:, None])  # (lines, steps); the end is drawn again, not exceeded
    moved = (2 * length[:, None] * along[..., None] + steps[:, None, None]) // np.maximum(2 * steps, 1)[:, None, None]
    points = start[:, None] + np.sign(delta)[:, None] * moved
    place = np.broadcast_to(np.arange(len(lines))[:, None], along.shape)
    return place.ravel(), points[..., 1].ravel(), points[..., 0].ravel()


def _wide(lines: Sequence[Line]) -> _Points:
    """Pixels of wider lines: in every row of the line's rectangle all those between its left and its right edge."""
    corners = _rectangles(lines)  # (lines, 4, 2)
    x, y = corners[..., 0], corners[..., 1]
    top, bottom = y.min(axis=1), y.max(axis=1)
    rows = top[:, None] + np.arange((bottom - top).max() + 1)  # (lines, rows)
    left, right = np.full(rows.shape, np.inf, np.float32), np.full(rows.shape, -np.inf, np.float32)
    for edge in range(4):
        x0, y0, x1, y1 = (values[:, None] for values in (x[:, edge], y[:, edge], x[:, edge - 1], y[:, edge - 1]))
        slope = ((x1 - x0) / np.where(y1 == y0, 1, y1 - y0)).astype(np.float32)
        crossed = (rows >= np.minimum(y0, y1)) & (rows <= np.maximum(y0, y1))
        for ends in ((rows - y0).astype(np.float32) * slope + x0.astype(np.float32), np.where(y1 == y0, x1, np.nan).astype(np.float32)):
            left = np.fmin(left, np.where(crossed, ends, np.nan))
            right = np.fmax(right, np.where(crossed, ends, np.nan))
    inside = rows <= bottom[:, None]
    first = _half_up(np.where(inside, left, 0)).astype(int)
    final = _half_down(np.where(inside, right, -1)).astype(int)
    columns = first[..., None] + np.arange((final - first).max() + 1)
    place, row, column = np.nonzero(columns <= final[..., None])
    return place, rows[place, row], columns[place, row, column]


def _geometry(lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
    """(start, end - start), int (lines, 2) each as (column, row)."""
    start = np.array([line.start for line in lines])
    return start, np.array([line.end for line in lines]) - start


def _rectangles(lines: Sequence[Line]) -> np.ndarray:
    """Corners (lines, 4, 2) in whole pixels: the line widened by (width - 1) / 2 to both sides, the odd half pixel to one of them."""
    start, delta = _geometry(lines)
    half = (np.array([line.width for line in lines]) - 1) / 2
    length = np.array([math.hypot(*one) for one in delta.tolist()])
    less, more = _half_down(half) / length, _half_up(half) / length
    dx, dy = delta.T
    here = np.stack([-_half_down(less * dy), _half_up(more * dx)], axis=1)
    there = np.stack([_half_down(more * dy), -_half_up(less * dx)], axis=1)
    end = start + delta
    return np.stack([start + here, end + here, end + there, start + there], axis=1).astype(int)


def _half_up(values: np.ndarray) -> np.ndarray:
    """Rounded, halves away from zero."""
    return np.sign(values) * np.floor(np.abs(values) + 0.5)


def _half_down(values: np.ndarray) -> np.ndarray:
    """Rounded, halves towards zero."""
    return np.sign(values) * np.ceil(np.abs(values) - 0.5)


def gaussian_blur(picture: np.ndarray, sigma: float) -> np.ndarray:
    """Blur of standard deviation `sigma` in pixels, uint8 (H, W) or (H, W, C): three box blurs each way, borders repeated.

    The boxes have a fractional radius, so that their variances add up to sigma^2 (Gwosdek et al., Theoretical Foundations of
    Gaussian Convolution by Extended Box Filtering, 2011, Eqs. 7, 11 and 14).
    """
    radius = _box_radius(sigma)
    for axis in (1, 0):
        for _ in range(_PASSES):
            picture = _box_blur(picture, radius, axis)
    return picture


def _box_radius(sigma: float) -> np.float32:
    variance = np.float32(np.float32(sigma) ** 2 / _PASSES)
    whole = np.floor((np.float32(math.sqrt(12.0 * variance + 1.0)) - np.float32(1)) / 2)
    rest = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) * (whole + 1)))
    return np.float32(whole + rest)


def _box_blur(picture: np.ndarray, radius: np.float32, axis: int) -> np.ndarray:
    """Mean over 2 radius + 1 pixels along an axis; the outermost two count by the radius's fraction."""
    whole = int(radius)
    weight = int(np.float32(_ONE) / (radius * 2 + 1))
    edge_weight = (_ONE - (2 * whole + 1) * weight) // 2
    reach = whole + 1
    padding = [(0, 0)] * picture.ndim
    padding[axis] = (reach, reach)
    padded = np.moveaxis(np.pad(picture, padding, mode="edge").astype(np.uint32), axis, 0)
    size = picture.shape[axis]
    shifted = [padded[offset : offset + size] for offset in range(2 * reach + 1)]
    total = np.uint32(weight) * sum(shifted[2:-1], shifted[1]) + np.uint32(edge_weight) * (shifted[0] + shifted[-1])
    return np.moveaxis((total + np.uint32(_ONE // 2) >> np.uint32(24)).astype(np.uint8), 0, axis)


def halved(picture: np.ndarray) -> np.ndarray:
    """Half the height and width, uint8 (H, W[, C]): means of two pixels across, then of two down, rounded each time."""
    wide = picture.astype(np.uint16)
    across = wide[:, ::2] + wide[:, 1::2] + 1 >> 1
    return (across[::2] + across[1::2] + 1 >> 1).astype(np.uint8)


def enlarged(values: np.ndarray, side: int) -> np.ndarray:
    """Square values interpolated with Keys's cubic kernel (a = -1/2) to float32 (side, side); `values` is smaller than that."""
    taps, weights = _cubic_taps(len(values), side)
    for _ in range(2):  # columns first; every pass transposes
        terms = values.astype(np.float64).T[taps] * weights[..., None]  # (side, taps, rows)
        values = np.add.reduce(terms, axis=1).astype(np.float32)
    return values


def _cubic_taps(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `side` places the values that it is made from, and their weights, (side, 5) each."""
    centre = (np.arange(side) + 0.5) * (size / side)
    first = np.maximum((centre - 1.5).astype(int), 0)
    end = np.minimum((centre + 2.5).astype(int), size)
    taps = first[:, None] + np.arange(5)
    distance = np.abs(taps - centre[:, None] + 0.5)
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
    kernel = np.where(distance < 1, near, np.where(distance < 2, far, 0.0)) * (taps < end[:, None])
    return np.minimum(taps, size - 1), kernel / kernel.sum(axis=1, keepdims=True)


def magnified(picture: np.ndarray, factor: float) -> np.ndarray:
    """`factor` times the height and width, (H, W, C); every pixel is the nearest one of the original."""
    rows, columns = (_nearest(size, round(size * factor)) for size in picture.shape[:2])
    return picture[rows][:, columns]


def _nearest(size: int, places: int) -> np.ndarray:
    return ((np.arange(places) + 0.5) * (size / places)).astype(int)


def png(picture: np.ndarray) -> bytes:
    """A PNG file with a colour picture, uint8 (H, W, 3)."""
    height, width, _ = picture.shape
    lines = np.insert(picture.reshape(height, -1), 0, 0, axis=1)  # every line begins with its filter, and 0 is none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(*part) for part in parts)


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
