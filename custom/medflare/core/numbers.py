"""Numbers of messages and results."""

import math

# Difference of metrics up to which a model counts as no better than the constant prediction.
NEAR = 0.01


def finite_or_none(value: float | None) -> float | None:
    """None for NaN and infinity, which JSON does not have.

    Examples:
        >>> finite_or_none(0.5), finite_or_none(math.nan), finite_or_none(None)
        (0.5, None, None)
    """
    if value is None or not math.isfinite(value):
        return None
    return value


def is_at_chance(value: float, constant: float) -> bool:
    """Whether a model's metric (0 to 1, higher is better) is not above that of the constant
    prediction; 1 is never at chance.

    Examples:
        >>> is_at_chance(0.505, 0.5), is_at_chance(0.25, 0.5)
        (True, True)
        >>> is_at_chance(0.75, 0.5), is_at_chance(1.0, 1.0)
        (False, False)
    """
    return value <= constant + NEAR and value < 1 - NEAR
