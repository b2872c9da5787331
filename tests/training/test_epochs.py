import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.small_tasks import INSTANCE_UNET
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.store import StateStore
from medflare.data.loading import Batch
from medflare.methods.catalogue import get_method, method_names
from medflare.methods.fedavg import FedAvgSite
from medflare.training.epochs import (
    OptimizerMemory,
    Steps,
    pack_optimizer,
    run_epochs,
    scaler_of,
    train_epochs,
)
from methods import squares

# The loss of a batch is the mean of its images' losses, and no layer mixes images.
SGD: dict[str, Any] = {
    "network": INSTANCE_UNET,
    "loss": {"name": "ce"},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "local_epochs": 2,
}


def trained(
    counts: tuple[int, int, int] = (12, 2, 2), **changes: Any
) -> tuple[dict[str, Tensor], float]:
    """A network after a round of local training, and the mean loss."""
    site = squares.site("A", squares.task(**{**SGD, **changes}), counts)
    model = site.network()
    loss = train_epochs(model, site.optimizer(model.parameters()), site, 0, "model")
    return model.state_dict(), loss


@pytest.mark.parametrize("count", [12, 11, 9])
def test_accumulated_batches_equal_one_large_batch(count: int) -> None:
    """Also where the last batch is smaller, and where an epoch ends before all are there."""
    large = trained((count, 2, 2), batch_size=6)[0]
    small = trained((count, 2, 2), batch_size=3, accumulate=2)[0]
    for name in large:
        torch.testing.assert_close(small[name], large[name], rtol=1e-4, atol=1e-5, msg=name)
    alone, _ = trained((count, 2, 2), batch_size=3)
    assert any((alone[name] - large[name]).abs().max() > 1e-3 for name in large)


def test_the_end_of_an_epoch_is_a_step() -> None:
    moved: list[None] = []
    site = squares.site("A", squares.task(**SGD, batch_size=2, accumulate=4), (12, 2, 2))
    model = site.network()
    train_epochs(
        model,
        site.optimizer(model.parameters()),
        site,
        0,
        "model",
        gradient_hook=lambda: moved.append(None),
    )
    assert len(moved) == 2 * math.ceil(12 / 8)


@pytest.mark.parametrize(
    ("change", "named"),
    [(lambda loss: loss[None], r"shape \(1,\)"), (Tensor.detach, "no gradient")],
)
def test_what_is_no_loss_of_a_batch_is_named(change: Any, named: str) -> None:
    site = squares.site("A", squares.task(**SGD), (12, 2, 2))
    model = site.network()

    def loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        return change(site.loss(network(images), targets))

    with pytest.raises(ConfigError, match=f"loss of a batch has {named}"):
        train_epochs(model, site.optimizer(model.parameters()), site, 0, "model", loss=loss)


def test_clipping_is_of_the_mean_gradient_of_a_step() -> None:
    for changes in ({"accumulate": 2}, {"precision": "fp16"}):
        site = squares.site(
            "A",
            squares.task(
                **{
                    **SGD,
                    "clip": {"norm": 1e-3},
                    "optimizer": {"name": "sgd", "lr": 1.0},
                    **changes,
                }
            ),
        )
        model = site.network()
        before = [weight.detach().clone() for weight in model.parameters()]
        steps = Steps(site.optimizer(model.parameters()), site)
        for batch in list(site.batches("train", 0))[:2]:
            steps.backward(site.loss(model(batch.images), batch.targets), len(batch.images))
            if "precision" in changes:
                break
        distance = (
            sum(
                (new.detach() - old).square().sum()
                for new, old in zip(model.parameters(), before, strict=True)
            )
            ** 0.5
        )
        assert float(distance) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_as_fp32_does(precision: str) -> None:
    exact, loss = trained()
    rounded, near = trained(precision=precision)
    assert near == pytest.approx(loss, rel=0.02) and near != loss
    distance = max((rounded[name] - exact[name]).abs().max().item() for name in exact)
    assert 0 < distance < 0.02


