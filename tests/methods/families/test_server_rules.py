"""Server rules: formulas by hand and by reference numbers, their degenerate cases, and that they move what they should."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from helpers.fixture_types import Golden
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import StateDict, weighted_mean
from medflare.core.text import JsonDict
from medflare.federation.preflight import check_run
from medflare.federation.settings import RunSettings
from medflare.methods.aggregation import SiteModel
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.families.server_rules import fedlws, fednova, fedopt, validated, weights
from medflare.methods.fedavg.site import FedAvgSite
from medflare.methods.method import extended
from methods import squares

RULES = ["fedavgm", "fedadagrad", "fedadam", "fedyogi", "fednova", "ida", "fedawa", "fedlws"]
RULES += ["fedce", "feddg_ga", "fets_pid"]


def models(*rows: list[float], **meta: list[Any]) -> dict[str, SiteModel]:
    """Sites A, B, ... with a trained entry, a statistic and a counter; metadata by site."""
    by_site = {}
    for number, row in enumerate(rows):
        state = {"w": torch.tensor(row), "mean": torch.tensor(row), "n": torch.tensor(number)}
        items = {name: values[number] for name, values in meta.items()}
        by_site["ABCD"[number]] = SiteModel(state, 1.0, items)
    return by_site


def aggregation(name: str, **hyper: Any) -> Any:
    """A rule whose only trained entry is "w"."""
    server = get_method(name).server_class
    made: Any = server.aggregation_class(server.Hyper(**hyper))
    made.trained = {"w"}
    return made


def previous(*row: float) -> StateDict:
    return {"w": torch.tensor(row), "mean": torch.tensor(row), "n": torch.tensor(0)}


def again(made: Any) -> Any:
    """The rule in another process: a new object with the packed state."""
    message = Message()
    made.pack(message)
    fresh = type(made)(made.hyper)
    fresh.trained = made.trained
    fresh.unpack(message)
    assert not message.states and not message.meta
    return fresh


def path_of(name: str, **hyper: Any) -> list[float]:
    """The trained entry after rounds in which every site adds 1, 2 and -1 to the incoming 0.5."""
    made = aggregation(name, **hyper)
    state = previous(0.5)
    path = []
    for round, delta in enumerate((1.0, 2.0, -1.0)):
        value = state["w"].item() + delta
        made = again(made)
        state = made.shared(models([value], [value]), round, state)
        path.append(state["w"].item())
    return path


class TestServerOptimizers:
    def test_momentum_is_torchs_sgd(self) -> None:
        path = path_of("fedavgm", eta=0.7, beta=0.6)
        weight = torch.nn.Parameter(torch.tensor([0.5]))
        optimizer = torch.optim.SGD([weight], lr=0.7, momentum=0.6)
        for delta, reached in zip((1.0, 2.0, -1.0), path, strict=True):
            weight.grad = torch.tensor([-delta])
            optimizer.step()
            assert weight.item() == pytest.approx(reached, rel=1e-6)

    @pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
    def test_algorithm_2_in_numpy(self, name: str) -> None:
        eta = 0.3
        beta1 = 0.8
        beta2 = 0.9
        tau = 0.05
        hyper = {"eta": eta, "beta1": beta1, "tau": tau}
        if name != "fedadagrad":
            hyper["beta2"] = beta2
        path = path_of(name, **hyper)
        x = 0.5
        m = 0.0
        v = tau**2
        for delta, reached in zip((1.0, 2.0, -1.0), path, strict=True):
            m = beta1 * m + (1 - beta1) * delta
            v = {
                "fedadagrad": v + delta**2,
                "fedadam": beta2 * v + (1 - beta2) * delta**2,
                "fedyogi": v - (1 - beta2) * delta**2 * np.sign(v - delta**2),
            }[name]
            x += eta * m / (np.sqrt(v) + tau)
            assert reached == pytest.approx(x, rel=1e-5)

    def test_statistics_are_averaged_and_counters_copied(self) -> None:
        made = aggregation("fedadam")
        state = made.shared(models([1.0], [3.0]), 0, previous(0.0))
        assert state["mean"].item() == 2.0 and state["n"].item() == 1
        assert state["w"].item() == pytest.approx(
            0.01 * 0.2 / (math.sqrt(0.01 * 4 + 0.99e-6) + 1e-3)
        )

    def test_a_weight_that_is_frozen_at_first_starts_with_its_first_update(self) -> None:
        made = aggregation("fedavgm")
        made.trained = {"w", "head"}
        start = {"w": torch.zeros(1), "head": torch.zeros(1)}
        made.shared({"A": SiteModel({"head": torch.ones(1)})}, 0, start)
        both = {"w": torch.ones(1), "head": torch.ones(1)}
        state = again(made).shared({"A": SiteModel(both)}, 1, start)
        assert state["w"].item() == 1.0 and state["head"].item() == pytest.approx(1.9)

    def test_fedavgm_without_momentum_is_fedavg(self) -> None:
        played = squares.run("fedavgm", rounds=1, beta=0.0)
        fedavg = squares.run("fedavg", rounds=1)
        squares.assert_close(played.model, fedavg.model)


class TestFedNova:
    def test_normalizer_is_the_length_of_the_accumulated_weights(self) -> None:
        """With momentum 0.9 the gradients of 3 steps enter the update 1 + .9 + .81, 1.9 and 1 times."""
        assert fednova.normalizer(3) == 3
        assert fednova.normalizer(3, 0.9) == pytest.approx(2.71 + 1.9 + 1)

    @pytest.mark.parametrize("momentum", [1.0, 1 - 1e-9, 1 - 1e-5, 1 + 1e-5])
    def test_momentum_1_is_the_limit(self, momentum: float) -> None:
        """Each of the 10 gradients enters every later step whole: 1 + 2 + ... + 10."""
        assert fednova.normalizer(10, momentum) == pytest.approx(55, rel=1e-4)

    @pytest.mark.parametrize("variant", [{"nesterov": True}, {"dampening": 0.1}])
    def test_other_kinds_of_momentum_are_refused(self, variant: dict[str, Any]) -> None:
        optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
        get_method("fednova").check({}, squares.task(optimizer=optimizer))
        with pytest.raises(ConfigError, match="nesterov"):
            get_method("fednova").check({}, squares.task(optimizer={**optimizer, **variant}))

    def test_the_printed_formula(self) -> None:
        """p = 1/2, a = (1, 3), Δ = (1, 6): w + 2 (1/2 · 1 + 1/2 · 2)."""
        made = aggregation("fednova")
        state = made.shared(models([11.0], [16.0], steps=[1, 3]), 0, previous(10.0))
        assert state["w"].item() == pytest.approx(13.0)
        assert made.weights == pytest.approx({"A": 0.75, "B": 0.25})
        assert state["mean"].item() == pytest.approx(0.75 * 11 + 0.25 * 16)

    def test_a_site_without_a_number_counts_as_an_average_one(self) -> None:
        some = models([11.0], [16.0], [9.0], steps=[1, 3, None])
        full = models([11.0], [16.0], [9.0], steps=[1, 3, 2])
        first = aggregation("fednova").shared(some, 0, previous(10.0))
        assert first["w"].equal(aggregation("fednova").shared(full, 0, previous(10.0))["w"])

    def test_momentum_comes_from_the_task(self) -> None:
        optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
        made = aggregation("fednova")
        made.prepare(squares.task(optimizer=optimizer), 2)
        assert made.momentum == 0.9
        made = aggregation("fednova")
        made.prepare(squares.task(), 2)
        assert made.momentum == 0.0

    @pytest.mark.parametrize("partner", ["fedavg", "fedprox", "fedbn", "ditto"])
    def test_equal_steps_are_fedavg_and_steps_are_counted(self, partner: str) -> None:
        """12 images in batches of 6, two epochs; the personal model's steps do not count."""
        task = squares.task(local_epochs=2)
        pair = get_method(partner, server="fednova")
        nova = squares.federation(pair.site_class, pair.server_class, task)
        replies = nova.log[0].replies.values()
        assert [reply.meta["steps"] for reply in replies] == [4, 4, 4]
        plain = squares.run(partner, task)
        assert squares.equal(nova.model, plain.model)

    def test_steps_with_differential_privacy_are_counted(self) -> None:
        task = squares.WITHOUT_BATCH_NORM
        played = squares.run("fednova", task, rounds=1, dp_noise=1.0)
        replies = played.log[0].replies.values()
        assert [reply.meta["steps"] for reply in replies] == [2, 2, 2]

    def test_steps_that_cannot_be_counted_are_refused(self) -> None:
        class OwnLoop(FedAvgSite[Any]):
            def train(self, round: int, incoming: Message) -> Message:
                reply = Message.of(self.measured(validation={}))
                reply.states["model"] = incoming.states["model"]
                return reply

        server = get_method("fednova").server_class
        site_class = extended(OwnLoop, server.site_extension)
        with pytest.raises(ConfigError, match="count"):
            squares.federation(site_class, server, rounds=1)

    def server(self, task: Any) -> Any:
        """Of one round."""
        method = get_method("fednova")
        algorithms = squares.algorithms(method.site_class, task, server_class=method.server_class)
        return squares.server(method.server_class, task, 1, outside=(), algorithms=algorithms)

    @pytest.mark.parametrize(("claimed", "counted"), [(2**53, 24), (1, 4), (4, 4), (24, 24)])
    def test_a_false_number_of_steps_is_changed(self, claimed: int, counted: int) -> None:
        """12 images, two epochs: 4 steps in batches of 6, 24 in batches of 1."""
        server = self.server(squares.task(local_epochs=2))
        replies = {}
        for site in "ABC":
            meta = {"n_samples": 12, "steps": claimed if site == "B" else 4, "validation": {}}
            replies[site] = Message({"model": squares.start()}, meta)
        server.aggregate(Step("train", 0), replies)
        assert replies["B"].meta["steps"] == counted
        warned = [event["site"] for event in server.context.events.of("warning")]
        assert warned == ["B"] * (claimed != counted)
        squares.assert_close(server.model, squares.start())  # no NaN

    def test_a_site_of_unknown_images_counts_as_the_others(self) -> None:
        server = self.server(squares.SEGMENTATION)
        del server.context.site_counts["B"]["n"]["train"]
        meta = {"n_samples": 12, "steps": 2, "validation": {}}
        replies = {site: Message({"model": squares.start()}, dict(meta)) for site in "ABC"}
        server.aggregate(Step("train", 0), replies)
        assert "steps" not in replies["B"].meta and replies["A"].meta["steps"] == 2

    def test_sites_with_other_numbers_of_steps(self) -> None:
        counts = {"B": (3, 4, 5)}
        method = get_method("fednova")
        algorithms = squares.algorithms(
            method.site_class, counts=counts, server_class=method.server_class
        )
        server = squares.server(method.server_class, rounds=1, outside=(), algorithms=algorithms)
        start = dict(server.model)
        turn = squares.play(server, algorithms).log[0]
        steps = {site: reply.meta["steps"] for site, reply in turn.replies.items()}
        assert steps == {"A": 2, "B": 1, "C": 2}
        p = {"A": 12 / 27, "B": 3 / 27, "C": 12 / 27}
        effective = sum(p[site] * steps[site] for site in p)
        for name in server.aggregation.trained:
            moved = start[name].double()
            for site, reply in turn.replies.items():
                delta = reply.states["model"][name] - start[name]
                moved = moved + effective * p[site] / steps[site] * delta
            torch.testing.assert_close(server.model[name], moved.float(), rtol=1e-5, atol=1e-6)


