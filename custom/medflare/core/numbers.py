"""Numbers of messages and results."""

import math


def finite_or_none(value: float | None) -> float | None:
    """None for NaN and infinity, which JSON does not have.

    Examples:
        >>> finite_or_none(0.5), finite_or_none(math.nan), finite_or_none(None)
        (0.5, None, None)
    """
    if value is None or not math.isfinite(value):
        return None
    return value
