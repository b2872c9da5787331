"""How the learning rate goes over the rounds: a factor that is a function of the round and the number of rounds alone. Light to import."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.settings import STRICT, checked, unknown


@dataclass(frozen=True, config=STRICT)
class Constant:
    """The task's rate, after `warmup_rounds` in which it grows evenly; a schedule is spread over the rounds that are left then."""

    warmup_rounds: Annotated[int, Field(ge=0)] = 0

    def at(self, round: int, rounds: int) -> float:
        """The factor of a round, 0-based and counted from the end of the warm-up, of so many rounds from there on."""
        return 1.0


@dataclass(frozen=True, config=STRICT)
class Step(Constant):
    """factor ** (round // every)."""

    every: Annotated[int, Field(ge=1)] = 10
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1

    def at(self, round: int, rounds: int) -> float:
        return self.factor ** (round // self.every)


@dataclass(frozen=True, config=STRICT)
class Cosine(Constant):
    """minimum + (1 - minimum) (1 + cos(π round / rounds)) / 2."""

    minimum: Annotated[float, Field(ge=0, le=1)] = 0.0

    def at(self, round: int, rounds: int) -> float:
        return self.minimum + (1 - self.minimum) * (1 + math.cos(math.pi * round / rounds)) / 2


@dataclass(frozen=True, config=STRICT)
class Polynomial(Constant):
    """minimum + (1 - minimum) (1 - round / rounds) ** power: 1 is a straight line, nnU-Net has 0.9."""

    power: Annotated[float, Field(gt=0)] = 0.9
    minimum: Annotated[float, Field(ge=0, le=1)] = 0.0

    def at(self, round: int, rounds: int) -> float:
        return self.minimum + (1 - self.minimum) * (1 - round / rounds) ** self.power


SCHEDULES: Final[dict[str, type[Constant]]] = {"constant": Constant, "step": Step, "cosine": Cosine, "polynomial": Polynomial}


def written_out(settings: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The settings with their defaults.

    Args:
        settings: {"name": one of `SCHEDULES`, its settings}.

    Raises:
        ConfigError: no such schedule, or a setting or value that it does not take.

    Examples:
        >>> written_out({"name": "step", "every": 5}, "task x: schedule")
        {'name': 'step', 'warmup_rounds': 0, 'every': 5, 'factor': 0.1}
    """
    return {"name": settings["name"], **dataclasses.asdict(_built(settings, place))}


def rate_factor(settings: Mapping[str, Any], round: int, rounds: int) -> float:
    """What the learning rate of a round is multiplied by.

    Args:
        round: 0-based; steps after the last round have the last one's.
        rounds: of the run; without any, nothing is trained and the rate is the task's.

    Examples:
        >>> [rate_factor({"name": "polynomial", "power": 1.0, "warmup_rounds": 1}, round, 5) for round in range(5)]
        [0.5, 1.0, 0.75, 0.5, 0.25]
    """
    schedule = _built(settings, "schedule")
    if rounds == 0:
        return 1.0
    round = min(round, rounds - 1)
    if round < schedule.warmup_rounds:
        return (round + 1) / (schedule.warmup_rounds + 1)
    return schedule.at(round - schedule.warmup_rounds, rounds - schedule.warmup_rounds)


def _built(settings: Mapping[str, Any], place: str) -> Constant:
    arguments = dict(settings)
    name = arguments.pop("name")
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES, place)
    return checked(SCHEDULES[name], arguments, f"{place} {name}")
