"""Arithmetic on state dicts: pure functions, float64 accumulation, sorted order, integer buffers
copied and never averaged.

Tensors of one name are processed in chunks, so that no float64 copy of a whole model is made.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

StateDict = dict[str, Tensor]
State = Mapping[str, Tensor]  # one that is only read
States = Mapping[str, StateDict]  # several by name, most often by site
# Values of each tensor at a time, so that intermediate results stay in the processor's cache.
CHUNK = 2**15
# The same for sums that decide about weights: most tensors fit, so that their sums are not split.
LONG_CHUNK = 2**19
_ALIGNMENT = 64  # bytes, of torch's tensors on the CPU


def iter_chunks(tensors: Sequence[Tensor], size: int = CHUNK) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, flattened and split into chunks of `size` values; chunks of a
    contiguous tensor share its memory.
    """
    return zip(*(tensor.detach().reshape(-1).split(size) for tensor in tensors), strict=True)


def copy_state(state: State) -> StateDict:
    """A detached copy on the CPU that shares no memory with `state`."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        for name, tensor in on_cpu(state).items()
    }


def aligned(state: State) -> StateDict:
    """The state with every tensor at an address as torch gives one; those that have it are not
    copied. In a part of a buffer, BLAS can round the last bit of the same product differently.
    """
    return {
        name: tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
        for name, tensor in state.items()
    }


def on_cpu(state: State) -> StateDict:
    """The state with tensors on the CPU; those that are there are not copied."""
    on_gpu = {name: tensor for name, tensor in state.items() if not tensor.is_cpu}
    return {**state, **transferred(on_gpu, _to_cpu)}


def copy_on_device(state: State) -> StateDict:
    """A detached copy on the same devices that shares no memory with `state`."""
    on_gpu = {}
    copies = {}
    for name, tensor in state.items():
        if tensor.is_cpu or not tensor.is_contiguous():
            copies[name] = tensor.detach().clone()
        else:
            on_gpu[name] = tensor
    copies.update(transferred(on_gpu, lambda joined: joined))
    return {name: copies[name] for name in state}


def transferred(
    state: State, move: Callable[[Tensor], Tensor], *, pinned: bool = False
) -> StateDict:
    """The state, detached, after one `move` of all tensors of a device and dtype: every copy from
    or to a GPU takes a while, however small it is. The result shares no memory with `state`.

    Args:
        pinned: `move` takes tensors in pinned memory, from which a GPU reads by itself; for a
            state of the CPU.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(name)
    result = {}
    for (device, dtype), names in groups.items():
        sizes = [state[name].numel() for name in names]
        pin = pinned and device.type == "cpu"
        joined = torch.empty(sum(sizes), dtype=dtype, device=device, pin_memory=pin)
        torch.cat([state[name].detach().reshape(-1) for name in names], out=joined)
        for name, part in zip(names, move(joined).split(sizes), strict=True):
            result[name] = part.view(state[name].shape)
    return result


def _to_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.cpu()
    # A GPU writes to pinned memory by itself, to other memory through a buffer of its driver.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def check_same_shapes(states: States) -> None:
    """Raises ValueError, with the sites and the first names, if names or shapes differ."""
    sites = sorted(states)
    for site in sites[1:]:
        names = _different(states[sites[0]], states[site])
        if names:
            raise ValueError(f"states of {sites[0]} and {site} differ in {names[:3]}")


def weighted_mean(states: States, weights: Mapping[str, float]) -> StateDict:
    """sum_k weights_k states_k / sum_k weights_k, by site.

    Floating tensors are summed in float64 in sorted site order and returned in their dtype. Integer
    tensors (BatchNorm's `num_batches_tracked`) take the largest value of the sites with a weight
    above 0.

    Args:
        states: site -> state; all with the same names and shapes.
        weights: site -> weight, >= 0; only the ratios matter. A state with weight 0 may hold NaN.

    Raises:
        ValueError: no state; a weight that is missing, negative or not finite; weights that sum to
            0; names or shapes that differ.
    """
    sites = sorted(states)
    by_site = {site: float(weights.get(site, math.nan)) for site in sites}
    total = sum(by_site.values())
    if not 0 < total < math.inf or min(by_site.values()) < 0:
        raise ValueError(
            f"weights must be finite, >= 0 and not all zero, one for each state, got {by_site}"
        )
    check_same_shapes(states)
    counting = [site for site in sites if by_site[site]]  # 0 times NaN would be NaN
    shares = [by_site[site] / total for site in counting]
    mean = {}
    for name in states[sites[0]]:
        mean[name] = _mean_tensor([states[site][name] for site in counting], shares)
    return mean


