"""GRACE's algorithms on small generated images: alignment, the server's weights, the probe and adaptation outside."""

from typing import Any

import pytest

from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.methods import grace
from medflare.methods.fedavg import FedAvgSite
from medflare.methods.grace.server import GraceServer
from medflare.methods.grace.site import GraceSite
from methods import squares


class TestLocalTraining:
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

    def test_the_discriminator_is_trained_and_kept(self) -> None:
        algorithm, start = squares.algorithm(GraceSite, client="adv"), squares.start()
        algorithm.perform("train", 0, Message({"model": copy_state(start)}))
        first = algorithm.discriminator
        algorithm.perform("train", 1, Message({"model": copy_state(start)}))
        assert not squares.equal(algorithm.discriminator, first)
        assert {"discriminator", "optimizer/discriminator"} <= algorithm.memory.states.keys()

    def test_metadata_and_probe(self) -> None:
        _, meta = squares.trained(GraceSite, probe=True)
        assert 0 <= meta["validation"]["personal"] <= 1 and -2 <= meta["a_distance"] <= 2
        assert "a_distance" not in squares.trained(GraceSite)[1]
        assert squares.trained(GraceSite, probe=True, counts=(1, 1, 1))[1]["a_distance"] is None  # one image cannot be split


def test_the_server_weights_by_consistency() -> None:
    log, server, _ = squares.federation(GraceSite, GraceServer, rounds=1, counts={"B": (6, 4, 5)})
    states = {name: reply.states["model"] for name, reply in log[0].replies.items()}
    expected, weights = grace.consistent_aggregate(squares.start(), states, {"A": 12, "B": 6, "C": 12}, server.aggregation.parameters)
    assert squares.equal(server.model, expected)
    assert max(abs(weights[name] - share) for name, share in {"A": 0.4, "B": 0.2, "C": 0.4}.items()) > 1e-4


def test_adaptation_only_at_outside_sites() -> None:
    incoming = Message({"model": squares.start()})
    for tta, kind in (("none", "plain"), ("tent", "tent"), ("dsbn", "dsbn")):
        final = {name: squares.algorithm(GraceSite, name, tta=tta).finalize(incoming) for name in "AO"}
        assert {name: models["deployed"].meta["kind"] for name, models in final.items()} == {"A": "plain", "O": kind}
        assert {models["global"].meta["kind"] for models in final.values()} == {"plain"}
    assert final["O"]["deployed"].states.keys() == {"model", "statistics"}


@pytest.mark.parametrize(
    ("batch_size", "settings", "warned"),
    [(15, {}, True), (16, {}, False), (4, {"client": "meta"}, False)],
)
def test_coral_with_small_batches_gives_a_warning(batch_size: int, settings: dict[str, Any], warned: bool) -> None:
    server = squares.server(GraceServer, squares.task(batch_size=batch_size), **settings)
    assert any("CORAL" in event["message"] for event in server.context.events.of("warning")) is warned
