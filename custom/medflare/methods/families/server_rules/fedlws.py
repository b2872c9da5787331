"""FedLWS (Shi et al., ICLR 2025): the mean model is shrunk layer by layer.

    w_l <- γ_l ŵ_l,   γ_l = ||w_l|| / (||w_l|| + τ_l ||ŵ_l - w_l||)
    τ_l = β (1/K) Σ_k ||δ_kl - mean_j δ_jl||, limited to [τ_min, τ_max]

w is the previous model, ŵ the weighted mean, δ_k = w_k - w. Formula and defaults are those of the
authors' code. A layer is a module with trained entries; a layer of zeros is not shrunk.
"""

from statistics import fmean

from torch.nn.utils import get_total_norm

from medflare.methods import FedAvgServer, FedAvgServerHyper, StateDict, param, strict_dataclass
from medflare.methods.aggregation import plain_mean
from medflare.methods.families.server_rules.rule import Models, ReweightedMean


@strict_dataclass
class FedLWSHyper(FedAvgServerHyper):
    """The strength of the shrinking."""

    beta: float = param(0.03, "strength by spread of the sites' updates", symbol="β", low=0)
    tau_min: float = param(0.01, "smallest strength", symbol="τ_min", low=0)
    tau_max: float = param(0.2, "largest strength; 0: FedAvg", symbol="τ_max", low=0)


def shrinking_factor(weights: float, update: float, strength: float) -> float:
    """γ_l from ||w_l||, ||ŵ_l - w_l|| and τ_l; 1 for weights of zero."""
    if weights == 0:
        return 1.0
    return weights / (weights + strength * update)


class ShrunkMean(ReweightedMean):
    """The weighted mean, with every layer times its γ_l."""

    def server_step(self, mean: StateDict, models: Models, previous: StateDict) -> StateDict:
        parts = self.trained_parts(models)
        centre = plain_mean(parts)
        layers: dict[str, list[str]] = {}
        for name in mean:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        shrunk = {}
        for names in layers.values():
            spreads = []
            for part in parts.values():
                deviation = get_total_norm([part[name] - centre[name] for name in names])
                spreads.append(float(deviation))
            strength = max(self.hyper.beta * fmean(spreads), self.hyper.tau_min)
            strength = min(strength, self.hyper.tau_max)
            weights = get_total_norm([previous[name] for name in names])
            update = get_total_norm([mean[name] - previous[name] for name in names])
            factor = shrinking_factor(float(weights), float(update), strength)
            for name in names:
                shrunk[name] = mean[name] * factor
        return shrunk


class FedLWSServer(FedAvgServer[FedLWSHyper]):
    """FedAvg's server algorithm with layer-wise shrinking."""

    aggregation_class = ShrunkMean
