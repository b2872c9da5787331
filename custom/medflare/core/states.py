"""Arithmetic on state dicts: pure functions, float64 accumulation, sorted order, integer buffers copied and never averaged."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from medflare.core.backing import empty

StateDict = dict[str, Tensor]
CACHED: Final = 2**15  # numbers of each tensor at a time, so that what is made of them stays in the processor's cache
LONG: Final = 2**19  # the same for sums that decide about weights: as many as most tensors have, whose sums are then of one piece


def stretches(tensors: Sequence[Tensor], size: int = CACHED) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape side by side, laid out flat, a stretch at a time: what is computed of them needs no room of their size.

    Args:
        tensors: all of one shape, with or without a graph; of a contiguous one the stretches share its memory.
        size: numbers of a stretch; the last one may have fewer.

    Examples:
        >>> [(a.tolist(), b.tolist()) for a, b in stretches([torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])], size=3)]
        [([1, 2, 3], [5, 6, 7]), ([4], [8])]
    """
    return zip(*(tensor.detach().reshape(-1).split(size) for tensor in tensors), strict=True)


def copy_state(state: Mapping[str, Tensor]) -> StateDict:
    """A detached copy on the CPU that shares no memory with `state`."""
    return {name: empty(tensor.shape, tensor.dtype).copy_(tensor.detach()) for name, tensor in state.items()}


def refuse_unlike(states: Mapping[str, StateDict]) -> None:
    """Nothing where all states have the same names and shapes.

    Raises:
        ValueError: two differ, with the sites and the first names.

    Examples:
        >>> refuse_unlike({"A": {"w": torch.zeros(2)}, "B": {"w": torch.zeros(1, 2)}})
        Traceback (most recent call last):
        ValueError: states of A and B differ in ['w']
    """
    sites = sorted(states)
    for site in sites[1:]:
        if odd := _unlike(states[sites[0]], states[site]):
            raise ValueError(f"states of {sites[0]} and {site} differ in {odd[:3]}")


def weighted_mean(states: Mapping[str, StateDict], weights: Mapping[str, float]) -> StateDict:
    """sum_k weights_k states_k / sum_k weights_k, by site.

    Floating entries accumulate in float64 in sorted site order, so the result does not depend on who answered first, and
    return to their own dtype. Integer entries (BatchNorm's `num_batches_tracked`) take the largest value of those that count.

    Args:
        states: site -> state; all with the same names and shapes.
        weights: site -> weight, not negative; only the ratios matter. Numbers of weight 0 do not count, whatever they are.

    Returns:
        The mean state, with the names, shapes and dtypes of the given ones.

    Raises:
        ValueError: no state, a weight that is missing, negative or not finite, weights that sum to zero, or states whose
            names or shapes differ.

    Examples:
        >>> weighted_mean({"A": {"w": torch.tensor(1.0)}, "B": {"w": torch.tensor(5.0)}}, {"A": 3.0, "B": 1.0})
        {'w': tensor(2.)}
    """
    sites = sorted(states)
    if not sites:
        raise ValueError("weighted_mean needs at least one state")
    given = {site: float(weights.get(site, math.nan)) for site in sites}
    total = sum(given.values())
    if not 0 < total < math.inf or min(given.values()) < 0:
        raise ValueError(f"weights must be finite, >= 0 and not all zero, one for each state, got {given}")
    refuse_unlike(states)
    counting = [site for site in sites if given[site]]  # 0 times NaN would be NaN
    shares = [given[site] / total for site in counting]
    return {name: _mean_tensor([states[site][name] for site in counting], shares) for name in states[sites[0]]}


def _mean_tensor(tensors: list[Tensor], shares: list[float]) -> Tensor:
    if not tensors[0].is_floating_point():
        return torch.stack(tensors).amax(dim=0)
    mean = empty(tensors[0].shape, tensors[0].dtype)
    for found, *parts in stretches([mean, *tensors]):
        total = torch.zeros(found.shape, dtype=torch.float64)
        for part, share in zip(parts, shares, strict=True):
            total.add_(part.to(torch.float64), alpha=share)
        found.copy_(total)
    return mean


def gram(tensors: Sequence[Tensor], origin: Tensor) -> Tensor:
    """(K, K) inner products <w_j - w, w_k - w> in float64.

    Examples:
        >>> gram([torch.tensor([2.0, 1.0]), torch.tensor([1.0, 3.0])], torch.tensor([1.0, 1.0]))
        tensor([[1., 0.],
                [0., 4.]], dtype=torch.float64)
    """
    total = torch.zeros(len(tensors), len(tensors), dtype=torch.float64)
    room = torch.empty(len(tensors) * min(LONG, origin.numel()), dtype=torch.float64)  # made once: the system takes its time to give it
    for start, *parts in stretches([origin, *tensors], LONG):
        deltas = room[: len(parts) * start.numel()].view(len(parts), -1)
        for part, delta in zip(parts, deltas, strict=True):
            delta.copy_(part).sub_(start)
        total += deltas @ deltas.T
    return total


