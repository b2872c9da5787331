"""Poisson samples of a site's training patients."""

from typing import Any

import numpy as np
import pytest
import torch

from helpers.picture_sites import SEGMENTATION, numbered_split
from medflare.core.errors import Aborted
from medflare.data.loading import SiteData, Split
from medflare.privacy.sampling import drawn_patients, training_patients
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.site import Site

FLIP = {"name": "RandFlip", "prob": 0.5, "spatial_axis": 0}


def task(**settings: Any) -> TaskConfig:
    return load_task({**SEGMENTATION, **settings})


class TestDrawnPatients:
    def site(self, task: TaskConfig, images: int = 5, patients: int = 8) -> Site:
        """Patient k has the images k, k + 8, k + 16, ...; the last half of the patients has one image less."""
        split = numbered_split(images * patients - patients // 2, task)
        split = Split(split.images, split.targets, tuple(f"p{n % patients}" for n in range(len(split))), split.names)
        return Site("A", task, SiteData(split, split, split), 0)

    def test_each_patient_joins_independently_by_one_image(self) -> None:
        site = self.site(task())
        assert training_patients(site) == 8
        drawn = [batch.index % 8 for batch in drawn_patients(site, 0.3, 2000, np.random.default_rng(1))]
        assert all(len(set(rows.tolist())) == len(rows) for rows in drawn), "nobody twice"
        sizes = torch.tensor([float(len(rows)) for rows in drawn])
        assert sizes.mean().item() == pytest.approx(8 * 0.3, abs=0.1)
        assert sizes.var().item() == pytest.approx(8 * 0.3 * 0.7, abs=0.2), "a binomial number of them"
        shares = torch.bincount(torch.cat(drawn), minlength=8) / 2000
        assert shares.sub(0.3).abs().max() < 0.05, "patients with fewer images are drawn as often"

    def test_every_image_of_a_patient_has_its_turn(self) -> None:
        site = self.site(task(), images=3, patients=2)
        rows = torch.cat([batch.index for batch in drawn_patients(site, 1.0, 600, np.random.default_rng(2))])
        shares = torch.bincount(rows) / 600
        assert shares[:5].tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 3, 1 / 2, 1 / 3], abs=0.07)

    def test_images_go_with_their_masks_and_their_augmentation(self) -> None:
        site = self.site(task(augment=[FLIP]))
        (batch,) = drawn_patients(site, 1.0, 1, np.random.default_rng(3))
        assert batch.images[:, 0, 0, 0].tolist() == batch.index.tolist()
        upright = site.data.train.targets[batch.index]
        flipped = [torch.equal(mask, plain.flip(0)) for mask, plain in zip(batch.targets, upright, strict=True)]
        assert 0 < sum(flipped) < 8
        assert all(flip or torch.equal(mask, plain) for flip, mask, plain in zip(flipped, batch.targets, upright, strict=True))

    def test_nobody_and_an_abort(self) -> None:
        site = self.site(task(augment=[FLIP]))
        assert [batch.images.shape for batch in drawn_patients(site, 0.0, 2, np.random.default_rng())] == [(0, 1, 16, 16)] * 2
        site.abort = lambda: True
        with pytest.raises(Aborted):
            next(drawn_patients(site, 0.5, 1, np.random.default_rng()))

    def test_what_is_drawn_is_a_function_of_the_generator(self) -> None:
        site = self.site(task(augment=[FLIP]))

        def drawn(seed: int) -> torch.Tensor:
            return torch.cat([batch.index for batch in drawn_patients(site, 0.5, 5, np.random.default_rng(seed))])

        assert drawn(1).tolist() == drawn(1).tolist() != drawn(2).tolist()
