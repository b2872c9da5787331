"""Sharpness-aware hierarchical aggregation (SHA), FedDAG's server (Che et al., arXiv 2501.13967, Sec. III-C), for any site algorithm.

After training, a site also sends its model perturbed by ε (length ρ, along the gradient of its last batch). In a second phase of the
round the other sites score these perturbed models on their validation images: a flat minimum keeps its score. The server averages
within each site over the rounds (κ), then across sites with weights that grow with the score (β). ρ = 0 and κ = 0 give the plain
cross-client evaluation that the paper calls CEA.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

import torch
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, number, table
from medflare.core.message import Message
from medflare.core.rng import numpy_generator
from medflare.core.settings import STRICT
from medflare.core.states import StateDict, moved
from medflare.data.loading import Batch
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean, site_models
from medflare.methods.base import Capability, ServerContext, SiteAlgorithm, Step
from medflare.methods.fedavg.server import FedAvgServer, FedAvgServerHyper
from medflare.methods.fedavg.site import GLOBAL, MODEL
from medflare.methods.feddag import formulas
from medflare.privacy.settings import is_private
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics_table import selection_metrics
from medflare.training.epochs import finite_or_none, trainable

PERTURBED = TensorSpec(
    "perturbed",
    "the site's model moved along its last batch's gradient (whose direction it reveals), for other sites to score",
    when=lambda plan: _perturbs(plan.server_hyper),
)
CANDIDATE = TensorSpec("candidate/")  # the model of another site, to be scored
SCORES = MetaSpec("scores", "site -> score of its model on this site's validation images", table(number(optional=True)), "validation")
COMPANION = TensorSpec("companion/")  # in the server's memory
_AUC: Final = "auc_macro"


@dataclass(frozen=True, config=STRICT)
class SHAHyper(FedAvgServerHyper):
    """How models are scored and averaged; the sites read it too."""

    rho: float = param(0.3, "length of the perturbation that a model is scored with; 0: CEA", symbol="ρ", source="Sec. III-C1", low=0)
    kappa: int = param(
        4,
        "earlier models of a site that may join its current one, once there are so many; 0: none",
        symbol="κ",
        source="Sec. III-C3",
        low=0,
    )
    beta: float = param(1.0, "exponent of the scores; negative: the inverse", symbol="β", source="Eq. 6")
    centred: bool = param(True, "remove each evaluator's own level from the scores; false: means over the other sites", source="Eq. 5")
    sha: bool = param(True, "false: one phase a round, weights as FedAvg, no history (w/o SHA)", source="Table V")
    evaluators: int = param(
        0, "sites that score each model, drawn anew every round; 0: all others", symbol="|E_i|", source="Fig. 10", low=0
    )


def _perturbs(server_hyper: Any) -> bool:
    """Whether sites send a perturbed model; not with another method's server algorithm."""
    return isinstance(server_hyper, SHAHyper) and server_hyper.sha and server_hyper.rho > 0


class ScoredSite(SiteAlgorithm[Any]):
    """What SHA adds to any site algorithm whose `train` replies with a model: the perturbed model, and the scores of others."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    phases: ClassVar[tuple[Phase, ...]] = (Phase("train", reply=(PERTURBED,)), Phase("score", request=(CANDIDATE,), reply_meta=(SCORES,)))

    @classmethod
    def check(cls, task: TaskConfig, hyper: Any, server_hyper: Any) -> None:
        """Also raises ConfigError for DP-SGD if the perturbed model leaves the site."""
        super().check(task, hyper, server_hyper)
        if is_private(hyper) and _perturbs(server_hyper):
            raise ConfigError("dp_noise: the perturbed model reveals the direction of a gradient without noise; set rho=0 (CEA)")

    def train(self, round: int, incoming: Message) -> Message:
        """The other algorithm's training; the perturbed model is added to its reply."""
        reply: Message = super().train(round, incoming)  # type: ignore[misc]
        self.add_perturbed(round, reply)
        return reply

    def add_perturbed(self, round: int, reply: Message) -> None:
        """Add θ^ = θ + ρ g / ||g||_2 (Sec. III-C1) to a reply of `train`, if the settings require it.

        g is the gradient of the task loss in evaluation mode, in which others score the model; entries without one (buffers, frozen
        weights) are not changed.
        """
        if not _perturbs(self.plan.server_hyper):
            return
        state, batch = reply.states[MODEL], self.last_batch(round)
        model = self.network("model", state).eval()
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        of_parameters = torch.autograd.grad(self.site.loss(model(batch.images), batch.targets), trainable(model), allow_unused=True)
        gradients = {name: gradient.cpu() for name, gradient in zip(names, of_parameters, strict=True) if gradient is not None}
        step = formulas.sharpness_perturbation(gradients, self.plan.server_hyper.rho)
        reply.states[PERTURBED] = {**state, **moved({name: state[name] for name in gradients}, step)}

    def last_batch(self, round: int) -> Batch:
        return deque(self.site.batches("train", round, "model", self.site.task.local_epochs - 1), maxlen=1)[0]

    def score(self, round: int, incoming: Message) -> Message:
        """Scores of the incoming models on this site's validation images; None if undefined."""
        # AUC if the task has it, else the task's metric: F1 is often that of one constant prediction, and then equal for all models.
        metric = _AUC if _AUC in selection_metrics(self.site.task.kind) else None
        candidates = CANDIDATE.family(incoming.states)
        return Message({}, {SCORES: {site: self.validation(self.network("model", state), metric) for site, state in candidates.items()}})


