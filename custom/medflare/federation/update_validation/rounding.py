"""Transport of weights as bfloat16, in half the bytes.

With b(x) for x rounded to bfloat16, w for the server's weights and y for what a site trains from what it was sent:

    down:  b(w)                the site starts from it
    up:    d = b(y - b(w))     its update, rounded
    then:  w + d               is what the server uses for y

The server keeps w in fp32, so that at most 1/512 of an update is lost. If y were rounded instead, updates below 1/512 of their weights
would vanish in every round: the reason for fp32 master weights (Micikevicius et al., "Mixed Precision Training", ICLR 2018, Sec. 3.1).

Rounded are fp32 weights of the task's network with two axes or more. Biases, normalization, counters, tensors that are no weights
(prototypes, moments, control variates) and the final models are sent as they are.
"""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from medflare.core.manifest import Manifest, MetaSpec, Phase, StateSpec, TensorSpec, text
from medflare.core.message import Message
from medflare.core.states import StateDict, allocate
from medflare.methods.base import Plan

BF16: Final = "bf16"
TRANSPORT_DTYPE: Final = MetaSpec("transport_dtype", "dtype of the weights in this step if it is not fp32", text(BF16), optional=True)


class Rounding:
    """Which tensors are sent as bfloat16 with a plan, and the conversions."""

    def __init__(self, plan: Plan[Any, Any]):
        self.plan = plan
        self._network = StateSpec.like(plan.template(), "").tensors

    def sent(self, entry: TensorSpec, spec: StateSpec) -> StateSpec:
        """The spec of a state of the server's messages, as it is sent."""
        if entry.exact or not spec.tensors.items() <= self._network.items():
            return spec
        return replace(spec, tensors={name: (shape, _sent_dtype(shape, dtype)) for name, (shape, dtype) in spec.tensors.items()})

    def manifest(self, phase: Phase) -> Manifest:
        """What a reply to a phase holds, as it is sent: tensors that were sent rounded come back as rounded updates."""
        return {str(entry): self._reply_spec(phase, entry) for entry in phase.answered(self.plan)}

    def _reply_spec(self, phase: Phase, entry: TensorSpec) -> StateSpec:
        spec = entry.spec(self.plan)
        for request in phase.request:
            if request == entry and request.when(self.plan) and not request.optional:
                sent = self.sent(request, request.spec(self.plan)).tensors
                return replace(spec, tensors={name: sent.get(name, form) for name, form in spec.tensors.items()})
        return spec

    def down(self, phase: Phase, message: Message, rounded: dict[int, Tensor]) -> Message:
        """The server's message as it is sent.

        Args:
            rounded: id -> tensor that was rounded for another site; sites that are sent the same weights share it.
        """
        states: dict[str, StateDict] = {}
        for name, state in message.states.items():
            declared = next((entry for entry in phase.request if entry.covers(name) and entry.when(self.plan)), None)
            spec = StateSpec.like(state, "")
            sent = spec if declared is None else self.sent(declared, spec)
            states[name] = {key: _rounded(tensor, sent.tensors[key][1], rounded) for key, tensor in state.items()}
        return Message(states, {**message.meta, TRANSPORT_DTYPE: BF16})

    def widened(self, message: Message) -> Message:
        """A received message with its rounded tensors in fp32."""
        states = {entry: {name: self._wide(name, t) for name, t in state.items()} for entry, state in message.states.items()}
        return Message(states, message.meta)

    def up(self, phase: Phase, reply: Message, incoming: Message) -> Message:
        """A site's reply as it is sent."""
        states = {}
        for entry, spec in self.manifest(phase).items():
            origin = incoming.states.get(entry, {})
            states[entry] = {
                name: (tensor - origin[name]).to(torch.bfloat16) if self._rounds(name, spec.tensors[name][1]) else tensor
                for name, tensor in reply.states[entry].items()
            }
        return Message(states, reply.meta)

    def restored(self, reply: Message, sent: Message) -> Message:
        """The reply in fp32: the server's weights plus the site's rounded updates."""
        states = {}
        for entry, state in reply.states.items():
            wide = {name: self._wide(name, tensor) for name, tensor in state.items()}
            states[entry] = {name: t.add_(sent.states[entry][name]) if t is not state[name] else t for name, t in wide.items()}
        return Message(states, reply.meta)

    def _rounds(self, name: str, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and self._network[name][1] != dtype

    def _wide(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._network or not self._rounds(name, tensor.dtype):
            return tensor
        return allocate(tensor.shape, torch.float32).copy_(tensor)


def _sent_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 and len(shape) > 1 else dtype


def _rounded(tensor: Tensor, dtype: torch.dtype, rounded: dict[int, Tensor]) -> Tensor:
    """The tensor in this dtype, converted once."""
    if tensor.dtype == dtype:
        return tensor
    if id(tensor) not in rounded:
        rounded[id(tensor)] = allocate(tensor.shape, dtype).copy_(tensor)
    return rounded[id(tensor)]
