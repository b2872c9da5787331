"""Volumes read, turned along the patient's axes, resampled and brought back; what is wrong is one line."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from medflare.core.errors import DataError
from medflare.data.files.bounds import ImageBounds, refuse_resampled
from medflare.data.files.geometry import Grid
from medflare.data.files.readers import read_image, read_mask
from medflare.data.files.volumes import read_channels, read_volume, slices_apart, turned, turned_back
from volumes import SHAPE, SPACING, affine, cube_task, dicom_series, write

VOLUME = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "SAR", "PIR"])
def test_a_volume_lies_along_the_tasks_axes_however_it_is_stored(tmp_path: Path, codes: str) -> None:
    task = cube_task(orientation="LPS")
    array, stored = read_volume(write(tmp_path / "v.nii.gz", VOLUME, affine(codes)))
    there, here = turned(array, stored, task)
    assert [np.sign(here.affine[axis, axis]) for axis in range(3)] == [-1, -1, 1]
    place = np.array([3, 4, 5, 1])  # a voxel as stored, and the same millimetres on the turned grid
    index = np.linalg.inv(here.affine) @ stored.affine @ place
    assert there[0][tuple(index[:3].round().astype(int))] == VOLUME[3, 4, 5]
    back = turned_back(torch.as_tensor(there), here, stored, task)
    np.testing.assert_array_equal(back[0].numpy(), VOLUME)


def test_resampled_to_millimetres_and_back(tmp_path: Path) -> None:
    smooth = np.add.outer(np.add.outer(np.arange(12.0), np.arange(14.0)), np.arange(10.0)).astype(np.float32)
    array, stored = read_volume(write(tmp_path / "v.nii.gz", smooth, affine("SPL")))
    task = cube_task(spacing=[1.0, 1.5, 1.0])
    there, here = turned(array, stored, task)
    assert here.spacing == pytest.approx((1.0, 1.5, 1.0)) and there.shape[1:] == here.shape
    back = turned_back(torch.as_tensor(there), here, stored, task)
    assert back.shape[1:] == SHAPE
    inner = (slice(1, -1),) * 3
    np.testing.assert_allclose(back[0].numpy()[inner], smooth[inner], atol=0.05)
    mask = (smooth > 15).astype(np.int64)[None]
    labels, _ = turned(mask, stored, task, labels=True)
    assert labels.dtype == np.int64 and set(np.unique(labels)) == {0, 1}


def test_channels_of_their_own_files_are_put_together_and_zeros_stand_in(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.nii.gz", VOLUME + number) for number, name in enumerate("ab")]
    array, grid = read_channels([files[0], None, files[1]], 3)
    np.testing.assert_array_equal(array, np.stack([VOLUME, np.zeros_like(VOLUME), VOLUME + 1]))
    assert grid.spacing == SPACING
    four = write(tmp_path / "four.nii.gz", np.stack([VOLUME] * 4, axis=-1))
    assert read_channels([four], 4)[0].shape == (4, *SHAPE)
    with pytest.raises(DataError, match=r"four.nii.gz: the image has 4 channels, the task takes 3; correct"):
        read_channels([four], 3)
    different = write(tmp_path / "different.nii.gz", np.stack([VOLUME + 100 * number for number in range(4)], axis=-1))
    np.testing.assert_array_equal(read_channels([different], 2, (3, 1))[0], np.stack([VOLUME + 300, VOLUME + 100]))
    with pytest.raises(DataError, match=r"different.nii.gz: the image has 4 channels, the task picks number 4 \(from 0\)"):
        read_channels([different], 1, (4,))


def _bad(folder: Path, volume: np.ndarray = VOLUME, matrix: np.ndarray | None = None) -> Path:
    return write(folder / "bad.nii", volume, matrix)


def _oblique(folder: Path, angle: float) -> Path:
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return _bad(folder, matrix=turn @ affine())


@pytest.mark.parametrize(
    ("pixdim", "words"), [(0.0, "spacing 0 x 1 x 3 mm, each must be above 0"), (-2.0, "spacing -2 x 1 x 3 mm, each must be above 0")]
)
def test_spacing_that_is_none(tmp_path: Path, pixdim: float, words: str) -> None:
    file = _bad(tmp_path)
    content = bytearray(file.read_bytes())
    content[80:84] = np.float32(pixdim).tobytes()  # pixdim[1] of the NIfTI-1 header
    file.write_bytes(bytes(content))
    for read in (read_volume, lambda path: read_image(path, 1), read_mask):  # slices need no millimetres, but such a header is broken
        with pytest.raises(DataError, match=rf"bad.nii: {words}; correct the file's header$"):
            read(file)


def test_the_affine_of_a_file_is_its_own(tmp_path: Path) -> None:
    """Written beside a spacing that was left at 1 mm: MONAI would take the volume for one that lies nowhere, and viewers do not."""
    for codes in ("LPS", "SAR"):
        image = nibabel.Nifti1Image(VOLUME, None)
        image.header.set_sform(affine(codes), code=1)
        nibabel.save(image, tmp_path / "alone.nii")
        write(tmp_path / "usual.nii", VOLUME, affine(codes))
        np.testing.assert_array_equal(read_volume(tmp_path / "alone.nii")[1].affine, affine(codes))
        np.testing.assert_array_equal(read_image(tmp_path / "alone.nii", 1), read_image(tmp_path / "usual.nii", 1))
    image.header.set_sform(affine() * [0, 1, 1, 1], code=1)
    nibabel.save(image, tmp_path / "flat.nii")
    for read in (read_volume, lambda path: read_image(path, 1), read_mask):
        with pytest.raises(DataError, match=r"flat.nii: spacing 0 x 1 x 3 mm, each must be above 0; correct the file's header$"):
            read(tmp_path / "flat.nii")


@pytest.mark.parametrize("spacing", [None, [2.0, 1.0, 1.5]])
def test_a_tilted_volume_keeps_its_own_grid(tmp_path: Path, spacing: list[float] | None) -> None:
    """Its axes are exchanged and flipped as a whole, resampled along themselves, and come back to where they were."""
    task = cube_task(channels=1, orientation="LPS", spacing=spacing)
    array, grid = read_volume(_oblique(tmp_path, 0.4))
    assert grid.spacing == pytest.approx(SPACING, rel=1e-6)
    ramp = np.broadcast_to(np.arange(array.shape[-1], dtype=np.float32), array.shape).copy()
    there, here = turned(ramp, grid, task)
    assert here.spacing == pytest.approx(tuple(spacing or SPACING), rel=1e-5)
    assert there.shape[1:3] == SHAPE[:2]
    back = turned_back(torch.as_tensor(there), here, grid, task).numpy()
    np.testing.assert_allclose(back, ramp, atol=0 if spacing is None else 1e-3)


def test_oblique_affine_nan_picture_and_other_grid(tmp_path: Path) -> None:
    for read in (read_volume, lambda path: read_image(path, 1), read_mask):  # cut into slices, it would be a guess along which axis
        with pytest.raises(DataError, match=r"bad.nii: oblique affine, an axis leans 40 degrees away from the patient's; resample"):
            read(_oblique(tmp_path, 0.7))
    with pytest.raises(DataError, match=r"bad.nii: the image holds NaN or infinite values"):
        read_channels([_bad(tmp_path, np.full(SHAPE, np.nan, np.float32))], 1)
    with pytest.raises(DataError, match=r"bad.nii: 12 x 14 is no volume, the task has spatial_dims 3; give all slices together"):
        read_volume(_bad(tmp_path, VOLUME[:, :, 0]))
    (tmp_path / "p.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"p.png: a picture, the task has spatial_dims 3"):
        read_volume(tmp_path / "p.png")
    first = write(tmp_path / "first.nii.gz", VOLUME)
    shifted = affine()
    shifted[0, 3] += 1
    with pytest.raises(DataError, match=r"bad.nii: lies on another grid than first.nii.gz \(up to 1 mm away\); resample"):
        read_channels([first, _bad(tmp_path, matrix=shifted)], 2)
    with pytest.raises(DataError, match=r"another grid than first.nii.gz \(12 x 14 x 9 voxels, not 12 x 14 x 10\)"):
        read_channels([first, _bad(tmp_path, VOLUME[..., :9])], 2)


def test_a_grid_that_nobody_knows_differs_by_its_shape_alone() -> None:
    known, unknown = Grid(SHAPE, affine()), Grid(SHAPE, np.eye(4), known=False)
    assert unknown.difference(Grid(SHAPE, np.eye(4), known=False)) == "" and unknown.spacing is None
    assert turned(VOLUME[None], unknown, cube_task())[1] is unknown and unknown.turned("SPL") is unknown
    for one, other in ((known, unknown), (unknown, known)):  # the one would be turned and the other not
        assert one.difference(other) == "only one of them says where it lies"


def test_a_dicom_series_has_its_place_in_space(tmp_path: Path) -> None:
    array, grid = read_volume(dicom_series(tmp_path / "ct"))
    assert array.shape == (1, 5, 6, 4) and array[0, 3, 2, 1] == 3 + 20 + 100
    assert grid.spacing == pytest.approx((0.25, 0.5, 2.0))
    np.testing.assert_allclose(grid.affine @ [3, 2, 1, 1], [-10 - 0.75, -20 - 1.0, 32, 1], atol=1e-6)  # LPS to RAS
    with pytest.raises(DataError, match=r"0.dcm: one DICOM file is no volume here; give the folder of its series"):
        read_volume(tmp_path / "ct/0.dcm")


def test_a_series_that_lost_a_slice_is_no_volume(tmp_path: Path) -> None:
    folder = dicom_series(tmp_path / "ct", slices=5)
    (folder / "2.dcm").unlink()
    with pytest.raises(DataError, match=r"ct: slices lie 2 to 4 mm apart; restore what is missing, or resample the volume"):
        read_volume(folder)
    broken = dicom_series(tmp_path / "broken")
    (broken / "3.dcm").write_bytes((broken / "3.dcm").read_bytes()[:200])
    with pytest.raises(DataError, match=r"broken: "):
        read_volume(broken)


def test_a_series_in_metres_or_microns_is_read_in_millimetres(tmp_path: Path) -> None:
    for unit, length in (("meter", 1e-3), ("micron", 1e3), ("mm", 1.0), ("unknown", 1.0)):
        image = nibabel.Nifti1Image(VOLUME, np.diag([length, length, length, 1]) @ affine())
        image.header.set_xyzt_units(unit)
        nibabel.save(image, tmp_path / "v.nii.gz")
        assert read_volume(tmp_path / "v.nii.gz")[1].spacing == pytest.approx(SPACING), unit


def test_voxels_that_are_no_numbers(tmp_path: Path) -> None:
    colours = np.zeros(SHAPE, dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    for volume, words in ((colours, "colours"), (VOLUME.astype(np.complex64), "complex numbers")):
        path = write(tmp_path / "v.nii.gz", volume)
        for read in (lambda file: read_channels([file], 1), lambda file: read_image(file, 1), read_mask):
            with pytest.raises(DataError, match=f"v.nii.gz: its voxels are {words}, not one number each; store each part as a channel"):
                read(path)


def test_what_nibabel_repairs_is_not_told_beside_the_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "v.nii", VOLUME)
    content = bytearray(path.read_bytes())
    content[80:84] = bytes(4)  # pixdim[1]
    path.write_bytes(content)
    with pytest.raises(DataError, match="spacing 0 x 1 x 3 mm, each must be above 0"):
        read_volume(path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("codes", ["RAS", "SPL"])
def test_a_volume_that_resampling_would_blow_up_or_flatten(tmp_path: Path, codes: str) -> None:
    """Not tried: the bound tells by the header."""
    path, bounds = tmp_path / "v.nii", ImageBounds(voxels=10**6)
    grid = read_volume(write(path, VOLUME, affine(codes)))[1]
    refuse_resampled(path, grid, cube_task(spacing=[1.0, 1.0, 1.0]), bounds)
    refuse_resampled(path, grid, cube_task(), ImageBounds(voxels=1))
    with pytest.raises(DataError, match=r"v.nii: with the task's spacing it has \d+ x \d+ x \d+ voxels, this site takes 1000000"):
        refuse_resampled(path, grid, cube_task(spacing=[0.1, 0.1, 0.1]), bounds)
    with pytest.raises(DataError, match=r"it has 1 x 1 x 1 voxels; the file says .* mm; correct its header or the task's spacing"):
        refuse_resampled(path, grid, cube_task(spacing=[500.0, 500.0, 500.0]), bounds)
    array, _ = turned(*read_volume(path), cube_task(spacing=[1.0, 2.0, 0.5]))
    refuse_resampled(path, grid, cube_task(spacing=[1.0, 2.0, 0.5]), ImageBounds(voxels=2 * array.size))
    with pytest.raises(DataError, match=" x ".join(map(str, array.shape[1:]))):
        refuse_resampled(path, grid, cube_task(spacing=[1.0, 2.0, 0.5]), ImageBounds(voxels=2 * array.size - 1))


def test_a_file_without_suffix_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "t1").write_bytes(b"anything")
    with pytest.raises(DataError, match=r"t1: unknown image format ''; give it the suffix"):
        read_volume(tmp_path / "t1")


@pytest.mark.parametrize(("codes", "apart"), [("RAS", True), ("LPS", True), ("SAL", True), ("LAS", False)])
def test_a_mask_that_does_not_say_where_it_lies(tmp_path: Path, codes: str, apart: bool) -> None:
    """It is turned as if it said LAS. Where its image is turned otherwise, left and right would be exchanged without a word."""
    image, mask = write(tmp_path / "image.nii.gz", VOLUME, affine(codes)), tmp_path / "mask.nii.gz"
    nibabel.save(nibabel.Nifti1Image(VOLUME, None), mask)
    assumed = "LAS is assumed of a header without sform and qform code"
    assert slices_apart(image, mask) == (f"stored along LAS, not {codes}; {assumed}" if apart else "")
    assert slices_apart(mask, image) == (f"stored along {codes}, not LAS; {assumed}" if apart else "")
    assert np.array_equal(read_image(image, 1), read_mask(mask)) != apart
    assert slices_apart(mask, mask) == ""


def test_a_mask_that_does_not_say_where_it_lies_beside_a_series(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.zeros((5, 6, 4), np.uint8), None), tmp_path / "mask.nii")
    assert slices_apart(dicom_series(tmp_path / "ct"), tmp_path / "mask.nii").startswith("stored along LAS, not LPS; LAS is assumed")


def test_flat_images_that_run_the_other_way(tmp_path: Path) -> None:
    """They are not turned, so that only their axes count; where one of them says nothing, it is taken to lie as the other one."""
    files = {codes: write(tmp_path / f"{codes}.nii", VOLUME[..., 0], affine(codes)) for codes in ("LPS", "RPS", "LAS")}
    shifted = affine("LPS")
    shifted[0, 3] += 100
    moved, silent = write(tmp_path / "moved.nii", VOLUME[..., 0], shifted), tmp_path / "silent.nii"
    nibabel.save(nibabel.Nifti1Image(VOLUME[..., 0], None), silent)
    assert slices_apart(files["LPS"], files["RPS"]) == "stored along RP, not LP"
    assert slices_apart(files["LPS"], files["LAS"]) == "stored along LA, not LP"
    series = dicom_series(tmp_path / "ct", slices=1)  # read as a flat image too
    assert slices_apart(series, files["RPS"]) == ""
    assert slices_apart(files["LPS"], moved) == slices_apart(files["RPS"], silent) == slices_apart(silent, files["RPS"]) == ""
