import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from monai.metrics.surface_distance import compute_average_surface_distance
from scipy.ndimage import binary_erosion
from scipy.spatial.distance import cdist
from sklearn import metrics
from torch.nn import functional as F

from helpers.fixture_types import TaskOf
from helpers.small_tasks import score, small_task
from helpers.volume_sites import cube_task
from medflare.core.errors import ConfigError
from medflare.core.rng import numpy_generator
from medflare.data.geometry import Grid
from medflare.tasks import metrics_table
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import foreground, measure, structures
from medflare.tasks.metrics_table import (
    METRICS,
    average_surface_distance,
    boundary_distance,
    default_metrics,
    lesion_f1,
    metrics_of,
    selection_metrics,
    surface_dice,
)
from medflare.tasks.summaries import summarize

ALL = ("dice", "iou", "hd95")
CLASSIFICATION = ("accuracy", "balanced_accuracy", "f1_macro", "auc_macro")


def _masks(*rows: list[int]) -> torch.Tensor:
    """One image of one row per list: (N, 1, 1, W)."""
    return torch.tensor(rows).bool()[:, None, None]


def _by_patient(
    predicted: torch.Tensor, truth: torch.Tensor, patients: str, *metrics: str
) -> list[list[float]]:
    """Each metric's values of the patients, of masks (N, 1, ...)."""
    values = score(
        predicted.float(), truth[:, 0].long(), list(patients), small_task(), metrics
    ).cases.values
    return [values[metric].tolist() for metric in metrics]


def test_every_metric_belongs_to_one_kind_of_task() -> None:
    assert (
        default_metrics("segmentation") == ALL
        and default_metrics("classification") == CLASSIFICATION
    )
    assert default_metrics("segmentation", spatial_dims=3) == (
        "dice",
        "iou",
        "hd95_mm",
        "surface_dice",
    )
    assert {
        *metrics_of("segmentation"),
        *metrics_of("segmentation", 3),
        *metrics_of("classification"),
    } == set(METRICS)
    assert selection_metrics("segmentation") == ("dice", "iou") and set(CLASSIFICATION) < set(
        selection_metrics("classification")
    )


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_keeps_its_bounds_in_the_examples_of_extensions(name: str) -> None:
    metrics_table._try(METRICS[name])


@pytest.mark.parametrize("name", ["brier", "volume_error", "assd", "assd_mm"])
def test_values_outside_the_bounds_are_refused(name: str) -> None:
    metric = replace(METRICS[name], bounds=(0.0, 0.01))
    with pytest.raises(ValueError, match=r"bounds are 0 to 0\.01; give Metric"):
        metrics_table._try(metric)


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_an_unknown_metric_is_refused(make_task: TaskOf, kind: str) -> None:
    with pytest.raises(ConfigError, match="dise"):
        measure([], make_task(kind), ["dise"])


def test_overlap_is_pooled_over_a_patients_images() -> None:
    predicted = _masks([1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1])
    truth = _masks([1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1])
    dice, iou = _by_patient(predicted, truth, "aab", "dice", "iou")
    # patient a: 4 hits of 6 predicted and 4 true; patient b: 1 hit of 1 and 2
    assert dice == pytest.approx([2 * 4 / 10, 2 / 3]) and iou == pytest.approx([4 / 6, 1 / 2])


def test_empty_slices_of_a_patient_count_only_with_false_positives() -> None:
    empty = _masks([1, 1, 0, 0], [0, 0, 0, 0])
    half = _masks([1, 0, 0, 0])
    assert _by_patient(empty, empty, "aa", "dice") == [[1]]
    assert _by_patient(empty, empty, "ab", "dice") == [pytest.approx([1, math.nan], nan_ok=True)]
    assert _by_patient(half, half & False, "a", "dice") == [[0]]


def test_a_small_structure_of_a_large_image_is_counted_exactly(make_task: TaskOf) -> None:
    image = torch.zeros(1, 1, 2**12, 2**13, dtype=torch.uint8)
    image[..., 0, :12] = 1
    truth = torch.zeros(1, 2**12, 2**13, dtype=torch.uint8)
    truth[..., 0, :9] = 1
    measured = measure([(image, truth, None)], make_task(), ["dice", "volume_error"])
    values = measured.scores(["P"]).values
    assert values == {"dice": pytest.approx(18 / 21), "volume_error": pytest.approx(3 / 9)}


