"""A site's data in memory: training, validation and test split, and batches of them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medflare.tasks.config import TaskConfig


@dataclass(frozen=True)
class Split:
    """One split in memory.

    Attributes:
        images: float32 (N, C, H, W), ready for the network.
        targets: segmentation long (N, H, W), multilabel float (N, C, H, W); classification long (N,), multilabel float (N, C).
        patients: patient of every image.
        names: file of every image; slices of a volume end in "[number]".
    """

    images: Tensor
    targets: Tensor
    patients: tuple[str, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)


class Batch(NamedTuple):
    """Images and targets on the site's device, and their rows in the split (on the CPU)."""

    images: Tensor
    targets: Tensor
    index: Tensor  # type: ignore[assignment]  # the name hides tuple.index, which nobody needs of a batch


@dataclass(frozen=True)
class SiteData:
    """The three splits and what is worth knowing about them (`notes`, one line each)."""

    train: Split
    validation: Split
    test: Split
    notes: tuple[str, ...] = ()

    def split(self, name: str) -> Split:
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


def class_counts(targets: Tensor, task: TaskConfig) -> Tensor:
    """Images (classification) or pixels (segmentation) of every class, int64 (len(task.classes),); multilabel: positives.

    Args:
        targets: as in `Split`.
        task: gives classes and target.
    """
    if task.target == "multilabel":
        return targets.transpose(0, 1).flatten(1).sum(dim=1).to(torch.int64)
    return torch.bincount(targets.flatten(), minlength=len(task.classes))
