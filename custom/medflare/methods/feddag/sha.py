"""Sharpness-aware hierarchical aggregation (SHA), FedDAG's server, for any site algorithm.

Che et al., arXiv 2501.13967, Sec. III-C. After training, a site also sends its model perturbed by ε
(length ρ, along the gradient of its last batches, see `few_patients`). In a second phase of the
round the other sites score these perturbed models on their validation images: a flat minimum keeps
its score. The server averages within each site over the rounds (κ), then across sites with weights
that grow with the score (β). ρ = 0 and κ = 0 give the plain cross-client evaluation that the paper
calls CEA.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from medflare.core.rng import numpy_generator
from medflare.core.states import moved, on_cpu
from medflare.data.loading import Batch
from medflare.methods import (
    MODEL,
    ConfigError,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSite,
    Message,
    MetaSpec,
    Replies,
    ServerContext,
    SiteAlgorithm,
    SiteModel,
    StateDict,
    Step,
    TaskConfig,
    TensorSpec,
    WeightedMean,
    asks,
    extends,
    finite_or_none,
    handles,
    number,
    param,
    phase,
    site_models,
    strict_dataclass,
    table,
)
from medflare.methods.aggregation import Models
from medflare.methods.feddag import formulas
from medflare.methods.parts.few_patients import LastBatches, mean_gradients
from medflare.methods.parts.tensors import named_gradients
from medflare.privacy.settings import is_private
from medflare.tasks.metrics_table import selection_metrics
from medflare.training.epochs import named_trainable

PERTURBED = TensorSpec(
    "perturbed",
    "the site's model moved along its last batches' gradient (whose direction it reveals), "
    "for other sites to score",
    when=lambda plan: _perturbs(plan.server_hyper),
)
# The models of other sites, to be scored; in the server's memory every entry of a site's reply.
CANDIDATES = TensorSpec("candidate", of=lambda plan: plan.sites)
SCORES = MetaSpec[dict[str, float | None]](
    "scores",
    "site -> score of its model on this site's validation images",
    table(number(optional=True)),
    "validation",
)
COMPANIONS = TensorSpec("companion")  # in the server's memory, by entry
_AUC = "auc_macro"


@strict_dataclass
class SHAHyper(FedAvgServerHyper):
    """How models are scored and averaged; the sites read it too."""

    rho: float = param(
        0.3,
        "length of the perturbation that a model is scored with; 0: CEA",
        symbol="ρ",
        source="Sec. III-C1",
        low=0,
    )
    kappa: int = param(
        4,
        "earlier models of a site that may join its current one, once there are so many; 0: none",
        symbol="κ",
        source="Sec. III-C3",
        low=0,
    )
    beta: float = param(
        1.0,
        "exponent of the scores; negative: the inverse",
        symbol="β",
        source="Eq. 6",
        low=-10,
        high=10,  # so that no site with a score near the others' has nearly all weight
    )
    centred: bool = param(
        True,
        "remove each evaluator's own level from the scores; false: means over the other sites",
        source="Eq. 5",
    )
    sha: bool = param(
        True, "false: one phase a round, weights as FedAvg, no history (w/o SHA)", source="Table V"
    )
    evaluators: int = param(
        0,
        "sites that score each model, drawn anew every round; 0: all others",
        symbol="|E_i|",
        source="Fig. 10",
        low=0,
    )


def _perturbs(server_hyper: Any) -> bool:
    """Whether sites send a perturbed model; not with another method's server algorithm."""
    return isinstance(server_hyper, SHAHyper) and server_hyper.sha and server_hyper.rho > 0


