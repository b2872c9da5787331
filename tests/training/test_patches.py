import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from helpers.small_tasks import predicted
from helpers.volume_sites import PATCHES, SHAPE, cube_task, make_volumes
from medflare.core.rng import numpy_random_state
from medflare.data.loading import Split
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site
from medflare.training.patches import Patches, Samples, WholeImages, windowed

TASK = load_task(PATCHES)


def _split(task: TaskConfig = TASK, foreground: bool = True) -> Split:
    """A volume that tells where its voxels lie, with one voxel of foreground in a corner, and one smaller than a patch."""
    voxels = torch.arange(math.prod(SHAPE)).reshape(SHAPE)
    mask = torch.zeros(SHAPE, dtype=torch.long)
    mask[0, 0, 0] = foreground
    images = (torch.stack([voxels, -voxels]).float(), torch.ones(2, 4, 9, 5))
    targets = (mask, torch.ones(4, 9, 5, dtype=torch.long))
    return Split(images, targets, ("p", "q"), ("p", "q"), (None, None))


def _samples(
    cutter: WholeImages, data: Split, rows: Tensor, random: np.random.RandomState
) -> Samples:
    return cutter.samples(cutter.read(data, rows), random)


def test_patches_are_of_the_tasks_size_and_hold_foreground_half_of_the_time() -> None:
    data = _split()
    patches = Patches(TASK)
    images, targets = _samples(
        patches, data, torch.zeros(60, dtype=torch.long), numpy_random_state(0, "patches")
    )
    assert (
        images.shape == (60, 2, 8, 8, 8)
        and targets.shape == (60, 8, 8, 8)
        and targets.dtype == torch.long
    )
    assert 20 < sum(target.any().item() for target in targets) < 45
    assert torch.equal(images[:, 0], -images[:, 1]), "channels move together"
    corner = images[targets.flatten(1).any(1)][0]
    assert corner[0, 0, 0, 0] == 0, "image and mask move together"
    again, _ = _samples(
        patches, data, torch.zeros(60, dtype=torch.long), numpy_random_state(0, "patches")
    )
    assert torch.equal(again, images)


def test_small_and_empty_images_give_patches_too() -> None:
    images, targets = _samples(
        Patches(TASK), _split(), torch.tensor([1]), numpy_random_state(0, "patches")
    )
    # Padded with zeros, cut where it is longer.
    assert images.shape == (1, 2, 8, 8, 8) and images[0, 0].sum() == 4 * 8 * 5
    assert torch.equal(targets[0] > 0, images[0, 0] > 0)
    empty, mask = _samples(
        Patches(TASK), _split(foreground=False), torch.tensor([0]), numpy_random_state(0, "patches")
    )
    assert empty.shape == (1, 2, 8, 8, 8) and not mask.any()
    no_images, no_targets = _samples(
        Patches(TASK), _split(), torch.zeros(0, dtype=torch.long), numpy_random_state(0)
    )
    assert (
        no_images.shape == (0, 2, 8, 8, 8)
        and no_targets.shape == (0, 8, 8, 8)
        and no_targets.dtype == torch.long
    )


def test_windows_cover_an_image_in_order() -> None:
    batches = list(Patches(TASK).in_order(_split(), size=3))
    rows = torch.cat([row for row, _ in batches])
    assert rows.tolist() == [0] * 8 + [1] * 2 and [len(row) for row, _ in batches] == [3, 3, 3, 1]
    seen = torch.cat([images[:, 0].flatten() for _, (images, _) in batches])
    assert set(range(math.prod(SHAPE))) <= set(seen.long().tolist())
    for _, (_, targets) in batches:
        assert targets.shape[1:] == (8, 8, 8)


def test_labels_of_their_own_channels_are_cut_with_their_images() -> None:
    task = load_task({**PATCHES, "target": "multilabel", "labels": ["a", "b"]})
    target = torch.zeros(2, *SHAPE)
    target[0, 0, 0, 0] = 1  # the second label is absent
    data = Split((torch.ones(2, *SHAPE),), (target,), ("p",), ("p",), (None,))
    _, drawn = _samples(
        Patches(task), data, torch.zeros(20, dtype=torch.long), numpy_random_state(0)
    )
    assert drawn.shape == (20, 2, 8, 8, 8) and drawn.dtype == torch.float32
    assert 4 < drawn[:, 0].flatten(1).any(1).sum() < 17
    _, (_, windows) = next(Patches(task).in_order(data, 2))
    assert windows.shape == (2, 2, 8, 8, 8) and windows.sum() == 1


def test_the_window_answers_as_the_predictor_does_where_it_looks_at_voxels_alone() -> None:
    image = torch.rand(1, 2, 11, 9, 5)

    def voxelwise(windows: Tensor) -> Tensor:
        assert windows.shape[2:] == (8, 8, 8) and len(windows) <= 3
        return windows[:, :1] * 2

    torch.testing.assert_close(windowed(voxelwise, TASK, 3)(image), image[:, :1] * 2)
    assert windowed(voxelwise, cube_task(), 3) is voxelwise


def test_a_site_trains_on_patches_and_predicts_whole_volumes(tmp_path: Path) -> None:
    site = open_site("A", TASK, data_root=make_volumes(tmp_path / "A"))
    batches = list(site.batches("train", 0, "model"))
    assert [len(batch.images) for batch in batches] == [2, 2, 2], "three volumes, two patches each"
    assert sorted(torch.cat([batch.index for batch in batches]).tolist()) == [0, 0, 1, 1, 2, 2]
    again = list(site.batches("train", 0, "model"))
    for first, second in zip(batches, again, strict=True):
        assert torch.equal(first.images, second.images)
    other = next(site.batches("train", 1, "model"))
    assert not torch.equal(other.images, batches[0].images)
    probabilities = predicted(site, lambda images: images[:, :1], "test")
    assert [tuple(p.shape) for p in probabilities] == [(1, 12, 14, 11), (1, 12, 14, 10)]
    scores = site.score(lambda images: (images[:, :1] > 0.4).float(), "test")
    assert scores.values == {"dice": 1.0, "iou": 1.0, "hd95_mm": 0.0, "surface_dice": 1.0}
