import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor

from helpers.fixture_types import SiteOf, TaskOf
from helpers.small_tasks import INSTANCE_UNET, small_task
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.core.store import StateStore
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork
from medflare.training.computing import Computing, check_precision, usable_device
from medflare.training.opening import open_site

CPU = torch.device("cpu")
UNET: dict[str, Any] = {"name": "unet", "channels": [4, 8], "norm": "batch"}
NETWORKS = (UNET, {"name": "UNet", "channels": [4, 8], "strides": [2]})


def network(spec: dict[str, Any] = INSTANCE_UNET, **settings: Any) -> FeatureNetwork:
    return Computing(CPU, **settings).placed(initial_network(small_task(network=spec), 0))


def images() -> Tensor:
    return torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("spec", NETWORKS, ids=lambda spec: str(spec["name"]))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_used_inside_the_network_only(
    spec: dict[str, Any], precision: str
) -> None:
    """Layers compute in it; logits, features, weights and gradients are float32, and near to what fp32 gives."""
    exact = network(spec)
    rounded = network(spec, precision=precision)
    inside: list[torch.dtype] = []
    rounded.head.register_forward_hook(lambda _layer, _given, actual: inside.append(actual.dtype))
    for ask in (
        lambda model: (model(images()),),
        lambda model: model.features_and_output(images()),
    ):
        for expected, actual in zip(ask(exact), ask(rounded), strict=True):
            assert actual.dtype == torch.float32 and not torch.equal(actual, expected)
            torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    assert inside == [torch.bfloat16 if precision == "bf16" else torch.float16] * 2
    rounded(images()).mean().backward()
    assert {weight.grad.dtype for weight in rounded.parameters() if weight.grad is not None} == {
        torch.float32
    }
    assert {tensor.dtype for tensor in rounded.state_dict().values()} <= {
        torch.float32,
        torch.int64,
    }


def test_fp32_does_not_cast() -> None:
    """Not even a cast: reference numbers in double precision stay what they are."""
    assert network().double()(images().double()).dtype == torch.float64


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_changes_the_memory_format_only(dims: int, tmp_path: Path) -> None:
    task = small_task(size=[8] * dims, spatial_dims=dims, network=UNET)
    plain = initial_network(task, 0).eval()
    ordered = Computing(CPU, channels_last=True).placed(initial_network(task, 0)).eval()
    order = torch.channels_last if dims == 2 else torch.channels_last_3d
    pictures = torch.rand(2, 1, *[8] * dims)
    features, logits = ordered.features_and_output(pictures)
    assert features.is_contiguous(memory_format=order) and not features.is_contiguous()
    torch.testing.assert_close(logits, plain(pictures))
    ordered.load_state_dict(plain.state_dict())
    # A round's weights do not undo it.
    assert ordered.features_and_output(pictures)[0].is_contiguous(memory_format=order)
    state = copy_state(ordered.state_dict())
    for name, tensor in state.items():
        assert torch.equal(tensor, plain.state_dict()[name]) and tensor.is_contiguous()
    StateStore(tmp_path).save(
        "algorithm",
        Message(
            {"moments": {name: tensor.clone() for name, tensor in ordered.state_dict().items()}}
        ),
    )
    stored = StateStore(tmp_path).load("algorithm")
    assert stored is not None and torch.equal(
        stored.states["moments"]["head.weight"], plain.state_dict()["head.weight"]
    )


@pytest.mark.parametrize("spec", NETWORKS, ids=lambda spec: str(spec["name"]))
def test_a_compiled_network_is_the_same_network(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain = network(spec)
    fast = network(spec, compiled=True)
    assert list(fast.state_dict()) == list(plain.state_dict())
    for expected, actual in zip(
        plain.features_and_output(images()), fast.features_and_output(images()), strict=True
    ):
        torch.testing.assert_close(actual, expected)
    assert compiled
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.stat().st_mode & 0o777 == 0o700 and folder.name.startswith("medflare-compiled-")
    assert not inductor.cpp_cache_precompile_headers, "they are in a folder of a known name"


def test_a_gpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match="bf16"):
        check_precision("bf16", torch.device("cuda:0"), "site A")
    check_precision("fp16", torch.device("cuda:0"), "site A")
    check_precision("bf16", CPU, "site A")


def test_task_and_local_settings_decide_how_a_site_computes(
    make_site: SiteOf, make_task: TaskOf
) -> None:
    site = open_site(
        "A",
        make_task(precision="bf16"),
        data_root=make_site(),
        local={"channels_last": True, "compile": True},
    )
    assert site.computing == Computing(CPU, "bf16", channels_last=True, compiled=True)
    assert site.network().precision == torch.bfloat16


@pytest.mark.parametrize("name", ["gpu", "meta", "hip", "privateuseone"])
def test_devices_that_torch_or_this_machine_does_not_have(name: str) -> None:
    assert usable_device("cpu", "local/medflare.json") == CPU
    with pytest.raises(ConfigError, match=f"'{name}'"):
        usable_device(name, "local/medflare.json")


def test_a_gpu_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(usable_device("cuda:1", "--device", initialize=False)) == "cuda:1"
    with pytest.raises(ConfigError, match="cuda:2"):
        usable_device("cuda:2", "--device", initialize=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="a build without GPUs; use cpu, or install torch with"):
        usable_device("cuda", "--device", initialize=False)


def test_the_device_of_a_site(
    make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_site()
    assert open_site("A", make_task(), data_root=folder).device == CPU
    monkeypatch.setenv("MEDFLARE_DEVICE", "cuda:77")
    with pytest.raises(ConfigError, match="cuda:77"):
        open_site("A", make_task(), data_root=folder)
    assert open_site("A", make_task(), data_root=folder, local={"device": "cpu"}).device == CPU
