"""GRACE on small generated images: the two-step update, alignment, the server's weights, the probe and adaptation outside."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.methods import grace
from medflare.methods.fedavg import FedAvgSite
from medflare.methods.grace.formulas import coral
from medflare.methods.grace.server import GraceServer
from medflare.methods.grace.site import GraceSite, MetaLoss, optimizer_step
from medflare.training.epochs import preserved_moments, trainable
from methods import squares


class TestLocalTraining:
    def test_no_weight_is_no_alignment(self) -> None:
        assert squares.equal(
            squares.trained(GraceSite, client="coral", beta=0.0)[0],
            squares.trained(GraceSite, client="meta")[0],
        )

    @pytest.mark.parametrize("distance", [grace.coral, grace.mmd])
    def test_identical_weights_are_aligned(self, distance: Any) -> None:
        """Both models normalise by the same batch; the global one's running statistics stay."""
        algorithm = squares.algorithm(GraceSite)
        local = algorithm.network("model", squares.trained(FedAvgSite)[0])
        shared = algorithm.frozen(copy_state(local.state_dict()))
        before = copy_state(shared.state_dict())
        images = algorithm.site.data.train.images
        gap = algorithm.aligned(shared, distance)(
            images, local.train().features_and_output(images)[0]
        ).item()
        assert gap == pytest.approx(0, abs=1e-9)
        assert squares.equal(shared.state_dict(), before)
        for layer in shared.modules():
            assert not layer.training

    def test_the_discriminator_is_trained_and_kept(self) -> None:
        algorithm = squares.algorithm(GraceSite, client="adv")
        start = squares.start()
        algorithm.perform("train", 0, Message({"model": copy_state(start)}))
        first = algorithm.discriminator
        algorithm.perform("train", 1, Message({"model": copy_state(start)}))
        assert not squares.equal(algorithm.discriminator, first)
        assert {"discriminator", "optimizer/discriminator"} <= algorithm.memory.states.keys()

    def test_a_reset_optimizer_keeps_no_moments_of_the_discriminator(self) -> None:
        algorithm = squares.algorithm(GraceSite, client="adv", reset_optimizer=True)
        algorithm.perform("train", 0, Message({"model": squares.start()}))
        assert "optimizer/discriminator" not in algorithm.memory.states

    def test_metadata_and_probe(self) -> None:
        _, meta = squares.trained(GraceSite, probe=True)
        assert 0 <= meta["validation"]["personal"] <= 1 and -2 <= meta["a_distance"] <= 2
        assert "a_distance" not in squares.trained(GraceSite)[1]
        # One image cannot be split.
        assert squares.trained(GraceSite, probe=True, counts=(1, 1, 1))[1]["a_distance"] is None


def test_the_server_calls_consistent_aggregate() -> None:
    log, server, _ = squares.federation(GraceSite, GraceServer, rounds=1, counts={"B": (6, 4, 5)})
    states = {name: reply.states["model"] for name, reply in log[0].replies.items()}
    expected, weights = grace.consistent_aggregate(
        squares.start(), states, {"A": 12, "B": 6, "C": 12}, server.aggregation.parameters
    )
    assert squares.equal(server.model, expected)
    assert (
        max(abs(weights[name] - share) for name, share in {"A": 0.4, "B": 0.2, "C": 0.4}.items())
        > 1e-4
    )


def test_adaptation_only_at_outside_sites() -> None:
    incoming = Message({"model": squares.start()})
    for tta, kind in (("none", "plain"), ("tent", "tent"), ("dsbn", "dsbn")):
        final = {
            name: squares.algorithm(GraceSite, name, tta=tta).finalize(incoming) for name in "AO"
        }
        assert {name: models["deployed"].meta["kind"] for name, models in final.items()} == {
            "A": "plain",
            "O": kind,
        }
        assert {models["global"].meta["kind"] for models in final.values()} == {"plain"}
    assert final["O"]["deployed"].states.keys() == {"model", "statistics"}


@pytest.mark.parametrize(
    ("batch_size", "settings", "warned"),
    [(15, {}, True), (16, {}, False), (4, {"client": "meta"}, False)],
)
def test_coral_with_small_batches_gives_a_warning(
    batch_size: int, settings: dict[str, Any], warned: bool
) -> None:
    server = squares.server(GraceServer, squares.task(batch_size=batch_size), **settings)
    assert (
        any("CORAL" in event["message"] for event in server.context.events.of("warning")) is warned
    )


def step(start: nn.Module, loss: Tensor, optimizer: Any) -> None:
    """A step of `optimizer` along the gradient of `loss`."""
    for parameter, gradient in zip(
        trainable(start), torch.autograd.grad(loss, trainable(start)), strict=True
    ):
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
    stepped = copy.deepcopy(start)
    expected = copy.deepcopy(start)
    step(
        stepped,
        place.loss(stepped(images[:6]), targets[:6]),
        torch.optim.SGD(trainable(stepped), lr=0.1),
    )
    features, logits = stepped.features_and_output(images[6:])
    reference = start.features_and_output(images[6:])[0].detach()
    loss = place.loss(logits, targets[6:]) + 0.7 * coral(
        reference.mean(dim=(2, 3)), features.mean(dim=(2, 3))
    )
    with torch.no_grad():
        for parameter, gradient in zip(
            trainable(expected), torch.autograd.grad(loss, trainable(stepped)), strict=True
        ):
            parameter.sub_(0.1 * gradient)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-6)


def test_meta_train_takes_a_step_of_the_optimizer_and_restores_it() -> None:
    """theta' is the result of a step of Adam with its current moments; theta and moments are as before."""
    place = squares.site("A", squares.task("classification", clip={"norm": 0.5}, batch_size=12))
    network = place.network()
    twin = place.network()
    optimizer = place.optimizer(trainable(network))
    other = place.optimizer(trainable(twin))
    images, targets, _ = next(place.batches("train", 0))
    for model, steps in ((network, optimizer), (twin, other)):  # nonzero moments
        step(model, place.loss(model(images[:4]), targets[:4]), steps)
    start = copy_state(network.state_dict())
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    with preserved_moments(optimizer):
        actual = optimizer_step(
            dict(network.named_parameters()),
            lambda _: place.loss(network(images[4:]), targets[4:]),
            optimizer,
        )
    step(twin, place.loss(twin(images[4:]), targets[4:]), other)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(actual[name], parameter)
    assert squares.equal(copy_state(network.state_dict()), start)
    for place_of, slots in optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            assert torch.equal(value, moments[place_of][slot])


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_with_swapped_halves_the_update_uses_every_image(norm: str) -> None:
    """Without a meta-train step the swapped update is that of the two halves' mean loss; on the first half alone it is not."""
    task = squares.task(
        network={"name": "unet", "channels": [4, 8], "norm": norm},
        optimizer={"name": "sgd", "lr": 0.1},
        batch_size=12,
    )
    place = squares.site("A", task)
    expected = place.network()
    images, targets, _ = next(iter(place.batches("train", 0, "model", 0)))
    loss = (
        place.loss(expected(images[:6]), targets[:6])
        + place.loss(expected(images[6:]), targets[6:])
    ) / 2
    gradients = torch.autograd.grad(loss, trainable(expected))
    for swap in (True, False):
        network = place.network()
        MetaLoss(network, place.loss, lambda theta, _: theta, swap=swap)(
            network, images, targets
        ).backward()
        pairs = zip(trainable(network), gradients, strict=True)
        assert (
            all(
                p.grad is not None and torch.allclose(p.grad, g, rtol=1e-4, atol=1e-6)
                for p, g in pairs
            )
            is swap
        )
