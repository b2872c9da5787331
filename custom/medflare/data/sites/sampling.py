"""How likely each training image is to be drawn, where a task asks for more than a shuffle."""

import torch
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.data.splits import Images
from medflare.tasks.config import TaskConfig


def sampling_groups(task: TaskConfig) -> tuple[str, ...]:
    """Names of the groups that the weights of a task's sampling are for.

    Segmentation: images without foreground and images with it. Classification: `task.classes`, and for a multilabel task the images
    without any label before them.
    """
    if task.kind == "segmentation":
        return ("without foreground", "with foreground")
    return ("no label", *task.labels) if task.target == "multilabel" else task.classes


def drawing_weights(task: TaskConfig, targets: Images) -> Tensor | None:
    """The weight of every image in a draw with replacement; None where each image comes once.

    A group's weight is shared evenly by its images, so that groups of one weight are drawn equally often. An image with several labels has
    the sum of its shares. A group without images is left out.

    Args:
        task: gives sampling, kind and target.
        targets: of the training images, as in `data.splits.Split`.

    Returns:
        float64 (N,).

    Raises:
        ConfigError: as many weights as there are groups are needed, and one of a group that has images above 0.
    """
    if task.sampling["name"] == "shuffle":
        return None
    groups = sampling_groups(task)
    weights = torch.tensor(task.sampling["weights"] or [1.0] * len(groups), dtype=torch.float64)
    if len(weights) != len(groups):
        raise ConfigError(f"task {task.name}: sampling.weights must be {len(groups)} numbers ({', '.join(groups)}), got {len(weights)}")
    members = _members(task, targets).double()
    shares = weights / members.sum(dim=0).clamp(min=1)
    found = members @ shares
    if len(found) and not bool(found.sum() > 0):
        raise ConfigError(f"task {task.name}: sampling.weights are 0 for every image that this site has; give one of its groups a weight")
    return found


def _members(task: TaskConfig, targets: Images) -> Tensor:
    """Which images are in which group, bool (N, groups)."""
    if task.kind == "segmentation":
        found = torch.tensor([bool(target.any()) for target in targets], dtype=torch.bool)
        return torch.stack([~found, found], dim=1)
    targets = targets if isinstance(targets, Tensor) else torch.stack(list(targets))  # of images that have sizes of their own
    if task.target == "multilabel":
        labels = targets.reshape(len(targets), -1) > 0
        return torch.cat([~labels.any(dim=1, keepdim=True), labels], dim=1)
    return targets.reshape(-1, 1) == torch.arange(len(task.classes))