class TestIDA:
    def test_by_hand(self) -> None:
        """Mean (2, 1); distances 2, 1 and 3."""
        made = aggregation("ida")
        three = models([0.0, 1.0], [2.0, 0.0], [4.0, 2.0])
        made.shared(three, 0, previous(0.0, 0.0))
        total = 1 / 2 + 1 / 1 + 1 / 3
        expected = {"A": 0.5 / total, "B": 1 / total, "C": (1 / 3) / total}
        assert made.weights == pytest.approx(expected)

    def test_equal_models_have_equal_weights(self) -> None:
        made = aggregation("ida")
        made.shared(models([1.0], [1.0]), 0, previous(0.0))
        assert made.weights == {"A": 0.5, "B": 0.5}

    def test_the_far_site_loses_weight(self) -> None:
        played = squares.run("ida", rounds=1)
        replies = {site: reply.states["model"] for site, reply in played.log[0].replies.items()}
        mean = weighted_mean(replies, dict.fromkeys(replies, 1.0))
        trained = played.server.aggregation.trained
        distance = {}
        for site, state in replies.items():
            distance[site] = sum((state[name] - mean[name]).abs().sum().item() for name in trained)
        shares = played.server.aggregation.weights
        assert (
            sorted(shares, key=shares.__getitem__)
            == sorted(distance, key=distance.__getitem__)[::-1]
        )
        assert played.server.context.notes["A"]["weight"] == shares["A"]


