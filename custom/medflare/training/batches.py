"""Which images of a split go through a network together, in which order and how often, and read before they are needed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import torch
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.core.rng import Key, torch_generator
from medflare.data.splits import Split
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images

_AHEAD: Final = 2  # batches that are read, or waiting, while one is worked with
T = TypeVar("T")


def in_order(count: int, size: int) -> list[Tensor]:
    """The rows of `count` images in batches of `size`, long (<= size,) each."""
    return _portions(torch.arange(count), size)


def samples_in(count: int, size: int) -> int:
    """Samples in all batches of `in_random_order`, none left out: `count`, but the only image fills a batch twice."""
    return 2 if count == 1 and size > 1 else count


def in_random_order(count: int, size: int, drop_last: bool, seed: int, *keys: Key, weights: Tensor | None = None) -> list[Tensor]:
    """The rows of `count` images, in an order drawn by (seed, keys), in batches of `size` that a network can train on.

    A last batch of one image joins the batch before it, and the only image fills a batch twice: batch normalisation cannot
    train on a single sample. `size` 1 is taken literally.

    Args:
        count: images of the split.
        size: images in a batch.
        drop_last: whether a last batch that is not full is left out (unless it is the only one).
        seed: of the run.
        keys: what sets this order apart.
        weights: (count,), of each image in a draw of `count` with replacement; None: every image once.

    Returns:
        long (batch,) each; none where there are no images.
    """
    generator = torch_generator(seed, *keys)
    if weights is None or not count:
        order = torch.randperm(count, generator=generator)
    else:
        order = torch.multinomial(weights, count, replacement=True, generator=generator)
    portions = _portions(order, size)
    if drop_last and len(portions) > 1 and len(portions[-1]) < size:
        return portions[:-1]
    if size > 1 and portions and len(portions[-1]) == 1:
        lonely = portions.pop()
        portions.append(torch.cat([portions.pop(), lonely]) if portions else lonely.repeat(samples_in(1, size)))
    return portions


def _portions(order: Tensor, size: int) -> list[Tensor]:
    return list(order.split(size)) if len(order) else []


def sampling_groups(task: TaskConfig) -> tuple[str, ...]:
    """Names of the groups that the weights of a task's sampling are for.

    Segmentation: images without foreground and images with it. Classification: `task.classes`, and for a multilabel task the images
    without any label before them.
    """
    if task.kind == "segmentation":
        return ("without foreground", "with foreground")
    return ("no label", *task.labels) if task.target == "multilabel" else task.classes


def drawing_weights(task: TaskConfig, targets: Images) -> Tensor | None:
    """The weight of every image in a draw with replacement, float64 (N,); None where each image comes once.

    A group's weight is shared evenly by its images, so that groups of one weight are drawn equally often. An image with several labels has
    the sum of its shares. A group without images is left out.

    Args:
        task: gives sampling, kind and target.
        targets: of the training images, as in `data.splits.Split`.

    Raises:
        ConfigError: other than a weight for each group, or 0 for every group that has images.
    """
    if task.sampling.name == "shuffle":
        return None
    groups = sampling_groups(task)
    weights = torch.tensor(task.sampling.weights or [1.0] * len(groups), dtype=torch.float64)
    if len(weights) != len(groups):
        raise ConfigError(f"task {task.name}: sampling.weights must be {len(groups)} numbers ({', '.join(groups)}), got {len(weights)}")
    members = _members(task, targets).double()
    found = members @ (weights / members.sum(dim=0).clamp(min=1))
    if len(found) and not bool(found.sum() > 0):
        raise ConfigError(f"task {task.name}: sampling.weights are 0 for every image that this site has; give one of its groups a weight")
    return found


def _members(task: TaskConfig, targets: Images) -> Tensor:
    """Which images are in which group, bool (N, groups)."""
    if task.kind == "segmentation":
        found = torch.tensor([bool(target.any()) for target in targets], dtype=torch.bool)
        return torch.stack([~found, found], dim=1)
    targets = targets if isinstance(targets, Tensor) else torch.stack(list(targets))  # of images that have sizes of their own
    if task.target == "multilabel":
        labels = targets.reshape(len(targets), -1) > 0
        return torch.cat([~labels.any(dim=1, keepdim=True), labels], dim=1)
    return targets.reshape(-1, 1) == torch.arange(len(task.classes))


def read_ahead(data: Split, portions: Iterable[Tensor], read: Callable[[Tensor], T]) -> Iterator[tuple[Tensor, T]]:
    """Batches of rows with what was read of them, in order; from a disk by a thread, while the caller works with those before.

    Reading draws nothing, so that what is read does not depend on when it is.

    Args:
        data: the split.
        portions: rows, long (B,) each.
        read: rows -> what the caller needs of them.
    """
    if data.in_memory:
        yield from ((rows, read(rows)) for rows in portions)
        return
    waiting: deque[tuple[Tensor, Future[T]]] = deque()
    reader = ThreadPoolExecutor(1, "read-ahead")

    def first() -> tuple[Tensor, T]:
        rows, found = waiting.popleft()
        return rows, found.result()

    try:
        for rows in portions:
            waiting.append((rows, reader.submit(read, rows)))
            if len(waiting) > _AHEAD:
                yield first()
        while waiting:
            yield first()
    finally:  # the caller may have had enough, or be asked to stop
        reader.shutdown(cancel_futures=True)
