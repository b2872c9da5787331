"""A site's data: training, validation and test split, and batches of them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from medflare.data.cache.shards import Shards
from medflare.data.targets import Targets
from medflare.tasks.metrics import Images, Spacing


class Samples(Protocol):
    """The images of a split with their targets and patients, wherever they are kept. Nobody outside this room asks for more."""

    @property
    def in_memory(self) -> bool:
        """Whether images are at hand at once; others are worth reading ahead, see `sites.ahead`."""

    @property
    def targets(self) -> Images:
        """Targets of all images, by row: a tensor, or a sequence that may read each of them when it is asked for."""

    @property
    def patients(self) -> tuple[str, ...]:
        """Patient of every image."""

    @property
    def names(self) -> tuple[str, ...]:
        """File of every image; slices of a volume end in "[number]"."""

    @property
    def spacings(self) -> tuple[Spacing | None, ...]:
        """Of every volume, millimetres between the voxels of `image`, None where unknown; none at all for pictures."""

    def __len__(self) -> int: ...

    def image(self, row: int) -> Tensor:
        """One image, float32 (C, ...)."""

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, ...) and targets (B, ...) of some rows, long (B,), that have one size."""


@dataclass(frozen=True)
class _InMemory:
    """What every split in memory has and can do."""

    in_memory: ClassVar[bool] = True
    images: Any
    targets: Any
    patients: tuple[str, ...]
    names: tuple[str, ...]
    spacings: tuple[Spacing | None, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def image(self, row: int) -> Tensor:
        """One image, float32 (C, ...).

        Args:
            row: in the split.
        """
        return self.images[row]


@dataclass(frozen=True)
class Split(_InMemory):
    """One split in memory, of images of one size.

    Attributes:
        images: float32 (N, C, H, W), ready for the network.
        targets: segmentation long (N, H, W), multilabel float (N, C, H, W); classification long (N,), multilabel float (N, C).
        patients: patient of every image.
        names: file of every image; slices of a volume end in "[number]".
        spacings: see `Samples`.
    """

    images: Tensor
    targets: Tensor

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets of some rows.

        Args:
            rows: long (B,).
        """
        return self.images[rows], self.targets[rows]


@dataclass(frozen=True)
class OneByOne(_InMemory):
    """One split in memory, of images that have sizes of their own.

    Attributes:
        images: float32 (C, ...) each.
        targets: of each, as a row of `Split.targets`.
        patients, names, spacings: see `Samples`.
    """

    images: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets of some rows that have one size.

        Args:
            rows: long (B,).
        """
        return _stacked(self, rows)


@dataclass(frozen=True)
class OnDisk:
    """One split on disk, of images of one size or of sizes of their own, which are read when they are asked for.

    Attributes:
        shards: images and targets of the whole site.
        rows: of the split, in `shards`.
        labels: of the split's images, as `Split.targets`; None for masks, which are on disk as well.
        patients, names, spacings: see `Samples`.
    """

    in_memory: ClassVar[bool] = False
    shards: Shards
    rows: tuple[int, ...]
    labels: Tensor | None
    patients: tuple[str, ...]
    names: tuple[str, ...]
    spacings: tuple[Spacing | None, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def targets(self) -> Images:
        """Labels as a tensor (N, ...), masks as a sequence that reads them one by one."""
        if self.labels is not None:
            return self.labels
        return Targets(len(self), lambda row: self.shards.targets([self.rows[row]])[0], self.shards.counts[list(self.rows)])

    def image(self, row: int) -> Tensor:
        """One image, float32 (C, ...).

        Args:
            row: in the split.
        """
        return self.shards.images([self.rows[row]])[0]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets of some rows that have one size.

        Args:
            rows: long (B,).
        """
        chosen = [self.rows[row] for row in rows.tolist() or [0]]  # of none, the size is that of the first
        targets = self.shards.targets(chosen) if self.labels is None else self.labels[rows]
        return self.shards.images(chosen)[: len(rows)], targets[: len(rows)]


@dataclass(frozen=True)
class Joined:
    """Several splits as one, each where it is.

    Attributes:
        parts: the splits.
        patients, names, spacings: see `Samples`.
    """

    parts: tuple[Samples, ...]
    patients: tuple[str, ...]
    names: tuple[str, ...]
    spacings: tuple[Spacing | None, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def in_memory(self) -> bool:
        """Whether all of them are."""
        return all(part.in_memory for part in self.parts)

    @cached_property
    def targets(self) -> Images:
        """A sequence that reads them one by one."""
        return Targets(len(self), self._target)

    def image(self, row: int) -> Tensor:
        """One image, float32 (C, ...).

        Args:
            row: in all of them together.
        """
        part, own = self._found(row)
        return part.image(own)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets of some rows that have one size.

        Args:
            rows: long (B,).
        """
        return _stacked(self, rows)

    def _target(self, row: int) -> Tensor:
        part, own = self._found(row)
        return part.targets[own]

    def _found(self, row: int) -> tuple[Samples, int]:
        """The part of a row, and its row there."""
        number = bisect_right(self._ends, row)
        return self.parts[number], row - (self._ends[number - 1] if number else 0)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(part) for part in self.parts))


