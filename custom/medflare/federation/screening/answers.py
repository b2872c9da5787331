"""What a site may say of how its images were taken for classes: confusion counts and ROC curves, see `tasks.classes`."""

from collections.abc import Mapping
from typing import Final

from medflare.core.manifest import count, listing, number
from medflare.tasks.classes import FALSE_ALARMS, MOST_CLASSES

_SHARE: Final = number(0.0, 1.0, optional=True)
_SHARES: Final = listing(number(0.0, 1.0))


def class_counts(value: object) -> str | None:
    """What is wrong with one model's report, in words that follow its name, or None; lists are empty where the site keeps them back.

    Args:
        value: what `tasks.classes.class_report` gives.
    """
    if not isinstance(value, Mapping) or value.keys() != {"confusion", "roc"}:
        return "is no table of 'confusion' and 'roc'"
    for name, takes in (("confusion", listing(_counts)), ("roc", listing(_curve))):
        if problem := takes(value[name]):
            return f"{name!r} {problem}"
        if len(value[name]) > MOST_CLASSES:
            return f"{name!r} has more than {MOST_CLASSES} classes"
    return None


def _counts(value: object) -> str | None:
    """A square matrix of images."""
    problem = listing(listing(count()))(value)
    if problem or not isinstance(value, list | tuple):
        return problem
    return None if all(len(row) == len(value) <= MOST_CLASSES for row in value) else f"is no square of at most {MOST_CLASSES} classes"


def _curve(value: object) -> str | None:
    """An area, its interval, and the curve at fixed places."""
    if not isinstance(value, Mapping) or value.keys() != {"auc", "low", "high", "sensitivity"}:
        return "is no curve with its area"
    for name, found in value.items():
        if problem := (_SHARES if name == "sensitivity" else _SHARE)(found):
            return f"{name!r} {problem}"
    return None if len(value["sensitivity"]) in (0, len(FALSE_ALARMS)) else f"'sensitivity' has not {len(FALSE_ALARMS)} places"
