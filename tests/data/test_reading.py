import gzip
import os
import struct
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from helpers.small_tasks import small_task
from helpers.volume_sites import SHAPE, SPACING, affine, cube_task, dicom_series, write
from medflare.core.errors import DataError
from medflare.data.geometry import Grid, restore_grid, to_task_grid
from medflare.data.local import ImageBounds
from medflare.data.reading import read_image, read_mask, read_stored
from medflare.tasks.config import TaskConfig

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4)  # 3 rows, 4 columns: an exchange of axes shows
COLOUR = np.stack([GREY, GREY + 50, GREY + 100], axis=-1)
VOLUME = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
SMALL = ImageBounds(pixels=100, voxels=100)
WHOLE = cube_task(channels=1, image_mode="patch")


def pictured(path: Path, channels: int = 1, **settings: Any) -> np.ndarray:
    return read_image([path], small_task(channels=channels, **settings)).array


def masked(path: Path, task: TaskConfig | None = None, **options: Any) -> np.ndarray:
    return read_mask(path, path, None, task or small_task(), **options)[0]


def volume(path: Path) -> tuple[np.ndarray, Grid]:
    stored = read_stored(path)
    assert stored.grid is not None
    return stored.array, stored.grid


@pytest.mark.parametrize("ending", [".png", ".bmp", ".tif", ".TIFF"])
def test_grey_is_repeated_and_colour_becomes_luminance(tmp_path: Path, ending: str) -> None:
    Image.fromarray(GREY).save(tmp_path / f"g{ending}")
    Image.fromarray(COLOUR).save(tmp_path / f"c{ending}")
    np.testing.assert_array_equal(pictured(tmp_path / f"g{ending}"), GREY[None])
    np.testing.assert_array_equal(pictured(tmp_path / f"g{ending}", 3), np.stack([GREY] * 3))
    np.testing.assert_array_equal(pictured(tmp_path / f"c{ending}", 3), COLOUR.transpose(2, 0, 1))
    np.testing.assert_allclose(
        pictured(tmp_path / f"c{ending}")[0], COLOUR @ [0.299, 0.587, 0.114], rtol=1e-5
    )
    np.testing.assert_array_equal(masked(tmp_path / f"g{ending}"), GREY[None])


def test_pillow_modes_and_the_orientation_in_exif(tmp_path: Path) -> None:
    Image.fromarray(GREY.astype(np.uint16) * 1000).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(
        pictured(tmp_path / "deep.png")[0], GREY.astype(np.float32) * 1000
    )
    Image.fromarray(GREY > 5).save(tmp_path / "bits.png")
    np.testing.assert_array_equal(masked(tmp_path / "bits.png")[0], GREY > 5)
    Image.fromarray(np.dstack([COLOUR, np.full_like(GREY, 200)])).save(tmp_path / "rgba.png")
    np.testing.assert_array_equal(pictured(tmp_path / "rgba.png", 3), COLOUR.transpose(2, 0, 1))
    palette = Image.fromarray(GREY % 3).convert("P")
    palette.putpalette([0, 0, 0, 255, 0, 0, 0, 0, 255])
    palette.putdata((GREY % 3).ravel().tolist())
    palette.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(masked(tmp_path / "palette.png")[0], GREY % 3)
    assert pictured(tmp_path / "palette.png", 3)[0].max() == 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown a quarter turn clockwise
    Image.fromarray(GREY).save(tmp_path / "upright.png", exif=exif)
    np.testing.assert_array_equal(pictured(tmp_path / "upright.png")[0], np.rot90(GREY, -1))


def test_equal_colour_channels_are_one_mask(tmp_path: Path) -> None:
    Image.fromarray(np.dstack([GREY] * 3)).save(tmp_path / "rgb.png")
    np.testing.assert_array_equal(masked(tmp_path / "rgb.png"), GREY[None])
    assert masked(tmp_path / "rgb.png", several=True).shape == (3, 3, 4), (
        "each is a structure's own mask"
    )
    with pytest.raises(DataError, match=r"soft\.nii"):
        masked(write(tmp_path / "soft.nii", np.full((2, 2, 2), 0.5, np.float32)))


