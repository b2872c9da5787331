"""Pictures whose numbers Pillow's modes do not tell.

Every value is as it was written, or the file is refused.
"""

import struct
import zlib
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from helpers.small_tasks import small_task
from medflare.core.errors import DataError
from medflare.data.reading import read_mask, read_stored

RANDOM = np.random.default_rng(0)
SIDES = (6, 9)  # rows, columns
DRAWN = np.zeros(SIDES, np.uint8)  # of a structure
DRAWN[2:4, 3:7] = 255
Order: TypeAlias = Literal["<", ">"]
CODES = {"u": 1, "i": 2, "f": 3}  # of SampleFormat (TIFF 6.0)


def tiff(
    path: Path,
    pixels: np.ndarray,
    white: int,
    *,
    order: Order = "<",
    packed: bool = False,
    extra: int | None = None,
) -> Path:
    """A TIFF of pixels (rows, columns[, channels]), by the specification and without a library.

    Args:
        white: PhotometricInterpretation; 0: the lowest number is white, 1: black, 2: colours.
        packed: whether it is compressed (Deflate).
        extra: what a channel beside the colours means; 0: nothing, 2: alpha.
    """
    content = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    content = zlib.compress(content) if packed else content
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    bits = struct.pack(f"{order}{channels}H", *[8 * pixels.itemsize] * channels)
    tags = {256: pixels.shape[1], 257: pixels.shape[0], 258: 8 * pixels.itemsize}
    tags |= {259: 8 if packed else 1, 262: white}
    tags |= {273: 8 + len(bits), 277: channels, 278: pixels.shape[0], 279: len(content)}
    tags |= {} if extra is None else {338: extra}
    tags |= {339: CODES[pixels.dtype.kind]} if channels == 1 else {}
    entries = b""
    for tag, value in tags.items():
        if tag == 258 and channels > 1:
            entries += struct.pack(f"{order}HHII", tag, 3, channels, 8)  # after the header
        else:
            entries += struct.pack(f"{order}HHII", tag, 4, 1, value)
    header = b"II" if order == "<" else b"MM"
    header += struct.pack(f"{order}HI", 42, 8 + len(bits) + len(content))
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    path.write_bytes(header + bits + content + directory)
    return path


def png(path: Path, pixels: np.ndarray, kind: int) -> Path:
    """A PNG of 16 bits; kind 2: colours, 4: grey and alpha, 6: colours and alpha."""
    rows = [b"\0" + row.astype(">u2").tobytes() for row in pixels]
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, kind, 0, 0, 0)
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        PngImagePlugin.putchunk(file, b"IHDR", header)
        PngImagePlugin.putchunk(file, b"IDAT", zlib.compress(b"".join(rows)))
        PngImagePlugin.putchunk(file, b"IEND", b"")
    return path


def numbers(kind: str, *shape: int) -> np.ndarray:
    """Over the whole range of a type."""
    dtype = np.dtype(kind)
    if dtype.kind == "f":
        return RANDOM.normal(0, 100, shape).astype(dtype)
    limits = np.iinfo(dtype)
    return RANDOM.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def stored(path: Path) -> np.ndarray:
    """(rows, columns)."""
    return read_stored(path).array[0].T


def refused(path: Path, word: str, mask: bool = False) -> None:
    with pytest.raises(DataError, match=rf"{path.name}: .*{word}") as error:
        read_stored(path, mask=mask)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8"])
def test_tiff_numbers_are_right_or_refused(
    kind: str, order: Order, packed: bool, tmp_path: Path
) -> None:
    pixels = numbers(kind, *SIDES)
    file = tiff(tmp_path / "a.tif", pixels, white=1, order=order, packed=packed)
    if order == ">" and packed and kind in ("i2", "i4", "f4"):
        refused(file, "big-endian")
    elif kind in ("f2", "f8") or (order == ">" and kind == "u4"):
        refused(file, "a kind of TIFF")
    else:
        np.testing.assert_array_equal(stored(file), pixels)


@pytest.mark.parametrize("kind", ["u1", "u2", "i2", "f4"])
def test_a_tiff_whose_lowest_number_is_white(kind: str, tmp_path: Path) -> None:
    pixels = numbers(kind, *SIDES)
    file = tiff(tmp_path / "a.tif", pixels, white=0)
    if kind in ("u1", "u2"):
        np.testing.assert_array_equal(stored(file), np.iinfo(kind).max - pixels)
    else:
        refused(file, "white" if kind == "f4" else "")
    refused(file, "white" if kind != "i2" else "", mask=True)


@pytest.mark.parametrize(("kind", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_deep_channels_are_refused(kind: int, channels: int, tmp_path: Path) -> None:
    pixels = numbers("u2", *SIDES, channels) >> 4  # twelve bits, as scanners have them
    refused(png(tmp_path / "deep.png", pixels, kind), "16 bits")
    if channels > 2:
        extra = None if channels == 3 else 2
        refused(tiff(tmp_path / "deep.tif", pixels, white=2, extra=extra), "16 bits")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_several_pictures_in_one_file_are_refused(kind: str, tmp_path: Path) -> None:
    pictures = [Image.fromarray(numbers("u1", *SIDES)) for _ in range(2)]
    pictures[0].save(tmp_path / "a.png", format=kind, save_all=True, append_images=pictures[1:])
    refused(tmp_path / "a.png", "2 pages or frames")


def test_the_first_picture_of_a_camera_is_read(tmp_path: Path) -> None:
    """MPO: a JPEG with a preview, or with the picture for the other eye."""
    picture = Image.fromarray(numbers("u1", *SIDES))
    preview = Image.fromarray(numbers("u1", 4, 5))
    picture.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[preview])
    with Image.open(tmp_path / "a.jpg") as first:
        expected = np.asarray(first.convert("L")).T
    assert (read_stored(tmp_path / "a.jpg").array[0] == expected).all()


def test_pictures_of_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"/* XPM */")
    refused(tmp_path / "a.png", "none of PNG")


