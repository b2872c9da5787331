"""An extension of every group, as another distribution brings them; `USED` has the names of those that ran."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.transforms import MapTransform, RandomizableTransform, Transform
from torch import Tensor, nn

from medflare.core.states import StateDict
from medflare.data.reading import Stored
from medflare.tasks.metrics_table import Metric

USED: set[str] = set()


class PolyLoss(nn.Module):
    """Cross entropy + ε (1 - p) of the true class (Leng et al., ICLR 2022, Eq. 6)."""

    def __init__(self, epsilon: float = 1.0):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        USED.add("lab_poly")
        true = logits.log_softmax(dim=1).gather(1, targets[:, None])
        return (-true + self.epsilon * (1 - true.exp())).mean()


def confidence(probabilities: Any, targets: Any, weights: Any, target: str) -> Any:
    """Mean probability of the predicted class."""
    USED.add("lab_confidence")
    return weights @ probabilities.max(axis=1) / weights.sum(axis=-1)


CONFIDENCE = Metric("classes", "confidence", confidence, "no image")


class Halved(Transform):
    """Half of every intensity."""

    def __call__(self, image: Tensor) -> Tensor:
        USED.add("lab_halved")
        return image / 510


class RandShifted(RandomizableTransform, MapTransform):
    """A random value added to all intensities."""

    spatial = False

    def __init__(self, keys: Any, prob: float = 0.5):
        MapTransform.__init__(self, keys)
        RandomizableTransform.__init__(self, prob)

    def __call__(self, sample: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        USED.add("lab_shifted")
        self.randomize(None)
        shift = float(self.R.uniform(0, 0.1)) if self._do_transform else 0.0
        return {key: image + shift for key, image in sample.items()}


class SignSGD(torch.optim.Optimizer):
    """w <- w - lr sign(momentum)."""

    def __init__(self, parameters: Any, lr: float = 0.01, beta: float = 0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        USED.add("lab_sign")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    moment = self.state[weight].setdefault("moment", torch.zeros_like(weight))
                    moment.mul_(group["beta"]).add_(weight.grad, alpha=1 - group["beta"])
                    weight.sub_(group["lr"] * moment.sign())


def linear_cnn(in_channels: int, out_channels: int, width: int = 4) -> nn.Module:
    """A convolution, the mean over the pixels, a linear layer."""
    USED.add("lab_cnn")
    first = nn.Conv2d(in_channels, width, 3, padding=1)
    return nn.Sequential(
        first,
        nn.BatchNorm2d(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, out_channels),
    )


class Sharper(nn.Module):
    """Probabilities squared, and divided by their sum."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        USED.add("lab_sharper")
        squares = self.model(images).square()
        return squares / squares.sum(dim=1, keepdim=True)


def sharper(model: nn.Module, task: Any, message: Any) -> nn.Module:
    return Sharper(model)


def largest(states: Mapping[str, StateDict], shares: Mapping[str, float], origin: Any) -> StateDict:
    """The state of the site with the largest share."""
    USED.add("lab_largest")
    return dict(states[max(sorted(shares), key=shares.__getitem__)])


def read_npy(path: Path) -> Stored:
    """An array (rows, columns)."""
    USED.add("npy")
    return Stored(np.load(path).T[None])
