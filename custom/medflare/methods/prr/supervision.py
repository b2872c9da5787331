"""What PRR supervises with: the CPA loss on images or pixels, the prototypes that weigh it, and the losses it is compared with.

A task is seen as `groups` of softmax problems, so that every formula of `formulas.py` serves every task: one problem over all
classes (multiclass), one over (negative, positive) with logits (0, z) (binary), or one such pair for each label (multilabel).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from medflare.core.states import StateDict
from medflare.methods.prr.formulas import PrototypeMean, cpa_loss, prototype_gamma
from medflare.networks.catalogue import meta_network
from medflare.networks.features import example
from medflare.tasks.classes import class_names
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site


def groups_and_classes(task: TaskConfig) -> tuple[int, int]:
    """(G, C): how many softmax problems the task is, and the classes of each."""
    names = class_names(task)
    return len(names), len(names[0])


def class_logits(logits: Tensor, task: TaskConfig) -> Tensor:
    """Logits (N, outputs, ...) as (G, N, C, P) with P pixels, or 1; (0, z) for a sigmoid output z.

    Examples:
        >>> from types import SimpleNamespace
        >>> class_logits(torch.tensor([[3.0]]), SimpleNamespace(target="binary", outputs=1))
        tensor([[[[0.],
                  [3.]]]])
    """
    outputs = logits.reshape(len(logits), task.outputs, -1)
    if task.target == "multiclass":
        return outputs[None]
    positive = outputs.transpose(0, 1)
    return torch.stack([torch.zeros_like(positive), positive], dim=2)


def class_targets(targets: Tensor, task: TaskConfig) -> Tensor:
    """Targets as in `data.splits.Split` as class indices (G, N, P) beside `class_logits`."""
    groups = task.outputs if task.target == "multilabel" else 1
    return targets.reshape(len(targets), groups, -1).transpose(0, 1).long()


def class_totals(task: TaskConfig, enrolled: Mapping[str, Mapping[str, Any]]) -> Tensor:
    """N_c of the conjoint objective: training images or pixels of each class over the sites, (G, C) int64.

    Args:
        enrolled: inside site -> {"n": {"train": images, ...}, "class_counts": counts of `task.classes`, or none from who keeps them}.
    """
    groups, classes = groups_and_classes(task)
    totals = torch.zeros(groups, classes, dtype=torch.int64)
    pixels = math.prod(task.size) if task.kind == "segmentation" else 1
    for meta in enrolled.values():
        if not meta["class_counts"]:
            continue
        counts = torch.tensor(meta["class_counts"])
        if task.target == "multilabel":  # only positives are counted; the other pixels are the negatives
            negatives = (meta["n"]["train"] * pixels - counts).clamp(min=0)  # a site may say that it has more than there can be
            counts = torch.stack([negatives, counts], dim=1)
        totals += counts.reshape(groups, classes)
    return totals


def prototype_width(task: TaskConfig) -> int:
    """D of a prototype: channels of the network's features."""
    with torch.no_grad():
        return meta_network(task).eval().features_and_output(example(task.image_channels, task.size, "meta"))[0].shape[1]


class SitePrototypes:
    """Local prototypes f^(k) of every class, gathered batch by batch from the personal model's embeddings (PRR, Eq. 10)."""

    def __init__(self, task: TaskConfig, width: int, device: torch.device | str):
        self.task = task
        groups, classes = groups_and_classes(task)
        self._means = [PrototypeMean(classes, width, device) for _ in range(groups)]

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Take in a batch; a map that is smaller than the label map sees it by its nearest pixels.

        Args:
            features: (N, D) or (N, D, ...).
            targets: as in `data.splits.Split`.
        """
        dims = features.dim() - 2
        if dims and features.shape[2:] != targets.shape[-dims:]:
            maps = targets.reshape(len(targets), -1, *targets.shape[-dims:]).float()
            nearest = functional.interpolate(maps, features.shape[2:], mode="nearest")
            targets = nearest.reshape(*targets.shape[:-dims], *features.shape[2:]).to(targets.dtype)
        for mean, labels in zip(self._means, class_targets(targets, self.task), strict=True):
            mean.add(features, labels)

    def state(self) -> StateDict:
        """{"prototypes": (G C, D), "present": (G C,) bool}; the prototype of a class that was never seen is zero."""
        prototypes = torch.cat([mean.means() for mean in self._means])
        return {"prototypes": prototypes, "present": torch.cat([mean.counts for mean in self._means]) > 0}


class Supervision:
    """L_sup of a round at a site: logits and targets to a scalar (PRR, Sec. III-D and IV-A).

    Args:
        kind: the CPA loss: "both", its conjoint objective alone ("global") or its refinement alone ("local"); or what it is
            compared with: "task" (the task's own loss), "ce", "focal", "fedeamc". All but "task" add Dice in segmentation.
        totals: (G, C) class counts over all sites.
        global_: (G C, D) prototypes from the server; None before the first ones and during the warm-up: gamma = 1.
    """

    def __init__(self, site: Site, kind: str, *, beta: float, tau: float, totals: Tensor, global_: Tensor | None):
        self.site = site
        self.kind = kind
        self.beta = beta
        self.tau = tau
        self.counts: list[Tensor | None] = list(totals) if kind in ("both", "global") else [None] * len(totals)
        self.gamma = _balanced(site) if kind == "fedeamc" else None
        self._global = global_ if kind in ("both", "local") else None
        self._dice = site.annotation.loss({"name": "dice"}) if site.task.kind == "segmentation" else None
        self._focal = site.annotation.loss({"name": "focal"}) if kind == "focal" else None

    def refine(self, local: Tensor | None) -> None:
        """Weigh the classes by how far the site's prototypes (G C, D) are from the global ones (Eq. 11-12)."""
        if local is not None and self._global is not None:
            gamma = prototype_gamma(local, self._global, self.tau)
            self.gamma = gamma.reshape(groups_and_classes(self.site.task)).to(self.site.device)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.kind == "task":
            return self.site.loss(logits, targets)
        value = self._focal(logits, targets) if self._focal is not None else self._classification(logits, targets)
        return value if self._dice is None else value + self._dice(logits, targets)

    def _classification(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean over the groups of the CPA loss, of what the site annotated; without counts and gamma it is the cross entropy."""
        annotation = self.site.annotation
        grouped = class_logits(annotation.logits(logits), annotation.reduced)
        labels = class_targets(annotation.targets(targets), annotation.reduced)
        gamma = [None] * len(self.counts) if self.gamma is None else list(self.gamma)
        counts, gammas = self._annotated(self.counts), self._annotated(gamma)
        parts = [cpa_loss(*group, self.beta) for group in zip(grouped, labels, counts, gammas, strict=True)]
        return torch.stack(parts).mean()

    def _annotated(self, numbers: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Numbers (C,) of every group, of those groups and classes that the site annotated."""
        annotation = self.site.annotation
        if annotation.complete:
            return list(numbers)
        outputs = list(annotation.outputs)
        if annotation.task.target == "multilabel":
            return [numbers[output] for output in outputs]
        return [None if row is None else row[outputs] for row in numbers]


def _balanced(site: Site) -> Tensor:
    """FedeAMC as PRR describes it (Sec. V-A): classes weighted by the inverse of the site's own counts, mean 1 over its samples."""
    counts = class_totals(site.task, {site.name: {"n": site.n, "class_counts": site.class_counts().tolist()}})
    present = counts > 0
    weight = counts.sum(dim=1, keepdim=True) / (present.sum(dim=1, keepdim=True) * counts.clamp(min=1))
    return torch.where(present, weight, 1.0).to(site.device)
