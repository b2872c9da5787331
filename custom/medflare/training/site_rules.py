"""What a site demands of a job before it trains: enough patients, other inside sites, and most of
its images used.

A lead can choose classes, images and weights so that a model is that of one patient, whose image
the update shows.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from medflare.core.errors import ConfigError
from medflare.core.rng import seeded
from medflare.core.specs import Manifest
from medflare.data.class_counts import counts_by_image
from medflare.data.datalist import SPLITS
from medflare.data.loading import Batch, SiteData
from medflare.data.local import PLACE, Bounds
from medflare.data.transforms import resized
from medflare.networks.catalogue import meta_network, task_network
from medflare.networks.features import copied_state
from medflare.tasks.config import TaskConfig
from medflare.tasks.loss_weights import image_weights, loss_weights
from medflare.tasks.optimizers import build_optimizer
from medflare.training.batches import rows_of_patients, sampling_weights
from medflare.training.site import Site

_MOST = 0.9  # of the weight of all training images
_TRIED = 200  # patients whose images are augmented, and compared, to see what is left of them
_LEAST_DRAWS = 50  # augmented images, of few patients several of each
_LONGEST = 128  # steps that are tried; RAdam's first long step is among the first hundred
_USUAL_GRADIENT = 1.0
_TINY_GRADIENT = 1e-9
_USUAL_MOMENTUM = 0.1  # of running statistics
_LEAST_CONTRAST = 0.1  # of the patient with the most; 0.99 of the patients of real sites have it
_LEAST_OF_CHANNEL = 0.01  # the same in one channel; one of a photograph may be saturated
_ONE_PICTURE = 0.03  # of an image's deviation, below which a difference is none
_COMPARED = 2_500  # pixels of an image, evenly spaced


def check_inside_sites(site: str, count: int, bounds: Bounds) -> None:
    """Raise ConfigError for a job that may combine the updates of fewer inside sites than the site
    demands: the lead would see its model alone.
    """
    if count < bounds.inside_sites:
        raise ConfigError(
            f"site {site} does not train in a job that combines the updates of {count} inside "
            f"sites; bounds.inside_sites in its {PLACE} asks for {bounds.inside_sites}: have more "
            "inside sites, a larger min_sites or sites_per_round, and neither ifca, fedamp with "
            "sigma, mean_teacher with unlabelled_weight 0, nor a rule whose result can be one "
            "site's model (krum, geometric, those of other packages)"
        )


def check_method_bounds(site: str, hyper: Any, replies: Iterable[Manifest], bounds: Bounds) -> None:
    """Compare what a method takes beside the task with a site's bounds: passes over the images, and
    memory of the states that leave.

    Args:
        hyper: the site's hyper-parameters, a dataclass.
        replies: the manifests of its phases.

    Raises:
        ConfigError: the method is beyond the bounds.
    """
    for name, value in asdict(hyper).items():
        if name.endswith("epochs") and (value or 0) > bounds.epochs:
            raise ConfigError(
                f"site {site}: the method has {name} {value}, bounds.epochs in its {PLACE} "
                f"allows {bounds.epochs}"
            )
    for manifest in replies:
        for entry, spec in manifest.items():
            if spec.nbytes > bounds.model_bytes:
                raise ConfigError(
                    f"site {site}: the method replies with {spec.nbytes} bytes of '{entry}', "
                    f"bounds.model_bytes in its {PLACE} allows {bounds.model_bytes}"
                )


def check_used_images(
    site: str,
    task: TaskConfig,
    data: SiteData,
    minimum_patients: int,
    bounds: Bounds,
    strength: float = 0.0,
) -> None:
    """Compare what a task selects of a site's images with what the site demands.

    Args:
        strength: see `SiteAlgorithm.proximal_strength`.

    Raises:
        ConfigError: the task leaves out more images, or trains on fewer patients. The error has no
            number of patients or images: it leaves the site.
    """
    left_out = len(data.dropped) + len(data.left_out)
    images = left_out + sum(len(data.split(split)) for split in SPLITS)
    if left_out > bounds.drop_share * images:
        raise ConfigError(
            f"site {site} does not train: the task leaves out more of its images than "
            f"bounds.drop_share in its {PLACE} allows ({bounds.drop_share:g}); "
            "list more labels in the task's label_values"
        )
    patients = len(set(data.train.patients))
    enough = patients >= minimum_patients
    if enough and minimum_patients > 1:
        weighty = weighty_patients(task, data, minimum_patients)
        enough = weighty >= _most_of(minimum_patients)
    if not enough:
        raise few_patients(site, "this task's classes, loss or weights", minimum_patients)
    check_steps(site, task, minimum_patients, strength)


def check_steps(site: str, task: TaskConfig, minimum_patients: int, strength: float) -> None:
    """Raise ConfigError if the model, or a running statistic in it, is mostly that of few steps."""
    if minimum_patients < 2:
        return
    # A step may be of one image, the last of an epoch, whatever the task's batches.
    steps = weighty_steps(task, 2 * minimum_patients, strength)
    if steps < _most_of(minimum_patients):
        cause = "this task's optimizer, or the method's weight of a proximal term"
        raise few_patients(site, cause, minimum_patients)
    if weighty_batches(task) < _most_of(minimum_patients):
        cause = "this task's network and its momentum of running statistics"
        raise few_patients(site, cause, minimum_patients)


def few_patients(site: str, cause: str, minimum_patients: int) -> ConfigError:
    """The error of a site whose training is mostly on fewer patients than its minimum."""
    return ConfigError(
        f"site {site} does not train, and sends no model: with {cause}, training is on fewer "
        f"patients than its minimum_patients ({minimum_patients})"
    )


def check_contrast(site: Site) -> None:
    """Raise ConfigError if the task's intensity transform, or its augmentation, makes the training
    images of more than a tenth of the patients plain, or one picture: the model could be that of a
    few others, and a mean over a class, or a group of patients, the image of one.
    """
    if site.minimum_patients < 2:
        return
    train = site.data.train
    rows = [*rows_of_patients(train.patients).values()]
    of_channels = _contrasts(rows, lambda row: _deviations(train.images[row]))
    step = math.ceil(len(rows) / _TRIED)
    chosen = rows[::step]
    middle = [of_patient[len(of_patient) // 2] for of_patient in chosen]
    distinct = distinct_deviations(train.images[row] for row in middle)
    contrasts = of_channels.amax(dim=1)
    makes_plain = False
    for of_patients in (contrasts, distinct.amax(dim=1)):
        makes_plain |= 0 < _contrasted(of_patients) < int(_MOST * len(of_patients))
    # A transform may treat each channel in its own way; patients may lack a channel.
    for channel in (*of_channels.T, *distinct.T):
        makes_plain |= 0 < _contrasted(channel, _LEAST_OF_CHANNEL) < _most_of(site.minimum_patients)
    if site.task.augment:
        draws = math.ceil(_LEAST_DRAWS / len(chosen))
        of_draws = [
            _contrasts(chosen, partial(_contrast_after_augmentation, site, draw))
            for draw in range(draws)
        ]
        augmented = torch.cat(of_draws).amax(dim=1)
        # Chance decides in training anew: what hides some here may hide all but one there.
        makes_plain |= _contrasted(augmented) < _MOST * draws * _contrasted(contrasts[::step])
    if makes_plain:
        raise ConfigError(
            f"site {site.name} does not train, and sends no model: the task's intensity "
            "transform or augmentation makes the training images of more than a tenth of the "
            "patients plain, or one picture, which a site with minimum_patients does not allow; "
            "give the transforms a wider range"
        )


def _contrast_after_augmentation(site: Site, draw: int, row: int) -> Tensor:
    """The contrast (channels,) that the task's augmentation leaves of a training image in the size
    of the network's input.

    It is the smaller deviation of its differences to a plain copy and to one of shuffled pixels
    with the same random numbers, so that noise is no contrast, even if it has the image's range.
    """
    image, target = site.data.train[row]
    size = site.task.size
    if image.shape[1:] != size:  # the augmentation is made for patches
        image = resized(image[None], size)[0]
        target = target.new_zeros((*target.shape[: -len(size)], *size))
    order = torch.from_numpy(_secret_numbers(site, image, draw).permutation(math.prod(size)))
    shuffled = image.flatten(1)[:, order].reshape(image.shape)
    results = []
    for picture in (image, torch.zeros_like(image) + image.mean(), shuffled):
        batch = Batch(picture[None], target[None], torch.tensor([row]))
        results.append(site.augmented(batch, _secret_numbers(site, image, draw)).images[0])
    augmented, *copies = results
    return torch.stack([_deviations(augmented - copy) for copy in copies]).amin(dim=0)


def _secret_numbers(site: Site, image: Tensor, draw: int) -> np.random.RandomState:
    """Random numbers that follow from the image's pixels: a lead that knew them would choose
    transforms which hide no image here. They follow from the task, too, so that another task's
    answer tells nothing.
    """
    digest = hashlib.blake2b(image.cpu().numpy().tobytes(), digest_size=4)
    digest.update(f"{site.task.fingerprint()} {draw}".encode())
    return np.random.RandomState(int.from_bytes(digest.digest(), "big"))


def _contrasts(rows: Sequence[Sequence[int]], contrast_of: Callable[[int], Tensor]) -> Tensor:
    """The standard deviations (patients, channels) of the patients' images, as the network gets
    them.

    If a patient has several images, the middle one counts: the first and last slices of a volume
    may be empty. If the middle ones of all patients are plain, every image counts.

    Args:
        rows: of the images of each patient.
        contrast_of: the standard deviations (channels,) of a row.
    """
    middle = [contrast_of(of_patient[len(of_patient) // 2]) for of_patient in rows]
    deviations = torch.stack(middle)
    if not deviations.any():
        largest = []
        for of_patient in rows:
            of_images = [contrast_of(row) for row in of_patient]
            largest.append(torch.stack(of_images).amax(dim=0))
        deviations = torch.stack(largest)
    return deviations


def _contrasted(deviations: Tensor, fraction: float = _LEAST_CONTRAST) -> int:
    """The number of deviations that are at least this fraction of the largest one; 0 if all are
    0.
    """
    largest = deviations.max()
    return int(((deviations >= fraction * largest) & (largest > 0)).sum())


def distinct_deviations(images: Iterable[Tensor]) -> Tensor:
    """The standard deviation (images, channels) of each image (C, ...), or where it is under 3 %
    of this, that of its difference to the second nearest other one of its shape.

    This is 0 for a picture that three patients have: an argument of the transform may have painted
    it. Two may be copies, and frames of one camera differ by its noise.
    """
    sampled = []
    by_shape = defaultdict(list)
    for number, image in enumerate(images):
        pixels = image.double().flatten(1)
        sampled.append(pixels[:, :: math.ceil(pixels.shape[1] / _COMPARED)])
        by_shape[image.shape].append(number)
    plain = torch.stack(list(map(_deviations, sampled)))
    distinct = plain.clone()
    for numbers in by_shape.values():
        if len(numbers) > 2:
            pixels = torch.stack([sampled[number] for number in numbers], dim=1)
            pixels = pixels - pixels.mean(dim=2, keepdim=True)
            distinct[numbers] = torch.stack(list(map(_to_second_nearest, pixels)), dim=1)
    return torch.where(distinct < _ONE_PICTURE * plain, distinct, plain)


def _to_second_nearest(pixels: Tensor) -> Tensor:
    """The root mean square difference of images (N, P) to the second nearest other one."""
    # Not by products, which would round off small differences of large values.
    distances = torch.cdist(pixels, pixels, compute_mode="donot_use_mm_for_euclid_dist")
    distances.fill_diagonal_(math.inf)
    nearest = distances.kthvalue(2).values
    return nearest / math.sqrt(pixels.shape[1])


def _deviations(image: Tensor) -> Tensor:
    """The standard deviation of each channel of an image."""
    image = image.double().flatten(1)
    image = image - image[:, :1]  # of a plain image exactly 0
    return image.std(dim=1, correction=0)


def weighty_patients(task: TaskConfig, data: SiteData, minimum_patients: int) -> int:
    """The smallest number of training patients that have 0.9 of the weight in training an output;
    ceil(0.9 n) if all n have the same weight.

    A patient's weight is the mean over the patient's images of the weight in sampling, times that
    in the loss (see `loss_weights`): what the task chooses, not how many images a patient has.

    Where fewer patients than `minimum_patients` have a class, or lack it, their number does not
    leave the site, and a lead that bisects weights must not find it from accepted and refused jobs.
    The result is then the `_worst_count`, which depends on the task and the number of all patients
    alone. Weights are not fixed by the first job, so that a researcher can compare a loss with and
    without them.

    Raises:
        ConfigError: see `loss_weights`.
    """
    train = data.train
    drawn = sampling_weights(task, train.targets)
    patients = torch.from_numpy(np.unique(train.patients, return_inverse=True)[1])
    if drawn is not None:
        drawn_patients = len(patients[drawn > 0].unique())
        if drawn_patients < minimum_patients:
            return drawn_patients
    if drawn is None:
        drawn = torch.ones(len(train), dtype=torch.float64)
    if data.annotated == ():  # without labels no class has a weight
        return _count_with_most(_means(drawn, patients))
    weights = loss_weights(task, data.annotated)
    shown = counts_by_image(train.targets, task) > 0
    if _has_small_group(task, shown, patients, minimum_patients):
        count = len(patients[drawn > 0].unique())
        columns = [column for column in torch.cat(weights, dim=1).T if column.any()]
        return min(_worst_count(task, column, count, minimum_patients) for column in columns)
    by_image = torch.cat([image_weights(task, part, shown) for part in weights], dim=1)
    used = [drawn * column for column in by_image.T if column.any()]
    return min((_count_with_most(_means(column, patients)) for column in used), default=0)


def check_class_weights(site: Site, weights_of: Callable[[int], tuple[float, float]]) -> None:
    """Raise ConfigError if a method's own loss of a classification leaves nine tenths of the
    training to fewer patients than the minimum, where fewer have some class.

    The answer does not depend on how many these are, see `weighty_patients`.

    Args:
        weights_of: number of patients with the class that counts most -> the weight of an image of
            theirs, and the least weight of any other, see `loss_weights`.
    """
    task = site.task
    minimum = site.minimum_patients
    if minimum < 2 or task.kind == "segmentation" or site.data.annotated == ():
        return
    train = site.data.train
    patients = torch.from_numpy(np.unique(train.patients, return_inverse=True)[1])
    shown = counts_by_image(train.targets, task) > 0
    if not _has_small_group(task, shown, patients, minimum):
        return
    count = len(patients.unique())
    drawn = task.sampling.weights or (1.0,)
    for few in range(1, min(minimum, count)):
        heavy, light = weights_of(few)
        if task.sampling.name != "shuffle":  # see `_worst_count`
            heavy *= max(drawn) / few
            light *= min(drawn) / (count - few)
        if _count_with_most([heavy] * few + [light] * (count - few)) < _most_of(minimum):
            raise few_patients(
                site.name, "this task's sampling, or the method's weights of classes", minimum
            )


def weighty_steps(task: TaskConfig, steps: int, strength: float = 0.0) -> int:
    """The smallest number of steps of the task's optimizer that have 0.9 of the change of the model
    after so many steps or more.

    Each step has a gradient in a coordinate of its own, and changes this one. With torch's
    optimizers and their usual arguments the result is half the steps or more; it is one for SGD
    with `dampening=1`, where the first step's gradient alone counts, and 0 with a weight decay of 1
    / lr or more, where the last one's does. RAdam's steps are as long as gradients, which may be
    tiny, until one that its beta2 chooses; Rprop's grow by a factor of its etas while gradients are
    alike.

    Args:
        strength: see `SiteAlgorithm.proximal_strength`; it acts as a weight decay does.
    """
    if task.optimizer["lr"] * (task.optimizer.get("weight_decay", 0.0) + strength) >= 1:
        return 0  # with the schedule's factor it may be 1 in some round
    alike = _after_steps(task, torch.ones(steps, 1, dtype=torch.float64))
    lengths = alike.diff(dim=0, prepend=torch.zeros_like(alike[:1])).abs().flatten()
    counts = [_count_with_most(lengths.tolist())]
    longest = max(steps, _LONGEST)
    # A tiny gradient would be nothing beside a proximal term.
    for size, tried in ((_USUAL_GRADIENT, strength), (_TINY_GRADIENT, 0.0)):
        gradients = size * torch.eye(longest, dtype=torch.float64)
        changes = _after_steps(task, gradients, tried) - _after_steps(task, 0 * gradients)
        for done in range(steps, longest + 1):
            counts.append(_count_with_most(changes[done - 1, :done].abs().tolist()))
    return min(counts)


def weighty_batches(task: TaskConfig) -> float:
    """The smallest number of batches that have 0.9 of a running statistic of the network, which
    leaves the site with the model; infinite with momenta up to the usual one.

    One if the network keeps other numbers of the images, as the code book of a VQ-VAE does.
    """
    counts = [math.inf]
    constants: list[Tensor] = []
    for layer in meta_network(task).modules():
        if not isinstance(layer, _NormBase):
            parameters = layer.parameters(recurse=False)
            constants += [weight for weight in parameters if not weight.requires_grad]
            constants += layer.buffers(recurse=False)
        elif layer.track_running_stats:
            momentum: Any = layer.momentum or 0.0  # None: the mean of all batches
            if not 0 <= momentum < 1:
                counts.append(1)
            elif momentum > _USUAL_MOMENTUM:
                counts.append(math.ceil(math.log(1 - _MOST, 1 - momentum)))
    if any(tensor.is_floating_point() for tensor in constants) and _keeps_numbers(task):
        counts.append(1)
    return min(counts)


def _keeps_numbers(task: TaskConfig) -> bool:
    """Whether the network's state changes by images that it gets in training, without a step, apart
    from its normalisations.
    """
    with seeded(0, "kept numbers"), torch.no_grad():
        network = task_network(task).train()
        for layer in network.modules():
            if isinstance(layer, _NormBase):
                layer.eval()
        before = copied_state(network)
        network(torch.rand(2, task.image_channels, *task.size))
    after = network.state_dict()
    return any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


def _after_steps(task: TaskConfig, gradients: Tensor, strength: float = 0.0) -> Tensor:
    """The weights (steps, K), at first zero, after each step of the task's optimizer with a row of
    `gradients` (steps, K), and with a proximal term to zero.
    """
    weights = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = build_optimizer(task.optimizer, [weights], f"task {task.name}")
    after = []
    for gradient in gradients:
        weights.grad = gradient + strength * weights.detach()
        optimizer.step()
        after.append(weights.detach().clone())
    return torch.stack(after)


def _worst_count(task: TaskConfig, weights: Tensor, patients: int, minimum: int) -> int:
    """The smallest number of patients with 0.9 of an output's weight, whoever of the `patients`
    have which classes, if fewer than `minimum` have the heaviest ones.

    Args:
        weights: (patterns,), in the loss, see `loss_weights`.
    """
    groups = _drawn_groups(task, weights)
    heaviest = sorted((float(group.max()) for group in groups), reverse=True)
    lightest = min(float(group.min()) for group in groups)
    counts = []
    for few in range(1, min(minimum, patients)):
        others = patients - few
        if len(groups) == 1:
            counts.append(_count_with_most([heaviest[0]] * few + [lightest] * others))
            continue
        # A group has the same weight in an epoch, however few its patients are.
        heavy = sum(heaviest[: min(few, len(groups) - 1)])
        counts.append(_count_with_most([heavy / few] * few + [lightest / others] * others))
    return min(counts, default=patients)


def _drawn_groups(task: TaskConfig, weights: Tensor) -> list[Tensor]:
    """The weights of patterns in loss and sampling, by group of the sampling; a single group where
    each image comes once.
    """
    if task.sampling.name == "shuffle":
        return [weights]
    classification = task.kind == "classification"
    groups = weights.split(1) if classification else (weights[:1], weights[1:])
    factors = task.sampling.weights or [1.0] * len(groups)
    drawn = [factor * group for factor, group in zip(factors, groups, strict=True)]
    if task.kind == "segmentation":  # slices without foreground may be left out
        drawn = [group for group, factor in zip(drawn, factors, strict=True) if factor > 0]
    return drawn


def _has_small_group(
    task: TaskConfig, shown: Tensor, patients: Tensor, minimum_patients: int
) -> bool:
    """Whether fewer patients than the minimum, but some, have images with a class, without it, or
    without any label.
    """
    labels = shown[:, 1:] if task.target == "multiclass" else shown[:, -len(task.labels) :]
    groups = [*shown.T, *~shown.T, ~labels.any(dim=1)]
    counts = [len(patients[group].unique()) for group in groups]
    return any(0 < count < minimum_patients for count in counts)


def _means(weights: Tensor, patients: Tensor) -> list[float]:
    """The mean weight of each patient's images."""
    images = torch.bincount(patients)
    return (torch.bincount(patients, weights) / images).tolist()


def _count_with_most(weights: Iterable[float]) -> int:
    """The smallest number of `weights` that have 0.9 of their sum."""
    descending = sorted(weights, reverse=True)
    total = sum(descending)
    missing = _MOST * total
    count = 0
    while count < len(descending) and missing > 1e-12 * total:
        missing -= descending[count]
        count += 1
    return count


def _most_of(patients: int) -> int:
    return math.ceil(_MOST * patients)