def test_boundary_distance_against_definition() -> None:
    random = np.random.default_rng(3)
    rows, columns = np.mgrid[:24, :24]
    masks = []
    for _ in range(2):
        row = random.uniform(8, 16)
        column = random.uniform(8, 16)
        radius = random.uniform(4, 7)
        masks.append((rows - row) ** 2 + (columns - column) ** 2 < radius**2)

    def edge(mask: np.ndarray) -> np.ndarray:
        inner = (
            mask[1:-1, 1:-1] & mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
        )
        return np.argwhere(mask & ~np.pad(inner, 1))

    distances = cdist(edge(masks[0]), edge(masks[1]))
    expected = max(
        np.percentile(distances.min(axis=1), 95), np.percentile(distances.min(axis=0), 95)
    )
    first, second = (torch.tensor(mask)[None, None] for mask in masks)
    assert boundary_distance(first, second).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("decimals", [1, 6])
def test_classification_against_scikit_learn(make_task: TaskOf, decimals: int) -> None:
    """With ties (one decimal) and without; some classes do not occur."""
    task = make_task("classification", labels=["a", "b", "c", "d"])
    for number in range(10):
        random = numpy_generator(0, number, "classification")
        probabilities = random.dirichlet(np.ones(4), 15).round(decimals)
        truth = random.integers(0, 4, 15)
        values = score(
            torch.from_numpy(probabilities),
            torch.from_numpy(truth),
            ["p"] * 15,
            task,
            CLASSIFICATION,
        ).values
        chosen = probabilities.argmax(axis=1)
        present = np.unique(truth)
        assert values["accuracy"] == pytest.approx(metrics.accuracy_score(truth, chosen))
        assert values["balanced_accuracy"] == pytest.approx(
            metrics.recall_score(truth, chosen, labels=present, average="macro")
        )
        assert values["f1_macro"] == pytest.approx(
            metrics.f1_score(truth, chosen, average="macro", zero_division=0)
        )
        areas = [
            metrics.roc_auc_score(truth == label, probabilities[:, label]) for label in present
        ]
        assert values["auc_macro"] == pytest.approx(np.mean(areas))


def test_several_labels_against_scikit_learn(make_task: TaskOf) -> None:
    """The third label never occurs; where it is not predicted either, its F1 is 0/0, NaN."""
    task = make_task("classification", target="multilabel", labels=["a", "b", "c"])
    undefined = 0
    for number in range(12):
        random = numpy_generator(0, number, "labels")
        probabilities = random.uniform(size=(12, 3)) * [1, 1, 0.55]
        truth = random.integers(0, 2, (12, 3)) * [1, 1, 0]
        values = score(
            torch.from_numpy(probabilities),
            torch.from_numpy(truth),
            ["p"] * 12,
            task,
            CLASSIFICATION,
        ).values
        chosen = (probabilities > 0.5).astype(int)
        undefined += not chosen[:, 2].any()
        assert values["f1_macro"] == pytest.approx(
            metrics.f1_score(truth, chosen, average="macro", zero_division=np.nan)
        )
        assert values["accuracy"] == pytest.approx((truth == chosen).mean())
    assert 0 < undefined < 12
    nothing = score(torch.zeros(4, 3), torch.zeros(4, 3), ["p"] * 4, task, ["f1_macro"])
    assert nothing.values == {"f1_macro": None} and nothing.undefined.keys() == {"f1_macro"}


def test_boundary_distance_per_patient() -> None:
    square = torch.zeros(16, 16, dtype=torch.bool)
    square[4:8, 4:8] = True
    empty = torch.zeros_like(square)
    truth = torch.stack([square, square, square, square, empty])[:, None]
    predicted = torch.stack([square.roll(2, 0), square.roll(4, 0), empty, square, square])[:, None]
    # An empty mask has no boundary to measure from.
    assert _by_patient(predicted, truth, "aabac", "hd95") == [
        pytest.approx([(2 + 4 + 0) / 3, math.nan, math.nan], nan_ok=True)
    ]


def test_segmentation_scores(make_task: TaskOf) -> None:
    truth = torch.zeros(3, 8, 8, dtype=torch.long)
    truth[0, 2:6, 2:6] = 1
    probabilities = torch.where(truth[:, None] == 1, 0.9, 0.1)
    scores = score(probabilities, truth, ["a", "b", "c"], make_task(), ALL)
    assert scores.values == {"dice": 1.0, "iou": 1.0, "hd95": 0.0}
    assert scores.left_out["dice"] == 2 and scores.left_out["hd95"] == 2 and not scores.undefined
    blank = score(
        torch.zeros(2, 1, 8, 8),
        torch.zeros(2, 8, 8, dtype=torch.long),
        ["a", "b"],
        make_task(),
        ALL,
    )
    assert blank.values == {"dice": None, "iou": None, "hd95": None}
    assert set(blank.undefined) == set(ALL) and blank.left_out["dice"] == 2
    missed = score(torch.zeros(1, 1, 8, 8), truth[:1], ["a"], make_task(), ALL)
    assert missed.values == {"dice": 0.0, "iou": 0.0, "hd95": None} and set(missed.undefined) == {
        "hd95"
    }


