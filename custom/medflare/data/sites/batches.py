"""Which images of a split go through a network together, and in which order."""

import torch
from torch import Tensor

from medflare.core.rng import Key, torch_generator


def in_order(count: int, size: int) -> list[Tensor]:
    """The rows of `count` images in batches of `size`, long (<= size,) each."""
    return _portions(torch.arange(count), size)


def samples_in(count: int, size: int) -> int:
    """Samples in all batches of `in_random_order`, none left out: `count`, but the only image fills a batch twice.

    Args:
        count: images of the split.
        size: images in a batch.
    """
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
