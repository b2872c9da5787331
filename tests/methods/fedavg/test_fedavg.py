"""FedAvg's algorithms on small generated images: the mean of the sites' models, the selection and the final models."""

from itertools import pairwise

import pytest
import torch

from medflare.core.message import Message
from medflare.core.states import copy_state, weighted_mean
from medflare.methods.base import Step
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from methods import squares


def test_the_global_model_is_the_mean_of_the_sites_models() -> None:
    members = {name: squares.algorithm(FedAvgSite, name, counts=(count, 4, 5)) for name, count in zip("ABC", (6, 12, 18), strict=True)}
    log, server, _ = squares.play(squares.server(FedAvgServer, rounds=2, outside=(), algorithms=members), members)
    assert [(turn.step.phase, turn.step.round, turn.step.everyone) for turn in log] == [
        ("train", 0, False),
        ("train", 1, False),
        ("validate", 2, True),
    ]
    assert all(squares.equal(message.states["model"], squares.start()) for message in log[0].outgoing.values())
    for before, after in pairwise(log):
        states = {name: reply.states["model"] for name, reply in before.replies.items()}
        mean = weighted_mean(states, {"A": 6, "B": 12, "C": 18})
        assert all(squares.equal(message.states["model"], mean) for message in after.outgoing.values())
    assert squares.equal(server.model, mean)
    uniform = squares.federation(FedAvgSite, FedAvgServer, rounds=1, weighting="uniform")
    states = {name: reply.states["model"] for name, reply in uniform.log[0].replies.items()}
    assert squares.equal(uniform.model, weighted_mean(states, dict.fromkeys(states, 1.0)))


def test_metadata_of_a_round() -> None:
    algorithm = squares.algorithm(FedAvgSite)
    start = squares.start()
    meta = algorithm.perform("train", 0, Message({"model": copy_state(start)})).meta
    assert meta.keys() == {"n_samples", "loss", "validation"} and meta["n_samples"] == 12 and 0 < meta["loss"] < 2
    network = algorithm.site.network()
    network.load_state_dict(start)
    assert meta["validation"] == {"global": algorithm.validation(network)}, "of the incoming model"
    assert squares.algorithm(FedAvgSite, counts=(12, 0, 5)).perform("validate", 0, Message({"model": start})).meta["validation"] == {
        "global": None
    }


class TestSelection:
    @staticmethod
    def offered(server: FedAvgServer, values: list[float | None]) -> list[object]:
        """The models that entered the rounds 0, 1, ..., each measured with one of the values."""
        models: list[object] = []
        for round, value in enumerate(values):
            server.model = {"w": torch.tensor([float(round)])}
            models.append(server.model)
            replies = {"A": Message({"model": server.model}, {"n_samples": 1, "validation": {"global": value}})}
            server.aggregate(Step("validate", round), replies)
        return models

    @pytest.mark.parametrize(
        ("values", "round"),
        [
            ([0.9, 0.2, 0.5, 0.4], 2),  # the untrained model is no candidate
            ([0.9, 0.5, 0.5, 0.1], 1),  # the first of equals
            ([0.1, None, 0.3, None], 2),
            ([None, None, None, None], 3),  # without a metric the last one
        ],
    )
    def test_the_best_or_the_last_round_is_selected(self, values: list[float | None], round: int) -> None:
        best, last = (squares.server(FedAvgServer, selection=selection) for selection in ("median", "last"))
        for server, expected in ((best, round), (last, 3)):
            self.offered(server, values)
            state, rounds = server.selected
            assert state["w"].item() == expected
            message = server.configure_final("A")
            assert message.meta == {"selected_round": rounds} and squares.equal(message.states["model"], state)
            assert squares.equal(server.models()["global"].states["model"], state)
        assert best.selected[1] == round


def test_inside_and_outside_use_the_global_model() -> None:
    _, server, algorithms = squares.federation(FedAvgSite, FedAvgServer, outside=("O",))
    for algorithm in (algorithms["A"], squares.algorithm(FedAvgSite, "O")):
        models = algorithm.finalize(server.configure_final(algorithm.site.name))
        assert models.keys() == {"global", "personal", "deployed"} and len({id(model) for model in models.values()}) == 1
        assert squares.equal(models["global"].states["model"], server.selected[0])
