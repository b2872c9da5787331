"""The loop of local training, and what an optimizer remembers from round to round."""

import math

import pytest
import torch

from medflare.core.message import Message
from medflare.data.loading import Batch
from medflare.methods.fedavg import FedAvgSite
from medflare.training.epochs import run_epochs, train_epochs
from methods import squares


def test_means_are_over_images_not_batches() -> None:
    """Seven images in batches of four and three: a mean over batches would be 3.5."""
    site = squares.site("A", squares.task(batch_size=4, local_epochs=2), (7, 2, 2))
    sizes: list[int] = []

    def step(batch: Batch) -> dict[str, torch.Tensor]:
        sizes.append(len(batch.images))
        return {"size": torch.tensor(float(len(batch.images))), "one": torch.tensor(1.0)}

    assert run_epochs(site, 0, "model", step) == {"size": pytest.approx((16 + 9) / 7), "one": 1.0}
    assert sizes == [4, 3, 4, 3]


def test_purpose_and_round_key_the_batches() -> None:
    site = squares.site("A", counts=(12, 2, 2))

    def order(round: int, purpose: str) -> list[int]:
        seen: list[int] = []

        def step(batch: Batch) -> dict[str, torch.Tensor]:
            seen.extend(batch.index.tolist())
            return {}

        run_epochs(site, round, purpose, step)
        return seen

    assert order(0, "model") == order(0, "model")
    assert sorted(order(0, "model")) == list(range(12))
    assert len({tuple(order(*keys)) for keys in ((0, "model"), (1, "model"), (0, "personal"))}) == 3


def test_no_images_have_no_loss() -> None:
    site = squares.site("A", counts=(0, 2, 2))
    network = site.network()
    assert math.isnan(train_epochs(network, site.optimizer(network.parameters()), site, 0, "model"))


@pytest.mark.parametrize("reset", [True, False])
def test_moments_go_on_where_they_are_kept(reset: bool) -> None:
    algorithm = squares.algorithm(FedAvgSite, reset_optimizer=reset)
    start = Message({"model": squares.start()})
    for round in range(2):
        algorithm.perform("train", round, start)
    stored = algorithm.memory.states.get("optimizer/model", {})
    steps = {tensor.item() for name, tensor in stored.items() if name.endswith(".step")}
    assert steps == (set() if reset else {2.0 * math.ceil(algorithm.site.n["train"] / algorithm.site.batch_size)})
