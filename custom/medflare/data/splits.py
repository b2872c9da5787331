"""A site's data: training, validation and test split, and batches of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from medflare.data.targets import LazyTensors
from medflare.tasks.metrics import Images, Spacing


@dataclass(frozen=True, eq=False)
class Split(Dataset[tuple[Tensor, Tensor]]):
    """The images of a split with their targets and patients, in memory or on disk.

    Attributes:
        images: float32 (N, C, H, W), ready for the network; or a sequence of (C, ...) where sizes differ or images are read when asked for.
        targets: segmentation long (N, H, W), multilabel float (N, C, H, W); classification long (N,), multilabel float (N, C); or a
            sequence likewise.
        patients: patient of every image.
        names: file of every image; slices of a volume end in "[number]".
        spacings: of every volume, millimetres between its voxels, None where unknown; none at all for pictures.
    """

    images: Images
    targets: Images
    patients: tuple[str, ...]
    names: tuple[str, ...]
    spacings: tuple[Spacing | None, ...] = ()

    @property
    def in_memory(self) -> bool:
        """Whether images are at hand at once; others are worth reading ahead, see `sites.batches.read_ahead`."""
        parts = self.images.datasets if isinstance(self.images, ConcatDataset) else [self.images]
        return not any(isinstance(part, LazyTensors) for part in parts)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.images[row], self.targets[row]

    def image(self, row: int) -> Tensor:
        """One image, float32 (C, ...)."""
        return self.images[row]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, ...) and targets (B, ...) of some rows, long (B,), that have one size."""
        return _rows(self.images, rows), _rows(self.targets, rows)


def _rows(tensors: Images, rows: Tensor) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors[rows]
    return torch.stack([tensors[row] for row in rows.tolist() or [0]])[: len(rows)]  # of none, the size is that of the first


def joined(parts: Sequence[Split], names: Sequence[str]) -> Split:
    """Several splits of one task as one; `names` of the parts set their patients and files apart."""
    patients = tuple(f"{name}/{patient}" for name, part in zip(names, parts, strict=True) for patient in part.patients)
    files = tuple(f"{name}/{file}" for name, part in zip(names, parts, strict=True) for file in part.names)
    spacings = tuple(spacing for part in parts for spacing in part.spacings)
    images, targets = (_joined([getattr(part, name) for part in parts]) for name in ("images", "targets"))
    return Split(images, targets, patients, files, spacings)


def _joined(parts: list[Images]) -> Images:
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    return ConcatDataset(parts)


def middle_slice(image: Tensor) -> Tensor:
    """A picture (..., H, W): the image itself (C, H, W), or what lies in the middle of the third axis of a volume (C, X, Y, Z).

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

    train: Split
    validation: Split
    test: Split
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    annotated: tuple[str, ...] | None = None
    absent: tuple[str, ...] = ()
    acquired: Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    def split(self, name: str) -> Split:
        """A split by name: "train" (or "training"), "validation", "test".

        Raises:
            KeyError: another name.
        """
        names = {"train": self.train, "training": self.train, "validation": self.validation, "test": self.test}
        if name not in names:
            raise KeyError(f"no split {name!r}; there are train, validation and test")
        return names[name]
