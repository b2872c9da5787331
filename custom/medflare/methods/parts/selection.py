"""Model selection: the round whose model is the final one, by the sites' validation metrics; the
last round's model is a candidate too.

A site selects its own models alone. For a model that all sites share, the median of the sites'
metrics decides, so that a single wrong or malicious site cannot select the round. If rounds are
equal, the one with the better mean over the sites is selected, then the later one.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from statistics import fmean, median
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods.parts.measured import N_SAMPLES, VALIDATION

# Validation images: with fewer, one image decides more than the difference between rounds.
FEW_IMAGES = 10


def _renamed(rule: Any) -> Any:
    """The present name of a rule: "best" in jobs of older versions is the median."""
    return "median" if rule == "best" else rule


_Rule = Literal["median", "paired", "mean", "last"]
RULES = get_args(_Rule)
Selection = Annotated[_Rule, BeforeValidator(_renamed)]


class Best:
    """The best state by a validation metric (higher is better), stored in an algorithm's memory;
    ties go to the latest.

    Until a metric was defined, it is the latest state, so a federation without validation images
    still has a final model.

    Args:
        name: tells several selections of an algorithm apart.
    """

    def __init__(self, memory: Message, name: str):
        self._memory = memory
        self._name = f"{name}/best"

    @property
    def _meta(self) -> Any:
        return self._memory.meta.get(self._name, {})

    @property
    def state(self) -> StateDict | None:
        """The best state, None before the first candidate."""
        return self._memory.states.get(self._name)

    @property
    def round(self) -> int | None:
        """The number of rounds that the state was trained for."""
        return self._meta.get("round")

    @property
    def value(self) -> float | None:
        """The state's metric."""
        return self._meta.get("value")

    def chosen(
        self, selection: Selection, last: StateDict, rounds_trained: int | None = None
    ) -> tuple[StateDict, int | None]:
        """The state of the final model and its number of rounds trained: the best one, or `last`
        with its `rounds_trained`.

        The last state is final by the selection "last", and before the first candidate.
        """
        if selection == "last" or self.state is None:
            return last, rounds_trained
        return self.state, self.round

    def propose(
        self, value: float | None, rounds_trained: int, state: StateDict, mean: float = 0.0
    ) -> None:
        """Stores a copy of a candidate if its metric is at least as good (None: undefined); an
        untrained model is no candidate.

        If metrics are equal, the candidate with the better `mean` is stored.

        Args:
            rounds_trained: of the candidate. For a model that comes at the start of a round this is
                the round's index.
        """
        if rounds_trained == 0:
            return
        if self.value is None:  # so far, no candidate has a metric
            replaces = True
        else:
            best = (self.value, self._meta["mean"])
            replaces = value is not None and (value, mean) >= best
        if replaces:
            self._memory.meta[self._name] = {"value": value, "round": rounds_trained, "mean": mean}
            self._memory.states[self._name] = copy_state(state)


