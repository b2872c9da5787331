"""The loops that FedSM's Table 6 compares, one round of each by hand, and the server's Adam against torch's."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.small_tasks import stacked
from medflare.core.states import StateDict, copy_state
from medflare.data.loading import Batch
from medflare.methods.fedsm.formulas import adam_step
from medflare.methods.fedsm.personalization import train_apfl, train_per_fedavg, train_pfedme
from medflare.methods.fedsm.server import FedSMServer
from medflare.methods.fedsm.site import FedSMSite
from medflare.training.epochs import epochs, trainable
from medflare.training.site import Site
from methods import squares

RATE = 0.05


def site_of(batch_size: int) -> Site:
    """Twelve images, without layers that remember anything."""
    network = squares.WITHOUT_BATCH_NORM.network
    return squares.site("A", squares.task(network=network, batch_size=batch_size, optimizer={"name": "sgd", "lr": RATE}))


def batches_of(site: Site) -> list[Batch]:
    return [batch for epoch in epochs(site, 0, "personal") for batch in epoch]


def network_of(site: Site, shift: float = 0.0) -> Any:
    network = site.network()
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1 + shift)
    return network.train()


def gradients(site: Site, weights: Sequence[Tensor], batch: Batch) -> list[Tensor]:
    """Of the task's loss at these weights."""
    network = network_of(site)
    with torch.no_grad():
        for own, weight in zip(trainable(network), weights, strict=True):
            own.copy_(weight)
    return list(torch.autograd.grad(site.loss(network(batch.images), batch.targets), trainable(network)))


def copied(model: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in trainable(model)]


def assert_at(model: nn.Module, expected: Sequence[Tensor]) -> None:
    for found, weight in zip(trainable(model), expected, strict=True):
        torch.testing.assert_close(found.detach(), weight, rtol=1e-5, atol=1e-6)


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=rate)


def test_pfedme_descends_to_a_proximal_point_and_w_goes_there() -> None:
    site = site_of(batch_size=12)
    (batch,) = batches_of(site)
    shared, personal = network_of(site), network_of(site, shift=0.1)
    origin, theta = copied(shared), copied(personal)
    train_pfedme(shared, personal, site, 0, sgd(personal, 0.05), strength=3.0, inner_steps=2)
    for _ in range(2):
        theta = [t - 0.05 * (g + 3.0 * (t - w)) for t, w, g in zip(theta, origin, gradients(site, theta, batch), strict=True)]
    assert_at(personal, theta)
    assert_at(shared, theta)


def test_per_fedavg_takes_the_second_batchs_gradient_at_the_adapted_model() -> None:
    """θ' is the optimizer's own step from the moments that there are; the moments are those of the outer gradients alone."""
    site = site_of(batch_size=6)
    first, second = batches_of(site)
    model = network_of(site)
    start = copied(model)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1, momentum=0.5)
    for weight in trainable(model):
        optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, 0.2)
    train_per_fedavg(model, site, 0, optimizer)
    adapted = [w - 0.1 * (0.1 + g) for w, g in zip(start, gradients(site, start, first), strict=True)]
    outer = gradients(site, adapted, second)
    assert_at(model, [w - 0.1 * (0.1 + g) for w, g in zip(start, outer, strict=True)])
    for weight, g in zip(trainable(model), outer, strict=True):
        torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], 0.1 + g, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("personalization", ["perfedavg", "pfedme"])
def test_the_shared_model_learns_at_the_defaults(personalization: str) -> None:
    """Plain steps of 0.001 beside a task with Adam left it where it was, and training loss with it."""
    task = squares.task(local_epochs=4, optimizer={"name": "adam", "lr": 0.005})
    log, _, algorithms = squares.federation(FedSMSite, FedSMServer, task, rounds=5, personalization=personalization, gamma=0.5)
    algorithm, start = algorithms["A"], log[0].outgoing["A"].states

    def moved(entry: str) -> float:
        trained = log[4].replies["A"].states[entry]
        return float(
            sum((trained[name] - start[entry][name]).square().sum() for name, _ in algorithm.site.network().named_parameters()) ** 0.5
        )

    def training_loss(state: StateDict) -> float:
        network, images = algorithm.frozen(state), stacked(algorithm.site.data.train)
        return float(algorithm.site.loss(network(images.images), images.targets))

    assert moved("meta") > 0.1 * moved("model") > 0
    before, after = training_loss(start["meta"]), training_loss(log[4].replies["A"].states["meta"])
    assert after < 0.8 * before


def test_apfl_learns_through_the_mixture() -> None:
    """v <- v - η α ∇f(v̄); running statistics are those that v̄ collected."""
    site = site_of(batch_size=12)
    (batch,) = batches_of(site)
    local, shared = network_of(site, shift=0.3), network_of(site)
    v, w = copied(local), copied(shared)
    slope = gradients(site, [0.25 * a + 0.75 * b for a, b in zip(v, w, strict=True)], batch)
    workspace = network_of(site)
    start, anchor = (copy_state(network.state_dict()) for network in (local, shared))
    trained, mixture = train_apfl(workspace, start, anchor, site, 0, share=0.25)
    assert_at(workspace, [a - RATE * 0.25 * g for a, g in zip(v, slope, strict=True)])
    for name, weight in shared.named_parameters():
        torch.testing.assert_close(mixture[name], 0.25 * trained[name] + 0.75 * weight.detach())


def test_the_servers_adam_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=0.01)
    state: StateDict = {"w": weight.detach().clone(), "buffer": torch.tensor(3)}
    moments: dict[str, StateDict] = {name: {"w": torch.zeros(5, dtype=torch.float64)} for name in ("exp_avg", "exp_avg_sq")}
    for step in range(1, 6):
        weight.grad = torch.randn(5, generator=generator, dtype=torch.float64) * (step != 3)  # one step without a slope
        optimizer.step()
        state, moments = adam_step(state, {"w": weight.grad}, moments, step, rate=0.01)
        torch.testing.assert_close(state["w"], weight.detach())
    assert state["buffer"] == 3
