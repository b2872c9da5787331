"""The two-step update against the same thing written out with copies, and against difference quotients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medflare.core.states import copy_state
from medflare.methods.grace.formulas import coral, meta_trained
from medflare.methods.grace.site import GraceSite
from medflare.methods.grace.two_step import MetaLoss, StepLengths, stepped, unremembered
from medflare.training.epochs import trainable
from methods import squares

PLAIN: dict[str, Any] = {"inner": "sgd", "swap": False}  # the paper's letter: one plain step on the first half


def taken(start: nn.Module, loss: Tensor, optimizer: Any) -> None:
    """A step of `optimizer` along the gradient of `loss`."""
    for parameter, gradient in zip(trainable(start), torch.autograd.grad(loss, trainable(start)), strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("rate", [None, 0.2])
def test_the_update_is_the_gradient_at_the_stepped_weights(rate: float | None) -> None:
    """One batch, SGD: theta - lr g(theta - eta g(theta; first half); second half), with alignment."""
    network = {"name": "unet", "channels": [4, 8], "norm": "instance"}
    task = squares.task(network=network, optimizer={"name": "sgd", "lr": 0.1}, batch_size=12)
    found, _ = squares.trained(GraceSite, task, client="coral", beta=0.7, inner_rate=rate, **PLAIN)
    place = squares.site("A", task)
    start = place.network()
    images, targets, _ = next(iter(place.batches("train", 0, "model", 0)))
    stepped, expected = copy.deepcopy(start), copy.deepcopy(start)
    gradients = torch.autograd.grad(place.loss(start(images[:6]), targets[:6]), trainable(start))
    with torch.no_grad():
        for parameter, gradient in zip(trainable(stepped), gradients, strict=True):
            parameter.sub_((0.1 if rate is None else rate) * gradient)
    features, logits = stepped.features_and_output(images[6:])
    reference = start.features_and_output(images[6:])[0].detach()
    loss = place.loss(logits, targets[6:]) + 0.7 * coral(reference.mean(dim=(2, 3)), features.mean(dim=(2, 3)))
    with torch.no_grad():
        for parameter, gradient in zip(trainable(expected), torch.autograd.grad(loss, trainable(stepped)), strict=True):
            parameter.sub_(0.1 * gradient)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def test_meta_train_takes_a_step_of_the_optimizer_and_leaves_it_as_it_was() -> None:
    """theta' is where Adam, with the moments that it has, would go; theta, moments and clipping are as before."""
    place = squares.site("A", squares.task("classification", clip={"norm": 0.5}))
    network, twin = place.network(), place.network()
    optimizer, other = (place.optimizer(trainable(each)) for each in (network, twin))
    images, targets, _ = next(iter(place.batches("train", 0, batch_size=12)))
    for model, steps in ((network, optimizer), (twin, other)):  # moments of something
        taken(model, place.loss(model(images[:4]), targets[:4]), steps)
    start, moments = copy_state(network.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    with unremembered(optimizer):
        found = stepped(dict(network.named_parameters()), lambda _: place.loss(network(images[4:]), targets[4:]), optimizer)
    taken(twin, place.loss(twin(images[4:]), targets[4:]), other)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(found[name], parameter)
    assert squares.equal(copy_state(network.state_dict()), start)
    for place_of, slots in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments[place_of][slot]) for slot, value in slots.items())


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_meta_train_goes_as_far_as_the_optimizer(kind: str, name: str) -> None:
    """||theta' - theta|| is of the outer step's order with every optimizer; a plain step at Adam's rate is none at all."""
    optimizer = {"name": name, "lr": 0.01, **({"momentum": 0.9} if name == "sgd" else {})}
    task = squares.task(kind, optimizer=optimizer, local_epochs=3)
    steps = squares.trained(GraceSite, task)[1]["steps"]
    assert 0.3 < steps["inner"] / steps["outer"] < 3
    plain = squares.trained(GraceSite, task, inner="sgd")[1]["steps"]
    if name == "adam":
        assert plain["inner"] < 0.2 * plain["outer"]


def test_lengths_of_steps_by_hand() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    lengths = StepLengths(model)
    assert lengths.means() == {"inner": None, "outer": None}
    for end in ([3.0, 4.0], [3.0, 5.0]):
        lengths.arrived()
        lengths.adapted([model.weight + 2])
        with torch.no_grad():
            model.weight.copy_(torch.tensor([end]))
    lengths.arrived()
    assert lengths.means() == pytest.approx({"inner": 8**0.5, "outer": 3.0})


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_with_swapped_halves_every_image_is_in_the_update(norm: str) -> None:
    """Without a meta-train step the swapped update is that of the two halves' mean loss; on the first half alone it is not."""
    task = squares.task(network={"name": "unet", "channels": [4, 8], "norm": norm}, optimizer={"name": "sgd", "lr": 0.1}, batch_size=12)
    place = squares.site("A", task)
    expected = place.network()
    images, targets, _ = next(iter(place.batches("train", 0, "model", 0)))
    loss = (place.loss(expected(images[:6]), targets[:6]) + place.loss(expected(images[6:]), targets[6:])) / 2
    taken(expected, loss, place.optimizer(trainable(expected)))
    swapped, half = (squares.trained(GraceSite, task, client="meta", inner="sgd", inner_rate=0.0, swap=swap)[0] for swap in (True, False))
    far = 0.0
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(swapped[name], parameter, rtol=1e-4, atol=1e-6)
        far += (half[name] - parameter).square().sum().item()
    assert far > 1e-6


def test_batch_norm_follows_both_halves_and_parameters_end_where_the_optimizer_put_them() -> None:
    place = squares.site("A")
    network = place.network().train()
    before = copy_state(network.state_dict())
    images, targets, _ = next(iter(place.batches("train", 0)))
    MetaLoss(network, place, None, lambda theta, first: meta_trained(theta, first, 0.5))(network, images, targets).backward()
    after = network.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    assert all(after[name] == before[name] + 2 for name in moved if name.endswith("num_batches_tracked"))
    assert all(parameter.grad is not None for parameter in network.parameters())
