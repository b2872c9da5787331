"""What a site demands of a job before it trains: enough patients, other inside sites, and most of
its images used.

A lead can choose classes, images and weights so that a model is that of one patient, whose image
the update shows.
"""

import math
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.data.loading import SiteData
from medflare.data.local import PLACE, Bounds
from medflare.data.targets import counts_by_image
from medflare.tasks.config import TaskConfig
from medflare.training.batches import sampling_weights

_MOST: Final = 0.9  # of the weight of all training images


def check_inside_sites(site: str, count: int, bounds: Bounds) -> None:
    """Raise ConfigError for a job that may combine the updates of fewer inside sites than the site
    demands: the lead would see its model alone.
    """
    if count < bounds.inside_sites:
        raise ConfigError(
            f"site {site} does not train in a job that combines the updates of {count} inside "
            f"sites; bounds.inside_sites in its {PLACE} asks for {bounds.inside_sites}: have more "
            "inside sites, a larger min_sites or sites_per_round, and another rule than krum"
        )


def check_selection(
    site: str, task: TaskConfig, data: SiteData, minimum_patients: int, bounds: Bounds
) -> None:
    """Compare what a task selects of a site's images with what the site demands.

    Raises:
        ConfigError: the task leaves out more images, or trains on fewer patients. The error has no
            number of patients or images: it leaves the site.
    """
    left_out = len(data.dropped) + len(data.left_out)
    images = left_out + sum(len(data.split(split)) for split in ("train", "validation", "test"))
    if left_out > bounds.drop_share * images:
        raise ConfigError(
            f"site {site} does not train: the task leaves out more of its images than "
            f"bounds.drop_share in its {PLACE} allows ({bounds.drop_share:g}); "
            "list more labels in the task's label_values"
        )
    patients = len(set(data.train.patients))
    weighty_minimum = math.ceil(_MOST * minimum_patients)
    if patients < minimum_patients or weighty_patients(task, data) < weighty_minimum:
        raise ConfigError(
            f"site {site} does not train, and sends no model: with this task's classes and "
            "weights, training is on fewer patients than its minimum_patients "
            f"({minimum_patients})"
        )


def weighty_patients(task: TaskConfig, data: SiteData) -> int:
    """The smallest number of training patients that have 0.9 of the weight in training; of n equal
    ones ceil(0.9 n).

    A patient's weight is the mean over the patient's images of the weight in sampling, times that
    of the class in the loss (see `loss_factors`): what the task chooses, not how many images a
    patient has.
    """
    train = data.train
    weights = sampling_weights(task, train.targets)
    if weights is None:
        weights = torch.ones(len(train), dtype=torch.float64)
    if data.annotated != ():  # without labels no class has a weight
        weights = weights * loss_factors(task, counts_by_image(train.targets, task) > 0)
    by_patient: dict[str, list[float]] = {}
    for patient, weight in zip(train.patients, weights.tolist(), strict=True):
        by_patient.setdefault(patient, []).append(weight)
    means = sorted(map(fmean, by_patient.values()), reverse=True)
    missing = _MOST * sum(means)
    count = 0
    while count < len(means) and missing > 1e-12 * sum(means):
        missing -= means[count]
        count += 1
    return count


def loss_factors(task: TaskConfig, present: Tensor) -> Tensor:
    """The factor of each image in the loss by the task's class weights, float64 (N,): the largest
    of its classes.

    Args:
        present: bool (N, classes), whether an image shows a class of `task.classes`.
    """
    listed = task.loss.get("weights", task.loss.get("weight"))
    if not isinstance(listed, list | tuple):
        return torch.ones(len(present), dtype=torch.float64)
    factors = torch.ones(present.shape[1], dtype=torch.float64)
    factors[-len(listed) :] = torch.tensor(listed, dtype=torch.float64).abs()[: len(factors)]
    largest = (present * factors).amax(dim=1)
    if task.target == "multiclass":
        return largest
    # The weights are those of positives; an image without any counts once.
    return largest.clamp(min=1.0)
