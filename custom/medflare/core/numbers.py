"""Numbers of messages and results."""

import math
from collections.abc import Mapping


def finite_or_none(value: float | None) -> float | None:
    """None for NaN and infinity, which JSON does not have.

    Examples:
        >>> finite_or_none(0.5), finite_or_none(math.nan), finite_or_none(None)
        (0.5, None, None)
    """
    if value is None or not math.isfinite(value):
        return None
    return value


def fractions(values: Mapping[str, float]) -> dict[str, float]:
    """The values divided by their sum; negative ones count as 0, zeros if the sum is 0.

    Examples:
        >>> fractions({"A": 3.0, "B": -1.0, "C": 1.0}), fractions({"A": 0})
        ({'A': 0.75, 'B': 0.0, 'C': 0.25}, {'A': 0.0})
    """
    positive = {name: max(0.0, value) for name, value in values.items()}
    total = sum(positive.values()) or 1.0
    return {name: value / total for name, value in positive.items()}
