"""Whether a task's intensity transform suits the images that a site has: what the network would be fed with, looked at."""

from typing import Final

import numpy as np

from medflare.data.transforms import Preprocessing
from medflare.tasks.config import TaskConfig

_LOOKED_AT: Final = 20  # images of a site
_CLIPPED: Final = 0.5  # share of an image's foreground that may become one number
_LARGE: Final = 20.0  # mean or deviation that no network is fed with as a rule
_FLAT: Final = 0.005  # deviation below which an image is one number to a network
_PROPOSED: Final = '{"name": "NormalizeIntensity", "nonzero": true, "channel_wise": true}'


class IntensityCheck:
    """Judges the first images that it is shown.

    Args:
        task: its intensity transform.
    """

    def __init__(self, task: TaskConfig):
        self._preprocessing, self._name = Preprocessing(task), task.intensity["name"]
        self._wrong = self._seen = 0
        self._first = ""

    def add(self, image: np.ndarray) -> None:
        """Look at an image.

        Args:
            image: (C, ...), as stored.
        """
        if self._seen >= _LOOKED_AT:
            return
        self._seen += 1
        if problem := unsuitable(image, self._preprocessing.intensities(image).numpy()):
            self._first = self._first or problem
            self._wrong += 1

    def note(self) -> str | None:
        """A warning with a proposal where at least half of the images are unsuitable, else None."""
        if not self._wrong or 2 * self._wrong < self._seen:
            return None
        return (
            f"the task's intensity ({self._name}) does not suit {self._wrong} of {self._seen} images looked at, the first: {self._first}; "
            f'for images without a unit, set "intensity": {_PROPOSED}'
        )


def unsuitable(stored: np.ndarray, fed: np.ndarray) -> str | None:
    """What is wrong with an image as a network is fed with it, in words, or None.

    Args:
        stored: intensities (C, ...).
        fed: the same after the task's transform.

    Examples:
        >>> steps = np.arange(100.0)
        >>> unsuitable(steps, steps / 100), unsuitable(steps, steps.clip(0, 20) / 20), unsuitable(np.zeros(9), np.zeros(9))
        (None, 'clipped: 81 % of what is above the lowest number becomes 1', None)
        >>> unsuitable(steps, 1000 * steps), unsuitable(steps, steps / 1e5)
        ('too large: mean 4.95e+04, deviation 2.89e+04', 'all alike: deviation 0.000289')
    """
    above = stored > stored.min()
    if not above.any():
        return None
    top = fed.max()
    clipped = above & (fed == top)
    share = clipped.sum() / above.sum()
    if share > _CLIPPED and np.ptp(stored[clipped]) > 0:
        return f"clipped: {share:.0%} of what is above the lowest number becomes {top:.4g}".replace("%", " %")
    mean, deviation = float(fed.mean(dtype=np.float64)), float(fed.std(dtype=np.float64))
    if max(abs(mean), deviation) > _LARGE:
        return f"too large: mean {mean:.3g}, deviation {deviation:.3g}"
    return f"all alike: deviation {deviation:.3g}" if deviation < _FLAT else None
