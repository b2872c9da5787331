"""Sharpness-aware hierarchical aggregation (SHA), FedDAG's server (Che et al., arXiv 2501.13967, Sec. III-C), for any site algorithm.

After training, a site also sends its model moved uphill by ε (length ρ, along the gradient of its last batch). In a second phase of
the round the other sites measure these perturbed models on their validation images: a model in a flat minimum keeps its score.
The server averages within each site over the rounds (κ), then across sites with weights that grow with the score (β). ρ = 0
and κ = 0 leave the plain cross-client evaluation that the paper calls CEA.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch

from medflare.core.errors import ConfigError
from medflare.core.manifest import TensorSpec
from medflare.core.message import Message
from medflare.core.rng import numpy_generator
from medflare.core.states import StateDict
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean, site_models
from medflare.methods.base import Capability, ServerContext, SiteAlgorithm, Step
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import GLOBAL, MODEL
from medflare.methods.feddag.formulas import (
    centred_scores,
    choose_evaluators,
    generalization_scores,
    soft_balancing_weights,
    within_client_average,
)
from medflare.methods.feddag.hyper import SHAHyper
from medflare.methods.feddag.scoring import CANDIDATE, PERTURBED, SCORES, ScoredSite
from medflare.training.epochs import finite_or_none

COMPANION = TensorSpec("companion/")  # in the server's memory

K = TypeVar("K", bound=SHAHyper)


class HierarchicalAggregation(WeightedMean):
    """Alg. 2 beyond the scores: averages within each site over the rounds, then across sites; remembers the sites' models.

    The score of a model is the item `score` that comes with it; one without a score counts as an average one.

    Attributes:
        scores, weights: site -> s~ and w (Eq. 6) of the latest call, for whoever wants to look.
    """

    def __init__(self, hyper: SHAHyper):
        super().__init__(hyper)
        self.history: dict[str, list[tuple[StateDict, float]]] = {}
        self.scores: dict[str, float] = {}

    def shared(self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None) -> StateDict:
        """Averages within each site (`within_client_average`), then across sites with weights by score (Eq. 6).

        A site's earlier models join once there are κ of them after the warm-up: before, they are those of models that all still rise.
        """
        averaged: dict[str, StateDict] = {}
        self.scores = {}
        for site in sorted(models):
            score = models[site].meta.get("score")
            earlier = self.history.get(site, [])
            past = [*earlier, (models[site].state, math.nan if score is None else float(score))]
            states, values = zip(*past, strict=True)
            kappa = self.hyper.kappa if len(earlier) >= self.hyper.kappa else 0
            averaged[site], self.scores[site] = within_client_average(states, values, kappa)
            self.history[site] = past[-self.hyper.kappa :] if self.hyper.kappa else []
        scores = torch.tensor(list(self.scores.values()), dtype=torch.float64)
        self.weights = dict(zip(self.scores, soft_balancing_weights(scores, self.hyper.beta).tolist(), strict=True))
        return self.combined(averaged, self.weights, previous)

    def companion(self, states: Mapping[str, StateDict], weights: Mapping[str, float], origin: StateDict) -> StateDict:
        """What travels with the model, by the same rule.

        Args:
            states: site -> what it sent.
            weights: site -> that of its model; empty where a robust rule goes without.
            origin: what the round began with.
        """
        found = self.weights
        state = self.combined(states, {site: weights.get(site, 1.0) for site in states}, origin)
        self.weights = found
        return state

    def mean(self, models: Mapping[str, SiteModel]) -> StateDict:
        """FedAvg's mean, for rounds without scores."""
        return super().shared(models, 0)

    def pack(self, message: Message) -> None:
        """Add the history to a message that stores an algorithm."""
        for site, past in self.history.items():
            message.states.update({f"history/{site}/{place}": state for place, (state, _) in enumerate(past)})
        message.meta["history"] = {site: [finite_or_none(score) for _, score in past] for site, past in self.history.items()}

    def unpack(self, message: Message) -> None:
        """Take up the history that `pack` stored."""
        self.history = {
            site: [(message.states.pop(f"history/{site}/{place}"), math.nan if s is None else s) for place, s in enumerate(scores)]
            for site, scores in message.meta.pop("history", {}).items()
        }


