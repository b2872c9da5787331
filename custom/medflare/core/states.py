"""Arithmetic on state dicts: pure functions, float64 accumulation, sorted order, integer buffers copied and never averaged."""

from collections.abc import Iterable, Mapping

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
        ValueError: no state, a missing or negative weight, weights that sum to zero, or names that differ.
    """
    sites = sorted(states)
    if not sites:
        raise ValueError("weighted_mean needs at least one state")
    total = float(sum(weights[site] for site in sites))
    if not total > 0 or any(not weights[site] >= 0 for site in sites):
        raise ValueError(f"weights must be >= 0 and not all zero, got { {site: weights[site] for site in sites} }")
    first = states[sites[0]]
    for site in sites[1:]:
        if states[site].keys() != first.keys():
            odd = sorted(states[site].keys() ^ first.keys())
            raise ValueError(f"states of {sites[0]} and {site} differ in {odd[:3]}")
    return {name: _mean_tensor([states[site][name] for site in sites], [weights[site] / total for site in sites]) for name in first}


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


def flatten(state: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Tensor:
    """The named floating entries (default: all, in the state's order) as one float64 vector."""
    chosen = list(state) if names is None else list(names)
    parts = [state[name].reshape(-1).to(torch.float64) for name in chosen if state[name].is_floating_point()]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def cosine(first: Tensor, second: Tensor) -> float:
    """Cosine of the angle between two vectors; 0 where one of them vanishes (there is no direction to agree on)."""
    norms = first.norm() * second.norm()
    return float(first @ second / norms) if norms > 0 else 0.0


def batch_norm_entries(module: nn.Module) -> frozenset[str]:
    """Names of all state entries that belong to batch-normalisation layers, found by module type, never by name.

    Any normalisation that keeps running statistics counts (BatchNorm, SyncBatchNorm, InstanceNorm with tracking).
    """
    found: set[str] = set()
    for prefix, layer in module.named_modules():
        if isinstance(layer, _NormBase) and (isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats):
            found.update(f"{prefix}.{name}" if prefix else name for name in layer.state_dict())
    return frozenset(found)


def split_state(state: Mapping[str, Tensor], chosen: frozenset[str]) -> tuple[StateDict, StateDict]:
    """(entries in `chosen`, all others)."""
    return {n: t for n, t in state.items() if n in chosen}, {n: t for n, t in state.items() if n not in chosen}


def state_bytes(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
