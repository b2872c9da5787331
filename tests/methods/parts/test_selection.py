"""Elections of the round to deliver: what the votes come to, one liar, and who contradicts the others."""

from typing import Any

import pytest
import torch

from medflare.core.hyper import build_hyper
from medflare.core.message import Message
from medflare.methods.base import ServerHyper
from medflare.methods.parts.selection import Best, ModelSelector, combined_score, plateau

HONEST = {1: 0.5, 2: 0.7, 3: 0.8, 4: 0.82}


def replies(**votes: float | None) -> dict[str, Message]:
    """A site with the name L has a thousand million images."""
    return {site: Message({}, {"n_samples": 10**9 if site == "L" else 5, "validation": {"global": vote}}) for site, vote in votes.items()}


def election(rule: str, liar: dict[int, float]) -> ModelSelector:
    selector = ModelSelector(Message(), "global", rule)
    for round, honest in ({0: 0.9} | HONEST).items():
        given = replies(A=honest, B=honest - 0.1, L=liar.get(round, 0.0))
        selector.update(given, "global", round, {"w": torch.tensor(float(round))})
    return selector


@pytest.mark.parametrize(
    ("votes", "median", "mean"),
    [
        ({}, None, None),
        ({"A": 0.25}, 0.25, 0.25),
        ({"A": 0.25, "B": 0.75}, 0.5, 0.625),  # the median of two is their plain mean; B has three times the images
        ({"A": 0.25, "B": 0.75, "C": 1.0}, 0.75, 0.7),  # (0.25 + 3 * 0.75 + 1) / 5
    ],
)
def test_by_hand(votes: dict[str, float], median: float | None, mean: float | None) -> None:
    samples = {"A": 1.0, "B": 3.0, "C": 1.0}
    assert combined_score(votes, samples) == median
    assert combined_score(votes, samples, "mean") == (None if mean is None else pytest.approx(mean))


def test_a_liar_chooses_by_the_mean_and_not_by_the_median() -> None:
    lie = {1: 1.0}
    assert election("median", lie).round == 4
    assert election("mean", lie).round == 1


def test_where_levels_differ_a_liar_says_whose_counts_but_not_whose_gain() -> None:
    """A's images are easy and B's hard; both find the third round best. By the median the liar has any round."""
    levels = {1: (0.80, 0.40), 2: (0.85, 0.45), 3: (0.90, 0.50)}
    for wanted in levels:
        chosen = {}
        for rule in ("median", "paired"):
            selector = ModelSelector(Message(), "global", rule)
            for round, (easy, hard) in levels.items():
                selector.update(replies(A=easy, B=hard, L=float(round == wanted)), "global", round, {})
            chosen[rule] = selector.round
        assert chosen == {"median": wanted, "paired": 3}


def test_a_gain_needs_sites_that_measured_both() -> None:
    selector = ModelSelector(Message(), "global", "paired")
    for round, votes in enumerate(({"A": 0.5}, {"B": 0.9}, {"A": 0.6, "B": 0.1}, {"A": 0.6, "B": 0.2}), start=1):
        selector.update(replies(**votes), "global", round, {})
    assert selector.round == 4 and selector.value == pytest.approx(0.65)
    assert [candidate["value"] for candidate in selector.record] == [0.5, None, pytest.approx(0.6), pytest.approx(0.65)]


@pytest.mark.parametrize(("rivals", "chosen"), [(False, 1), (True, 3)])
def test_a_selector_that_never_knows_one_site_is_not_chosen_nor_the_first_of_equals(rivals: bool, chosen: int) -> None:
    selector = ModelSelector(Message(), "selector", "median", rivals=rivals)
    assert selector.rule == ("mean" if rivals else "median"), "reports say which decided"
    for round, third in ((1, 0.0), (2, 1.0), (3, 1.0)):
        selector.update(replies(A=1.0, B=1.0, C=third), "global", round, {"w": torch.tensor(float(round))})
    assert selector.round == chosen


def test_who_votes_what_is_kept_but_not_on_the_untrained_model() -> None:
    record = election("median", {1: 1.0}).record
    assert [candidate["round"] for candidate in record] == [1, 2, 3, 4]
    assert record[0] == {"round": 1, "value": 0.5, "votes": {"A": 0.5, "B": 0.4, "L": 1.0}}


def test_a_site_delivers_its_best_state_or_the_last_one() -> None:
    best, last = Best(Message(), "personal"), {"w": torch.tensor(9.0)}
    assert best.chosen("median", last, 3) == (last, 3) and best.chosen("median", last) == (last, None)
    best.offer(0.5, 2, {"w": torch.tensor(2.0)})
    state, behind = best.chosen("median", last, 3)
    assert state["w"] == 2 and behind == 2
    assert best.chosen("last", last, 3) == (last, 3)


def test_the_word_of_older_jobs() -> None:
    assert build_hyper(ServerHyper, {"selection": "best"}).selection == "median"


# ---- patience ------------------------------------------------------------------------------------------------------------


def measured(*rounds: dict[str, dict[str, float | None]]) -> list[dict[str, Any]]:
    """Site -> model -> metric of round 0, 1, ..."""
    return [
        {"round": number, "sites": {site: {"validation": models} for site, models in sites.items()}} for number, sites in enumerate(rounds)
    ]


def of_one(*values: float | None) -> list[dict[str, Any]]:
    return measured(*({"A": {"global": value}} for value in values))


@pytest.mark.parametrize(
    ("values", "patience", "after"),
    [
        ((0.9, 0.5, 0.6, 0.6, 0.5), 2, 5),  # best after two rounds, two more in vain, the fifth is trained when that is seen
        ((0.9, 0.5, 0.6, 0.6, 0.5), 3, None),
        ((0.9, 0.5, 0.4), 1, 3),  # the untrained model's 0.9 is no candidate
        ((0.1, 0.2, 0.3, 0.4), 1, None),
        ((0.9, 0.5, 0.4, 0.9, 0.9), 2, None),  # 0.9 came in time, and the one after it is the first in vain
        ((0.9, 0.5, 0.4, 0.4, 0.9, 0.9), 2, 4),  # and here too late: the first end counts, whatever came later
        ((None, None, None, None), 1, None),  # nobody can say
        ((0.9,), 1, None),
        ((), 1, None),
    ],
)
def test_when_patience_is_over(values: tuple[float | None, ...], patience: int, after: int | None) -> None:
    assert plateau(of_one(*values), patience) == after


def test_patience_is_that_of_the_median_and_of_every_model() -> None:
    def round_of(*votes: float, own: float) -> dict[str, dict[str, float | None]]:
        return {site: {"global": vote, "personal": own} for site, vote in zip("ABL", votes, strict=True)}

    liar = measured(*(round_of(0.5, 0.5, number / 10, own=0.1) for number in range(6)))
    assert plateau(liar, 2) == 4, "one site of three keeps nobody going"
    assert plateau(measured(*(round_of(0.5, 0.5, 0.5, own=number / 10) for number in range(6))), 2) is None
    steps = of_one(0.9, 0.5, 0.4)
    steps.insert(2, {"round": 1, "sites": {"A": {"loss": 0.3}}})
    assert plateau(steps, 1) == 3, "a step that measures nothing is no round"
