"""Large pictures cut into small ones: a square around what somebody marked becomes an image of its own."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from medflare.core.errors import DataError
from medflare.core.store import write_atomically
from medflare.data.reading import explained

if TYPE_CHECKING:
    from PIL.Image import Image

_COLOURS: Final = ("RGB", "RGBA")
_PARTS: Final = ((273, 279), (324, 325))  # TIFF's tags: where its strips and where its tiles begin, and how many bytes each has


@dataclass(frozen=True)
class Window:
    """A square of a picture.

    Attributes:
        source: file of the picture.
        size: width and height that the picture must have, pixels.
        left, top: the square's first column and row, from 0.
        side: pixels.
    """

    source: Path
    size: tuple[int, int]
    left: int
    top: int
    side: int


def window_around(box: Sequence[float], source: Path, size: tuple[int, int], side: int) -> Window:
    """The square whose middle is that of a box; at the picture's border it is shifted inwards.

    Args:
        box: [x1, y1, x2, y2], two opposite corners in pixels; it may reach over the border.
        source: file of the picture.
        size: the picture's width and height in pixels.
        side: of the square, pixels.

    Raises:
        DataError: no such box, one that lies outside, or a picture that is smaller than the square; without the name of what is boxed.

    Examples:
        >>> square = window_around([40, 60, 50, 70], Path("a.tiff"), (100, 80), 16)
        >>> square.left, square.top
        (37, 57)
        >>> square = window_around([-9, 75, 11, 95], Path("a.tiff"), (100, 80), 16)
        >>> square.left, square.top
        (0, 64)
    """
    width, height = size
    if len(box) != 4 or not all(map(math.isfinite, box)) or not (box[0] < box[2] and box[1] < box[3]):
        raise DataError(f"the box {list(box)} is no [x1, y1, x2, y2] with x1 < x2 and y1 < y2")
    if not (box[0] < width and box[2] > 0 and box[1] < height and box[3] > 0):
        raise DataError(f"the box {list(box)} lies outside of {source.name}, which is {width} x {height}")
    if min(size) < side:
        raise DataError(f"{source.name} is {width} x {height}, a patch has {side} x {side}")
    middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    left, top = (min(max(math.floor(at - side / 2), 0), most - side) for at, most in zip(middle, size, strict=True))
    return Window(source, size, left, top, side)


def check_picture(source: Path, size: tuple[int, int]) -> None:
    """Nothing, where a picture can be cut as far as its header says.

    Args:
        source: its file.
        size: width and height that it must have, pixels.

    Raises:
        DataError: it cannot be opened, has another size or no colours, or is a TIFF file that ends too early.
    """
    with _opened(source) as picture:
        if picture.size != size:
            raise DataError(f"{source}: {' x '.join(map(str, picture.size))}, its annotations say {' x '.join(map(str, size))}")
        if picture.mode not in _COLOURS:
            raise DataError(f"{source}: no colour image ({picture.mode})")
        tags = getattr(picture, "tag_v2", {})
        ends = [
            start + length for starts, lengths in _PARTS for start, length in zip(tags.get(starts, ()), tags.get(lengths, ()), strict=False)
        ]
        if max(ends, default=0) > (held := source.stat().st_size):
            raise DataError(f"{source}: ends after {held} of {max(ends)} bytes")


def write_windows(windows: Mapping[Path, Window]) -> None:
    """Squares as PNG files, with the picture's own pixels.

    Every picture is decoded once, whole, since Pillow cannot decode a part of one; one picture at a time is in memory.

    Args:
        windows: file to write -> what it shows.

    Raises:
        DataError: a picture is damaged.
    """
    of: dict[Path, dict[Path, Window]] = {}
    for file, window in windows.items():
        of.setdefault(window.source, {})[file] = window
    for source, cut in of.items():
        with _opened(source) as picture:
            squares = {file: picture.crop((at.left, at.top, at.left + at.side, at.top + at.side)) for file, at in cut.items()}
        for file, square in squares.items():
            content = BytesIO()
            square.convert("RGB").save(content, format="PNG")
            write_atomically(file, content.getvalue())


@contextmanager
def _opened(source: Path) -> Iterator["Image"]:
    from PIL import Image

    with explained(source), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is large is expected, up to Pillow's limit; and of damage the error tells
        with Image.open(source) as picture:
            yield picture
