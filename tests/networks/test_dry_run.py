"""The task's network tried before anything starts: computed where it is small, without memory where it is not, with the same answer."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from medflare.core.errors import ConfigError
from medflare.networks import dry_run
from medflare.networks.catalogue import initial_network
from medflare.networks.dry_run import check_memory, check_network, least_bytes
from medflare.networks.features import FeatureNetwork
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.losses import build_loss
from medflare.tasks.optimizers import build_optimizer
from small import small_task

PHANTOM: dict[str, Any] = load_task("phantom").to_dict()


@pytest.fixture(params=[0, 10**10], ids=["without memory", "computed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Multiplications up to which a pass is computed."""
    limit = int(request.param)
    monkeypatch.setattr(dry_run, "_SMALL", limit)
    return limit


def test_either_way_the_answer_is_the_same(way: int) -> None:
    network = check_network(load_task({**PHANTOM, "size": [32, 32]}))
    assert all(weight.is_meta for weight in network.parameters()), "nobody gets weights of zeros"
    with pytest.raises(ConfigError, match=r"network unet does not work on images of size \[32, 30\], it does on \[32, 32\]; use that$"):
        check_network(load_task({**PHANTOM, "size": [32, 30]}))


def test_the_small_one_is_computed_and_the_large_one_is_not(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    forward = FeatureNetwork.forward

    def noted(network: FeatureNetwork, images: torch.Tensor) -> torch.Tensor:
        devices.append(images.device.type)
        return forward(network, images)

    monkeypatch.setattr(FeatureNetwork, "forward", noted)
    check_network(load_task({**PHANTOM, "size": [32, 32]}))
    assert devices == ["cpu" if way else "meta"]


class Remembering(nn.Module):
    """Holds a tensor that is neither weight nor buffer: nobody gives it memory afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)
        self.grid = torch.ones(4, 1, 1, device="meta")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(images) * self.grid
        return features


def test_a_network_that_cannot_be_given_memory_is_tried_without(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = FeatureNetwork(Remembering().to("meta"), nn.Conv2d(4, 2, 1, device="meta"))
    monkeypatch.setattr(dry_run, "meta_network", lambda task: network)
    assert check_network(load_task({**PHANTOM, "size": [32, 32]})) is network


@pytest.mark.parametrize("side", [20, 31])
def test_no_reason_is_invented_for_a_size_that_does_not_work(side: int) -> None:
    """The network takes 33, which no divisor divides: it halves five times, and something must be left."""
    slim = {"network": {"name": "vgg16_slim"}}
    check_network(small_task("classification", **slim, size=[33, 33]))
    line = rf"^task shades: network vgg16_slim does not work on images of size \[{side}, {side}\], it does on \[32, 32\]; use that$"
    with pytest.raises(ConfigError, match=line):
        check_network(small_task("classification", **slim, size=[side, side]))


class Memory(TorchDispatchMode):
    """How many bytes tensors hold at most while inside: those told of, and what operations make, for as long as it lives."""

    def __init__(self, *held: torch.Tensor):
        super().__init__()
        self._living: dict[int, int] = {}
        self.most = 0
        for tensor in held:
            self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._living:  # the same object for all tensors in it, as long as it lives
            self._living[id(storage)] = storage.nbytes()
            self.most = max(self.most, sum(self._living.values()))
            weakref.finalize(storage, self._living.pop, id(storage))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor)
        return made


def _measured(task: TaskConfig, batch: int) -> int:
    """Most bytes in two real steps."""
    network, loss = initial_network(task, 0).train(), build_loss(task)
    images = torch.zeros(batch, task.image_channels, *task.size)
    targets = torch.zeros(batch, *(task.size if task.kind == "segmentation" else ()), dtype=torch.long)
    with network.at_rest(task.freeze["parts"]), Memory(*network.parameters(), images) as memory:
        optimizer = build_optimizer(task.optimizer, [weight for weight in network.parameters() if weight.requires_grad], "task")
        for _ in range(2):
            loss(network(images), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return memory.most


SGD = {"name": "sgd", "lr": 0.1}
MULTICLASS = {"target": "multiclass", "labels": ["background", "a"]}
ATTENTION = {"name": "ViT", "patch_size": [4, 4], "hidden_size": 24, "mlp_dim": 48, "num_layers": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("kind", "batch", "changes", "share"),
    [
        ("classification", 8, {"network": {"name": "resnet18"}, "optimizer": SGD, "size": [64, 64]}, 0.5),
        ("classification", 8, {"network": {"name": "efficientnet_lite0"}, "size": [64, 64]}, 0.9),
        ("classification", 8, {"network": {"name": "vgg16_slim"}, "optimizer": SGD, "size": [64, 64]}, 0.8),
        ("classification", 4, {"network": ATTENTION, "size": [32, 32]}, 0.5),
        ("classification", 1, {"network": {"name": "small_cnn"}, "optimizer": {"name": "RMSprop", "lr": 0.1}}, 0.3),
        ("classification", 4, {"network": {"name": "small_cnn"}, "freeze": ["body"]}, 0.1),
        ("segmentation", 4, {**MULTICLASS, "size": [64, 64], "loss": {"name": "ce"}}, 0.6),
        ("segmentation", 4, {**MULTICLASS, "network": {"name": "UNet", "channels": [8, 16], "strides": [2], "dropout": 0.5}}, 0.3),
    ],
)
def test_a_real_step_needs_more_than_what_it_certainly_needs(kind: str, batch: int, changes: dict[str, Any], share: float) -> None:
    """Outputs of all layers were counted, also those in place and in views, and Adam's moments whatever the optimizer is."""
    task = small_task(kind, **changes)
    assert share < least_bytes(task, batch) / _measured(task, batch) <= 1


def test_every_further_image_adds_the_same() -> None:
    """The plan goes by it. Without images there are weights and moments."""
    task = small_task("classification", network={"name": "resnet18"}, size=[32, 32])
    weights = sum(weight.nbytes for weight in initial_network(task, 0).parameters())
    one, two, nine = (least_bytes(task, batch) for batch in (1, 2, 9))
    assert nine - one == 8 * (two - one) > 0 and one - (two - one) == pytest.approx(3 * weights, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [(SGD, 0), ({**SGD, "momentum": 0.9}, 1), ({"name": "AdamW", "lr": 0.1, "amsgrad": True}, 3), ({"name": "Adafactor", "lr": 0.1}, 0)],
)
def test_moments_are_those_of_the_optimizer(optimizer: dict[str, Any], copies: int) -> None:
    plain, other = (small_task("classification", optimizer=one) for one in (SGD, optimizer))
    weights = sum(weight.nbytes for weight in initial_network(plain, 0).parameters())
    assert least_bytes(other, 2) - least_bytes(plain, 2) == copies * weights


class Attending(nn.Module):
    """Attention as torch has it, which keeps the matrix of attention without memory and not on a device, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(width, 1, dropout=0.5, batch_first=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        words = images.flatten(2).movedim(1, 2)
        words = functional.scaled_dot_product_attention(words, words, words)
        return functional.dropout(self.inside(words, words, words, need_weights=False)[0].mean(dim=1), 0.5, self.training)


def test_what_devices_fuse_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_task("classification", channels=8, size=[16, 16], optimizer=SGD)
    network = FeatureNetwork(Attending(8).to("meta"), nn.Linear(8, 3, device="meta"))
    monkeypatch.setattr(dry_run, "meta_network", lambda task: network)
    assert least_bytes(task, 2) < 2 * 4 * 256 * (8 + 40), "256 x 256 of attention for each image are not among it"


class Reading(nn.Module):
    """Asks for its numbers, which there are not without memory."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3)) * (1 if bool(images.sum() > 0) else 2)


def test_of_a_network_that_cannot_do_without_memory_images_and_weights_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_task("classification", optimizer=SGD)
    network = FeatureNetwork(Reading(), nn.Linear(1, 3, device="meta"))
    monkeypatch.setattr(dry_run, "meta_network", lambda task: network)
    assert least_bytes(task, 2) == 4 * (2 * 16 * 16 + 6)


def test_more_weights_than_images_count_with_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_task("classification", network={"name": "resnet18"}, optimizer=SGD, size=[16, 16])
    weights = sum(weight.nbytes for weight in initial_network(task, 0).parameters())
    monkeypatch.setattr(dry_run, "_free", lambda device: 2 * weights)
    check_memory(task, 1, torch.device("cpu"), "site A")
    monkeypatch.setattr(dry_run, "_free", lambda device: 2 * weights - 1)
    with pytest.raises(ConfigError, match=r"^site A: a training step on 1 x \[16, 16\] needs at least 0\.1 GiB"):
        check_memory(task, 1, torch.device("cpu"), "site A")