class TestFedAWA:
    def test_loss_by_its_vectors(self) -> None:
        vectors = torch.randn(3, 5, dtype=torch.float64)
        start = torch.randn(5, dtype=torch.float64)
        logits = torch.randn(3, dtype=torch.float64)
        p = logits.softmax(0)
        sites = start + vectors
        cosine = torch.nn.functional.cosine_similarity(sites, start.expand(3, 5))
        expected = (p * (vectors - p @ vectors).norm(dim=1)).sum() + (p * (1 - cosine)).sum()
        actual = weights.alignment_loss(logits, vectors @ vectors.T, cosine)
        assert actual.item() == pytest.approx(expected.item())

    def test_no_steps_are_fedavg(self) -> None:
        played = squares.run("fedawa", steps=0)
        squares.assert_close(played.model, squares.run("fedavg").model)

    def test_the_site_against_the_others_loses_weight_and_it_is_kept(self) -> None:
        made = aggregation("fedawa", steps=20, eta=0.05)
        three = models([2.0, 1.0], [2.0, 1.1], [0.0, 1.0])
        made.shared(three, 0, previous(1.0, 1.0))
        first = dict(made.weights)
        assert first["C"] < 0.3 < first["A"]
        made = again(made)
        made.shared({site: three[site] for site in "AC"}, 1, previous(1.0, 1.0))
        assert made.weights["C"] < first["C"] / (first["A"] + first["C"])
        assert made.record.keys() == {"A", "B", "C"}

    def test_no_settings_make_the_mean_one_site(self) -> None:
        with pytest.raises(ConfigError, match="eta"):
            get_method("fedawa").check({"server": {"eta": 1e5}})
        made = aggregation("fedawa", steps=100, eta=1.0)
        two = models([2.0, 1.0], [0.0, 1.1])
        for round in range(9):
            made.shared(two, round, previous(1.0, 1.0))
        assert max(made.weights.values()) < 0.9

    def test_one_site_and_equal_models(self) -> None:
        assert aggregation("fedawa").shared(models([2.0]), 0, previous(1.0))["w"].item() == 2.0
        made = aggregation("fedawa")
        made.shared(models([1.0], [1.0]), 0, previous(1.0))
        assert made.weights == pytest.approx({"A": 0.5, "B": 0.5})


