"""Final models: inside the site's local one, outside the global one."""

from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods.grace.site import GraceSite
from methods import squares


def incoming(state: StateDict) -> Message:
    return Message({"model": copy_state(state)})


def test_inside_the_best_local_model_outside_the_global_one() -> None:
    algorithm, start = squares.algorithm(GraceSite), squares.start()
    values = iter([0.1, 0.4, 0.2, 0.9, 0.3, 0.5])
    algorithm.validation = lambda model: next(values)  # global, personal, ... of three rounds
    states = [algorithm.perform("train", round, incoming(start)).states["model"] for round in range(3)]
    final = algorithm.finalize(incoming(start))
    assert squares.equal(final["global"].states["model"], start)
    assert squares.equal(final["personal"].states["model"], states[1])
    assert final["deployed"] is final["personal"]
    outside = squares.algorithm(GraceSite, "O").finalize(incoming(start))
    untrained = squares.algorithm(GraceSite).finalize(incoming(start))
    assert squares.equal(untrained["deployed"].states["model"], start)
    assert outside.keys() == {"global", "deployed"} and squares.equal(outside["deployed"].states["model"], start)


@pytest.mark.parametrize(("hyper", "counts"), [({"selection": "last"}, (12, 4, 5)), ({}, (12, 0, 5))], ids=["last", "unvalidated"])
def test_the_last_local_model(hyper: Any, counts: tuple[int, int, int]) -> None:
    algorithm, start = squares.algorithm(GraceSite, counts=counts, **hyper), squares.start()
    states = [algorithm.perform("train", round, incoming(start)).states["model"] for round in range(2)]
    assert squares.equal(algorithm.finalize(incoming(start))["personal"].states["model"], states[1])


def test_adaptation_only_at_outside_sites() -> None:
    start = squares.start()
    for tta, kind in (("none", "plain"), ("tent", "tent"), ("dsbn", "dsbn")):
        final = {name: squares.algorithm(GraceSite, name, tta=tta).finalize(incoming(start)) for name in "AO"}
        assert {name: models["deployed"].meta["kind"] for name, models in final.items()} == {"A": "plain", "O": kind}
        assert {models["global"].meta["kind"] for models in final.values()} == {"plain"}
    assert final["O"]["deployed"].states.keys() == {"model", "statistics"}


@pytest.mark.parametrize("tta", ["dsbn", "tent"])
def test_adaptation_without_batch_norm_is_refused_before_training(tta: str) -> None:
    task = squares.task(network={"name": "unet", "channels": [4, 8], "norm": "instance"})
    with pytest.raises(ConfigError, match="BatchNorm"):
        squares.algorithm(GraceSite, "A", task, tta=tta)
    squares.algorithm(GraceSite, "A", task)


def test_metadata_and_probe() -> None:
    _, meta = squares.trained(GraceSite, probe=True)
    assert 0 <= meta["validation"]["personal"] <= 1 and -2 <= meta["a_distance"] <= 2
    assert "a_distance" not in squares.trained(GraceSite)[1]
    assert squares.trained(GraceSite, probe=True, counts=(1, 1, 1))[1]["a_distance"] is None  # one image cannot be split
