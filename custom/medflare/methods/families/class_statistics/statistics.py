"""What the methods of this package share: statistics of features by class, and the head's weights.

Rows are the classes of a task as in `parts.class_groups`: G groups of C classes each, K = G C rows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from medflare.core.states import States
from medflare.methods import (
    ConfigError,
    FeatureNetwork,
    Plan,
    Replies,
    ServerContext,
    Site,
    SiteAlgorithm,
    StateDict,
    Step,
    TaskConfig,
    TensorSpec,
)
from medflare.methods.families.local_terms.features import class_indices
from medflare.methods.parts.class_groups import (
    PatientsOfClasses,
    check_counted,
    class_totals,
    groups_and_classes,
)
from medflare.methods.parts.heads import meta_head
from medflare.networks.catalogue import feature_width


def means(plan: Plan) -> StateDict:
    """{"means": (K, D)} on the meta device."""
    groups, classes = groups_and_classes(plan.task)
    return {"means": torch.empty(groups * classes, feature_width(plan.task), device="meta")}


def _multilabel(plan: Plan) -> bool:
    return plan.task.target == "multilabel"


def specs_by_class(
    name: str, purpose: str, template: Callable[[Plan], StateDict]
) -> tuple[TensorSpec, TensorSpec]:
    """The declaration of means (and more) by class, as tensors (K, ...).

    In a multilabel task the means of a label and of its negatives are together those of all images,
    which every other label shows too: there a small class suppresses all rows ("counts").
    """
    counts = TensorSpec(name, purpose, template, _multilabel, measured="train", per_class="counts")
    values = replace(counts, when=lambda plan: not _multilabel(plan), per_class="values")
    return values, counts


# -- the head -------------------------------------------------------------------------------------


class LinearHeadSite(SiteAlgorithm):
    """A base, before another one, of site algorithms whose server solves for a linear head."""

    dp_unsupported_reason = "statistics of features leave the site without noise"
    uses_features: ClassVar[bool] = True

    @classmethod
    def check(cls, task: TaskConfig, hyper: Any, server_hyper: Any) -> None:
        """Also raises ConfigError if the head is not one linear layer with a bias at the end."""
        super().check(task, hyper, server_hyper)
        network, features, is_last = meta_head(task)
        sizes = [weight.numel() for weight in network.head.parameters()]
        if not is_last or sorted(sizes) != [task.outputs, task.outputs * features.shape[1]]:
            raise ConfigError(
                f"task {task.name}: the head of network {task.network['name']} is not one linear "
                "layer (or 1x1 convolution) with a bias at its end; choose another network, for "
                "example small_cnn, resnet18 or unet"
            )


class ClassMeansSite(LinearHeadSite):
    """Its server weighs means of classes by the numbers of their images or pixels."""

    @classmethod
    def check(cls, task: TaskConfig, hyper: Any, server_hyper: Any) -> None:
        """Also raises ConfigError if not all classes can be counted."""
        super().check(task, hyper, server_hyper)
        check_counted(task)


def head_of(state: StateDict) -> tuple[Tensor, Tensor]:
    """(weight (outputs, D), bias (outputs,)) of a network with a linear head."""
    head = [tensor for name, tensor in state.items() if name.startswith("head.")]
    (weight,) = [tensor for tensor in head if tensor.dim() > 1]
    (bias,) = [tensor for tensor in head if tensor.dim() == 1]
    return weight.flatten(1), bias


def with_head(state: StateDict, weight: Tensor, bias: Tensor) -> StateDict:
    """The network with another linear head; shapes as of `head_of`."""
    changed = dict(state)
    for name, old in state.items():
        if name.startswith("head."):
            new = bias if old.dim() == 1 else weight
            changed[name] = new.reshape(old.shape).to(old.dtype)
    return changed


# -- at a site ------------------------------------------------------------------------------------


def feature_vectors(features: Tensor) -> Tensor:
    """Features (N, D, ...) as rows (M, D), image by image."""
    return features.movedim(1, -1).reshape(-1, features.shape[1])


@torch.no_grad()
def feature_rows(
    site: Site, network: FeatureNetwork, shown: PatientsOfClasses | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features (M, D), float64, and classes (G, M) of the training images or pixels, by batch.

    A site that annotated only some structures yields none: its background is not everyone's.

    Args:
        shown: to count the patients of every class.
    """
    if not site.annotation.complete:
        return
    network.eval()
    classes = groups_and_classes(site.task)[1]
    for images, targets, rows in site.ordered("train"):
        features, _ = network.features_and_output(images)
        labels = class_indices(site, targets, features).cpu()
        if shown is not None:
            shown.add(labels, classes, rows)
        yield feature_vectors(features).double().cpu(), labels.flatten(1)