class TestFedLWS:
    def test_by_hand(self) -> None:
        """w = (3, 4), models (3, 8) and (3, 4): mean (3, 6), spread 2, τ = .05 · 2, γ = 5 / (5 + .1 · 2)."""
        made = aggregation("fedlws", beta=0.05)
        state = made.shared(models([3.0, 8.0], [3.0, 4.0]), 0, previous(3.0, 4.0))
        factor = 5 / 5.2
        assert state["w"].tolist() == pytest.approx([3 * factor, 6 * factor])
        assert state["mean"].tolist() == [3.0, 6.0]

    def test_strength_is_limited(self) -> None:
        for beta, strength in ((100.0, 0.2), (0.0, 0.01)):
            made = aggregation("fedlws", beta=beta)
            state = made.shared(models([2.0], [4.0]), 0, previous(1.0))
            assert state["w"].item() == pytest.approx(3 / (1 + strength * 2))

    def test_weights_of_zero_and_layers(self) -> None:
        assert fedlws.shrinking_factor(0.0, 2.0, 0.1) == 1.0
        made = aggregation("fedlws")
        made.trained = {"a.weight", "a.bias", "b.weight"}
        start = {"a.weight": torch.ones(1), "a.bias": torch.zeros(1), "b.weight": torch.zeros(1)}
        moved = {"a.weight": torch.ones(1), "a.bias": torch.ones(1), "b.weight": torch.ones(1)}
        state = made.shared({"A": SiteModel(moved)}, 0, start)
        assert state["a.weight"].item() == state["a.bias"].item() == pytest.approx(1 / 1.01)
        assert state["b.weight"].item() == 1.0


