"""FedRoD (Chen and Chao, ICLR 2022, Alg. 1): a balanced generic head and a personal head.

    body θ, generic head ψ:   L(ψ(z) + log n, y), z = θ(x), balanced softmax; averaged
    personal head φ:          L(ψ(z) + φ(z), y), no gradient to θ and ψ; stays at the site

n are the site's class counts (Ren et al. 2020, Eq. 3). A label's sigmoid is the softmax of (0, z),
so its logit moves by log of positives over negatives. A class weight of the task's loss counts as
so many more images, since it balances classes, too. In segmentation the generic head has the task's
loss: every image has all classes (as in GRACE's comparison). φ starts at 0.

The personal model is θ, ψ and φ after the site's training. As heads are linear, it is the task's
network with the head ψ + φ.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medflare.methods import (
    ConfigError,
    FeatureNetwork,
    FedAvgSiteHyper,
    PersistentState,
    TaskConfig,
    copied_state,
)
from medflare.methods.families.second_models.site import SecondModelSite
from medflare.methods.parts.class_groups import totals_of_site
from medflare.methods.parts.heads import meta_head
from medflare.training.site_rules import check_class_weights

_LINEAR = (nn.Linear, nn.modules.conv._ConvNd)
_NO_WEIGHTS = (nn.Sequential, nn.Dropout, nn.Identity)
_ABSENT = 1e-6  # images of a class without any: log is finite


def balance(counts: Tensor, multiclass: bool) -> Tensor:
    """What balanced softmax adds to the logits, (outputs,).

    Args:
        counts: images by class, (1, C) of a multiclass task; (outputs, 2) of sigmoids, negatives
            first.

    Examples:
        >>> balance(torch.tensor([[1, 1]]), multiclass=True)
        tensor([0., 0.])
    """
    logs = counts.clamp_min(_ABSENT).log()
    return logs[0] if multiclass else logs[:, 1] - logs[:, 0]


class FedRoDSite(SecondModelSite[FedAvgSiteHyper]):
    """Trains body and generic head, and on its features the personal head."""

    uses_features = True
    head = PersistentState("head")  # φ

    @classmethod
    def check(cls, task: TaskConfig, hyper: FedAvgSiteHyper, server_hyper: Any) -> None:
        """Also raises ConfigError if the head is not one linear layer at the end."""
        super().check(task, hyper, server_hyper)
        network, _, is_last = meta_head(task)
        layers = [layer for layer in network.head.modules() if not isinstance(layer, _NO_WEIGHTS)]
        if not is_last or len(layers) != 1 or not isinstance(layers[0], _LINEAR):
            raise ConfigError(
                f"task {task.name}: the head of network {task.network['name']} is not one linear "
                "layer at its end, so two heads cannot be added; choose another network"
            )

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        check_class_weights(self.site, self._weights_of_few)
        head = copy.deepcopy(model.head)
        start = self.head
        if start is None:
            start = {name: torch.zeros_like(w) for name, w in head.state_dict().items()}
        head.load_state_dict(start)
        shift = self._shift()
        model.train()

        def losses(images: Tensor, targets: Tensor) -> list[Tensor]:
            features, generic = model.features_and_output(images)
            personal = generic.detach() + head(features.detach())
            return [self.site.loss(personal, targets), self.site.loss(generic + shift, targets)]

        loss = self.fit_both(head.train(), optimizer, round, losses)
        self.head = copied_state(head)
        personal = copied_state(model)
        for name, weight in self.head.items():
            personal[f"head.{name}"] += weight  # ψ + φ
        self.personal = personal
        return loss

    def _weights_of_few(self, few: int) -> tuple[float, float]:
        """See `check_class_weights`: by the gradient of an undecided head if all classes but
        one have few patients.
        """
        task = self.site.task
        patients = len(set(self.site.data.train.patients))
        classes = task.outputs if task.target == "multiclass" else 2
        counts = torch.full((classes,), float(few))
        counts[0] = max(patients - (classes - 1) * few, few)
        targets = torch.arange(classes)
        if task.target != "multiclass":
            counts = counts.expand(task.outputs, 2)
            targets = targets[:, None].expand(2, task.outputs)
            targets = targets.float() if task.target == "multilabel" else targets[:, 0]
        shift = self._balance(counts.reshape(-1, classes))
        logits = shift.repeat(classes, 1).requires_grad_()
        (slope,) = torch.autograd.grad(self.site.annotation.loss()(logits, targets), logits)
        weights = slope.abs().sum(dim=1)
        return float(weights.max()), float(weights.min())

    def _shift(self) -> Tensor | float:
        task = self.site.task
        if task.kind == "segmentation":
            return 0.0
        return self._balance(totals_of_site(self.site)).to(self.site.device)

    def _balance(self, counts: Tensor) -> Tensor:
        """`balance` of the counts times the class weights of the task's loss."""
        task = self.site.task
        multiclass = task.target == "multiclass"
        # Focal factors of a label are of its negatives, too.
        weighted = ("ce", "focal") if multiclass else ("ce",)
        weights = task.loss.get("weights") if task.loss["name"] in weighted else None
        if weights:
            factors = torch.tensor(weights)
            if not multiclass:
                factors = torch.stack([torch.ones_like(factors), factors], dim=1)
            counts = counts * factors
        return balance(counts, multiclass)
