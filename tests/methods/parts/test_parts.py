"""Parts of methods: local entries, the proximal term, normalisation, model selection, the weighted mean."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from helpers.fixture_types import Golden
from medflare.core.errors import UpdateError
from medflare.core.hyper import build_hyper
from medflare.core.message import Message
from medflare.core.states import batch_norm_entries, copy_state
from medflare.methods.aggregation import SiteModel, WeightedMean, site_models
from medflare.methods.base import ServerHyper
from medflare.methods.fedavg.server import FedAvgServerHyper
from medflare.methods.fedavg.site import MODEL
from medflare.methods.parts.normalisation import batch_statistics, still_statistics
from medflare.methods.parts.partial import LocalPart
from medflare.methods.parts.proximal import proximal_gradients, proximal_term
from medflare.methods.parts.selection import Best, ModelSelector, combined_score, plateau
from methods import squares


def small() -> nn.Module:
    """Layers with and without running statistics, one with a name that begins like another's."""
    norms = nn.BatchNorm2d(2), nn.InstanceNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True)
    return nn.ModuleDict(
        {
            "body": nn.Sequential(nn.Conv2d(1, 2, 1), *norms),
            "head": nn.Linear(2, 2),
            "head2": nn.Linear(2, 2),
        }
    )


STATISTICS = {"body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}


def test_batch_norm_is_found_by_its_type() -> None:
    names = LocalPart.of_batch_norm(small()).names
    assert {"body.1.weight", "body.1.bias"} | STATISTICS <= names == batch_norm_entries(small())
    for name in names:
        assert not name.startswith(("body.0", "head"))


def test_a_path_is_a_module_and_all_below_it() -> None:
    assert LocalPart.of_paths(small(), ["head"]).names == {"head.weight", "head.bias"}
    assert (
        LocalPart.of_paths(small(), ["body.1", "head2"]).names
        == {"body.1.weight", "body.1.bias", "head2.weight", "head2.bias"} | STATISTICS
    )
    assert LocalPart.of_paths(small(), []).names == frozenset()


@pytest.mark.parametrize("path", ["heads", "body.9", "head.weight", "bod"])
def test_a_path_that_names_no_module_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=path):
        LocalPart.of_paths(small(), ["head", path])


# ---- the proximal term -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["official", "ref"])
def test_step_of_fedprox_is_the_reference(golden: Golden, step: str) -> None:
    numbers = {
        name: torch.from_numpy(array) for name, array in golden("baselines").items() if "/" in name
    }
    model = nn.Linear(4, 3)
    names = ("weight", "bias")
    model.load_state_dict({name: numbers[f"theta/{name}"] for name in names})
    for name, weight in model.named_parameters():
        weight.grad = numbers[f"grad/{name}"]
    proximal_term(model, {name: numbers[f"anchor/{name}"] for name in names}, 0.1)()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            weight.detach(), numbers[f"fedprox_step_{step}_lr.1_mu.1/{name}"], rtol=1e-5, atol=1e-6
        )


def test_it_is_the_gradient_of_half_the_squared_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    ]
    anchor = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2)]
    plain = torch.autograd.grad(torch.stack([(w**4).sum() for w in weights]).sum(), weights)
    terms = [
        (w**4).sum() + 0.35 * (w - a).square().sum() for w, a in zip(weights, anchor, strict=True)
    ]
    penalised = torch.stack(terms).sum()
    for actual, expected in zip(
        proximal_gradients(plain, weights, anchor, 0.7),
        torch.autograd.grad(penalised, weights),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


def test_pull_changes_what_has_a_gradient_and_takes_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    anchor = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    gradient_hook = proximal_term(model, anchor, 2.0)
    for tensor in anchor.values():
        tensor.zero_()  # what becomes of the anchor afterwards does not matter
    gradient_hook()
    for parameter in model.parameters():
        assert parameter.grad is None, "nothing was trained, so nothing is drawn"
    for parameter in model[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradient_hook()
    for parameter in model[0].parameters():
        assert parameter.grad is not None and not parameter.grad.requires_grad
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, -2.0))
    for layer in list(model)[1:]:
        for parameter in layer.parameters():
            assert parameter.grad is None


