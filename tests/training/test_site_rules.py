"""What a site demands before it trains, whatever classes, images and weights the lead chooses."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.loading import SiteData, Split
from medflare.data.local import Bounds, LocalSettings
from medflare.data.transforms import Preprocessing
from medflare.federation.participant import Participant
from medflare.methods.catalogue import get_method
from medflare.networks.catalogue import task_network
from medflare.networks.features import copied_state
from medflare.privacy.ledger import Budget
from medflare.tasks import optimizers
from medflare.tasks.config import Sampling, TaskConfig, load_task, presets
from medflare.tasks.loss_weights import loss_weights
from medflare.training.site import Site
from medflare.training.site_rules import (
    check_contrast,
    check_inside_sites,
    check_used_images,
    distinct_deviations,
    weighty_batches,
    weighty_patients,
    weighty_steps,
)

TASK = small_task("classification")  # dark, medium, bright
RARE = [0] * 12 + [1] * 8 + [2]  # one patient of the last class
ALONE = 1e-9


def pictures(count: int) -> torch.Tensor:
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def site_of(
    labels: Sequence[int], task: TaskConfig = TASK, patients: Sequence[str] | None = None
) -> Site:
    names = tuple(patients or map(str, range(len(labels))))
    split = Split(pictures(len(labels)), torch.tensor(labels), names, names)
    return Site("A", task, SiteData(split, split, split))


def weighted(*weights: float) -> TaskConfig:
    return replace(TASK, sampling=Sampling("weighted", weights))


def lossy(*weights: float) -> TaskConfig:
    return replace(TASK, loss={"name": "ce", "weights": list(weights)})


def problem(site: Site, minimum: int = 5, sites: Sequence[str] = ("A", "B"), **bounds: Any) -> str:
    try:
        check_inside_sites("A", len(sites), Bounds(**bounds))
        check_used_images("A", site.task, site.data, minimum, Bounds(**bounds))
        site.minimum_patients = minimum
        check_contrast(site)
    except ConfigError as error:
        return str(error)
    return ""


BALANCED = Sampling("balanced")


@pytest.mark.parametrize(
    ("method", "hyper", "changes", "refused"),
    [
        ("prr", {"beta": 200.0}, {}, True),  # no other class competes with the most frequent one
        ("prr", {"beta": 200.0, "cpa": "off"}, {}, False),
        ("prr", {"tau": 1.0}, {}, True),  # γ may be 2000
        ("prr", {}, {}, False),
        ("fedeamc", {}, {"sampling": BALANCED}, True),  # both balance the classes
        ("fedeamc", {}, {}, False),
        ("fedrod", {}, {"sampling": BALANCED}, True),
        ("fedrod", {}, {"loss": {"name": "focal", "gamma": 4.0}}, True),  # on shifted logits
        ("fedrod", {}, {}, False),
    ],
)
def test_the_loss_of_a_method_does_not_leave_a_class_of_few_alone(
    method: str, hyper: dict[str, Any], changes: dict[str, Any], refused: bool
) -> None:
    """Whatever their number, and only where a class has few."""
    task = replace(TASK, network={"name": "small_cnn", "channels": [4], "batch_norm": True})
    task = replace(task, **changes)
    chosen = get_method(method)
    plan = chosen.plan(task, ("A", "B"), {"site": hyper})
    for rare in (1, 4, 5):
        site = site_of([0, 1] * 15 + [2] * rare, task)
        site.minimum_patients = 5
        model = copied_state(site.network())
        algorithm = chosen.make_site(site, plan)
        names = algorithm.phases["train"].manifest(plan)["model"].tensors
        incoming = Message({"model": {name: model[name] for name in names}})
        if method == "prr":
            incoming.meta["class_totals"] = [[150.0, 120.0, 40.0]]  # of the other sites
        if refused and rare < 5:
            with pytest.raises(ConfigError, match="method's weights of classes"):
                algorithm.perform("train", 0, incoming)
        else:
            algorithm.perform("train", 0, incoming)


@pytest.mark.parametrize("minimum", [0, 1, 4, 5, 6, 20])
def test_a_site_trains_on_at_least_its_minimum_of_patients(minimum: int) -> None:
    assert bool(problem(site_of([0, 1, 2, 0, 1]), minimum)) == (minimum > 5)
    assert not problem(site_of([0] * 20), minimum)


def test_patients_count_and_not_images() -> None:
    assert problem(site_of([0] * 40, patients=["one", "two"] * 20))
    assert not problem(
        site_of([0] * 44, patients=["one"] * 40 + ["two", "three", "four", "five"])
    ), "the lead did not choose that"


@pytest.mark.parametrize(
    "task",
    [
        weighted(0, 0, 1),
        weighted(ALONE, ALONE, 1),
        lossy(ALONE, ALONE, 1.0),
        lossy(1e-3, 1e-3, 1.0),
    ],
)
def test_weights_do_not_make_a_model_of_one_patient(task: TaskConfig) -> None:
    """The patient of the rare class has nearly all of the gradient."""
    assert weighty_patients(task, site_of(RARE, task).data, 5) < 5
    assert "minimum_patients" in problem(site_of(RARE, task))
    assert not problem(site_of([0] * 12 + [1] * 8 + [2] * 6, task))


@pytest.mark.parametrize(
    "task", [TASK, replace(TASK, sampling=Sampling("balanced")), lossy(1.0, 1.5, 10.0)]
)
def test_usual_weights_for_a_rare_class_are_allowed(task: TaskConfig) -> None:
    assert not problem(site_of(RARE, task))


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "sgd", "momentum": 0.9, "dampening": 1.0},
        {"name": "sgd", "momentum": 0.9, "dampening": 0.99},
        {"name": "sgd", "momentum": 1000.0},
        {"name": "sgd", "weight_decay": 100.0},
        {"name": "sgd", "weight_decay": 200.0},  # 1 / lr in the first round of a warm-up
        {"name": "adamw", "weight_decay": 99.0, "betas": [0.0, 0.999]},
        {"name": "Adagrad", "lr_decay": 1e9},
        {"name": "RMSprop", "momentum": 1000.0},
        # The 54th step is the first that is not as short as the gradient.
        {"name": "RAdam", "betas": [0.0, 0.6666666685254268], "eps": 1e-30},
        # Each step is as long as all before it, times ten thousand.
        {"name": "Rprop", "etas": [0.5, 1e4], "step_sizes": [1e-30, 1e30]},
    ],
)
def test_an_optimizer_does_not_make_a_model_of_one_step(arguments: dict[str, Any]) -> None:
    task = replace(TASK, optimizer={"lr": 0.01, **arguments}, batch_size=1)
    assert "optimizer" in problem(site_of([0, 1, 2] * 10, task))
    last_alone = replace(task, accumulate=29)  # the last of an epoch's steps has one of 30 images
    assert problem(site_of([0, 1, 2] * 10, last_alone))


@pytest.mark.parametrize("name", sorted(optimizers._usable()))
@pytest.mark.parametrize("minimum", [2, 5, 20])
def test_usual_optimizers_are_allowed(name: str, minimum: int) -> None:
    task = replace(TASK, optimizer={"name": name, "lr": 0.01}, batch_size=1)
    # Rprop's steps grow by 1.2, so that 13 of 40 have nine tenths of the way.
    is_refused = name == "Rprop" and minimum == 20
    assert bool(problem(site_of([0, 1, 2] * 10, task), minimum)) == is_refused


def test_steps_of_equal_weight() -> None:
    """Of SGD's ten equal steps nine have 0.9 of the change; numbers that overflow are none."""
    assert weighty_steps(replace(TASK, optimizer={"name": "sgd", "lr": 0.1}), 10) == 9
    assert (
        weighty_steps(replace(TASK, optimizer={"name": "sgd", "lr": 1, "momentum": 1e300}), 10) == 0
    )
    # Of 40 steps, each 1.5 times as long as the one before, the last m have 1 - 1.5 ** -m.
    growing = {"name": "Rprop", "lr": 0.01, "etas": [0.5, 1.5], "step_sizes": [1e-30, 1e30]}
    assert weighty_steps(replace(TASK, optimizer=growing), 40) == 6


