"""Test-time training with FedAvg: both losses, the head of the selected round, and what is deployed."""

from typing import Any

import pytest
import torch

from medflare.adaptation.ttt import ROTATION, TestTimeTraining, rotation_head, rotation_loss
from medflare.core.message import Message
from medflare.core.states import copy_state, weighted_mean
from medflare.methods.base import Step
from medflare.methods.catalogue import build_deployed
from medflare.methods.families.test_time.ttt import HEAD, TTTServer, TTTSite
from medflare.methods.fedavg.site import MODEL
from methods import squares


@pytest.fixture(params=[squares.SEGMENTATION, squares.CLASSIFICATION])
def task(request: pytest.FixtureRequest) -> Any:
    return request.param


def incoming(task: Any) -> Message:
    head = copy_state(rotation_head(task).state_dict())
    return Message.of({MODEL: squares.start(task), HEAD: head})


def test_a_round_trains_model_and_head(task: Any) -> None:
    site = squares.algorithm(TTTSite, "A", task=task)
    images = site.site.data.train.images  # brighter at the top: their turns can be seen
    images += torch.linspace(3, 0, images.shape[-1])[:, None]
    message = incoming(task)
    reply = site.perform("train", 0, message)
    for name in reply[HEAD]:
        assert not torch.equal(reply[HEAD][name], message[HEAD][name])
    turns = torch.arange(len(images)) % 4

    def loss(sent: Message) -> float:
        head = rotation_head(task)
        head.load_state_dict(sent[HEAD])
        with torch.no_grad():
            network = site.network("model", sent[MODEL]).eval()
            return rotation_loss(network, head, images, turns).item()

    for round in range(1, 20):
        reply = site.perform("train", round, Message.of({MODEL: reply[MODEL], HEAD: reply[HEAD]}))
    assert loss(reply) < loss(message)


def test_the_deployed_model_adapts_itself(task: Any) -> None:
    models = squares.algorithm(TTTSite, "O", task=task).finalize(incoming(task))
    assert {role: model.meta["kind"] for role, model in models.items()} == {
        "global": "plain",
        "personal": "plain",
        "deployed": "ttt",
    }
    module = build_deployed(task, models["deployed"])
    assert isinstance(module, TestTimeTraining)
    images = squares.site("O", task).data.test.images
    expected = build_deployed(task, models["global"])(images)
    # The body learns nothing from a head of zeros.
    torch.testing.assert_close(module(images), expected)


def test_the_server_averages_the_head_and_keeps_that_of_the_selected_round(task: Any) -> None:
    server = squares.server(TTTServer, task=task)
    heads = []
    for round, metric in enumerate((0.1, 0.9, 0.2)):
        step = Step("train", round)
        assert server.configure(step, "A").states.keys() == {"model", ROTATION}
        heads.append(copy_state(server.head))
        replies = {}
        for number, name in enumerate(squares.SITES):
            reply = Message.of({MODEL: squares.start(task)})
            reply[HEAD] = {
                key: torch.full_like(tensor, round + number + 1.0)
                for key, tensor in server.head.items()
            }
            reply.meta |= {"n_samples": number + 1, "validation": {"global": metric}, "loss": None}
            replies[name] = reply
        server.aggregate(step, replies)
        sent = {name: reply[HEAD] for name, reply in replies.items()}
        expected = weighted_mean(
            sent, {name: reply.meta["n_samples"] for name, reply in replies.items()}
        )
        torch.testing.assert_close(server.head, expected)
    final = server.configure_final("O")
    for name in heads[1]:
        assert torch.equal(final[HEAD][name], heads[1][name])
    assert torch.equal(server.models()["global"][HEAD]["bias"], heads[1]["bias"])
