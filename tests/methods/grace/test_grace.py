"""GRACE's halves on small generated images: every variant, what they share with FedAvg, memory."""

import math
from typing import Any

import pytest
import torch

from helpers.small_tasks import stacked
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods import grace
from medflare.methods.base import Step
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.grace import formulas as grace_math
from medflare.methods.grace.server import GraceServer, trainable_names
from medflare.methods.grace.site import GraceSite
from medflare.methods.parts.normalisation import batch_statistics
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
    {"client": "meta", "inner": "sgd", "inner_rate": 0.5},
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

    def test_erm_is_fedavgs_training(self) -> None:
        assert squares.equal(squares.trained(GraceSite, client="erm")[0], squares.trained(FedAvgSite)[0])

    def test_no_weight_is_no_alignment(self) -> None:
        assert squares.equal(squares.trained(GraceSite, client="coral", beta=0.0)[0], squares.trained(GraceSite, client="meta")[0])

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
        """Both models normalise by the same batch; the global one's running statistics stay."""
        half = squares.algorithm(GraceSite)
        local = half.network("model", squares.trained(FedAvgSite)[0])
        shared = half.frozen(copy_state(local.state_dict()))
        before, images = copy_state(shared.state_dict()), stacked(half.site.data.train).images
        gap = half.aligned(shared, distance)(images, local.train().features_and_output(images)[0]).item()
        assert gap == pytest.approx(0, abs=1e-9)
        assert squares.equal(shared.state_dict(), before)
        assert not any(layer.training for layer in shared.modules())

    @pytest.mark.parametrize("client", ["coral", "mmd", "adv"])
    @pytest.mark.parametrize("kind", ["segmentation", "classification"])
    def test_site_with_one_image(self, kind: str, client: str) -> None:
        model, meta = squares.trained(GraceSite, squares.task(kind), counts=(1, 1, 1), client=client)
        assert all(torch.isfinite(tensor).all() for tensor in model.values()) and math.isfinite(meta["loss"])

    def test_the_discriminator_learns_and_the_site_keeps_it(self) -> None:
        half, start = squares.algorithm(GraceSite, client="adv"), squares.start()
        half.perform("train", 0, Message({"model": copy_state(start)}))
        first = half.discriminator
        half.perform("train", 1, Message({"model": copy_state(start)}))
        assert not squares.equal(half.discriminator, first)
        assert {"discriminator", "optimizer/discriminator"} <= half.memory.states.keys()
        other = squares.algorithm(GraceSite, "B", client="adv")
        assert other.discriminator is None  # nobody else's

    def test_a_rate_without_a_plain_step_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="inner_rate"):
            squares.algorithm(GraceSite, inner_rate=0.1)


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

    @pytest.mark.parametrize("hyper", [{"server_rate": 0.5}, {"weighting": "uniform"}, {"consistency": False}], ids=str)
    def test_every_setting_is_read(self, replies: dict[str, Message], hyper: Any) -> None:
        plain, changed = (
            self.aggregated(server, replies) for server in (squares.server(GraceServer), squares.server(GraceServer, **hyper))
        )
        assert not squares.equal(plain, changed)

    def test_identical_sites_are_a_fixed_point(self, replies: dict[str, Message]) -> None:
        server = squares.server(GraceServer)
        before = copy_state(server.model)
        same = {name: Message({"model": copy_state(before)}, reply.meta) for name, reply in replies.items()}
        assert squares.equal(self.aggregated(server, same), before)


class TestFederation:
    def test_nothing_of_grace_is_fedavg(self) -> None:
        ours = squares.play(squares.server(GraceServer, consistency=False), squares.algorithms(GraceSite, client="erm"))
        assert squares.equal(ours.model, squares.play(squares.server(FedAvgServer), squares.algorithms(FedAvgSite)).model)

    def test_it_learns(self) -> None:
        server, halves = squares.server(GraceServer, rounds=12), squares.algorithms(GraceSite)
        squares.play(server, halves)
        assert server.best.value > 0.5
        assert halves["A"].personal.value > 0.9


@pytest.mark.parametrize(
    ("batch_size", "settings", "warned"),
    [(15, {}, True), (16, {}, False), (4, {"client": "meta"}, False), (4, {"client": "erm"}, False)],
)
def test_corals_covariances_of_a_few_images_are_warned_of(batch_size: int, settings: dict[str, Any], warned: bool) -> None:
    server = squares.server(GraceServer, squares.task(batch_size=batch_size), **settings)
    assert any("CORAL" in event["message"] for event in server.context.events.of("warning")) is warned
