"""RSC, FedSR, MixStyle and DDAIG: formulas by hand, degenerate cases, what each moves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn import functional

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import weighted_mean
from medflare.methods.families.local_terms.ddaig import DDAIGServer, DDAIGSite
from medflare.methods.families.local_terms.features import (
    Distributions,
    FedSRSite,
    RSCHyper,
    RSCSite,
    challenge,
    class_indices,
    gaussian_kl,
    largest,
)
from medflare.methods.families.local_terms.mixstyle import MixStyleSite, early_blocks, mix_styles
from medflare.methods.fedavg.site import FedAvgSite
from medflare.networks.catalogue import build_network
from methods import squares

KINDS = ["segmentation", "classification"]
LR = 0.05
ONE_STEP: dict[str, Any] = {"batch_size": 12, "optimizer": {"name": "sgd", "lr": LR}}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- RSC -------------------------------------------------------------------------------------------


def test_largest_entries() -> None:
    values = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert largest(values, 0.4).tolist() == [[True, False, False], [False, True, False]]
    assert not largest(values, 0.3).any() and largest(values, 1.0).all()


def test_rsc_mutes_the_channel_of_the_true_class() -> None:
    """The gradient of a linear head's true logit is the class's row of weights."""
    weight = torch.tensor([[4.0, 0.0, 1.0], [0.0, 2.0, 1.0], [0.0, 0.0, 3.0]])
    features = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.1]])
    labels = torch.tensor([[[0], [1], [2]]])
    task = squares.CLASSIFICATION

    def mask(batch_share: float) -> list[list[bool]]:
        hyper = RSCHyper(feature_share=0.4, batch_share=batch_share)
        return challenge(features, lambda z: z @ weight.T, labels, task, hyper).tolist()

    assert mask(1.0) == [[False, True, True], [True, False, True], [True, True, False]]
    # Image 0 loses 0.88 - 0.11 of its true class, the others less.
    assert mask(0.4) == [[False, True, True], [True, True, True], [True, True, True]]


def test_rsc_of_a_sigmoid_mutes_by_the_sign_of_the_label() -> None:
    weight = torch.tensor([[2.0, 0.0, -1.0]])
    hyper = RSCHyper(feature_share=0.4, batch_share=1.0)
    mask = challenge(
        torch.ones(2, 3),
        lambda z: z @ weight.T,
        torch.tensor([[[1], [0]]]),
        squares.BINARY_CLASSIFICATION,
        hyper,
    )
    assert mask.tolist() == [[False, True, True], [True, True, False]]


@pytest.mark.parametrize("kind", KINDS)
def test_rsc_that_mutes_nothing_is_fedavg(kind: str) -> None:
    task = squares.task(kind)
    plain, _ = squares.trained(FedAvgSite, task)
    assert squares.equal(squares.trained(RSCSite, task, feature_share=0.0)[0], plain)
    assert squares.equal(squares.trained(RSCSite, task, batch_share=0.0)[0], plain)
    assert not squares.equal(squares.trained(RSCSite, task)[0], plain)


def test_the_body_of_rsc_learns_from_enough_patients() -> None:
    """Muted images give it no gradient: with one other in a batch, its step is of that patient."""
    task = squares.task("classification", **ONE_STEP)
    for batch_share, learning in ((0.95, 1), (0.5, 6), (1.0, 0)):
        rsc = squares.algorithm(RSCSite, "A", task, feature_share=1.0, batch_share=batch_share)
        model = rsc.network("model", squares.start(task))
        images, targets, _ = next(rsc.site.ordered("train", 12))
        images.requires_grad_()
        rsc.round_loss(model, 0)(model, images, targets).backward()
        assert images.grad is not None
        assert int(images.grad.flatten(1).any(dim=1).sum()) == learning
        rsc.site.minimum_patients = 5
        if learning == 1:
            with pytest.raises(ConfigError, match="fewer patients than its minimum_patients"):
                rsc.round_loss(model, 0)
        else:
            rsc.round_loss(model, 0)
    usual = squares.algorithm(RSCSite, "A", task)
    usual.site.minimum_patients = 12
    usual.round_loss(usual.network("model", squares.start(task)), 0)


def test_labels_of_a_smaller_feature_map() -> None:
    for task in (squares.MULTILABEL, squares.MULTICLASS):
        site = squares.site("A", task)
        targets = site.data.train.targets[:2]
        labels = class_indices(site, targets, torch.zeros(2, 4, 8, 8))
        maps = targets.reshape(2, len(labels), 16, 16)[..., ::2, ::2]
        assert labels.equal(maps.transpose(0, 1).flatten(2).long())


@pytest.mark.parametrize("method", [RSCSite, FedSRSite])
def test_head_hooks_serve_every_target(method: Any) -> None:
    tasks = (squares.MULTILABEL, squares.MULTICLASS, squares.BINARY_CLASSIFICATION)
    for task in tasks:
        state, meta = squares.trained(method, task)
        assert meta["loss"] > 0 and not squares.equal(state, squares.trained(FedAvgSite, task)[0])


@pytest.mark.parametrize("method", [RSCSite, FedSRSite, MixStyleSite])
def test_a_compiled_network_is_refused(method: Any) -> None:
    algorithm = squares.algorithm(method)
    model = algorithm.network("model", squares.start())
    object.__setattr__(algorithm.site.computing, "compiled", True)
    with pytest.raises(ConfigError, match="leave compile out"):
        algorithm.fit(model, algorithm.site.optimizer(model.parameters()), 0)


# -- FedSR -----------------------------------------------------------------------------------------


def test_kl_is_that_of_torch() -> None:
    mu = normal(4, 5)
    r_mu = normal(4, 5, seed=1)
    sigma = normal(4, 5, seed=2).exp()
    r_sigma = normal(4, 5, seed=3).exp()
    expected = kl_divergence(
        Independent(Normal(mu, sigma), 1), Independent(Normal(r_mu, r_sigma), 1)
    )
    torch.testing.assert_close(gaussian_kl(mu, sigma, r_mu, r_sigma), expected)


def test_divergence_is_from_the_class_of_each_position() -> None:
    own = Distributions(2, 2, 3)
    with torch.no_grad():
        own.mean.copy_(normal(2, 2, 3))
    labels = torch.tensor([[[0, 1]], [[1, 1]]])  # two groups, one image, two positions
    mu = torch.stack([own.mean[0, 0], own.mean[0, 1]]).unsqueeze(0)
    sigma = functional.softplus(torch.ones(1, 2, 3))
    of_second = gaussian_kl(mu, sigma, own.mean[1, 1], sigma).sum()
    torch.testing.assert_close(own.divergence(mu, sigma, labels), of_second / 4)


def test_fedsr_shrinks_features_and_keeps_its_distributions() -> None:
    def trained(**hyper: Any) -> tuple[float, Any, Message]:
        task = squares.task("classification", local_epochs=6)
        site = squares.algorithm(FedSRSite, task=task, **hyper)
        reply = site.perform("train", 0, Message({"model": squares.start(task)}))
        network = site.network("model", reply.states["model"])
        with torch.no_grad():
            features, _ = network.features_and_output(site.site.data.train.images)
        return float(features.norm()), site, reply

    free, _, _ = trained(l2r=0.0)
    short, site, reply = trained(l2r=5.0)
    assert short < 0.8 * free
    assert set(reply.states) == {"model"} and "distributions" in site.memory.states
    assert site.distributions["mean"].any(), "r_k is trained"


def test_fedsr_continues_its_distributions() -> None:
    site = squares.algorithm(FedSRSite)
    first = squares.start()
    site.perform("train", 0, Message({"model": first}))
    other = squares.algorithm(FedSRSite)
    other.perform("train", 0, Message({"model": first}))
    other.distributions = None
    states = [each.perform("train", 1, Message({"model": first})).states for each in (site, other)]
    assert not squares.equal(states[0]["model"], states[1]["model"])


# -- MixStyle --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [2, 3])
def test_styles_by_hand(dims: int) -> None:
    x = normal(2, 3, *[4] * dims)
    order = torch.tensor([1, 0])
    torch.testing.assert_close(mix_styles(x, order, torch.ones(2)), x, rtol=1e-5, atol=1e-5)
    swapped = mix_styles(x, order, torch.zeros(2))
    axes = tuple(range(2, 2 + dims))
    torch.testing.assert_close(swapped.mean(axes), x[order].mean(axes), rtol=1e-4, atol=1e-5)
    half = mix_styles(x, order, torch.full((2,), 0.25))
    deviation = x.std(axes, correction=0)
    expected = 0.25 * deviation + 0.75 * deviation[order]
    torch.testing.assert_close(half.std(axes, correction=0), expected, rtol=1e-4, atol=1e-5)


def test_no_gradient_through_the_style() -> None:
    x = normal(2, 1, 2, 2).requires_grad_()
    mix_styles(x, torch.tensor([1, 0]), torch.ones(2)).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "dims", "count"),
    [
        ({"name": "unet", "channels": [4, 8]}, 2, 1),
        ({"name": "unet", "channels": [4, 8, 16]}, 3, 1),
        ({"name": "small_cnn", "channels": [4, 8, 8, 8]}, 2, 2),
        ({"name": "vgg16_slim", "dimension": 8}, 2, 5),
        ({"name": "resnet18"}, 2, 2),
        ({"name": "SegResNet", "init_filters": 8}, 2, 2),
        ({"name": "BasicUNet", "features": [4, 4, 4, 4, 4, 4]}, 3, 3),
        ({"name": "DenseNet", "block_config": [1, 1], "init_features": 4}, 2, 2),
    ],
)
def test_early_blocks_run(spec: dict[str, Any], dims: int, count: int) -> None:
    """Of our networks and MONAI's: the first of them runs, and gives a feature map."""
    network = build_network(spec, 1, 2, dims, [32] * dims)
    blocks = early_blocks(network.body)
    outputs: list[Any] = []
    handle = blocks[0].register_forward_hook(lambda *call: outputs.append(call[2]))
    network.eval()(torch.zeros(1, 1, *[32] * dims))
    handle.remove()
    assert len(blocks) == count
    assert [output.ndim for output in outputs] == [2 + dims]


