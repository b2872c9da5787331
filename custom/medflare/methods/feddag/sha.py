"""Sharpness-aware hierarchical aggregation (SHA), FedDAG's server half (Che et al., arXiv 2501.13967, Sec. III-C), for any site half.

After training, a site also sends its model moved uphill by ε (length ρ, along the gradient of its last batch). In a second phase of
the round the other sites measure these perturbed models on their validation images: a model in a flat minimum keeps its score.
The server averages within each site over the rounds (κ), then across sites with weights that grow with the score (β). ρ = 0
and κ = 0 leave the plain cross-client evaluation that the paper calls CEA.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.manifest import Manifest
from medflare.core.message import Message
from medflare.core.rng import numpy_generator
from medflare.core.states import StateDict, moved, weighted_mean
from medflare.methods.base import Plan, ServerContext, SiteHalf, Step, plain_entry, sample_weights
from medflare.methods.fedavg import FedAvgServer, FedAvgServerHyper
from medflare.methods.feddag.formulas import (
    choose_evaluators,
    generalization_scores,
    sharpness_perturbation,
    soft_balancing_weights,
    softmax_weights,
    within_client_average,
)
from medflare.methods.parts.selection import mean_validation
from medflare.methods.parts.training import finite_or_none, trainable
from medflare.privacy.settings import is_private
from medflare.sites.site import Batch
from medflare.tasks.config import CLASSIFICATION_METRICS, SEGMENTATION_METRICS, TaskConfig

SCORE_METRICS = ("task", "exp_loss", *(name for name in (*SEGMENTATION_METRICS, *CLASSIFICATION_METRICS) if name != "hd95"))


@dataclass(frozen=True)
class SHAHyper(FedAvgServerHyper):
    """Both halves share one set of settings: the server must know what the sites send."""

    rho: float = param(0.3, "length of the perturbation that a model is scored with; 0: CEA", symbol="ρ", source="Sec. III-C1", low=0)
    kappa: int = param(4, "earlier models of a site that may join its current one; 0: none", symbol="κ", source="Sec. III-C3", low=0)
    window: str = param(
        "rounds", "κ counts rounds, or models that scored higher (keeps all models)", source="Sec. III-C3", choices=("rounds", "passing")
    )
    balancing: str = param("power", "weights from scores: s^β, or softmax of s/T", source="Eq. 6", choices=("power", "softmax"))
    beta: float = param(1.0, "exponent of the scores; negative: the inverse", symbol="β", source="Eq. 6")
    temperature: float = param(0.1, "T of balancing=softmax", symbol="T", low=1e-6)
    score_metric: str = param(
        "task", "what a score is: the task's metric, another one, or exp(-loss)", source="Eq. 5", choices=SCORE_METRICS
    )
    score_weighting: str = param(
        "uniform", "evaluators count equally or by validation images", source="Eq. 5", choices=("uniform", "samples")
    )
    sha: bool = param(True, "false: one phase a round, weights as FedAvg, no history (w/o SHA)", source="Table V")
    evaluators: int = param(
        0, "sites that score each model, drawn anew every round; 0: all others", symbol="|E_i|", source="Fig. 10", low=0
    )


class ScoredSite(SiteHalf):
    """What SHA asks of a site beside training, mixed into any half whose `train` replies with a model.

    `train` adds the perturbed model to the reply; `score` measures the perturbed models of other sites.
    """

    Hyper: ClassVar[type] = SHAHyper
    phases: ClassVar[tuple[str, ...]] = ("score",)

    @classmethod
    def outbound(cls, phase: str, plan: Plan) -> Manifest:
        entries = super().outbound(phase, plan)
        if phase == "train" and _perturbs(plan.hyper):
            purpose = "the site's model moved along its last batch's gradient (whose direction it reveals), for other sites to score"
            entries["perturbed"] = plain_entry(plan, purpose)
        return entries

    @classmethod
    def check(cls, task: TaskConfig, hyper: Any) -> None:
        super().check(task, hyper)
        if is_private(hyper) and _perturbs(hyper):
            raise ConfigError("dp_noise: the perturbed model shows the direction of a gradient without noise; set rho=0 (CEA)")

    def train(self, round: int, incoming: Message) -> Message:
        reply: Message = super().train(round, incoming)  # type: ignore[misc]
        self.add_perturbed(round, reply)
        return reply

    def add_perturbed(self, round: int, reply: Message) -> None:
        """θ^ beside θ in a reply to `train`, where the settings ask for it; one more backward pass."""
        if _perturbs(self.hyper):
            gradients = self.gradients(self.network("model", reply.states["model"]), self.last_batch(round))
            reply.states["perturbed"] = perturbed(reply.states["model"], gradients, self.hyper.rho)

    def last_batch(self, round: int) -> Batch:
        """The batch that the round's training ended with."""
        return deque(self.site.batches("train", round, "model", self.site.task.local_epochs - 1), maxlen=1)[0]

    def perturbation_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss whose gradient perturbs the model: the task's."""
        return self.site.loss(model(batch.images), batch.targets)

    def gradients(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Gradients in evaluation mode: of the model as others will measure it, its running statistics untouched."""
        model.eval()
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        found = torch.autograd.grad(self.perturbation_loss(model, batch), trainable(model), allow_unused=True)
        return {name: gradient.cpu() for name, gradient in zip(names, found, strict=True) if gradient is not None}

    def score(self, round: int, incoming: Message) -> Message:
        """Scores of the incoming models on this site's validation images, by entry; None where undefined."""
        found = {entry: finite_or_none(self._score(state)) for entry, state in sorted(incoming.states.items())}
        return Message({}, {"scores": found})

    def _score(self, state: StateDict) -> float | None:
        model = self.network("model", state).eval()
        if self.hyper.score_metric == "exp_loss":
            return self._exp_loss(model)
        metric = self.site.task.metric if self.hyper.score_metric == "task" else self.hyper.score_metric
        return self.site.score(self.site.predictor(model), "validation", [metric]).values[metric]

    @torch.no_grad()
    def _exp_loss(self, model: nn.Module) -> float | None:
        total, seen = 0.0, 0
        for images, targets, _ in self.site.ordered("validation"):
            total += self.site.loss(model(images), targets).item() * len(images)
            seen += len(images)
        return math.exp(-total / seen) if seen else None


def _perturbs(hyper: SHAHyper) -> bool:
    return hyper.sha and hyper.rho > 0


def perturbed(state: StateDict, gradients: Mapping[str, Tensor], rho: float) -> StateDict:
    """θ^ = θ + ρ g / ||g||_2 (Sec. III-C1); what has no gradient (buffers, frozen weights) stays as it is."""
    return {**state, **moved({name: state[name] for name in gradients}, sharpness_perturbation(gradients, rho))}


class HierarchicalAggregation:
    """Alg. 2 beyond the scores: averages within each site over the rounds, then across sites; remembers the sites' models.

    Attributes:
        scores, weights: site -> s~ and w (Eq. 6) of the latest call, for whoever wants to look.
    """

    def __init__(self, hyper: SHAHyper):
        self.hyper = hyper
        self.history: dict[str, list[tuple[StateDict, float]]] = {}
        self.scores: dict[str, float] = {}
        self.weights: dict[str, float] = {}

    def __call__(self, models: Mapping[str, StateDict], scores: Mapping[str, float]) -> StateDict:
        """The next global model from the sites' models of this round and their scores (NaN: without one)."""
        averaged: dict[str, StateDict] = {}
        self.scores = {}
        for site in sorted(models):
            past = [*self.history.get(site, []), (models[site], scores[site])]
            states, values = zip(*past, strict=True)
            averaged[site], self.scores[site] = within_client_average(states, values, self.hyper.kappa, self.hyper.window)
            kept = past if self.hyper.window == "passing" else past[-self.hyper.kappa :]
            self.history[site] = kept if self.hyper.kappa else []
        self.weights = dict(zip(self.scores, self._balanced(list(self.scores.values())), strict=True))
        return weighted_mean(averaged, self.weights)

    def _balanced(self, scores: list[float]) -> list[float]:
        values = torch.tensor(scores, dtype=torch.float64)
        if self.hyper.balancing == "softmax":
            return softmax_weights(values, self.hyper.temperature).tolist()
        return soft_balancing_weights(values, self.hyper.beta).tolist()

    def pack(self, message: Message) -> None:
        """Add the history to a message that stores a half."""
        for site, past in self.history.items():
            message.states.update({f"history/{site}/{place}": state for place, (state, _) in enumerate(past)})
        message.facts["history"] = {site: [finite_or_none(score) for _, score in past] for site, past in self.history.items()}

    def unpack(self, message: Message) -> None:
        self.history = {
            site: [(message.states[f"history/{site}/{place}"], math.nan if score is None else score) for place, score in enumerate(scores)]
            for site, scores in message.facts["history"].items()
        }


class SHAServer(FedAvgServer):
    """Lets sites score each other's perturbed models, then averages within and across sites (Alg. 2).

    `companions` are states that travel and are averaged with the model, with the same weights (FedDAG's generator).
    """

    Hyper: ClassVar[type] = SHAHyper
    site_extension: ClassVar[type[SiteHalf] | None] = ScoredSite

    def __init__(self, context: ServerContext, hyper: Any):
        super().__init__(context, hyper)
        if hyper.score_metric not in ("task", "exp_loss", *context.task.metrics):
            raise ConfigError(
                f"hyper-parameter score_metric = {hyper.score_metric!r} is not measured in a {context.task.kind} task; "
                f"choose task, exp_loss or one of {', '.join(context.task.metrics)}"
            )
        self.companions: dict[str, StateDict] = {}
        self.candidates: dict[str, dict[str, StateDict]] = {}
        self.aggregation = HierarchicalAggregation(hyper)

    def steps(self) -> list[Step]:
        if not self.hyper.sha:
            return super().steps()
        rounds = [Step(phase, round) for round in range(self.context.rounds) for phase in ("train", "score")]
        return [*rounds, Step("validate", self.context.rounds, everyone=True)]

    def outgoing(self, step: Step, site: str) -> Message:
        if step.phase != "score":
            return Message({"model": self.model, **(self.companions if step.phase == "train" else {})})
        asked = [other for other, evaluators in self._evaluators(step.round).items() if site in evaluators]
        return Message({other: self.candidates[other].get("perturbed", self.candidates[other]["model"]) for other in asked})

    def _evaluators(self, round: int) -> dict[str, list[str]]:
        generator = numpy_generator(self.context.seed, "server", round, "evaluators")
        return choose_evaluators(sorted(self.candidates), self.hyper.evaluators, generator)

    def accept(self, step: Step, replies: Mapping[str, Message]) -> None:
        if step.phase == "score":
            scores = self._scores(step.round, sorted(self.candidates), replies)
            model = self.aggregation({site: entries["model"] for site, entries in self.candidates.items()}, scores)
            self.context.note(score=self.aggregation.scores, weight=self.aggregation.weights)
            self._conclude(model, self.aggregation.weights)
            return
        self.best.offer(mean_validation(replies, "global"), step.round, self.model)
        if step.phase != "validate":
            self.candidates = {site: dict(reply.states) for site, reply in replies.items()}
            if not (self.hyper.sha and step.phase == "train"):
                self._conclude(self.aggregate(replies), sample_weights(replies, self.hyper.weighting))

    def _conclude(self, model: StateDict, weights: Mapping[str, float]) -> None:
        """End a round with its global model; what the candidates brought beside their models is averaged with the same weights."""
        self.model = model
        for name in self.companions:
            sent = {site: entries[name] for site, entries in self.candidates.items() if name in entries}
            self.companions[name] = weighted_mean(sent, weights) if sent else self.companions[name]
        self.candidates = {}

    def _scores(self, round: int, sites: list[str], replies: Mapping[str, Message]) -> dict[str, float]:
        """s_i of every candidate; a candidate that nobody could score is noted and gets NaN."""
        metrics = torch.full((len(sites), len(sites)), math.nan, dtype=torch.float64)
        counts = torch.zeros(len(sites), dtype=torch.float64)
        for column, site in enumerate(sites):
            given = replies[site].facts.get("scores", {}) if site in replies else {}
            counts[column] = self.context.site_counts.get(site, {}).get("n", {}).get("validation", 0)
            for row, other in enumerate(sites):
                metrics[row, column] = self._checked(given.get(other), other, site, round)
        scores = generalization_scores(metrics, counts if self.hyper.score_weighting == "samples" else None)
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

    def state(self) -> Message:
        message = super().state()
        message.states.update({f"companion/{name}": state for name, state in self.companions.items()})
        for site, entries in self.candidates.items():
            message.states.update({f"candidate/{site}/{entry}": state for entry, state in entries.items()})
        self.aggregation.pack(message)
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        self.companions = {name: state.states[f"companion/{name}"] for name in self.companions}
        self.candidates = {}
        for entry, tensors in state.states.items():
            if entry.startswith("candidate/"):
                site, name = entry.removeprefix("candidate/").rsplit("/", 1)
                self.candidates.setdefault(site, {})[name] = tensors
        self.aggregation.unpack(state)
