"""Which training steps a GPU repeats as CUDA graphs, and that nothing is lost around them.

On a CPU a stand-in repeats the recorded work itself; tests/test_gpu.py has the graphs of CUDA."""

import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.data.local import local_settings
from medflare.methods.catalogue import get_method
from medflare.methods.parts.proximal import proximal_term
from medflare.training import graph
from medflare.training import site as site_module
from medflare.training.computing import Computing
from medflare.training.epochs import train_epochs
from medflare.training.site import Site
from methods import squares

NORM_AND_COSINE: dict[str, Any] = {
    "batch_size": 4,
    "local_epochs": 2,
    "clip": {"norm": 0.5},
    "schedule": {"name": "cosine"},
}
COUNTS = (14, 4, 2)  # the last batch of an epoch has two images


# -- which ---------------------------------------------------------------------------------------------


def decided(
    full_batches: int = 100,
    computing: dict[str, Any] | None = None,
    hook: Callable[..., None] | None = None,
    prepare: Callable[[nn.Module], Any] = lambda network: None,
    **changes: Any,
) -> bool:
    """`can_capture` for a site that says it has a GPU."""
    site = squares.site("A", squares.task(**changes), (2, 1, 1))
    network = site.network()
    prepare(network)
    optimizer = site.optimizer(network.parameters())
    if hook is not None:
        optimizer.register_step_post_hook(hook)
    device = {"device": torch.device("cuda"), **(computing or {})}
    site.computing = Computing(**device)
    return graph.can_capture(network, optimizer, site, full_batches)


def frozen_body(network: nn.Module) -> None:
    network.get_submodule("body").requires_grad_(False)


def hooked(network: nn.Module) -> None:
    network.get_submodule("head").register_forward_pre_hook(lambda *_: None)


def counted(*_: object) -> None:
    """A hook of the optimizer, as FedNova counts steps."""


@pytest.mark.parametrize(
    ("expected", "case"),
    [
        (True, {}),
        (True, {"optimizer": {"name": "adamw", "lr": 0.01}}),
        (True, {"precision": "bf16"}),
        (True, {"clip": {"norm": 1.0, "value": 0.5}}),
        (True, {"prepare": frozen_body}),
        (True, {"full_batches": 5}),
        (False, {"full_batches": 4}),
        (False, {"computing": {"device": torch.device("cpu")}}),
        (False, {"computing": {"graph": False}}),
        (False, {"computing": {"compiled": True}}),
        (False, {"optimizer": {"name": "sgd", "lr": 0.01}}),
        (False, {"optimizer": {"name": "NAdam", "lr": 0.01}}),
        (False, {"precision": "fp16"}),
        (False, {"accumulate": 2}),
        (False, {"prepare": hooked}),
        (False, {"hook": counted}),
        (False, {"clip": {"norm": 1.0}, "hook": counted}),
    ],
)
def test_which_steps_are_captured(expected: bool, case: dict[str, Any]) -> None:
    assert decided(**case) == expected


def test_an_optimizer_of_other_weights_is_not_captured() -> None:
    site = squares.site("A", squares.task(), (2, 1, 1))
    network = site.network()
    other = site.network("other")
    site.computing = Computing(torch.device("cuda"))
    for weights in (network.head.parameters(), [*network.parameters(), *other.parameters()]):
        made = torch.optim.Adam(weights, lr=0.01)
        assert not graph.can_capture(network, made, site, 100)


def test_a_site_can_switch_it_off() -> None:
    assert local_settings({}).cuda_graph
    assert not local_settings({"cuda_graph": False}).cuda_graph
    with pytest.raises(ConfigError, match="cuda_graph"):
        local_settings({"cuda_graph": "no"})


# -- nothing is lost -----------------------------------------------------------------------------------


class Recorder:
    """Repeats recorded work on a CPU, as a replayed graph does: on the batch, gradients, moments and
    learning rate that it had when it was recorded."""

    def __init__(self) -> None:
        self.replays = 0
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []

    def recorded(self, work: Callable[[], Any], stream: Any) -> tuple[Callable[[], None], Any]:
        if inspect.ismethod(work):
            return self._update(work.__self__), work()
        optimizer = inspect.getclosurevars(work).nonlocals["optimizer"]
        result = work()
        pairs = [(weight, weight.grad) for weight in optimizer.param_groups[0]["params"]]

        def replay() -> None:
            result.copy_(work())
            for weight, gradient in pairs:
                gradient.copy_(weight.grad)
                weight.grad = None
            self.gradients = pairs
            self.replays += 1

        return replay, result

    def _update(self, optimizer: Any) -> Callable[[], None]:
        group = optimizer.param_groups[0]
        moments = dict(optimizer.state)
        rate = group["lr"]

        def replay() -> None:
            before = group["lr"], dict(optimizer.state)
            group["lr"] = rate
            optimizer.state.update(moments)
            for weight, gradient in self.gradients:
                weight.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
            group["lr"] = before[0]
            optimizer.state.update(before[1])

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Every step is captured, by a `Recorder`; learning rates are tensors, as on a GPU."""
    recorder = Recorder()
    build = site_module.build_optimizer

    def with_rate(*arguments: Any) -> torch.optim.Optimizer:
        optimizer = build(*arguments)
        optimizer.param_groups[0]["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
        return optimizer

    monkeypatch.setattr(site_module, "build_optimizer", with_rate)
    monkeypatch.setattr(graph, "can_capture", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(graph, "_side_stream", lambda device: nullcontext())
    monkeypatch.setattr(graph, "_recorded", recorder.recorded)
    return recorder


def in_rounds(method: str, **changes: Any) -> tuple[list[Message], Any]:
    """Replies of three rounds of training, each from the same model, and the algorithm."""
    site = squares.site("A", squares.task(**{**NORM_AND_COSINE, **changes}), COUNTS)
    plan = get_method(method).plan(site.task, ("A",), {})
    algorithm = get_method(method).make_site(site, plan)
    start = copy_state(site.network().state_dict())
    replies: list[Message] = []
    for round in range(3):
        site.rate_factor = 1.0 / (round + 1)
        replies.append(algorithm.perform("train", round, Message({"model": dict(start)})))
    return replies, algorithm


def states(message: Message) -> StateDict:
    found: StateDict = {}
    for entry, state in message.states.items():
        for name, tensor in state.items():
            found[f"{entry}: {name}"] = tensor
    return found


@pytest.mark.parametrize(
    ("method", "networks"), [("fedavg", 1), ("fedprox", 1), ("fedbn", 1), ("ditto", 2)]
)
def test_replayed_rounds_end_in_equal_weights_and_moments(
    method: str, networks: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batch normalization, a last batch outside the graph, a changing rate and clipping; a network is captured once."""
    captured: list[Any] = []

    class Counted(graph.CapturedStep):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            captured.append(self)

    monkeypatch.setattr(graph, "CapturedStep", Counted)
    replayed, with_graph = in_rounds(method)
    assert len(captured) == networks
    assert recorder.replays == networks * 3 * 2 * 3  # rounds, epochs, full batches
    monkeypatch.setattr(graph, "can_capture", lambda *_: False)
    plain, without = in_rounds(method)
    assert recorder.replays == networks * 18
    for one, other in [*zip(replayed, plain, strict=True), (with_graph.memory, without.memory)]:
        first = states(one)
        second = states(other)
        assert first.keys() == second.keys() and one.meta == other.meta
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), name


