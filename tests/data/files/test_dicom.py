"""What the pixels of a DICOM file mean, wherever the file says it, and files of one image that are named one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom import Dataset
from pydicom.filewriter import correct_ambiguous_vr

from medflare.core.errors import DataError
from medflare.data.files.readers import read_image, read_mask
from medflare.data.files.volumes import read_channels, read_volume, series_grid
from volumes import dicom_series

PIXELS = np.arange(30, dtype=np.uint16).reshape(6, 5)
TABLE = np.arange(256)[::-1] * 256  # a table of 16 bits that turns numbers around


def _file(path: Path, pixels: np.ndarray = PIXELS, **tags: Any) -> Path:
    """A slice with other pixels, (rows, columns) or (frames, rows, columns), and with further tags."""
    if not path.parent.exists():
        dicom_series(path.parent, slices=1)
    file = pydicom.dcmread(path.parent / "0.dcm")
    file.Rows, file.Columns = pixels.shape[-2:]
    if pixels.ndim > 2:
        file.NumberOfFrames = len(pixels)
    for tag, value in tags.items():
        setattr(file, tag, value)
    file.PixelData = pixels.astype(np.uint16).tobytes()
    correct_ambiguous_vr(file, is_little_endian=True)
    file.save_as(path)
    return path


def _item(**tags: Any) -> Dataset:
    item = Dataset()
    for tag, value in tags.items():
        setattr(item, tag, value)
    return item


@pytest.mark.parametrize(("name", "other"), [("T2 [AX]", "T2 A"), ("q[1]", "q1"), ("a*", "ab"), ("a?", "ab")])
def test_the_name_of_a_folder_is_no_pattern(tmp_path: Path, name: str, other: str) -> None:
    folder, nearby = (dicom_series(tmp_path / one, slices=3) for one in (name, other))
    for file in nearby.iterdir():
        _file(file, PIXELS + 1000)
    for read in (lambda path: read_image(path, 1)[0, 0, 0], lambda path: read_volume(path)[0][0, 0, 0]):
        assert read(folder).tolist() == [0, 100, 200]
    for file in nearby.iterdir():
        file.unlink()
    assert read_image(folder, 1).shape == (1, 6, 5, 3)


def test_a_series_without_the_preamble_of_dicom_files(tmp_path: Path) -> None:
    folder = dicom_series(tmp_path / "ct")
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[132:])
    for read in (read_volume, lambda path: read_image(path, 1)):
        with pytest.raises(DataError, match=r"ct: 4 of 4 files make no slice of the series; repair them, DICOM files have DICM behind"):
            read(folder)
    (folder / "0.dcm").write_bytes((dicom_series(tmp_path / "other") / "0.dcm").read_bytes())
    with pytest.raises(DataError, match=r"ct: 3 of 4 files make no slice"):  # what is left would pass for a picture
        read_image(folder, 1)


def test_files_of_frames_in_one_folder(tmp_path: Path) -> None:
    _file(tmp_path / "cine/0.dcm", np.stack([PIXELS] * 3))
    _file(tmp_path / "cine/1.dcm", np.stack([PIXELS] * 3))
    with pytest.raises(DataError, match=r"cine: 2 files lie in the folder, of several frames each; name the one that is meant"):
        read_image(tmp_path / "cine", 1)


def _transformed(slope: float, intercept: float) -> dict[str, Any]:
    return {"PixelValueTransformationSequence": [_item(RescaleSlope=slope, RescaleIntercept=intercept, RescaleType="HU")]}


def _groups(shared: Dataset, *frames: Dataset) -> dict[str, Any]:
    return {"SharedFunctionalGroupsSequence": [shared], "PerFrameFunctionalGroupsSequence": list(frames)}


def test_slope_and_intercept_of_frames(tmp_path: Path) -> None:
    """Enhanced objects say them of all frames or of each, and nowhere else."""
    frames = np.stack([PIXELS, PIXELS + 100, PIXELS + 200])
    slices = frames.transpose(1, 2, 0).astype(np.float64)
    together = _file(tmp_path / "ct/t.dcm", frames, **_groups(_item(**_transformed(2, -1024)), *[_item()] * 3))
    np.testing.assert_array_equal(read_image(together, 1)[0], slices * 2 - 1024)
    each = _groups(_item(), *(_item(**_transformed(slope, -slope)) for slope in (1, 2, 4)))
    np.testing.assert_array_equal(read_image(_file(tmp_path / "ct/e.dcm", frames, **each), 1)[0], (slices - 1) * [1, 2, 4])
    inverse = _file(tmp_path / "ct/i.dcm", frames, PhotometricInterpretation="MONOCHROME1", BitsStored=12, **each)
    np.testing.assert_array_equal(read_image(inverse, 1)[0], (4095 - slices - 1) * [1, 2, 4])
    single = _file(tmp_path / "ct/s.dcm", PIXELS, **_groups(_item(), _item(**_transformed(2, -1024))))
    np.testing.assert_array_equal(read_image(single, 1)[0], PIXELS * 2.0 - 1024)


def test_slope_and_intercept_of_each_slice(tmp_path: Path) -> None:
    """As PET has them, also where the lowest number is white."""
    series = dicom_series(tmp_path / "pet", slices=2)
    for number, slope in enumerate((1, 3)):
        place = {"InstanceNumber": number + 1, "ImagePositionPatient": [0, 0, number]}
        tags = {"RescaleSlope": slope, "RescaleIntercept": 0, "PhotometricInterpretation": "MONOCHROME1", "BitsStored": 12}
        _file(series / f"{number}.dcm", PIXELS, **place, **tags)
    np.testing.assert_array_equal(read_image(series, 1)[0], (4095.0 - PIXELS)[..., None] * [1, 3])


def test_a_modality_table(tmp_path: Path) -> None:
    table = [_item(LUTDescriptor=[256, 0, 16], ModalityLUTType="US", LUTData=TABLE.astype("<u2").tobytes())]
    file = _file(tmp_path / "ct/t.dcm", ModalityLUTSequence=table)
    np.testing.assert_array_equal(read_image(file, 1)[0], TABLE[PIXELS])
    inverse = _file(tmp_path / "ct/i.dcm", ModalityLUTSequence=table, PhotometricInterpretation="MONOCHROME1", BitsStored=8)
    np.testing.assert_array_equal(read_image(inverse, 1)[0], TABLE[0] + TABLE[255] - TABLE[PIXELS])


def test_the_numbers_of_a_mask_are_those_of_labels_whatever_is_white(tmp_path: Path) -> None:
    """A program that draws on a radiograph may store its mask as the image was: MONOCHROME1."""
    drawn, white = np.array([[0, 1], [1, 0]]), {"PhotometricInterpretation": "MONOCHROME1", "BitsStored": 8}
    file = _file(tmp_path / "ct/m.dcm", drawn, **white)
    np.testing.assert_array_equal(read_mask(file)[0], drawn)
    np.testing.assert_array_equal(read_image(file, 1)[0], 255 - drawn)
    series = dicom_series(tmp_path / "series", slices=2)
    for number in range(2):
        _file(series / f"{number}.dcm", PIXELS, InstanceNumber=number + 1, ImagePositionPatient=[0, 0, number], **white)
    assert np.unique(read_volume(series, colour=False)[0]).tolist() == PIXELS.flatten().tolist()


def _palette(entries: int, bits: int) -> dict[str, Any]:
    """A palette whose entries fall, in red twice as fast as in green, without blue."""
    table = np.linspace(2**bits - 1, 0, entries).astype(f"<u{bits // 8}")
    tables = {"Red": table, "Green": table // 2, "Blue": table * 0}
    descriptors = {f"{colour}PaletteColorLookupTableDescriptor": [entries, 0, bits] for colour in tables}
    data = {f"{colour}PaletteColorLookupTableData": one.tobytes() for colour, one in tables.items()}
    return {"PhotometricInterpretation": "PALETTE COLOR", **descriptors, **data}


@pytest.mark.parametrize("bits", [8, 16])
def test_the_colours_of_a_palette(tmp_path: Path, bits: int) -> None:
    """As ultrasound devices store them: the numbers alone are no grey levels; in a mask they are what counts."""
    red = np.linspace(2**bits - 1, 0, 256).astype(int)[PIXELS]
    colours = np.stack([red, red // 2, red * 0])
    file = _file(tmp_path / "us/p.dcm", **_palette(256, bits))
    np.testing.assert_array_equal(read_image(file, 3), colours)
    np.testing.assert_allclose(read_image(file, 1)[0], np.tensordot([0.299, 0.587, 0.114], colours, axes=1), rtol=1e-5)
    np.testing.assert_array_equal(read_mask(file), PIXELS[None])
    cine = _file(tmp_path / "us/c.dcm", np.stack([PIXELS, PIXELS, PIXELS]), **_palette(256, bits))
    np.testing.assert_array_equal(read_image(cine, 3), np.stack([colours] * 3, axis=-1))


def test_a_series_of_a_palette(tmp_path: Path) -> None:
    series = dicom_series(tmp_path / "map", slices=2)
    for number in range(2):
        _file(series / f"{number}.dcm", PIXELS, InstanceNumber=number + 1, ImagePositionPatient=[0, 0, number], **_palette(256, 8))
    assert read_image(series, 3).shape == (3, 6, 5, 2) and read_mask(series).shape == (1, 6, 5, 2)
    array, grid = read_channels([series], 3)
    np.testing.assert_array_equal(array, read_image(series, 3).swapaxes(1, 2))
    assert grid.shape == series_grid(series).shape == (5, 6, 2)
    with pytest.raises(DataError, match=r"map: the image has 3 channels, the task takes 1"):
        read_channels([series], 1)
    np.testing.assert_array_equal(read_volume(series)[0][0, :, :, 0], PIXELS.T)


def test_a_palette_that_would_be_misread(tmp_path: Path) -> None:
    file = _file(tmp_path / "us/p.dcm", **_palette(1000, 8))
    with pytest.raises(DataError, match=r"p.dcm: cannot be read as an image \(a palette of more than 256 entries of 8 bits\)"):
        read_image(file, 3)
