"""GRACE's halves on small generated images: every variant, what they share with FedAvg, memory."""

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state, weighted_mean
from medflare.methods import grace
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.grace import formulas as grace_math
from medflare.methods.grace.formulas import NegativeRule
from medflare.methods.grace.server import GraceServer, trainable_names
from medflare.methods.grace.site import GraceSite, build_discriminator, feature_rows
from medflare.methods.parts.normalisation import batch_statistics
from methods import squares
from small import stacked

VARIANTS: list[dict[str, Any]] = [
    {"client": "erm"},
    {"client": "meta"},
    {"client": "coral"},
    {"client": "coral", "coral_form": "deep_coral"},
    {"client": "coral", "beta": 0.1},
    {"client": "mmd"},
    {"client": "mmd", "mmd_kernel": "dan"},
    {"client": "adv"},
    {"client": "adv", "discriminator": "linear"},
    {"client": "adv", "reversal": 0.5},
    {"client": "adv", "reversal_rounds": 30},
    {"client": "coral", "reference": "running"},
    {"client": "coral", "swap": False},
    {"client": "coral", "inner": "sgd"},
    {"client": "coral", "inner": "sgd", "second_order": True},
    {"client": "coral", "adam_plus_sgd": True},
    {"client": "meta", "inner": "sgd", "inner_rate": 0.5},
    {"client": "meta", "reset_optimizer": True},
]


def test_contract_names() -> None:
    for name in ("consistency_weights", "coral", "mmd"):
        assert getattr(grace, name) is getattr(grace_math, name)


class TestLocalTraining:
    @pytest.mark.parametrize("kind", ["segmentation", "classification"])
    def test_every_variant_trains_in_its_own_way(self, kind: str) -> None:
        task = squares.task(kind)
        if kind == "classification":  # the modes of the reference differ where there are running statistics
            task = squares.task(kind, network={**task.network, "batch_norm": True})
        variants = VARIANTS + ([{"client": "coral", "align_pixels": 20}] if kind == "segmentation" else [])
        models = [squares.trained(GraceSite, task, rounds=2, **variant) for variant in variants]
        for model, facts in models:
            assert all(torch.isfinite(tensor).all() for tensor in model.values())
            assert math.isfinite(facts["loss"]) and facts["n_samples"] == 12
        for i, variant in enumerate(variants):
            for j in range(i):
                assert not squares.equal(models[i][0], models[j][0]), (variant, variants[j])

    def test_erm_is_fedavgs_training(self) -> None:
        assert squares.equal(squares.trained(GraceSite, client="erm")[0], squares.trained(FedAvgSite)[0])

    def test_no_weight_or_warming_up_is_no_alignment(self) -> None:
        meta = squares.trained(GraceSite, client="meta")[0]
        assert squares.equal(squares.trained(GraceSite, client="coral", beta=0.0)[0], meta)
        assert squares.equal(squares.trained(GraceSite, client="mmd", warmup=1)[0], meta)
        second = squares.trained(GraceSite, client="mmd", warmup=1, rounds=2)[0]
        assert not squares.equal(second, squares.trained(GraceSite, client="meta", rounds=2)[0])

    def test_alignment_keeps_features_near_the_global_models(self) -> None:
        def gap(**hyper: Any) -> float:
            state, _ = squares.trained(GraceSite, squares.task(local_epochs=10), **hyper)
            place = squares.site()
            local, shared = place.network(), place.network()
            local.load_state_dict(state)
            images = stacked(place.data.train).images
            with batch_statistics(local, shared):  # the mode that the site trains in
                features = [network.features_and_output(images)[0].mean(dim=(2, 3)) for network in (local, shared)]
            return grace.coral(*features).item()

        free = gap(client="meta")
        assert gap(client="coral", beta=10.0) < free / 2
        assert gap(client="mmd", beta=10.0) < free / 2

    @pytest.mark.parametrize("distance", [grace.coral, grace.mmd])
    def test_identical_weights_are_aligned(self, distance: Any) -> None:
        """On running statistics the distance was that of two modes of batch normalisation: more than any between two models."""
        gaps = {}
        for reference in ("batch", "running"):
            half = squares.half(GraceSite, reference=reference)
            local = half.network("model", squares.trained(FedAvgSite)[0])
            shared = half.frozen(copy_state(local.state_dict()))
            before, images = copy_state(shared.state_dict()), stacked(half.site.data.train).images
            gaps[reference] = half.aligned(shared, distance, 0)(images, local.train().features_and_output(images)[0]).item()
            assert squares.equal(shared.state_dict(), before)  # its running statistics too
            assert not any(layer.training for layer in shared.modules())
        assert gaps["batch"] == pytest.approx(0, abs=1e-9) and gaps["running"] > 1e-4

    @pytest.mark.parametrize("client", ["coral", "mmd", "adv"])
    @pytest.mark.parametrize("kind", ["segmentation", "classification"])
    def test_site_with_one_image(self, kind: str, client: str) -> None:
        model, facts = squares.trained(GraceSite, squares.task(kind), counts=(1, 1, 1), client=client)
        assert all(torch.isfinite(tensor).all() for tensor in model.values()) and math.isfinite(facts["loss"])

    def test_the_discriminator_learns_and_the_site_keeps_it(self) -> None:
        half, start = squares.half(GraceSite, client="adv"), squares.start()
        half.perform("train", 0, Message({"model": copy_state(start)}))
        first = half.discriminator
        half.perform("train", 1, Message({"model": copy_state(start)}))
        assert not squares.equal(half.discriminator, first)
        assert {"discriminator", "optimizer/discriminator"} <= half.memory.states.keys()
        other = squares.half(GraceSite, "B", client="adv")
        assert other.discriminator is None  # nobody else's

    def test_reversal_grows(self) -> None:
        half = squares.half(GraceSite, reversal=2.0, reversal_rounds=4)
        strengths = [half._reversal(round) for round in range(6)]
        assert strengths == sorted(strengths) and strengths[0] == pytest.approx(2 * math.tanh(1.25))
        assert strengths[3] == strengths[5] == pytest.approx(2 * math.tanh(5))
        assert squares.half(GraceSite, reversal=2.0)._reversal(0) == 2.0

    def test_pixels_are_the_same_of_both_models(self) -> None:
        x = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(2, 3, 4, 4)
        rows, others = feature_rows(x, x + 100, 5, torch.Generator().manual_seed(0))
        assert rows.shape == (5, 3) and torch.equal(others, rows + 100)
        assert all(row[1] - row[0] == 16 and row[2] - row[1] == 16 for row in rows)  # channels of one pixel
        assert len({tuple(row.tolist()) for row in rows}) == 5
        assert torch.equal(feature_rows(x, x, 0, torch.Generator())[0], x.mean(dim=(2, 3)))
        vectors = torch.ones(4, 3)
        assert torch.equal(feature_rows(vectors, vectors, 5, torch.Generator())[0], vectors)

    def test_discriminators(self) -> None:
        assert sum(p.numel() for p in build_discriminator(8, "linear").parameters()) == 9
        assert build_discriminator(8, "mlp")(torch.ones(3, 8)).shape == (3, 1)

    @pytest.mark.parametrize(
        ("hyper", "remedy"),
        [
            ({"adam_plus_sgd": True, "second_order": True}, "second_order=false"),
            ({"adam_plus_sgd": True, "inner": "sgd"}, "inner=optimizer"),
            ({"second_order": True}, "inner=sgd"),
            ({"inner_rate": 0.1}, "inner=sgd"),
        ],
    )
    def test_settings_that_exclude_each_other(self, hyper: Any, remedy: str) -> None:
        with pytest.raises(ConfigError, match=remedy):
            squares.half(GraceSite, **hyper)