def test_two_optimizers_take_turns_on_a_network(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its moments and its learning rate."""

    def trained() -> StateDict:
        site = squares.site("A", squares.task(**NORM_AND_COSINE), COUNTS)
        network = site.network()
        fast = site.optimizer(network.parameters(), lr=0.02)
        slow = site.optimizer(network.parameters(), lr=0.005)
        for round, optimizer in enumerate([fast, slow, fast, slow]):
            train_epochs(network, optimizer, site, round, "model")
        return copy_state(network.state_dict())

    first = trained()
    assert recorder.replays
    monkeypatch.setattr(graph, "can_capture", lambda *_: False)
    second = trained()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])


def test_a_step_is_captured_anew_if_what_it_depends_on_changes(recorder: Recorder) -> None:
    site = squares.site("A", squares.task(batch_size=4), COUNTS)
    network = site.network()
    images, targets, _ = next(site.batches("train", 0))

    def captured(**settings: Any) -> Any:
        optimizer = site.optimizer([w for w in network.parameters() if w.requires_grad], **settings)
        return graph.StepReplay(network, optimizer, site, None, 100).captured(images, targets)

    first = captured()
    assert captured() is first and captured(lr=0.5) is first
    network.train()
    decayed = captured(weight_decay=0.1)
    assert decayed is not first and captured() is not decayed
    before = captured()
    network.eval()
    assert captured() is not before
    before = captured()
    network.head.requires_grad_(False)
    assert captured() is not before


# -- without a graph -----------------------------------------------------------------------------------


def weights_after(site: Site, hook: bool = False) -> StateDict:
    network = site.network()
    optimizer = site.optimizer(network.parameters())
    gradient_hook = proximal_term(network, network.state_dict(), 0.1) if hook else None
    for round in range(2):
        train_epochs(network, optimizer, site, round, "model", gradient_hook=gradient_hook)
    return copy_state(network.state_dict())


DROPOUT = {"name": "UNet", "channels": [4, 8], "strides": [2], "dropout": 0.5}


@pytest.mark.parametrize(
    ("network", "reason"), [(None, "no such device"), (DROPOUT, "draws random numbers")]
)
def test_what_cannot_be_captured_trains_without_a_graph(
    network: dict[str, Any] | None,
    reason: str,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Equal weights, and one line in the log."""

    def fails(*_: Any) -> None:
        raise RuntimeError("no such device\nand a second line")

    caplog.set_level(logging.INFO, graph.__name__)
    monkeypatch.setattr(graph, "_recorded", fails)
    changes: dict[str, Any] = {"network": network} if network else {}
    task = squares.task(batch_size=4, **changes)
    tried = weights_after(squares.site("A", task, COUNTS), hook=True)
    (line,) = caplog.messages
    assert line.startswith("site A: trains without a CUDA graph: ") and reason in line
    assert "\n" not in line
    monkeypatch.setattr(graph, "can_capture", lambda *_: False)
    plain = weights_after(squares.site("A", task, COUNTS), hook=True)
    for name, tensor in tried.items():
        assert torch.equal(tensor, plain[name])


def test_a_step_whose_memory_cannot_stay_is_not_kept(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "stays", lambda nbytes, device: False)
    site = squares.site("A", squares.task(batch_size=4), COUNTS)
    tried = weights_after(site)
    assert recorder.replays == 0
    monkeypatch.setattr(graph, "can_capture", lambda *_: False)
    plain = weights_after(site)
    for name, tensor in tried.items():
        assert torch.equal(tensor, plain[name])


def test_another_loss_is_never_captured(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may change it from step to step."""
    site = squares.site("A", squares.task(batch_size=4), COUNTS)
    network = site.network()
    steps: list[int] = []

    def loss(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        steps.append(len(images))
        return site.loss(model(images), targets) / len(steps)

    train_epochs(network, site.optimizer(network.parameters()), site, 0, "model", loss=loss)
    assert recorder.replays == 0 and steps == [4, 4, 4, 2]
