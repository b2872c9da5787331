"""Weights from validation metrics of whole models: FedDG-GA and FedCE."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from medflare.core.numbers import fractions
from medflare.methods import (
    MODEL,
    VALIDATION,
    ConfigError,
    FedAvgServer,
    FedAvgSite,
    Message,
    MetaSpec,
    Plan,
    Replies,
    SiteAlgorithm,
    StateDict,
    Step,
    TaskConfig,
    TensorSpec,
    asks,
    extends,
    number,
    param,
    strict_dataclass,
    weighted_mean,
)
from medflare.methods.families.server_rules.rule import (
    Models,
    ReweightedMean,
    UniformHyper,
    Weights,
    inner_products,
)

_METRIC = number(0, 1, optional=True)
TRAINED_METRIC = MetaSpec[float | None](
    "trained_metric",
    "the task's metric on validation images, of the locally trained model",
    _METRIC,
    "validation",
)
WITHOUT = TensorSpec("without", optional=True)  # the mean model without the site
WITHOUT_METRIC = MetaSpec[float | None](
    "without_metric",
    "the task's metric on validation images, of the model without this site",
    _METRIC,
    "validation",
)


class MeasuringSite(SiteAlgorithm):
    """Extends any site algorithm that replies with a whole model."""

    freezes = False

    @classmethod
    def check(cls, task: TaskConfig, hyper: Any, server_hyper: Any) -> None:
        """Also raises ConfigError if no whole model travels."""
        super().check(task, hyper, server_hyper)
        plan = Plan(task, (), hyper, server_hyper)
        sent = cls.manifest("train", plan).get(MODEL.name)
        if sent is None or sent.tensors.keys() != plan.template().keys():
            raise ConfigError(
                "the rule validates whole models, and this site algorithm sends none; "
                "use --server-algorithm fedavg"
            )

    def metric(self, state: StateDict) -> float | None:
        """The validation metric of a model; None if undefined."""
        return self.validation(self.network("model", state))


# -- FedDG-GA --------------------------------------------------------------------------------------


@strict_dataclass
class FedDGGAHyper(UniformHyper):
    """The step of the weights."""

    step: float = param(
        0.2, "step of the weights, which falls to 0; 0: FedAvg", symbol="d", low=0, high=1
    )


def adjusted_weights(
    weights: Mapping[str, float], gaps: Mapping[str, float], step: float
) -> Weights:
    """a_k <- clip(a_k + (d_r / K) G_k / max_j |G_j|, 0, 1), normalised.

    FedDG-GA (Zhang et al., "Generalization Adjustment", CVPR 2023), as in the authors' code, whose
    constant 1/3 is 1/K of its three sites.

    Args:
        weights: site -> a_k, of all K sites.
        gaps: site -> G_k, what its metric lost by the last aggregation; sites may lack one.
        step: d_r.
    """
    largest = max(map(abs, gaps.values()), default=0.0)
    if largest == 0:
        return dict(weights)
    adjusted = {}
    for site, weight in weights.items():
        change = step / len(weights) * gaps.get(site, 0.0) / largest
        adjusted[site] = min(weight + change, 1.0)
    return fractions(adjusted)


class TrainedMetricSite(MeasuringSite):
    """What FedDG-GA adds to a site algorithm: the metric of its model after training."""

    @extends(meta=(TRAINED_METRIC,))
    def train(self, round: int, incoming: Message) -> Message:
        """The other algorithm's training; the trained model's metric is added to its reply."""
        reply: Message = super().train(round, incoming)  # type: ignore[misc]
        reply[TRAINED_METRIC] = self.metric(reply[MODEL])
        return reply


class AdjustedMean(ReweightedMean):
    """The mean with adjusted weights, with d_r = d (1 - r/R).

    `record` holds a_k as "weights", and the metrics of the models of the last round as "metrics".
    """

    def weigh(self, models: Models, round: int, previous: StateDict) -> Weights:
        shares = fractions(self.shares(models))
        recorded = self.record.get("weights", {})
        # Those recorded are of all sites so far, a new site's share is of the round's sites.
        level = fmean(recorded.values()) / fmean(shares.values()) if recorded else 1.0
        weights = {site: level * share for site, share in shares.items()} | recorded
        before = self.record.get("metrics", {})
        gaps = {}
        for site, model in models.items():
            value = (model.meta.get(VALIDATION.name) or {}).get("global")
            if value is not None and before.get(site) is not None:
                gaps[site] = before[site] - value
        step = self.hyper.step
        if self.rounds:
            step *= 1 - (round - 1) / self.rounds  # the gap is that of the last round
        weights = adjusted_weights(weights, gaps, step)
        metrics = {site: model.meta.get(TRAINED_METRIC.name) for site, model in models.items()}
        self.record = {"weights": weights, "metrics": metrics}
        return {site: weights[site] for site in models}


class FedDGGAServer(FedAvgServer[FedDGGAHyper]):
    """Sites whose metric suffers from the aggregation gain weight."""

    site_extension = TrainedMetricSite
    aggregation_class = AdjustedMean


# -- FedCE -----------------------------------------------------------------------------------------


@strict_dataclass
class FedCEHyper(UniformHyper):
    """How the two contributions become one."""

    mode: Literal["plus", "times"] = param("plus", "sum or product of the two contributions")


def cosines_to_others(products: Tensor, weights: Tensor) -> Tensor:
    """cos(Δ_k, Σ_{j != k} c_j Δ_j), (K,); 0 if one of the two is zero.

    Args:
        products: inner products of the updates Δ, (K, K).
        weights: c, (K,).
    """
    others = weights.repeat(len(weights), 1).fill_diagonal_(0.0)
    squares = products.diagonal() * (others @ products * others).sum(dim=1)
    return (others * products).sum(dim=1) / squares.clamp(min=1e-300).sqrt()


def contribution_weights(cosines: Tensor, errors: Tensor, mode: str) -> Tensor:
    """c_k: 1 - cosine and error, normalised over the sites, then their sum or product, normalised.

    FedCE (Jiang et al., CVPR 2023); all shares are at least 0.001, as in the authors' code.

    Args:
        cosines: of a site's update to those of the others, mean over the rounds, (K,).
        errors: 1 - metric at site k of the model without site k, mean over the rounds, (K,).
    """
    if mode == "plus":
        return _shares(_shares(1 - cosines) + _shares(errors))
    return _shares(_shares(1 - cosines) * _shares(errors))


def _shares(values: Tensor) -> Tensor:
    """Each value's share of their sum, at least 0.001; equal shares if all values are 0."""
    positive = values.clamp(min=1e-12)
    return (positive / positive.sum()).clamp(min=1e-3)