def cosines(gram: Tensor) -> Tensor:
    """cos(u_j, u_k) from the inner products <u_j, u_k>; 0 with a vector of length 0, itself included.

    Returns:
        (..., K, K).

    Examples:
        >>> cosines(torch.tensor([[4.0, -6.0, 0.0], [-6.0, 9.0, 0.0], [0.0, 0.0, 0.0]])).tolist()
        [[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = norms.unsqueeze(-1) * norms.unsqueeze(-2)
    return torch.where(scale > 0, gram / scale, torch.zeros_like(gram))


def difference(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> StateDict:
    """new - old for floating entries; integer entries keep the new value.

    Examples:
        >>> difference({"w": torch.tensor(3.0), "n": torch.tensor(7)}, {"w": torch.tensor(1.0), "n": torch.tensor(4)})
        {'w': tensor(2.), 'n': tensor(7)}
    """
    return {name: tensor - old[name] if tensor.is_floating_point() else tensor.clone() for name, tensor in new.items()}


def moved(state: Mapping[str, Tensor], delta: Mapping[str, Tensor], scale: float = 1.0) -> StateDict:
    """state + scale * delta for floating entries; integer entries take delta's value (see `difference`).

    Examples:
        >>> moved({"w": torch.tensor(1.0), "n": torch.tensor(4)}, {"w": torch.tensor(2.0), "n": torch.tensor(7)}, 0.5)
        {'w': tensor(2.), 'n': tensor(7)}
    """
    return {
        name: tensor + scale * delta[name].to(tensor.dtype) if tensor.is_floating_point() else delta[name].clone()
        for name, tensor in state.items()
    }


def blend(first: Mapping[str, Tensor], second: Mapping[str, Tensor], share: float) -> StateDict:
    """(1 - share) * first + share * second for floating entries; integer entries are those of `second`.

    Args:
        first: the state at share 0, whose dtypes the result has.
        second: the state at share 1, with every name of `first`.
        share: between 0 and 1; beyond, it extrapolates.

    Examples:
        >>> a, b = {"w": torch.tensor(1.0)}, {"w": torch.tensor(3.0)}
        >>> blend(a, b, 0.0), blend(a, b, 0.5), blend(a, b, 1.0)
        ({'w': tensor(1.)}, {'w': tensor(2.)}, {'w': tensor(3.)})
    """
    return {
        name: torch.lerp(tensor, second[name].to(tensor.dtype), share) if tensor.is_floating_point() else second[name].clone()
        for name, tensor in first.items()
    }


def batch_norm_entries(module: nn.Module) -> frozenset[str]:
    """Names of all state entries that belong to batch-normalisation layers, found by module type, never by name.

    Any normalisation that keeps running statistics counts (BatchNorm, SyncBatchNorm, InstanceNorm with tracking).

    Examples:
        >>> sorted(batch_norm_entries(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        ['1.bias', '1.num_batches_tracked', '1.running_mean', '1.running_var', '1.weight']
    """
    found: set[str] = set()
    for prefix, layer in module.named_modules(remove_duplicate=False):  # a layer in two places has two names in the state
        if isinstance(layer, _NormBase) and (isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats):
            found.update(f"{prefix}.{name}" if prefix else name for name in layer.state_dict())
    return frozenset(found)


def split_state(state: Mapping[str, Tensor], chosen: frozenset[str]) -> tuple[StateDict, StateDict]:
    """(entries in `chosen`, all others).

    Examples:
        >>> split_state({"a": torch.tensor(1), "b": torch.tensor(2)}, frozenset({"b"}))
        ({'b': tensor(2)}, {'a': tensor(1)})
    """
    return {n: t for n, t in state.items() if n in chosen}, {n: t for n, t in state.items() if n not in chosen}


def misfit(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> str:
    """Why `state` cannot be loaded where `like` came from, naming up to three entries; empty where it can.

    Examples:
        >>> misfit({"w": torch.zeros(2)}, {"w": torch.zeros(3)})
        'w missing, unexpected or of another shape'
    """
    wrong = _unlike(state, like)
    return f"{', '.join(wrong[:3])} missing, unexpected or of another shape" if wrong else ""


def _unlike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names that one of two states has alone, sorted; where there are none, those of other shapes."""
    return sorted(one.keys() ^ other.keys()) or sorted(name for name in one if one[name].shape != other[name].shape)


def state_bytes(state: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors together.

    Examples:
        >>> state_bytes({"w": torch.zeros(3, dtype=torch.float32), "n": torch.zeros(1, dtype=torch.int64)})
        20
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes in order, uint8 (n,), without a copy where it lies on the CPU in one piece.

    Examples:
        >>> bytes_of(torch.tensor(1.0).expand(1)).tolist()  # its stride is 0, which `Tensor.view` does not take
        [0, 0, 128, 63]
    """
    whole = tensor.detach().cpu().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
