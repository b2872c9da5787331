"""Fed3R (Fani et al., ICML 2024): ridge regression of the classes on fixed features.

    A = sum_k Z_k^T Z_k,   b = sum_k Z_k^T Y_k,   W = (A + λ I)^-1 b

Z are the initial network's features (set task.network.weights for pretrained ones) with a column
of ones, whose weight is the bias. The sums do not depend on the order of sites, nor on how images
are divided over them. Y is 1 for the class of an image or pixel and else 0; for sigmoid outputs 1
and -1, so that the decision is at 0. Outputs estimate Y: their probabilities are not calibrated.

One round is enough. The server stores each site's statistics; a site that joins late or misses a
round adds them in a later one, if there is one.
"""

import torch
from torch import Tensor

from medflare.methods import (
    MEASURED,
    MODEL,
    FedAvgServer,
    FedAvgSite,
    Message,
    Replies,
    ServerHyper,
    SiteHyper,
    StateDict,
    Step,
    TaskConfig,
    TensorSpec,
    param,
    phase,
    strict_dataclass,
)
from medflare.methods.aggregation import NoAggregation
from medflare.methods.families.class_statistics.statistics import (
    LinearHeadSite,
    feature_rows,
    one_hot_classes,
    usable,
    with_head,
)
from medflare.methods.parts.class_groups import PatientsOfClasses
from medflare.networks.catalogue import feature_width


@strict_dataclass
class RidgeServerHyper(ServerHyper):
    """The penalty."""

    lam: float = param(
        0.01, "penalty of squared weights, in images or pixels", symbol="λ", low=1e-9
    )


def zero_sums(task: TaskConfig) -> StateDict:
    """{"A": (D + 1, D + 1), "b": (outputs, D + 1)}, float64: A and the transpose of b."""
    columns = feature_width(task) + 1
    return {
        "A": torch.zeros(columns, columns, dtype=torch.float64),
        "b": torch.zeros(task.outputs, columns, dtype=torch.float64),
    }


STATISTICS = TensorSpec(
    "ridge",
    "sums over the training images or pixels: products of features, and features by class",
    lambda plan: zero_sums(plan.task),
    measured="train",
    per_class="counts",
)
# In the server's memory.
SUMS_OF_SITES = TensorSpec("ridge", of=lambda plan: plan.sites)


def regression_targets(labels: Tensor, task: TaskConfig) -> Tensor:
    """Y (M, outputs), float64, of classes (G, M)."""
    if task.target == "multiclass":
        return one_hot_classes(labels[0], task.outputs)
    return 2 * labels.T.double() - 1


def ridge_weights(a: Tensor, b: Tensor, lam: float) -> Tensor:
    """W = (A + λ I)^-1 b (Fed3R, Sec. 4), as its transpose (outputs, D + 1).

    Args:
        a: (D + 1, D + 1).
        b: its transpose (outputs, D + 1).

    Raises:
        LinAlgError: A + λ I is singular.
    """
    identity = torch.eye(len(a), dtype=a.dtype)
    return torch.linalg.solve(a + lam * identity, b.T).T


class RidgeSite(LinearHeadSite, FedAvgSite):
    """Sends its part of A and b; trains nothing."""

    Hyper = SiteHyper
    server_hyper = RidgeServerHyper
    freezes = False

    @phase(request=(MODEL,), reply=(STATISTICS,), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """Validates the incoming model and sends the sums over its features."""
        reply = self.validate(round, incoming)
        task = self.site.task
        sums = zero_sums(task)
        shown = PatientsOfClasses(self.site.data.train.patients)
        network = self.network("model", incoming[MODEL])
        for features, labels in feature_rows(self.site, network, shown):
            rows = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
            sums["A"] += rows.T @ rows
            sums["b"] += regression_targets(labels, task).T @ rows
        if shown.few(self.minimum_patients).any():
            sums = zero_sums(task)
        reply[STATISTICS] = sums
        return reply


class RidgeServer(FedAvgServer[RidgeServerHyper]):
    """Solves for the head."""

    site_algorithm = RidgeSite
    aggregation_class = NoAggregation
    freezes = False

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """Solve for the head from the statistics so far; the head stays if there are none or A is
        singular.
        """
        self.select_model(step, replies)
        for site, sums in usable(self.context, step, replies, STATISTICS).items():
            self.memory[SUMS_OF_SITES.member(site)] = sums
        total = zero_sums(self.context.task)
        for site, sums in self.memory.family(SUMS_OF_SITES).items():
            for name in total:
                total[name] += sums[name] * self.context.counted_fraction.get(site, 1.0)
        if not total["A"].any():
            return
        try:
            weights = ridge_weights(total["A"], total["b"], self.hyper.lam)
        except torch.linalg.LinAlgError:
            text = "the sites' statistics cannot be solved; set a larger lam"
            self.context.warn(text, round=step.round)
            return
        self.model = with_head(self.model, weights[:, :-1], weights[:, -1])