@pytest.mark.parametrize(
    ("strength", "few"), [(0.0, False), (1.0, False), (50.0, True), (100.0, True)]
)
def test_a_term_to_an_earlier_model_does_not_make_a_model_of_one_step(
    strength: float, few: bool
) -> None:
    """With a strength of 1 / lr, 100, a model is the earlier one and its last step."""
    task = replace(TASK, optimizer={"name": "sgd", "lr": 0.01}, batch_size=1)
    assert (weighty_steps(task, 10, strength) < 5) == few


def test_a_proximal_term_hides_no_optimizer_of_one_step() -> None:
    radam = {"name": "RAdam", "lr": 0.01, "betas": [0.0, 0.6666666685254268], "eps": 1e-30}
    assert weighty_steps(replace(TASK, optimizer=radam), 10, 1e-3) == 1


@pytest.mark.parametrize(
    ("norm", "few"),
    [
        (["batch", {"momentum": 1.0}], True),
        (["batch", {"momentum": 0.6}], True),
        (["batch", {"momentum": -9.0}], True),  # each batch counts ten times as much as the next
        (["instance", {"momentum": 1.0, "track_running_stats": True}], True),
        (["batch", {"momentum": None}], False),
        ("batch", False),
        ("instance", False),
    ],
)
def test_running_statistics_that_leave_are_not_of_one_batch(norm: Any, few: bool) -> None:
    network = {
        "name": "Classifier",
        "channels": [4, 4],
        "strides": [2, 2],
        "num_res_units": 0,
        "norm": norm,
    }
    task = replace(TASK, network=network, batch_size=1)
    assert bool(problem(site_of([0, 1, 2] * 10, task))) == few
    usual = replace(task, network={**network, "norm": "batch"})
    assert weighty_batches(usual) == math.inf, "also for more patients than batches"