def test_portable_pixmaps(tmp_path: Path) -> None:
    """Pillow would read 8 of 16 bits of colours, and scale numbers whose white is another one."""
    grey = numbers("u2", *SIDES)
    (tmp_path / "a.pgm").write_bytes(b"P5 # white\n9 6\n65535\n" + grey.astype(">u2").tobytes())
    assert (read_stored(tmp_path / "a.pgm").array[0] == grey.T).all()
    colours = numbers("u1", *SIDES, 3)
    (tmp_path / "a.ppm").write_bytes(b"P6 9 6 255\n" + colours.tobytes())
    assert (read_stored(tmp_path / "a.ppm").array == colours.transpose(2, 1, 0)).all()
    pixels = numbers("u2", *SIDES, 3).astype(">u2")
    (tmp_path / "b.ppm").write_bytes(b"P6 9 6 65535\n" + pixels.tobytes())
    refused(tmp_path / "b.ppm", "with 16 bits")
    (tmp_path / "c.pgm").write_bytes(b"P5 9 6 3\n" + bytes([1, 2, 3] * 18))
    refused(tmp_path / "c.pgm", "neither 255 nor 65535", mask=True)
    (tmp_path / "d.ppm").write_bytes(b"P4 8 2\n\xf0\x0f")
    refused(tmp_path / "d.ppm", "neither 255 nor 65535")


@pytest.mark.parametrize("colour", [0, 255, 7])
@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_a_mask_drawn_in_alpha_is_refused(mode: str, colour: int, tmp_path: Path) -> None:
    colours = [np.full_like(DRAWN, colour)] * (len(mode) - 1)
    for alpha in (DRAWN, np.maximum(DRAWN, 100)):
        Image.fromarray(np.dstack([*colours, alpha])).save(tmp_path / "a.png")
        refused(tmp_path / "a.png", "transparency", mask=True)
    read_stored(tmp_path / "a.png")  # of an image, transparency is not shown


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_colours_below_transparency_are_refused(mode: str, tmp_path: Path) -> None:
    """Of an image; where it is transparent, it may have one colour."""
    grey = numbers("u1", *SIDES) | 1
    for colours in (np.where(DRAWN, grey, 7), grey):
        picture = Image.fromarray(np.dstack([*[colours] * 3, DRAWN])).convert(mode)
        picture.save(tmp_path / "a.png")
        if colours is grey:
            refused(tmp_path / "a.png", "transparency hides colours")
        else:
            read_stored(tmp_path / "a.png")


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_colours_below_the_transparency_of_a_palette(tmp_path: Path) -> None:
    picture = Image.fromarray(DRAWN // 255 + np.arange(9, dtype=np.uint8) % 2 * 2)
    picture.putpalette([0, 0, 0, 50, 60, 70, 80, 90, 90, 200, 0, 0])
    picture.save(tmp_path / "a.png", transparency=bytes([255, 0, 255, 255]))
    assert read_stored(tmp_path / "a.png").array.shape == (3, 9, 6)
    picture.save(tmp_path / "a.png", transparency=bytes([0, 255, 0, 255]))
    refused(tmp_path / "a.png", "transparency hides colours")
    read_stored(tmp_path / "a.png", mask=True)


def test_a_mask_whose_alpha_says_nothing_else_than_its_colours(tmp_path: Path) -> None:
    for alpha in (DRAWN, np.full_like(DRAWN, 255), np.zeros_like(DRAWN)):
        Image.fromarray(np.dstack([DRAWN] * 3 + [alpha])).save(tmp_path / "a.png")
        mask, _ = read_mask(tmp_path / "a.png", tmp_path / "a.png", None, small_task())
        np.testing.assert_array_equal(mask[0], DRAWN)
    Image.fromarray(np.dstack([DRAWN] * 3 + [255 - DRAWN])).save(tmp_path / "a.png")
    refused(tmp_path / "a.png", "transparency", mask=True)


def test_a_mask_with_a_channel_of_unknown_meaning_is_refused(tmp_path: Path) -> None:
    file = tiff(tmp_path / "a.tif", np.dstack([DRAWN * 0] * 3 + [DRAWN]), white=2, extra=0)
    refused(file, "beside its colours", mask=True)
    assert read_stored(file).array.shape == (3, 9, 6)


@pytest.mark.parametrize("kind", ["u1", "u2"])
@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_a_plain_tiff_is_turned_by_its_orientation(
    orientation: int, kind: str, tmp_path: Path
) -> None:
    """As Pillow turns the same pixels with Exif in a PNG, and as the compressed file is."""
    pixels = numbers(kind, *SIDES)
    exif = Image.Exif()
    exif[274] = orientation
    picture = Image.fromarray(pixels)
    file = tmp_path / "a.png"
    picture.save(file, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(file)))
    assert expected.shape == SIDES[::-1]
    for compression in (None, "tiff_lzw"):
        tags = {274: orientation}
        picture.save(tmp_path / "a.tif", compression=compression, tiffinfo=tags)
        np.testing.assert_array_equal(stored(tmp_path / "a.tif"), expected)
