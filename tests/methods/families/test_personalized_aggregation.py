"""FedAMP, FedMTL, FedFomo and IFCA: their formulas, their degenerate cases, and what they move."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state, weighted_mean
from medflare.methods.base import Step
from medflare.methods.families.personalized_aggregation.anchored import (
    AnchoredSite,
    FedAMPServer,
    FedAMPServerHyper,
    FedAMPSite,
    FedMTLServer,
    attention,
    attraction,
    mean_relationship,
    mixtures,
    pairwise_squared_distances,
    related,
)
from medflare.methods.families.personalized_aggregation.fedfomo import (
    FedFomoServer,
    FedFomoSite,
    first_order_weights,
)
from medflare.methods.families.personalized_aggregation.ifca import CLUSTERS, IFCAServer, IFCASite
from medflare.methods.fedavg import FedAvgSite
from medflare.methods.fedavg.site import MODEL
from medflare.training.epochs import trainable
from methods import squares

LR = 0.1
POINTS = {"A": [0.0, 0.0], "B": [1.0, 0.0], "C": [0.0, 3.0]}


def points() -> dict[str, StateDict]:
    """Models of two weights and one running statistic, far from each other."""
    models = {}
    for index, (site, point) in enumerate(POINTS.items()):
        statistic = torch.tensor([100.0 * index])
        models[site] = {"w": torch.tensor(point), "running_mean": statistic}
    return models


def trained(played: Any, site: str) -> StateDict:
    """The site's model after the last round of training."""
    turns = [turn for turn in played.log if turn.step.phase == "train"]
    state: StateDict = turns[-1].replies[site].states["model"]
    return state


def alone(name: str, rounds: int) -> StateDict:
    """Training alone: each round from the last one's model."""
    algorithm = squares.algorithm(FedAvgSite, name)
    state = squares.start()
    for round in range(rounds):
        state = algorithm.perform("train", round, Message.of({MODEL: state}))[MODEL]
    return state


# -- FedAMP ----------------------------------------------------------------------------------------


def test_attention_by_hand() -> None:
    squared = torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 10.0], [9.0, 10.0, 0.0]])
    xi = attention(squared, alpha=0.5, sigma=2.0)
    near = 0.25 * math.exp(-0.5)
    far = 0.25 * math.exp(-4.5)
    assert xi[0].tolist() == pytest.approx([1 - near - far, near, far])
    assert xi.sum(dim=1).tolist() == pytest.approx([1.0] * 3)


def attracted(states: dict[str, StateDict], **hyper: Any) -> tuple[Tensor, float]:
    squared = pairwise_squared_distances(list(states.values()), ["w"])
    return attraction(squared, FedAMPServerHyper(**hyper))


def test_fedamp_descends_the_attraction() -> None:
    """u_k = w_k - α/2 of the gradient of Σ A by autograd: the factor 2 is in α."""
    xi, strength = attracted(points(), lam=3.0, sigma=2.0, step=0.25)
    anchors = mixtures(points(), xi)
    w = torch.tensor(list(POINTS.values()), dtype=torch.float64, requires_grad=True)
    total = torch.zeros(())
    for j, k in ((0, 1), (0, 2), (1, 2)):
        total = total + 1 - torch.exp(-(w[j] - w[k]).square().sum() / 2.0)
    (gradient,) = torch.autograd.grad(total, w)
    expected = w - 0.5 / 2 * gradient  # α = 0.25 σ
    for row, site in enumerate(POINTS):
        assert anchors[site]["w"].tolist() == pytest.approx(expected[row].tolist())
    assert strength == 3.0 / 0.5
    assert anchors["A"]["running_mean"].item() == pytest.approx(
        100 * attention_of("A", "B") + 200 * attention_of("A", "C"), rel=1e-5
    )


def attention_of(site: str, other: str) -> float:
    distance = sum((a - b) ** 2 for a, b in zip(POINTS[site], POINTS[other], strict=True))
    return 0.25 * math.exp(-distance / 2.0)


