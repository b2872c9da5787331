from collections.abc import Callable
from typing import Any

import pytest
import torch
from monai.networks.nets.attentionunet import AttentionUnet
from monai.networks.nets.densenet import DenseNet
from monai.networks.nets.segresnet import SegResNet
from torch import Tensor, nn

from helpers.fixture_types import Golden
from medflare.core.errors import StateError
from medflare.core.states import StateDict, weighted_mean
from medflare.methods.iop_fl import routing as routing_module
from medflare.methods.iop_fl.routing import (
    MLPRouter,
    RoutedLayer,
    RoutedNetwork,
    Routing,
    Statistics,
)
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import load_task


class Everything(nn.Module):
    """Every routed layer type, depthwise and reflecting convolutions, a learnt activation and a linear head."""

    def __init__(self, norm: Any = nn.Identity) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.norm = norm(8) if norm is not nn.Identity else norm()
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8, bias=False)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1)
        self.act = nn.PReLU()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.act(self.up(self.depthwise(self.norm(self.down(x)))))
        return self.head(maps.movedim(1, -1)).movedim(-1, 1)


def states_of(make: Callable[[], nn.Module], count: int, seed: int = 0) -> list[StateDict]:
    states = []
    for k in range(count):
        torch.manual_seed(seed + k)
        module = make()
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
        states.append(module.state_dict())
    return states


def averaged(make: Callable[[], nn.Module], states: Any) -> nn.Module:
    """The network of mean weights; what is not routed comes from the last state, as in the routed one."""
    mean = weighted_mean(
        {str(k): state for k, state in enumerate(states)},
        dict.fromkeys(map(str, range(len(states))), 1.0),
    )
    module = make()
    layers = module.named_modules(remove_duplicate=False)
    routed = set()
    for name, layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            routed.add(name)
    module.load_state_dict(
        {
            name: mean[name] if name.rpartition(".")[0] in routed else tensor
            for name, tensor in states[-1].items()
        }
    )
    return module.eval()


@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("experts", [2, 5])
def test_uniform_router_equals_the_averaged_network(per_layer: bool, experts: int) -> None:
    torch.manual_seed(0)
    states = states_of(Everything, experts)
    images = torch.rand(3, 3, 8, 10)
    routed = RoutedNetwork(Everything(), states, Routing(per_layer=per_layer))
    with torch.no_grad():
        torch.testing.assert_close(
            routed(images), averaged(Everything, states)(images), rtol=1e-5, atol=1e-6
        )
    for coefficients in routed.coefficients(images).values():
        torch.testing.assert_close(coefficients, torch.full_like(coefficients, 1 / experts))


def drawn(network: nn.Module, states: list[StateDict], seed: int = 0, **routing: Any) -> Any:
    """A routed network whose routers do not start uniform."""
    routed = RoutedNetwork(network, states, Routing(**routing))
    torch.manual_seed(seed)
    for router in (module for module in routed.modules() if isinstance(module, MLPRouter)):
        nn.init.normal_(router.fc2.weight)
    return routed


def test_a_softmax_mixture_of_equal_experts_is_the_expert() -> None:
    torch.manual_seed(0)
    same = [states_of(Everything, 1)[0]] * 3
    images = torch.rand(2, 3, 8, 8)
    kinds: tuple[tuple[Any, bool], ...] = (("softmax", True), ("sigmoid", False))
    for coefficients, unchanged in kinds:
        routed = drawn(Everything(), same, coefficients=coefficients)
        with torch.no_grad():
            assert (
                torch.allclose(routed(images), averaged(Everything, same)(images), atol=1e-5)
                == unchanged
            )


def test_every_sample_has_its_own_weights() -> None:
    """A batch gives the same outputs as its images one by one."""
    torch.manual_seed(0)
    routed = drawn(Everything(), states_of(Everything, 3))
    images = torch.rand(4, 3, 8, 8) * torch.tensor([0.1, 1.0, 5.0, 20.0]).view(-1, 1, 1, 1)
    with torch.no_grad():
        alone = torch.cat([routed(image[None]) for image in images])
        torch.testing.assert_close(routed(images), alone, rtol=1e-4, atol=1e-5)
    first = routed.coefficients(images)["down"]
    assert first.shape == (4, 3) and (first.std(dim=0) > 1e-3).all()


