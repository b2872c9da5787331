"""Weights in half the bytes: what of a message travels as bfloat16, and how server and site reckon with it.

With b(x) for x rounded to bfloat16, w for the server's weights and y for what a site trains from what it was sent:

    down:  b(w)                the site starts from it
    up:    d = b(y - b(w))     its update, rounded
    then:  w + d               is what the server takes for y

The server keeps w in fp32 and adds to it, so that nothing is rounded twice: of an update at most 1/512 is lost, however small it is beside
the weight. Were y rounded instead, updates below 1/512 of their weights would vanish, in every round again; the reason for master weights
in fp32 (Micikevicius et al., "Mixed Precision Training", ICLR 2018, Sec. 3.1).

Rounded are the task's network's kernels and matrices, of fp32 and two axes or more. Biases, normalisation with its running statistics and
counters are few and travel as they are; so does what is no weight (prototypes, moments, control variates), what a site sends that is no
new version of what it was sent, and the final models.
"""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from medflare.core.backing import empty
from medflare.core.manifest import Manifest, MetaSpec, Phase, StateSpec, TensorSpec, text
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.methods.base import Plan

BF16: Final = "bf16"
WIRE: Final = MetaSpec("transport_dtype", "the form in which weights travel in this step, where it is not fp32", text(BF16), optional=True)


class Rounding:
    """What travels as bfloat16 under a plan.

    Args:
        plan: of either algorithm.
    """

    def __init__(self, plan: Plan[Any, Any]):
        self.plan = plan
        self._network = StateSpec.like(plan.template(), "").tensors

    def sent(self, entry: TensorSpec, spec: StateSpec) -> StateSpec:
        """The spec of an entry of the server's messages, as it travels."""
        if entry.exact or not spec.tensors.items() <= self._network.items():
            return spec
        return replace(spec, tensors={name: (shape, _form(shape, dtype)) for name, (shape, dtype) in spec.tensors.items()})

    def manifest(self, phase: Phase) -> Manifest:
        """What a reply to a phase holds, as it travels: the tensors that were sent rounded come back as rounded updates."""
        return {str(entry): self._answered(phase, entry) for entry in phase.answered(self.plan)}

    def _answered(self, phase: Phase, entry: TensorSpec) -> StateSpec:
        spec = entry.spec(self.plan)
        for asked in phase.request:
            if asked == entry and asked.when(self.plan) and not asked.optional:
                came = self.sent(asked, asked.spec(self.plan)).tensors
                return replace(spec, tensors={name: came.get(name, found) for name, found in spec.tensors.items()})
        return spec

    def down(self, phase: Phase, message: Message, rounded: dict[int, Tensor]) -> Message:
        """The server's message as it travels, which says so.

        Args:
            phase: that it is sent for.
            rounded: what has been rounded for other sites; sites that are sent the same weights share the tensors.
        """
        states: dict[str, StateDict] = {}
        for name, state in message.states.items():
            declared = next((entry for entry in phase.request if entry.covers(name) and entry.when(self.plan)), None)
            spec = StateSpec.like(state, "")
            form = spec if declared is None else self.sent(declared, spec)
            states[name] = {key: _once(tensor, form.tensors[key][1], rounded) for key, tensor in state.items()}
        return Message(states, {**message.meta, WIRE: BF16})

    def widened(self, message: Message) -> Message:
        """What came in rounded, in fp32 again."""
        states = {entry: {name: self._wide(name, t) for name, t in state.items()} for entry, state in message.states.items()}
        return Message(states, message.meta)

    def up(self, phase: Phase, reply: Message, came_in: Message) -> Message:
        """A site's reply as it travels."""
        states = {}
        for entry, spec in self.manifest(phase).items():
            origin = came_in.states.get(entry, {})
            states[entry] = {
                name: (tensor - origin[name]).to(torch.bfloat16) if self._rounds(name, spec.tensors[name][1]) else tensor
                for name, tensor in reply.states[entry].items()
            }
        return Message(states, reply.meta)

    def restored(self, reply: Message, sent: Message) -> Message:
        """What the server takes for a reply: its own weights with the site's rounded updates."""
        states = {}
        for entry, state in reply.states.items():
            wide = {name: self._wide(name, tensor) for name, tensor in state.items()}
            states[entry] = {name: t.add_(sent.states[entry][name]) if t is not state[name] else t for name, t in wide.items()}
        return Message(states, reply.meta)

    def _rounds(self, name: str, form: torch.dtype) -> bool:
        return form == torch.bfloat16 and self._network[name][1] != form

    def _wide(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._network or not self._rounds(name, tensor.dtype):
            return tensor
        return empty(tensor.shape, torch.float32).copy_(tensor)


def _form(shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 and len(shape) > 1 else dtype


def _once(tensor: Tensor, form: torch.dtype, rounded: dict[int, Tensor]) -> Tensor:
    """The tensor in this form, which is made once; nobody may change or free it meanwhile."""
    if tensor.dtype == form:
        return tensor
    if id(tensor) not in rounded:
        rounded[id(tensor)] = empty(tensor.shape, form).copy_(tensor)
    return rounded[id(tensor)]