def test_a_code_book_that_leaves_is_not_of_one_batch() -> None:
    """That of a VQ-VAE holds sums of the features of the last images, without any step."""
    sizes = {"downsample_parameters": [[2, 4, 1, 1]], "upsample_parameters": [[2, 4, 1, 1, 0]]}
    code_book = {"channels": [8], "num_res_layers": 1, "num_res_channels": [8], **sizes}
    codes = {**code_book, "num_embeddings": 4, "embedding_dim": 4, "ddp_sync": False}
    task = small_task("segmentation", size=(16, 16))
    vqvae = replace(task, network={"name": "VQVAE", "decay": 0.0, **codes})
    network = task_network(vqvae)
    for image in pictures(3).split(1):
        network.train()(image)
        (counts,) = [
            tensor
            for name, tensor in network.state_dict().items()
            if name.endswith("ema_cluster_size")
        ]
        assert counts.sum().item() == 64, "the positions of one image"
    assert weighty_batches(vqvae) == 1
    for name in ("SwinUNETR", "SegResNet"):
        usual = replace(task, network={"name": name}, size=(64, 64))
        assert weighty_batches(usual) == math.inf


ATTACKS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "tiny weight of the others": ("binary", ["finding"], {"name": "ce", "weights": [1e-30]}),
    "alpha of a focal loss": ("binary", ["finding"], {"name": "FocalLoss", "alpha": 1.0}),
    "alpha of a Tversky loss": ("binary", ["finding"], {"name": "TverskyLoss", "alpha": 0.0}),
    "Dice of an undecided network": ("binary", ["finding"], {"name": "DiceLoss"}),
    "alpha with a softmax": ("multiclass", ["no", "yes"], {"name": "FocalLoss", "alpha": 1.0}),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("ones", [1, 39])