class SHAServer(FedAvgServer[K]):
    """Lets sites score each other's perturbed models, then averages within and across sites (Alg. 2).

    `companions` are states that travel and are averaged with the model, with the same weights (FedDAG's generator).

    Raises:
        ConfigError: the site algorithm keeps a part of its model at home.
    """

    Hyper: ClassVar[type] = SHAHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = HierarchicalAggregation
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    aggregation: HierarchicalAggregation
    site_extension: ClassVar[type[SiteAlgorithm[Any]] | None] = ScoredSite
    warmup: int = 0  # first rounds without SHA, whose models are not offered for delivery

    def __init__(self, context: ServerContext):
        super().__init__(context)
        if self.partial:
            raise ConfigError("SHA lets sites score each other's whole models; this site algorithm keeps a part of its model at home")

    @property
    def companions(self) -> dict[str, StateDict]:
        """States that travel and are averaged with the model, by entry."""
        return COMPANION.family(self.memory.states)

    @property
    def candidates(self) -> dict[str, dict[str, StateDict]]:
        """site -> entries of its reply to the training that has just been done."""
        found: dict[str, dict[str, StateDict]] = {}
        for name, state in CANDIDATE.family(self.memory.states).items():
            site, entry = name.rsplit("/", 1)
            found.setdefault(site, {})[entry] = state
        return found

    @candidates.setter
    def candidates(self, candidates: Mapping[str, Mapping[str, StateDict]]) -> None:
        for name in CANDIDATE.family(self.memory.states):
            del self.memory.states[CANDIDATE.of(name)]
        for site, entries in candidates.items():
            self.memory.states |= {CANDIDATE.of(f"{site}/{entry}"): state for entry, state in entries.items()}

    def steps(self) -> list[Step]:
        """A training and a scoring step per round, and a look at the last models; FedAvg's schedule without SHA."""
        if not self.hyper.sha:
            return super().steps()
        rounds = [Step(phase, round) for round in range(self.context.rounds) for phase in ("train", "score")]
        return [*rounds, Step("validate", self.context.rounds, everyone=True)]

    def configure(self, step: Step, site: str) -> Message:
        """The global model and its companions to train; to score, the perturbed models of the sites that this one evaluates."""
        if step.phase != "score":
            return Message({GLOBAL: self.model, **(self.companions if step.phase == "train" else {})})
        candidates = self.candidates
        asked = [other for other, evaluators in self._evaluators(step.round).items() if site in evaluators]
        return Message({CANDIDATE.of(other): candidates[other].get(PERTURBED, candidates[other][MODEL]) for other in asked})

    def _evaluators(self, round: int) -> dict[str, list[str]]:
        generator = numpy_generator(self.context.seed, "server", round, "evaluators")
        return choose_evaluators(sorted(self.candidates), self.hyper.evaluators, generator)

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """After training keep the models until they are scored; after scoring make the next global one of them (Alg. 2)."""
        if step.phase == "score":
            candidates = self.candidates
            scores = self._scores(step.round, sorted(candidates), replies)
            models = {site: SiteModel(entries[MODEL], meta={"score": scores[site]}) for site, entries in candidates.items()}
            model = self.aggregation.shared(models, step.round, self.model)
            self.context.note(score=self.aggregation.scores, weight=self.aggregation.weights)
            self._conclude(model, self.aggregation.weights)
            return
        if step.round > self.warmup:  # as many rounds are behind the model; those of a warm-up are FedAvg's
            self.best.update(replies, "global", step.round, self.model)
        if step.phase != "validate":
            self.candidates = {site: dict(reply.states) for site, reply in replies.items()}
            if not (self.hyper.sha and step.phase == "train"):
                models = site_models(replies, MODEL)
                self._conclude(self.aggregation.mean(models), self.aggregation.shares(models))

    def _conclude(self, model: StateDict, weights: Mapping[str, float]) -> None:
        """End a round with its global model; what the candidates brought beside their models is averaged with the same weights."""
        self.model, candidates = model, self.candidates
        for name in self.companions:
            sent = {site: entries[name] for site, entries in candidates.items() if name in entries}
            if sent:
                self.memory.states[COMPANION.of(name)] = self.aggregation.companion(sent, weights, self.companions[name])
        self.candidates = {}

    def _scores(self, round: int, sites: list[str], replies: Mapping[str, Message]) -> dict[str, float]:
        """s_i of every candidate; a candidate that nobody could score is noted and gets NaN."""
        metrics = torch.full((len(sites), len(sites)), math.nan, dtype=torch.float64)
        evaluators = self._evaluators(round)
        for column, site in enumerate(sites):
            given = replies[site].meta.get(SCORES, {}) if site in replies else {}
            for row, other in enumerate(sites):
                if site in evaluators[other]:
                    metrics[row, column] = self._checked(given.get(other), other, site, round)
        formula = centred_scores if self.hyper.centred else generalization_scores
        scores = formula(metrics)
        for site, value in zip(sites, scores.tolist(), strict=True):
            if math.isnan(value) and len(sites) > 1:
                text = "no other site could score this model; it counts as an average one"
                self.context.events.add("undefined", text, site=site, round=round)
        return dict(zip(sites, scores.tolist(), strict=True))

    def _checked(self, value: float | None, model: str, evaluator: str, round: int) -> float:
        if value is None:
            return math.nan
        if not (isinstance(value, (int, float)) and 0 <= value <= 1):
            text = f"score {value!r} for the model of {model} is not between 0 and 1 and is left out"
            self.context.events.add("rejected", text, site=evaluator, round=round)
            return math.nan
        return float(value)
