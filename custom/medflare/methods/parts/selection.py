"""Model selection: the round whose model is delivered, by the sites' validation metrics; the last round's model is a candidate too.

A site selects its own models alone. For a model that all sites share, the median of the sites' metrics decides, so that a single wrong or
malicious site cannot select the round. Of equal rounds the one with the better mean over the sites is delivered, then the later one.
"""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state

FEW_IMAGES: Final = 10  # of validation: with fewer, one image decides more than the difference between rounds

Selection = Annotated[
    Literal["median", "paired", "mean", "last"],
    BeforeValidator(lambda value: "median" if value == "best" else value),  # "best" in jobs of older versions
]


class Best:
    """The best state by a validation metric (higher is better), kept in an algorithm's memory; ties go to the latest.

    Until a metric was defined, it is the latest state, so a federation without validation images still delivers a model.

    Args:
        name: tells several selections of an algorithm apart.
    """

    def __init__(self, memory: Message, name: str):
        self._memory = memory
        self._name = f"{name}/best"

    @property
    def state(self) -> StateDict | None:
        """The best state, None before the first offer."""
        return self._memory.states.get(self._name)

    @property
    def round(self) -> int | None:
        """The number of rounds of training behind the state."""
        return self._memory.meta.get(self._name, {}).get("round")

    @property
    def value(self) -> float | None:
        """Its metric."""
        return self._memory.meta.get(self._name, {}).get("value")

    @property
    def mean(self) -> float:
        """The second metric, which decides between equal ones; 0 without it."""
        return float(self._memory.meta.get(self._name, {}).get("mean", 0.0))

    def chosen(self, selection: Selection, last: StateDict, behind: int | None = None) -> tuple[StateDict, int | None]:
        """The state that a site delivers and the rounds of training behind it: the best one, or `last` with its `behind`.

        The last state is delivered by the selection "last", and before the first offer.
        """
        return (last, behind) if selection == "last" or self.state is None else (self.state, self.round)

    def offer(self, value: float | None, round: int, state: StateDict, mean: float = 0.0) -> None:
        """Keeps a copy of a candidate if its metric is at least as good (None: undefined); the untrained model of round 0 is no candidate.

        Of equal metrics, the one with the better `mean` is kept.
        """
        if round == 0:
            return
        better = value is not None and (self.value is None or (value, mean) >= (self.value, self.mean))
        if better or (value is None and self.value is None):
            self._memory.meta[self._name] = {"value": value, "round": round, "mean": mean}
            self._memory.states[self._name] = copy_state(state)


class ModelSelector(Best):
    """A selection by the metrics of all sites, which are kept for the record.

    The median of a few sites is often equal in several rounds; then the mean over the sites decides, so that no selected round is at most
    as good as another one at every site.

    Args:
        rule: "mean", "paired" or the median, see `combined_score`.
        zero_sum: whether one site's gain is another's loss, as with a network that tells sites apart. The plain mean over the sites then
            decides for any rule: by the median, a network that never recognizes one of three sites would be perfect.
    """

    def __init__(self, memory: Message, name: str, rule: str, zero_sum: bool = False):
        super().__init__(memory, name)
        self.zero_sum = zero_sum
        self.rule, self._record_key = "mean" if zero_sum else rule, f"{name}/votes"

    def update(self, replies: Mapping[str, Message], role: str, round: int, state: StateDict) -> None:
        """Offers a candidate with the sites' combined metric; round and state as for `offer`.

        Args:
            replies: site -> reply with the meta "validation" and "n_samples"; sites with an undefined metric do not count.
            role: of the model in "validation", for example "global".
        """
        values = {site: (reply.meta.get("validation") or {}).get(role) for site, reply in sorted(replies.items())}
        metrics = {site: value for site, value in values.items() if value is not None}
        weights = {site: 1.0 if self.zero_sum else float(replies[site].meta.get("n_samples", 1)) for site in metrics}
        value = combined_score(metrics, weights, self.rule)
        mean = fmean(metrics.values()) if metrics else 0.0
        if self.rule == "paired" and self.value is not None:
            kept = [candidate["votes"] for candidate in self.record if candidate["round"] == self.round]
            value = paired_score(metrics, kept[0], self.value) if kept else value
        self.offer(value, round, state, mean)
        if round > 0:
            self._memory.meta.setdefault(self._record_key, []).append({"round": round, "value": value, "votes": metrics})

    @property
    def record(self) -> list[dict[str, Any]]:
        """{"round": of training behind the candidate, "value": combined metric, "votes": site -> metric} of every candidate."""
        return list(self._memory.meta.get(self._record_key, []))


def combined_score(metrics: Mapping[str, float], samples: Mapping[str, float], rule: str = "median") -> float | None:
    """The sites' metrics as one: by "mean" weighted by `samples`, by any other rule the median; None without any."""
    if rule != "mean":
        return median(metrics.values()) if metrics else None
    total = sum(samples[site] for site in metrics)
    return sum(value * samples[site] for site, value in metrics.items()) / total if total > 0 else None


def paired_score(metrics: Mapping[str, float], kept: Mapping[str, float], value: float) -> float | None:
    """A candidate's score by the rule "paired": the kept model's `value` plus the sites' median gain over it; None without common sites.

    A median of metrics compares different sites if sites differ more than rounds do. A gain is one site's own, so a candidate replaces
    the kept model only if at least half of the sites do not lose.

    Args:
        metrics: site -> metric of the candidate.
        kept: site -> metric of the kept model, whose score is `value`.
    """
    gains = [metrics[site] - kept[site] for site in sorted(metrics.keys() & kept.keys())]
    return value + median(gains) if gains else None


def images_behind(images: Mapping[str, int], rule: str) -> float:
    """Validation images that a selection rests on: by "mean" those of all sites (site -> images), else those of the median site.

    Examples:
        >>> metrics = {"A": 5, "B": 4, "C": 4}
        >>> images_behind(metrics, "median"), images_behind(metrics, "mean"), images_behind({}, "median")
        (4, 13, 0)
    """
    if rule == "mean" or not images:
        return sum(images.values())
    return median(images.values())


def plateau(history: Iterable[Mapping[str, Any]], patience: int) -> int | None:
    """The number of rounds trained when the sites' median metric had not improved for `patience` rounds (>= 1); None before.

    If sites validate several models (the global one and their own), each improvement counts. Round 0 is no candidate.

    Args:
        history: {"round", "sites": site -> meta with "validation"} of every step of the finished rounds.
        patience: in rounds.
    """
    by_round: dict[int, dict[str, dict[str, float]]] = {}
    for step in history:
        for site, meta in step["sites"].items():
            for model, value in (meta.get("validation") or {}).items():
                if value is not None and step["round"] > 0:
                    by_round.setdefault(step["round"], {}).setdefault(model, {})[site] = value
    best: dict[str, float] = {}
    last_improvement = 0
    for round, models in sorted(by_round.items()):
        medians = {model: median(values.values()) for model, values in models.items()}
        improved = {model: value for model, value in medians.items() if value > best.get(model, -math.inf)}
        best |= improved
        last_improvement = round if improved else last_improvement
        if round - last_improvement >= patience:
            return round + 1
    return None
