"""From stored pictures and volumes to tensors of the network's size."""

import json
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from medflare.core.errors import DataError
from medflare.data.decoding import Decoded, decode, target_of
from medflare.data.loading import load_site_data
from medflare.data.settings import CacheSettings
from medflare.data.sources import FileSource, PhantomSource
from medflare.tasks.config import TaskConfig

TaskOf = Callable[..., TaskConfig]
SiteOf = Callable[..., Path]


def _volumes(folder: Path, shape: tuple[int, int, int] = (16, 16, 5)) -> Path:
    """Two LPS volumes; volume v has intensity 100 v + slice, and foreground on slices 1 and 3."""
    folder.mkdir()
    listed: dict[str, list[dict[str, str]]] = {"training": [], "validation": [], "test": []}
    for number, split in enumerate(listed):
        volume = np.zeros(shape, np.float32) + 100 * number + np.arange(shape[2])
        mask = np.zeros(shape, np.uint8)
        mask[4:8, 4:8, [1, 3]] = 1
        nibabel.save(nibabel.Nifti1Image(volume, np.diag([-1, -1, 1, 1])), folder / f"v{number}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(mask, np.diag([-1, -1, 1, 1])), folder / f"m{number}.nii.gz")
        listed[split].append({"image": f"v{number}.nii.gz", "label": f"m{number}.nii.gz"})
    (folder / "datalist.json").write_text(json.dumps(listed))
    return folder


def _decoded(folder: Path, task: TaskConfig) -> Decoded:
    source = FileSource(folder, task)
    return decode(task, source, source.entries())


def test_pictures(make_site: SiteOf, make_task: TaskOf) -> None:
    decoded = _decoded(make_site(), make_task())
    assert decoded.images.shape == (10, 1, 16, 16) and decoded.images.dtype == torch.float32
    assert decoded.targets.shape == (10, 16, 16) and decoded.targets.dtype == torch.int64
    assert decoded.targets.flatten(1).sum(dim=1).tolist() == [16] * 10
    assert decoded.names == [f"{number}.png" for number in range(10)]
    bright = decoded.images[:, 0] > 0.55
    torch.testing.assert_close(bright.long(), decoded.targets)  # picture and mask belong together


def test_target_shapes(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    several = make_task(target="multilabel", labels=["a", "b"], label_values={"a": [1], "b": [1]})
    targets = _decoded(folder, several).targets
    assert targets.shape == (10, 2, 16, 16) and targets.dtype == torch.float32
    shades = _decoded(make_site(kind="classification", name="B"), make_task("classification"))
    assert shades.targets.tolist() == [number % 3 for number in range(10)]


@pytest.mark.parametrize(("keep", "training"), [("all", [0, 1, 2, 3, 4]), ("foreground", [1, 3])])
def test_volumes_become_slices(tmp_path: Path, make_task: TaskOf, keep: str, training: list[int]) -> None:
    """A label chooses slices of training volumes and of no others."""
    raw = {"name": "ScaleIntensityRange", "a_min": 0, "a_max": 1, "b_min": 0, "b_max": 1}
    decoded = _decoded(_volumes(tmp_path / "V"), make_task(slices={"axis": 2, "keep": keep}, intensity=raw))
    kept = [(volume, number) for volume in range(3) for number in (training if volume == 0 else range(5))]
    assert decoded.names == [f"v{volume}.nii.gz[{number}]" for volume, number in kept]
    assert decoded.entries == [volume for volume, _ in kept]
    assert decoded.images[:, 0, 0, 0].tolist() == [100 * volume + number for volume, number in kept]
    assert [bool(target.any()) for target in decoded.targets] == [number in (1, 3) for _, number in kept]


def test_slices_of_a_volume_stay_in_one_split(tmp_path: Path, make_task: TaskOf) -> None:
    data = load_site_data("V", make_task(), _volumes(tmp_path / "V"))
    assert [len(data.split(name)) for name in ("train", "validation", "test")] == [5, 5, 5]
    assert set(data.train.patients) == {"v0.nii.gz"} and set(data.test.patients) == {"v2.nii.gz"}


def test_other_axis(tmp_path: Path, make_task: TaskOf) -> None:
    decoded = _decoded(_volumes(tmp_path / "V", (12, 14, 5)), make_task(slices={"axis": 1}))
    assert len(decoded.images) == 3 * 12  # LPS volumes are read as (posterior, left, superior)


def test_a_volume_without_any_foreground(tmp_path: Path, make_task: TaskOf) -> None:
    folder = _volumes(tmp_path / "V")
    task = make_task(slices={"keep": "foreground"})
    empty = nibabel.Nifti1Image(np.zeros((16, 16, 5), np.uint8), np.diag([-1, -1, 1, 1]))
    nibabel.save(empty, folder / "m1.nii.gz")
    assert len(load_site_data("V", task, folder).validation) == 5
    nibabel.save(empty, folder / "m0.nii.gz")
    with pytest.raises(DataError, match="training"):
        load_site_data("V", task, folder)


def test_slices_are_chosen_anew_where_splits_are_drawn_anew(tmp_path: Path, make_task: TaskOf) -> None:
    folder, settings = _volumes(tmp_path / "V"), {"slices": {"keep": "foreground"}}
    for seed in range(4):
        data = load_site_data("V", make_task(resplit=seed, **settings), folder, cache=CacheSettings(str(tmp_path / "cache")))
        assert [len(data.split(name)) for name in ("train", "validation", "test")] == [2, 5, 5]


def test_mask_of_another_size(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    other = make_site(name="B", side=20)
    (folder / "images/3_mask.png").write_bytes((other / "images/3_mask.png").read_bytes())
    with pytest.raises(DataError, match=r"3_mask\.png"):
        _decoded(folder, make_task())


def test_the_embedded_federation(make_task: TaskOf) -> None:
    task = make_task(embedded="phantom", label_values={"square": [1, 2]}, channels=1, size=[32, 32])
    source = PhantomSource("site-1", task)
    decoded = decode(task, source, source.entries()[:3])
    assert decoded.images.shape == (3, 1, 32, 32) and 0.2 < decoded.images.max() <= 1 and decoded.targets.any()


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_nothing_to_decode(make_task: TaskOf, make_site: SiteOf, kind: str) -> None:
    task = make_task(kind)
    decoded = decode(task, FileSource(make_site(kind=kind), task), [])
    assert decoded.images.shape == (0, 1, 16, 16) and len(decoded.targets) == 0 and decoded.names == [] == decoded.entries


def test_a_target_at_its_stored_size(make_task: TaskOf, make_site: SiteOf) -> None:
    task = make_task(size=[8, 8])
    source = FileSource(make_site(), task)
    (first, *_) = source.entries()
    target = target_of(task, source, first, source.image(first))
    assert target.shape == (1, 16, 16) and target.sum() == 16
