"""The two-step update against the same update written out with copies of the network."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medflare.core.states import copy_state
from medflare.methods.grace.formulas import coral
from medflare.methods.grace.site import GraceSite, MetaLoss, optimizer_step
from medflare.training.epochs import preserved_moments, trainable
from methods import squares


def step(start: nn.Module, loss: Tensor, optimizer: Any) -> None:
    """A step of `optimizer` along the gradient of `loss`."""
    for parameter, gradient in zip(trainable(start), torch.autograd.grad(loss, trainable(start)), strict=True):
        parameter.grad = gradient
    optimizer.step()


def test_the_update_is_the_gradient_at_the_adapted_weights() -> None:
    """One batch, SGD: theta - lr g(theta - eta g(theta; first half); second half), with alignment."""
    network = {"name": "unet", "channels": [4, 8], "norm": "instance"}
    task = squares.task(network=network, optimizer={"name": "sgd", "lr": 0.1}, batch_size=12)
    actual, _ = squares.trained(GraceSite, task, client="coral", beta=0.7, inner="sgd", swap=False)
    place = squares.site("A", task)
    start = place.network()
    images, targets, _ = next(iter(place.batches("train", 0, "model", 0)))
    stepped, expected = copy.deepcopy(start), copy.deepcopy(start)
    gradients = torch.autograd.grad(place.loss(start(images[:6]), targets[:6]), trainable(start))
    with torch.no_grad():
        for parameter, gradient in zip(trainable(stepped), gradients, strict=True):
            parameter.sub_(0.1 * gradient)
    features, logits = stepped.features_and_output(images[6:])
    reference = start.features_and_output(images[6:])[0].detach()
    loss = place.loss(logits, targets[6:]) + 0.7 * coral(reference.mean(dim=(2, 3)), features.mean(dim=(2, 3)))
    with torch.no_grad():
        for parameter, gradient in zip(trainable(expected), torch.autograd.grad(loss, trainable(stepped)), strict=True):
            parameter.sub_(0.1 * gradient)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-6)


def test_meta_train_takes_a_step_of_the_optimizer_and_restores_it() -> None:
    """theta' is the result of a step of Adam with its current moments; theta and moments are as before."""
    place = squares.site("A", squares.task("classification", clip={"norm": 0.5}))
    network, twin = place.network(), place.network()
    optimizer, other = (place.optimizer(trainable(each)) for each in (network, twin))
    images, targets, _ = next(iter(place.batches("train", 0, batch_size=12)))
    for model, steps in ((network, optimizer), (twin, other)):  # nonzero moments
        step(model, place.loss(model(images[:4]), targets[:4]), steps)
    start, moments = copy_state(network.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    with preserved_moments(optimizer):
        actual = optimizer_step(dict(network.named_parameters()), lambda _: place.loss(network(images[4:]), targets[4:]), optimizer)
    step(twin, place.loss(twin(images[4:]), targets[4:]), other)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(actual[name], parameter)
    assert squares.equal(copy_state(network.state_dict()), start)
    for place_of, slots in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments[place_of][slot]) for slot, value in slots.items())


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_with_swapped_halves_the_update_uses_every_image(norm: str) -> None:
    """Without a meta-train step the swapped update is that of the two halves' mean loss; on the first half alone it is not."""
    task = squares.task(network={"name": "unet", "channels": [4, 8], "norm": norm}, optimizer={"name": "sgd", "lr": 0.1}, batch_size=12)
    place = squares.site("A", task)
    expected = place.network()
    images, targets, _ = next(iter(place.batches("train", 0, "model", 0)))
    loss = (place.loss(expected(images[:6]), targets[:6]) + place.loss(expected(images[6:]), targets[6:])) / 2
    gradients = torch.autograd.grad(loss, trainable(expected))
    for swap in (True, False):
        network = place.network()
        MetaLoss(network, place.loss, lambda theta, _: theta, swap=swap)(network, images, targets).backward()
        pairs = zip(trainable(network), gradients, strict=True)
        assert all(p.grad is not None and torch.allclose(p.grad, g, rtol=1e-4, atol=1e-6) for p, g in pairs) is swap