def test_by_default_equal_models_get_their_mean_and_near_ones_attract_more() -> None:
    xi, _ = attracted({site: {"w": torch.ones(2)} for site in "ABC"})
    assert xi.diagonal().tolist() == pytest.approx([1 / 3] * 3)
    xi, _ = attracted(points())
    anchors = mixtures(points(), xi)
    towards_b, towards_c = anchors["A"]["w"] / torch.tensor([1.0, 3.0])
    assert towards_b > 2 * towards_c > 0


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_term_of_fedamp_does_not_grow_as_models_come_closer(scale: float) -> None:
    """Without sigma, lam is in units of the mean squared distance: the strength is lam K."""
    models = {site: {"w": scale * torch.tensor(point)} for site, point in POINTS.items()}
    _, strength = attracted(models, lam=0.5)
    assert strength == pytest.approx(0.5 * 3)


def test_fedamp_starts_at_the_anchor() -> None:
    played = squares.run("fedamp", rounds=2, lam=1e6, sigma=1e9)
    request = played.log[1].outgoing["A"]
    mean = weighted_mean(
        {site: reply.states["model"] for site, reply in played.log[0].replies.items()},
        dict.fromkeys("ABC", 1.0),
    )
    squares.assert_close(request.states["anchor"], mean)
    request.meta["strength"] = 0.0
    moved = squares.algorithm(FedAMPSite).perform("train", 1, request).states["model"]
    request.states["model"] = request.states.pop("anchor")
    from_mean = squares.algorithm(AnchoredSite, server_class=FedMTLServer)
    assert squares.equal(moved, from_mean.perform("train", 1, request).states["model"])


def test_a_small_sigma_of_fedamp_leaves_one_other_site_in_an_anchor() -> None:
    """From its anchor a site then has that site's model: hospitals may demand more of them."""
    random = torch.Generator().manual_seed(0)
    start, near, far = torch.randn(3, 50, generator=random, dtype=torch.float64)
    states = {"A": {"w": start}, "B": {"w": start + near}, "C": {"w": start + 3 * far}}
    squared = pairwise_squared_distances(list(states.values()), ["w"])
    shares = {}
    for sigma in (None, squared[0, 1].item() / 5):
        xi, _ = attraction(squared, FedAMPServerHyper(sigma=sigma))
        shares[sigma] = (xi[0, 1] / xi[0, 1:].sum()).item()
        anchor = mixtures(states, xi)["A"]["w"]
        similar = torch.corrcoef(torch.stack([anchor - start, near]))[0, 1].item()
        assert (similar > 0.999) == (sigma is not None)
        fewest = FedAMPServer.fewest_combined(FedAMPServerHyper(sigma=sigma), 3)
        assert fewest == (3 if sigma is None else 2)
    assert shares[None] < 0.95 < 0.999 < max(shares.values())


def test_fedamp_refuses_more_than_all_of_the_weight() -> None:
    squares.server(FedAMPServer, step=0.5)
    with pytest.raises(ConfigError, match=r"at most 0\.5"):
        squares.server(FedAMPServer, step=0.6)


# -- FedMTL ----------------------------------------------------------------------------------------


def test_the_anchor_is_the_gradient_of_the_relationship() -> None:
    """λ1 tr(W Ω Wᵀ) by autograd, and its value as the paper's sum of squares."""
    anchors, strength = related(points(), lam=0.3)
    columns = torch.tensor(list(POINTS.values()), dtype=torch.float64).T.requires_grad_()
    value = 0.3 * torch.trace(columns @ mean_relationship(3) @ columns.T)
    mean = columns.mean(dim=1, keepdim=True)
    assert value.item() == pytest.approx(0.3 * (columns - mean).square().sum().item())
    (gradient,) = torch.autograd.grad(value, columns)
    for index, site in enumerate(POINTS):
        term = strength * (points()[site]["w"] - anchors[site]["w"])
        assert term.tolist() == pytest.approx(gradient[:, index].tolist(), abs=1e-6)


