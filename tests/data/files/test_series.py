"""Slices that make no volume together are refused, and slices are stacked as they lie, whatever their numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from monai.data.image_reader import PydicomReader

from medflare.core.errors import DataError
from medflare.data.files.bounds import ImageBounds, refuse_large
from medflare.data.files.readers import read_image
from medflare.data.files.volumes import read_volume, series_grid
from volumes import beside_a_series, dicom_series


def change(file: Path, **tags: Any) -> None:
    dataset = pydicom.dcmread(file)
    for tag, value in tags.items():
        setattr(dataset, tag, value)
    dataset.save_as(file)


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ({"PatientID": "q"}, "slices of 2 patients lie in one folder"),
        ({"SeriesInstanceUID": "1.2.9"}, "slices of 2 series lie in one folder; give every series a folder of its own"),
        ({"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]}, "the slices have different orientations"),
        ({"PixelSpacing": [5, 5]}, "the slices have different pixel spacings"),
        ({"Rows": 3, "Columns": 10}, "the slices have different numbers of rows"),
    ],
)
def test_slices_that_do_not_belong_together(tmp_path: Path, tags: dict[str, Any], words: str) -> None:
    folder = dicom_series(tmp_path / "ct")
    change(folder / "2.dcm", **tags)
    with pytest.raises(DataError, match=f"ct: {words}"):
        read_volume(folder)
    with pytest.raises(DataError, match=f"ct: {words}"):
        read_image(folder, 1)


def test_a_slice_that_cannot_be_read_is_missed(tmp_path: Path) -> None:
    """Cut into slices as well as whole; what is no DICOM file may lie beside them."""
    folder = dicom_series(tmp_path / "ct")
    (folder / "readme.txt").write_text("hello")
    assert read_image(folder, 1).shape == (1, 6, 5, 4)
    (folder / "2.dcm").write_bytes(b"broken")
    for read in (read_volume, lambda path: read_image(path, 1)):
        with pytest.raises(DataError, match=r"ct: 1 of 4 files make no slice of the series; repair them"):
            read(folder)


def test_what_archives_lay_beside_a_series_is_no_slice(tmp_path: Path) -> None:
    """A slice without its pixels still is one, lest the volume pass for whole."""
    series, folder = (dicom_series(tmp_path / name) for name in ("alone", "ct"))
    beside_a_series(folder)
    for read in (lambda path: read_volume(path)[0], lambda path: read_image(path, 1)):
        assert np.array_equal(read(folder), read(series))
    assert series_grid(folder).shape == series_grid(series).shape == (5, 6, 4)
    refuse_large([folder], ImageBounds(voxels=5 * 6 * 4))
    lost = pydicom.dcmread(folder / "2.dcm")
    del lost.PixelData
    lost.save_as(folder / "2.dcm")
    with pytest.raises(DataError, match=r"ct: cannot be read as an image"):
        read_image(folder, 1)
    for file in folder.glob("[0-9].dcm"):
        file.unlink()
    with pytest.raises(DataError, match=r"ct: a folder without DICOM images"):
        read_image(folder, 1)


def test_a_slice_beside_the_others(tmp_path: Path) -> None:
    folder = dicom_series(tmp_path / "ct")
    change(folder / "2.dcm", ImagePositionPatient=[60, 20, 34])
    with pytest.raises(DataError, match=r"ct: a slice lies 50 mm beside the line through the others"):
        read_volume(folder)


def test_a_tilted_gantry_is_a_volume(tmp_path: Path) -> None:
    folder = dicom_series(tmp_path / "ct")
    for number in range(4):
        change(folder / f"{number}.dcm", ImagePositionPatient=[10, 20 + 0.5 * number, 30 + 2 * number])
    assert read_volume(folder)[0].shape == (1, 5, 6, 4)


@pytest.mark.parametrize("numbers", [(1, 3, 2, 4), (1, 1, 1, 1), (4, 3, 2, 1)])
def test_slices_are_stacked_as_they_lie(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """Whatever they are numbered: MONAI goes by numbers, and would exchange the second and the third."""
    folder = dicom_series(tmp_path / "ct")
    for place, number in enumerate(numbers):
        change(folder / f"{place}.dcm", InstanceNumber=number)
    array, grid = read_volume(folder)
    heights = [(grid.affine @ [0, 0, k, 1])[2] for k in range(4)]
    np.testing.assert_allclose(array[0, 0, 0], [100 * (height - 30) / 2 for height in heights], atol=1e-3)


def _strip(folder: Path, *tags: str, of: tuple[int, ...] = (0, 1, 2, 3)) -> Path:
    for number in of:
        dataset = pydicom.dcmread(folder / f"{number}.dcm")
        for tag in tags:
            del dataset[tag]
        dataset.save_as(folder / f"{number}.dcm")
    return folder


def test_slices_of_which_nothing_says_how_they_follow_each_other(tmp_path: Path) -> None:
    """MONAI leaves out what has no number, and takes equal numbers in the order of the file system."""
    lost = _strip(_strip(dicom_series(tmp_path / "lost"), "ImagePositionPatient"), "InstanceNumber", of=(2,))
    same = _strip(dicom_series(tmp_path / "same"), "ImagePositionPatient")
    for number in range(4):
        change(same / f"{number}.dcm", InstanceNumber=1)
    some = _strip(dicom_series(tmp_path / "some"), "InstanceNumber")
    _strip(some, "ImagePositionPatient", of=(1,))
    for folder in (lost, same, some):
        for read in (read_volume, lambda path: read_image(path, 1), series_grid):
            with pytest.raises(DataError, match=rf"{folder.name}: neither places .* nor numbers .* say how its slices follow each other"):
                read(folder)


def test_numbers_are_enough_where_no_place_is_known(tmp_path: Path) -> None:
    folder = _strip(dicom_series(tmp_path / "ct"), "ImagePositionPatient", of=(1, 3))
    array, grid = read_volume(folder)
    assert array[0, 0, 0].tolist() == [0, 100, 200, 300] and not grid.known and not series_grid(folder).known
    np.testing.assert_array_equal(read_image(folder, 1)[0, 0, 0], array[0, 0, 0])


@pytest.mark.parametrize("tags", [{}, {"ImageOrientationPatient": [0.96, 0, 0.28, 0, 1, 0]}, {"PixelSpacing": None}])
def test_headers_tell_where_a_series_lies(tmp_path: Path, tags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The very affine that MONAI gives for the pixels, whichever way the slices are numbered, and no pixel is decoded."""
    folder = dicom_series(tmp_path / "ct")
    for number in range(4):
        change(folder / f"{number}.dcm", InstanceNumber=4 - number, **{tag: value for tag, value in tags.items() if value})
    _strip(folder, *(tag for tag, value in tags.items() if not value))
    reader = PydicomReader()
    array, meta = reader.get_data(reader.read(folder))
    stored, grid = read_volume(folder)
    np.testing.assert_array_equal(stored[0], array)
    monkeypatch.setattr(pydicom.Dataset, "pixel_array", property(lambda dataset: pytest.fail("decoded")))
    found = series_grid(folder)
    assert found.known and found.shape == grid.shape == array.shape
    for affine in (found.affine, grid.affine):
        np.testing.assert_array_equal(affine, meta["affine"])
