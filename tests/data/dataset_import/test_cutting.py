"""Squares are cut out of large pictures pixel by pixel, around what is marked and within the border; damage is told in a line."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.downloaded_folders import picture
from medflare.core.errors import DataError
from medflare.data.dataset_import.cutting import Window, check_picture, window_around, write_windows

SIZE = (40, 30)


@pytest.mark.parametrize(
    ("box", "corner"),
    [
        ((10, 10, 20, 20), (11, 11)),  # middle (15, 15), 4 pixels before it and 4 from it on
        ((10, 10, 21, 21), (11, 11)),  # a middle between pixels
        ((0, 0, 2, 2), (0, 0)),
        ((38, 28, 40, 30), (32, 22)),
        ((-3, 10, 1, 20), (0, 11)),  # its middle is outside, a part of it is not
        ((39, 29, 49, 39), (32, 22)),
    ],
)
def test_squares_lie_around_their_boxes_and_within_the_picture(box: tuple[float, ...], corner: tuple[int, int]) -> None:
    window = window_around(box, Path("a.tiff"), SIZE, 8)
    assert (window.left, window.top) == corner
    assert 0 <= window.left <= SIZE[0] - 8 and 0 <= window.top <= SIZE[1] - 8


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ((10, 10, 20), r"the box \[10, 10, 20\] is no \[x1, y1, x2, y2\] with x1 < x2 and y1 < y2"),
        ((10, 10, 5, 20), r"is no \[x1, y1, x2, y2\]"),  # as it would be with a width in the third place
        ((10, float("nan"), 20, 20), r"is no \[x1"),
        ((10, 10, float("inf"), 20), r"is no \[x1"),
        ((40, 10, 50, 20), r"lies outside of a.tiff, which is 40 x 30"),
        ((10, -9, 20, 0), r"lies outside of a.tiff"),
    ],
)
def test_boxes_that_are_none_are_refused(box: tuple[float, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        window_around(box, Path("a.tiff"), SIZE, 8)


def test_a_square_as_large_as_the_picture_is_the_most() -> None:
    assert window_around((0, 0, 9, 9), Path("a.tiff"), (16, 16), 16) == Window(Path("a.tiff"), (16, 16), 0, 0, 16)
    with pytest.raises(DataError, match=r"a.tiff is 16 x 15, a patch has 16 x 16"):
        window_around((0, 0, 9, 9), Path("a.tiff"), (16, 15), 16)


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_deflate", "png"])
def test_squares_hold_the_pixels_of_the_picture(compression: str, tmp_path: Path) -> None:
    source = picture(tmp_path / "a.png", side=40, channels=3)
    pixels = np.asarray(Image.open(source))
    if compression != "png":
        source = tmp_path / "a.tiff"
        Image.fromarray(pixels).convert("RGBA").save(source, compression=compression)
    check_picture(source, (40, 40))
    write_windows({tmp_path / f"out/{left}.png": Window(source, (40, 40), left, 3, 8) for left in (0, 32)})
    for left in (0, 32):
        assert (np.asarray(Image.open(tmp_path / f"out/{left}.png")) == pixels[3:11, left : left + 8]).all()


def test_pictures_that_cannot_be_cut_are_named(tmp_path: Path) -> None:
    source = tmp_path / "a.tiff"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)).save(source, compression="tiff_lzw")
    with pytest.raises(DataError, match="40 x 41"):
        check_picture(source, (40, 41))
    with pytest.raises(DataError, match=r"grey\.png"):
        check_picture(picture(tmp_path / "grey.png"), (16, 16))
    with pytest.raises(DataError, match=r"none\.tiff"):
        check_picture(tmp_path / "none.tiff", (1, 1))
    whole = source.read_bytes()
    source.write_bytes(whole[:100] + b"\xff" * 900 + whole[1000:])
    with pytest.raises(DataError, match=r"a\.tiff"):
        write_windows({tmp_path / "out.png": Window(source, (40, 40), 0, 0, 8)})
    assert not (tmp_path / "out.png").exists()
    source.write_bytes(whole[:-100])  # the list of its parts stands at the end
    with pytest.raises(DataError, match=r"a\.tiff"):
        check_picture(source, (40, 40))
    Image.new("RGB", (40, 40)).save(source, compression="raw")  # here it stands at the beginning
    source.write_bytes(source.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"a\.tiff"):
        check_picture(source, (40, 40))
