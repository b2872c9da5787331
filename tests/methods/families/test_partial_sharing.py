"""Partial sharing: which part stays, and what FedBABU freezes and fine-tunes."""

from typing import Any

import pytest
import torch

from medflare.core.states import StateDict, batch_norm_entries, copy_state
from medflare.methods.catalogue import get_method
from medflare.methods.families.partial_sharing.fedbabu import FedBABUSite
from medflare.methods.families.partial_sharing.site import FedPerSite, LGFedAvgSite, SiloBNSite
from methods import squares

HEAD = {"head.weight", "head.bias"}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def final(played: Any, site: str, role: str = "personal") -> StateDict:
    models = played.algorithms[site].finalize(played.server.configure_final(site))
    state: StateDict = models[role].states["model"]
    return state


def test_what_stays() -> None:
    network = squares.site().network()
    entries = set(network.state_dict())
    statistics = {name for name in entries if name.rpartition(".")[2] in STATISTICS}
    assert statistics and statistics < batch_norm_entries(network)
    assert SiloBNSite.local_part(network).names == statistics
    assert FedPerSite.local_part(network).names == HEAD
    assert LGFedAvgSite.local_part(network).names == entries - HEAD


def test_fedper_is_fedavg_with_the_head_of_each_site() -> None:
    """In the first round both start alike: the shared part is FedAvg's mean."""
    shared = squares.run("fedper", rounds=1).model
    fedavg = squares.run("fedavg", rounds=1).model
    for name, tensor in shared.items():
        if name not in HEAD:
            assert tensor.equal(fedavg[name]), name


class TestFedBABU:
    def test_the_head_keeps_the_common_start_and_does_not_travel(self) -> None:
        played = squares.run("fedbabu", outside=("O",))
        assert [turn.step.phase for turn in played.log] == [
            "train",
            "train",
            "validate",
            "fine_tune",
        ]
        for turn in played.log[:3]:
            for message in (*turn.outgoing.values(), *turn.replies.values()):
                assert not HEAD & message.states.get("model", {}).keys()
        start = squares.start()
        for name, tensor in played.model.items():
            assert tensor.equal(start[name]) == (name in HEAD), name
        outside = squares.algorithm(FedBABUSite, "O").finalize(played.server.configure_final("O"))
        assert squares.equal(outside["deployed"].states["model"], played.server.selected[0])

    def test_a_round_by_hand(self) -> None:
        """SGD on the body alone, written down anew."""
        task = squares.task(optimizer={"name": "sgd", "lr": 0.1})
        algorithm = squares.algorithm(FedBABUSite, task=task)
        network = algorithm.site.network()
        network.train()
        for images, targets, _ in algorithm.site.batches("train", 0, "model", 0):
            loss = algorithm.site.loss(network(images), targets)
            body = list(network.body.parameters())
            gradients = torch.autograd.grad(loss, body)
            with torch.no_grad():
                for weight, gradient in zip(body, gradients, strict=True):
                    weight.sub_(0.1 * gradient)
        expected = copy_state(network.state_dict())
        played = squares.run("fedbabu", task, rounds=1)
        sent = played.log[0].replies["A"].states["model"]
        squares.assert_close(sent, {name: expected[name] for name in sent})

    def test_the_whole_model_is_fine_tuned(self) -> None:
        played = squares.run("fedbabu", selection="last")
        personal = final(played, "A")
        for name in HEAD:
            assert not personal[name].equal(played.model[name])


class TestFineTuning:
    def test_is_fedavg_and_then_training_at_the_site(self) -> None:
        task = squares.task(optimizer={"name": "sgd", "lr": 0.1})
        played = squares.run("finetune", task, selection="last", tuning_epochs=2)
        fedavg = squares.run("fedavg", task, selection="last")
        assert squares.equal(played.model, fedavg.model)
        site = played.algorithms["B"].site
        network = site.network()
        network.load_state_dict(fedavg.model)
        network.train()
        rounds = played.log[-1].step.round
        for epoch in range(2):
            for images, targets, _ in site.batches("train", rounds, "fine_tune", epoch):
                loss = site.loss(network(images), targets)
                gradients = torch.autograd.grad(loss, list(network.parameters()))
                with torch.no_grad():
                    for weight, gradient in zip(network.parameters(), gradients, strict=True):
                        weight.sub_(0.1 * gradient)
        squares.assert_close(final(played, "B"), copy_state(network.state_dict()))

    def test_without_epochs_it_is_the_global_model(self) -> None:
        played = squares.run("finetune", tuning_epochs=0)
        assert squares.equal(final(played, "A"), played.server.selected[0])

    def test_the_global_model_is_used_if_it_is_better(self) -> None:
        played = squares.run("finetune")
        algorithm = played.algorithms["A"]
        values = iter([0.9, 0.1])  # before and after fine-tuning
        algorithm.memory.states.pop("personal/best")
        algorithm.memory.meta.pop("personal/best")
        algorithm.validation = lambda model: next(values)
        final_models = played.server.configure_final("A")
        final_models.meta["selected_round"] = 1
        algorithm.perform("fine_tune", 2, final_models)
        models = algorithm.finalize(final_models)
        assert squares.equal(models["personal"].states["model"], final_models.states["model"])
        assert models["personal"].meta["selected_round"] == 1

    @pytest.mark.parametrize("server", ["robust", "sha"])
    def test_with_another_server_algorithm(self, server: str) -> None:
        pair = get_method("finetune", server=server)
        assert "fine_tune" in pair.site_class.phases
