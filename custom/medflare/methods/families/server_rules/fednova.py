"""FedNova (Wang et al., NeurIPS 2020): updates are normalised by the sites' local steps.

    w <- w + τ_eff Σ_k p_k Δ_k / a_k,   τ_eff = Σ_k p_k a_k          (a_k is the paper's ||a_k||_1)

A site with more steps then has no more influence than its p_k. With weights q_k ∝ p_k / a_k it is a
longer step towards the mean: w + τ_eff (Σ_k p_k / a_k) (Σ_k q_k w_k - w). Statistics are averaged
with q_k. Equal a_k give FedAvg. a_k is exact for SGD whose momentum starts at 0 every round
(`reset_optimizer`); with Adam and any other optimizer it is the number of steps.
"""

from collections.abc import Callable
from statistics import fmean
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from medflare.core.numbers import fractions
from medflare.methods import (
    ConfigError,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSite,
    Message,
    MetaSpec,
    Replies,
    StateDict,
    Step,
    TaskConfig,
    count,
    extends,
)
from medflare.methods.families.server_rules.rule import Models, ReweightedMean, Weights
from medflare.privacy.settings import is_private

T = TypeVar("T")

STEPS = MetaSpec[int]("steps", "optimizer steps of this round's training", count(), public=True)


def normalizer(steps: float, momentum: float = 0.0) -> float:
    """||a_k||_1 = (τ - ρ (1 - ρ^τ) / (1 - ρ)) / (1 - ρ) for τ steps of SGD with momentum ρ (Wang et
    al. 2020, Sec. 4).

    It is τ without momentum, and τ (τ + 1) / 2 in the limit ρ = 1.
    """
    if abs(1 - momentum) < 1e-6:  # the formula is 0 / 0, or inexact
        return steps * (steps + 1) / 2
    lost = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - lost) / (1 - momentum)


class CountingSite(FedAvgSite):
    """What FedNova adds to a site algorithm: the number of optimizer steps of the shared model."""

    freezes = False
    steps: int | None  # of the task at work

    @classmethod
    def check(cls, task: TaskConfig, hyper: Any, server_hyper: Any) -> None:
        """Also raises ConfigError for variants of momentum for which a_k does not hold."""
        super().check(task, hyper, server_hyper)
        if task.optimizer.get("nesterov") or task.optimizer.get("dampening"):
            raise ConfigError(
                "fednova normalises by the steps of plain momentum; "
                "leave out nesterov and dampening of task.optimizer"
            )

    @extends(meta=(STEPS,))
    def train(self, round: int, incoming: Message) -> Message:
        """The other algorithm's training; the number of its steps is added to the reply."""
        self.steps = None
        reply = super().train(round, incoming)
        if self.steps is None:
            raise ConfigError(
                "fednova cannot count this site algorithm's steps; use --server-algorithm fedavg"
            )
        reply[STEPS] = self.steps
        return reply

    def optimized(self, model: nn.Module, purpose: str, train: Callable[[Optimizer], T]) -> T:
        """The other algorithm's method, which also counts the steps of the optimizer "model"."""

        def count_step(*_: Any) -> None:
            self.steps = (self.steps or 0) + 1

        def counted(optimizer: Optimizer) -> T:
            if purpose == "model":
                self.steps = 0
                optimizer.register_step_post_hook(count_step)
            return train(optimizer)

        return super().optimized(model, purpose, counted)


class NormalizedMean(ReweightedMean):
    """FedNova's step; a site that sends no number of steps counts as one with the mean number.

    Attributes:
        factor: τ_eff Σ_k p_k / a_k of this round.
    """

    momentum = 0.0
    factor = 1.0

    def prepare(self, task: TaskConfig, rounds: int) -> None:
        super().prepare(task, rounds)
        if task.optimizer["name"].lower() == "sgd":
            self.momentum = task.optimizer.get("momentum", 0.0)

    def weigh(self, models: Models, round: int, previous: StateDict) -> Weights:
        counts = {site: model.meta.get(STEPS.name) for site, model in models.items()}
        usual = fmean([steps for steps in counts.values() if steps] or [1.0])
        lengths = {site: normalizer(n or usual, self.momentum) for site, n in counts.items()}
        self.factor = 1.0
        if len(set(lengths.values())) == 1:
            return self.shares(models)
        shares = fractions(self.shares(models))
        weights = {site: share / lengths[site] for site, share in shares.items()}
        effective = sum(share * lengths[site] for site, share in shares.items())
        self.factor = effective * sum(weights.values())
        return weights

    def server_step(self, mean: StateDict, models: Models, previous: StateDict) -> StateDict:
        if self.factor == 1:
            return mean
        return {name: previous[name].lerp(mean[name], self.factor) for name in mean}


class FedNovaServer(FedAvgServer[FedAvgServerHyper]):
    """FedAvg's server algorithm with normalised updates."""

    site_algorithm = FedAvgSite
    site_extension = CountingSite
    aggregation_class = NormalizedMean

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """FedAvg's step, before which a number of steps that the site cannot have taken is
        replaced.

        A false number would make its update the longest of all, or give it nearly all weight.
        """
        for site, reply in replies.items():
            steps = reply.get(STEPS)
            possible = self._possible_steps(site)
            if steps is None or (possible is not None and steps in possible):
                continue
            del reply.meta[STEPS.name]
            counts = "the others' mean number"
            if possible is not None:
                reply[STEPS] = min(max(steps, possible[0]), possible[-1])
                counts = f"{reply[STEPS]}"
            text = f"cannot have taken {steps} steps with its images; {counts} counts"
            self.context.warn(text, site=site, round=step.round)
        super().aggregate_models(step, replies)

    def _possible_steps(self, site: str) -> range | None:
        """The fewest and most steps of a round at a site, at the batch sizes that it may choose;
        None: unknown.

        The fewest are 1 with fp16, which skips steps, and with DP-SGD, which draws patients.
        """
        task = self.context.task
        hyper = self.context.plan.site_hyper
        images = self.context.site_counts.get(site, {}).get("n", {}).get("train")
        if not images:
            return None
        samples = images * task.patches_per_image
        passes = hyper.passes(task.local_epochs)
        fewest = 1
        if task.precision != "fp16" and not is_private(hyper):
            fewest = passes * max(1, samples // (task.batch_size * task.accumulate))
        return range(fewest, passes * samples + 1)
