"""FedRep: heads stay at their sites, bodies are averaged, and the frozen part does not change."""

from typing import Any

import torch
from torch import nn

from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods.families.partial_sharing.fedrep import FedRepSite
from methods import squares

LR = 0.1


def parts(state: StateDict) -> tuple[StateDict, StateDict]:
    """(body, head)."""
    body = {name: tensor for name, tensor in state.items() if name.startswith("body.")}
    head = {name: tensor for name, tensor in state.items() if name.startswith("head.")}
    return body, head


def trained(task: Any = None, **hyper: Any) -> StateDict:
    """The whole model of a site after its first round."""
    algorithm = squares.algorithm(FedRepSite, task=task or squares.SEGMENTATION, **hyper)
    reply = algorithm.perform(
        "train", 0, Message({"model": parts(squares.start(algorithm.site.task))[0]})
    )
    return {**reply.states["model"], **algorithm.local}


def test_a_round_by_hand() -> None:
    """Two epochs of the head on the body as sent, then one of the body on that head, by plain gradient descent."""
    task = squares.task(optimizer={"name": "sgd", "lr": LR})
    site = squares.site("A", task)
    network = squares.site("A", task).network()

    def descend(part: nn.Module, purpose: str, epochs: int) -> None:
        for epoch in range(epochs):
            for images, targets, _ in site.batches("train", 0, purpose, epoch):
                gradients = torch.autograd.grad(
                    site.loss(network(images), targets), list(part.parameters())
                )
                with torch.no_grad():
                    for weight, gradient in zip(part.parameters(), gradients, strict=True):
                        weight.sub_(LR * gradient)

    network.body.eval()
    descend(network.head, "head", 2)
    network.body.train()
    descend(network.body, "model", 1)
    squares.assert_close(trained(task, head_epochs=2), copy_state(network.state_dict()))


def test_each_part_is_frozen_while_the_other_trains() -> None:
    body, head = parts(squares.start())
    only_head = parts(trained(head_epochs=1, body_epochs=0))
    only_body = parts(trained(head_epochs=0, body_epochs=1))
    assert squares.equal(only_head[0], body) and not squares.equal(only_head[1], head), (
        "running statistics of the body included"
    )
    assert squares.equal(only_body[1], head) and not squares.equal(only_body[0], body)
    nothing = trained(head_epochs=0, body_epochs=0)
    assert squares.equal(nothing, squares.start())
