from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from nibabel import orientations

from helpers.fixture_types import Edit, SiteOf
from helpers.volume_sites import (
    NAMES,
    SHAPE,
    TASK,
    affine,
    change,
    cube_task,
    dicom_series,
    make_volumes,
    write,
)
from medflare.core.errors import DataError
from medflare.data.decoding import _decoded_sites
from medflare.data.loading import load_site_data
from medflare.data.local import CacheSettings
from medflare.data.reading import series_grid
from medflare.preparation.check import check_site
from medflare.tasks.config import TaskConfig, load_task


def refused(named: str, folder: Path, task: TaskConfig) -> None:
    """Data of a site that are an error of this name."""
    with pytest.raises(DataError, match=named):
        load_site_data("A", task, folder)


@pytest.mark.parametrize("image_mode", ["resize", "patch"])
def test_volumes_are_read_from_files_and_from_the_cache(tmp_path: Path, image_mode: str) -> None:
    task = cube_task(image_mode=image_mode)
    folder = make_volumes(tmp_path / "A")
    first = load_site_data("A", task, folder, cache=CacheSettings(str(tmp_path / "cache")))
    _decoded_sites.clear()
    again = load_site_data("A", task, folder, cache=CacheSettings(str(tmp_path / "cache")))
    for data in (first, again):
        assert [len(data.train), len(data.validation), len(data.test)] == [3, 2, 2]
        size = (8, 8, 8) if image_mode == "resize" else SHAPE
        assert data.train.images[0].shape == (2, *size) and data.train.targets[0].shape == size
        spacing = (
            (2.0 * 12 / 8, 14 / 8, 3.0 * 10 / 8) if image_mode == "resize" else (2.0, 1.0, 3.0)
        )
        assert data.train.spacings[0] == pytest.approx(spacing)
    assert torch.equal(first.test.images[1], again.test.images[1])
    bright = (first.train.images[0][1] > 0.6).long()
    assert (bright == first.train.targets[0]).float().mean() > 0.9, (
        "channels and mask belong together"
    )


def test_orientation_and_spacing_of_the_task_hold_for_image_and_mask(tmp_path: Path) -> None:
    folder = make_volumes(tmp_path / "A")
    stored = load_site_data("A", cube_task(image_mode="patch"), folder)
    turned = load_site_data(
        "A", cube_task(image_mode="patch", orientation="SPR", spacing=[3.0, 2.0, 2.0]), folder
    )
    assert stored.train.images[0].shape[1:] == (12, 14, 10) and turned.train.spacings[
        0
    ] == pytest.approx((3.0, 2.0, 2.0))
    assert turned.train.images[0].shape[1:] == (10, 8, 12)
    bright = turned.train.images[0][0] > 0.6
    mask = turned.train.targets[0] > 0
    assert 2 * (bright & mask).sum() / (bright.sum() + mask.sum()) > 0.8


def test_a_missing_channel_is_an_error_or_zeros(tmp_path: Path, edit: Edit) -> None:
    folder = make_volumes(tmp_path / "A")
    edit(folder, lambda listed: listed["training"][0].update(image=["p0_pre.nii.gz", None]))
    refused("flair", folder, cube_task())
    zeros = load_site_data("A", cube_task(missing_channels="zeros"), folder)
    assert (
        zeros.train.images[0][1].unique().numel() == 1
        and zeros.train.images[1][1].unique().numel() > 1
    )
    edit(
        folder,
        lambda listed: listed["training"][0].update(image=["gone_pre.nii.gz", "gone_flair.nii.gz"]),
    )
    refused(r"training\[0\]", folder, cube_task(missing_channels="zeros"))
    refused("gone_pre", folder, cube_task())
    edit(folder, lambda listed: listed["training"][0].update(image=["p0_pre.nii.gz"]))
    refused("pre, flair", folder, cube_task())


def test_masks_on_another_grid_and_pictures_in_3d_tasks_are_refused(
    tmp_path: Path, edit: Edit, make_site: SiteOf
) -> None:
    folder = make_volumes(tmp_path / "B")
    write(folder / "p0_mask.nii.gz", np.zeros(SHAPE, np.uint8), affine(spacing=(2, 1, 2.5)))
    refused("p0_mask", folder, cube_task())
    refused(r"0\.png", make_site(), cube_task(channels=1))


