"""Steps that travel by themselves, as SCAFFOLD's changes of control variates do: judged by declaration as updates of a model are."""

from collections.abc import Mapping

import pytest
import torch

from medflare.core.manifest import Entry, EntrySpec
from medflare.core.message import Message
from medflare.federation.screening.updates import Past, Screened, screen
from medflare.methods.baselines.scaffold import UPDATE
from medflare.methods.fedsm.selector import selector_entries

HONEST = {"A": (1.0, 0.1), "B": (1.0, 0.0), "C": (1.0, -0.1)}
STILL = {"w": torch.zeros(2)}


def judged(
    steps: Mapping[str, tuple[float, float]], past: Past | None = None, declared: bool = True, idle: str = "", round: int = 0
) -> Screened:
    """A round in which all models moved alike, but for one that is idle."""
    replies = {
        site: Message({"model": {"w": torch.tensor([1.0 + round, place]) * (site != idle)}, "step": {"w": torch.tensor(step)}}, {})
        for place, (site, step) in enumerate(steps.items())
    }
    manifest = {entry: EntrySpec.like(STILL, "") for entry in ("model", "step")}
    sent = {site: Message({"model": dict(STILL)}, {}) for site in steps}
    return screen(replies, manifest, sent, {}, past=past, weights=["model"], steps=["step"] if declared else [])


def test_honest_steps_are_taken_without_a_word() -> None:
    found = judged(HONEST)
    assert list(found.accepted) == ["A", "B", "C"] and not found.rejected and not found.suspicious


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ((50.0, 0.0), "step moved by 50, more than 10 times the others' median 1"),
        ((-50.0, 0.0), "step moved by 50, more than 10 times"),
        ((-5.0, 0.0), "step moved against all others together, and further: it would turn the round around"),
    ],
)
def test_a_step_that_would_decide_alone_is_rejected(step: tuple[float, float], reason: str) -> None:
    """From the first round on: what a control variate has taken in stays in it."""
    found = judged({**HONEST, "B": step})
    assert list(found.accepted) == ["A", "C"] and reason in found.rejected["B"]
    assert not judged({**HONEST, "B": step}, declared=False).rejected, "what is not declared has no direction, and a limit of 100"


def test_a_flipped_step_is_named() -> None:
    found = judged({**HONEST, "B": (-1.0, 0.0)})
    assert "B" in found.accepted and "step moved against the others: cosine -1.00" in found.suspicious["B"]


def test_of_two_first_steps_the_longer_one_is_not_used_or_both_are_named() -> None:
    """Nothing was sent that they could be held against; patients may differ, but not a hundredfold."""
    two = {"A": (1.0, 0.0), "B": (1e6, 0.0)}
    far, apart = judged(two), judged({**two, "B": (90.0, 0.0)})
    assert list(far.accepted) == ["A"] and "step moved by 1e+06" in far.rejected["B"]
    assert list(apart.accepted) == list(apart.suspicious) == ["A", "B"] and "of two sites nobody can say" in apart.suspicious["A"]
    assert not judged({**two, "B": (9.0, 0.0)}).suspicious


def test_of_two_later_steps_the_one_that_is_unlike_the_first_ones_is_rejected() -> None:
    past = Past()
    past.remember(judged({site: HONEST[site] for site in "AB"}, past), 0)
    found = judged({"A": (0.5, 0.1), "B": (20.0, 0.0)}, past, round=1)
    assert list(found.accepted) == ["A"] and "the largest median of the rounds" in found.rejected["B"]


def test_a_site_that_comes_late_brings_a_whole_gradient() -> None:
    """Others send small changes of theirs by then; forty times the round's median is what they sent themselves at first."""
    small, past = {site: (step[0] / 40, step[1] / 40) for site, step in HONEST.items()}, Past()
    for round in range(20):
        past.remember(judged(small if round else HONEST, past, round=round), round)
        small = {site: (0.99 * step[0], step[1]) for site, step in small.items()}
    assert not judged({**small, "B": (1.0, 0.05)}, past, round=20).rejected
    assert "more than 10 times" in judged({**small, "B": (11.0, 0.0)}, past, round=20).rejected["B"]


def test_a_step_is_no_excuse_for_a_model_that_was_not_trained() -> None:
    assert "nothing was trained" in judged(HONEST, idle="B").rejected["B"]


def test_which_entries_are_steps() -> None:
    """Gradients of a selector lead to every site's own label: honest ones point away from each other."""
    assert UPDATE.step and UPDATE.maybe().step and not Entry("model").step
    assert not selector_entries(lambda plan: 3).gradient.step
