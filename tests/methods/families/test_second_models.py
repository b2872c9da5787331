"""Second models: each formula by hand, what is FedAvg's bit by bit, and what stays at the site."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.fixture_types import Golden
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods.aggregation import SiteModel
from medflare.methods.catalogue import get_method
from medflare.methods.families.second_models.apfl import APFLSite, apfl_mixture
from medflare.methods.families.second_models.fedrod import FedRoDSite, balance
from medflare.methods.families.second_models.fml import FMLSite
from medflare.methods.families.second_models.perfedavg import PerFedAvgSite, adapt
from medflare.methods.families.second_models.pfedme import (
    PFedMeMean,
    PFedMeServer,
    PFedMeServerHyper,
    PFedMeSite,
    train_pfedme,
)
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.parts import heads
from medflare.methods.parts.class_groups import totals_of_site
from medflare.methods.parts.few_patients import first_batches
from medflare.networks.features import FeatureNetwork
from medflare.training.epochs import trainable
from methods import squares

LR = 0.1
SGD = {"name": "sgd", "lr": LR}
SITES: dict[str, tuple[type[Any], type[Any]]] = {
    "apfl": (APFLSite, FedAvgServer),
    "pfedme": (PFedMeSite, PFedMeServer),
    "perfedavg": (PerFedAvgSite, FedAvgServer),
    "fml": (FMLSite, FedAvgServer),
    "fedrod": (FedRoDSite, FedAvgServer),
}


def one_batch(**changes: Any) -> Any:
    """A task whose rounds are one plain gradient step, without batch normalisation."""
    network = squares.WITHOUT_BATCH_NORM.network
    return squares.task(**{"network": network, "optimizer": SGD, "batch_size": 12, **changes})


def batch_of(algorithm: Any, purpose: str, round: int = 0) -> Any:
    (batch,) = algorithm.site.batches("train", round, purpose, 0)
    return batch


def moved(state: StateDict, by: float) -> StateDict:
    return {name: tensor + by * tensor.sin() for name, tensor in state.items()}


def slopes(algorithm: Any, state: StateDict, loss: Any) -> StateDict:
    """The gradient of loss(network) at a state, by name."""
    network = algorithm.site.network()
    network.load_state_dict(state)
    network.train()
    gradients = torch.autograd.grad(loss(network), trainable(network))
    names = [name for name, _ in network.named_parameters()]
    return dict(zip(names, gradients, strict=True))


def stepped(state: StateDict, slope: StateDict, factor: float = 1.0) -> StateDict:
    return {name: tensor - LR * factor * slope[name] for name, tensor in state.items()}


# -- what all have in common ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("target", ["multiclass", "binary", "multilabel"])
def test_only_the_shared_model_leaves(name: str, target: str) -> None:
    """Also with a site that misses the first round."""
    task = squares.MULTILABEL
    if target == "multiclass":
        task = squares.CLASSIFICATION_WITH_BATCH_NORM
    if target == "binary":
        task = squares.BINARY_CLASSIFICATION
    played = squares.federation(
        *SITES[name], task, absent=lambda step, site: site == "C" and step.round == 0
    )
    for turn in played.log:
        for reply in turn.replies.values():
            assert reply.meta["validation"].keys() == {"global", "personal"}
            assert reply.states.keys() <= {"model"}
    for algorithm in played.algorithms.values():
        models = algorithm.finalize(played.server.configure_final(algorithm.site.name))
        personal = models["deployed"].states["model"]
        assert models["deployed"] is models["personal"]
        assert not squares.equal(personal, models["global"].states["model"])
        for tensor in personal.values():
            assert tensor.isfinite().all()


@pytest.mark.parametrize("name", SITES)
def test_a_site_that_never_trained_uses_the_global_model(name: str) -> None:
    algorithm = squares.algorithm(SITES[name][0], "O", server_class=SITES[name][1])
    assert algorithm.finalize(Message({"model": squares.start()})).keys() == {"global", "deployed"}


# -- APFL -----------------------------------------------------------------------------------------


def test_apfl_keeps_what_the_mixture_collected() -> None:
    four = {"w": torch.tensor(4.0), "mean": torch.tensor(4.0)}
    nothing = {"w": torch.tensor(0.0), "mean": torch.tensor(0.0)}
    assert apfl_mixture(four, nothing, 0.5, ["mean"]) == {
        "w": torch.tensor(2.0),
        "mean": torch.tensor(4.0),
    }


@pytest.mark.parametrize("adaptive", [True, False])
def test_apfl_moves_v_w_and_alpha_as_printed(adaptive: bool) -> None:
    task = one_batch()
    algorithm = squares.algorithm(APFLSite, task=task, alpha=0.3, adaptive=adaptive)
    w = squares.start(task)
    algorithm.local = v = moved(w, 0.2)
    images, targets, _ = batch_of(algorithm, "model")

    def loss(network: nn.Module) -> Tensor:
        return algorithm.site.loss(network(images), targets)

    mixture = {name: 0.3 * v[name] + 0.7 * w[name] for name in w}
    slope = slopes(algorithm, mixture, loss)
    alpha = 0.3
    if adaptive:
        alpha -= LR * float(sum(((v[name] - w[name]) * slope[name]).sum() for name in slope))
        assert abs(alpha - 0.3) > 1e-5
    next_v = stepped(v, slope, 0.3)
    next_w = stepped(w, slopes(algorithm, w, loss))

    reply = algorithm.perform("train", 0, Message({"model": w}))
    assert algorithm.memory.meta["alpha"] == pytest.approx(alpha, abs=1e-6)
    squares.assert_close(reply.states["model"], next_w)
    squares.assert_close(algorithm.local, next_v)
    expected = {name: alpha * next_v[name] + (1 - alpha) * next_w[name] for name in w}
    squares.assert_close(algorithm.personal, expected)


def test_alpha_does_not_decay() -> None:
    """At the first step v is w, so that the gradient of α is 0; moments are continued."""
    decaying = {"name": "adam", "lr": 0.01, "weight_decay": 0.1}
    task = squares.task(optimizer=decaying, batch_size=12)
    algorithm = squares.algorithm(APFLSite, task=task, alpha=0.3)
    algorithm.perform("train", 0, Message({"model": squares.start(task)}))
    assert algorithm.memory.meta["alpha"] == pytest.approx(0.3, abs=1e-6)
    moments = algorithm.memory.states["optimizer/personal"]
    algorithm.perform("train", 1, Message({"model": squares.start(task)}))
    after = algorithm.memory.states["optimizer/personal"]
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in moments.items()
    }
    assert after["0.step"] == 2


def test_apfl_limits_alpha() -> None:
    """A huge step ends at a limit, which depends on the side of w on which v is."""
    task = one_batch(optimizer={"name": "sgd", "lr": 1e6})
    limits = set()
    for by in (0.2, -0.2):
        algorithm = squares.algorithm(APFLSite, task=task, alpha=0.01)
        w = squares.start(task)
        algorithm.local = moved(w, by)
        algorithm.perform("train", 0, Message({"model": w}))
        limits.add(algorithm.memory.meta["alpha"])
    assert limits == {0.0, 1.0}


# -- pFedMe ---------------------------------------------------------------------------------------


def test_pfedme_has_a_bounded_number_of_steps_on_a_batch() -> None:
    """A site looks at its limit of minutes between batches."""
    with pytest.raises(ConfigError, match="inner_steps"):
        get_method("pfedme").check({"inner_steps": 10**9})


def test_pfedme_refuses_steps_that_lead_away_from_the_proximal_point() -> None:
    def train(name: str, rate: float) -> None:
        site = squares.site("A", squares.task(optimizer={"name": name, "lr": rate}), (4, 2, 2))
        shared, personal = site.network(), site.network()
        optimizer = site.optimizer(personal.parameters())
        train_pfedme(shared, personal, site, 0, optimizer, strength=15.0, inner_steps=1)

    train("sgd", 0.05)
    train("adam", 0.1)
    for name in ("sgd", "SGD"):
        with pytest.raises(ConfigError, match=r"a rate of 0\.089 or less"):
            train(name, 0.1)


def test_pfedme_with_adam_is_not_that_of_the_first_batch() -> None:
    """A proximal gradient that is large beside all others divides them: they do not move a weight.
    The first batch has moved each by ±c.
    """
    adam = {"name": "adam", "lr": 1e-3}
    task = squares.task("classification", optimizer=adam, batch_size=1)
    for lam, first_alone in ((1e6, True), (15.0, False)):
        site = squares.site("A", task)
        shared, personal = site.network(), site.network("personal")
        personal.load_state_dict(shared.state_dict())
        start = [weight.detach().clone() for weight in shared.parameters()]
        optimizer = site.optimizer(personal.parameters())
        train_pfedme(shared, personal, site, 0, optimizer, strength=lam, inner_steps=2)
        moves = [(w - old).flatten() for w, old in zip(shared.parameters(), start, strict=True)]
        lengths = torch.cat(moves).abs()
        lengths = lengths[lengths > 1e-6]
        assert (lengths.std() < 0.3 * lengths.mean()) == first_alone
        site.minimum_patients = 5
        train = partial(train_pfedme, shared, personal, site, 0, optimizer, inner_steps=2)
        if first_alone:
            with pytest.raises(ConfigError, match="fewer patients than its minimum_patients"):
                train(strength=lam)
        else:
            train(strength=lam)


def test_pfedme_moves_w_a_part_of_the_way() -> None:
    task = one_batch()
    algorithm = squares.algorithm(PFedMeSite, task=task, lam=2.0, inner_steps=2, share=0.25)
    w = squares.start(task)
    images, targets, _ = batch_of(algorithm, "personal")

    def loss(network: nn.Module) -> Tensor:
        return algorithm.site.loss(network(images), targets)

    theta = w
    for _ in range(2):
        slope = slopes(algorithm, theta, loss)
        pulled = {name: slope[name] + 2.0 * (theta[name] - w[name]) for name in w}
        theta = stepped(theta, pulled)
    reply = algorithm.perform("train", 0, Message({"model": w}))
    squares.assert_close(algorithm.personal, theta)
    expected = {name: w[name] - 0.25 * (w[name] - theta[name]) for name in w}
    squares.assert_close(reply.states["model"], expected)


@pytest.mark.parametrize(("beta", "value"), [(1.0, 4.0), (0.5, 3.0), (2.0, 6.0)])
def test_pfedmes_server_step(beta: float, value: float) -> None:
    mean = PFedMeMean(PFedMeServerHyper(beta=beta, weighting="uniform"))
    models = {site: SiteModel({"w": torch.tensor([x])}) for site, x in (("A", 3.0), ("B", 5.0))}
    assert mean.shared(models, 0, {"w": torch.tensor([2.0])}) == {"w": torch.tensor([value])}
    assert mean.shared(models, 0) == {"w": torch.tensor([4.0])}


def test_running_statistics_are_averaged_whatever_beta_is() -> None:
    norm = nn.BatchNorm2d(1)
    start = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    sent = {**start, "weight": torch.tensor([3.0]), "running_var": torch.tensor([0.25])}
    mean = PFedMeMean(PFedMeServerHyper(beta=2.0))
    mean.trained = {"weight", "bias"}
    moved_model = mean.shared({"A": SiteModel(sent)}, 0, start)
    assert moved_model["weight"] == torch.tensor([5.0])  # 1 + 2 (3 - 1)
    assert moved_model["running_var"] == torch.tensor([0.25])


# -- Per-FedAvg -----------------------------------------------------------------------------------


def test_perfedavg_deploys_the_shared_model_after_a_step() -> None:
    task = one_batch()
    played = squares.run("perfedavg", task, selection="last")
    algorithm = played.algorithms["B"]
    images, targets, _ = batch_of(algorithm, "adapt", round=2)
    slope = slopes(
        algorithm, played.model, lambda network: algorithm.site.loss(network(images), targets)
    )
    models = algorithm.finalize(played.server.configure_final("B"))
    squares.assert_close(models["personal"].states["model"], stepped(played.model, slope))


@pytest.mark.parametrize(("minimum", "count"), [(0, 1), (3, 3)])
def test_a_personal_model_is_no_step_of_fewer_patients_than_the_site_allows(
    minimum: int, count: int
) -> None:
    """FedSM sends it, and the model that it is a step from is known: one patient's picture could be computed."""
    network = {"name": "unet", "channels": [4, 8], "norm": "instance"}
    task = squares.task(batch_size=1, optimizer=SGD, network=network)
    site = squares.site("A", task)
    site.minimum_patients = minimum
    batches = [*site.batches("train", 2, "adapt", 0)][:count]
    before = copy_state(site.network().state_dict())
    expected = site.network().train()
    losses = [site.loss(expected(batch.images), batch.targets) for batch in batches]
    slope = torch.autograd.grad(torch.stack(losses).mean(), trainable(expected))
    model = site.network()
    adapt(model, site, 2, site.optimizer(trainable(model)))
    for (name, weight), part in zip(model.named_parameters(), slope, strict=True):
        squares.assert_close({name: weight.detach()}, {name: before[name] - LR * part})