class Scaled(nn.Module):
    """One weight whose gradient is whatever factor it is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))


def test_steps_with_infinite_gradients_are_skipped() -> None:
    site = squares.site("A", squares.task(precision="fp16"))
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = Steps(optimizer, site)
    scale = scaler_of(optimizer).get_scale()
    steps.backward(model.weight * 3e38, 4)  # overflows when it is scaled
    assert model.weight.item() == 1.0 and scaler_of(optimizer).get_scale() == scale / 2
    steps.backward(model.weight * 2.0, 4)
    assert model.weight.item() == 0.0


def test_the_scale_is_kept_with_the_moments(tmp_path: Any) -> None:
    memory = Message()
    store = StateStore(tmp_path)
    site = squares.site("A", squares.task(precision="fp16"))
    first, second = (torch.optim.Adam(Scaled().parameters(), lr=0.1) for _ in range(2))
    steps = Steps(first, site)
    steps.backward(first.param_groups[0]["params"][0] * 3e38, 4)
    steps.backward(first.param_groups[0]["params"][0] * 2.0, 4)
    OptimizerMemory(memory).keep("model", first)
    store.save("algorithm", memory)
    loaded = store.load("algorithm")
    assert loaded is not None
    OptimizerMemory(loaded).recall("model", second)
    assert (
        scaler_of(second).state_dict() == scaler_of(first).state_dict()
        and scaler_of(first).get_scale() == 2.0**15
    )
    assert second.state_dict()["state"][0]["exp_avg"] == first.state_dict()["state"][0]["exp_avg"]
    assert pack_optimizer(torch.optim.SGD(Scaled().parameters(), lr=0.1)) == {}


@pytest.mark.parametrize("name", ["fedsm", "fedsm_extra", "scaffold", "grace", "feddag", "sha"])
def test_methods_without_gradient_accumulation_and_fp16_refuse_them(name: str) -> None:
    method = get_method(name)
    with pytest.raises(ConfigError, match="fp16"):
        method.check({}, squares.task(precision="fp16"))
    with pytest.raises(ConfigError, match="accumulate"):
        method.check({}, squares.task(accumulate=2))
    method.check({}, squares.task(precision="bf16"))


METHODS = [name for name in method_names() if name != "condist"]  # it needs two structures


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_in_bf16(name: str) -> None:
    task = squares.task(precision="bf16", network={**INSTANCE_UNET, "norm": "batch"})
    hyper: dict[str, Any] = {"selector_rounds": 1} if name == "fedsm_extra" else {}
    played = squares.run(name, task, rounds=1, **hyper)
    for turn in played.log:
        for reply in turn.replies.values():
            for state in reply.states.values():
                for tensor in state.values():
                    assert tensor.dtype not in (torch.bfloat16, torch.float16)
                    assert tensor.isfinite().all()


def test_means_are_over_images_not_batches() -> None:
    """Seven images in batches of four and three: a mean over batches would be 3.5."""
    site = squares.site("A", squares.task(batch_size=4, local_epochs=2), (7, 2, 2))
    sizes: list[int] = []

    def step(batch: Batch) -> dict[str, torch.Tensor]:
        sizes.append(len(batch.images))
        return {"size": torch.tensor(float(len(batch.images))), "one": torch.tensor(1.0)}

    assert run_epochs(site, 0, "model", step) == {"size": pytest.approx((16 + 9) / 7), "one": 1.0}
    assert sizes == [4, 3, 4, 3]


def test_no_images_have_no_loss() -> None:
    site = squares.site("A", counts=(0, 2, 2))
    network = site.network()
    assert math.isnan(train_epochs(network, site.optimizer(network.parameters()), site, 0, "model"))


@pytest.mark.parametrize("reset", [True, False])
def test_moments_are_kept_unless_they_are_reset(reset: bool) -> None:
    algorithm = squares.algorithm(FedAvgSite, reset_optimizer=reset)
    start = Message({"model": squares.start()})
    for round in range(2):
        algorithm.perform("train", round, start)
    stored = algorithm.memory.states.get("optimizer/model", {})
    steps = {tensor.item() for name, tensor in stored.items() if name.endswith(".step")}
    assert steps == (
        set() if reset else {2.0 * math.ceil(algorithm.site.n["train"] / algorithm.site.batch_size)}
    )
