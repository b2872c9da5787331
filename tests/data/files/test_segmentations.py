"""DICOM segmentation objects, as highdicom writes them, read back as masks of their series."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")

from medflare.core.errors import DataError
from medflare.data.files.segmentations import is_segmentation, read_segmentation
from medflare.data.files.sources import FileSource
from medflare.data.files.volumes import read_volume
from medflare.inference.dicom_seg import dicom_seg
from medflare.tasks.config import TaskConfig, load_task
from small import SEGMENTATION
from volumes import TASK, dicom_series

TWO: dict[str, Any] = {"target": "multiclass", "labels": ["background", "liver", "spleen"]}


def _task(dims: int = 3, **changes: Any) -> TaskConfig:
    return load_task({**(TASK if dims == 3 else SEGMENTATION), "channels": 1, **changes})


def _structures(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Two that share no voxel; the first slice shows neither, so that the object leaves it out."""
    liver, spleen = np.zeros(shape, bool), np.zeros(shape, bool)
    liver[1:3, 2:5, 1:3] = True
    spleen[4, 0, 3] = True
    return {"liver": liver, "spleen": spleen}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A series of five columns, six rows and four slices, with its segmentation."""
    series = dicom_series(tmp_path / "ct")
    _, grid = read_volume(series)
    (tmp_path / "seg.dcm").write_bytes(dicom_seg(series, _structures(grid.shape), grid.affine, _task()))
    (tmp_path / "datalist.json").write_text(json.dumps({"test": [{"image": "ct", "label": "seg.dcm"}]}))
    return tmp_path


@pytest.mark.parametrize("dims", [2, 3])
def test_every_frame_lies_on_its_slice(site: Path, dims: int) -> None:
    _, grid = read_volume(site / "ct")
    source = FileSource(site, _task(dims, **TWO, **({"orientation": "LPS"} if dims == 3 else {})))
    (entry,) = source.entries()
    expected = _structures(grid.shape)["liver"] + 2 * _structures(grid.shape)["spleen"]
    image, mask = source.image(entry), source.mask(entry)
    assert mask.shape[1:] == image.shape[1:] and mask.sum() == expected.sum()
    found = mask[0] if dims == 3 else np.swapaxes(mask[0], 0, 1)
    np.testing.assert_array_equal(found, expected)


def test_segments_are_named_or_numbered(site: Path) -> None:
    _, grid = read_volume(site / "ct")
    several = read_segmentation(site / "seg.dcm", site / "ct", grid, _task(target="multilabel", labels=["liver", "spleen"]))
    np.testing.assert_array_equal(several, np.stack(list(_structures(grid.shape).values())))
    valued = _task(target="multilabel", labels=["spleen", "liver"], label_values={"spleen": [7], "liver": [9]})
    assert set(np.unique(read_segmentation(site / "seg.dcm", site / "ct", grid, valued))) == {0, 7, 9}
    others = _task(target="multiclass", labels=["background", "a", "b"])
    assert set(np.unique(read_segmentation(site / "seg.dcm", site / "ct", grid, others))) == {0, 1, 2}


def test_an_object_of_another_series_is_refused(site: Path) -> None:
    _, grid = read_volume(site / "ct")
    for file in (site / "ct").iterdir():
        one = pydicom.dcmread(file)
        one.SeriesInstanceUID = "1.2.99"
        one.save_as(file)
    with pytest.raises(DataError, match=r"seg.dcm: segments the series 1.2.3, its image .*ct is 1.2.99; correct the datalist"):
        read_segmentation(site / "seg.dcm", site / "ct", grid, _task(**TWO))


def test_frames_beside_the_slices_are_refused(site: Path) -> None:
    _, grid = read_volume(site / "ct")
    seg = pydicom.dcmread(site / "seg.dcm")
    seg.PerFrameFunctionalGroupsSequence[0].PlanePositionSequence[0].ImagePositionPatient = [10, 20, 31]
    seg.save_as(site / "seg.dcm")
    with pytest.raises(DataError, match="a frame lies beside the slices of its series"):
        read_segmentation(site / "seg.dcm", site / "ct", grid, _task(**TWO))


def test_overlapping_segments_need_a_mask_each(site: Path) -> None:
    _, grid = read_volume(site / "ct")
    both = np.ones(grid.shape, bool)
    (site / "seg.dcm").write_bytes(dicom_seg(site / "ct", {"liver": both, "spleen": both}, grid.affine, _task()))
    with pytest.raises(DataError, match="segments overlap, a multiclass task has one label a voxel"):
        read_segmentation(site / "seg.dcm", site / "ct", grid, _task(**TWO))


def test_what_is_a_segmentation(site: Path) -> None:
    assert is_segmentation(site / "seg.dcm")
    assert not is_segmentation(site / "ct/0.dcm") and not is_segmentation(site / "ct") and not is_segmentation(site / "datalist.json")