def test_volumes_are_turned_to_lps_before_they_are_cut_into_slices(tmp_path: Path) -> None:
    # (left, posterior, superior) in LPS.
    values = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    angle = np.radians(20)  # turned by whole axes and never interpolated
    tilt = np.array(
        [
            [1, 0, 0, 0],
            [0, np.cos(angle), -np.sin(angle), 0],
            [0, np.sin(angle), np.cos(angle), 0],
            [0, 0, 0, 1],
        ]
    )
    lps = write(tmp_path / "lps.nii.gz", values, np.diag([-1, -1, 1, 1]))
    ras = write(tmp_path / "ras.nii", values[::-1, ::-1].copy(), np.eye(4))
    tilted = write(
        tmp_path / "tilted.nii", values[::-1, :, ::-1].copy(), tilt @ np.diag([1, -1, -1, 1])
    )
    expected = values.transpose(1, 0, 2)[None]  # rows run to posterior, columns to the left
    for file in (lps, ras, tilted):
        np.testing.assert_array_equal(pictured(file), expected)
        np.testing.assert_array_equal(masked(file), expected)


def test_the_volumes_of_a_4d_file_are_channels(tmp_path: Path) -> None:
    several = np.arange(2 * 3 * 4 * 3, dtype=np.float32).reshape(2, 3, 4, 3)
    file = write(tmp_path / "several.nii.gz", several, np.diag([-1, -1, 1, 1]))
    np.testing.assert_array_equal(pictured(file, 3), several.transpose(3, 1, 0, 2))
    np.testing.assert_array_equal(
        pictured(file, pick=[2]), several[..., 2].transpose(1, 0, 2)[None]
    )
    whole = read_image([file], cube_task(channels=2, pick=[2, 0], orientation="LPS")).array
    np.testing.assert_array_equal(whole, several.transpose(3, 0, 1, 2)[[2, 0]])
    # Three contrasts are no red, green and blue.
    for pick, word in (([], "pick"), ([3], "number 3")):
        with pytest.raises(DataError, match=rf"several\.nii\.gz.*{word}"):
            pictured(file, pick=pick)
    write(tmp_path / "flat.nii", several[:, :, 0, 0], np.diag([-1, -1, 1, 1]))
    np.testing.assert_array_equal(pictured(tmp_path / "flat.nii"), several[:, :, 0, 0].T[None])


@pytest.mark.parametrize("codes", ["RAS", "LPS", "SAR", "PIR"])
def test_volumes_are_turned_to_the_tasks_orientation_and_back(tmp_path: Path, codes: str) -> None:
    task = cube_task(orientation="LPS")
    array, stored = volume(write(tmp_path / "v.nii.gz", VOLUME, affine(codes)))
    there, here = to_task_grid(array, stored, task)
    assert [np.sign(here.affine[axis, axis]) for axis in range(3)] == [-1, -1, 1]
    place = np.array([3, 4, 5, 1])  # a voxel as stored, and the same millimetres on the turned grid
    index = np.linalg.inv(here.affine) @ stored.affine @ place
    assert there[0][tuple(index[:3].round().astype(int))] == VOLUME[3, 4, 5]
    np.testing.assert_array_equal(
        restore_grid(torch.as_tensor(there), here, stored, task)[0].numpy(), VOLUME
    )


def test_resampled_to_millimetres_and_back(tmp_path: Path) -> None:
    smooth = np.add.outer(np.add.outer(np.arange(12.0), np.arange(14.0)), np.arange(10.0)).astype(
        np.float32
    )
    array, stored = volume(write(tmp_path / "v.nii.gz", smooth, affine("SPL")))
    task = cube_task(spacing=[1.0, 1.5, 1.0])
    there, here = to_task_grid(array, stored, task)
    assert here.spacing == pytest.approx((1.0, 1.5, 1.0)) and there.shape[1:] == here.shape
    back = restore_grid(torch.as_tensor(there), here, stored, task)
    inner = (slice(1, -1),) * 3
    np.testing.assert_allclose(back[0].numpy()[inner], smooth[inner], atol=0.05)
    labels, _ = to_task_grid((smooth > 15).astype(np.int64)[None], stored, task, labels=True)
    assert labels.dtype == np.int64 and set(np.unique(labels)) == {0, 1}