class WithoutSite(MeasuringSite):
    """What FedCE adds to a site algorithm: the metric of the model without this site."""

    @extends(request=(WITHOUT,), meta=(WITHOUT_METRIC,))
    def train(self, round: int, incoming: Message) -> Message:
        """The metric of the model without this site, then the other algorithm's training."""
        value = self.metric(incoming[WITHOUT]) if WITHOUT in incoming else None
        reply: Message = super().train(round, incoming)  # type: ignore[misc]
        reply[WITHOUT_METRIC] = value
        return reply


class ContributionMean(ReweightedMean):
    """The mean with weights by contribution; `record` holds by site c_k and values of all rounds.

    A site whose metrics are undefined has the mean error of the others.
    """

    def weigh(self, models: Models, round: int, previous: StateDict) -> Weights:
        for site, share in fractions(self.shares(models)).items():
            self.record.setdefault(site, {"weight": share, "cosines": [], "errors": []})
        entries = [self.record[site] for site in models]
        weights = torch.tensor([entry["weight"] for entry in entries], dtype=torch.float64)
        products = inner_products(self.trained_parts(models).values(), previous)
        cosines = cosines_to_others(products, weights).tolist()
        for entry, model, cosine in zip(entries, models.values(), cosines, strict=True):
            entry["cosines"].append(cosine)
            metric = model.meta.get(WITHOUT_METRIC.name)
            if metric is not None:
                entry["errors"].append(1 - metric)
        mean_cosines = torch.tensor([fmean(entry["cosines"]) for entry in entries])
        errors = torch.tensor([fmean(entry["errors"] or [math.nan]) for entry in entries])
        errors = errors.nan_to_num(float(errors.nanmean())).nan_to_num(1.0)
        contributions = contribution_weights(mean_cosines, errors, self.hyper.mode).tolist()
        for entry, contribution in zip(entries, contributions, strict=True):
            entry["weight"] = contribution
        return dict(zip(models, contributions, strict=True))


class FedCEServer(FedAvgServer[FedCEHyper]):
    """Sites that bring what the others lack gain weight.

    A site contributes if its update differs from the others', and if the model without it is bad on
    its images. The server makes the models without a site, and sends each to its site with the next
    round's model; its memory holds one for each site.
    """

    site_extension = WithoutSite
    aggregation_class = ContributionMean
    aggregation: ContributionMean

    @asks(FedAvgSite.train)
    def request_of_training(self, step: Step, site: str) -> Message:
        """The global model, and the one without the site, if it was in the last round."""
        message = self.request_of_model(step, site)
        without = self.memory.get(WITHOUT.member(site))
        if without is not None:
            message[WITHOUT] = without
        return message

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """FedAvg's step with the rule's weights; then the models without each site."""
        super().aggregate_models(step, replies)
        for site in self.memory.family(WITHOUT):
            del self.memory.states[WITHOUT.member(site).name]
        for site in replies:
            others = {other: replies[other][MODEL] for other in replies if other != site}
            if others:
                weights = {other: self.aggregation.record[other]["weight"] for other in others}
                self.memory[WITHOUT.member(site)] = weighted_mean(others, weights)
