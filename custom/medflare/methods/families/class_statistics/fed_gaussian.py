"""CCVR (Luo et al., NeurIPS 2021, Alg. 1): the head of FedAvg's model is retrained at the server.

After the last round, sites send mean and covariance of the selected model's features by class. The
server pools them (Eq. 3-4), draws M_c features of every class from N(mu_c, Sigma_c) and trains the
head on them, with equally many of each class. FedPFT (Beitollahi et al., 2024) does so with
pretrained features and mixtures: use task.network.weights and few rounds.

Features that are never negative are not Gaussian; the paper's power transform would need another
head and is left out. The calibrated model is validated like those of the rounds and is the final
one if none is better; with selection "last" always. A site that is absent then, or late, adds no
statistics.
"""

import torch
from torch import Tensor
from torch.nn import functional

from medflare.methods import (
    MEASURED,
    MODEL,
    SELECTED_ROUND,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSite,
    FedAvgSiteHyper,
    Message,
    Plan,
    Replies,
    StateDict,
    Step,
    TaskConfig,
    asks,
    handles,
    param,
    phase,
    strict_dataclass,
    torch_generator,
)
from medflare.methods.families.class_statistics.statistics import (
    ClassMeansSite,
    class_moments,
    class_samples,
    head_of,
    means,
    pooled_covariances,
    pooled_means,
    specs_by_class,
    stacked,
    usable,
    with_head,
)
from medflare.methods.parts.class_groups import class_logits, groups_and_classes


def _gaussians(plan: Plan) -> StateDict:
    state = means(plan)
    rows, width = state["means"].shape
    return {**state, "covariances": torch.empty(rows, width, width, device="meta")}


GAUSSIANS = specs_by_class(
    "gaussians",
    "mean and covariance of the features of each class over the training images or pixels",
    _gaussians,
)


@strict_dataclass
class FedGaussianServerHyper(FedAvgServerHyper):
    """The training of the head."""

    samples: int = param(
        200,
        "features drawn of each class",
        symbol="M_c",
        source="Alg. 1; 200 in FL-bench",
        low=1,
        high=5000,
    )
    head_steps: int = param(100, "L-BFGS steps of the head; 0: FedAvg", low=0)


def drawn(centres: Tensor, covariances: Tensor, noise: Tensor) -> Tensor:
    """(K, M, D) features from N(mu_c, Sigma_c), of standard normal noise (K, M, D).

    Negative eigenvalues, which rounding can make, count as 0.
    """
    values, vectors = torch.linalg.eigh((covariances + covariances.mT) / 2)
    factors = vectors * values.clamp_min(0).sqrt()[:, None]
    return centres[:, None] + noise @ factors.mT


def calibrated(
    weight: Tensor, bias: Tensor, samples: Tensor, present: Tensor, task: TaskConfig, steps: int
) -> tuple[Tensor, Tensor]:
    """Head (weight (outputs, D), bias (outputs,)) after L-BFGS on the cross entropy of samples.

    Outputs of absent classes do not change, and the others are compared among themselves.

    Args:
        samples: (K, M, D) float64.
        present: (K,) whether a class has samples.
    """
    weight = weight.double().clone().requires_grad_()
    bias = bias.double().clone().requires_grad_()
    problems = []
    for group, mask in enumerate(present.reshape(groups_and_classes(task))):
        if mask.sum() > 1:
            problems.append((group, mask.nonzero().flatten()))
    by_group = samples.reshape(*groups_and_classes(task), *samples.shape[1:])
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for group, classes in problems:
            features = by_group[group, classes].flatten(0, 1)
            logits = class_logits(functional.linear(features, weight, bias), task)[group, ..., 0]
            labels = torch.arange(len(classes)).repeat_interleave(samples.shape[1])
            total = total + functional.cross_entropy(logits[:, classes], labels)
        total.backward()
        return total

    if problems and steps:
        optimizer.step(loss)
    return weight.detach(), bias.detach()


class FedGaussianSite(ClassMeansSite, FedAvgSite[FedAvgSiteHyper]):
    """FedAvg's site algorithm; at the end it sends statistics of the classes."""

    @phase(request=(MODEL,), request_meta=(SELECTED_ROUND,), reply=GAUSSIANS, meta=MEASURED)
    def class_statistics(self, round: int, incoming: Message) -> Message:
        """Means and covariances of the selected model's features."""
        model = self.network("model", incoming[MODEL])
        local, covariances = class_moments(self.site, model)
        return self.reply({GAUSSIANS[0]: {"means": local, "covariances": covariances}})


class FedGaussianServer(FedAvgServer[FedGaussianServerHyper]):
    """FedAvg's server algorithm, then the head's calibration."""

    site_algorithm = FedGaussianSite

    def steps(self) -> list[Step]:
        """FedAvg's, then statistics and the validation of the calibrated model."""
        return [
            *super().steps(),
            self.final_step(FedGaussianSite.class_statistics),
            self.final_step(FedAvgSite.validate, part=1),
        ]

    @asks(FedGaussianSite.class_statistics)
    def request_of_statistics(self, step: Step, site: str) -> Message:
        """The selected model."""
        return self.configure_final(site)

    @handles(FedGaussianSite.class_statistics)
    def calibrate(self, step: Step, replies: Replies) -> None:
        """Give the selected model its new head; it is the last candidate."""
        statistics = usable(self.context, step, replies, GAUSSIANS[0])
        if not statistics:
            return
        self.model, _ = self.selected
        samples = class_samples(self.context, statistics)
        local = stacked(statistics, "means")
        centres = pooled_means(local, samples)
        covariances = pooled_covariances(stacked(statistics, "covariances"), local, samples)
        generator = torch_generator(self.context.seed, "server", step.round, "features")
        shape = (len(centres), self.hyper.samples, centres.shape[1])
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        features = drawn(centres, covariances, noise)
        present = samples.any(dim=0)
        task = self.context.task
        head = calibrated(*head_of(self.model), features, present, task, self.hyper.head_steps)
        self.model = with_head(self.model, *head)
