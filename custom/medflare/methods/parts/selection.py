"""Choosing the round whose model is delivered: by the sites' validation metric, the last round's model included.

A site chooses alone among its own models. What all sites share is elected: every site votes with its metric, and the median over the
sites decides, so that one site that is wrong, or lies, cannot choose the round for the others.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state


def _renamed(value: object) -> object:
    return "median" if value == "best" else value  # what jobs of older versions say


Selection = Annotated[Literal["median", "paired", "mean", "last"], BeforeValidator(_renamed)]


class Best:
    """The best state seen so far by a validation metric (higher is better), kept in an algorithm's memory; of equals the earliest wins.

    Until a metric was ever defined, the latest state stands in, so a federation without validation images still delivers.

    Args:
        memory: of the algorithm that chooses.
        name: tells several choices of an algorithm apart.
        latest: of equals the latest wins.
    """

    def __init__(self, memory: Message, name: str, *, latest: bool = False):
        self._memory = memory
        self._name = f"{name}/best"
        self._beats = operator.ge if latest else operator.gt

    @property
    def state(self) -> StateDict | None:
        """The best state, None before the first offer."""
        return self._memory.states.get(self._name)

    @property
    def round(self) -> int | None:
        """The number of rounds of training behind the state."""
        return self._found.get("round")

    @property
    def value(self) -> float | None:
        """Its metric."""
        return self._found.get("value")

    @property
    def _found(self) -> dict[str, Any]:
        return self._memory.meta.get(self._name, {})

    def chosen(self, selection: Selection, last: StateDict, behind: int | None = None) -> tuple[StateDict, int | None]:
        """The state that a site delivers and the rounds of training behind it: the best one, or the last.

        Args:
            selection: of the server algorithm; by "last" it is the last one.
            last: stands in, too, where none was ever offered.
            behind: the rounds behind `last`; None where nobody can say.
        """
        return (last, behind) if selection == "last" or self.state is None else (self.state, self.round)

    def offer(self, value: float | None, round: int, state: StateDict) -> None:
        """Take a candidate, where it is better than what is kept.

        Args:
            value: its validation metric; None where it is undefined.
            round: the round that it entered; the untrained model of round 0 is no candidate.
            state: the candidate, copied where it is kept.
        """
        if round == 0:
            return
        better = value is not None and (self.value is None or self._beats(value, self.value))
        if better or (value is None and self.value is None):
            self._memory.meta[self._name] = {"value": value, "round": round}
            self._memory.states[self._name] = copy_state(state)


class ModelSelector(Best):
    """A choice that the sites make together; who voted what is kept for the record.

    Args:
        memory: of the server algorithm.
        name: of what is chosen.
        rule: see `agreed`.
        rivals: whether a site gains where others lose, as with a network that tells sites apart: votes then contradict by nature, and
            their mean, every site counting once, decides whatever the rule says, since a network that never knows one site of three is
            perfect by the median. With few validation images many rounds are equal, of which the first have hardly learnt: the latest wins.

    Attributes:
        rule: that decides.
    """

    def __init__(self, memory: Message, name: str, rule: str, rivals: bool = False):
        super().__init__(memory, name, latest=rivals)
        self.rivals = rivals
        self.rule, self._votes = "mean" if rivals else rule, f"{name}/votes"

    def hold(self, replies: Mapping[str, Message], role: str, round: int, state: StateDict) -> None:
        """Count the sites' votes on a candidate and take it where it beats what is kept; round and state as for `offer`.

        Args:
            replies: site -> reply with the meta "validation" and "n_samples"; a site where the metric is undefined has no vote.
            role: of the model in "validation", for example "global".
        """
        given = {site: (reply.meta.get("validation") or {}).get(role) for site, reply in sorted(replies.items())}
        votes = {site: value for site, value in given.items() if value is not None}
        shares = {site: 1.0 if self.rivals else float(replies[site].meta.get("n_samples", 1)) for site in votes}
        value = agreed(votes, shares, self.rule)
        if self.rule == "paired" and self.value is not None:
            kept = [found["votes"] for found in self.record if found["round"] == self.round]
            value = paired(votes, kept[0], self.value) if kept else value
        self.offer(value, round, state)
        if round > 0:
            self._memory.meta.setdefault(self._votes, []).append({"round": round, "value": value, "votes": votes})

    @property
    def record(self) -> list[dict[str, Any]]:
        """{"round": of training behind the candidate, "value": the agreed one, "votes": site -> metric} of every candidate."""
        return list(self._memory.meta.get(self._votes, []))


def agreed(votes: Mapping[str, float], samples: Mapping[str, float], rule: str = "median") -> float | None:
    """What the sites' validation metrics come to; None without any.

    Args:
        votes: site -> metric, in sorted order.
        samples: site -> training images, for the mean.
        rule: "mean", weighted by training images, else the median over the sites; of two sites that is their plain mean. See `paired`, too.

    Examples:
        >>> votes, samples = {"A": 0.5, "B": 0.75, "C": 0.0}, {"A": 1.0, "B": 2.0, "C": 1.0}
        >>> agreed(votes, samples), agreed(votes, samples, "mean"), agreed({"A": 0.5, "B": 1.0}, samples)
        (0.5, 0.5, 0.75)
    """
    if rule != "mean":
        return median(votes.values()) if votes else None
    total = sum(samples[site] for site in votes)
    return sum(value * samples[site] for site, value in votes.items()) / total if total > 0 else None


def paired(votes: Mapping[str, float], kept: Mapping[str, float], value: float) -> float | None:
    """What a candidate comes to beside the one that is kept: its value, and the sites' median gain by going over to this one.

    A median of metrics compares one site's level with another's wherever sites differ by more than rounds do, and who votes 1 or 0 says
    whose. A gain is one site's own, so that a candidate replaces the kept one only where half of the sites, or more, do not lose by it.

    Args:
        votes: site -> metric of the candidate.
        kept: site -> metric of the one that is kept.
        value: what the kept one has come to.

    Returns:
        None where no site has measured both.

    Examples:
        >>> kept = {"A": 0.75, "B": 0.25, "C": 0.0}
        >>> paired({"A": 0.5, "B": 0.125, "C": 1.0}, kept, 0.25)  # the median of metrics would rise to 0.5
        0.125
        >>> paired({"A": 1.0}, {}, 0.25)
    """
    gains = [votes[site] - kept[site] for site in sorted(votes.keys() & kept.keys())]
    return value + median(gains) if gains else None


FEW_IMAGES: Final = 10  # of validation: below, one image decides more than what rounds differ by


def images_behind(images: Mapping[str, int], rule: str) -> float:
    """How many validation images a choice rests on.

    By a mean those of all sites together; by a median, or a median gain, those of the site in the middle: its vote decides alone.

    Args:
        images: voting site -> its validation images.
        rule: see `ModelSelector`.

    Examples:
        >>> votes = {"A": 5, "B": 4, "C": 4}
        >>> images_behind(votes, "median"), images_behind(votes, "mean"), images_behind({}, "median")
        (4, 13, 0)
    """
    if rule == "mean" or not images:
        return sum(images.values())
    return median(images.values())


def plateau(history: Iterable[Mapping[str, Any]], patience: int) -> int | None:
    """After how many rounds of training the sites' validation has not become better for `patience` rounds; None where it still does.

    The candidates of two rounds are compared as in an election, by the median over the sites. Sites that validate several models (the
    global one and their own) go on as long as one of them becomes better. The untrained model of round 0 is no candidate.

    Args:
        history: {"round", "sites": site -> meta with "validation"} of every step of the rounds that are over.
        patience: in rounds, 1 or more.

    Returns:
        Rounds of training that are done when it is noticed: models are measured before they are trained on.

    Examples:
        >>> steps = [{"round": r, "sites": {"A": {"validation": {"global": v}}}} for r, v in enumerate([0.9, 0.5, 0.6, 0.6, 0.5])]
        >>> plateau(steps, 2), plateau(steps, 3)
        (5, None)
    """
    heard: dict[int, dict[str, dict[str, float]]] = {}
    for step in history:
        for site, meta in step["sites"].items():
            for model, value in (meta.get("validation") or {}).items():
                if value is not None and step["round"] > 0:
                    heard.setdefault(step["round"], {}).setdefault(model, {})[site] = value
    best: dict[str, float] = {}
    better = 0
    for round, models in sorted(heard.items()):
        risen = {model: value for model, votes in models.items() if (value := median(votes.values())) > best.get(model, -math.inf)}
        best |= risen
        better = round if risen else better
        if round - better >= patience:
            return round + 1
    return None
