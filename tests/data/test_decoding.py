import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.fixture_types import Edit, SiteOf, TaskOf
from helpers.volume_sites import cube_task, write
from medflare.core.errors import DataError
from medflare.data.datalist import LISTS
from medflare.data.decoding import Decoded, EmbeddedSource, Source, decoded_rows
from medflare.data.loading import load_site_data
from medflare.data.local import CacheSettings
from medflare.tasks.config import TaskConfig, load_task

LPS = np.diag([-1, -1, 1, 1])


def _volumes(folder: Path, shape: tuple[int, int, int] = (16, 16, 5)) -> Path:
    """Two LPS volumes; volume v has intensity 100 v + slice, and foreground on slices 1 and 3."""
    folder.mkdir()
    listed: dict[str, list[dict[str, str]]] = {"training": [], "validation": [], "test": []}
    for number, split in enumerate(listed):
        volume = np.zeros(shape, np.float32) + 100 * number + np.arange(shape[2])
        mask = np.zeros(shape, np.uint8)
        mask[4:8, 4:8, [1, 3]] = 1
        files = {"image": (f"v{number}.nii.gz", volume), "label": (f"m{number}.nii.gz", mask)}
        listed[split].append(
            {kind: write(folder / name, voxels, LPS).name for kind, (name, voxels) in files.items()}
        )
    (folder / "datalist.json").write_text(json.dumps(listed))
    return folder


def _mask(source: Source, number: int = 0) -> np.ndarray:
    entry = source.listed_items()[number]
    return source.mask(entry, source.image(entry))


def _decoded(source: Source, task: TaskConfig, count: int | None = None) -> Decoded:
    return Decoded(list(decoded_rows(task, source, source.listed_items()[:count], {})), {})


def _tensors(decoded: Decoded, task: TaskConfig) -> tuple[Tensor, Tensor]:
    images = decoded.tensors(decoded.rows, "image", task)
    targets = decoded.tensors(decoded.rows, "target", task)
    return images, targets


def test_pictures_and_the_shapes_of_targets(make_site: SiteOf, make_task: TaskOf) -> None:
    decoded = _decoded(Source(make_site(), make_task()), make_task())
    images, targets = _tensors(decoded, make_task())
    assert images.shape == (10, 1, 16, 16) and images.dtype == torch.float32
    assert targets.shape == (10, 16, 16) and targets.dtype == torch.int64
    assert targets.flatten(1).sum(dim=1).tolist() == [16] * 10
    assert [row.name for row in decoded.rows] == [f"{number}.png" for number in range(10)]
    # Picture and mask belong together.
    torch.testing.assert_close((images[:, 0] > 0.55).long(), targets)
    several = make_task(target="multilabel", labels=["a", "b"], label_values={"a": [1], "b": [1]})
    targets = _tensors(_decoded(Source(make_site(name="several"), several), several), several)[1]
    assert targets.shape == (10, 2, 16, 16) and targets.dtype == torch.float32
    shades = make_task("classification")
    source = Source(make_site(kind="classification", name="B"), shades)
    targets = _tensors(_decoded(source, shades), shades)[1]
    assert targets.tolist() == [n % 3 for n in range(10)]


@pytest.mark.parametrize(("keep", "training"), [("all", [0, 1, 2, 3, 4]), ("foreground", [1, 3])])
def test_volumes_become_slices(
    tmp_path: Path, make_task: TaskOf, keep: str, training: list[int]
) -> None:
    raw = {"name": "ScaleIntensityRange", "a_min": 0, "a_max": 1, "b_min": 0, "b_max": 1}
    task = make_task(slices={"axis": 2, "keep": keep}, intensity=raw)
    rows = _decoded(Source(_volumes(tmp_path / "V"), task), task).rows
    kept = []
    for volume in range(3):
        for number in training if volume == 0 else range(5):
            kept.append((volume, number))
    assert [row.name for row in rows] == [f"v{volume}.nii.gz[{number}]" for volume, number in kept]
    assert [row.item_index for row in rows] == [volume for volume, _ in kept]
    assert [row.image[0, 0, 0] for row in rows] == [
        100 * volume + number for volume, number in kept
    ]
    assert [bool(row.target.any()) for row in rows] == [number in (1, 3) for _, number in kept]