def oblique(path: Path, angle: float) -> Path:
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return write(path, VOLUME, turn @ affine())


@pytest.mark.parametrize("spacing", [None, [2.0, 1.0, 1.5]])
def test_a_tilted_volume_keeps_its_own_grid(tmp_path: Path, spacing: list[float] | None) -> None:
    task = cube_task(channels=1, orientation="LPS", spacing=spacing)
    array, grid = volume(oblique(tmp_path / "v.nii", 0.4))
    ramp = np.broadcast_to(np.arange(array.shape[-1], dtype=np.float32), array.shape).copy()
    there, here = to_task_grid(ramp, grid, task)
    assert (
        here.spacing == pytest.approx(tuple(spacing or SPACING), rel=1e-5)
        and there.shape[1:3] == SHAPE[:2]
    )
    back = restore_grid(torch.as_tensor(there), here, grid, task).numpy()
    np.testing.assert_allclose(back, ramp, atol=0 if spacing is None else 1e-3)


def test_channels_in_several_files_and_missing_channels(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.nii.gz", VOLUME + number) for number, name in enumerate("ab")
    ]
    image = read_image([files[0], None, files[1]], cube_task(channels=3))
    np.testing.assert_array_equal(
        image.array, np.stack([VOLUME, np.zeros_like(VOLUME), VOLUME + 1])
    )
    assert image.stored_grid is not None and image.stored_grid.spacing == SPACING
    shifted = affine()
    shifted[0, 3] += 1
    for other in (
        write(tmp_path / "moved.nii", VOLUME, shifted),
        write(tmp_path / "short.nii", VOLUME[..., :9]),
    ):
        for dims in ({}, {"spatial_dims": 2, "size": [16, 16]}):
            with pytest.raises(DataError, match=rf"{other.name}.*a\.nii\.gz"):
                read_image([files[0], other], cube_task(**dims))


