"""The training step of a full batch as CUDA graphs, which a GPU repeats without waiting for
Python's launches. Without them the same steps of the same optimizer (`make_capturable`) give the
same weights, bit by bit.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from medflare.core.errors import one_line
from medflare.networks.features import overwrite
from medflare.tasks.optimizers import GradientClipping
from medflare.training.computing import stays
from medflare.training.site import Site

Hook = Callable[[], None]  # called between gradient and step
Moments = dict[Tensor, dict[str, Tensor]]  # weight -> slot of the optimizer -> value
_log = logging.getLogger(__name__)
_WARM_UP = 3  # steps before a capture: torch and its libraries allocate in the first ones
# Full batches in a call of `train_epochs` for which a network's step is captured. That takes about
# as long as ten steps, once for all rounds.
_LEAST = 5


def can_capture(model: nn.Module, optimizer: Optimizer, site: Site, full_batches: int) -> bool:
    """Whether the step of the task's loss may be captured: on a GPU, if the site's settings allow
    it, for enough batches; with Adam or AdamW of all trainable weights; without fp16, accumulation,
    compilation and hooks of layers and optimizer, which Python runs. The task's clipping is a hook
    that a graph repeats.
    """
    computing = site.computing
    allowed = computing.graph and computing.device.type == "cuda" and not computing.compiled
    one_step = site.task.accumulate == 1 and site.task.precision != "fp16"
    is_adam = type(optimizer) in (Adam, AdamW)
    enough = full_batches >= _LEAST
    if not (allowed and one_step and is_adam and enough and len(optimizer.param_groups) == 1):
        return False
    group = optimizer.param_groups[0]
    trained = {id(weight) for weight in group["params"] if weight.requires_grad}
    trains_all = trained == {id(weight) for weight in model.parameters() if weight.requires_grad}
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]
    for layer in model.modules():
        hooks += [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
    return trains_all and all(isinstance(hook, GradientClipping) for hook in hooks)


def make_capturable(optimizer: Optimizer) -> None:
    """Let Adam step in a graph: numbers of steps and learning rate are on the GPU. Its weights
    differ in the last bits from those of the usual Adam, and steps without a graph take longer.
    """
    (group,) = optimizer.param_groups
    device = group["params"][0].device
    if device.type != "cuda":
        return
    group["capturable"] = True
    group["lr"] = torch.full((), group["lr"], device=device)
    for slots in optimizer.state.values():
        slots["step"] = slots["step"].to(device)
    # torch: it is slower without a graph.
    optimizer._warned_capturable_if_run_uncaptured = True


class CapturedStep:
    """A network's step as two CUDA graphs, gradients and update; a gradient hook runs between them.

    They read and write fixed memory: the network's weights and buffers, and a batch, gradients,
    moments and a learning rate of their own.

    Args:
        images: (N, C, ...), with `targets` any full batch; nothing is trained on it.

    Raises:
        Exception: the step cannot be captured; weights, buffers and moments are as before.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, site: Site, images: Tensor, targets: Tensor
    ):
        self._images = images.clone()
        self._targets = targets.clone()
        group = optimizer.param_groups[0]

        def gradients() -> Tensor:
            optimizer.zero_grad()
            loss = site.loss(model(self._images), self._targets)
            loss.backward()
            return loss.detach()

        with _unchanged(model, optimizer), _side_stream(images.device) as stream:
            with _checked(images.device):
                for _ in range(_WARM_UP):
                    gradients()
                    optimizer.step()
            optimizer.zero_grad()
            self._replay_gradients, self._loss = _recorded(gradients, stream)
            self._gradients: list[tuple[nn.Parameter, Tensor]] = []
            for weight in group["params"]:
                if weight.grad is not None:
                    self._gradients.append((weight, weight.grad))
                elif weight.requires_grad:
                    raise RuntimeError("a weight has no gradient, which a hook may change")
            self._replay_update, _ = _recorded(optimizer.step, stream)
        self._rate = group["lr"]
        group["lr"] = self._rate.clone()
        self._moments: Moments = dict(optimizer.state)

    def begin(self, optimizer: Optimizer) -> None:
        """Continue with an optimizer's moments and learning rate; it shares these moments."""
        self._rate.copy_(optimizer.param_groups[0]["lr"])
        _load(self._moments, optimizer.state)
        optimizer.state.update(self._moments)

    def train(self, images: Tensor, targets: Tensor, gradient_hook: Hook | None) -> Tensor:
        """One step on a full batch; returns its loss (scalar, detached)."""
        self._images.copy_(images)
        self._targets.copy_(targets)
        self._replay_gradients()
        if gradient_hook is not None:
            for weight, gradient in self._gradients:
                weight.grad = gradient
            gradient_hook()
            for weight, gradient in self._gradients:
                assert weight.grad is not None  # a hook changes gradients, it removes none
                gradient.copy_(weight.grad)
                weight.grad = None
        self._replay_update()
        return self._loss.clone()