def test_multiclass_masks_leave_the_background_out(make_task: TaskOf) -> None:
    task = make_task(target="multiclass", labels=["background", "a", "b"])
    truth = torch.tensor([[[0, 1], [2, 2]]])
    probabilities = (
        torch.nn.functional.one_hot(torch.tensor([[[0, 1], [1, 2]]]), 3).movedim(-1, 1).float()
    )
    assert structures(truth, task).shape == foreground(probabilities, task).shape == (1, 2, 2, 2)
    assert structures(truth, task)[0].int().tolist() == [[[0, 1], [0, 0]], [[0, 0], [1, 1]]]
    scores = score(probabilities, truth, ["p"], task, ["dice"])
    assert scores.values["dice"] == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_a_single_class_has_no_auc(make_task: TaskOf) -> None:
    probabilities = torch.tensor([[0.9, 0.1, 0], [0.4, 0.6, 0]])
    scores = score(
        probabilities, torch.tensor([0, 0]), ["a", "b"], make_task("classification"), CLASSIFICATION
    )
    assert scores.values["auc_macro"] is None
    assert scores.values["accuracy"] == 0.5 and set(scores.undefined) == {"auc_macro"}
    several = make_task("classification", target="multilabel", labels=["a", "b"])
    probabilities = torch.tensor([[0.9], [0.2], [0.6], [0.4]]).repeat(1, 2)
    truth = torch.tensor([[1, 1], [0, 1], [0, 1], [1.0, 1]])
    both = score(probabilities, truth, list("abcd"), several, CLASSIFICATION).values
    assert both["auc_macro"] == pytest.approx(0.75) and both["accuracy"] == 0.5, (
        "label b has one class only and is left out"
    )


def test_metrics_are_undefined_without_images_and_with_nan(make_task: TaskOf) -> None:
    empty = score(torch.zeros(0, 1, 8, 8), torch.zeros(0, 8, 8), [], make_task(), ALL)
    assert empty.values == dict.fromkeys(ALL)
    for kind, shape, truth in (
        ("segmentation", (1, 1, 8, 8), torch.ones(1, 8, 8)),
        ("classification", (1, 3), torch.tensor([0])),
    ):
        broken = score(
            torch.full(shape, math.nan),
            truth.long(),
            ["a"],
            make_task(kind),
            make_task(kind).test_metrics,
        )
        assert set(broken.values.values()) == {None}


def test_surfaces_of_volumes_are_measured_in_millimetres_and_per_patient() -> None:
    task = cube_task()
    truth = torch.zeros(2, 8, 8, 8, dtype=torch.long)
    truth[:, 2:6, 2:6, 2:6] = 1
    moved = truth.roll(1, dims=3)[:, None].float()  # by one voxel along the third axis
    measured = score(
        moved, truth, ["p", "p"], task, task.test_metrics, [(1.0, 1.0, 3.0), (1.0, 1.0, 5.0)]
    )
    assert measured.values["hd95_mm"] == pytest.approx((3 + 5) / 2) and measured.values[
        "dice"
    ] == pytest.approx(0.75)
    alike = score(
        moved,
        truth,
        ["p", "q"],
        cube_task(surface_tolerance=5.0),
        task.test_metrics,
        [(1.0, 1.0, 3.0), (1.0, 1.0, 5.0)],
    )
    assert alike.values["surface_dice"] == 1 > (measured.values["surface_dice"] or 0)
    unknown = score(moved, truth, ["p", "q"], task, task.test_metrics, [None, None])
    assert unknown.values["hd95_mm"] is None and "surface_dice" in unknown.undefined


def test_images_of_different_sizes_are_scored_one_by_one() -> None:
    task = cube_task(target="multiclass", labels=["background", "cube", "core"])
    truths = [torch.zeros(side, 6, 6, dtype=torch.long) for side in (5, 7)]
    for truth in truths:
        truth[1:4, 1:4, 1:4] = 1
        truth[2, 2, 2] = 2
    perfect = [torch.nn.functional.one_hot(truth, 3).movedim(-1, 0).float() for truth in truths]
    scores = score(perfect, truths, ["p", "q"], task, task.test_metrics, [(1.0, 1.0, 1.0)] * 2)
    assert scores.values == {"dice": 1.0, "iou": 1.0, "hd95_mm": 0.0, "surface_dice": 1.0}
    perfect[1][:] = math.nan
    assert score(perfect, truths, ["p", "q"], task, ["dice"]).values["dice"] is None