def test_fedmtl_by_hand() -> None:
    """The second round: w_k <- w_k - η (∇F_k + 2 λ1 (2/3) (w_k - mean of the others))."""
    task = squares.task(optimizer={"name": "sgd", "lr": LR})
    played = squares.run("fedmtl", task, lam=0.7)
    first = {site: reply.states["model"] for site, reply in played.log[0].replies.items()}
    algorithm = squares.algorithm(AnchoredSite, "B", task, server_class=FedMTLServer)
    network = algorithm.site.network()
    site = algorithm.site
    network.load_state_dict(first["B"])
    names = [name for name, _ in network.named_parameters()]
    network.train()
    for images, targets, _ in site.batches("train", 1, "model", 0):
        gradients = torch.autograd.grad(site.loss(network(images), targets), trainable(network))
        with torch.no_grad():
            for name, w, g in zip(names, trainable(network), gradients, strict=True):
                others = (first["A"][name] + first["C"][name]) / 2
                w.sub_(LR * (g + 2 * 0.7 * 2 / 3 * (w - others)))
    squares.assert_close(trained(played, "B"), copy_state(network.state_dict()))


def test_fedmtl_without_relationship_is_training_alone() -> None:
    played = squares.run("fedmtl", lam=0.0)
    assert squares.equal(trained(played, "B"), alone("B", 2))


def spread(states: dict[str, StateDict], name: str) -> float:
    stacked = torch.stack([state[name] for state in states.values()])
    return float((stacked - stacked.mean(dim=0)).square().sum())


def test_a_stronger_relationship_brings_models_together() -> None:
    task = squares.task(optimizer={"name": "sgd", "lr": LR})
    spreads = []
    for lam in (0.0, 1.0):
        played = squares.run("fedmtl", task, rounds=3, lam=lam)
        spreads.append(spread({site: trained(played, site) for site in "ABC"}, "head.weight"))
    assert spreads[1] < 0.9 * spreads[0]


# -- all -------------------------------------------------------------------------------------------


def late(site: str) -> Callable[[Step, str], bool]:
    """The site joins in the second round."""
    return lambda step, name: name == site and step.round == 0


PAIRS = [
    (FedAMPSite, FedAMPServer),
    (AnchoredSite, FedMTLServer),
    (FedFomoSite, FedFomoServer),
    (IFCASite, IFCAServer),
]


@pytest.mark.parametrize(("site", "server"), PAIRS, ids=lambda cls: cls.__name__)
def test_a_late_site_starts_from_the_initial_model(site: Any, server: Any) -> None:
    played = squares.federation(site, server, absent=late("C"))
    final = played.algorithms["C"].finalize(played.server.configure_final("C"))
    assert final.keys() == {"personal", "deployed"}
    assert "C" not in played.log[0].replies
    if MODEL in played.log[1].outgoing["C"]:
        assert squares.equal(played.log[1].outgoing["C"][MODEL], squares.start())
        assert not squares.equal(final["deployed"][MODEL], squares.start())


@pytest.mark.parametrize(("site", "server"), PAIRS, ids=lambda cls: cls.__name__)
def test_the_last_model_is_delivered_by_the_rule_last(site: Any, server: Any) -> None:
    played = squares.federation(site, server, selection="last")
    delivered = played.algorithms["A"].finalize(played.server.configure_final("A"))["deployed"]
    assert delivered.meta["selected_round"] == 2
    algorithm = played.algorithms["A"]
    expected = algorithm.start(played.server.configure_final("A"))
    assert squares.equal(delivered[MODEL], expected)


def test_a_site_that_misses_a_round_still_counts() -> None:
    def misses(step: Step, name: str) -> bool:
        return name == "C" and step.round == 1

    played = squares.run("fedmtl", rounds=3, absent=misses)
    of_c = played.log[0].replies["C"].states["model"]
    of_b = played.log[1].replies["B"].states["model"]
    mean = weighted_mean({"B": of_b, "C": of_c}, {"B": 1.0, "C": 1.0})
    squares.assert_close(played.log[2].outgoing["A"].states["anchor"], mean)


# -- FedFomo ---------------------------------------------------------------------------------------