class HierarchicalAggregation(WeightedMean):
    """Alg. 2 after the scores: averages within each site over the rounds, then across sites; keeps the sites' models of κ rounds.

    A model's score is its metadata item `score`; one without a score counts as an average one.

    Attributes:
        scores, weights: site -> s~ and w (Eq. 6) of the latest call.
    """

    def __init__(self, hyper: SHAHyper):
        super().__init__(hyper)
        self.history: dict[str, list[tuple[StateDict, float]]] = {}
        self.scores: dict[str, float] = {}

    def shared(self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None) -> StateDict:
        """Averages within each site (`within_client_average`), then across sites with weights by score (Eq. 6).

        A site's earlier models join once there are κ of them, since the scores of the first rounds still rise.
        """
        averaged: dict[str, StateDict] = {}
        self.scores = {}
        for site in sorted(models):
            score = models[site].meta.get("score")
            earlier = self.history.get(site, [])
            history = [*earlier, (models[site].state, math.nan if score is None else float(score))]
            states, values = zip(*history, strict=True)
            kappa = self.hyper.kappa if len(earlier) >= self.hyper.kappa else 0
            averaged[site], self.scores[site] = formulas.within_client_average(states, values, kappa)
            self.history[site] = history[-self.hyper.kappa :] if self.hyper.kappa else []
        scores = torch.tensor(list(self.scores.values()), dtype=torch.float64)
        self.weights = dict(zip(self.scores, formulas.soft_balancing_weights(scores, self.hyper.beta).tolist(), strict=True))
        return self.combined(averaged, self.weights, previous)

    def companion(self, states: Mapping[str, StateDict], weights: Mapping[str, float], origin: StateDict) -> StateDict:
        """The aggregate of states that travel with the models, by the same rule; `weights` are the models' (empty: the rule has none)."""
        model_weights = self.weights
        state = self.combined(states, {site: weights.get(site, 1.0) for site in states}, origin)
        self.weights = model_weights
        return state

    def mean(self, models: Mapping[str, SiteModel]) -> StateDict:
        """FedAvg's mean, for rounds without scores."""
        return super().shared(models, 0)

    def pack(self, message: Message) -> None:
        for site, past in self.history.items():
            message.states.update({f"history/{site}/{place}": state for place, (state, _) in enumerate(past)})
        message.meta["history"] = {site: [finite_or_none(score) for _, score in past] for site, past in self.history.items()}

    def unpack(self, message: Message) -> None:
        self.history = {
            site: [(message.states.pop(f"history/{site}/{place}"), math.nan if s is None else s) for place, s in enumerate(scores)]
            for site, scores in message.meta.pop("history", {}).items()
        }


K = TypeVar("K", bound=SHAHyper)


