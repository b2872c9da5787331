"""Test-time training (Sun et al., ICML 2020): a second head says by how many quarters an image was
turned; before an image is predicted, the body learns that of the image itself.

    training:  min over θ_e, θ_m, θ_s of  mean l_m(x, y; θ_e, θ_m) + l_s(x; θ_e, θ_s)
    test:      min over θ_e of  l_s(x; θ_e, θ_s), by SGD from the trained θ_e for each image

l_s is the cross-entropy of the four turns in the plane of the last two axes (of two half turns if
the image is not square there); θ_e is the network's
body, θ_s one linear layer on its pooled features, so that segmentation has the same loss per image.
BatchNorm keeps the statistics of the training. The method `ttt` trains such models.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from medflare.adaptation.online import Online
from medflare.core.errors import ConfigError, StateError
from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.settings import strict_dataclass
from medflare.core.states import misfit
from medflare.networks.catalogue import feature_width
from medflare.networks.features import FeatureNetwork, Probabilities, pooled
from medflare.tasks.config import TaskConfig

ROTATION = "rotation"  # the entry of a message with θ_s


@strict_dataclass
class TTTSettings:
    """Arguments of `TestTimeTraining`."""

    rate: float = param(1e-3, "learning rate of SGD", low=0)
    steps: int = param(10, "on each image", low=0, high=100)


def turned(images: Tensor, turns: Tensor) -> Tensor:
    """Images (N, C, ..., H, W), each turned by `turns`, integers (N,), quarters; by halves unless
    H = W.

    Examples:
        >>> turned(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([1]))
        tensor([[[[2, 4],
                  [1, 3]]]])
    """
    pairs = zip(images, turns.tolist(), strict=True)
    unit = 1 if images.shape[-1] == images.shape[-2] else 2
    return torch.stack([image.rot90(unit * turn, (-2, -1)) for image, turn in pairs])


def rotation_loss(
    network: FeatureNetwork, head: nn.Module, images: Tensor, turns: Tensor
) -> Tensor:
    """l_s: the mean cross-entropy of the turns of images (N, C, ..., H, W)."""
    features, _ = network.features_and_output(turned(images, turns))
    return functional.cross_entropy(head(pooled(features)), turns.to(images.device))


def rotation_head(task: TaskConfig) -> nn.Linear:
    """θ_s of the task's network, zeros."""
    turns = 4 if task.size[-1] == task.size[-2] else 2
    head = nn.utils.skip_init(nn.Linear, feature_width(task), turns)
    for weight in head.parameters():
        nn.init.zeros_(weight)
    return head


class TestTimeTraining(Online):
    """A model, images to probabilities, that is trained on every image alone.

    Raises:
        ConfigError: the model is not one network with a rotation head.
        StateError: the head does not fit the network.
    """

    __test__ = False  # not a test, in spite of its name

    def __init__(self, model: nn.Module, task: TaskConfig, message: Message, settings: TTTSettings):
        if ROTATION not in message.states or not isinstance(model, Probabilities):
            raise ConfigError(
                "adaptation ttt: the model has no rotation head; train it with the method ttt"
            )
        model = copy.deepcopy(model).eval()
        head = rotation_head(task)
        reason = misfit(message.states[ROTATION], head.state_dict())
        if reason:
            raise StateError(f"the rotation head belongs to another network: {reason}")
        head.load_state_dict(message.states[ROTATION])

        network: Any = model.network
        sgd = partial(torch.optim.SGD, lr=settings.rate)
        super().__init__(model, network.body.parameters(), sgd, batch_size=1)
        self.settings = settings
        self.network = network
        self.head = head.requires_grad_(False)

    def adapted(self, images: Tensor) -> Tensor:
        self.reset()
        turns = torch.arange(self.head.out_features)
        copies = images.expand(len(turns), *images.shape[1:])
        for _ in range(self.settings.steps):
            self.descend(rotation_loss(self.network, self.head, copies, turns))
        return self.model(images)
