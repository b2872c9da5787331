"""Small tasks for tests: they train in a moment and still learn something."""

from collections.abc import Sequence
from typing import Any

import torch

from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.metrics import Images, Portion, Scores, measure
from medflare.training.patches import Predictor
from medflare.training.site import Site

SEGMENTATION: dict[str, Any] = {
    "name": "squares",
    "kind": "segmentation",
    "target": "binary",
    "labels": ["square"],
    "channels": 1,
    "size": [16, 16],
    "network": {"name": "unet", "channels": [4, 8], "norm": "batch"},
    "loss": {"name": "dice"},
    "optimizer": {"name": "adam", "lr": 0.01},
    "batch_size": 4,
    "local_epochs": 1,
    "metric": "dice",
}
CLASSIFICATION: dict[str, Any] = {
    **SEGMENTATION,
    "name": "shades",
    "kind": "classification",
    "target": "multiclass",
    "labels": ["dark", "medium", "bright"],
    "network": {"name": "small_cnn", "channels": [4, 8]},
    "loss": {"name": "ce"},
    "metric": "accuracy",
}
INSTANCE_UNET: dict[str, Any] = {"name": "unet", "channels": [4, 8], "norm": "instance"}


def small_task(kind: str = "segmentation", **changes: Any) -> TaskConfig:
    """ "segmentation" or "classification" with some settings changed."""
    return load_task(
        {**{"segmentation": SEGMENTATION, "classification": CLASSIFICATION}[kind], **changes}
    )


def tiny_phantom(**changes: Any) -> dict[str, Any]:
    """The embedded phantom, a quarter of its size, with a network of two levels and some settings changed."""
    small = {"size": [32, 32], "network": INSTANCE_UNET, "batch_size": 16}
    return {**load_task("phantom").to_dict(), **small, **changes}


def tiny_grades(**changes: Any) -> dict[str, Any]:
    """The embedded photographs with grades, a quarter of their size, for a network of ours: what trains it imports no MONAI."""
    network = {"name": "small_cnn", "channels": [4, 8]}
    small = {"size": [16, 16], "network": network, "batch_size": 16}
    return {**load_task("phantom_grades").to_dict(), **small, **changes}


def predicted(site: Site, predictor: Predictor, split: str = "test") -> Any:
    """Probabilities of every image of a split in its order: (N, outputs, ...), or a list where sizes differ."""
    by_row = {}
    for outputs, _, rows in site.predictions(predictor, split):
        for row, output in zip(rows.tolist(), outputs, strict=True):
            by_row[row] = output
    ordered = [by_row[row] for row in sorted(by_row)]
    return ordered if site.task.image_mode == "patch" else torch.stack(ordered)


def score(
    probabilities: Images,
    targets: Images,
    patients: Sequence[str],
    task: TaskConfig,
    metrics: Sequence[str],
    spacings: Sequence[Any] = (),
) -> Scores:
    """The named metrics of whole splits: pictures of one size all at once, volumes and images of many sizes one by one."""
    portions: list[Portion] = [(probabilities, targets, None)]
    if not (
        isinstance(probabilities, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and len(targets)
        and not spacings
    ):
        every = zip(probabilities, targets, spacings or [None] * len(targets), strict=True)
        portions = [(one[None], target[None], spacing) for one, target, spacing in every]
    return measure(portions, task, metrics).scores(patients)
