"""MixStyle (Zhou et al., "Domain Generalization with MixStyle", ICLR 2021), with FedAvg as in
FedDAG's tables.

    γ = λ σ(x) + (1 - λ) σ(x'),  β = λ μ(x) + (1 - λ) μ(x'),  MixStyle(x) = γ (x - μ(x))/σ(x) + β

μ and σ are an image's mean and deviation over the positions of each channel, without a gradient; x'
is another image of the batch, λ ~ Beta(α, α). A site has one domain, so x' is any image (the
paper's random shuffle). Feature maps of early layers are mixed, in training only.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medflare.core.rng import numpy_generator
from medflare.methods import (
    ConfigError,
    FeatureNetwork,
    FedAvgSite,
    FedAvgSiteHyper,
    TaskConfig,
    param,
    strict_dataclass,
)
from medflare.methods.families.local_terms.features import refuse_compiled
from medflare.networks.catalogue import meta_network


@strict_dataclass
class MixStyleHyper(FedAvgSiteHyper):
    """How often and how much styles are mixed."""

    probability: float = param(
        0.5, "of mixing, for each batch and layer; 0: FedAvg", source="Sec. 3.2", low=0, high=1
    )
    alpha: float = param(0.1, "of the distribution of λ", symbol="α", source="Sec. 3.2", low=1e-3)


def mix_styles(features: Tensor, order: Tensor, share: Tensor) -> Tensor:
    """MixStyle(x) (Sec. 3.2) of feature maps (N, C, ...).

    Args:
        order: (N,) row of each image's x'.
        share: λ (N,).
    """
    axes = tuple(range(2, features.ndim))
    variance, mean = torch.var_mean(features.detach(), axes, correction=0, keepdim=True)
    deviation = (variance + 1e-6).sqrt()
    share = share.reshape(-1, *[1] * (features.ndim - 1))
    gamma = torch.lerp(deviation[order], deviation, share)
    beta = torch.lerp(mean[order], mean, share)
    return gamma * (features - mean) / deviation + beta


def early_blocks(module: nn.Module) -> list[nn.Module]:
    """The first third, rounded up, of a network's top-level blocks with convolutions.

    If the first block is a list, or the only one, its own blocks are taken.
    """
    blocks = []
    for block in module.children():
        if any(isinstance(layer, nn.modules.conv._ConvNd) for layer in block.modules()):
            blocks.append(block)
    if not blocks:
        return []
    if isinstance(blocks[0], nn.ModuleList) or (len(blocks) == 1 and any(blocks[0].children())):
        return early_blocks(blocks[0])
    return blocks[: (len(blocks) + 2) // 3]


class MixStyleSite(FedAvgSite[MixStyleHyper]):
    """FedAvg's site algorithm with mixed styles."""

    dp_unsupported_reason = "it mixes the images of a batch"
    freezes = False  # a frozen body mixes no styles

    @classmethod
    def check(cls, task: TaskConfig, hyper: MixStyleHyper, server_hyper: Any) -> None:
        """Also raises ConfigError for a network without convolutions."""
        super().check(task, hyper, server_hyper)
        if not early_blocks(meta_network(task).body):
            raise ConfigError(
                f"mixstyle: network {task.network['name']} has no convolution, whose output has a "
                "style; take unet or small_cnn"
            )

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        """Epochs of the task's loss, with mixed styles of feature maps; returns its mean."""
        refuse_compiled(self.site)
        random = numpy_generator(self.site.seed, self.site.name, round, "mixstyle")

        def mix(block: nn.Module, _inputs: Any, output: Any) -> Any:
            is_map = isinstance(output, Tensor) and output.ndim == 2 + self.site.task.spatial_dims
            if not (block.training and is_map) or random.random() >= self.hyper.probability:
                return output
            order = torch.from_numpy(random.permutation(len(output)))
            share = random.beta(self.hyper.alpha, self.hyper.alpha, len(output))
            return mix_styles(output, order, torch.from_numpy(share).to(output))

        with ExitStack() as hooks:
            for block in early_blocks(model.body):
                hooks.enter_context(block.register_forward_hook(mix))
            return super().fit(model, optimizer, round)
