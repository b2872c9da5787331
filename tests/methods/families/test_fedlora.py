"""FedLoRA: the adapters' formula, what travels and what is frozen, and the plain networks at the end."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from medflare.core.errors import ConfigError
from medflare.core.states import StateDict, batch_norm_entries, weighted_mean
from medflare.methods.catalogue import get_method
from medflare.methods.families.partial_sharing.fedlora import (
    FedLoRAHyper,
    FedLoRAServer,
    FedLoRASite,
    adapted,
    low_rank_update,
    merged,
    trained,
)
from medflare.networks.features import FeatureNetwork
from methods import squares

A = ".parametrizations.weight.0.A"
B = ".parametrizations.weight.0.B"
SHARES = ["both", "a", "b"]


def federation(share: str = "both", **options: Any) -> Any:
    return squares.run("fedlora", share=share, **options)


def plain(adapters: StateDict, start: StateDict, algorithm: Any) -> StateDict:
    """The plain network, written down anew."""
    noise = dict(algorithm.network("reference", {}).named_parameters())
    scale = algorithm.hyper.alpha / algorithm.hyper.rank
    state = {**start, **{name: w for name, w in adapters.items() if name in start}}
    for name, b in adapters.items():
        if name.endswith(B):
            path = name.removesuffix(B)
            a = adapters.get(path + A, noise[path + A])
            weight = start[f"{path}.weight"]
            state[f"{path}.weight"] = weight + (scale * b @ a).view_as(weight)
    return state


def test_the_update_of_a_weight() -> None:
    a = torch.tensor([[1.0, 2.0, 3.0]])
    b = torch.tensor([[1.0], [-1.0]])
    expected = torch.tensor([[4.0, 8.0, 12.0], [-4.0, -8.0, -12.0]])
    assert low_rank_update(a, b, 4.0).equal(expected)
    halved = low_rank_update(torch.cat([a, 0 * a]), torch.cat([b, b], 1), 4.0)
    assert halved.equal(expected / 2)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(5, 3),
        nn.Conv2d(2, 3, 3),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.ConvTranspose2d(3, 2, 2),
        nn.Conv3d(1, 2, 3),
    ],
    ids=str,
)
def test_with_a_frozen_and_the_full_rank_any_weight_is_reached(layer: Any) -> None:
    weight = layer.weight.detach().clone()
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    inputs = weight[0].numel()
    hyper = FedLoRAHyper(rank=inputs, alpha=3.0, share="b")
    network = adapted(FeatureNetwork(layer, nn.Identity()), hyper, 7)
    adapter = layer.parametrizations.weight[0]
    assert trained(network).keys() == {"body" + B}
    b = inputs / 3.0 * change.flatten(1) @ torch.linalg.inv(adapter.A)
    network.load_state_dict({"body" + B: b}, strict=False)
    state = merged(network, ["body.weight", "body.bias"])
    torch.testing.assert_close(state["body.weight"], weight + change, rtol=1e-3, atol=1e-3)
    assert state["body.bias"].equal(layer.bias)


class TestFederation:
    @pytest.mark.parametrize("share", SHARES)
    def test_the_start_is_the_base_network(self, share: str) -> None:
        algorithms = squares.algorithms(FedLoRASite, share=share)
        server = squares.server(FedLoRAServer, algorithms=algorithms)
        first = server.steps()[0]
        for algorithm in algorithms.values():
            request = server.configure(first, algorithm.site.name)
            network = algorithm.network("model", algorithm.joined(request.states["model"]))
            assert squares.equal(merged(network, squares.start()), squares.start())
            noise = {n: w for n, w in network.state_dict().items() if n.endswith(A)}
            common = server.network.state_dict()
            for n, w in noise.items():
                assert w.equal(common[n]) and w.std() > 0.01
        layers = [w.flatten()[:9].sign() for w in noise.values()]
        assert not layers[0].equal(layers[1]), "each layer has its own noise"

    @pytest.mark.parametrize("share", SHARES)
    def test_a_round_by_hand(self, share: str) -> None:
        """SGD on the factors, the head and normalisation, with frozen statistics."""
        task = squares.task(optimizer={"name": "sgd", "lr": 1.0})
        algorithm = squares.algorithm(FedLoRASite, task=task, share=share)
        start = squares.start(task)
        weights = {
            name: weight.detach().clone().requires_grad_()
            for name, weight in trained(algorithm.network("other", {})).items()
        }
        network = algorithm.site.network().eval()
        for images, targets, _ in algorithm.site.batches("train", 0, "model", 0):
            state = plain(weights, start, algorithm)
            loss = algorithm.site.loss(functional_call(network, state, (images,)), targets)
            gradients = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for weight, gradient in zip(weights.values(), gradients, strict=True):
                    weight.sub_(gradient)
        played = federation(share, task=task, rounds=1)
        sent = played.log[0].replies["A"].states["model"]
        local = played.algorithms["A"].local
        assert bool(local) == (share == "a")
        assert not local.keys() & sent.keys()
        expected = {name: weight.detach() for name, weight in weights.items()}
        squares.assert_close({**sent, **local}, expected)
        initial = algorithm.network("new", {}).state_dict()
        moved = [(weight - initial[name]).abs().max() for name, weight in expected.items()]
        assert min(moved) > 1e-5, "more than the tolerance"

    @pytest.mark.parametrize("share", SHARES)
    def test_what_travels_and_what_is_frozen(self, share: str) -> None:
        played = federation(share, selection="last")
        start = squares.start()
        statistics = {"running_mean", "running_var", "num_batches_tracked"}
        scales = set()
        for name in batch_norm_entries(squares.site().network()):
            if name.rpartition(".")[2] not in statistics:
                scales.add(name)
        factors = {"both": {A, B}, "a": {A}, "b": {B}}[share]
        for turn in played.log:
            for message in (*turn.outgoing.values(), *turn.replies.values()):
                for state in message.states.values():
                    names = {name for name in state if not name.endswith(tuple(factors))}
                    assert names == scales | {"head.weight", "head.bias"}
                    assert len(state) > len(names)
        final = played.algorithms["A"].finalize(played.server.configure_final("A"))["personal"]
        changed = {n for n, w in final.states["model"].items() if not w.equal(start[n])}
        layers = {n.removesuffix(B) + ".weight" for n in played.server.model if n.endswith(B)}
        assert layers and changed == names | layers

    def test_the_mean_of_b_is_exact_with_a_frozen(self) -> None:
        """FFA-LoRA's claim; with both factors the mean of the products is another one."""
        for share in ("b", "both"):
            # In the first round B is 0, and A has no gradient at its first step.
            played = federation(share, rounds=2)
            start = squares.start()
            algorithm = played.algorithms["A"]
            replies = played.log[1].replies
            models = {s: plain(r.states["model"], start, algorithm) for s, r in replies.items()}
            mean = weighted_mean(models, dict.fromkeys(models, 1.0))
            model = merged(algorithm.network("model", played.model), start)
            error = max(float((mean[n] - model[n]).abs().max()) for n in mean)
            assert (error < 1e-6) == (share == "b"), (share, error)

    def test_with_b_at_the_sites_the_models_are_personal(self) -> None:
        played = federation("a", outside=("O",), selection="last")
        start = squares.start()
        algorithms = played.algorithms
        shared = {n: w for n, w in played.model.items() if not n.endswith(B)}
        for name, algorithm in algorithms.items():
            models = algorithm.finalize(played.server.configure_final(name))
            expected = plain({**shared, **algorithm.local}, start, algorithm)
            squares.assert_close(models["personal"].states["model"], expected)
        local = {name: algorithm.local for name, algorithm in algorithms.items()}
        assert not squares.equal(local["A"], local["B"])
        mean = weighted_mean(local, dict.fromkeys(local, 1.0))
        outside = squares.algorithm(FedLoRASite, "O", share="a")
        models = outside.finalize(played.server.configure_final("O"))
        assert models.keys() == {"global", "deployed"}
        model = models["deployed"].states["model"]
        squares.assert_close(model, plain({**shared, **mean}, start, outside))
        assert squares.equal(played.server.models()["global"].states["model"], model)
        assert federation("a").server.models() == {}

    def test_all_sites_get_the_selected_global_model(self) -> None:
        played = federation(outside=("O",))
        model = played.server.models()["global"].states["model"]
        for name in ("A", "O"):
            algorithm = squares.algorithm(FedLoRASite, name)
            models = algorithm.finalize(played.server.configure_final(name))
            assert models.keys() == {"global", "personal", "deployed"}
            for m in models.values():
                assert squares.equal(m.states["model"], model)

    @pytest.mark.parametrize("share", SHARES)
    def test_from_disk_before_every_task(self, share: str, tmp_path: Any) -> None:
        options = {"outside": ("O",), "absent": lambda step, site: (step.round, site) == (0, "C")}
        stored = federation(share, store=tmp_path, **options)
        assert squares.equal(stored.model, federation(share, **options).model)


