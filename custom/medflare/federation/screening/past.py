"""What the screening of updates remembers of earlier steps: lengths and hashes, never a state. It goes into the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

_LATEST: Final = 10  # steps whose lengths are remembered
_LEARNT: Final = 3  # steps after which the limit is learnt
MARGIN: Final = 10.0  # the learnt limit, as a multiple of the largest ratio that was taken; the limit of steps from the first one on


@dataclass(frozen=True)
class Taken:
    """What a step adds to the memory, by "phase/entry".

    Attributes:
        lengths: -> median length of the updates that were taken.
        ratios: -> the longest of them as a multiple of what it was measured against.
        digests: -> hash of an update -> its site.
    """

    lengths: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass
class Past:
    """The memory of a run's screening, by "phase/entry".

    Attributes:
        lengths: -> the median lengths of the latest steps.
        ratios: -> [number of steps, largest ratio that was taken].
        seen: -> hash of an update -> [its site, its round].
    """

    lengths: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    seen: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    def length(self, key: str) -> float | None:
        """The usual length of an update; None before the first one."""
        known = self.lengths.get(key)
        return median(known) if known else None

    def limit(self, key: str, most: float) -> float:
        """How many times the usual length an update may have: `most`, and less once three steps have shown what is usual here.

        Args:
            key: "phase/entry".
            most: the limit to begin with.

        Examples:
            >>> Past(ratios={"train/model": [3, 1.5]}).limit("train/model", 100.0), Past().limit("train/model", 100.0)
            (15.0, 100.0)
        """
        steps, largest = self.ratios.get(key, (0, 1.0))
        return min(most, MARGIN * max(1.0, largest)) if steps >= _LEARNT else most

    def remember(self, taken: Taken, round: int) -> None:
        """Add a step that has come to its end.

        Args:
            taken: see `Taken`.
            round: of the step.
        """
        for key, length in taken.lengths.items():
            self.lengths[key] = [*self.lengths.get(key, []), length][-_LATEST:]
        for key, ratio in taken.ratios.items():
            steps, largest = self.ratios.get(key, (0, 1.0))
            self.ratios[key] = [steps + 1, max(largest, ratio)]
        for key, digests in taken.digests.items():
            for found, site in digests.items():
                self.seen.setdefault(key, {}).setdefault(found, [site, round])