class ScoredSite(SiteAlgorithm):
    """What SHA adds to any site algorithm whose `train` replies with a model: the perturbed model,
    and the scores of others' models.
    """

    accumulates = False
    freezes = False

    @classmethod
    def check(cls, task: TaskConfig, hyper: Any, server_hyper: Any) -> None:
        """Also raises ConfigError for DP-SGD if the perturbed model leaves the site."""
        super().check(task, hyper, server_hyper)
        if is_private(hyper) and _perturbs(server_hyper):
            raise ConfigError(
                "dp_noise: the perturbed model reveals the direction of a gradient without noise; "
                "set rho=0 (CEA)"
            )

    @extends(reply=(PERTURBED,))
    def train(self, round: int, incoming: Message) -> Message:
        """The other algorithm's training; the perturbed model is added to its reply."""
        reply: Message = super().train(round, incoming)  # type: ignore[misc]
        self.add_perturbed(round, reply)
        return reply

    def add_perturbed(self, round: int, reply: Message) -> None:
        """Add θ^ = θ + ρ g / ||g||_2 (Sec. III-C1) to a reply of `train`, if the settings say so.

        g is the gradient of the task loss in evaluation mode, in which others score the model;
        entries without one (buffers, frozen weights) are not changed.
        """
        if not _perturbs(self.plan.server_hyper):
            return
        state = reply[MODEL]
        model = self.network("model", state).eval()
        weights = named_trainable(model)

        def gradients_of(batch: Batch) -> list[Tensor]:
            loss = self.site.loss(model(batch.images), batch.targets)
            return list(named_gradients(loss, weights).values())

        means = mean_gradients(self.last_batches(round), gradients_of)
        gradients = on_cpu(dict(zip(weights, means, strict=True)))
        epsilon = formulas.sharpness_perturbation(gradients, self.plan.server_hyper.rho)
        reply[PERTURBED] = {**state, **moved({name: state[name] for name in gradients}, epsilon)}

    def last_batches(self, round: int) -> Collection[Batch]:
        """The last batches of the round's last epoch, see `LastBatches`."""
        last_epoch = self.site.task.local_epochs - 1
        last = LastBatches(self.site)
        for batch in self.site.batches("train", round, "model", last_epoch):
            last.add(batch)
        return last.batches

    @phase(request=(CANDIDATES,), meta=(SCORES,))
    def score(self, round: int, incoming: Message) -> Message:
        """Scores of the incoming models on this site's validation images; None if undefined."""
        # AUC if the task has it, else the task's metric: F1 is often that of one constant
        # prediction, and then equal for all models.
        metric = _AUC if _AUC in selection_metrics(self.site.task.kind) else None
        models = incoming.family(CANDIDATES).items()
        scores = {
            site: self.validation(self.network("model", state), metric) for site, state in models
        }
        return Message.of({SCORES: scores})


class HierarchicalAggregation(WeightedMean):
    """Alg. 2 after the scores: averages within each site over the rounds, then across sites.

    It keeps the sites' models of κ rounds. A model's score is its metadata item `score`; one
    without a score counts as an average one.

    Attributes:
        scores, weights: site -> s~ and w (Eq. 6) of the latest call.
    """

    def __init__(self, hyper: SHAHyper):
        super().__init__(hyper)
        self.history: dict[str, list[tuple[StateDict, float]]] = {}
        self.scores: dict[str, float] = {}

    def shared(self, models: Models, round: int, previous: StateDict | None = None) -> StateDict:
        """Averages within each site (see `within_client_average`), then across sites with weights
        by score (Eq. 6).

        A site's earlier models join once there are κ of them, since the scores of the first rounds
        still rise.
        """
        averaged = {}
        self.scores = {}
        kappa = self.hyper.kappa
        for site in sorted(models):
            score = models[site].meta.get("score")
            score = math.nan if score is None else float(score)
            earlier = self.history.get(site, [])
            history = [*earlier, (models[site].state, score)]
            states, values = zip(*history, strict=True)
            joining = kappa if len(earlier) >= kappa else 0
            model, mean_score = formulas.within_client_average(states, values, joining)
            averaged[site] = model
            self.scores[site] = mean_score
            self.history[site] = history[-kappa:] if kappa else []
        weights = formulas.soft_balancing_weights(list(self.scores.values()), self.hyper.beta)
        self.weights = dict(zip(self.scores, weights.tolist(), strict=True))
        return self.combined(averaged, self.weights, previous)

    def mean(self, models: Models, previous: StateDict) -> StateDict:
        """FedAvg's mean, for rounds without scores."""
        return super().shared(models, 0, previous)

    def pack(self, message: Message) -> None:
        by_site = {}
        for site, past in self.history.items():
            for index, (state, _) in enumerate(past):
                message.states[f"history/{site}/{index}"] = state
            by_site[site] = [finite_or_none(score) for _, score in past]
        message.meta["history"] = by_site

    def unpack(self, message: Message) -> None:
        self.history = {}
        for site, scores in message.meta.pop("history", {}).items():
            past = []
            for index, score in enumerate(scores):
                state = message.states.pop(f"history/{site}/{index}")
                past.append((state, math.nan if score is None else score))
            self.history[site] = past


K = TypeVar("K", bound=SHAHyper)