def odd_files(folder: Path) -> dict[str, Path]:
    """A file for each problem."""
    nan = VOLUME.copy()
    zero = affine()
    nan[0, 0, 0] = np.nan
    zero[:3, 0] = 0
    page = Image.fromarray(GREY)
    page.save(folder / "pages.tif", save_all=True, append_images=[page])
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(
        folder / "whole.png"
    )
    (folder / "cut.png").write_bytes((folder / "whole.png").read_bytes()[:1500])
    (folder / "empty").mkdir()
    for name in ("broken.png", "broken.nii.gz", "broken.dcm", "notes.txt", "notes"):
        (folder / name).write_bytes(b"this is not an image")
    write(folder / "nan.nii", nan)
    write(folder / "complex.nii", VOLUME.astype(np.complex64))
    write(folder / "colours.nii", np.zeros(SHAPE, dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")]))
    oblique(folder / "oblique.nii", 0.7)
    flat = nibabel.Nifti1Image(VOLUME, None)
    flat.header.set_sform(zero, code=1)
    nibabel.save(flat, folder / "flat.nii")
    return {
        path.name: path
        for path in (*folder.iterdir(), folder / "gone.png", folder / "gone.nii")
        if path.name != "whole.png"
    }


@pytest.mark.parametrize("task", [small_task(), WHOLE], ids=["pictures", "volumes"])
def test_errors_are_one_line_that_names_the_file(
    task: TaskConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, path in odd_files(tmp_path).items():
        for read in (lambda file: read_image([file], task), lambda file: masked(file, task)):
            with pytest.raises(DataError, match=name) as error:
                read(path)
            assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", ""), "nibabel logs nothing beside the error"


def test_pictures_and_flat_images_are_no_volumes(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "p.png")
    for file in (
        tmp_path / "p.png",
        write(tmp_path / "flat.nii", VOLUME[..., 0]),
        dicom_series(tmp_path / "ct") / "0.dcm",
    ):
        with pytest.raises(DataError, match=file.name):
            read_image([file], WHOLE)


@pytest.mark.parametrize(
    ("code", "unit"), [(1, "metres"), (3, "micrometres"), (2, ""), (0, ""), (5, "")]
)
def test_a_nifti_header_in_another_unit_than_millimetres_is_rejected(
    code: int, unit: str, tmp_path: Path
) -> None:
    image = nibabel.Nifti1Image(VOLUME, affine())
    image.header["xyzt_units"] = code + 8  # 8: the unit of time, seconds
    nibabel.save(image, file := tmp_path / "scan.nii.gz")
    for read in (read_stored, masked):
        with pytest.raises(DataError, match=rf"scan\.nii\.gz.* {unit}") if unit else nullcontext():
            read(file)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".png", ".dcm", ""])
def test_pipes_are_not_opened(suffix: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"odd{suffix}")
    for read in (pictured, masked):
        with pytest.raises(DataError, match=rf"odd{suffix}"):
            read(tmp_path / f"odd{suffix}")


def test_images_beyond_the_bounds(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((10, 10), np.uint8)).save(tmp_path / "fits.png")
    Image.fromarray(np.zeros((11, 10), np.uint8)).save(tmp_path / "large.png")
    # Channels count.
    nibabel.save(
        nibabel.Nifti1Image(np.zeros((5, 5, 2, 3), np.uint8), np.eye(4)), tmp_path / "four.nii"
    )
    series = dicom_series(tmp_path / "series")  # four slices of 6 x 5
    for path in (tmp_path / "fits.png", series / "0.dcm"):
        read_stored(path, SMALL)
    read_stored(series, ImageBounds(pixels=1, voxels=120))
    for path, unit in (
        (tmp_path / "large.png", "pixels"),
        (tmp_path / "four.nii", "voxels"),
        (series, "voxels"),
    ):
        with pytest.raises(DataError, match=rf"{path.name}.*bounds\.{unit}"):
            read_stored(path, SMALL)
    with pytest.raises(DataError, match=r"0\.dcm.*pixels"):
        read_stored(series / "0.dcm", ImageBounds(pixels=29))


def test_the_size_of_a_picture_is_checked_before_its_pixels_are_read(tmp_path: Path) -> None:
    side = 20_000
    with (tmp_path / "bomb.png").open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        PngImagePlugin.putchunk(file, b"IHDR", side.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0]))
        PngImagePlugin.putchunk(file, b"IDAT", b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match=r"bomb\.png.*pixels"):
            read_stored(tmp_path / "bomb.png")


@pytest.mark.parametrize("codes", ["RAS", "SPL"])
def test_a_volume_that_resampling_makes_too_large(tmp_path: Path, codes: str) -> None:
    path = write(tmp_path / "v.nii", VOLUME, affine(codes))
    task = cube_task(channels=1, spacing=[1.0, 2.0, 0.5])
    size = read_image([path], task).array.size
    read_image([path], task, ImageBounds(voxels=size))
    with pytest.raises(DataError, match=r"v\.nii"):
        read_image([path], task, ImageBounds(voxels=size - 1))


@pytest.mark.parametrize("level", [0, 1, 9])
def test_a_damaged_compressed_volume_is_refused(level: int, tmp_path: Path) -> None:
    """One bit of the stream, wherever it lies; the checksum is in the last eight bytes."""
    random = np.random.default_rng(level)
    noise = random.integers(-1000, 1000, (16, 16, 8)).astype(np.int16)
    whole = gzip.compress(nibabel.Nifti1Image(noise, affine()).to_bytes(), level, mtime=0)
    (tmp_path / "v.nii.gz").write_bytes(whole)
    np.testing.assert_array_equal(volume(tmp_path / "v.nii.gz")[0][0], noise)
    for place in (*random.integers(10, len(whole) - 4, 20), len(whole) - 8, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << random.integers(8)
        (tmp_path / "v.nii.gz").write_bytes(damaged)
        for mask in (False, True):
            with pytest.raises(DataError, match=r"v\.nii\.gz"):
                read_stored(tmp_path / "v.nii.gz", mask=mask)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int16, np.uint16, np.int32])
