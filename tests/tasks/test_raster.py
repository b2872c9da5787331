"""What NumPy draws is what Pillow draws, to the last bit: the embedded images were made with Pillow and must not change."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from medflare.core.rng import numpy_generator
from medflare.tasks.raster import Line, draw_lines, enlarged, gaussian_blur, halved, magnified, png


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_lines_in_every_direction(width: int) -> None:
    for columns in range(-9, 10):
        lines = [Line((15, 15), (15 + columns, 15 + rows), width, 200) for rows in range(-9, 10)]
        for line in lines:
            assert (draw_lines([line], 32) == _pillows_lines([line], 32)).all(), line


def test_lines_overlap_and_leave_the_picture() -> None:
    rng = numpy_generator(0, "lines")
    ends = rng.integers(-8, 72, (400, 2)).tolist()
    lines = [
        Line((column, row), (column + int(right), row + int(down)), int(width), int(value))
        for (column, row), (right, down), width, value in zip(
            ends, rng.integers(-12, 13, (400, 2)), rng.integers(1, 4, 400), rng.integers(1, 256, 400), strict=True
        )
    ]
    assert (draw_lines(lines, 64) == _pillows_lines(lines, 64)).all()
    assert not draw_lines([], 8).any()


@pytest.mark.parametrize("shape", [(40, 31), (31, 40, 3)])
@pytest.mark.parametrize("sigma", [0.2, 0.4, 1.0, 1.7, 2.6])
def test_gaussian_blur(shape: tuple[int, ...], sigma: float) -> None:
    picture = numpy_generator(0, "blur").integers(0, 256, shape, dtype=np.uint8)
    expected = np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(sigma)))
    assert (gaussian_blur(picture, sigma) == expected).all()


def test_half_the_size() -> None:
    picture = numpy_generator(0, "half").integers(0, 256, (20, 36, 3), dtype=np.uint8)
    assert (halved(picture) == np.asarray(Image.fromarray(picture).resize((18, 10), Image.Resampling.BOX))).all()


@pytest.mark.parametrize("cells", [5, 9, 28])
def test_cubic_interpolation(cells: int) -> None:
    values = numpy_generator(0, "cells").normal(0, 1, (cells, cells)).astype(np.float32)
    expected = np.asarray(Image.fromarray(values).resize((128, 128), Image.Resampling.BICUBIC))
    assert np.abs(enlarged(values, 128) - expected).max() <= 1e-6  # equal, where the compiler of Pillow fuses no operations


@pytest.mark.parametrize("factor", [1.0, 1.4, 6.0, 96 / 40])
def test_png_holds_the_magnified_picture(factor: float) -> None:
    picture = numpy_generator(0, "png").integers(0, 256, (20, 40, 3), dtype=np.uint8)
    size = round(40 * factor), round(20 * factor)
    found = np.asarray(Image.open(BytesIO(png(magnified(picture, factor)))))
    assert (found == np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.NEAREST))).all()


def _pillows_lines(lines: list[Line], side: int) -> np.ndarray:
    canvas = Image.new("L", (side, side), 0)
    pen = ImageDraw.Draw(canvas)
    for line in lines:
        pen.line([*line.start, *line.end], fill=line.value, width=line.width)
    return np.asarray(canvas)