@pytest.mark.parametrize(("name", "entry"), [("conv", "e"), ("deconv", "u")])
def test_reference_numbers(golden: Golden, name: str, entry: str) -> None:
    numbers = {key: torch.as_tensor(value) for key, value in golden("iop").items()}
    layer = (
        nn.Conv2d(3, 5, 3, padding=1) if name == "conv" else nn.ConvTranspose2d(3, 4, 2, stride=2)
    )
    experts = []
    for k in range(5):
        of_expert = f"route/expert{k}/{entry}"
        experts.append(
            {"weight": numbers[f"{of_expert}.weight"], "bias": numbers[f"{of_expert}.bias"]}
        )
    routed: Any = RoutedNetwork(layer, experts, Routing(coefficients="sigmoid"))
    routed.network.router.load_state_dict(
        {
            key: numbers[f"route/{name}/routing_fn/{key}"]
            for key in routed.network.router.state_dict()
        }
    )
    images = numbers["route/x"]
    torch.testing.assert_close(
        routed.coefficients(images)[""], numbers[f"route/{name}/r"], rtol=1e-5, atol=1e-6
    )
    with torch.no_grad():
        torch.testing.assert_close(
            routed(images), numbers[f"route/{name}/official_out"], rtol=1e-5, atol=1e-5
        )
        uniform = RoutedNetwork(layer, experts)(images)
    torch.testing.assert_close(
        uniform, numbers[f"route/{name}/uniform_init_out"], rtol=1e-5, atol=1e-5
    )


def test_gradients_reach_every_router_and_nothing_else() -> None:
    routed = RoutedNetwork(Everything(), states_of(Everything, 3))
    routed(torch.rand(2, 3, 8, 8)).square().sum().backward()
    adaptable = routed.adaptable()
    for name in adaptable:
        assert "router" in name
    for parameter in adaptable.values():
        assert parameter.grad is not None
    moving = []
    for name, parameter in adaptable.items():
        if parameter.grad is not None and parameter.grad.abs().sum() > 0:
            moving.append(name)
    assert {name.split(".")[1] for name in moving} == {"down", "depthwise", "up", "head"}
    for name, parameter in routed.named_parameters():
        if name not in adaptable:
            assert parameter.grad is None


def test_batch_norm_uses_the_test_batch() -> None:
    make = lambda: Everything(nn.BatchNorm2d)  # noqa: E731
    states = states_of(make, 2)
    images = torch.rand(4, 3, 8, 8)
    reference: Any = averaged(make, states)
    with torch.no_grad():
        running = RoutedNetwork(make(), states, Routing(statistics="running"))(images)
        torch.testing.assert_close(running, reference(images), rtol=1e-5, atol=1e-6)
        batch: Any = RoutedNetwork(make(), states, Routing(statistics="batch"))
        reference.norm.train()
        torch.testing.assert_close(batch(images), reference(images), rtol=1e-4, atol=1e-5)
    # Unchanged.
    assert torch.equal(batch.network.norm.layer.running_mean, states[-1]["norm.running_mean"])


@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("expert", [0, 1, 2])
def test_a_network_that_prefers_its_base_is_that_expert(
    expert: int, statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_module, "_NEARLY_ALL", 1 - 1e-7)
    make = lambda: Everything(nn.BatchNorm2d)  # noqa: E731
    states = states_of(make, 3)
    network = RoutedNetwork(make(), states, Routing(statistics=statistics))
    network.prefer(expert)
    network.set_base(expert, running=True)
    alone = make()
    alone.load_state_dict(states[expert])
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(network(images), alone.eval()(images), rtol=1e-4, atol=1e-5)