# The captured step of a network and what it depends on; None: it cannot be captured.
_CAPTURED: WeakKeyDictionary[nn.Module, tuple[list[Any], CapturedStep | None]] = WeakKeyDictionary()


@dataclass(eq=False)
class StepReplay:
    """The steps of one training call (see `train_epochs`) by CUDA graphs, where they can be.

    Attributes:
        full_batches: of the call.
    """

    model: nn.Module
    optimizer: Optimizer
    site: Site
    gradient_hook: Hook | None
    full_batches: int

    def __post_init__(self) -> None:
        may = can_capture(self.model, self.optimizer, self.site, self.full_batches)
        if may:
            make_capturable(self.optimizer)
        self._images = self.site.batch_size if may else 0  # in a batch that is replayed; 0: none is
        self._step: CapturedStep | None = None

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor | None:
        """Train on a batch; returns its loss (scalar, detached). None: nothing was done, train on
        it without a graph.
        """
        if len(images) != self._images:
            return None
        if self._step is None:
            self._step = self.captured(images, targets)
            if self._step is None:
                self._images = 0
                return None
            self._step.begin(self.optimizer)
        return self._step.train(images, targets, self.gradient_hook)

    def finish(self) -> None:
        """Give the optimizer copies of its moments; called after the last batch."""
        if self._step is not None:
            self.optimizer.state.update(copied_moments(self.optimizer))

    def captured(self, images: Tensor, targets: Tensor) -> CapturedStep | None:
        """The network's captured step, from an earlier call if nothing has changed that it depends
        on; None if it cannot be captured, or takes too much memory to stay (`stays`).
        """
        # Beside site and precision: settings of the optimizer, shapes of a batch, where weights and
        # buffers are and which ones train, modes of layers.
        situation = [type(self.optimizer), images.shape, targets.shape, targets.dtype]
        for name, value in self.optimizer.param_groups[0].items():
            if name not in ("params", "lr"):
                situation.append((name, value))
        for tensor in chain(self.model.parameters(), self.model.buffers()):
            situation.append((tensor.data_ptr(), tensor.requires_grad))
        situation += [layer.training for layer in self.model.modules()]
        if _CAPTURED.get(self.model, ([],))[0] != situation:
            _CAPTURED[self.model] = situation, self._new_step(images, targets)
        return _CAPTURED[self.model][1]

    def _new_step(self, images: Tensor, targets: Tensor) -> CapturedStep | None:
        before = _reserved(images.device)
        try:
            step = CapturedStep(self.model, self.optimizer, self.site, images, targets)
        except Exception as error:  # whatever a network or a loss raises
            line = "site %s: trains without a CUDA graph: %s"
            _log.info(line, self.site.name, one_line(error))
            return None
        return step if stays(_reserved(images.device) - before, images.device) else None


def copied_moments(optimizer: Optimizer) -> Moments:
    """Copies of an optimizer's moments."""
    copies: Moments = {}
    for weight, slots in optimizer.state.items():
        copies[weight] = {}
        for slot, value in slots.items():
            # What `deepcopy` does too, in three times the time.
            copies[weight][slot] = value.clone() if isinstance(value, Tensor) else deepcopy(value)
    return copies


def _load(moments: Moments, source: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Copy moments in place; 0, their start, where `source` has none."""
    for weight, slots in moments.items():
        before = source.get(weight, {})
        for slot, value in slots.items():
            if slot in before:
                value.copy_(before[slot])
            else:
                value.zero_()


@contextmanager
def _unchanged(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """A context that restores weights, buffers and moments in their memory, and clears
    gradients.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    moments = copied_moments(optimizer)
    try:
        yield
    finally:
        overwrite(tensors, before)
        _load(optimizer.state, moments)
        optimizer.zero_grad()


@contextmanager
def _checked(device: torch.device) -> Iterator[None]:
    """A context that raises RuntimeError where the CPU waits for the GPU, or random numbers are
    drawn: a graph would fail, or repeat them. At its end torch's random states are as before.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        before = _random_states(devices)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for state, drawn in zip(before, _random_states(devices), strict=True):
            if not torch.equal(state, drawn):
                raise RuntimeError("the step draws random numbers")


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


# -- CUDA only -------------------------------------------------------------------------------------


@contextmanager
def _side_stream(device: torch.device) -> Iterator[Any]:
    """A stream for warm-up and capture, current inside; the stream before waits for its work."""
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield stream
    finally:
        before.wait_stream(stream)


def _recorded(work: Callable[[], Any], stream: Any) -> tuple[Callable[[], None], Any]:
    """What replays the work, and the work's result, which each replay overwrites.

    The error mode does not stop the thread that reads ahead.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


def _reserved(device: torch.device) -> int:
    """Bytes that torch holds on a GPU, without what it could free at once."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
