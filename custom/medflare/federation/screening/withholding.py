"""What a site keeps back of its own reply: numbers that were measured on fewer patients than it lets them be told of."""

import math
from collections.abc import Iterable
from typing import Any, Final

from medflare.core.manifest import Fact
from medflare.data.sites.site import Site
from medflare.data.targets import counts_by_image
from medflare.tasks.cases import Cases
from medflare.tasks.classes import patients_of_classes
from medflare.tasks.config import TaskConfig

SPLITS: Final = ("train", "validation", "test")
_OF_TEST: Final = ("constant_output", "at_chance")


def too_few(site: Site, minimum: int) -> tuple[str, ...]:
    """The splits with patients, but fewer than a site's minimum.

    Args:
        site: whose patients are counted, not its images.
        minimum: "minimum_patients" of its own settings; 0 and 1 keep nothing back.
    """
    patients = {split: len(set(site.data.split(split).patients)) for split in SPLITS}
    return tuple(split for split in SPLITS if 0 < patients[split] < minimum)


def tells_of_few(cases: Cases, task: TaskConfig, minimum: int) -> bool:
    """Whether confusion counts and curves would tell of few patients: a class, or all others together, has some, but too few.

    All of them stay then: what one class keeps back could be reckoned from the others and the accuracy.

    Args:
        cases: of a classification task.
        task: gives target and labels.
        minimum: as for `too_few`.
    """
    if cases.targets is None:
        return False
    counts = patients_of_classes(cases.patients, cases.targets.numpy(), task.target, len(task.labels))
    return any(0 < patients < minimum for patients in counts)


def rare_classes(site: Site, minimum: int) -> bool:
    """Whether counts of the training images by class would tell of few patients: a class is shown by some, but too few.

    All counts stay then, as in `tells_of_few`. In classification those without a class are told of as well, in segmentation not.

    Args:
        site: whose training images are looked at.
        minimum: as for `too_few`.
    """
    if minimum < 2:
        return False
    split, task = site.data.train, site.task
    shown = counts_by_image(split.targets, task) > 0
    sides = [shown] if task.kind == "segmentation" else [shown, ~shown]
    patients = [{split.patients[row] for row in column.nonzero().flatten().tolist()} for side in sides for column in side.T]
    return any(0 < len(names) < minimum for names in patients)


def withhold(facts: dict[str, Any], declared: Iterable[Fact], splits: tuple[str, ...]) -> None:
    """Take the numbers out of every fact that was measured on one of these splits, in place.

    Args:
        facts: of a reply.
        declared: facts with the split that they were measured on.
        splits: see `too_few`.
    """
    for fact in declared:
        if fact.measured in splits and fact in facts:
            facts[fact] = _without_numbers(facts[fact])


def withhold_doubts(events: list[dict[str, Any]], splits: tuple[str, ...]) -> None:
    """Take out the events that tell how the deployed model does on test patients, in place, where these are too few to be told of.

    Args:
        events: of the delivery; the site's own report has all of them.
        splits: see `too_few`.
    """
    if "test" in splits:
        events[:] = [event for event in events if event["kind"] not in _OF_TEST]


def _without_numbers(value: Any) -> Any:
    """Tables keep their names, lists become empty. What is not finite tells of a failure and of no patient, and stays."""
    if isinstance(value, dict):
        return {name: _without_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return []
    return value if isinstance(value, float) and not math.isfinite(value) else None
