"""The head of a task's network, as far as methods replace or add to it."""

from torch import Tensor, no_grad

from medflare.networks.catalogue import meta_network
from medflare.networks.features import FeatureNetwork, zero_images
from medflare.tasks.config import TaskConfig


def meta_head(task: TaskConfig) -> tuple[FeatureNetwork, Tensor, bool]:
    """The task's network on the meta device, features of two images, (2, D, ...), and whether the
    head gives the logits, without for example a resizing after it.
    """
    network = meta_network(task).eval()
    with no_grad():
        images = zero_images(task)
        features, logits = network.features_and_output(images)
        is_last = network.head(features).shape == logits.shape
    return network, features, is_last