@pytest.mark.parametrize(
    "changes",
    [{}, {"image_mode": "patch", "orientation": "PSR", "spacing": [1.5, 1.5, 1.5]}],
    ids=["stored", "resampled"],
)
@pytest.mark.parametrize("name", ["mask", "flair"])
def test_masks_and_channels_may_have_another_orientation(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Annotation tools store masks in other orientations; the affine says so."""
    folder = make_volumes(tmp_path / "A")
    task = cube_task(**changes)
    expected = load_site_data("A", task, folder).train
    _decoded_sites.clear()
    stored = nibabel.load(folder / f"p0_{name}.nii.gz")
    turn = orientations.ornt_transform(
        orientations.io_orientation(stored.affine), orientations.axcodes2ornt(("S", "L", "A"))
    )
    nibabel.save(stored.as_reoriented(turn), folder / f"p0_{name}.nii.gz")
    actual = load_site_data("A", task, folder).train
    assert torch.equal(actual.images[0], expected.images[0]) and torch.equal(
        actual.targets[0], expected.targets[0]
    )


def test_slices_of_different_grids_are_refused(tmp_path: Path) -> None:
    """A mask or a second channel of the same size may have another position in the patient."""
    task = cube_task(spatial_dims=2, size=[16, 16])
    folder = make_volumes(tmp_path / "A")
    flipped = np.diag([-1.0, 1, 1, 1]) @ affine()
    images = {
        name: nibabel.load(folder / f"p0_{name}.nii.gz").get_fdata(dtype=np.float32)
        for name in (*NAMES, "mask")
    }
    whole = load_site_data("A", task, folder).train.images[5]
    turned_around = affine("LAS")
    turned_around[:3, 3] += affine()[:3, 0] * (SHAPE[0] - 1)
    for name in ("flair", "mask"):  # stored in another orientation with its affine
        write(folder / f"p0_{name}.nii.gz", images[name][::-1].copy(), turned_around)
    assert torch.equal(load_site_data("A", task, folder).train.images[5], whole)
    rounded = affine()
    rounded[:3, 3] += 0.4
    write(folder / "p0_mask.nii.gz", images["mask"], rounded)  # a shift of less than half a voxel
    load_site_data("A", task, folder)
    write(folder / "p0_mask.nii.gz", images["mask"], flipped)
    refused("p0_mask", folder, task)
    write(folder / "p0_flair.nii.gz", images["flair"], affine(spacing=(1, 1, 1)))
    refused("p0_flair", folder, task)
    nowhere = nibabel.Nifti1Image(images["flair"], None)  # has no affine
    nibabel.save(nowhere, folder / "p0_flair.nii.gz")
    refused("p0_flair", folder, task)


def test_masks_of_a_series_in_opposite_order_are_turned(make_site: SiteOf, edit: Edit) -> None:
    """The series is numbered from head to feet, the mask runs upwards."""
    folder = make_site()
    task = load_task({**TASK, "channels": 1, "spatial_dims": 2, "size": [16, 16]})
    series = dicom_series(folder / "series")
    mask = np.zeros((5, 6, 4), np.uint8)
    grid = series_grid(series)
    mask[1:3, 1:3, 1] = 1
    write(folder / "mask.nii.gz", mask, grid.affine)
    edit(folder, lambda listed: listed["training"][0].update(image="series", label="mask.nii.gz"))
    before = [bool(target.any()) for target in load_site_data("A", task, folder).train.targets]
    assert len(before) == 4 + 4 and sum(before[:4]) == 1
    for number in range(4):
        change(series, (number,), InstanceNumber=4 - number)
    after = [bool(target.any()) for target in load_site_data("A", task, folder).train.targets]
    assert after == [*reversed(before[:4]), *before[4:]]


def test_constant_volumes_are_refused(tmp_path: Path) -> None:
    folder = make_volumes(tmp_path / "A", patients={"training": 6, "validation": 2, "test": 2})
    for name in NAMES:
        write(folder / f"p2_{name}.nii.gz", np.full(SHAPE, 3.5, np.float32))
    refused("p2_pre", folder, cube_task())
    report = check_site(folder, cube_task())
    assert [
        problem for problem in report.sites["A"].problems if "p2_pre.nii.gz: empty" in problem
    ] and not report.ok
    allowed = cube_task(unreadable="skip", unreadable_limit={"share": 0.1})
    assert len(load_site_data("A", allowed, folder).train) == 5
    for limit in ({"share": 0.09}, {"share": 1.0, "count": 0}):
        refused(
            r"unreadable_limit.*p2_pre",
            folder,
            cube_task(unreadable="skip", unreadable_limit=limit),
        )
    assert "left out: " in check_site(folder, allowed).render()
