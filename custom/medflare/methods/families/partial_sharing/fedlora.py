"""FedLoRA: low-rank adapters of a frozen network, which is the same everywhere.

    w = w_0 + (α / r) B A        (Hu et al., LoRA, ICLR 2022, Sec. 4.1)

    share "both": A <- Σ_k p_k A_k, B <- Σ_k p_k B_k   (FedIT, Zhang et al., ICASSP 2024)
    share "a":    A <- Σ_k p_k A_k, every site has its B   (FedSA-LoRA, Guo et al., ICLR 2025)
    share "b":    A is frozen, B <- Σ_k p_k B_k   (FFA-LoRA, Sun et al., ICLR 2024)

The base w_0 has the task's pretrained or random initial weights. Every linear layer and
convolution of the body has an adapter. Head, scales and shifts of normalisation are trained and
averaged as well. All other weights, biases and running statistics are frozen.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from medflare.core.message import FinalModels
from medflare.core.states import split_state
from medflare.methods import (
    MODEL,
    SELECTED_ROUND,
    FeatureNetwork,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSite,
    FedAvgSiteHyper,
    Message,
    PartialSite,
    Plan,
    ServerContext,
    StateDict,
    TensorSpec,
    copy_state,
    param,
    phase,
    strict_dataclass,
    torch_generator,
    trained_model,
)
from medflare.networks.foreign import NetworkSpec
from medflare.training.epochs import named_trainable as trained


@strict_dataclass
class FedLoRAHyper(FedAvgSiteHyper):
    """The adapters, and which of their factors travel."""

    rank: int = param(
        8, "rank of the adapters", symbol="r", source="LoRA, Sec. 4.1", low=1, high=256
    )
    alpha: float = param(
        16.0, "scale of the adapters, divided by the rank", symbol="α", source="LoRA, Sec. 4.1"
    )
    share: Literal["both", "a", "b"] = param(
        "both", "A and B travel; A travels and B stays at the site; B travels and A is frozen"
    )


@strict_dataclass
class FedLoRAServerHyper(FedAvgServerHyper):
    """FedAvg's hyper-parameters, for a model of adapters."""


def low_rank_update(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """(α / r) B A, (out, in), of A (r, in) and B (out, r) (Hu et al. 2022, Sec. 4.1)."""
    return alpha / len(a) * (b @ a)


class Adapter(nn.Module):
    """A weight (out, ...), seen as a matrix (out, in * k * k), plus its low-rank update."""

    def __init__(self, weight: Tensor, noise: Tensor, hyper: FedLoRAHyper):
        super().__init__()
        self.alpha = hyper.alpha
        self.A = nn.Parameter(noise.to(weight), requires_grad=hyper.share != "b")
        self.B = nn.Parameter(weight.new_zeros(len(weight), hyper.rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + low_rank_update(self.A, self.B, self.alpha).view_as(weight)


def adapted(network: FeatureNetwork, hyper: FedLoRAHyper, seed: int) -> FeatureNetwork:
    """The network, frozen and with adapters in place.

    A is Gaussian noise of variance 1 / in, keyed by seed and layer; B is 0.
    """
    network.requires_grad_(False)
    network.head.requires_grad_(True)
    head = set(network.head.modules())
    for name, layer in list(network.named_modules()):
        if isinstance(layer, _NormBase | nn.LayerNorm | nn.GroupNorm):
            layer.requires_grad_(True)
            layer.register_forward_pre_hook(_freeze_statistics)
        elif isinstance(layer, nn.Linear | _ConvNd) and layer not in head:
            inputs = layer.weight[0].numel()
            random = torch_generator(seed, "adapter", name)
            noise = torch.randn(hyper.rank, inputs, generator=random) / inputs**0.5
            adapter = Adapter(layer.weight, noise, hyper)
            parametrize.register_parametrization(layer, "weight", adapter)
    return network


def _freeze_statistics(layer: nn.Module, _inputs: Any) -> None:
    layer.eval()


def merged(network: nn.Module, names: Iterable[str]) -> StateDict:
    """The plain network's state, with these names, of an adapted network."""
    return copy_state({name: attrgetter(name)(network) for name in names})


def _adapters(plan: Plan[FedLoRAHyper, Any]) -> dict[str, nn.Parameter]:
    return trained(adapted(plan.network(), plan.site_hyper, 0))


ADAPTERS = TensorSpec("model", template=_adapters)


class FedLoRASite(PartialSite[FedLoRAHyper]):
    """Trains adapters, head and normalisation; final models are plain networks.

    With share "a" a site uses the model of its best round by its own validation.
    """

    server_hyper = FedLoRAServerHyper
    dp_unsupported_reason = "Opacus gives no gradient of each image in an adapted layer"

    @classmethod
    def parts(cls, plan: Plan[FedLoRAHyper, Any]) -> tuple[StateDict, StateDict]:
        """What stays, B with share "a" or nothing, and what is shared, all other trained
        weights.
        """
        state = _adapters(plan)
        stays = plan.site_hyper.share == "a"
        factors = frozenset(name for name in state if stays and name.endswith(".weight.0.B"))
        return split_state(state, factors)

    def network(
        self,
        purpose: str,
        state: StateDict,
        spec: NetworkSpec | None = None,
        outputs: int | None = None,
    ) -> FeatureNetwork:
        """The adapted network with the trained weights `state`."""
        if purpose not in self._networks:
            network = self.site.network("model", spec, outputs)
            self._networks[purpose] = adapted(network, self.hyper, self.site.seed)
        on_device = self.site.computing.state_on_device(state)
        self._networks[purpose].load_state_dict(on_device, strict=False)
        return self._networks[purpose]

    def joined(self, shared: StateDict) -> StateDict:
        """The adapters with the site's B, which is 0 before its first training."""
        if self.local is None:
            factors, _ = self.parts(self.plan)
            self.local = {
                name: torch.zeros_like(factor, device="cpu") for name, factor in factors.items()
            }
        return {**shared, **self.local}

    @phase(request=(ADAPTERS,), request_meta=(SELECTED_ROUND.as_optional(),))
    def finalize(self, incoming: Message) -> FinalModels:
        """The selected global model in all roles; with share "a" inside sites have their own model,
        outside sites no personal one.
        """
        models = FedAvgSite.finalize(self, incoming)
        if self.hyper.share == "a":
            models = super().finalize(incoming)
        model = models["global"]
        plain = merged(self.network("model", model[MODEL]), self.plan.template())
        return dict.fromkeys(models, trained_model(plain, model[SELECTED_ROUND]))


class FedLoRAServer(FedAvgServer[FedLoRAServerHyper]):
    """FedAvg's server algorithm, whose global model is the adapters."""

    site_algorithm = FedLoRASite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        plan = context.plan
        self.partial = plan.site_hyper.share == "a"
        network = plan.network()
        network.load_state_dict(self.model, assign=True)
        self.network = adapted(network, plan.site_hyper, context.seed)
        self.model = copy_state(trained(self.network))

    def models(self) -> FinalModels:
        """The selected global model as a plain network, if the server has all of it."""
        models = super().models()
        for role, model in models.items():
            self.network.load_state_dict(model[MODEL], strict=False)
            plain = merged(self.network, self.context.plan.template())
            models[role] = trained_model(plain, model[SELECTED_ROUND])
        return models