def test_a_layer_used_twice_is_routed_at_both_places() -> None:
    def twice() -> nn.Module:
        layer = nn.Conv2d(2, 2, 3, padding=1)
        return nn.Sequential(layer, layer)

    states = states_of(twice, 3)
    images = torch.rand(1, 2, 5, 5)
    routed: Any = RoutedNetwork(twice(), states)
    assert routed.network[0] is routed.network[1]
    with torch.no_grad():
        torch.testing.assert_close(routed(images), averaged(twice, states)(images))


def test_batch_normalisation_used_twice_takes_the_test_batch_at_both_places() -> None:
    def twice() -> nn.Module:
        norm = nn.BatchNorm2d(2)
        return nn.Sequential(norm, nn.Conv2d(2, 2, 3), norm)

    outputs = RoutedNetwork(twice(), states_of(twice, 3))(torch.rand(4, 2, 8, 8))
    assert outputs.mean((0, 2, 3)).abs().max() < 1e-5


def test_the_adapted_state_is_restored_and_others_are_refused() -> None:
    states = states_of(Everything, 3)
    images = torch.rand(2, 3, 8, 8)
    first = drawn(Everything(), states, 1)
    second = drawn(Everything(), states, 2)
    assert not torch.equal(first(images), second(images))
    second.load_adapted_state(first.adapted_state())
    assert torch.equal(first(images), second(images))
    with pytest.raises(StateError):
        RoutedNetwork(Everything(), states, Routing(per_layer=False)).load_adapted_state(
            first.adapted_state()
        )


def test_a_network_without_layers_to_route_is_refused() -> None:
    with pytest.raises(StateError, match="BatchNorm2d"):
        RoutedNetwork(nn.BatchNorm2d(2), [nn.BatchNorm2d(2).state_dict()] * 2)


MONAI: dict[str, Callable[[], nn.Module]] = {
    "attention unet": lambda: AttentionUnet(2, 1, 2, (4, 8), (2,)),
    "segresnet": lambda: SegResNet(
        2, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1), blocks_up=(1,)
    ),
    "densenet": lambda: DenseNet(2, 1, 2, init_features=4, growth_rate=4, block_config=(2, 2)),
}


@pytest.mark.parametrize("make", MONAI.values(), ids=MONAI)
def test_monai_networks(make: Callable[[], nn.Module]) -> None:
    states = states_of(make, 3)
    images = torch.rand(2, 1, 32, 32)
    routed = RoutedNetwork(make(), states, Routing(statistics="running"))
    with torch.no_grad():
        torch.testing.assert_close(
            routed(images), averaged(make, states)(images), rtol=1e-4, atol=1e-5
        )
    routed(images).square().sum().backward()
    assert sum(isinstance(module, RoutedLayer) for module in routed.network.modules()) >= 5
    for parameter in routed.adaptable().values():
        assert parameter.grad is not None


def test_the_head_of_a_network_of_monai_is_routed_too() -> None:
    """With all weight on one expert the network is that expert, head included."""
    task = load_task(
        {
            **load_task("phantom").to_dict(),
            "size": [32, 32],
            "network": {"name": "BasicUNet", "features": [4, 4, 8, 8, 8, 4]},
        }
    )
    experts = [initial_network(task, seed).eval() for seed in range(3)]
    states = [expert.state_dict() for expert in experts]
    routed = RoutedNetwork(initial_network(task, 9), states, Routing())
    for router in routed.modules():
        if isinstance(router, MLPRouter):
            nn.init.zeros_(router.fc2.weight)
            router.fc2.bias.data = torch.tensor([0.0, 50.0, 0.0])
    images = torch.rand(2, task.image_channels, 32, 32)
    with torch.no_grad():
        unrouted = {name: states[1][name] for name in states[1]}
        experts[1].load_state_dict(unrouted)
        assert any(name.startswith("head") for name in routed.coefficients(images))
        torch.testing.assert_close(routed(images), experts[1](images), rtol=1e-4, atol=1e-5)