def test_more_epochs_follow_where_one_has_too_few_patients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As drawing with replacement repeats images."""
    site = squares.site("A", squares.task(batch_size=1))
    images = [*site.batches("train", 0, "adapt", 0)]
    epochs = [[images[0]] * 4, images]
    monkeypatch.setattr(site, "batches", lambda *keys: epochs[keys[-1]])
    site.minimum_patients = 3
    taken = first_batches(site, 0, "adapt")
    assert len(taken) > 4
    patients = site.data.train.patients
    assert len({patients[int(batch.index)] for batch in taken}) == 3


# -- FML ------------------------------------------------------------------------------------------


def test_fml_is_half_loss_half_divergence() -> None:
    """Both models after a step, with the divergence of Bernoulli variables written down anew."""
    task = one_batch()
    algorithm = squares.algorithm(FMLSite, task=task, alpha=0.25, beta=0.75)
    d = squares.start(task)
    algorithm.personal = p = moved(d, 0.3)
    images, targets, _ = batch_of(algorithm, "model")

    def loss(part: float, teacher: StateDict) -> Any:
        other = algorithm.site.network("teacher")
        other.load_state_dict(teacher)
        t = other.train()(images).sigmoid().detach()

        def value(network: nn.Module) -> Tensor:
            s = network(images).sigmoid()
            divergence = t * (t / s).log() + (1 - t) * ((1 - t) / (1 - s)).log()
            term = algorithm.site.loss(network(images), targets)
            return part * term + (1 - part) * divergence.mean()

        return value

    next_p = stepped(p, slopes(algorithm, p, loss(0.25, d)))
    next_d = stepped(d, slopes(algorithm, d, loss(0.75, p)))
    reply = algorithm.perform("train", 0, Message({"model": d}))
    squares.assert_close(algorithm.personal, next_p)
    squares.assert_close(reply.states["model"], next_d)


# -- FedRoD ---------------------------------------------------------------------------------------


def test_balanced_softmax_of_the_published_code(golden: Golden) -> None:
    numbers = golden("baselines")
    counts = torch.from_numpy(numbers["bs/counts"]).reshape(1, -1)
    logits = torch.from_numpy(numbers["bs/logits"])
    loss = functional.cross_entropy(
        logits + balance(counts, multiclass=True), torch.from_numpy(numbers["y"]).long()
    )
    assert float(loss) == pytest.approx(float(numbers["bs/loss"]), rel=1e-5)


def test_balance_of_a_sigmoid_is_that_of_two_classes() -> None:
    counts = torch.tensor([[30, 10], [5, 0]])
    shift = balance(counts, multiclass=False)
    z = torch.tensor(0.4)
    pair = torch.stack([torch.tensor(0.0), z]) + counts[0].log()
    torch.testing.assert_close((z + shift[0]).sigmoid(), pair.softmax(dim=0)[1])
    assert shift[1].isfinite()


def test_the_balance_is_that_of_the_images_as_sampling_draws_them() -> None:
    task = squares.task("classification", sampling="balanced")
    algorithm = squares.algorithm(FedRoDSite, task=task, missing=2)
    assert algorithm.site.class_counts().tolist() == [8, 4, 0]
    assert totals_of_site(algorithm.site).tolist() == [[6.0, 6.0, 0.0]]
    shift = algorithm._shift()
    assert shift[0] == shift[1]
    pixels = squares.algorithm(FedRoDSite, task=squares.task(sampling="balanced")).site
    assert totals_of_site(pixels).tolist() == [pixels.class_counts().tolist()]


@pytest.mark.parametrize(
    ("weights", "target"), [([1.0, 3.0, 2.0], {}), ([3.0], {"target": "binary"})], ids=str
)
def test_class_weights_of_the_loss_do_not_balance_a_second_time(
    weights: list[float], target: dict[str, Any]
) -> None:
    """Without features, the balanced generic head prefers no class."""
    labels = {"labels": ["bright"]} if target else {}
    task = squares.task(
        "classification", loss={"name": "ce", "weights": weights}, **target, **labels
    )
    algorithm = squares.algorithm(FedRoDSite, task=task, counts=(15, 4, 5), missing=2)
    targets = algorithm.site.data.train.targets
    logits = torch.zeros(len(targets), task.outputs, requires_grad=True)
    algorithm.site.loss(logits + algorithm._shift(), targets).backward()
    assert logits.grad is not None
    assert logits.grad.sum(dim=0).abs().max() < 1e-6


def test_fedrod_steps_by_hand() -> None:
    """Generic and personal head after a step of one site with unequal classes."""
    task = squares.task("classification", optimizer=SGD, batch_size=12)
    algorithm = squares.algorithm(FedRoDSite, task=task, missing=2)
    start = squares.start(task)
    images, targets, _ = batch_of(algorithm, "model")
    counts = torch.tensor([8.0, 4.0, 1e-6])

    def balanced(network: nn.Module) -> Tensor:
        return functional.cross_entropy(network(images) + counts.log(), targets)

    def plain(network: nn.Module) -> Tensor:
        return functional.cross_entropy(network(images), targets)

    shared = stepped(start, slopes(algorithm, start, balanced))
    slope = slopes(algorithm, start, plain)  # φ is 0, so ψ(z) + φ(z) is the generic output
    reply = algorithm.perform("train", 0, Message({"model": start}))
    squares.assert_close(reply.states["model"], shared)
    expected = dict(shared)
    for name in algorithm.head:
        expected[f"head.{name}"] = shared[f"head.{name}"] - LR * slope[f"head.{name}"]
    squares.assert_close(algorithm.personal, expected)


def test_the_deployed_network_adds_both_heads() -> None:
    played = squares.run("fedrod")
    algorithm = played.algorithms["A"]
    images = algorithm.site.data.train.images[:2]
    generic = copy_state(played.log[1].replies["A"].states["model"])
    network = algorithm.frozen(generic)
    features, logits = network.features_and_output(images)
    network.head.load_state_dict(algorithm.head)
    expected = logits + network.head(features)
    actual = algorithm.frozen(algorithm.personal, "sum")(images)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for weight in algorithm.head.values():
        assert weight.abs().sum() > 0


@pytest.mark.parametrize(
    "head",
    [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
    ],
    ids=["not linear", "two layers"],
)
def test_fedrod_refuses_heads_that_cannot_be_added(
    monkeypatch: pytest.MonkeyPatch, head: nn.Module
) -> None:
    body = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    network = FeatureNetwork(body, head).to("meta")
    monkeypatch.setattr(heads, "meta_network", lambda task: network)
    with pytest.raises(ConfigError, match="choose another network"):
        FedRoDSite.check(squares.CLASSIFICATION, FedRoDSite.Hyper(), PFedMeServerHyper())