class SHAServer(FedAvgServer[K]):
    """Sites score each other's perturbed models; the server averages within and across sites (Alg. 2).

    `companions` are states that travel and are averaged with the model, with the same weights (FedDAG's generator).

    Raises:
        ConfigError: the site algorithm keeps a part of its model at the site.
    """

    Hyper: ClassVar[type] = SHAHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = HierarchicalAggregation
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    aggregation: HierarchicalAggregation
    site_extension: ClassVar[type[SiteAlgorithm[Any]] | None] = ScoredSite
    warmup: int = 0  # first rounds without SHA, whose models are not selected

    def __init__(self, context: ServerContext):
        super().__init__(context)
        if self.partial:
            raise ConfigError("SHA needs whole models to score; this site algorithm keeps a part of its model at the site")

    @property
    def companions(self) -> dict[str, StateDict]:
        """States that travel and are averaged with the model, by entry."""
        return COMPANION.family(self.memory.states)

    @property
    def candidates(self) -> dict[str, dict[str, StateDict]]:
        """site -> entries of its reply to this round's training."""
        by_site: dict[str, dict[str, StateDict]] = {}
        for name, state in CANDIDATE.family(self.memory.states).items():
            site, entry = name.rsplit("/", 1)
            by_site.setdefault(site, {})[entry] = state
        return by_site

    def steps(self) -> list[Step]:
        """A training and a scoring step per round, then the validation of the last models; FedAvg's schedule without SHA."""
        if not self.hyper.sha:
            return super().steps()
        rounds = [Step(phase, round) for round in range(self.context.rounds) for phase in ("train", "score")]
        return [*rounds, Step("validate", self.context.rounds, everyone=True)]

    def configure(self, step: Step, site: str) -> Message:
        """To train, the global model and its companions; to score, the perturbed models of the sites that this one evaluates."""
        if step.phase != "score":
            return Message({GLOBAL: self.model, **(self.companions if step.phase == "train" else {})})
        candidates = self.candidates
        scored = [other for other, evaluators in self._evaluators(step.round).items() if site in evaluators]
        return Message({CANDIDATE.of(other): candidates[other].get(PERTURBED, candidates[other][MODEL]) for other in scored})

    def _evaluators(self, round: int) -> dict[str, list[str]]:
        generator = numpy_generator(self.context.seed, "server", round, "evaluators")
        return formulas.choose_evaluators(sorted(self.candidates), self.hyper.evaluators, generator)

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """After training store the models; after scoring aggregate them (Alg. 2)."""
        if step.phase == "score":
            candidates = self.candidates
            scores = self._scores(step.round, sorted(candidates), replies)
            models = {site: SiteModel(entries[MODEL], meta={"score": scores[site]}) for site, entries in candidates.items()}
            model = self.aggregation.shared(models, step.round, self.model)
            self.context.note(score=self.aggregation.scores, weight=self.aggregation.weights)
            self._conclude(model, self.aggregation.weights)
            return
        if step.round > self.warmup:  # the number of rounds of training of the model
            self.best.update(replies, "global", step.round, self.model)
        if step.phase != "validate":
            for site, reply in replies.items():
                self.memory.states |= {CANDIDATE.of(f"{site}/{entry}"): state for entry, state in reply.states.items()}
            if not (self.hyper.sha and step.phase == "train"):
                models = site_models(replies, MODEL)
                self._conclude(self.aggregation.mean(models), self.aggregation.shares(models))

    def _conclude(self, model: StateDict, weights: Mapping[str, float]) -> None:
        """End a round with its global model; the companions are averaged with the same weights."""
        self.model, candidates = model, self.candidates
        for name in self.companions:
            sent = {site: entries[name] for site, entries in candidates.items() if name in entries}
            if sent:
                self.memory.states[COMPANION.of(name)] = self.aggregation.companion(sent, weights, self.companions[name])
        for name in CANDIDATE.family(self.memory.states):
            del self.memory.states[CANDIDATE.of(name)]

    def _scores(self, round: int, sites: list[str], replies: Mapping[str, Message]) -> dict[str, float]:
        """s_i of every candidate, NaN without a score; events name invalid and missing scores."""
        metrics = torch.full((len(sites), len(sites)), math.nan, dtype=torch.float64)
        evaluators, events = self._evaluators(round), self.context.events
        for column, evaluator in enumerate(sites):
            sent = replies[evaluator].meta.get(SCORES, {}) if evaluator in replies else {}
            for row, site in enumerate(sites):
                value = sent.get(site) if evaluator in evaluators[site] else None
                if isinstance(value, (int, float)) and 0 <= value <= 1:
                    metrics[row, column] = value
                elif value is not None:
                    events.add("rejected", f"score {value!r} for the model of {site} is not in [0, 1]", site=evaluator, round=round)
        scores = (formulas.centred_scores if self.hyper.centred else formulas.generalization_scores)(metrics).tolist()
        for site, score in zip(sites, scores, strict=True):
            if math.isnan(score) and len(sites) > 1:
                events.add("undefined", "no site scored this model; it counts as an average one", site=site, round=round)
        return dict(zip(sites, scores, strict=True))
