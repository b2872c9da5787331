"""Who joins a step of DP-SGD: Poisson samples of a site's training patients."""

from collections.abc import Iterator

import numpy as np
import torch

from medflare.data.loading import Batch
from medflare.training.site import Site


def training_patients(site: Site) -> int:
    """How many patients the site trains on, however many images each has."""
    return len(set(site.data.train.patients))


def drawn_patients(site: Site, rate: float, steps: int, random: np.random.Generator) -> Iterator[Batch]:
    """Poisson samples of the training patients, as DP-SGD needs them: a batch may be empty, and nothing in it knows of the rest.

    One image of every drawn patient, itself drawn, so that a patient of many images can move a step no more than one of few.

    Args:
        site: whose patients.
        rate: probability with which a patient joins a batch.
        steps: number of batches.
        random: the source of every draw, augmentation included. DP-SGD counts on nobody else knowing it.

    Raises:
        Aborted: the run was asked to stop.
    """
    rows: dict[str, list[int]] = {}
    for row, patient in enumerate(site.data.train.patients):
        rows.setdefault(patient, []).append(row)
    augmenting = np.random.RandomState(random.bit_generator)  # MONAI's kind of generator on the same stream
    for _ in range(steps):
        joins = random.random(len(rows)) < rate
        chosen = [random.choice(own) for own, join in zip(rows.values(), joins, strict=True) if join]
        batch = site.take("train", torch.tensor(chosen, dtype=torch.long), augmenting)
        yield site.augmented(batch, augmenting) if chosen else batch
