"""The gate of test-time routing: which states may be kept, and in what words a refused one is reported.

The unsupervised loss alone chose a state with an empty mask in one run of twelve (docs/results.md). A state is a candidate only where its
predictions still tell as much as those of the start, agree with them, and cover a plausible share of the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medflare.methods.iop_fl.formulas import agreeing, all_classes, class_shares, entropy_loss, entropy_of
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import foreground

Range = tuple[float, float]
_TELLS = 1e-6  # nats; what is below is next to nothing, or rounding


@dataclass(frozen=True)
class Look:
    """What there is to say of a state by all images together.

    Attributes:
        loss: the test-time loss.
        information: mutual information of pixel and prediction, in nats, at least 0.
        agreement: with the masks, or classes, of the start; see `formulas.agreeing`.
        shares: soft share of every foreground class; none in classification.
    """

    loss: float
    information: float
    agreement: float
    shares: tuple[float, ...]


class Gathering:
    """Collects a `Look` batch by batch."""

    def __init__(self, task: TaskConfig):
        self.task = task
        self._count = 0
        self._sums = torch.zeros(2, dtype=torch.float64)  # loss and entropy, each times the images
        self._shares: Tensor | float = 0.0
        self._same, self._total = 0, 0  # see `agreeing`

    def add(self, loss: Tensor, p: Tensor, start: Tensor) -> None:
        """Take in a batch."""
        every = all_classes(p, self.task.target).double()  # a difference of entropies is no more than what they are rounded to
        self._count += len(p)
        self._sums += len(p) * torch.stack([loss.double(), entropy_loss(every)]).cpu()
        self._shares = self._shares + len(p) * class_shares(every).cpu()
        same, total = agreeing(*(_decided(one, self.task) for one in (p, start)))
        self._same, self._total = self._same + same, self._total + total

    def look(self) -> Look:
        """What all batches say together; the sum of the classes' entropies is that of one yes-or-no question where there are several."""
        shares = torch.as_tensor(self._shares / self._count)
        loss, entropy = (self._sums / self._count).tolist()
        positive = shares[1:] if self.task.target == "multiclass" else shares[len(shares) // 2 :]
        covered = tuple(positive.tolist()) if self.task.kind == "segmentation" else ()
        return Look(loss, max(0.0, float(entropy_of(shares)) - entropy), self._same / self._total if self._total else 1.0, covered)


def _decided(p: Tensor, task: TaskConfig) -> Tensor:
    """Masks of a segmentation, bool; classes of exclusive classes, or the answers to yes-or-no questions as 0 and 1."""
    if task.kind == "segmentation":
        return foreground(p, task)
    return p.argmax(dim=1) if task.target == "multiclass" else (p > 0.5).long()


def ranges_of(class_counts: Sequence[Sequence[int]], task: TaskConfig) -> list[Range]:
    """(smallest, largest) share of every foreground class over the sites.

    Args:
        class_counts: of every site, training pixels of each of `task.classes`.

    Returns:
        Empty in classification, without sites, and for several yes-or-no questions, whose negatives are not counted.

    Examples:
        >>> from types import SimpleNamespace
        >>> ranges_of([[90, 10], [60, 40]], SimpleNamespace(kind="segmentation", target="binary"))
        [(0.1, 0.4)]
    """
    if task.kind != "segmentation" or task.target == "multilabel" or not class_counts:
        return []
    shares = [[count / max(1, sum(counts)) for count in counts[1:]] for counts in class_counts]
    return [(min(column), max(column)) for column in zip(*shares, strict=True)]


@dataclass(frozen=True)
class Gate:
    """Which states may be kept; a limit of 0 asks nothing.

    Attributes:
        information: least share of the start's mutual information; not asked of a start that tells nothing, as of one image's class.
        agreement: least agreement with the start.
        share: most times by which a foreground class may leave the inside sites' range of its share.
        ranges: of every foreground class, the smallest and the largest share at the inside sites; empty where nobody has said.
    """

    information: float
    agreement: float
    share: float
    ranges: Sequence[Range] = ()

    def refusal(self, look: Look, start: Look) -> str:
        """Why a state may not be kept, in a few words; empty where it may.

        Args:
            look: of the state.
            start: of the state before the first step; a range is widened to hold it.

        Examples:
            >>> gate = Gate(information=0.8, agreement=0.9, share=3.0, ranges=[(0.02, 0.04)])
            >>> start = Look(loss=0.04, information=0.08, agreement=1.0, shares=(0.03,))
            >>> gate.refusal(Look(0.03, 0.07, 0.95, (0.05,)), start)
            ''
            >>> gate.refusal(Look(0.01, 0.0, 0.95, (0.05,)), start)
            'its predictions tell 0.00 of what those of the start tell, at least 0.8 is asked'
            >>> gate.refusal(Look(0.01, 0.08, 0.95, (0.2,)), start)
            'it covers 0.2 of the pixels, inside sites 0.02 to 0.04'
        """
        if self.information and start.information > _TELLS and look.information < self.information * start.information:
            told = look.information / start.information
            return f"its predictions tell {told:.2f} of what those of the start tell, at least {self.information:g} is asked"
        if look.agreement < self.agreement:
            return f"it agrees with the start to {look.agreement:.2f}, at least {self.agreement:g} is asked"
        ranges = self.ranges if self.share else ()
        for (low, high), share, first in zip(ranges, look.shares, start.shares, strict=bool(ranges)):
            if not min(low, first) / self.share <= share <= max(high, first) * self.share:
                return f"it covers {share:.2g} of the pixels, inside sites {low:.2g} to {high:.2g}"
        return ""
