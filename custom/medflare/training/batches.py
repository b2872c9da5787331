"""The order of a split's images, their batches and sampling weights, and reading ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.core.rng import Key, torch_generator
from medflare.data.loading import Split
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images

_AHEAD = 2  # batches that are read ahead of the one in use
T = TypeVar("T")


def rows_of_patients(patients: Sequence[str]) -> dict[str, list[int]]:
    """Patient -> rows of its images, in the order of the first ones."""
    rows: dict[str, list[int]] = {}
    for row, patient in enumerate(patients):
        rows.setdefault(patient, []).append(row)
    return rows


def in_order(count: int, size: int) -> list[Tensor]:
    """The rows of `count` images in batches of `size`, long (<= size,) each."""
    if not count:
        return []
    return list(torch.arange(count).split(size))


def in_random_order(
    count: int, size: int, seed: int, *keys: Key, weights: Tensor | None = None
) -> list[Tensor]:
    """The rows of `count` images in an order drawn by (seed, keys), in batches of `size`.

    Batch normalization cannot train on one sample: a last batch of one image joins the batch before
    it, and a single image fills a batch twice. `size` 1 is taken literally.

    Args:
        weights: (count,), of each image in a draw of `count` with replacement; None: every image
            once.

    Returns:
        long (batch,) each; none where there are no images.
    """
    if not count:
        return []
    generator = torch_generator(seed, *keys)
    if weights is None:
        order = torch.randperm(count, generator=generator)
    else:
        order = torch.multinomial(weights, count, replacement=True, generator=generator)
    batches = list(order.split(size))
    if size > 1 and len(batches[-1]) == 1:
        last = batches.pop()
        if not batches:
            return [last.repeat(2)]  # see `epochs.samples_of_pass`
        batches.append(torch.cat([batches.pop(), last]))
    return batches


def sampling_weights(task: TaskConfig, targets: Images) -> Tensor | None:
    """The weight of every image in a draw with replacement, float64 (N,); None where each image
    comes once.

    A group's weight is divided evenly among its images; an image in several groups has the sum of
    its parts. Groups without images are ignored.

    Raises:
        ConfigError: the number of weights differs from that of the groups.
    """
    if task.sampling.name == "shuffle":
        return None
    groups, grouped = _groups(task, targets)
    members = grouped.double()
    weights = torch.tensor(task.sampling.weights or [1.0] * len(groups), dtype=torch.float64)
    if len(weights) != len(groups):
        raise ConfigError(
            f"task {task.name}: sampling.weights must be {len(groups)} numbers "
            f"({', '.join(groups)}), got {len(weights)}"
        )
    return members @ (weights / members.sum(dim=0).clamp(min=1))


def drawn_counts(task: TaskConfig, counts: Sequence[int]) -> Tensor:
    """Images of each class as the task's sampling draws them in an epoch, float64 (C,).

    Args:
        counts: a site's images of each class (C,); each image has one class.

    Examples:
        >>> from types import SimpleNamespace
        >>> sampling = SimpleNamespace(name="balanced", weights=[])
        >>> drawn_counts(SimpleNamespace(sampling=sampling), [9, 3, 0]).tolist()
        [6.0, 6.0, 0.0]
    """
    images = torch.tensor(counts, dtype=torch.float64)
    if task.sampling.name == "shuffle":
        return images
    drawn = (images > 0).double()
    if task.sampling.weights:
        drawn *= torch.tensor(task.sampling.weights, dtype=torch.float64)
    return images.sum() * drawn / drawn.sum().clamp(min=1e-12)


def check_drawn(task: TaskConfig, weights: Tensor | None) -> None:
    """Raise ConfigError if no image is drawn, since all groups that have images have weight 0.

    It is not called where a site is opened, but after `check_used_images`: the answer tells whether
    the site has a class.
    """
    if weights is not None and len(weights) and not weights.sum() > 0:
        raise ConfigError(
            f"task {task.name}: sampling.weights are 0 for every image that this site has; "
            "give one of its groups a weight"
        )


def _groups(task: TaskConfig, targets: Images) -> tuple[tuple[str, ...], Tensor]:
    """The names of the groups of `TaskConfig.sampling["weights"]`, and which images are in which
    group, bool (N, groups).
    """
    if task.kind == "segmentation":
        foreground = torch.tensor([bool(target.any()) for target in targets], dtype=torch.bool)
        grouped = torch.stack([~foreground, foreground], dim=1)
        return ("without foreground", "with foreground"), grouped
    if not isinstance(targets, Tensor):
        targets = torch.stack(list(targets))
    if task.target == "multilabel":
        labels = targets.reshape(len(targets), -1) > 0
        without = ~labels.any(dim=1, keepdim=True)
        return ("no label", *task.labels), torch.cat([without, labels], dim=1)
    return task.classes, targets.reshape(-1, 1) == torch.arange(len(task.classes))


def read_ahead(
    data: Split, batches: Iterable[Tensor], read: Callable[[Tensor], T]
) -> Iterator[tuple[Tensor, T]]:
    """Batches of rows with what `read` returns for them, in order; a thread reads images on disk,
    or to be copied to a GPU, ahead of their use.

    A thread replaces the workers of torch's DataLoader: those are processes, whose start for every
    epoch takes longer than small epochs and which must not be forked from the threads of FLARE.

    Args:
        batches: rows, long (B,) each.
        read: rows -> images; draws no random numbers.
    """
    to_gpu = torch.cuda.is_initialized() and not data.on_gpu
    if data.in_memory and not to_gpu:
        for rows in batches:
            yield rows, read(rows)
        return

    def load(rows: Tensor) -> Any:
        """Whole images and targets in pinned memory, from which the copy to a GPU does not wait;
        images to be cut as they are.
        """
        batch: Any = read(rows)
        if to_gpu and isinstance(batch, tuple):
            return tuple(part.pin_memory() for part in batch)
        return batch

    waiting: deque[tuple[Tensor, Future[T]]] = deque()
    reader = ThreadPoolExecutor(1, "read-ahead")
    try:
        for rows in batches:
            waiting.append((rows, reader.submit(load, rows)))
            if len(waiting) > _AHEAD:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:  # also when the caller stops early
        reader.shutdown(cancel_futures=True)