def _mean_tensor(tensors: list[Tensor], shares: list[float]) -> Tensor:
    if not tensors[0].is_floating_point():
        return torch.stack(tensors).amax(dim=0)
    mean = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
    for mean_chunk, *chunks in iter_chunks([mean, *tensors]):
        total = torch.zeros(mean_chunk.shape, dtype=torch.float64)
        for chunk, share in zip(chunks, shares, strict=True):
            total.add_(chunk.to(torch.float64), alpha=share)
        mean_chunk.copy_(total)
    return mean


def gram(tensors: Sequence[Tensor], origin: Tensor) -> Tensor:
    """(K, K) inner products <w_j - w, w_k - w> in float64."""
    total = torch.zeros(len(tensors), len(tensors), dtype=torch.float64)
    longest = min(LONG_CHUNK, origin.numel())
    buffer = torch.empty(len(tensors) * longest, dtype=torch.float64)  # allocated once
    for start, *chunks in iter_chunks([origin, *tensors], LONG_CHUNK):
        deltas = buffer[: len(chunks) * start.numel()].view(len(chunks), -1)
        for chunk, delta in zip(chunks, deltas, strict=True):
            delta.copy_(chunk).sub_(start)
        total += deltas @ deltas.T
    return total


def cosines(gram: Tensor) -> Tensor:
    """cos(u_j, u_k), (..., K, K), from inner products <u_j, u_k>; 0 if a vector has length 0."""
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = norms.unsqueeze(-1) * norms.unsqueeze(-2)
    return torch.where(scale > 0, gram / scale, torch.zeros_like(gram))


def difference(new: State, old: State) -> StateDict:
    """new - old for floating entries; integer entries keep the new value."""
    delta = {}
    for name, tensor in new.items():
        delta[name] = tensor - old[name] if tensor.is_floating_point() else tensor.clone()
    return delta


def moved(state: State, delta: State, scale: float = 1.0) -> StateDict:
    """state + scale * delta for floating entries; integer entries take delta's value (see
    `difference`).
    """
    result = {}
    for name, tensor in state.items():
        if tensor.is_floating_point():
            result[name] = tensor + scale * delta[name].to(tensor.dtype)
        else:
            result[name] = delta[name].clone()
    return result


def blend(first: State, second: State, share: float) -> StateDict:
    """(1 - share) * first + share * second in the dtypes of `first`; integer entries are those of
    `second`.
    """
    result = {}
    for name, tensor in first.items():
        if tensor.is_floating_point():
            result[name] = torch.lerp(tensor, second[name].to(tensor.dtype), share)
        else:
            result[name] = second[name].clone()
    return result


def batch_norm_entries(module: nn.Module) -> frozenset[str]:
    """Names of all state entries that belong to batch-normalisation layers, selected by module
    type, never by name.

    Any normalisation that keeps running statistics counts (BatchNorm, SyncBatchNorm, InstanceNorm
    with tracking).
    """
    names: set[str] = set()
    # A layer in two places has two names in the state.
    for prefix, layer in module.named_modules(remove_duplicate=False):
        if not isinstance(layer, _NormBase):
            continue
        if isinstance(layer, _BatchNorm) or layer.track_running_stats:
            start = f"{prefix}." if prefix else ""
            names.update(start + name for name in layer.state_dict())
    return frozenset(names)


def split_state(state: State, chosen: frozenset[str]) -> tuple[StateDict, StateDict]:
    """Two states: the entries in `chosen`, and all others."""
    selected = {name: tensor for name, tensor in state.items() if name in chosen}
    others = {name: tensor for name, tensor in state.items() if name not in chosen}
    return selected, others


def misfit(state: State, like: State) -> str | None:
    """Why `state` cannot be loaded in place of `like`, with up to three tensors; None if it can."""
    names = _different(state, like)
    if not names:
        return None
    return f"{', '.join(names[:3])} missing, unexpected or of another shape"


def _different(first: State, second: State) -> list[str]:
    """Names that only one of two states has, sorted; if there are none, those of unequal shapes."""
    unmatched = first.keys() ^ second.keys()
    if unmatched:
        return sorted(unmatched)
    return sorted(name for name in first if first[name].shape != second[name].shape)


def state_bytes(state: State) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in state.values())