class SHAServer(FedAvgServer[K]):
    """Sites score each other's perturbed models; the server averages within and across sites (Alg.
    2).

    `companions` are states that travel and are averaged with the model, with the same weights
    (FedDAG's generator).

    Raises:
        ConfigError: the site algorithm keeps a part of its model at the site.
    """

    Hyper = SHAHyper
    aggregation_class = HierarchicalAggregation
    freezes = False
    aggregation: HierarchicalAggregation
    site_extension = ScoredSite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        if self.partial:
            raise ConfigError(
                "SHA needs whole models to score; "
                "this site algorithm keeps a part of its model at the site"
            )

    @property
    def companions(self) -> dict[str, StateDict]:
        """States that travel and are averaged with the model, by entry."""
        return self.memory.family(COMPANIONS)

    @property
    def candidates(self) -> dict[str, dict[str, StateDict]]:
        """site -> entries of its reply to this round's training."""
        by_site: dict[str, dict[str, StateDict]] = {}
        for name, state in self.memory.family(CANDIDATES).items():
            site, entry = name.rsplit("/", 1)
            by_site.setdefault(site, {})[entry] = state
        return by_site

    def steps(self) -> list[Step]:
        """FedAvg's schedule; with SHA a scoring step after every training step."""
        steps = []
        for step in super().steps():
            steps.append(step)
            if self.hyper.sha and step.phase == FedAvgSite.train.__name__:
                steps.append(Step.of(ScoredSite.score, step.round))
        return steps

    @asks(FedAvgSite.train)
    def request_of_training(self, step: Step, site: str) -> Message:
        """The global model and its companions."""
        message = Message.of({MODEL: self.model})
        message.states.update(self.companions)
        return message

    @asks(ScoredSite.score)
    def request_of_scores(self, step: Step, site: str) -> Message:
        """The perturbed models of the sites that this one evaluates."""
        candidates = self.candidates
        message = Message()
        for other, evaluators in self._evaluators(step.round).items():
            if site in evaluators:
                entries = candidates[other]
                perturbed = entries.get(PERTURBED.name, entries[MODEL.name])
                message[CANDIDATES.member(other)] = perturbed
        return message

    def _evaluators(self, round: int) -> dict[str, list[str]]:
        generator = numpy_generator(self.context.seed, "server", round, "evaluators")
        return formulas.choose_evaluators(sorted(self.candidates), self.hyper.evaluators, generator)

    def select_model(self, step: Step, replies: Replies) -> None:
        """Enter the model in the selection, from the end of the warm-up."""
        if step.round > self.warmup:  # the number of rounds of training of the model
            super().select_model(step, replies)

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """Store the models until they are scored; without SHA end the round by FedAvg's mean."""
        if not self.hyper.sha:
            self.average_models(step, replies)
            return
        self.select_model(step, replies)
        self._store(replies)

    @handles(ScoredSite.score)
    def aggregate_scored(self, step: Step, replies: Replies) -> None:
        """Aggregate the scored models (Alg. 2)."""
        candidates = self.candidates
        scores = self._scores(step.round, sorted(candidates), replies)
        models = {
            site: SiteModel(entries[MODEL.name], meta={"score": scores[site]})
            for site, entries in candidates.items()
        }
        model = self.aggregation.shared(models, step.round, self.model)
        self.context.note(score=self.aggregation.scores, weight=self.aggregation.weights)
        self._conclude(model, self.aggregation.weights)

    def _store(self, replies: Replies) -> None:
        for site, reply in replies.items():
            for entry, state in reply.states.items():
                self.memory[CANDIDATES.member(f"{site}/{entry}")] = state

    def average_models(self, step: Step, replies: Replies) -> None:
        """End a round without scores by FedAvg's mean."""
        self.select_model(step, replies)
        self._store(replies)
        models = site_models(replies, MODEL)
        mean = self.aggregation.mean(models, self.model)
        self._conclude(mean, self.aggregation.shares(models))

    def _conclude(self, model: StateDict, weights: Mapping[str, float]) -> None:
        """End a round with its global model; the companions are averaged with the same weights."""
        self.model = model
        candidates = self.candidates
        for name, origin in self.companions.items():
            sent = {site: entries[name] for site, entries in candidates.items() if name in entries}
            if sent:
                shares = {site: weights.get(site, 1.0) for site in sent}  # some rules have none
                averaged = self.aggregation.combined(sent, shares, origin)
                self.memory[COMPANIONS.member(name)] = averaged
        for name in self.memory.family(CANDIDATES):
            del self.memory.states[CANDIDATES.member(name).name]

    def _scores(self, round: int, sites: list[str], replies: Replies) -> dict[str, float]:
        """s_i of every candidate, NaN without a score; events name invalid and missing scores."""
        metrics = torch.full((len(sites), len(sites)), math.nan, dtype=torch.float64)
        evaluators = self._evaluators(round)
        events = self.context.events
        for evaluator, reply in sorted(replies.items()):
            sent = reply.get(SCORES) or {}
            for row, site in enumerate(sites):
                if evaluator not in evaluators[site]:
                    continue
                value = sent.get(site)
                if isinstance(value, (int, float)) and 0 <= value <= 1:
                    metrics[row, sites.index(evaluator)] = value
                elif value is not None:
                    text = f"score {value!r} for the model of {site} is not in [0, 1]"
                    events.add("rejected", text, site=evaluator, round=round)
        if self.hyper.centred:
            scores = formulas.centred_scores(metrics).tolist()
        else:
            scores = formulas.generalization_scores(metrics).tolist()
        for site, score in zip(sites, scores, strict=True):
            if math.isnan(score) and len(sites) > 1:
                text = "no site scored this model; it counts as an average one"
                events.add("undefined", text, site=site, round=round)
        return dict(zip(sites, scores, strict=True))
