"""What a message may hold: declared by the method, checked where it leaves a site and where it reaches the server."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from medflare.core.message import Message


@dataclass(frozen=True)
class EntrySpec:
    """One entry of a message.

    Attributes:
        tensors: tensor name -> (shape, dtype).
        purpose: why the entry leaves the site, in words for the hospital's own report.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    purpose: str

    @classmethod
    def like(cls, state: Mapping[str, Tensor], purpose: str) -> "EntrySpec":
        """The spec that `state` (any device, meta included) satisfies."""
        return cls({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}, purpose)


Manifest = dict[str, EntrySpec]


def violation(message: Message, manifest: Manifest) -> str | None:
    """What in `message` the manifest does not allow, in words, or None: entries, tensor names, shapes and dtypes must match exactly."""
    if message.states.keys() != manifest.keys():
        return _difference("entry", manifest.keys() - message.states.keys(), message.states.keys() - manifest.keys())
    for entry, spec in manifest.items():
        state = message.states[entry]
        if state.keys() != spec.tensors.keys():
            return f"{entry}: " + _difference("tensor", spec.tensors.keys() - state.keys(), state.keys() - spec.tensors.keys())
        for name, (shape, dtype) in spec.tensors.items():
            found = state[name]
            if tuple(found.shape) != shape:
                return f"{entry}/{name} has shape {tuple(found.shape)}, expected {shape}"
            if found.dtype != dtype:
                return f"{entry}/{name} has dtype {found.dtype}, expected {dtype}"
    return None


def _difference(what: str, missing: set[str], extra: set[str]) -> str:
    parts = [f"{word} {what} {sorted(names)[0]!r}" for word, names in (("missing", missing), ("unexpected", extra)) if names]
    return " and ".join(parts)


def non_finite(message: Message) -> str | None:
    """The first tensor that holds NaN or infinity, in words, or None."""
    for entry, state in sorted(message.states.items()):
        for name, tensor in state.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return f"{entry}/{name} holds NaN or infinity"
    return None