@pytest.mark.parametrize("labels", [(0, 1), (0, 1, 7), (0, 3, 10, 20), (2, 5)])
def test_integer_masks_with_a_slope(kind: type, labels: tuple[int, ...], tmp_path: Path) -> None:
    """A viewer or a tool saved whole numbers, in floating point, as integers of a smaller range."""
    drawn = np.random.default_rng(0).choice(labels, SHAPE)
    image = nibabel.Nifti1Image(drawn.astype(np.float32), affine())
    image.set_data_dtype(kind)
    nibabel.save(image, file := tmp_path / "mask.nii")
    assert nibabel.load(file).dataobj.slope != 1 or np.dtype(kind).itemsize == 4
    np.testing.assert_array_equal(masked(file, WHOLE)[0], drawn)


def test_fractions_are_no_labels(tmp_path: Path) -> None:
    probabilities = np.linspace(0, 1, np.prod(SHAPE)).reshape(SHAPE).astype(np.float32)
    image = nibabel.Nifti1Image(probabilities, affine())
    image.set_data_dtype(np.uint8)  # with a slope of 1/255
    nibabel.save(image, tmp_path / "soft.nii")
    with pytest.raises(DataError, match=r"soft\.nii: the mask holds 0\.00392157;"):
        masked(tmp_path / "soft.nii", WHOLE)
    rounded = write(tmp_path / "rounded.nii", np.where(VOLUME > 9, 2.0005, 0).astype(np.float32))
    np.testing.assert_array_equal(masked(rounded, WHOLE)[0], 2 * (VOLUME > 9))