class TestServer:
    @pytest.fixture
    def replies(self) -> dict[str, Message]:
        """Site -> reply with a model that has moved in its own direction."""
        found = {}
        for place, name in enumerate(squares.SITES):
            generator = torch.Generator().manual_seed(place)
            state = {
                n: t + 0.1 * torch.rand(t.shape, generator=generator) if t.is_floating_point() else t + place
                for n, t in squares.server(GraceServer).model.items()
            }
            found[name] = Message({"model": state}, {"n_samples": 10 * (place + 1), "validation": {"global": None}})
        return found

    def aggregated(self, server: Any, replies: dict[str, Message]) -> StateDict:
        server.aggregate(Step("train", 0), replies)
        return server.model

    def test_it_weights_by_consistency(self, replies: dict[str, Message]) -> None:
        server, p = squares.server(GraceServer), {"A": 10.0, "B": 20.0, "C": 30.0}
        states = {name: reply.states["model"] for name, reply in replies.items()}
        expected, weights = grace.consistent_aggregate(server.model, states, p, trainable_names(squares.SEGMENTATION))
        assert squares.equal(self.aggregated(server, replies), expected)
        assert max(abs(weights[name] - value / 60) for name, value in p.items()) > 1e-4

    @pytest.mark.parametrize(
        "hyper",
        [
            {"include_self": False},
            {"granularity": "split"},
            {"granularity": "reweight"},
            {"server_rate": 0.5},
            {"weighting": "uniform"},
            {"consistency": False},
        ],
        ids=lambda hyper: next(iter(hyper)),
    )
    def test_every_setting_is_read(self, replies: dict[str, Message], hyper: Any) -> None:
        plain, changed = (
            self.aggregated(server, replies) for server in (squares.server(GraceServer), squares.server(GraceServer, **hyper))
        )
        assert not squares.equal(plain, changed)

    def test_negative_rule_is_read(self, replies: dict[str, Message]) -> None:
        start = squares.server(GraceServer).model
        replies["C"].states["model"] = {
            name: 2 * start[name] - tensor if tensor.is_floating_point() else tensor
            for name, tensor in replies["C"].states["model"].items()
        }  # the opposite way
        rules = [{"negative": negative, "include_self": False} for negative in get_args(NegativeRule)]
        models = [self.aggregated(squares.server(GraceServer, **hyper), replies) for hyper in rules]
        assert not any(squares.equal(models[i], models[j]) for i in range(3) for j in range(i))

    def test_fedavgs_server_by_configuration(self, replies: dict[str, Message]) -> None:
        ours, theirs = squares.server(GraceServer, consistency=False), squares.server(FedAvgServer)
        assert squares.equal(self.aggregated(ours, replies), self.aggregated(theirs, replies))

    def test_identical_sites_are_a_fixed_point(self, replies: dict[str, Message]) -> None:
        server = squares.server(GraceServer)
        before = copy_state(server.model)
        same = {name: Message({"model": copy_state(before)}, reply.facts) for name, reply in replies.items()}
        assert squares.equal(self.aggregated(server, same), before)

    def test_a_missing_site_is_left_out(self, replies: dict[str, Message]) -> None:
        del replies["B"]
        found = self.aggregated(squares.server(GraceServer), replies)
        states = {name: reply.states["model"] for name, reply in replies.items()}
        for name, tensor in weighted_mean(states, {"A": 10, "C": 30}).items():  # of two updates each agrees with the other as much
            torch.testing.assert_close(found[name], tensor)

    def test_trainable_names_are_parameters_in_order(self) -> None:
        names = trainable_names(squares.SEGMENTATION)
        assert names == [name for name, _ in squares.site().network().named_parameters()]
        assert not any("running" in name for name in names)

    def test_any_site_half_will_do(self) -> None:
        assert get_method("fedavg", server="grace").server_class is GraceServer
        squares.play(squares.server(GraceServer, rounds=1), squares.halves(FedAvgSite))