def test_no_argument_of_a_loss_makes_a_model_of_one_patient(name: str, ones: int) -> None:
    """One patient has, or lacks, what 39 others lack or have."""
    target, labels, loss = ATTACKS[name]
    task = small_task("classification", target=target, labels=labels, loss=loss)
    plain = replace(task, loss={"name": "focal"})
    classes = [1] * ones + [0] * (40 - ones)
    assert "minimum_patients" in problem(site_of(classes, task))
    assert not problem(site_of(classes, plain))
    assert problem(site_of(classes, task), minimum=1) == ""


@pytest.mark.parametrize("name", ["JukeboxLoss", "BoundaryLoss"])
def test_a_loss_whose_weights_cannot_be_told_is_refused_where_there_is_a_minimum(name: str) -> None:
    task = small_task("classification", target="binary", labels=["finding"], loss={"name": name})
    line = problem(site_of([0, 1] * 20, task))
    assert name in line and "minimum_patients" in line and "\n" not in line
    assert not problem(site_of([0, 1] * 20, task), minimum=1)
    usual = replace(task, loss={"name": "AUCMLoss"})
    assert not problem(site_of([0, 1] * 20, usual))
    assert not problem(site_of([1] + [0] * 39, usual))


def test_one_output_is_not_that_of_one_patient() -> None:
    """The first label is common; all that trains the second output is its one patient."""
    task = small_task(
        "classification",
        target="multilabel",
        labels=["oedema", "nodule"],
        loss={"name": "FocalLoss", "alpha": 1.0},
    )
    names = tuple(map(str, range(40)))
    labels = torch.zeros(40, 2)
    labels[:20, 0] = 1
    labels[7, 1] = 1
    split = Split(pictures(40), labels, names, names)
    data = SiteData(split, split, split)
    with pytest.raises(ConfigError, match="does not train"):
        check_used_images("A", task, data, 5, Bounds())
    check_used_images(
        "A", replace(task, loss={"name": "ce", "weights": [1, 19]}), data, 5, Bounds()
    )


@pytest.mark.parametrize("kind", ["ce", "focal", "weighted", "both"])
def test_answers_to_weights_do_not_tell_how_many_patients_a_rare_class_has(kind: str) -> None:
    """Forty patients, of whom one to four have the class: each weight has one answer."""

    def accepted(weight: float, rare: int) -> bool:
        task = replace(
            small_task("classification", labels=["common", "rare"]),
            loss={"name": "focal" if kind == "focal" else "ce"},
        )
        weights = (1.0, weight)
        if kind in ("weighted", "both"):
            task = replace(task, sampling=Sampling("weighted", weights))
        if kind != "weighted":
            task = replace(task, loss={**task.loss, "weights": list(weights)})
        return not problem(site_of([1] * rare + [0] * (40 - rare), task))

    answers = []
    for exponent in range(-20, 21):
        weight = 10 ** (exponent / 4)
        (answer,) = {accepted(weight, rare) for rare in range(1, 5)}
        answers.append(answer)
    assert answers[20] and not answers[0] and not answers[-1]
    assert sum(answers) >= 3, "usual weights are free"
    assert accepted(100.0, 10), "the numbers of a class of enough patients are sent"


MASKS: dict[str, dict[str, Any]] = {
    "binary": {"target": "binary", "labels": ["lesion"]},
    "multiclass": {"target": "multiclass", "labels": ["background", "organ", "lesion"]},
    "multilabel": {"target": "multilabel", "labels": ["organ", "lesion"]},
}
LOSSES: list[dict[str, Any]] = [
    {"name": "ce"},
    {"name": "dice"},
    {"name": "dice", "batch": True},
    {"name": "dice", "squared": True},
    {"name": "dice_ce"},
    {"name": "focal"},
    {"name": "TverskyLoss", "alpha": 0.3, "beta": 0.7},
    {"name": "FocalLoss", "alpha": 0.25},
]


