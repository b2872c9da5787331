"""DSBN: BatchNorm statistics re-estimated from a site's unlabelled images (after Chang et al., CVPR
2019; GRACE paper, Table 3).

It works on any trained model with BatchNorm; the weights do not change.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medflare.core.errors import ConfigError, StateError
from medflare.core.states import StateDict, copy_state, misfit


class TestTimeNorm(nn.Module):
    """A BatchNorm layer that normalises by the test batch instead of its running statistics.

    A channel with a single value (one image, 1x1 features) has no variance: it uses the running
    statistics.

    Attributes:
        running: use the running statistics after all.
    """

    __test__ = False  # not a test, in spite of its name

    def __init__(self, layer: _BatchNorm):
        super().__init__()
        self.layer = layer
        self.running = False

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (N, C, ...) normalised per channel, over the batch."""
        if self.running or inputs.numel() == inputs.shape[1]:
            return self.layer(inputs)
        layer = self.layer
        return F.batch_norm(
            inputs, None, None, layer.weight, layer.bias, training=True, eps=layer.eps
        )


def batch_norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The model's BatchNorm layers by name, found by type; a layer used in two places has two
    names.
    """
    return {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, _BatchNorm)
    }


def require_batch_norm(model: nn.Module) -> None:
    """Raises ConfigError for a model without BatchNorm layers."""
    if not batch_norm_layers(model):
        raise ConfigError(
            f"{type(model).__name__} has no BatchNorm, which Tent and DSBN adapt; "
            "use a network with BatchNorm or test-time adaptation none"
        )


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Replaces the layer of a name below `model`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def normalise_by_batch(model: nn.Module) -> dict[str, TestTimeNorm]:
    """Lets the model normalise by the current batch; the layers that replace its BatchNorm layers,
    by name (`batch_norm_layers`).
    """
    replaced: dict[_BatchNorm, TestTimeNorm] = {}
    by_name = {}
    for name, layer in batch_norm_layers(model).items():
        by_name[name] = replaced.setdefault(layer, TestTimeNorm(layer))
        replace_layer(model, name, by_name[name])
    return by_name


def with_batch_statistics(model: nn.Module) -> tuple[nn.Module, dict[str, TestTimeNorm]]:
    """A copy of the model that normalises by the current batch, and its replaced BatchNorm layers
    by name; ConfigError if there are none.
    """
    require_batch_norm(model)
    model = copy.deepcopy(model).eval()
    return model, normalise_by_batch(model)


@torch.no_grad()
def estimate_statistics(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace, in place, the running statistics of every BatchNorm layer by those of all these
    images (N, C, H, W) together.

    Meanwhile every layer normalises by the current batch, so that deep layers get nearly the inputs
    that they will get afterwards. A layer with a single value per channel (one image, 1x1 features)
    keeps its statistics.

    Raises:
        ConfigError: the model has no BatchNorm.
    """
    working, layers = with_batch_statistics(model)
    sums: dict[str, Tensor] = {}  # (count, sum, sum of squares) by channel, float64 (3, C)

    def add(name: str, inputs: Tensor) -> None:
        values = inputs.detach().transpose(0, 1).flatten(1).double()  # (C, N * pixels)
        total = values.sum(dim=1)
        squares = values.square().sum(dim=1)
        count = torch.full_like(total, values.shape[1])
        sums[name] = sums.get(name, 0) + torch.stack([count, total, squares])

    for name, replacement in layers.items():
        replacement.register_forward_pre_hook(
            lambda _layer, inputs, name=name: add(name, inputs[0])
        )
    for batch in batches:
        working(batch)
    for name, layer in batch_norm_layers(model).items():
        if name not in sums:  # of a super model's network that no image chose
            continue
        count, total, squares = sums[name]
        if count[0] > 1 and layer.running_mean is not None and layer.running_var is not None:
            mean = total / count
            variance = (squares - total * mean) / (count - 1)  # unbiased, as in BatchNorm
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance.clamp(min=0))


class TargetStatistics(nn.Module):
    """A model, images to probabilities, that `adapt` gives the BatchNorm statistics of a site;
    before, it has the trained ones.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        require_batch_norm(model)
        self.model = copy.deepcopy(model).eval()

    def adapt(self, batches: Iterable[Tensor]) -> None:
        estimate_statistics(self.model, batches)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    @property
    def by_patient(self) -> bool:
        """See `training.scoring.PatientPredictor`."""
        return bool(getattr(self.model, "by_patient", False))

    def predict_patient(self, parts: Sequence[Tensor]) -> Tensor:
        """See `training.scoring.PatientPredictor`."""
        model: Any = self.model
        return model.predict_patient(parts)

    def statistics(self) -> StateDict:
        """Mean and variance of every layer with running statistics, by name."""
        names: set[str] = set()
        for name, layer in batch_norm_layers(self.model).items():
            if layer.track_running_stats:
                names |= {f"{name}.running_mean", f"{name}.running_var"}
        state = self.model.state_dict()
        return copy_state({name: tensor for name, tensor in state.items() if name in names})

    def load_statistics(self, state: StateDict) -> None:
        """Restore what `statistics` returned; raises StateError if it came from another network."""
        reason = misfit(state, self.statistics())
        if reason:
            raise StateError(
                f"these BatchNorm statistics belong to another network: {reason}; "
                "adapt the model anew"
            )
        self.model.load_state_dict(state, strict=False)