def _classes(
    task: TaskConfig, probabilities: list[list[float]], targets: torch.Tensor
) -> tuple[str, ...]:
    return measure(
        [(torch.tensor(probabilities), targets, None)], task, ["accuracy"]
    ).constant_outputs()


def test_one_class_for_all_images(make_task: TaskOf) -> None:
    task = make_task("classification", labels=["a", "b", "c"])
    last = [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]
    assert _classes(task, last, torch.tensor([0, 2])) == ("c",)
    assert _classes(task, last, torch.tensor([2, 2])) == (), "all images are of that class"
    assert _classes(task, [last[0], [0.5, 0.4, 0.1]], torch.tensor([1, 1])) == ()
    assert _classes(task, last[:1], torch.tensor([0])) == (), "one image has one class"
    ill = make_task("classification", target="binary", labels=["ill"])
    assert _classes(ill, [[0.4], [0.1]], torch.tensor([0, 1])) == ("not ill",)
    several = make_task("classification", target="multilabel", labels=["a", "b"])
    assert _classes(several, [[0.4, 0.9], [0.1, 0.6]], torch.tensor([[0, 1], [1.0, 1]])) == ("b",)
    assert _classes(several, [[0.4, 0.1], [0.1, 0.3]], torch.tensor([[0, 1], [1.0, 1]])) == (
        "no label",
    )
    assert _classes(several, [[0.4, 0.1], [0.6, 0.3]], torch.tensor([[0, 1], [1.0, 1]])) == ()


def test_no_pixel_of_a_structure_in_all_images(make_task: TaskOf) -> None:
    task = make_task(target="multiclass", labels=["background", "disc", "cup"])
    truth = torch.tensor([[[0, 1, 2]], [[0, 0, 1]]])

    def constant(predicted: torch.Tensor, truth: torch.Tensor = truth) -> tuple[str, ...]:
        return measure(
            [(F.one_hot(predicted, 3).movedim(-1, 1).float(), truth, None)], task, ["dice"]
        ).constant_outputs()

    assert constant(truth) == () and constant(torch.zeros_like(truth)) == (
        "no pixel of disc",
        "no pixel of cup",
    )
    assert constant(truth.clamp(max=1)) == ("no pixel of cup",)
    assert constant(torch.ones_like(truth)) == ("no pixel of cup", "all pixels as disc")
    assert constant(truth.clamp(max=1), truth.clamp(max=1)) == (), "no image shows a cup"


def test_metrics_of_each_structure_by_hand(make_task: TaskOf) -> None:
    """Patient p's disc is hit in two of three pixels (Dice 4/5); the cup is missed in p and absent in q."""
    task = make_task(target="multiclass", labels=["background", "disc", "cup"])
    truth = torch.tensor([[[1, 1, 1, 2]], [[1, 0, 0, 0]]])
    predicted = torch.tensor([[[1, 1, 0, 0]], [[1, 0, 0, 0]]])
    scores = score(
        F.one_hot(predicted, 3).movedim(-1, 1).float(), truth, ["p", "q"], task, ["dice", "iou"]
    )
    means = summarize(scores.values, scores.cases, task).by_label
    assert means == {
        "disc": {"dice": pytest.approx(0.9), "iou": pytest.approx((2 / 3 + 1) / 2)},
        "cup": {"dice": 0.0, "iou": 0.0},
    }
    assert scores.values["dice"] == pytest.approx(((0.8 + 0) / 2 + 1) / 2), "q has no cup"
    assert scores.cases.to_dict()["structures"]["cup"]["dice"] == [0.0, None]
    absent = score(
        F.one_hot(predicted.clamp(max=1), 3).movedim(-1, 1).float(),
        truth.clamp(max=1),
        ["p", "q"],
        task,
        ["dice"],
    )
    assert summarize(absent.values, absent.cases, task).by_label["cup"] == {"dice": None}


def test_average_surface_distance_is_that_of_monai() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted, truth = torch.rand(2, 2, 2, 6, 7, 5, generator=generator) > 0.6
    expected = compute_average_surface_distance(
        predicted, truth, include_background=True, symmetric=True, spacing=(1.0, 2.0, 3.0)
    )
    torch.testing.assert_close(
        average_surface_distance(predicted, truth, (1.0, 2.0, 3.0)), expected.double()
    )
    assert average_surface_distance(predicted, truth & False).isnan().all()