# ---- normalisation ---------------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    without = nn.BatchNorm1d(2, track_running_stats=False)
    return nn.Sequential(
        nn.BatchNorm1d(2), nn.Sequential(nn.InstanceNorm1d(2)), nn.Dropout(0.5), without
    )


IMAGES = 3 + torch.randn(8, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_statistics_are_given_back(training: bool) -> None:
    model = network().train(training)
    before = copy_state(model.state_dict())
    modes = [layer.training for layer in model.modules()]
    with batch_statistics(model):
        first = model[0](IMAGES)
        assert model[2].training is training  # dropout goes on as it was
    torch.testing.assert_close(first.mean(dim=0), torch.zeros(2), rtol=0, atol=1e-5)
    assert (
        squares.equal(copy_state(model.state_dict()), before)
        and [layer.training for layer in model.modules()] == modes
    )
    assert model[0].track_running_stats and not model[3].track_running_stats


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("still", [still_statistics, batch_statistics])
def test_instance_normalisation_that_remembers_is_still_too(still: Any, training: bool) -> None:
    """Torch moves its statistics even where they are not tracked, and does not normalise by them then."""
    model = nn.InstanceNorm2d(2, track_running_stats=True).train(training)
    images = IMAGES[:6].reshape(3, 2, 2, 1).repeat(1, 1, 1, 2)
    model.load_state_dict({**model.state_dict(), "running_mean": torch.tensor([1 / 3, -1 / 3])})
    before = copy_state(model.state_dict())
    expected = copy.deepcopy(model).train(training or still is batch_statistics)(images)
    with still(model, model):
        assert torch.equal(model(images), expected)
        torch.testing.assert_close(copy_state(model.state_dict()), before)
    assert (
        squares.equal(copy_state(model.state_dict()), before)
        and model.momentum == 0.1
        and model.training is training
    )
    model.train()(images)
    assert not squares.equal(copy_state(model.state_dict()), before)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_those_of_the_network_itself(
    training: bool, momentum: float | None
) -> None:
    """Bit by bit."""
    still = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    )
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    still(images)  # its statistics are no longer 0 and 1
    still.train(training)
    moving = copy.deepcopy(still)
    before = copy_state(still.state_dict())
    expected = moving(images)
    with still_statistics(still, still[1]):
        output = still(images)
    assert output.equal(expected)
    output.square().mean().backward()
    expected.square().mean().backward()
    for weight, other in zip(still.parameters(), moving.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None
        assert weight.grad.equal(other.grad)
    assert squares.equal(copy_state(still.state_dict()), before)


def test_an_error_inside_changes_nothing() -> None:
    model = network().eval()
    with pytest.raises(RuntimeError), batch_statistics(model):
        raise RuntimeError
    assert model[0].track_running_stats and not model[0].training


def test_still_statistics_change_no_mode() -> None:
    model = nn.BatchNorm1d(2)
    with still_statistics(model):
        model.eval()
        # Its running statistics, as they came.
        torch.testing.assert_close(model(IMAGES), IMAGES / (1 + model.eps) ** 0.5)
        model.train()
        model(IMAGES)
    assert model.num_batches_tracked == 0
    model(IMAGES)
    assert model.num_batches_tracked == 1


# ---- model selection -------------------------------------------------------------------------------------------------------


def replies(**votes: float | None) -> dict[str, Message]:
    """A site with the name L has a thousand million images."""
    replies = {}
    for site, vote in votes.items():
        samples = 10**9 if site == "L" else 5
        replies[site] = Message({}, {"n_samples": samples, "validation": {"global": vote}})
    return replies


def election(rule: str, liar: dict[int, float]) -> ModelSelector:
    selector = ModelSelector(Message(), "global", rule)
    for round, honest in enumerate((0.9, 0.5, 0.7, 0.8, 0.82)):
        given = replies(A=honest, B=honest - 0.1, L=liar.get(round, 0.0))
        selector.update(given, "global", round, {"w": torch.tensor(float(round))})
    return selector


@pytest.mark.parametrize(
    ("votes", "median", "mean"),
    [
        ({}, None, None),
        ({"A": 0.25}, 0.25, 0.25),
        # The median of two is their plain mean; B has three times the images.
        ({"A": 0.25, "B": 0.75}, 0.5, 0.625),
        ({"A": 0.25, "B": 0.75, "C": 1.0}, 0.75, 0.7),  # (0.25 + 3 * 0.75 + 1) / 5
    ],
)
def test_combined_scores_by_hand(
    votes: dict[str, float], median: float | None, mean: float | None
) -> None:
    samples = {"A": 1.0, "B": 3.0, "C": 1.0}
    assert combined_score(votes, samples) == median
    assert combined_score(votes, samples, "mean") == (None if mean is None else pytest.approx(mean))


def test_a_liar_chooses_by_the_mean_and_not_by_the_median() -> None:
    lie = {1: 1.0}
    assert election("median", lie).round == 4
    assert election("mean", lie).round == 1


def test_where_levels_differ_a_liar_says_whose_counts_but_not_whose_gain() -> None:
    """A's images are easy and B's hard; both find the third round best. By the median the liar has any round."""
    levels = {1: (0.80, 0.40), 2: (0.85, 0.45), 3: (0.90, 0.50)}
    for expected in levels:
        chosen = {}
        for rule in ("median", "paired"):
            selector = ModelSelector(Message(), "global", rule)
            for round, (easy, hard) in levels.items():
                selector.update(
                    replies(A=easy, B=hard, L=float(round == expected)), "global", round, {}
                )
            chosen[rule] = selector.round
        assert chosen == {"median": expected, "paired": 3}


def test_a_gain_needs_sites_that_measured_both() -> None:
    selector = ModelSelector(Message(), "global", "paired")
    for round, votes in enumerate(
        ({"A": 0.5}, {"B": 0.9}, {"A": 0.6, "B": 0.1}, {"A": 0.6, "B": 0.2}), start=1
    ):
        selector.update(replies(**votes), "global", round, {})
    assert selector.round == 4 and selector.value == pytest.approx(0.65)
    assert [candidate["value"] for candidate in selector.record] == [
        0.5,
        None,
        pytest.approx(0.6),
        pytest.approx(0.65),
    ]


@pytest.mark.parametrize("zero_sum", [False, True])
def test_a_selector_that_never_knows_one_site_is_not_chosen_nor_the_first_of_equals(
    zero_sum: bool,
) -> None:
    selector = ModelSelector(Message(), "selector", "median", zero_sum=zero_sum)
    assert selector.rule == ("mean" if zero_sum else "median"), "reports say which decided"
    for round, third in ((1, 0.0), (2, 1.0), (3, 1.0)):
        selector.update(
            replies(A=1.0, B=1.0, C=third), "global", round, {"w": torch.tensor(float(round))}
        )
    assert selector.round == 3


@pytest.mark.parametrize("rule", ["median", "paired", "mean"])
@pytest.mark.parametrize(
    ("rounds", "chosen"),
    [
        # The median is 0.35 in both; the second round is as good or better everywhere.
        (((0.40, 0.07, 0.35), (0.47, 0.13, 0.35)), 2),
        (((0.47, 0.13, 0.35), (0.40, 0.07, 0.35)), 1),
        (((0.40, 0.07, 0.35), (0.40, 0.07, 0.35)), 2),  # equal in everything: the later round
        (((0.40, 0.07, 0.35), (0.47, 0.13, 0.35), (0.40, 0.07, 0.35)), 2),
    ],
)
def test_no_dominated_round_is_delivered(
    rule: str, rounds: tuple[tuple[float, float, float], ...], chosen: int
) -> None:
    selector = ModelSelector(Message(), "global", rule)
    for round, votes in enumerate(rounds, start=1):
        selector.update(
            replies(**dict(zip("ABC", votes, strict=True))),
            "global",
            round,
            {"w": torch.tensor(float(round))},
        )
    assert selector.round == chosen and selector.state is not None and selector.state["w"] == chosen


def test_a_site_delivers_the_later_of_equal_rounds() -> None:
    best = Best(Message(), "personal")
    for round, value in enumerate((0.2, 0.5, 0.5, 0.4), start=1):
        best.propose(value, round, {"w": torch.tensor(float(round))})
    assert best.round == 3 and best.state is not None and best.state["w"] == 3


def test_who_votes_what_is_kept_but_not_on_the_untrained_model() -> None:
    record = election("median", {1: 1.0}).record
    assert [candidate["round"] for candidate in record] == [1, 2, 3, 4]
    assert record[0] == {"round": 1, "value": 0.5, "votes": {"A": 0.5, "B": 0.4, "L": 1.0}}


def test_a_site_delivers_its_best_state_or_the_last_one() -> None:
    best = Best(Message(), "personal")
    last = {"w": torch.tensor(9.0)}
    assert best.chosen("median", last, 3) == (last, 3) and best.chosen("median", last) == (
        last,
        None,
    )
    best.propose(0.5, 2, {"w": torch.tensor(2.0)})
    state, rounds_trained = best.chosen("median", last, 3)
    assert state["w"] == 2 and rounds_trained == 2
    assert best.chosen("last", last, 3) == (last, 3)


def test_the_word_of_older_jobs() -> None:
    assert build_hyper(ServerHyper, {"selection": "best"}).selection == "median"


def measured(*rounds: dict[str, dict[str, float | None]]) -> list[dict[str, Any]]:
    """Site -> model -> metric of round 0, 1, ..."""
    steps = []
    for number, sites in enumerate(rounds):
        of_sites = {site: {"validation": models} for site, models in sites.items()}
        steps.append({"round": number, "sites": of_sites})
    return steps


def of_one(*values: float | None) -> list[dict[str, Any]]:
    return measured(*({"A": {"global": value}} for value in values))


@pytest.mark.parametrize(
    ("values", "patience", "after"),
    [
        # Best after two rounds, two more in vain, the fifth is trained when that is seen.
        ((0.9, 0.5, 0.6, 0.6, 0.5), 2, 5),
        ((0.9, 0.5, 0.6, 0.6, 0.5), 3, None),
        ((0.9, 0.5, 0.4), 1, 3),  # the untrained model's 0.9 is no candidate
        ((0.1, 0.2, 0.3, 0.4), 1, None),
        # 0.9 came in time, and the one after it is the first in vain.
        ((0.9, 0.5, 0.4, 0.9, 0.9), 2, None),
        # And here too late: the first end counts, whatever came later.
        ((0.9, 0.5, 0.4, 0.4, 0.9, 0.9), 2, 4),
        ((None, None, None, None), 1, None),  # nobody can say
        ((0.9,), 1, None),
        ((), 1, None),
    ],
)
def test_when_patience_is_over(
    values: tuple[float | None, ...], patience: int, after: int | None
) -> None:
    assert plateau(of_one(*values), patience) == after


def test_patience_is_that_of_the_median_and_of_every_model() -> None:
    def round_of(*votes: float, own: float) -> dict[str, dict[str, float | None]]:
        return {
            site: {"global": vote, "personal": own} for site, vote in zip("ABL", votes, strict=True)
        }

    liar = measured(*(round_of(0.5, 0.5, number / 10, own=0.1) for number in range(6)))
    assert plateau(liar, 2) == 4, "one site of three keeps nobody going"
    for step in liar:
        step["sites"]["A"]["validation"]["invented"] = float(step["round"])
    assert plateau(liar, 2) == 4, "nor by a model of its own"
    better_alone = measured(*(round_of(0.5, 0.5, 0.5, own=number / 10) for number in range(6)))
    assert plateau(better_alone, 2) is None
    steps = of_one(0.9, 0.5, 0.4)
    steps.insert(2, {"round": 1, "sites": {"A": {"loss": 0.3}}})
    assert plateau(steps, 1) == 3, "a step that measures nothing is no round"


def test_weighted_mean_by_hand() -> None:
    sites = {"A": (1.0, 3, 10.0), "B": (3.0, 8, 30.0)}
    models = {
        site: SiteModel({"w": torch.tensor([w]), "n": torch.tensor(n)}, samples)
        for site, (w, n, samples) in sites.items()
    }
    mean = WeightedMean(FedAvgServerHyper()).shared(models, 0)
    assert mean["w"].tolist() == [2.5] and mean["n"].item() == 8, (
        "a counter takes the largest value"
    )
    assert WeightedMean(FedAvgServerHyper(weighting="uniform")).shared(models, 0)["w"].tolist() == [
        2.0
    ]


def test_a_reply_without_samples_is_refused_with_the_remedy() -> None:
    replies = {"A": Message({"model": {}}, {"n_samples": 7}), "B": Message({"model": {}})}
    with pytest.raises(UpdateError, match="n_samples"):
        site_models(replies, MODEL)
