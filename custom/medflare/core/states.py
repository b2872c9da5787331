"""Arithmetic on state dicts: pure functions, float64 accumulation, sorted order, integer buffers copied and never averaged."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

StateDict = dict[str, Tensor]


def copy_state(state: Mapping[str, Tensor]) -> StateDict:
    """A detached copy on the CPU that shares no memory with `state`."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}


def weighted_mean(states: Mapping[str, StateDict], weights: Mapping[str, float]) -> StateDict:
    """sum_k weights_k states_k / sum_k weights_k, by site.

    Floating entries accumulate in float64 in sorted site order, so the result does not depend on who answered first, and
    return to their own dtype. Integer entries (BatchNorm's `num_batches_tracked`) take the largest value.

    Args:
        states: site -> state; all with the same names and shapes.
        weights: site -> weight, not negative; only the ratios matter.

    Raises:
        ValueError: no state, a weight that is missing, negative or not finite, weights that sum to zero, or states whose
            names or shapes differ.
    """
    sites = sorted(states)
    if not sites:
        raise ValueError("weighted_mean needs at least one state")
    given = {site: float(weights.get(site, math.nan)) for site in sites}
    total = sum(given.values())
    if not 0 < total < math.inf or min(given.values()) < 0:
        raise ValueError(f"weights must be finite, >= 0 and not all zero, one for each state, got {given}")
    first = states[sites[0]]
    for site in sites[1:]:
        odd = states[site].keys() ^ first.keys() or {name for name in first if states[site][name].shape != first[name].shape}
        if odd:
            raise ValueError(f"states of {sites[0]} and {site} differ in {sorted(odd)[:3]}")
    return {name: _mean_tensor([states[site][name] for site in sites], [given[site] / total for site in sites]) for name in first}


def _mean_tensor(tensors: list[Tensor], shares: list[float]) -> Tensor:
    if not tensors[0].is_floating_point():
        return torch.stack(tensors).amax(dim=0)
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total.add_(tensor.to(torch.float64), alpha=share)
    return total.to(tensors[0].dtype)


def difference(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> StateDict:
    """new - old for floating entries; integer entries keep the new value."""
    return {name: tensor - old[name] if tensor.is_floating_point() else tensor.clone() for name, tensor in new.items()}


def moved(state: Mapping[str, Tensor], delta: Mapping[str, Tensor], scale: float = 1.0) -> StateDict:
    """state + scale * delta for floating entries; integer entries take delta's value (see `difference`)."""
    return {
        name: tensor + scale * delta[name].to(tensor.dtype) if tensor.is_floating_point() else delta[name].clone()
        for name, tensor in state.items()
    }


def blend(first: Mapping[str, Tensor], second: Mapping[str, Tensor], share: float) -> StateDict:
    """(1 - share) * first + share * second for floating entries; integer entries are those of `second`."""
    return {
        name: torch.lerp(tensor, second[name], share) if tensor.is_floating_point() else second[name].clone()
        for name, tensor in first.items()
    }


def batch_norm_entries(module: nn.Module) -> frozenset[str]:
    """Names of all state entries that belong to batch-normalisation layers, found by module type, never by name.

    Any normalisation that keeps running statistics counts (BatchNorm, SyncBatchNorm, InstanceNorm with tracking).
    """
    found: set[str] = set()
    for prefix, layer in module.named_modules(remove_duplicate=False):  # a layer in two places has two names in the state
        if isinstance(layer, _NormBase) and (isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats):
            found.update(f"{prefix}.{name}" if prefix else name for name in layer.state_dict())
    return frozenset(found)


def split_state(state: Mapping[str, Tensor], chosen: frozenset[str]) -> tuple[StateDict, StateDict]:
    """(entries in `chosen`, all others)."""
    return {n: t for n, t in state.items() if n in chosen}, {n: t for n, t in state.items() if n not in chosen}


def misfit(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> str:
    """Why `state` cannot be loaded where `like` came from, naming up to three entries; empty where it can."""
    wrong = sorted(state.keys() ^ like.keys()) or sorted(name for name, tensor in state.items() if tensor.shape != like[name].shape)
    return f"{', '.join(wrong[:3])} missing, unexpected or of another shape" if wrong else ""


def state_bytes(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