@pytest.mark.parametrize("kind", KINDS)
def test_mixstyle_of_probability_zero_is_fedavg(kind: str) -> None:
    task = squares.task(kind)
    plain, _ = squares.trained(FedAvgSite, task)
    assert squares.equal(squares.trained(MixStyleSite, task, probability=0.0)[0], plain)
    mixed, _ = squares.trained(MixStyleSite, task, probability=1.0)
    assert not squares.equal(mixed, plain)
    assert squares.equal(mixed, squares.trained(MixStyleSite, task, probability=1.0)[0])


def test_evaluation_never_mixes() -> None:
    """Hooks go with the training, and a frozen body, which is in evaluation mode, is not mixed."""
    site = squares.algorithm(MixStyleSite, probability=1.0)
    model = site.network("model", squares.start())
    site.fit(model, site.site.optimizer(model.parameters()), 0)
    for layer in model.modules():
        assert not layer._forward_hooks
    with model.frozen(["body"]):
        heads = []
        for method in (MixStyleSite, FedAvgSite):
            algorithm = squares.algorithm(method)
            model.load_state_dict(squares.start())
            optimizer = algorithm.site.optimizer(model.head.parameters())
            algorithm.fit(model, optimizer, 0)
            heads.append({name: w.clone() for name, w in model.head.state_dict().items()})
    assert squares.equal(*heads)