def test_training_volumes_without_any_foreground(tmp_path: Path, make_task: TaskOf) -> None:
    folder = _volumes(tmp_path / "V")
    task = make_task(slices={"keep": "foreground"})
    for seed in range(3):  # slices are chosen again where splits are drawn again
        data = load_site_data(
            "V", replace(task, resplit=seed), folder, cache=CacheSettings(str(tmp_path / "cache"))
        )
        assert [len(data.split(name)) for name in ("train", "validation", "test")] == [2, 5, 5]
    write(folder / "m1.nii.gz", np.zeros((16, 16, 5), np.uint8), LPS)
    data = load_site_data("V", task, folder)
    assert [len(data.split(name)) for name in ("train", "validation", "test")] == [2, 5, 5]
    assert set(data.train.patients) == {"v0.nii.gz"} and set(data.test.patients) == {"v2.nii.gz"}
    write(folder / "m0.nii.gz", np.zeros((16, 16, 5), np.uint8), LPS)
    with pytest.raises(DataError, match="training"):
        load_site_data("V", task, folder)


def test_all_slices_of_a_site_without_labels_are_used(tmp_path: Path, make_task: TaskOf) -> None:
    folder = _volumes(tmp_path / "V")
    task = make_task(slices={"keep": "foreground"})
    content = json.loads((folder / "datalist.json").read_text())
    (folder / "datalist.json").write_text(json.dumps({**content, "annotated": []}))
    data = load_site_data("V", task, folder, cache=CacheSettings(str(tmp_path / "cache")))
    assert [len(data.split(name)) for name in ("train", "validation", "test")] == [5, 0, 0]
    for target in data.train.targets:
        assert not target.any()


def test_masks_of_another_size(make_site: SiteOf, make_task: TaskOf, edit: Edit) -> None:
    folder = make_site()
    other = make_site(name="B", side=20)
    edit(
        folder,
        lambda content: content["training"][0].update(
            label=["images/0_mask.png", f"../{other.name}/images/0_mask.png"]
        ),
    )
    source = Source(folder, make_task(target="multilabel", labels=["a", "b"]), [other])
    with pytest.raises(DataError, match=r"B/images/0_mask\.png: the mask is 20 x 20, its image"):
        _mask(source)
    (folder / "images/3_mask.png").write_bytes((other / "images/3_mask.png").read_bytes())
    edit(folder, lambda content: content["training"][0].update(label="images/0_mask.png"))
    with pytest.raises(DataError, match=r"3_mask\.png"):
        _decoded(Source(folder, make_task()), make_task())


def test_the_embedded_federation(make_task: TaskOf) -> None:
    task = make_task(embedded="phantom", label_values={"square": [1, 2]}, channels=1, size=[32, 32])
    source = EmbeddedSource(Path("site-1"), task)
    images, targets = _tensors(_decoded(source, task, 3), task)
    assert images.shape == (3, 1, 32, 32) and 0.2 < images.max() <= 1 and targets.any()
    source = EmbeddedSource(Path("site-1"), load_task("phantom"))
    entries = source.listed_items()
    assert source.listed_splits() == LISTS and {entry.split for entry in entries} == set(LISTS)
    image = source.image(entries[0])
    mask = source.mask(entries[0], image)
    assert (
        image.array.shape == (3, 64, 64)
        and mask.shape == (1, 64, 64)
        and set(np.unique(mask)) <= {0, 1, 2}
    )
    assert {
        entry.label
        for entry in EmbeddedSource(Path("site-1"), load_task("phantom_grades")).listed_items()
    } == {0, 1, 2}
    assert source.state(entries[0]) != EmbeddedSource(Path("site-2"), load_task("phantom")).state(
        entries[0]
    )


def test_the_state_of_files_changes_with_any_of_them(make_site: SiteOf, make_task: TaskOf) -> None:
    folder = make_site()
    for kind, changes in (
        ("segmentation", {"0.png": True, "0_mask.png": True, "1.png": False}),
        ("classification", {"0_mask.png": False}),
    ):
        source = Source(folder, make_task(kind))
        entry = source.listed_items()[0]
        for name, changed in changes.items():
            before = source.state(entry)
            os.utime(folder / "images" / name, ns=(1, len(name)))
            assert (source.state(entry) != before) == changed, (kind, name)
    (folder / "images/0.png").unlink()
    assert source.state(entry)[1] == [[[str(folder / "images/0.png"), None, None]]]