def class_moments(site: Site, network: FeatureNetwork) -> tuple[Tensor, Tensor]:
    """Means (K, D) and covariances (K, D, D; 0 for one sample) of the features, float32.

    Rows are 0 for classes without samples and for those that fewer than the site's
    `minimum_patients` patients show; in a multilabel task the latter set all rows to 0, see
    `specs_by_class`.
    """
    groups, classes = groups_and_classes(site.task)
    width = feature_width(site.task)
    counts = torch.zeros(groups * classes, dtype=torch.float64)
    sums = torch.zeros(groups * classes, width, dtype=torch.float64)
    products = torch.zeros(groups * classes, width, width, dtype=torch.float64)
    shown = PatientsOfClasses(site.data.train.patients)
    for features, labels in feature_rows(site, network, shown):
        for row in range(groups * classes):
            chosen = features[labels[row // classes] == row % classes]
            counts[row] += len(chosen)
            sums[row] += chosen.sum(dim=0)
            products[row] += chosen.T @ chosen
    mean = sums / counts.clamp_min(1)[:, None]
    centred = products - counts[:, None, None] * torch.einsum("kd,ke->kde", mean, mean)
    covariances = centred / (counts - 1).clamp_min(1)[:, None, None]
    few = shown.few(site.minimum_patients)
    if few.any():
        hidden = torch.full_like(few, True) if site.task.target == "multilabel" else few
        mean[hidden] = 0
        covariances[hidden] = 0
    return mean.float(), covariances.float()


# -- at the server --------------------------------------------------------------------------------


def usable(context: ServerContext, step: Step, replies: Replies, entry: TensorSpec) -> States:
    """Site -> its statistics; a site whose statistics are all zeros is left out with an event."""
    statistics = {}
    for site, reply in replies.items():
        if any(tensor.any() for tensor in reply[entry].values()):
            statistics[site] = reply[entry]
            continue
        text = (
            "its statistics are all zeros and not used: a group has fewer patients than its "
            "minimum_patients, or it annotated only some structures"
        )
        context.warn(text, site=site, round=step.round)
    return statistics


def class_samples(context: ServerContext, statistics: States) -> Tensor:
    """(sites, K) float64 numbers of training images, or pixels, of the classes, from site ->
    statistics.

    They are 0 for a class without a mean. A site that suppresses its counts has equally many of
    each class.
    """
    task = context.task
    pixels = math.prod(task.size) if task.kind == "segmentation" else 1
    samples = []
    for site, state in statistics.items():
        enrolled = context.site_counts[site]
        counts = class_totals(task, enrolled).double()
        if not enrolled["class_counts"]:
            counts += enrolled["n"]["train"] * pixels / counts.shape[1]
        present = state["means"].any(dim=1)
        samples.append(counts.flatten() * present * context.counted_fraction.get(site, 1.0))
    return torch.stack(samples)


def stacked(statistics: States, name: str) -> Tensor:
    """(sites, K, ...) tensors of the sites' statistics."""
    return torch.stack([state[name] for state in statistics.values()])


def pooled_means(means: Tensor, samples: Tensor) -> Tensor:
    """mu_c = sum_k n_ck / N_c mu_ck  (CCVR, Eq. 3); (K, D), 0 for a class of no site.

    FedProto's Eq. 6 prints a further factor 1 / (number of sites with the class), with which the
    mean of equal prototypes would not be that prototype; it is left out.

    Args:
        means: (sites, K, D).
        samples: (sites, K), n_ck.
    """
    shares = samples / samples.sum(dim=0).clamp_min(1e-12)
    return torch.einsum("sk,skd->kd", shares, means.double())


def pooled_covariances(covariances: Tensor, means: Tensor, samples: Tensor) -> Tensor:
    """Sigma_c = sum_k [(n_ck - 1) Sigma_ck + n_ck (mu_ck - mu_c)(mu_ck - mu_c)^T] / (N_c - 1).

    CCVR, Eq. 4, with the means' part centred, so that large means do not cancel.

    Args:
        covariances: (sites, K, D, D).
        means: see `pooled_means`.
        samples: see `pooled_means`.
    """
    within = torch.einsum("sk,skde->kde", (samples - 1).clamp_min(0), covariances.double())
    apart = means.double() - pooled_means(means, samples)
    between = torch.einsum("sk,skd,ske->kde", samples, apart, apart)
    return (within + between) / (samples.sum(dim=0) - 1).clamp_min(1)[:, None, None]


def one_hot_classes(labels: Tensor, classes: int) -> Tensor:
    """(G, M, C) float64 of class indices (G, M)."""
    return functional.one_hot(labels, classes).double()
