"""GRACE's algorithms on small generated images: every variant, and those that equal FedAvg."""

import math
from typing import Any

import pytest
import torch

from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods import grace
from medflare.methods.base import Step
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.grace import formulas as grace_math
from medflare.methods.grace.server import GraceServer
from medflare.methods.grace.site import GraceSite
from methods import squares

VARIANTS: list[dict[str, Any]] = [
    {"client": "erm"},
    {"client": "meta"},
    {"client": "coral"},
    {"client": "coral", "beta": 0.1},
    {"client": "mmd"},
    {"client": "adv"},
    {"client": "coral", "swap": False},
    {"client": "coral", "inner": "sgd"},
    {"client": "meta", "reset_optimizer": True},
]


def test_contract_names() -> None:
    for name in ("consistency_weights", "coral", "mmd"):
        assert getattr(grace, name) is getattr(grace_math, name)


class TestLocalTraining:
    @pytest.mark.parametrize("kind", ["segmentation", "classification"])
    def test_every_variant_trains_in_its_own_way(self, kind: str) -> None:
        models = [squares.trained(GraceSite, squares.task(kind), rounds=2, **variant) for variant in VARIANTS]
        for model, meta in models:
            assert all(torch.isfinite(tensor).all() for tensor in model.values())
            assert math.isfinite(meta["loss"]) and meta["n_samples"] == 12
        for i, variant in enumerate(VARIANTS):
            for j in range(i):
                assert not squares.equal(models[i][0], models[j][0]), (variant, VARIANTS[j])

    def test_no_weight_is_no_alignment(self) -> None:
        assert squares.equal(squares.trained(GraceSite, client="coral", beta=0.0)[0], squares.trained(GraceSite, client="meta")[0])

    @pytest.mark.parametrize("distance", [grace.coral, grace.mmd])
    def test_identical_weights_are_aligned(self, distance: Any) -> None:
        """Both models normalise by the same batch; the global one's running statistics stay."""
        algorithm = squares.algorithm(GraceSite)
        local = algorithm.network("model", squares.trained(FedAvgSite)[0])
        shared = algorithm.frozen(copy_state(local.state_dict()))
        before, images = copy_state(shared.state_dict()), algorithm.site.data.train.images
        gap = algorithm.aligned(shared, distance)(images, local.train().features_and_output(images)[0]).item()
        assert gap == pytest.approx(0, abs=1e-9)
        assert squares.equal(shared.state_dict(), before)
        assert not any(layer.training for layer in shared.modules())

    @pytest.mark.parametrize("client", ["coral", "mmd", "adv"])
    def test_site_with_one_image(self, client: str) -> None:
        model, meta = squares.trained(GraceSite, squares.task("classification"), counts=(1, 1, 1), client=client)
        assert all(torch.isfinite(tensor).all() for tensor in model.values()) and math.isfinite(meta["loss"])

    def test_the_discriminator_is_trained_and_kept(self) -> None:
        algorithm, start = squares.algorithm(GraceSite, client="adv"), squares.start()
        algorithm.perform("train", 0, Message({"model": copy_state(start)}))
        first = algorithm.discriminator
        algorithm.perform("train", 1, Message({"model": copy_state(start)}))
        assert not squares.equal(algorithm.discriminator, first)
        assert {"discriminator", "optimizer/discriminator"} <= algorithm.memory.states.keys()


class TestServer:
    @pytest.fixture
    def replies(self) -> dict[str, Message]:
        """Site -> reply with a model that has moved in its own direction."""
        actual = {}
        for place, name in enumerate(squares.SITES):
            generator = torch.Generator().manual_seed(place)
            state = {
                n: t + 0.1 * torch.rand(t.shape, generator=generator) if t.is_floating_point() else t + place
                for n, t in squares.server(GraceServer).model.items()
            }
            actual[name] = Message({"model": state}, {"n_samples": 10 * (place + 1), "validation": {"global": None}})
        return actual

    def aggregated(self, server: Any, replies: dict[str, Message]) -> StateDict:
        server.aggregate(Step("train", 0), replies)
        return server.model

    def test_it_weights_by_consistency(self, replies: dict[str, Message]) -> None:
        server, p = squares.server(GraceServer), {"A": 10.0, "B": 20.0, "C": 30.0}
        states = {name: reply.states["model"] for name, reply in replies.items()}
        expected, weights = grace.consistent_aggregate(server.model, states, p, server.aggregation.parameters)
        assert squares.equal(self.aggregated(server, replies), expected)
        assert max(abs(weights[name] - value / 60) for name, value in p.items()) > 1e-4


class TestFederation:
    def test_nothing_of_grace_is_fedavg(self) -> None:
        ours = squares.play(squares.server(GraceServer, consistency=False), squares.algorithms(GraceSite, client="erm"))
        assert squares.equal(ours.model, squares.play(squares.server(FedAvgServer), squares.algorithms(FedAvgSite)).model)


@pytest.mark.parametrize(
    ("batch_size", "settings", "warned"),
    [(15, {}, True), (16, {}, False), (4, {"client": "meta"}, False)],
)
def test_coral_with_small_batches_gives_a_warning(batch_size: int, settings: dict[str, Any], warned: bool) -> None:
    server = squares.server(GraceServer, squares.task(batch_size=batch_size), **settings)
    assert any("CORAL" in event["message"] for event in server.context.events.of("warning")) is warned