def masks_of(target: str, patients: int, lesions: int) -> SiteData:
    """Two slices of each patient, one without any structure; few patients have a lesion."""
    masks = torch.zeros(2 * patients, 2, 16, 16)
    masks[:patients, 0, :8] = 1
    masks[:lesions, 1, 2:5, 2:5] = 1
    targets: torch.Tensor = masks
    if target == "binary":
        targets = masks[:, 1].long()
    elif target == "multiclass":
        targets = torch.where(masks[:, 1] > 0, 2, masks[:, 0]).long()
    names = tuple(map(str, range(patients))) * 2
    split = Split(pictures(len(masks)), targets, names, names)
    return SiteData(split, split, split)


@pytest.mark.parametrize("target", MASKS)
@pytest.mark.parametrize("dimensions", [2, 3])
def test_usual_losses_of_masks_train_where_a_structure_is_rare(
    target: str, dimensions: int
) -> None:
    size = [16] * dimensions
    for loss in LOSSES:
        task = small_task(**MASKS[target], loss=loss, spatial_dims=dimensions, size=size)
        for lesions in (1, 4, 8, 19):
            check_used_images("A", task, masks_of(target, 20, lesions), 5, Bounds())


@pytest.mark.parametrize("target", MASKS)
def test_weights_of_a_rare_structure_do_not_make_a_model_of_one_patient(target: str) -> None:
    settings = MASKS[target]
    outputs = 1 if target == "binary" else len(settings["labels"])
    weights = [1e-6] * (outputs - 1) + [1e6]
    task = small_task(**settings, loss={"name": "ce", "weights": weights})
    with pytest.raises(ConfigError, match="does not train"):
        check_used_images("A", task, masks_of(target, 20, 1), 5, Bounds())


def test_slices_without_foreground_may_be_left_out() -> None:
    task = small_task(**MASKS["multiclass"], sampling={"name": "weighted", "weights": [0, 1]})
    check_used_images("A", task, masks_of("multiclass", 20, 2), 5, Bounds())
    few = small_task(sampling={"name": "weighted", "weights": [0, 1]})
    with pytest.raises(ConfigError, match="does not train"):
        check_used_images("A", few, masks_of("binary", 20, 4), 5, Bounds())


def test_structures_that_are_not_annotated_have_no_weight() -> None:
    task = small_task(**MASKS["multiclass"], loss={"name": "ce", "weights": [1, 1, 1e9]})
    data = masks_of("multiclass", 20, 0)
    check_used_images("A", task, replace(data, annotated=("organ",)), 5, Bounds())
    check_used_images("A", task, replace(data, annotated=()), 5, Bounds())


@pytest.mark.parametrize("name", presets())
def test_tasks_of_the_package_train_at_a_site_with_a_rare_class(name: str) -> None:
    task = load_task(name)
    weights = torch.cat(loss_weights(task), dim=1)
    worst = float((weights.amax(dim=0) / weights.amin(dim=0)).max())
    # Of 30 patients four have a class, whose weight is `worst`, and 26 lack it.
    assert 4 * worst < 0.9 * (4 * worst + 26)