class TestFederation:
    def test_nothing_of_grace_is_fedavg(self) -> None:
        ours = squares.play(squares.server(GraceServer, consistency=False), squares.halves(GraceSite, client="erm"))
        assert squares.equal(ours.model, squares.play(squares.server(FedAvgServer), squares.halves(FedAvgSite)).model)

    @pytest.mark.parametrize(
        "hyper",
        [{"client": "coral", "align_pixels": 9}, {"client": "adv", "batch_norm": "local"}, {"client": "meta", "adam_plus_sgd": True}],
        ids=lambda hyper: hyper["client"],
    )
    def test_new_process_for_every_task(self, hyper: Any, tmp_path: Path) -> None:
        kept, renewed = (squares.halves(GraceSite, **hyper) for _ in range(2))
        expected = squares.play(squares.server(GraceServer), kept).model
        assert squares.equal(squares.play(squares.server(GraceServer), renewed, store=tmp_path).model, expected)
        for name in squares.SITES:
            assert squares.equal(kept[name].personal.state, renewed[name].personal.state)

    def test_server_goes_on_after_a_restart(self) -> None:
        expected = squares.play(squares.server(GraceServer), squares.halves(GraceSite)).model
        server, halves = squares.server(GraceServer), squares.halves(GraceSite)
        for step in server.steps():
            fresh = squares.server(GraceServer)
            fresh.restore(server.state())
            replies = {name: half.perform(step.phase, step.round, fresh.configure(step, name)) for name, half in halves.items()}
            fresh.aggregate(step, replies)
            server = fresh
        assert squares.equal(server.model, expected)

    def test_it_learns(self) -> None:
        server, halves = squares.server(GraceServer, rounds=12), squares.halves(GraceSite)
        squares.play(server, halves)
        assert server.best.value > 0.5
        assert halves["A"].personal.value > 0.9


@pytest.mark.parametrize(
    ("batch_size", "settings", "warned"),
    [(15, {}, True), (16, {}, False), (4, {"client": "meta"}, False), (4, {"client": "erm"}, False), (4, {"align_pixels": 64}, False)],
)
def test_corals_covariances_of_a_few_images_are_warned_of(batch_size: int, settings: dict[str, Any], warned: bool) -> None:
    server = squares.server(GraceServer, squares.task(batch_size=batch_size), **settings)
    assert any("CORAL" in event["message"] for event in server.context.events.of("warning")) is warned