class ModelSelector(Best):
    """A selection by the metrics of all sites, which are kept for the record.

    The median of a few sites is often equal in several rounds; then the mean over the sites
    decides, so that no selected round is at most as good as another one at every site.

    Args:
        rule: "mean", "paired" or the median, see `combined_score`.
        zero_sum: whether one site's gain is another's loss, as with a network that tells sites
            apart. The plain mean over the sites then decides for any rule: by the median, a network
            that never recognizes one of three sites would be perfect.
    """

    def __init__(self, memory: Message, name: str, rule: str, zero_sum: bool = False):
        super().__init__(memory, name)
        self.zero_sum = zero_sum
        self.rule = "mean" if zero_sum else rule
        self._record_key = f"{name}/votes"

    def update(
        self, replies: Mapping[str, Message], role: str, rounds_trained: int, state: StateDict
    ) -> None:
        """Proposes a candidate with the sites' combined metric, see `propose`.

        Args:
            replies: site -> reply with the meta "validation" and "n_samples"; sites with an
                undefined metric do not count.
            role: of the model in "validation", for example "global".
        """
        metrics = {}
        weights = {}
        for site, reply in sorted(replies.items()):
            value = (reply.get(VALIDATION) or {}).get(role)
            if value is None:
                continue
            metrics[site] = value
            weights[site] = 1.0 if self.zero_sum else float(reply.get(N_SAMPLES) or 1)
        combined = combined_score(metrics, weights, self.rule)
        mean = fmean(metrics.values()) if metrics else 0.0
        if self.rule == "paired" and self.value is not None:
            for candidate in self.record:
                if candidate["round"] == self.round:
                    combined = paired_score(metrics, candidate["votes"], self.value)
                    break
        self.propose(combined, rounds_trained, state, mean)
        if rounds_trained > 0:
            record = self._memory.meta.setdefault(self._record_key, [])
            record.append({"round": rounds_trained, "value": combined, "votes": metrics})

    @property
    def record(self) -> list[dict[str, Any]]:
        """{"round": rounds trained, "value": combined metric, "votes": site -> metric} of every
        candidate.
        """
        return list(self._memory.meta.get(self._record_key, []))


def combined_score(
    metrics: Mapping[str, float], samples: Mapping[str, float], rule: str = "median"
) -> float | None:
    """The sites' metrics as one: by "mean" weighted by `samples` (above 0), by any other rule the
    median; None without any.
    """
    if not metrics:
        return None
    if rule != "mean":
        return median(metrics.values())
    total = sum(samples[site] for site in metrics)
    return sum(value * samples[site] for site, value in metrics.items()) / total


def paired_score(
    metrics: Mapping[str, float], kept: Mapping[str, float], value: float
) -> float | None:
    """A candidate's score by the rule "paired": the kept model's `value` plus the sites' median
    gain over it; None without common sites.

    A median of metrics compares different sites if sites differ more than rounds do. A gain is one
    site's own, so a candidate replaces the kept model only if at least half of the sites do not
    lose.

    Args:
        metrics: site -> metric of the candidate.
        kept: site -> metric of the kept model, whose score is `value`.
    """
    gains = [metrics[site] - kept[site] for site in sorted(metrics.keys() & kept.keys())]
    return value + median(gains) if gains else None


def images_behind(counts: Mapping[str, int], rule: str) -> float:
    """Validation images that a selection rests on: by "mean" those of all sites (site -> count),
    else those of the median site.

    Examples:
        >>> counts = {"A": 5, "B": 4, "C": 4}
        >>> images_behind(counts, "median"), images_behind(counts, "mean")
        (4, 13)
        >>> images_behind({}, "median")
        0
    """
    if rule == "mean" or not counts:
        return sum(counts.values())
    return median(counts.values())


def plateau(history: Iterable[Mapping[str, Any]], patience: int) -> int | None:
    """The number of rounds trained when the sites' median metric had not improved for `patience`
    rounds (>= 1); None before.

    If sites validate several models (the global one and their own), each improvement counts, of
    those that most sites report, if there are such. Round 0 is no candidate.

    Args:
        history: {"round", "sites": site -> meta with "validation"} of every step of the finished
            rounds.
        patience: in rounds.
    """
    by_round: dict[int, dict[str, dict[str, float]]] = {}  # -> model -> site -> metric
    for step in history:
        if step["round"] <= 0:
            continue
        for site, meta in step["sites"].items():
            for model, value in (meta.get("validation") or {}).items():
                if value is not None:
                    models = by_round.setdefault(step["round"], {})
                    models.setdefault(model, {})[site] = value
    best: dict[str, float] = {}
    last_improvement = 0
    for round, models in sorted(by_round.items()):
        sites = set(chain.from_iterable(models.values()))
        common = {model for model in models if 2 * len(models[model]) > len(sites)}
        for model in common or models:
            by_site = models[model]
            metric = median(by_site.values())
            if metric > best.get(model, -math.inf):
                best[model] = metric
                last_improvement = round
        if round - last_improvement >= patience:
            return round + 1
    return None
