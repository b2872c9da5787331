"""Apple's pfl 0.6 simulating the federation that `compare.floor` trains by hand."""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import torch
from compare import hospital, sites_model
from torch import Tensor, nn


def run(sites: int, rounds: int) -> None:
    """FedAvg of pfl's own algorithm, weighted by images; pfl simulates one site after the other."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Images(Dataset):
        """A site's training images, in the batches that the other engines have."""

        def __init__(self, number: int):
            super().__init__((), user_id=str(number))
            self.site = hospital(number)
            self.round = 0

        def __len__(self) -> int:
            return self.site.n["train"]

        def iter(self, batch_size: int | None) -> Iterable[tuple[Tensor, ...]]:
            # pfl evaluates before the first round, for which there is nothing to do here.
            if batch_size is not None:
                return [()]
            self.round += 1
            return (
                (images, targets)
                for images, targets, _ in self.site.batches("train", self.round - 1, 0)
            )

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.criterion = sites_model(sites).train(), hospital(0).loss

        def loss(self, images: Tensor, targets: Tensor) -> Tensor:
            return self.criterion(self.body(images), targets)

        def metrics(self, *given: Any) -> dict[str, Any]:
            return {}

    model = Network()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    users = {number: Images(number) for number in range(sites)}
    turns = cycle(users)
    data = FederatedDataset(users.__getitem__, lambda: next(turns))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=sites,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(
            model,
            lambda weights, lr: hospital(0).optimizer(weights),
            torch.optim.SGD(model.parameters(), 1.0),
        ),
        NNTrainHyperParams(
            local_num_epochs=hospital(0).task.local_epochs,
            local_learning_rate=1.0,
            local_batch_size=None,
        ),
    )
    assert all(user.round == rounds for user in users.values())
    assert any(not weight.equal(before[name]) for name, weight in model.named_parameters())