def test_first_order_weights_by_hand() -> None:
    losses = torch.tensor([0.5, 0.2, 2.0, 1.0, math.inf], dtype=torch.float64)
    distances = torch.tensor([1.0, 4.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    weights = first_order_weights(losses, 1.0, distances)
    assert weights.tolist() == pytest.approx([0.5 / 0.7, 0.2 / 0.7, 0, 0, 0])
    assert not first_order_weights(losses[2:], 1.0, distances[2:]).any()


def test_fedfomo_moves_to_the_better_models() -> None:
    """The second round starts from the weighted mean by losses that are computed here anew."""
    played = squares.run("fedfomo", rounds=1)
    validation = played.log[1]
    models = {site: reply.states["model"] for site, reply in played.log[0].replies.items()}
    assert validation.outgoing["A"].states.keys() == {f"personal/{site}" for site in models}
    site = squares.site("A")

    def loss(state: StateDict) -> float:
        network = site.network()
        network.load_state_dict(state)
        split = site.data.validation
        with torch.no_grad():
            return float(site.loss(network.eval()(split.images), split.targets))

    start = squares.start()
    names = [name for name, _ in site.network().named_parameters()]
    weights = {}
    for name, state in models.items():
        distance = math.sqrt(sum((state[n] - start[n]).square().sum().item() for n in names))
        weights[name] = max(0.0, (loss(start) - loss(state)) / distance)
    assert sum(weights.values()) > 0, "training helps"
    squares.assert_close(played.algorithms["A"].combined, weighted_mean(models, weights))


@pytest.mark.parametrize(("counts", "minimum"), [({"B": (12, 0, 5)}, 0), ({}, 99)])
def test_fedfomo_with_few_validation_patients_is_training_alone(
    counts: dict[str, tuple[int, int, int]], minimum: int
) -> None:
    members = squares.algorithms(FedFomoSite, counts=counts)
    members["B"].site.minimum_patients = minimum
    played = squares.play(squares.server(FedFomoServer, rounds=2, algorithms=members), members)
    assert squares.equal(trained(played, "B"), alone("B", 2))


# -- IFCA ------------------------------------------------------------------------------------------


def test_ifca_with_one_cluster_is_fedavg() -> None:
    played = squares.run("ifca", clusters=1)
    fedavg = squares.run("fedavg", weighting="uniform")
    assert squares.equal(played.server.memory[CLUSTERS.member("0")], fedavg.model)


def test_a_site_trains_the_cluster_of_the_least_loss() -> None:
    """Clusters that were trained on A and on C: each site chooses its own, the server averages."""
    members = squares.algorithms(IFCASite)
    server = squares.server(IFCAServer, rounds=1, algorithms=members)
    specialists = {}
    for index, name in enumerate("AC"):
        specialists[str(index)] = alone(name, 8)
        server.memory[CLUSTERS.member(str(index))] = specialists[str(index)]
    losses = {}
    for name, algorithm in members.items():
        by_cluster = {j: algorithm.mean_loss(state, "train") for j, state in specialists.items()}
        losses[name] = min(by_cluster, key=lambda j: by_cluster[j])
    assert (losses["A"], losses["C"]) == ("0", "1")
    played = squares.play(server, members)
    replies = played.log[0].replies
    assert {site: reply.meta["cluster"] for site, reply in replies.items()} == losses
    assert server.tables()["clusters"]["C"] == {"cluster": "1"}
    for cluster in "01":
        models = {}
        for site, reply in replies.items():
            if losses[site] == cluster:
                models[site] = reply.states["model"]
        expected = weighted_mean(models, dict.fromkeys(models, 1.0))
        assert squares.equal(server.memory[CLUSTERS.member(cluster)], expected)


def test_an_unknown_cluster_is_refused() -> None:
    members = squares.algorithms(IFCASite)
    server = squares.server(IFCAServer, algorithms=members)
    step = Step.of(IFCASite.train, 0)
    before = server.configure(step, "A")
    replies = {"A": members["A"].perform("train", 0, before)}
    replies["A"].meta["cluster"] = "7"
    server.aggregate(step, replies)
    assert server.configure(step, "A").states == before.states
    assert "cluster '7'" in str(server.context.events.to_list())


def test_clusters_start_apart() -> None:
    clusters = squares.server(IFCAServer, clusters=3).memory.family(CLUSTERS)
    assert squares.equal(clusters["0"], squares.start())
    assert not clusters["1"]["head.weight"].equal(clusters["2"]["head.weight"])
    task = squares.SEGMENTATION
    weights = {"file": "x.safetensors", "sha256": "0" * 64, "format": "safetensors"}
    pretrained = replace(task, network={**task.network, "weights": weights})
    plan = squares.plan_of(IFCASite, IFCAServer)
    with pytest.raises(ConfigError, match=r"leave out network\.weights"):
        IFCASite.check(pretrained, plan.site_hyper, plan.server_hyper)
