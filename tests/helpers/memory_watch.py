"""A split that notes how many images, masks and predictions are in memory while it is read."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from medflare.training.site import Site

SIDE = 16  # from which the last two sides tell a tensor of pixels from weights


@dataclass
class Watched:
    """Images of SIDE x SIDE pixels, copied whenever they are asked for."""

    samples: Any
    most: float = (
        0.0  # images, masks or predictions that were alive at once when more were asked for
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.samples, name)

    def __len__(self) -> int:
        return len(self.samples)

    def image(self, row: int) -> Tensor:
        self._note()
        return cast(Tensor, self.samples.images[row].clone())

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self._note()
        images, targets = self.samples.take(rows)
        return images.clone(), targets.clone()

    def _note(self) -> None:
        tensors = [
            thing
            for thing in gc.get_objects()
            if type(thing) is Tensor and thing.device.type == "cpu"
        ]
        storages = {
            one.untyped_storage().data_ptr(): one
            for one in tensors
            if one.ndim >= 3 and min(one.shape[-2:]) >= SIDE
        }
        elements = sum(
            one.untyped_storage().nbytes() // one.element_size() for one in storages.values()
        )
        self.most = max(self.most, elements / SIDE**2)


@contextmanager
def watched(site: Site, split: str) -> Iterator[tuple[Site, Watched]]:
    """The site with one of its splits watched; what there is already does not count."""
    actual = Watched(site.data.split(split))
    watched_split: dict[str, Any] = {split: actual}
    data = replace(site.data, **watched_split)
    gc.collect()
    gc.freeze()
    try:
        yield Site(site.name, site.task, data, site.seed, computing=site.computing), actual
    finally:
        gc.unfreeze()
