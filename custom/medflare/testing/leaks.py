"""What a reply tells of weights and of small classes, though its declaration does not say so."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from medflare.core.message import Message
from medflare.methods.base import SiteAlgorithm


def leak(algorithm: SiteAlgorithm, phase: str, reply: Message) -> str:
    """The first entry of a reply with weights in metadata, or with numbers of images by class that
    are not declared so, in words; "" if none has them.
    """
    declared = algorithm.phase(phase)
    weights = _numbers([network.state_dict() for network in algorithm._networks.values()])
    for spec in (*declared.meta, *declared.replied(algorithm.plan).values()):
        numbers = _numbers(reply.get(spec))
        shared = numbers[torch.isin(numbers, weights)]
        if spec in declared.meta and len(shared[shared.frac() != 0].unique()) > 2:
            return (
                f"metadata {spec.name!r} of the reply to {phase!r} holds weights of a network; "
                "declare them as a TensorSpec, or do not send them"
            )
        if not spec.per_class and _follows(numbers, algorithm.site.class_counts()):
            return (
                f"{spec.name!r} of the reply to {phase!r} has numbers by class; declare it with "
                "per_class, so that those of small classes are suppressed"
            )
    return ""


def _numbers(value: Any) -> Tensor:
    """All numbers of JSON values, or of tensors, in which the first axis is the fastest."""
    parts = [torch.empty(0)]
    for leaf in tree_leaves(value):
        if isinstance(leaf, int | float | Tensor):
            part = torch.as_tensor(leaf, dtype=torch.float64)
            parts.append(torch.atleast_1d(part).movedim(0, -1).flatten())
    return torch.cat(parts)


def _follows(numbers: Tensor, counts: Tensor) -> bool:
    """Whether numbers in a row are in proportion to the counts; equal ones may be anything."""
    if len(counts.unique()) == 1 or 0 in counts or len(numbers) < len(counts):
        return False
    rows = numbers.double().unfold(0, len(counts), 1)
    similarity = torch.cosine_similarity(rows, counts.double(), dim=1)
    return bool((similarity > 1 - 1e-12).any())