def test_mixstyle_refuses_a_network_without_convolutions() -> None:
    task = squares.task("classification", network={"name": "mlp"})
    with pytest.raises(ConfigError, match="no convolution"):
        squares.algorithm(MixStyleSite, task=task)


# -- DDAIG -----------------------------------------------------------------------------------------


def test_ddaig_without_generated_images_is_fedavg() -> None:
    for kind in KINDS:
        task = squares.task(kind)
        played = squares.run("ddaig", task, rounds=1, alpha=0.0)
        reply = played.log[0].replies["A"].states
        assert squares.equal(reply["model"], squares.trained(FedAvgSite, task)[0])
        assert not squares.equal(reply["networks"], played.log[0].outgoing["A"].states["networks"])


def test_ddaig_step_by_hand() -> None:
    """One batch at site B, whose domain is 1."""
    task = squares.task("classification", **ONE_STEP)
    members = squares.algorithms(DDAIGSite, task)
    server = squares.server(DDAIGServer, algorithms=members)
    site = members["B"]
    request = server.configure(server.steps()[0], "B")
    reply = site.perform("train", 0, request)

    network = site.network("expected", request.states["model"])
    data = site.site.data.train
    images = data.images
    domain = torch.ones(12, dtype=torch.long)
    expected = type(site.networks)([*site.networks])
    expected.load_state_dict(request.states["networks"])
    generator, domains = expected
    unit = images.std((0, 2, 3), correction=0).view(1, 1, 1, 1)
    x_hat = images + 0.3 * unit * generator(images)
    label = functional.cross_entropy(network(x_hat), data.targets)
    adversarial = label - functional.cross_entropy(domains(x_hat), domain)
    descend(adversarial, generator)
    descend(functional.cross_entropy(domains(images), domain), domains)
    x_hat = (images + 0.3 * unit * generator(images)).detach()
    losses = [functional.cross_entropy(network(x), data.targets) for x in (images, x_hat)]
    descend(sum(losses) / 2, network)
    squares.assert_close(reply.states["networks"], dict(expected.state_dict()))
    squares.assert_close(reply.states["model"], dict(network.state_dict()))


def descend(loss: Any, network: nn.Module) -> None:
    weights = list(network.parameters())
    with torch.no_grad():
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.sub_(LR * gradient)


def test_ddaig_moves_running_statistics_by_the_originals() -> None:
    task = squares.task(**ONE_STEP)
    played = squares.run("ddaig", task, rounds=1)
    generated = played.log[0].replies["A"].states["model"]
    plain, _ = squares.trained(FedAvgSite, task)
    different = {name for name in plain if not generated[name].equal(plain[name])}
    assert different
    for name in different:
        assert not ("running" in name or "num_" in name)


def test_ddaig_averages_all_networks() -> None:
    played = squares.run(
        "ddaig", rounds=2, absent=lambda step, name: (name, step.round) == ("B", 1)
    )
    networks = {name: reply.states["networks"] for name, reply in played.log[1].replies.items()}
    assert networks.keys() == {"A", "C"}
    squares.assert_close(
        played.server.networks, weighted_mean(networks, dict.fromkeys(networks, 1.0))
    )