def test_an_intensity_transform_does_not_leave_one_patient_alone() -> None:
    """As ScaleIntensityRange does from the value that only one image reaches. Nor in a class, or a
    group of patients: with half of the patients plain, some class of 5 would be one image.
    """
    site = site_of([0, 1] * 20)
    for lit in (1, 5, 20, 35, 36):
        site.data = site_of([0, 1] * 20).data
        assert isinstance(site.data.train.images, torch.Tensor)
        site.data.train.images[lit:] *= 0.05
        assert ("wider range" in problem(site)) == (lit < 36)
        assert not problem(site, minimum=0)
    few = site_of([0, 1, 0, 1, 0, 1])
    assert isinstance(few.data.train.images, torch.Tensor)
    few.data.train.images[0] *= 0.05
    assert not problem(few), "one patient of a few may have a plain image"
    empty = site_of([0, 1] * 20, patients=[str(row // 4) for row in range(40)])
    assert isinstance(empty.data.train.images, torch.Tensor)
    empty.data.train.images[::4] = 0
    assert not problem(empty), "first slices of volumes may be empty"
    empty.data.train.images[:] = 0
    assert not problem(empty), "no patient is left alone"
    empty.data.train.images[5] = pictures(1)[0]
    assert "wider range" in problem(empty), "nor by an image that is not the middle one"


def test_an_intensity_transform_does_not_paint_over_all_patients_but_one() -> None:
    """ThresholdIntensity has a picture in place of what is below its threshold, which is the same
    for all, and as rich in contrast as a photograph.
    """
    painted = pictures(1)[0].tolist()
    for lit in (1, 5, 20, 35, 36, 40):
        site = site_of([0, 1] * 20)
        images = 0.5 * pictures(40)
        images[:lit] += 1
        transform = {"name": "ThresholdIntensity", "threshold": 0.9, "cval": painted}
        scaled = Preprocessing(replace(TASK, intensity=transform))
        shown = torch.stack([scaled.image(image.numpy()) for image in images])
        assert [torch.equal(image, pictures(1)[0]) for image in shown].count(True) == 40 - lit
        site.data = replace(site.data, train=replace(site.data.train, images=shown))
        assert ("or one picture" in problem(site)) == (lit < 36)
    small = [torch.rand(2, 8, side) for side in range(8, 18)]
    noise = 0.02 * torch.randn(2, 8, 10)
    distances = distinct_deviations(
        [*small, small[0] + 1, small[0], small[1], *[small[2] + noise] * 2]
    )
    assert (distances < 1e-6).all(dim=1).nonzero().flatten().tolist() == [0, 10, 11]
    assert distances[2].tolist() == pytest.approx(small[2].std((1, 2), correction=0).tolist())


def test_no_channel_is_left_to_one_patient() -> None:
    """As NormalizeIntensity does with a subtrahend of 2^32 for one channel; patients may lack one."""
    task = replace(TASK, channels=2)
    for lit in (0, 1, 4, 5, 40):
        site = site_of([0, 1] * 20, task)
        images = pictures(80).reshape(40, 2, 16, 16)
        images[lit:, 1] = -1
        site.data = replace(site.data, train=replace(site.data.train, images=images))
        assert ("wider range" in problem(site)) == (lit in (1, 4))


def test_an_augmentation_does_not_leave_one_patient_alone() -> None:
    """As factors do that round all but the brightest pixels to float32's zero."""
    darken = {"name": "RandScaleIntensity", "prob": 1, "factors": [-0.9999, -0.9999]}
    round_off = {"name": "RandScaleIntensity", "prob": 1, "factors": [-0.9, -0.9]}
    task = replace(TASK, augment=(*[darken] * 11, round_off))
    noise = {"name": "RandGaussianNoise", "prob": 1, "std": 0.05}
    for lit in (1, 4, 5, 35, 36):
        site = site_of([0, 1] * 20, task)
        assert isinstance(site.data.train.images, torch.Tensor)
        site.data.train.images[lit:] *= 0.6
        assert ("wider range" in problem(site)) == (lit < 36), "chance may hide others in training"
        noisy = site_of([0, 1] * 20, replace(task, augment=(*task.augment, noise)))
        noisy.data = site.data
        assert "wider range" in problem(noisy), "noise is no contrast"
        assert not problem(site, minimum=0)


def test_a_lead_does_not_know_the_random_numbers_of_the_check() -> None:
    """Each transform hides none of the images for generators whose seed is a row or a draw."""
    draws = np.array([np.random.RandomState(row).random_sample(60) for row in range(50)])
    augment = []
    for prob in draws.min(axis=0):
        augment.append({"name": "RandScaleIntensity", "prob": prob * 0.999, "factors": [-1, -1]})
    assert "wider range" in problem(site_of([0, 1] * 20, replace(TASK, augment=tuple(augment))))
    once = replace(
        TASK, augment=({"name": "RandScaleIntensity", "prob": 0.02, "factors": [-1, -1]},)
    )
    assert not problem(site_of([0, 1] * 3, once)), "a few hidden images are none of a patient alone"


def test_noise_in_the_range_of_an_image_is_no_contrast() -> None:
    """It stands in place of all images but one; a lead knows it by the seed of its job."""
    noise = {"name": "RandCoarseDropout", "holes": 1, "spatial_size": [16, 16], "fill_value": None}
    task = replace(TASK, augment=({**noise, "prob": 0.95},))
    assert "wider range" in problem(site_of([0, 1] * 20, task))
    small = replace(TASK, augment=({**noise, "prob": 0.95, "spatial_size": [4, 4]},))
    assert not problem(site_of([0, 1] * 20, small))


def test_an_augmentation_of_patches_is_tried_on_their_size() -> None:
    """RandRotate90 keeps the size of a square patch, not of the whole image."""
    turned = {"name": "RandRotate90", "prob": 1.0}
    task = replace(TASK, augment=(turned,), size=(16, 16))
    site = site_of([0, 1] * 10, task)
    wide = torch.rand(20, 1, 16, 24, generator=torch.Generator().manual_seed(0))
    site.data = replace(site.data, train=replace(site.data.train, images=wide))
    assert not problem(site)


def test_a_class_without_weight_is_not_told_from_a_class_of_few() -> None:
    """The site opens, and has one line for no patient and for few."""
    task = weighted(0, 0, 1)
    lines = {problem(site_of([0, 1] * 20 + [2] * rare, task)) for rare in range(5)}
    assert len(lines) == 1 and "minimum_patients" in lines.pop()


def test_a_task_that_leaves_out_most_images_is_refused() -> None:
    site = site_of([0] * 20)
    site.data = replace(
        site.data, dropped=("a",) * 90, left_out={str(number): "b" for number in range(10)}
    )
    assert not problem(site, drop_share=0.625)  # 100 of 160
    assert "drop_share" in problem(site, drop_share=0.6)
    for number in ("100", "160", "20"):
        assert number not in problem(site, drop_share=0.6)


@pytest.mark.parametrize(
    ("sites", "refused"), [(("A",), True), (("A", "B"), False), (("A", "B", "C"), False)]
)
def test_a_job_has_as_many_inside_sites_as_the_site_demands(
    sites: tuple[str, ...], refused: bool
) -> None:
    assert ("inside_sites" in problem(site_of([0] * 20), sites=sites, inside_sites=2)) == refused


def test_noise_of_dp_sgd_does_not_replace_the_check_unless_the_site_bounds_it(
    tmp_path: Path,
) -> None:
    """A lead chooses the noise, which may be next to none."""
    pytest.importorskip("opacus", reason="needs medflare[privacy]")
    site = site_of([0, 1] * 20)
    assert isinstance(site.data.train.images, torch.Tensor)
    site.data.train.images[1:] = 0
    asked = Message({}, {"role": "inside", "sites": ["A", "B"]})
    for budget in (None, Budget(8, 1e-5, tmp_path, "A")):
        participant = Participant(
            "A",
            lambda role: site,
            get_method("fedavg"),
            {"dp_noise": 1e-9},
            local=LocalSettings(minimum_patients=5),
            budget=budget,
        )
        if budget is None:
            with pytest.raises(ConfigError, match="wider range"):
                participant.reply("enrol", 0, asked)
        else:
            assert participant.reply("enrol", 0, asked).meta["n"]["train"] == 40


@pytest.mark.parametrize("method", ["fedavg", "fedsm", "ditto"])
def test_a_site_that_refuses_to_train_enrols_with_nobody_and_sends_no_model(method: str) -> None:
    site = site_of([0, 1, 2])
    participant = Participant(
        "A", lambda role: site, get_method(method), {}, local=LocalSettings(minimum_patients=5)
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match="does not train, and sends no model"):
            participant.reply("enrol", 0, Message({}, {"role": "inside", "sites": ["A", "B"]}))
    with pytest.raises(Exception, match="not enrolled"):
        participant.reply(
            "train",
            0,
            Message({"model": site.network().state_dict()}, {"step": 0, "run_rounds": 1}),
        )