class TestFedPIDAvg:
    def test_by_hand(self) -> None:
        hyper = weights.FetsPIDHyper()
        actual = weights.pid_weights(
            {"A": 30.0, "B": 10.0}, {"A": 0.1, "B": 0.3}, {"A": 2.0, "B": 3.0}, hyper
        )
        assert actual["A"] == pytest.approx(0.45 * 0.75 + 0.45 * 0.25 + 0.1 * 0.4)
        assert actual["B"] == pytest.approx(0.45 * 0.25 + 0.45 * 0.75 + 0.1 * 0.6)

    def test_drops_are_those_of_a_site_and_a_rise_is_none(self) -> None:
        made = aggregation("fets_pid", alpha=0.25, beta=0.75, gamma=0.0)
        made.shared(models([1.0], [1.0], [1.0], loss=[1.0, 1.0, 1.0]), 0, previous(0.0))
        assert made.weights == pytest.approx(dict.fromkeys("ABC", 1 / 3)), "no drop: FedAvg"
        made = again(made)
        made.shared(models([1.0], [1.0], [1.0], loss=[0.9, 0.7, 1.5]), 1, previous(0.0))
        images = 0.25 / 3
        drops = {"A": 0.25, "B": 0.75, "C": 0.0}
        expected = {site: images + 0.75 * drop for site, drop in drops.items()}
        assert made.weights == pytest.approx(expected)

    def test_the_sum_is_that_of_five_costs(self) -> None:
        made = aggregation("fets_pid", alpha=0.25, beta=0.0, gamma=0.75)
        for round in range(7):
            made.shared(models([1.0], [1.0], loss=[float(round), 2.0]), round, previous(0.0))
        assert made.record["A"] == [2.0, 3.0, 4.0, 5.0, 6.0]
        assert made.weights["A"] == pytest.approx(0.25 / 2 + 0.75 * 20 / 30)

    @pytest.mark.parametrize("hyper", [{"alpha": 0.0}, {"beta": 1e9}, {"gamma": 3.0}])
    def test_no_setting_leaves_out_the_images(self, hyper: dict[str, float]) -> None:
        """Else the model of a round is that of the only site whose cost fell."""
        with pytest.raises(ConfigError, match="alpha must be at least"):
            get_method("fets_pid").check({"server": hyper})

    @pytest.mark.parametrize("loss", [None, math.nan])
    def test_without_losses_it_is_fedavg(self, loss: float | None) -> None:
        made = aggregation("fets_pid")
        made.shared(models([1.0], [1.0], loss=[loss, loss]), 0, previous(0.0))
        assert made.weights == {"A": 0.5, "B": 0.5} and made.record == {}