def _stacked(split: Samples, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`take` of a split that has its images one by one."""
    chosen = rows.tolist() or [0]  # of none, the size is that of the first
    images, targets = torch.stack([split.image(row) for row in chosen]), torch.stack([split.targets[row] for row in chosen])
    return images[: len(rows)], targets[: len(rows)]


def joined(parts: Sequence[Samples], names: Sequence[str]) -> Samples:
    """Several splits as one.

    Args:
        parts: of one task.
        names: of the parts; set their patients and files apart.
    """
    patients = tuple(f"{name}/{patient}" for name, part in zip(names, parts, strict=True) for patient in part.patients)
    files = tuple(f"{name}/{file}" for name, part in zip(names, parts, strict=True) for file in part.names)
    spacings = tuple(spacing for part in parts for spacing in part.spacings)
    stacked = [part for part in parts if isinstance(part, Split)]
    if len(stacked) == len(parts):
        images, targets = (torch.cat([getattr(part, field) for part in stacked]) for field in ("images", "targets"))
        return Split(images, targets, patients, files, spacings)
    return Joined(tuple(parts), patients, files, spacings)


def middle_slice(image: Tensor) -> Tensor:
    """A picture (..., H, W): the image itself (C, H, W), or what lies in the middle of the third axis of a volume (C, X, Y, Z).

    Args:
        image: of a split.

    Examples:
        >>> middle_slice(torch.arange(3.0).reshape(1, 1, 1, 3))
        tensor([[[1.]]])
    """
    return image if image.ndim == 3 else image[..., image.shape[-1] // 2]


class Batch(NamedTuple):
    """Images and targets on the site's device, and their rows in the split (on the CPU)."""

    images: Tensor
    targets: Tensor
    index: Tensor  # type: ignore[assignment]  # the name hides tuple.index, which nobody needs of a batch


@dataclass(frozen=True)
class SiteData:
    """The three splits and what is worth knowing about them.

    Attributes:
        notes: one line each.
        left_out: one line for each unusable image.
        annotated: the structures that the site annotated; None: it does not say, and all are taken for annotated.
        acquired: float64 (N, ...), `data.acquisition.Acquisition.row` of every training file; none where nobody looked.
        absent: of a site that does not say so, what is in none of its training masks, one line each with the remedy.
    """

    train: Samples
    validation: Samples
    test: Samples
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    annotated: tuple[str, ...] | None = None
    absent: tuple[str, ...] = ()
    acquired: Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    def split(self, name: str) -> Samples:
        """A split by name.

        Args:
            name: "train" (or "training"), "validation", "test".

        Raises:
            KeyError: another name.
        """
        names = {"train": self.train, "training": self.train, "validation": self.validation, "test": self.test}
        if name not in names:
            raise KeyError(f"no split {name!r}; there are train, validation and test")
        return names[name]
