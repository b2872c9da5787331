"""Images that are too large are refused by their header, before anything is unpacked."""

import gzip
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from medflare.core.errors import DataError
from medflare.data.files.bounds import ImageBounds, refuse_large
from medflare.data.files.readers import read_image, read_mask
from medflare.data.files.volumes import read_volume
from volumes import dicom_series

SMALL = ImageBounds(pixels=100, voxels=100)


def test_a_picture(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((10, 10), np.uint8)).save(tmp_path / "fits.png")
    refuse_large([tmp_path / "fits.png", None], SMALL)
    Image.fromarray(np.zeros((11, 10), np.uint8)).save(tmp_path / "large.png")
    with pytest.raises(DataError, match=r"large.png: 11 x 10 pixels, 4.1e-07 GiB once unpacked; this site takes 100 pixels"):
        refuse_large([tmp_path / "fits.png", tmp_path / "large.png"], SMALL)
    refuse_large([tmp_path / "large.png"], ImageBounds())


@pytest.mark.parametrize(("side", "words"), [(13_000, "13000 x 13000 pixels, 0.63 GiB"), (20_000, "store the picture smaller")])
def test_a_picture_that_is_small_on_disk_alone(tmp_path: Path, side: int, words: str) -> None:
    """The header of a large picture, without its pixels: nothing beyond the header is looked at."""
    header = side.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    with (tmp_path / "bomb.png").open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        PngImagePlugin.putchunk(file, b"IHDR", header)
        PngImagePlugin.putchunk(file, b"IDAT", b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match=words):
            refuse_large([tmp_path / "bomb.png"], ImageBounds())


def test_a_volume_that_is_small_on_disk_alone(tmp_path: Path) -> None:
    """Eight gigabytes by the header; the file ends behind it."""
    header = nibabel.Nifti1Header()
    header.set_data_shape((2000, 1000, 1000))
    header["magic"], header["vox_offset"] = b"n+1", 352
    (tmp_path / "bomb.nii.gz").write_bytes(gzip.compress(header.binaryblock + bytes(4)))
    with pytest.raises(DataError, match=r"2000 x 1000 x 1000 voxels, 7.45 GiB once unpacked; .*bounds.voxels"):
        refuse_large([tmp_path / "bomb.nii.gz"], ImageBounds())


def test_channels_of_a_volume_count(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.zeros((5, 5, 2, 3), np.uint8), np.eye(4)), tmp_path / "four.nii")
    with pytest.raises(DataError, match="5 x 5 x 2 x 3 voxels"):
        refuse_large([tmp_path / "four.nii"], SMALL)


def test_a_dicom_series_and_one_of_its_files(tmp_path: Path) -> None:
    series = dicom_series(tmp_path / "series")  # four slices of 6 x 5
    refuse_large([series / "0.dcm"], SMALL)
    refuse_large([series], ImageBounds(pixels=1, voxels=120))
    with pytest.raises(DataError, match="series: 4 x 6 x 5 voxels"):
        refuse_large([series], SMALL)
    with pytest.raises(DataError, match=r"0.dcm: 6 x 5 pixels"):
        refuse_large([series / "0.dcm"], ImageBounds(pixels=29))


def test_what_only_the_reader_understands_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_text("no image")
    refuse_large([tmp_path / "a.xyz"], SMALL)
    with pytest.raises(DataError, match=r"nowhere.png: file not found"):
        refuse_large([tmp_path / "nowhere.png"], SMALL)
    (tmp_path / "broken.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"broken.png: cannot be read as an image"):
        refuse_large([tmp_path / "broken.png"], SMALL)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".png", ".nii.gz", ".dcm", ""])
@pytest.mark.parametrize("make", [_fifo, _link_to_a_device, _link_to_a_fifo, _socket])
def test_what_is_no_regular_file_is_never_opened(make: Callable[[Path], None], suffix: str, tmp_path: Path) -> None:
    """A pipe that nobody writes to would be read for ever."""
    make(tmp_path / f"odd{suffix}")
    for read in (lambda path: refuse_large([path], ImageBounds()), lambda path: read_image(path, 3), read_mask, read_volume):
        with pytest.raises(DataError, match=rf"odd{suffix}: is neither a regular file nor a folder"):
            read(tmp_path / f"odd{suffix}")