def test_one_file_for_two_channels(make_site: SiteOf, make_task: TaskOf, edit: Edit) -> None:
    folder = make_site()
    task = make_task(channels=["pre", "flair", "post"], missing_channels="zeros")
    (folder / "images/link.png").symlink_to(folder / "images/0.png")
    for again in ("images/../images/0.png", "images/link.png"):
        edit(
            folder,
            lambda content, again=again: content["training"][0].update(
                image=["images/0.png", None, again]
            ),
        )
        source = Source(folder, task)
        with pytest.raises(DataError, match=r"0\.png"):
            source.image(source.listed_items()[0])
    edit(
        folder,
        lambda content: content["training"][0].update(image=["images/0.png", None, "images/1.png"]),
    )
    source = Source(folder, task)
    assert source.image(source.listed_items()[0]).array.shape == (3, 16, 16)


def test_constant_photographs_are_refused(make_site: SiteOf, make_task: TaskOf, edit: Edit) -> None:
    """Not slices of a volume that are files: above the head there is nothing."""
    folder = make_site()
    Image.fromarray(np.full((16, 16), 7, np.uint8)).save(folder / "images/0.png")
    source = Source(folder, make_task())
    assert (source.image(source.listed_items()[0]).array == 7).all()
    task = make_task("classification", channels=["pre", "post"], missing_channels="zeros")
    for other, error in (
        (None, pytest.raises(DataError, match=r"0\.png")),
        ("images/1.png", nullcontext()),
    ):
        edit(
            folder,
            lambda content, other=other: content["training"][0].update(
                image=["images/0.png", other]
            ),
        )
        source = Source(folder, task)
        with error:
            assert source.image(source.listed_items()[0]).array.shape == (2, 16, 16)
    edit(folder, lambda content: content["training"][0].update(image="images/0.png"))
    Image.new("RGB", (16, 16), (9, 8, 7)).save(folder / "images/0.png")
    with pytest.raises(DataError, match=r"0\.png"):
        Source(folder, make_task("classification", channels=3)).image(source.listed_items()[0])


def test_a_patient_without_findings_has_as_many_masks_as_the_others(
    make_site: SiteOf, make_task: TaskOf
) -> None:
    folder = make_site()
    source = Source(folder, make_task(target="multilabel", labels=["a", "b", "c"]))
    entry = source.listed_items()[0]
    for masks in (
        np.zeros((16, 16, 3), np.uint8),
        np.eye(16, dtype=np.uint8)[..., None] * np.ones(3, np.uint8),
    ):
        Image.fromarray(masks).save(entry.masks[0])
        np.testing.assert_array_equal(_mask(source), masks.transpose(2, 0, 1))
    assert _mask(Source(folder, make_task())).shape == (1, 16, 16)
    named = make_task(target="multilabel", labels=["a", "b"], label_values={"a": [1, 2], "b": [2]})
    assert _mask(Source(folder, named)).shape == (1, 16, 16)


def test_the_cell_of_a_sheared_volume_follows_its_tensors(tmp_path: Path) -> None:
    """Lengths and cosines give the distances of the affine, also after the volume was resized."""
    affine = np.array([[-2, 0, 0.5, 0], [0, 1, 0.9, 0], [0, 0, 3, 0], [0, 0, 0, 1]])
    write(tmp_path / "v.nii", np.random.default_rng(0).random((12, 14, 10), np.float32), affine)
    write(tmp_path / "m.nii", np.ones((12, 14, 10), np.uint8), affine)
    listed = {"test": [{"image": "v.nii", "label": "m.nii"}]}
    (tmp_path / "datalist.json").write_text(json.dumps(listed))
    for mode, step in (("patch", (1, 1, 1)), ("resize", (12 / 8, 14 / 8, 10 / 8))):
        task = cube_task(channels=1, image_mode=mode)
        (row,) = _decoded(Source(tmp_path, task), task).rows
        steps = affine[:3, :3] @ np.diag([-1, 1, 1]) * step  # along the task's axes, RAS
        sides = np.linalg.norm(steps, axis=0)
        assert row.spacing is not None and row.spacing[:3] == pytest.approx(tuple(sides))
        for cosine, (a, b) in zip(row.spacing[3:], ((0, 1), (0, 2), (1, 2)), strict=True):
            assert cosine == pytest.approx(steps[:, a] @ steps[:, b] / sides[a] / sides[b])
    spaced = cube_task(channels=1, image_mode="patch", spacing=[1.0, 1.0, 1.0])
    (row,) = _decoded(Source(tmp_path, spaced), spaced).rows
    assert row.spacing == pytest.approx((1, 1, 1)), "resampled: not sheared"
