"""What can be said of a round's updates side by side: their lengths, their directions, and whether one has been seen before.

An update is the difference between an entry of a reply and the entry of the same name that the site was sent.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from medflare.core.message import Message
from medflare.core.states import CACHED, StateDict, bytes_of, cosines, offsets, stretches

_DIGEST: Final = 8  # bytes
_STRETCH: Final = 2**12  # numbers of 8 bytes
_NOTHING: Final = torch.zeros(())  # was sent of an entry that only the site has


@dataclass(frozen=True)
class Evidence:
    """One entry of all usable replies to a step.

    Attributes:
        products: (K, K) inner products of the sites' updates, in the order of `sites`.
        sent: site -> length of what it was sent; 0 where it was sent no such entry.
        update: whether the entry is a new version of what was sent, or a step.
        whole: whether it is a step, or a new version of a network's weights: only then has it a direction, and may have been seen before.
        step: whether it is declared as one, see `core.manifest.Entry`.
    """

    sites: tuple[str, ...]
    products: Tensor
    sent: Mapping[str, float]
    update: bool
    whole: bool
    step: bool = False

    @property
    def lengths(self) -> dict[str, float]:
        """site -> Euclidean length of its update."""
        return dict(zip(self.sites, self.products.diagonal().clamp(min=0).sqrt().tolist(), strict=True))

    def of(self, sites: tuple[str, ...]) -> "Evidence":
        """The same for some of the sites.

        Args:
            sites: in sorted order.
        """
        chosen = [self.sites.index(site) for site in sites]
        return replace(self, sites=sites, products=self.products[chosen][:, chosen], sent={site: self.sent[site] for site in sites})


def gathered(
    replies: Mapping[str, Message], outgoing: Mapping[str, Message], entry: str, weights: bool = True, step: bool = False
) -> Evidence:
    """The evidence of one entry; integer tensors do not count.

    Args:
        replies: site -> usable reply, in sorted order; all hold the entry with the same names and shapes.
        outgoing: what each site was sent.
        entry: for example "model".
        weights: whether it holds weights of a network.
        step: whether it is declared as a step.
    """
    sites = tuple(replies)
    states = [replies[site].states[entry] for site in sites]
    origins: list[StateDict] = [outgoing[site].states.get(entry, {}) if site in outgoing else {} for site in sites]
    products = torch.zeros(len(sites), len(sites), dtype=torch.float64)
    sent = [0.0] * len(sites)
    room = torch.empty(len(sites) * CACHED, dtype=torch.float64)
    for name in [name for name, tensor in states[0].items() if tensor.is_floating_point()]:
        begun = [origin.get(name, _NOTHING) for origin in origins]
        different = {id(tensor): tensor.expand_as(states[0][name]) for tensor in begun}  # one, where all were sent the same
        for parts in stretches([*different.values(), *(state[name] for state in states)]):
            starts = {which: part.double() for which, part in zip(different, parts, strict=False)}
            squares = {which: float(start.square().sum()) for which, start in starts.items()}
            sent = [length + squares[id(tensor)] for length, tensor in zip(sent, begun, strict=True)]
            updates = room[: len(sites) * parts[0].numel()].view(len(sites), parts[0].numel())
            offsets(parts[len(different) :], [starts[id(tensor)] for tensor in begun], updates)
            products += updates @ updates.T
    new = step or all(origin and state.keys() <= origin.keys() for state, origin in zip(states, origins, strict=True))
    return Evidence(sites, products, dict(zip(sites, map(math.sqrt, sent), strict=True)), new, step or (new and weights), step)


def similarity(updates: Mapping[str, Evidence]) -> dict[str, dict[str, dict[str, float]]]:
    """entry -> site -> site -> cosine of their updates; 0 with one of length 0.

    Args:
        updates: entry -> its evidence.
    """
    rows = {entry: zip(found.sites, cosines(found.products).tolist(), strict=True) for entry, found in updates.items()}
    return {entry: {site: dict(zip(updates[entry].sites, row, strict=True)) for site, row in of} for entry, of in rows.items()}


def cosines_to_the_others(products: Tensor) -> Tensor:
    """cos(u_k, Σ_{j≠k} u_j / |u_j|): how far each update points where the others point on average, whatever their lengths.

    Args:
        products: (K, K) inner products <u_j, u_k>.

    Returns:
        (K,); NaN for an update of length 0, for one whose others cancel out, and for one alone.

    Examples:
        >>> cosines_to_the_others(torch.tensor([[1.0, 1.0, -2.0], [1.0, 1.0, -2.0], [-2.0, -2.0, 4.0]]))
        tensor([nan, nan, -1.])
    """
    moved = products.diagonal() > 0
    others = cosines(products).fill_diagonal_(0)
    along = others.sum(dim=1)  # <û_k, Σ_{j≠k} û_j>
    squared = (moved.sum() - 1) + others.sum() - 2 * along  # |Σ_{j≠k} û_j|²
    known = moved & (squared > 1e-9)
    return torch.where(known, along / squared.clamp(min=1e-9).sqrt(), math.nan)


def sum_with_and_without(products: Tensor) -> Tensor:
    """<Σ_j u_j, Σ_{j≠k} u_j>: below 0 where update k alone makes the round move against the others.

    Args:
        products: (K, K) inner products <u_j, u_k>.

    Returns:
        (K,).

    Examples:
        >>> sum_with_and_without(torch.tensor([[1.0, 1.0, -3.0], [1.0, 1.0, -3.0], [-3.0, -3.0, 9.0]]))
        tensor([ 2.,  2., -2.])
    """
    rows = products.sum(dim=1)
    return products.sum() - rows  # <Σ_j u_j, Σ_j u_j - u_k>


def digest(state: Mapping[str, Tensor]) -> str:
    """A short hash of a state's names and bytes: of sums and parities of their stretches, which take a tenth of the time of the bytes' own.

    It tells states apart that were not made to be taken for each other. Nobody gains by that: a replayed state that differs in one bit
    passes in any case.

    Args:
        state: name -> tensor.
    """
    found = hashlib.blake2b(digest_size=_DIGEST)
    for name in sorted(state):
        found.update(name.encode())
        numbers = bytes_of(state[name]).numpy()
        rest = numbers.size % (8 * _STRETCH)
        rows = numbers[: numbers.size - rest].view(np.uint64).reshape(-1, _STRETCH)
        for part in (np.add.reduce(rows, axis=1), np.bitwise_xor.reduce(rows, axis=1), numbers[numbers.size - rest :]):
            found.update(part.tobytes())
    return found.hexdigest()