def test_lesions_and_volumes_by_hand(make_task: TaskOf) -> None:
    """Two of three true lesions are met by one of two predicted ones; 5 pixels predicted of 4 true ones."""
    truth = _masks([1, 0, 1, 0, 0, 0, 1, 1])
    predicted = _masks([1, 1, 1, 0, 1, 1, 0, 0])
    task = make_task(metrics=["lesion_f1", "volume_error"])
    assert lesion_f1(predicted, truth).item() == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert _by_patient(predicted, truth, "a", "volume_error") == [[1 / 4]]
    assert lesion_f1(truth & False, truth & False).isnan().all() and math.isnan(
        _by_patient(truth, truth & False, "a", "volume_error")[0][0]
    )
    assert lesion_f1(truth & False, truth).item() == 0 and task.test_metrics == (
        task.metric,
        "lesion_f1",
        "volume_error",
    )
    corners = torch.eye(4, dtype=torch.bool)[None, None]
    assert lesion_f1(corners, corners).item() == 1, "neighbours across a corner are one lesion"
    with pytest.raises(ConfigError, match="assd_mm"):
        make_task(metrics=["assd_mm"])


def _random_masks(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    predicted, truth = torch.zeros(2, 1, 1, 9, 8, 7, dtype=torch.bool)
    for mask in (predicted, truth):
        corner = torch.randint(0, 4, (3,), generator=random).tolist()
        mask[0, 0][tuple(slice(start, start + 3) for start in corner)] = True
    return predicted, truth


@pytest.mark.parametrize("seed", range(4))
def test_distances_on_a_sheared_grid_are_those_of_the_affine(seed: int) -> None:
    affine = np.array([[2.0, 0, 0.5], [0, 1, 0.9], [0, 0, 3]])
    cell = Grid((9, 8, 7), np.block([[affine, np.zeros((3, 1))], [0, 0, 0, 1]])).cell
    assert cell is not None and len(cell) == 6
    predicted, truth = _random_masks(seed)
    surfaces = []
    for mask in (predicted, truth):
        inner = binary_erosion(mask[0, 0].numpy())
        surfaces.append(np.argwhere(mask[0, 0].numpy() & ~inner) @ affine.T)
    table = cdist(*surfaces)
    there = table.min(axis=1)
    back = table.min(axis=0)
    expected = max(np.percentile(there, 95), np.percentile(back, 95))
    assert boundary_distance(predicted, truth, cell).item() == pytest.approx(expected, abs=1e-4)
    mean = np.concatenate([there, back]).mean()
    assert average_surface_distance(predicted, truth, cell).item() == pytest.approx(mean, abs=1e-4)
    near = (np.concatenate([there, back]) <= 2.5).mean()
    assert surface_dice(predicted, truth, cell, 2.5).item() == pytest.approx(near)


def test_the_two_ways_to_distances_agree_where_nothing_is_sheared() -> None:
    straight = (2.0, 1.0, 3.0)
    cell = (*straight, 0, 0, 0)
    near = partial(surface_dice, tolerance=2.0)
    for seed in range(4):
        masks = _random_masks(seed)
        for distance in (boundary_distance, average_surface_distance, near):
            expected = distance(*masks, spacing=straight)
            torch.testing.assert_close(distance(*masks, spacing=cell), expected)
    filled = _random_masks(0)[0]
    empty = torch.zeros(1, 1, 9, 8, 7, dtype=torch.bool)
    for pair in ((filled, empty), (empty, filled), (empty, empty)):
        expected = near(*pair, spacing=straight)
        torch.testing.assert_close(near(*pair, spacing=cell), expected, equal_nan=True)


def test_a_surface_may_have_more_pixels_than_torchs_quantile_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = torch.arange(2**24 + 1, dtype=torch.float32)
    directed = iter([longest / 2, longest])
    monkeypatch.setattr(metrics_table, "_to_surface", lambda *_: next(directed))
    mask = _masks([1, 1, 0])
    # The distances are 0, 1, ..., 2**24.
    assert boundary_distance(mask, mask).item() == pytest.approx(0.95 * 2**24, rel=1e-6)


def test_the_distance_is_the_larger_of_both_95th_percentiles_of_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(2)
    there = random.uniform(0, 9, 57)
    back = random.uniform(0, 8, 33)
    directed = iter(torch.tensor(values, dtype=torch.float32) for values in (there, back))
    monkeypatch.setattr(metrics_table, "_to_surface", lambda *_: next(directed))
    mask = _masks([1, 1, 0])
    expected = max(np.percentile(there, 95), np.percentile(back, 95))
    assert boundary_distance(mask, mask).item() == pytest.approx(expected, rel=1e-6)
