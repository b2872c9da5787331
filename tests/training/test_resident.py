"""What stays on a site's device between rounds: images and an optimizer's moments. A CPU takes the same path and copies nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import medflare
from helpers.final_models import same_weights
from helpers.small_tasks import small_task, tiny_phantom
from helpers.volume_sites import PATCHES, make_volumes
from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.data.loading import Split
from medflare.federation.outcome import StepReport
from medflare.methods.fedavg import FedAvgSite
from medflare.tasks.config import load_task
from medflare.training import computing
from medflare.training.batches import read_ahead
from medflare.training.computing import stays
from medflare.training.epochs import OptimizerMemory
from medflare.training.opening import open_site
from medflare.training.site import Site
from methods import squares

FREE = (0, math.inf)  # bytes of a device: nothing stays there, and all does
AUGMENT = [{"name": "RandFlip", "prob": 0.5}, {"name": "RandGaussianNoise", "prob": 0.5}]


class Killed(BaseException):
    """Ends a run as no error does."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the free memory of every device."""

    def set_free(free: float) -> None:
        monkeypatch.setattr(computing, "free_memory", lambda device: free)

    return set_free


def test_a_quarter_of_a_gpus_free_memory_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, 1000))
    gpu = torch.device("cuda")
    assert stays(100, gpu) and not stays(101, gpu)
    assert not stays(1, torch.device("cpu")), "what is there already does not move"


def test_bytes_and_device_of_a_split() -> None:
    images = torch.zeros(3, 1, 2, 2)
    targets = torch.zeros(3, 2, 2, dtype=torch.long)
    for split in (Split(images, targets, (), ()), Split(tuple(images), list(targets), (), ())):
        assert split.nbytes == 3 * 4 * (4 + 8)
        moved = split.on(torch.device("meta"))
        for tensor in [*moved.images, *moved.targets]:
            assert tensor.is_meta


@pytest.mark.parametrize("free", FREE)
def test_images_of_every_round_are_moved_once(
    free: float, memory: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Split] = []
    on = Split.on

    def noted(data: Split, device: torch.device) -> Split:
        moved.append(data)
        return on(data, device)

    monkeypatch.setattr(Split, "on", noted)
    memory(free)
    site = squares.site()
    for round in range(2):
        assert len(list(site.batches("train", round))) == 2
        for split in ("train", "validation", "test"):
            assert list(site.ordered(split))
    assert moved == ([site.data.train, site.data.validation] if free else [])


def copied(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors.clone()
    return [tensor.clone() for tensor in tensors]


def trained(site: Site, *, erase: bool) -> Message:
    """The reply to a second round, and the memory; `erase` overwrites the images and targets that the first did not leave on the device."""
    algorithm = FedAvgSite(site, squares.plan_of(FedAvgSite, squares.FedAvgServer, site.task))
    request = Message({"model": copy_state(site.network().state_dict())})
    first = algorithm.perform("train", 0, request)
    if erase:
        for data in (site.data.train, site.data.validation):
            for image, target in zip(data.images, data.targets, strict=True):
                image.fill_(math.nan)
                target.zero_()
    reply = algorithm.perform("train", 1, first)
    return Message({**reply.states, **algorithm.memory.states}, reply.meta)


@pytest.mark.parametrize("kind", ["segmentation", "classification", "patch"])
def test_equal_weights_from_images_that_stay(
    kind: str, memory: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bit by bit, moments and metrics too. The copies that stay are used: the others are erased."""

    def site() -> Site:
        if kind == "patch":
            task = load_task({**PATCHES, "augment": AUGMENT})
            return open_site("A", task, data_root=tmp_path, local={"cache": False})
        return squares.site(task=small_task(kind, batch_size=6, augment=AUGMENT))

    make_volumes(tmp_path / "A")
    memory(0)
    expected = trained(site(), erase=False)
    memory(math.inf)
    monkeypatch.setattr(
        Split,
        "on",
        lambda data, _: replace(data, images=copied(data.images), targets=copied(data.targets)),
    )
    actual = trained(site(), erase=True)
    assert actual.meta == expected.meta
    assert set(actual.states) == set(expected.states) >= {"model", "optimizer/model"}
    for entry, state in expected.states.items():
        for name, tensor in state.items():
            assert torch.equal(actual.states[entry][name], tensor), name


@pytest.mark.parametrize("free", FREE)
def test_later_steps_do_not_change_stored_moments(
    free: float, memory: Callable[[float], None]
) -> None:
    """Neither those of the optimizer nor those of the one that recalls them."""
    memory(free)
    stored = Message()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])

    def step(optimizer: torch.optim.Optimizer) -> None:
        weight.grad = torch.ones(3)
        optimizer.step()

    step(optimizer)
    OptimizerMemory(stored).keep("model", optimizer)
    before = copy_state(stored.states["optimizer/model"])
    assert before["0.step"] == 1
    step(optimizer)
    recalled = OptimizerMemory(stored).recall("model", torch.optim.Adam([weight]))
    step(recalled)
    assert recalled.state[weight]["step"] == 2
    for name, tensor in stored.states["optimizer/model"].items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("free", FREE)
def test_a_killed_run_continues_with_the_same_moments(
    free: float, memory: Callable[[float], None], tmp_path: Path
) -> None:
    """Killed where all stays and resumed where nothing does, and the other way round."""
    task = tiny_phantom(batch_size=32)

    def leg(folder: Path, last: int | None, **options: Any) -> None:
        def observe(report: StepReport) -> None:
            if report.step.round == last:
                raise Killed

        options |= {"rounds": 3, "seed": 1, "out": folder, "observe": observe}
        assert medflare.run_local("ditto", task, 2, **options)["status"] == "COMPLETED"

    leg(tmp_path / "whole", None)
    memory(free)
    with pytest.raises(Killed):
        leg(tmp_path / "killed", 1)
    memory(FREE[free == 0])
    leg(tmp_path / "killed", None, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "killed")


def test_images_that_are_on_the_gpu_are_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Split(torch.arange(6.0).view(6, 1), torch.arange(6), ("p",) * 6, tuple("abcdef"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(Split, "on_gpu", True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda _: pytest.fail("copied to pinned memory"))
    read: list[int] = []

    def take(rows: Tensor) -> tuple[Tensor, Tensor]:
        read.append(len(rows))
        return data.take(rows)

    batches = read_ahead(data, torch.arange(6).split(2), take)
    rows, (images, targets) = next(batches)
    assert read == [2], "only the batch that is used"
    assert torch.equal(images[:, 0], rows.float()) and torch.equal(targets, rows)
