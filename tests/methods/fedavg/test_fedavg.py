"""FedAvg's algorithms on small generated images: the mean of the sites' models, the selection, the final models, frozen parts."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from helpers.small_tasks import small_task, tiny_grades
from medflare.core.message import Message
from medflare.core.states import copy_state, weighted_mean
from medflare.federation.local.loop import run_local
from medflare.methods.base import Step
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FixedFeatures
from medflare.tasks.config import load_task
from methods import squares


def test_the_global_model_is_the_mean_of_the_sites_models() -> None:
    log, server, _ = squares.run("fedavg", counts={"A": (6, 4, 5), "C": (18, 4, 5)})
    assert [turn.step for turn in log] == [
        Step("train", 0),
        Step("train", 1),
        Step("validate", 2, everyone=True),
    ]
    for message in log[0].outgoing.values():
        assert squares.equal(message.states["model"], squares.start())
    for before, after in pairwise(log):
        states = {name: reply.states["model"] for name, reply in before.replies.items()}
        mean = weighted_mean(states, {"A": 6, "B": 12, "C": 18})
        for message in after.outgoing.values():
            assert squares.equal(message.states["model"], mean)
    assert squares.equal(server.model, mean)
    uniform = squares.run("fedavg", rounds=1, weighting="uniform")
    states = {name: reply.states["model"] for name, reply in uniform.log[0].replies.items()}
    assert squares.equal(uniform.model, weighted_mean(states, dict.fromkeys(states, 1.0)))


def test_metadata_of_a_round() -> None:
    algorithm = squares.algorithm(FedAvgSite)
    start = squares.start()
    meta = algorithm.perform("train", 0, Message({"model": copy_state(start)})).meta
    assert (
        meta.keys() == {"n_samples", "loss", "validation"}
        and meta["n_samples"] == 12
        and 0 < meta["loss"] < 2
    )
    network = algorithm.site.network()
    network.load_state_dict(start)
    assert meta["validation"] == {"global": algorithm.validation(network)}, "of the incoming model"
    unvalidated = squares.algorithm(FedAvgSite, counts=(12, 0, 5)).perform(
        "validate", 0, Message({"model": start})
    )
    assert unvalidated.meta["validation"] == {"global": None}


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([0.9, 0.2, 0.5, 0.4], 2),  # the untrained model is no candidate
        ([0.9, 0.5, 0.5, 0.1], 2),  # the later of equals
        ([0.1, None, 0.3, None], 2),
        ([None, None, None, None], 3),  # without a metric the last one
    ],
)
def test_the_best_or_the_last_round_is_selected(values: list[float | None], best: int) -> None:
    for selection, expected in (("median", best), ("last", 3)):
        server = squares.server(FedAvgServer, selection=selection)
        for round, value in enumerate(values):
            server.model = {"w": torch.tensor([float(round)])}
            server.aggregate(
                Step("validate", round),
                {"A": Message({}, {"n_samples": 1, "validation": {"global": value}})},
            )
        state, rounds = server.selected
        assert (state["w"].item(), rounds) == (expected, expected)
        message = server.configure_final("A")
        assert message.meta == {"selected_round": rounds} and squares.equal(
            message.states["model"], state
        )
        assert squares.equal(server.models()["global"].states["model"], state)


def test_inside_and_outside_use_the_global_model() -> None:
    _, server, algorithms = squares.run("fedavg", outside=("O",))
    for algorithm in (algorithms["A"], squares.algorithm(FedAvgSite, "O")):
        models = algorithm.finalize(server.configure_final(algorithm.site.name))
        assert (
            models.keys() == {"global", "personal", "deployed"}
            and len(set(map(id, models.values()))) == 1
        )
        assert squares.equal(models["global"].states["model"], server.selected[0])


FROZEN: dict[str, Any] = {"freeze": {"parts": ["body"], "rounds": 2}}


def head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("head.")}


def test_frozen_parts_neither_change_nor_travel() -> None:
    task = small_task(**FROZEN)
    log, server, _ = squares.run("fedavg", task, rounds=3)
    start = initial_network(task, squares.SEED).state_dict()
    assert [turn.step.phase for turn in log] == ["train_part", "train_part", "train", "validate"]
    for turn in log[:2]:
        for message in (*turn.outgoing.values(), *turn.replies.values()):
            assert set(message.states["model"]) == set(head(start))
    after = log[2].outgoing["A"].states["model"]
    for name in start:
        if name not in head(start):
            assert torch.equal(after[name], start[name]), "batch normalisation too"
    assert not torch.equal(after["head.weight"], start["head.weight"])
    assert not all(
        torch.equal(server.model[name], start[name])
        for name in start
        if name.endswith("conv.weight")
    )


def test_a_list_is_frozen_in_every_round() -> None:
    task = small_task(freeze=["body"])
    assert list(task.freeze.parts) == ["body"] and small_task(**task.to_dict()) == task
    log, server, _ = squares.run("fedavg", task, rounds=3)
    start = initial_network(task, squares.SEED).state_dict()
    assert [turn.step.phase for turn in log] == [
        "train_part",
        "train_part",
        "train_part",
        "validate",
    ]
    moved = {name for name in start if not torch.equal(server.model[name], start[name])}
    assert moved and moved <= set(head(start))
    assert small_task(freeze=[]) == small_task()


def test_a_frozen_body_sees_each_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of training and validation; features equal those of whole batches."""
    settings = tiny_grades(freeze=["body"], augment=[], sampling="shuffle", local_epochs=2)
    options: dict[str, Any] = {"sites": ["a", "b"], "rounds": 2, "seed": 0}
    seen: list[int] = []
    original = FixedFeatures.of

    def counted(fixed: FixedFeatures, images: torch.Tensor, body: torch.nn.Module) -> torch.Tensor:
        hook = body.register_forward_hook(lambda *call: seen.append(len(call[1][0])))
        features = original(fixed, images, body)
        hook.remove()
        return features

    monkeypatch.setattr(FixedFeatures, "of", counted)
    remembered = run_local("fedavg", load_task(settings), **options)
    counts = [site["n"] for site in remembered["sites"].values()]
    assert sum(seen) == sum(images["train"] + images["validation"] for images in counts)
    monkeypatch.setattr("medflare.methods.fedavg.site.keeps_features", lambda *_: False)
    anew = run_local("fedavg", load_task(settings), **options)
    for site in ("a", "b"):
        aucs = [
            run["sites"][site]["metrics"]["deployed"]["auc_macro"] for run in (remembered, anew)
        ]
        assert aucs[0] == pytest.approx(aucs[1], abs=1e-6)


def test_features_of_any_width_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medflare.networks.features._MOST_BYTES", 2 * 16 * 4)
    images = torch.rand(5, 1, 4, 4)
    fixed = FixedFeatures()
    calls: list[int] = []

    class Flat(torch.nn.Flatten):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            calls.append(len(images))
            return super().forward(images)

    for _ in range(2):
        assert torch.equal(fixed.of(images, Flat()), images.flatten(1))
    assert len(calls) == 5 + 3, "the features of two images are kept"


def test_the_trainable_part_has_its_own_moments() -> None:
    kept = squares.run("fedavg", small_task(**FROZEN), rounds=4).algorithms["A"].memory.states
    assert {"optimizer/model", "optimizer/model/part"} <= set(kept)
    assert len(kept["optimizer/model/part"]) < len(kept["optimizer/model"])
