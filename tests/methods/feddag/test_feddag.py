"""FedDAG's algorithms on small generated images: every setting, distribution types, warm-up, selection."""

import io
import math
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods.base import Step
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.feddag import site as feddag_site
from medflare.methods.feddag.server import FedDAGServer
from medflare.methods.feddag.site import FedDAGSite, initial_generator
from methods import squares


def weights(module: nn.Module) -> StateDict:
    return copy_state(module.state_dict())


VARIANTS: list[dict[str, Any]] = [
    {},
    {"alpha": 0.1},
    {"m": 0.001},
    {"train_on": "perturbation"},
    {"ema": 0.99},
    {"sam_rho": 0.1},
    {"generator_width": 8},
    {"ndag": False},
]


class TestSite:
    @pytest.mark.parametrize(("hyper", "expected"), [({}, math.exp(-1 / (0.2 * 6))), ({"ema": 0.5}, 0.5)])
    def test_the_teachers_decay_follows_the_rounds_length(
        self, hyper: dict[str, Any], expected: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Twelve images in batches of six, three epochs: six batches a round."""
        algorithm = squares.algorithm(FedDAGSite, "A", squares.task(local_epochs=3), ndag=False, **hyper)
        decays = []
        monkeypatch.setattr(feddag_site, "ema_update", lambda teacher, student, decay: decays.append(decay))
        algorithm.perform("train", 0, Message({"model": squares.start()}))
        assert decays == pytest.approx([expected] * 6)

    @pytest.mark.parametrize("distribution", ["type1", "type2", "type3"])
    def test_initial_student_and_teacher(self, distribution: str) -> None:
        server, algorithm = (
            make(distribution=distribution) for make in (partial(squares.server, FedDAGServer), partial(squares.algorithm, FedDAGSite))
        )
        request = server.configure(Step("train", 1), "A")
        first = algorithm.perform("train", 0, request).states["model"]
        generation = algorithm._generation(request)
        shared, student = request.states["model"], request.states.get("student")
        assert (student is not None) is (distribution == "type2")
        assert squares.equal(weights(generation.student), student or shared)
        assert squares.equal(weights(generation.teacher), first if distribution == "type3" else shared)

    def test_pictures(self) -> None:
        algorithm = squares.algorithm(FedDAGSite)
        generator = initial_generator(algorithm.site.task, algorithm.site.seed, algorithm.hyper).state_dict()
        content = algorithm.pictures(Message({"model": squares.start(), "generator": generator}))["generated"]
        assert Image.open(io.BytesIO(content)).size == (4 * 96, 3 * 96)  # four images; original, perturbation, sum
        assert algorithm.pictures(Message({"model": squares.start()})) == {}
        server = squares.server(FedDAGServer)
        assert "generator" in server.configure_final("A").states and "generator" not in server.configure_final("O").states


class TestFederation:
    def test_warm_up_is_fedavg(self) -> None:
        server = squares.server(FedDAGServer, rounds=8, warmup=2)
        steps = server.steps()
        assert [(step.phase, step.round) for step in steps[:4]] == [("warm_up", 0), ("warm_up", 1), ("train", 2), ("score", 2)]
        server.steps = lambda: steps[:2]
        after = squares.play(server, squares.algorithms(FedDAGSite)).model
        plain = squares.server(FedAvgServer, rounds=2)
        train = plain.steps()[:2]
        plain.steps = lambda: train
        assert squares.equal(after, squares.play(plain, squares.algorithms(FedAvgSite)).model)
        assert not server.aggregation.history

    @pytest.mark.parametrize("sha", [True, False])
    def test_no_round_of_the_warm_up_is_selected(self, sha: bool) -> None:
        """Not even the best by validation, nor the last one, with which the first round of training begins."""
        server = squares.server(FedDAGServer, rounds=4, warmup=1, sha=sha, ndag=False)
        shifts, values = count(1), {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.4}
        models = {}
        for step in server.steps():
            models[step.round] = copy_state(server.model)
            shift = next(shifts)
            meta = {"n_samples": 1, "loss": 0.0, "validation": {"global": values.get(step.round)}}
            moved = {name: tensor + shift if tensor.is_floating_point() else tensor for name, tensor in server.model.items()}
            states = {"warm_up": {"model": moved}, "train": {"model": moved}}.get(step.phase, {})
            reply = Message(states, {"scores": {}} if step.phase == "score" else meta)
            server.aggregate(step, dict.fromkeys("ABC", reply))
        assert server.best.round == 3 and squares.equal(server.selected[0], models[3])

    def test_warm_up_is_shorter_in_short_runs(self) -> None:
        server = squares.server(FedDAGServer, rounds=8)
        assert server.warmup == 2 and "2 instead of 5" in server.context.events.of("warning")[0]["message"]
        assert not squares.server(FedDAGServer, rounds=20).context.events.of("warning")

    def test_generators_are_averaged_with_the_models_weights(self) -> None:
        settings: dict[str, Any] = {"beta": 4.0}
        server, algorithms = squares.server(FedDAGServer, rounds=1, **settings), squares.algorithms(FedDAGSite, **settings)
        step = server.steps()[0]
        replies = {name: algorithm.perform(step.phase, 0, server.configure(step, name)) for name, algorithm in algorithms.items()}
        server.aggregate(step, replies)
        score = server.steps()[1]
        scores = {"A": {"B": 0.2, "C": 0.4}, "B": {"A": 0.6, "C": 0.6}, "C": {"A": 0.8, "B": 0.4}}
        server.aggregate(score, {name: Message({}, {"scores": actual}) for name, actual in scores.items()})
        shares = server.aggregation.weights
        assert sum(shares.values()) == pytest.approx(1) and len(set(shares.values())) > 1
        for name, tensor in server.companions["generator"].items():
            expected = sum(shares[site] * reply.states["generator"][name] for site, reply in replies.items())
            torch.testing.assert_close(tensor, expected)