@pytest.mark.parametrize("length", [0.0, -1.0])
@pytest.mark.parametrize(("code", "known"), [("sform", True), ("qform", False), ("none", False)])
def test_a_nifti_header_without_lengths(
    code: str,
    known: bool,
    length: float,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """nibabel reads a length of 0 as 1 mm, and says so without the file's name; an sform has the
    lengths itself.
    """
    image = nibabel.Nifti1Image(VOLUME, affine())
    content = bytearray(image.to_bytes())
    content[252:256] = struct.pack("<2h", code == "qform", code == "sform")
    # pixdim[2]; pixdim begins at byte 76 (NIfTI-1).
    content[76 + 4 * 2 : 76 + 4 * 3] = struct.pack("<f", length)
    (tmp_path / "v.nii").write_bytes(content)
    (tmp_path / "v.nii.gz").write_bytes(gzip.compress(content))
    for name in ("v.nii", "v.nii.gz"):
        array, grid = volume(tmp_path / name)
        np.testing.assert_array_equal(array[0], VOLUME)
        assert grid.spacing == grid.turned("LPS").spacing == (SPACING if known else None)
        assert grid.voxel_volume == (pytest.approx(6.0) if known else None)
        resampled = cube_task(channels=1, spacing=[1.0, 1.0, 1.0])
        problem = rf"{name}: its voxel spacing is unknown"
        with nullcontext() if known else pytest.raises(DataError, match=problem):
            read_image([tmp_path / name], resampled)
    nibabel.load(tmp_path / "v.nii")  # as where the number of channels is read alone
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_nifti_header_that_nobody_has_filled_in_has_no_spacing(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(VOLUME, None)
    nibabel.save(image, tmp_path / "bare.nii")
    assert volume(tmp_path / "bare.nii")[1].spacing is None
    image.header.set_xyzt_units("mm")
    nibabel.save(image, tmp_path / "filled.nii")
    assert volume(tmp_path / "filled.nii")[1].spacing == (1, 1, 1)


@pytest.mark.parametrize("bare", ["image", "mask"])
def test_a_header_without_an_orientation_is_named(bare: str, tmp_path: Path) -> None:
    """Not the other file, which would be resampled in vain."""
    files = {}
    for name in ("image", "mask"):
        matrix = None if name == bare else affine("LPS")
        header = nibabel.Nifti1Image(VOLUME, matrix)
        assert not header.header["qform_code"]
        files[name] = tmp_path / f"{name}.nii.gz"
        nibabel.save(header, files[name])
    image = read_image([files["image"]], WHOLE)
    with pytest.raises(DataError, match=rf"{bare}\.nii\.gz: its header gives no orientation"):
        read_mask(files["mask"], files["image"], image, WHOLE)


def two_forms(path: Path, qform: np.ndarray, sform: np.ndarray, codes: tuple[int, int]) -> Path:
    image = nibabel.Nifti1Image(VOLUME, sform)
    image.set_qform(qform, codes[0])
    image.set_sform(sform, codes[1])
    nibabel.save(image, path)
    return path


def test_a_qform_of_the_scanner_and_an_sform_of_an_atlas_differ(tmp_path: Path) -> None:
    file = two_forms(tmp_path / "v.nii.gz", affine(), affine("LAS", (1.0,) * 3), (1, 4))
    np.testing.assert_allclose(volume(file)[1].affine, affine("LAS", (1.0,) * 3), atol=1e-5)


@pytest.mark.parametrize("codes", [(1, 1), (2, 2)])
@pytest.mark.parametrize(
    ("letters", "spacing"),
    [("LAS", SPACING), ("ARS", (1.0, 2.0, 3.0)), ("RAS", (2.0, 1.0, 3.01)), ("LAS", (1.0,) * 3)],
)
def test_a_qform_and_an_sform_of_other_axes_are_refused(
    letters: str, spacing: tuple[float, ...], codes: tuple[int, int], tmp_path: Path
) -> None:
    file = two_forms(tmp_path / "v.nii.gz", affine(), affine(letters, spacing), codes)
    sides = " x ".join(f"{side:g}" for side in spacing)
    problem = rf"v\.nii\.gz: .*qform.* 2 x 1 x 3 mm RAS.*sform {sides} mm {letters}; .*set_sform"
    for mask in (False, True):
        with pytest.raises(DataError, match=problem):
            read_stored(file, mask=mask)
    # The remedies that the error names.
    for form, kept in (("set_qform", affine(letters, spacing)), ("set_sform", affine())):
        image = nibabel.load(file)
        getattr(image, form)(None)
        nibabel.save(image, tmp_path / "one.nii")
        np.testing.assert_allclose(volume(tmp_path / "one.nii")[1].affine, kept, atol=1e-5)


def rotation(degrees: float, axis: int) -> np.ndarray:
    """About one of the patient's axes."""
    angle = np.radians(degrees)
    first, second = (row for row in range(3) if row != axis)
    matrix = np.eye(4)
    matrix[first, first] = matrix[second, second] = np.cos(angle)
    matrix[second, first] = np.sin(angle)
    matrix[first, second] = -np.sin(angle)
    return matrix


@pytest.mark.parametrize("letters", ["RAS", "LPS", "PIR"])
@pytest.mark.parametrize("degrees", [0, 7.3, 25])
def test_a_qform_may_differ_from_the_sform_by_rounding_and_shear(
    letters: str, degrees: float, tmp_path: Path
) -> None:
    """A qform is a rotation in 32 bits; and of a tilted gantry it has no shear, and the distance of
    slices along the table or across them.
    """
    straight = rotation(degrees, 0) @ rotation(degrees / 3, 2) @ affine(letters, (0.7, 0.7, 3.3))
    moved = straight.copy()
    moved[:3, 3] += 40
    aligned = rotation(4, 1) @ straight  # to a standard brain
    for number, qform in enumerate((straight, moved, aligned)):
        file = two_forms(tmp_path / f"{number}.nii", qform, straight, (1, 2))
        np.testing.assert_allclose(volume(file)[1].affine, straight, atol=1e-5)
    along = affine(letters, (0.7, 0.7, 3.3))
    tilted = along.copy()
    tilted[:3, 2] += along[:3, 1] * (3.3 / 0.7) * np.tan(np.radians(degrees))
    for number, qform in enumerate((tilted, along)):
        file = two_forms(tmp_path / f"tilted{number}.nii", qform, tilted, (1, 1))
        np.testing.assert_allclose(volume(file)[1].affine, tilted, atol=1e-5)


def test_white_of_one_bit_is_white(tmp_path: Path) -> None:
    """Beside pictures of 8 bits; a mask of one bit has 0 and 1."""
    Image.fromarray(np.eye(4, dtype=bool)).save(tmp_path / "a.png")
    assert set(np.unique(read_stored(tmp_path / "a.png").array)) == {0, 255}
    assert set(np.unique(read_stored(tmp_path / "a.png", mask=True).array)) == {0, 1}