class TestFedDGGA:
    @pytest.mark.parametrize(("metric", "sign"), [("acc", -1), ("loss", 1)])
    def test_the_reference_of_three_sites(self, golden: Golden, metric: str, sign: int) -> None:
        numbers = golden("feddag")
        change = numbers[f"fedga/after_{metric}"] - numbers[f"fedga/before_{metric}"]
        gaps = dict(zip("ABC", (sign * change).tolist(), strict=True))
        actual = validated.adjusted_weights(dict.fromkeys("ABC", 1 / 3), gaps, 0.2)
        expected = numbers[f"fedga/official_{metric}_step0.2"]
        np.testing.assert_allclose(list(actual.values()), expected, rtol=1e-5)

    def test_no_gap_and_no_weight_below_zero(self) -> None:
        start = {"A": 0.9, "B": 0.1}
        assert validated.adjusted_weights(start, {}, 0.2) == start
        assert validated.adjusted_weights(start, {"A": 0.0}, 0.2) == start
        assert validated.adjusted_weights(start, {"B": -1.0}, 0.9) == {"A": 1.0, "B": 0.0}

    def test_a_gap_needs_both_metrics_of_consecutive_rounds(self) -> None:
        made = aggregation("feddg_ga", step=0.9)
        made.rounds = 3
        metrics = [{"global": None}, {"global": 0.5}, {"global": 0.6}]
        made.shared(
            models([1.0], [1.0], trained_metric=[0.8, None], validation=metrics[:2]),
            0,
            previous(0.0),
        )
        assert made.weights == {"A": 0.5, "B": 0.5}
        made = again(made)
        made.rounds = 3
        three = models([1.0], [1.0], trained_metric=[None, 0.9], validation=[metrics[2]] * 2)
        made.shared(three, 1, previous(0.0))
        assert made.weights == pytest.approx({"A": 0.95 / 1.45, "B": 0.5 / 1.45})
        made.shared(three, 2, previous(0.0))
        weight = 0.5 / 1.45 + 0.45 * (2 / 3)
        assert made.weights["B"] == pytest.approx(weight / (0.95 / 1.45 + weight))

    def test_a_site_that_is_drawn_later_starts_at_the_level_of_the_others(self) -> None:
        made = aggregation("feddg_ga")
        made.record = {"weights": dict.fromkeys("ABC", 1 / 3), "metrics": {}}
        four = models([1.0], [1.0], [1.0], [1.0])
        made.shared({"A": four["A"], "D": four["D"]}, 1, previous(0.0))
        assert made.weights == pytest.approx({"A": 0.5, "D": 0.5})

    def test_a_site_with_weight_zero_alone_counts(self) -> None:
        made = aggregation("feddg_ga")
        made.record = {"weights": {"A": 1.0, "B": 0.0}, "metrics": {}}
        lonely = {"B": models([1.0], [3.0])["B"]}
        assert made.shared(lonely, 1, previous(0.0))["w"].item() == 3.0

    def test_no_step_is_fedavg(self) -> None:
        played = squares.run("feddg_ga", step=0.0)
        plain = squares.run("fedavg", weighting="uniform")
        squares.assert_close(played.model, plain.model)

    def test_the_metric_is_that_of_the_trained_model(self) -> None:
        played = squares.run("feddg_ga")
        reply = played.log[0].replies["A"]
        algorithm = played.algorithms["A"]
        value = algorithm.validation(algorithm.network("model", reply.states["model"]))
        assert reply.meta["trained_metric"] == value