def numbers(method: str, task: Any, **hyper: Any) -> int:
    """Numbers that a site sends in a round."""
    chosen = get_method(method)
    manifest = chosen.site_class.manifest("train", chosen.plan(task, ("A", "B"), hyper))
    return sum(shape.numel() for shape in map(torch.Size, shapes(manifest)))


def shapes(manifest: Any) -> list[Any]:
    return [shape for shape, _ in manifest["model"].tensors.values()]


@pytest.mark.parametrize("dims", [2, 3])
def test_less_travels(dims: int) -> None:
    network = {"name": "unet", "channels": [32, 64]}
    task = squares.task(network=network, size=[16] * dims, spatial_dims=dims)
    whole, both, a, b = (
        numbers("fedavg", task),
        *(numbers("fedlora", task, share=share, rank=4) for share in SHARES),
    )
    assert max(a, b) < both < whole / 3
    shared = both - numbers("fedlora", task, rank=3)  # numbers of a rank
    assert both - numbers("fedlora", task, rank=2) == 2 * shared


def test_other_algorithms_are_refused() -> None:
    for pair in (get_method("fedlora", server="fedavg"), get_method("fedavg", server="fedlora")):
        with pytest.raises(ConfigError, match="run 'fedlora'"):
            pair.check({}, squares.SEGMENTATION)
    with pytest.raises(ConfigError, match="Opacus"):
        get_method("fedlora").check({"dp_noise": 1.0}, squares.SEGMENTATION)


