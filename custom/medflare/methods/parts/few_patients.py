"""Batches of at least a site's `minimum_patients`, for a single step or gradient that leaves the
site: that of fewer would show their images. A site without a minimum takes one batch.

Where images are drawn with replacement, an epoch may have fewer patients.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.data.loading import Batch
from medflare.training.site import Site

_MOST_EPOCHS = 100


def first_batches(site: Site, round: int, purpose: str) -> list[Batch]:
    """As few of the first training batches as have enough patients together; at least one.

    Raises:
        ConfigError: many epochs have too few patients.
    """
    taken: list[Batch] = []
    for epoch in range(_MOST_EPOCHS):
        for batch in site.batches("train", round, purpose, epoch):
            taken.append(batch)
            if _patients(site, taken) >= site.minimum_patients:
                return taken
    raise ConfigError(
        f"site {site.name}: {_MOST_EPOCHS} epochs have images of fewer than "
        f"{site.minimum_patients} patients; take sampling=shuffle"
    )


class LastBatches:
    """As few of the last training batches as have enough patients together; at least one.

    If all together have fewer patients, all are taken: the trained model is of those patients, too.
    """

    def __init__(self, site: Site):
        self._site = site
        self.batches: deque[Batch] = deque()

    def add(self, batch: Batch) -> None:
        """Add a batch, and drop those that are not needed any more."""
        self.batches.append(batch)
        while len(self.batches) > 1:
            others = islice(self.batches, 1, None)
            if _patients(self._site, others) < self._site.minimum_patients:
                break
            self.batches.popleft()


def mean_gradients(
    batches: Collection[Batch], gradients_of: Callable[[Batch], Sequence[Tensor]]
) -> list[Tensor]:
    """The mean over the images of all batches of `gradients_of`, which gives a batch's mean over
    its images.
    """
    images = sum(len(batch.images) for batch in batches)
    total: list[Tensor] = []
    for batch in batches:
        share = len(batch.images) / images
        parts = [share * gradient for gradient in gradients_of(batch)]
        if total:
            parts = [before + part for before, part in zip(total, parts, strict=True)]
        total = parts
    return total


def _patients(site: Site, batches: Iterable[Batch]) -> int:
    patients = site.data.train.patients
    return len({patients[row] for batch in batches for row in batch.index.tolist()})