class TestFedCE:
    def test_cosines_by_their_vectors(self) -> None:
        updates = torch.randn(4, 6, dtype=torch.float64)
        c = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        actual = validated.cosines_to_others(updates @ updates.T, c)
        for k in range(4):
            others = c @ updates - c[k] * updates[k]
            expected = torch.nn.functional.cosine_similarity(updates[k], others, dim=0)
            assert actual[k].item() == pytest.approx(expected.item())
        zero = validated.cosines_to_others(
            torch.zeros(2, 2, dtype=torch.float64), torch.ones(2).double()
        )
        assert zero.tolist() == [0.0, 0.0]

    @pytest.mark.parametrize(
        ("mode", "expected"), [("plus", 0.85 / 2), ("times", 0.15 / (0.15 + 0.3))]
    )
    def test_weights_by_hand(self, mode: str, expected: float) -> None:
        """1 - cosine is .5 and 1.5: shares .25 and .75; errors .3 and .2: shares .6 and .4."""
        cosines = torch.tensor([0.5, -0.5]).double()
        errors = torch.tensor([0.3, 0.2]).double()
        actual = validated.contribution_weights(cosines, errors, mode)
        assert actual.tolist() == pytest.approx([expected, 1 - expected])

    def test_shares_have_a_least_value(self) -> None:
        zeros = torch.zeros(2, dtype=torch.float64)
        assert validated.contribution_weights(zeros + 1, zeros, "plus").tolist() == [0.5, 0.5]
        cosines = torch.tensor([1.0, -1.0]).double()
        least = validated.contribution_weights(cosines, torch.tensor([0.0, 1.0]).double(), "times")
        assert least.tolist() == pytest.approx([1e-3, 1.0], rel=1e-2)

    def test_values_are_means_over_the_rounds(self) -> None:
        made = aggregation("fedce")
        start = previous(0.0, 0.0)
        made.shared(models([1.0, 0.0], [0.0, 1.0], without_metric=[None, None]), 0, start)
        assert made.weights == pytest.approx({"A": 0.5, "B": 0.5})
        made = again(made)
        made.shared(models([1.0, 0.0], [1.0, 0.0], without_metric=[0.4, 0.8]), 1, start)
        assert made.record["A"]["cosines"] == pytest.approx([0.0, 1.0])
        assert made.record["B"]["errors"] == pytest.approx([0.2])
        assert made.weights == pytest.approx({"A": (0.5 + 0.75) / 2, "B": (0.5 + 0.25) / 2})
        made.shared(models([1.0, 0.0], without_metric=[None]), 2, start)
        assert made.record["A"]["cosines"] == pytest.approx([0.0, 1.0, 0.0])

    def test_each_site_gets_the_mean_without_it(self) -> None:
        absent = lambda step, name: (step.round, name) == (1, "C")  # noqa: E731
        played = squares.run("fedce", rounds=3, absent=absent)
        first, second, third = played.log[:3]
        for message in first.outgoing.values():
            assert "without" not in message.states
        replies = {site: reply.states["model"] for site, reply in first.replies.items()}
        others = {site: replies[site] for site in "BC"}
        contributions = first_weights()
        squares.assert_close(
            second.outgoing["A"].states["without"], weighted_mean(others, contributions)
        )
        assert second.replies["A"].meta["without_metric"] is not None
        assert (
            "without" not in third.outgoing["C"].states and "without" in third.outgoing["A"].states
        )


def first_weights() -> dict[str, float]:
    """FedCE's weights after the first round."""
    played = squares.run("fedce", rounds=1)
    weights: dict[str, float] = played.server.aggregation.weights
    return weights


class TestMaxClientWeight:
    """Reported numbers of one site would give it nearly all weight."""

    def test_a_false_cost_does_not_exceed_it(self) -> None:
        made = aggregation("fets_pid")
        for round in range(2):
            losses = [1.0, 1e12 / 10**round, 1.0]
            made.shared(models([1.0], [5.0], [1.0], loss=losses), round, previous(0.0))
        assert made.weights["B"] > 0.6
        made = aggregation("fets_pid")
        made.max_client_weight = 0.4
        for round in range(2):
            losses = [1.0, 1e12 / 10**round, 1.0]
            made.shared(models([1.0], [5.0], [1.0], loss=losses), round, previous(0.0))
        assert made.weights == pytest.approx({"A": 0.3, "B": 0.4, "C": 0.3})

    def test_false_metrics_do_not_exceed_it(self) -> None:
        made = aggregation("feddg_ga")
        made.max_client_weight = 0.4
        made.record = {"weights": {"A": 0.05, "B": 0.9, "C": 0.05}, "metrics": {}}
        made.shared(models([1.0], [5.0], [1.0]), 1, previous(0.0))
        assert made.weights == pytest.approx({"A": 0.3, "B": 0.4, "C": 0.3})

    def test_weights_of_zero_for_the_others_are_fedavgs(self) -> None:
        made = aggregation("feddg_ga")
        made.max_client_weight = 0.4
        made.record = {"weights": {"A": 0.0, "B": 1.0, "C": 0.0}, "metrics": {}}
        made.shared(models([1.0], [5.0], [1.0]), 1, previous(0.0))
        assert made.weights == pytest.approx(dict.fromkeys("ABC", 1 / 3))