VIT = {"name": "ViT", "patch_size": 8, "hidden_size": 8, "mlp_dim": 8, "num_layers": 1}
SWIN = {"name": "SwinUNETR", "feature_size": 12, "depths": [1, 1, 1, 1], "window_size": 2}


@pytest.mark.parametrize(
    ("kind", "spec", "side", "attention"),
    [
        (
            "classification",
            {**VIT, "num_heads": 2},
            16,
            ["blocks.0.attn.qkv", "blocks.0.attn.out_proj"],
        ),
        (
            "segmentation",
            SWIN,
            64,
            [
                "swinViT.layers1.0.blocks.0.attn.qkv",
                "swinViT.patch_embed.proj",
                "decoder1.conv_block.conv1.conv",
            ],
        ),
    ],
)
def test_attention_and_convolutions_of_monai_have_adapters(
    kind: str, spec: dict[str, Any], side: int, attention: list[str]
) -> None:
    task = squares.task(kind, network=spec, size=[side, side])
    network = adapted(squares.site(task=task).network(), FedLoRAHyper(), 1)
    names = trained(network)
    assert {f"body.{layer}{B}" for layer in attention} <= names.keys()
    images: Tensor = torch.zeros(2, task.image_channels, *task.size)
    network(images).sum().backward()
    unused = {name for name, weight in names.items() if weight.grad is None}
    for name in unused:
        assert "cross_attn" in name, "MONAI's blocks have idle layers"
