"""The two-step update against the same thing written out with copies, and against difference quotients."""

import copy

import pytest
import torch

from medflare.core.states import copy_state
from medflare.methods.grace.formulas import coral, meta_trained
from medflare.methods.grace.site import GraceSite
from medflare.methods.grace.two_step import MetaLoss, halves
from medflare.methods.parts.training import trainable
from methods import squares


@pytest.mark.parametrize("rate", [None, 0.2])
def test_the_update_is_the_gradient_at_the_stepped_weights(rate: float | None) -> None:
    """One batch, SGD: theta - lr g(theta - eta g(theta; first half); second half), with alignment."""
    network = {"name": "unet", "channels": [4, 8], "norm": "instance"}
    task = squares.task(network=network, optimizer={"name": "sgd", "lr": 0.1}, batch_size=12)
    found, _ = squares.trained(GraceSite, task, client="coral", beta=0.7, inner_rate=rate)
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


def test_adam_plus_sgd() -> None:
    """Each of the two steps: Adam, then a plain step; the second from the origin; Adam's moments see both.

    On a network without normalisation: a bias before one has no gradient but rounding, which Adam blows up.
    """
    found, _ = squares.trained(GraceSite, squares.CLASSIFICATION, client="meta", adam_plus_sgd=True)
    place = squares.site("A", squares.CLASSIFICATION)
    model = place.network()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        adam.step()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.01 * parameter.grad)

    for images, targets, _ in place.batches("train", 0, "model", 0):
        origin = copy_state(model.state_dict())
        adam.zero_grad()
        place.loss(model(images[:3]), targets[:3]).backward()
        step()
        adam.zero_grad()
        place.loss(model(images[3:]), targets[3:]).backward()
        model.load_state_dict(origin)  # the gradients stay
        step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("second_order", [True, False])
def test_second_order_is_the_exact_gradient_and_first_order_is_not(second_order: bool) -> None:
    """The gradient of L_meta along a direction against the difference quotient of L_meta itself."""
    place = squares.site("A", squares.CLASSIFICATION)
    network = place.network().double().eval()
    images, targets, _ = next(iter(place.batches("train", 0, batch_size=12)))
    loss = MetaLoss(network, place, None, lambda theta, first: meta_trained(theta, first, 0.5, second_order))
    gradients = torch.autograd.grad(loss(network, images.double(), targets), trainable(network))
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in trainable(network)]
    slope = float(sum((g * d).sum() for g, d in zip(gradients, direction, strict=True)))
    origin, ends = copy_state(network.state_dict()), []
    for length in (1e-6, -1e-6):
        network.load_state_dict(origin)
        with torch.no_grad():
            for parameter, towards in zip(trainable(network), direction, strict=True):
                parameter.add_(length * towards)
        ends.append(loss(network, images.double(), targets).item())
    quotient = (ends[0] - ends[1]) / 2e-6
    assert (slope == pytest.approx(quotient, rel=1e-4)) is second_order


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


@pytest.mark.parametrize(
    ("count", "first", "second"), [(8, [0, 1, 2, 3], [4, 5, 6, 7]), (5, [0, 1], [2, 3, 4]), (3, [0, 1, 2], [0, 1, 2]), (1, [0], [0])]
)
def test_halves(count: int, first: list[int], second: list[int]) -> None:
    rows = list(range(count))
    assert [rows[part] for part in halves(count)] == [first, second]
