"""What a site may say of its training, see `core.manifest.Validator`."""

from typing import Final

from medflare.core.manifest import number

_USABLE: Final = 1e12  # a loss beyond it says that training went wrong, and no figure shows it


def images(value: object) -> str | None:
    """What is wrong with a number of training images; how many the site has is known from its enrolment.

    Args:
        value: the number.

    Examples:
        >>> images(7), images(0)
        (None, 'is 0, expected a positive number')
    """
    problem = number()(value)
    return problem or (None if value > 0 else f"is {value!r:.40}, expected a positive number")  # type: ignore[operator]  # a number


def metric_value(value: object) -> str | None:
    """What is wrong with a metric; a number that no metric can be costs a site its vote alone, see `update_validation.updates.lost_votes`.

    Args:
        value: the metric; None where it is undefined.

    Examples:
        >>> metric_value(None), metric_value(float("nan")), metric_value(7), metric_value(["a patient"])
        (None, None, None, 'is list, expected a number')
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None
    return f"is {type(value).__name__}, expected a number"


def mean_loss(value: object) -> str | None:
    """What is wrong with a mean training loss; None is one that stays untold.

    Args:
        value: the loss.

    Examples:
        >>> mean_loss(0.5), mean_loss("low")
        (None, "Input should be a valid number, got 'low'")
    """
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return number(optional=True)(value)
    if abs(value) <= _USABLE:
        return None
    return f"is {value!r:.40}: training diverged at the site; lower its learning rate or check its images"
