"""A site's data: training, validation and test split, and batches of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images, Spacing


class Samples(Protocol):
    """The images of a split with their targets and patients, wherever they are kept. Nobody outside this room asks for more."""

    @property
    def targets(self) -> Images:
        """Targets of all images, by row."""

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


class _InMemory:
    """What every split in memory can do."""

    images: Any
    names: tuple[str, ...]

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
    patients: tuple[str, ...]
    names: tuple[str, ...]
    spacings: tuple[Spacing | None, ...] = ()

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
    patients: tuple[str, ...]
    names: tuple[str, ...]
    spacings: tuple[Spacing | None, ...] = ()

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets of some rows that have one size.

        Args:
            rows: long (B,).
        """
        chosen = rows.tolist()
        return torch.stack([self.images[row] for row in chosen]), torch.stack([self.targets[row] for row in chosen])


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
    all_images = tuple(part.image(row) for part in parts for row in range(len(part)))
    return OneByOne(all_images, tuple(target for part in parts for target in part.targets), patients, files, spacings)


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
    """The three splits and what is worth knowing about them (`notes`, one line each; `left_out`, one line for each unusable image)."""

    train: Samples
    validation: Samples
    test: Samples
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

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


def class_counts(targets: Images, task: TaskConfig) -> Tensor:
    """Images (classification) or pixels (segmentation) of every class, int64 (len(task.classes),); multilabel: positives.

    Args:
        targets: as in `Samples`.
        task: gives classes and target.
    """
    if not isinstance(targets, Tensor):
        counts = [class_counts(target[None], task) for target in targets]
        return torch.stack(counts).sum(dim=0) if counts else torch.zeros(len(task.classes), dtype=torch.int64)
    if task.target == "multilabel":
        return targets.transpose(0, 1).flatten(1).sum(dim=1).to(torch.int64)
    return torch.bincount(targets.flatten(), minlength=len(task.classes))
