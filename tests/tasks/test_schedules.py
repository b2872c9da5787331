"""The learning rate over the rounds, as a factor."""

import pytest

from helpers.picture_sites import SEGMENTATION
from medflare.core.errors import ConfigError
from medflare.tasks.config import load_task
from medflare.tasks.schedules import SCHEDULES, rate_factor


def factors(rounds: int, **settings: object) -> list[float]:
    return [rate_factor(settings, round, rounds) for round in range(rounds)]


def test_formulas() -> None:
    assert factors(4, name="constant") == [1.0] * 4
    assert factors(5, name="step", every=2, factor=0.5) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert factors(4, name="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert factors(4, name="cosine", minimum=0.5)[2] == pytest.approx(0.75)
    assert factors(4, name="polynomial", power=2.0) == pytest.approx([1.0, 0.5625, 0.25, 0.0625])


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_comes_before_all_of_them(name: str) -> None:
    warmed = factors(6, name=name, warmup_rounds=2)
    assert warmed[:2] == pytest.approx([1 / 3, 2 / 3])
    assert warmed[2:] == factors(4, name=name)


def test_steps_after_the_last_round_have_its_rate_and_a_long_warm_up_is_all_there_is() -> None:
    assert rate_factor({"name": "cosine"}, 9, 4) == rate_factor({"name": "cosine"}, 3, 4)
    assert factors(2, name="cosine", warmup_rounds=3) == [0.25, 0.5]


@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        ({"name": "cosin"}, "cosin"),
        ({"name": "cosine", "every": 2}, "every"),
        ({"name": "step", "every": 0}, "every"),
        ({"every": 2}, "schedule"),
    ],
)
def test_a_wrong_schedule_is_refused(schedule: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_task({**SEGMENTATION, "schedule": schedule})


def test_defaults_are_written_out() -> None:
    task = load_task({**SEGMENTATION, "schedule": {"name": "step"}})
    assert task.schedule == {"name": "step", "warmup_rounds": 0, "every": 10, "factor": 0.1}
    assert load_task({**SEGMENTATION, "schedule": {"name": "step", "every": 10}}).fingerprint() == task.fingerprint()