class TestAllRules:
    @pytest.mark.parametrize("name", RULES)
    def test_resumed_from_disk_after_every_step(self, name: str, tmp_path: Any) -> None:
        """With a site that misses the second of three rounds; the model is not FedAvg's.

        FedNova's is, since all sites take as many steps; so is FedDG-GA's, since no metric falls.
        """
        task = squares.CLASSIFICATION_WITH_BATCH_NORM
        options: JsonDict = {
            "rounds": 3,
            "absent": lambda step, site: (step.round, site) == (1, "B"),
        }

        def played(store: Any = None) -> StateDict:
            return squares.run(name, task, store=store, **options).model

        model = played()
        assert squares.equal(model, played(tmp_path))
        fedavg = squares.run("fedavg", task, **options).model
        assert squares.equal(model, fedavg) == (name in ("fednova", "feddg_ga"))

    @pytest.mark.parametrize("name", RULES)
    def test_without_a_previous_model_it_is_the_mean(self, name: str) -> None:
        made = aggregation(name)
        made.trained = None
        state = made.shared(models([1.0], [3.0]), 0)
        assert state["w"].item() == 2.0 and made.record == {}

    @pytest.mark.parametrize("name", RULES)
    def test_robust_rules_go_with_it(self, name: str) -> None:
        made = aggregation(name, rule="median")
        values = ([1.0], [1.2], [1000.0])
        meta: dict[str, Any] = {"loss": [1.0] * 3, "validation": [{}] * 3, "steps": [2, 2, 2]}
        assert made.shared(models(*values, **meta), 0, previous(1.0))["w"].item() < 1.3

    @pytest.mark.parametrize("name", RULES)
    def test_pairs_with_other_site_algorithms(self, name: str) -> None:
        whole = {"fedce", "feddg_ga"}
        two_rounds = RunSettings(rounds=2, seed=0)
        for partner in ("fedprox", "moon", "fedbn", "fedrep", "ditto", "fedbabu"):
            pair = get_method(partner, server=name)
            if name in whole and partner in ("fedbn", "fedrep", "fedbabu"):
                with pytest.raises(ConfigError, match="whole models"):
                    check_run(pair, squares.CLASSIFICATION_WITH_BATCH_NORM, {}, two_rounds)
            else:
                check_run(pair, squares.CLASSIFICATION_WITH_BATCH_NORM, {}, two_rounds)

    def test_trained_entries_are_parameters(self) -> None:
        made = aggregation("ida")
        made.prepare(squares.CLASSIFICATION_WITH_BATCH_NORM, 2)
        state = squares.start(squares.CLASSIFICATION_WITH_BATCH_NORM)
        left = state.keys() - made.trained_part(state).keys()
        assert left
        for name in left:
            assert "running" in name or "num_batches" in name

    def test_second_moments(self) -> None:
        one = torch.tensor(1.0)
        four = torch.tensor(4.0)
        assert fedopt.second_moment("adagrad", one, four).item() == 17
        assert fedopt.second_moment("adam", one, four, 0.5).item() == 8.5
        assert fedopt.second_moment("yogi", one, four, 0.5).item() == 9
