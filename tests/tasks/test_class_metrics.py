"""Metrics of classes beside scikit-learn, with weights as for a bootstrap, and their degenerate cases."""

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics

from helpers.small_tasks import score, small_task
from medflare.core import extensions
from medflare.core.errors import ConfigError
from medflare.tasks import metrics_table
from medflare.tasks.class_metrics import by_class, of_outputs, quadratic_kappa
from medflare.tasks.classes import Cases
from medflare.tasks.metrics_table import METRICS, Metric, metric_table, require_usable
from medflare.tasks.summaries import mean_interval, summarize

N = 60
LABELS = {"multiclass": ["x", "y", "z"], "multilabel": ["x", "y"], "binary": ["x"]}


def drawn(target: str) -> tuple[Any, Any, Any]:
    """Probabilities with ties, targets, weights of two resamples."""
    random = np.random.default_rng(0)
    scores = (
        random.dirichlet([1, 1, 1], N)
        if target == "multiclass"
        else random.uniform(size=(N, len(LABELS[target]))).round(1)
    )
    targets = (
        random.integers(0, 2, (N, 2))
        if target == "multilabel"
        else random.integers(0, 3 if target == "multiclass" else 2, N)
    )
    return scores, targets, random.integers(0, 3, (2, N)).astype(float)


def calibration(scores: Any, correct: Any, weights: Any) -> float:
    total = 0.0
    for low in range(15):
        rows = (scores >= low / 15) & ((scores < (low + 1) / 15) | (low == 14))
        total += abs((weights[rows] * (correct[rows] - scores[rows])).sum())
    return total / float(weights.sum())


def of_one_class(scores: Any, truth: Any, predicted: Any, weights: Any) -> dict[str, float]:
    return {
        "sensitivity": metrics.recall_score(truth, predicted, sample_weight=weights),
        "specificity": metrics.recall_score(~truth, ~predicted, sample_weight=weights),
        "ppv": metrics.precision_score(truth, predicted, sample_weight=weights),
        "f1": metrics.f1_score(truth, predicted, sample_weight=weights),
        "auc": metrics.roc_auc_score(truth, scores, sample_weight=weights),
        "auprc": metrics.average_precision_score(truth, scores, sample_weight=weights),
        "brier": metrics.brier_score_loss(truth, scores, sample_weight=weights),
        "ece": calibration(scores, truth, weights),
    }


@pytest.mark.parametrize("target", LABELS)
def test_metrics_of_each_class_are_those_of_scikit_learn(target: str) -> None:
    scores, targets, weights = drawn(target)
    values = by_class(scores, targets, weights, LABELS[target])
    assert list(values) == LABELS[target]
    for place, label in enumerate(LABELS[target]):
        truth = (
            targets == place if target == "multiclass" else targets.reshape(N, -1)[:, place] == 1
        )
        predicted = scores.argmax(1) == place if target == "multiclass" else scores[:, place] > 0.5
        for resample in range(2):
            expected = of_one_class(scores[:, place], truth, predicted, weights[resample])
            assert {
                name: value[resample] for name, value in values[label].items()
            } == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("target", LABELS)
def test_metrics_of_a_model_are_those_of_scikit_learn(target: str) -> None:
    scores, targets, weights = drawn(target)
    w = weights[0]
    columns = range(len(LABELS[target]))
    truths = [
        targets == c if target == "multiclass" else targets.reshape(N, -1)[:, c] == 1
        for c in columns
    ]
    answers = [
        scores.argmax(1) == c if target == "multiclass" else scores[:, c] > 0.5 for c in columns
    ]
    each = [of_one_class(scores[:, c], truths[c], answers[c], w) for c in columns]
    macro = ("auc", "auprc", "sensitivity", "specificity", "ppv", "f1")
    expected: dict[str, Any] = {}
    for name in macro:
        expected[f"{name}_macro"] = np.mean([one[name] for one in each])
    of_labels = list(zip(1 * np.array(truths), 1 * np.array(answers), strict=True))
    problems = [(targets, scores.argmax(1))] if target == "multiclass" else of_labels
    options = {"sample_weight": w}
    expected["accuracy"] = np.mean(
        [metrics.accuracy_score(*problem, **options) for problem in problems]
    )
    expected["balanced_accuracy"] = np.mean(
        [metrics.balanced_accuracy_score(*problem, **options) for problem in problems]
    )
    kappas = [
        metrics.cohen_kappa_score(*problem, weights="quadratic", **options) for problem in problems
    ]
    expected["quadratic_kappa"] = np.mean(kappas)
    expected["brier"], expected["ece"] = (
        np.mean([one[name] for one in each]) for name in ("brier", "ece")
    )
    if target == "binary":
        expected["f1_macro"] = metrics.f1_score(*problems[0], average="macro", **options)
    if target == "multiclass":
        expected["brier"] = metrics.brier_score_loss(targets, scores, **options)
        expected["ece"] = calibration(scores.max(1), scores.argmax(1) == targets, w)
    for name, value in expected.items():
        assert of_outputs(METRICS[name].compute, scores, targets, weights)[0] == pytest.approx(
            value, abs=1e-9
        ), name


def test_undefined_values_are_nan() -> None:
    one = by_class(np.array([[0.8, 0.2], [0.7, 0.3]]), np.array([0, 0]), np.ones(2), ["no", "yes"])[
        "yes"
    ]
    assert [name for name, value in one.items() if np.isnan(value)] == [
        "sensitivity",
        "ppv",
        "f1",
        "auc",
        "auprc",
    ]
    assert np.isnan(of_outputs(quadratic_kappa, np.array([[0.8, 0.2]]), np.array([0]), np.ones(1)))


def test_kappa_by_hand() -> None:
    """Grades 0, 1, 2 answered as 0, 2, 2: disagreement 1 of (0 + 1 + 1·... ) expected: (4·1·2 + 1·1·1 + 1·1·2 + 4·1·1) / 3 = 5."""
    answers = np.eye(3)[[0, 2, 2]]
    assert of_outputs(quadratic_kappa, answers, np.arange(3), np.ones(3)) == pytest.approx(
        1 - 1 / 5
    )


MINE = Metric(
    "classes",
    "top",
    lambda p, targets, weights, target: weights @ p.max(1) / weights.sum(axis=-1),
    "never",
)
MASKS = Metric(
    "masks",
    "overlap",
    lambda predicted, truth, spacing, task: (predicted & truth).flatten(2).any(2).double(),
    "never",
)

# Metrics of a package that are wrong: for tensors, and with a value for all resamples together.
OF_TENSORS = replace(MINE, compute=lambda p, targets, weights, target: p.softmax(dim=1))
FLAT = replace(MASKS, compute=lambda predicted, truth, spacing, task: predicted.double().mean())


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    points = [
        EntryPoint(name, f"{__name__}:{value}", "medflare.metrics")
        for name, value in (("mine", "MINE"), ("overlap", "MASKS"))
    ]
    monkeypatch.setattr(extensions, "entry_points", lambda group: points)
    monkeypatch.setenv(extensions.PACKAGES_VARIABLE, f"{__name__},nowhere")
    clear()
    yield points
    clear()


def clear() -> None:
    """Read the entry points anew."""
    extensions._points.cache_clear()
    metrics_table._table.cache_clear()


@pytest.mark.usefixtures("plugins")
def test_metrics_of_other_distributions_have_values_and_intervals() -> None:
    task = small_task("classification", metrics=("mine",))
    assert task.test_metrics == (task.metric, "mine")
    probabilities = torch.tensor([[0.8, 0.1, 0.1]] * 3 + [[0.2, 0.2, 0.6]] * 3)
    scores = score(
        probabilities, torch.tensor([0] * 3 + [1] * 3), list("pqrstu"), task, task.test_metrics
    )
    summary = summarize(scores.values, scores.cases, task)
    assert summary.metrics["mine"] == pytest.approx(0.7) and summary.intervals[""][
        "mine"
    ] == pytest.approx((0.6 + 0.2 / 6, 0.8 - 0.2 / 6))
    masks = small_task(metrics=("overlap",))
    scores = score(
        torch.ones(2, 1, 4, 4), torch.ones(2, 4, 4), ["p", "q"], masks, masks.test_metrics
    )
    assert scores.values["overlap"] == 1.0


def test_a_wrong_entry_point_is_named(plugins: list[EntryPoint]) -> None:
    for point in (
        EntryPoint("dice", f"{__name__}:MINE", "x"),
        EntryPoint("odd", f"{__name__}:N", "x"),
        EntryPoint("tensor", f"{__name__}:OF_TENSORS", "x"),
        EntryPoint("flat", f"{__name__}:FLAT", "x"),
        EntryPoint("gone", "nowhere:N", "x"),
    ):
        plugins[:] = [point]
        clear()
        assert metric_table() == METRICS, "other metrics stay"
        with pytest.raises(ConfigError, match=point.name):
            require_usable(point.name)
    plugins.clear()


def test_intervals_over_patients_are_of_their_resamples() -> None:
    """Three patients of 0.2, three of 0.6: 1.6 % of the resamples have none of the latter, 10.9 % at most one."""
    values = torch.tensor([0.2, 0.2, 0.2, 0.6, 0.6, 0.6])
    cup = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2, math.nan])
    cases = Cases(tuple("pqrstu"), {"dice": values}, structures={"cup": {"dice": cup}})
    summary = summarize({"dice": 0.4, "iou": None}, cases, small_task())
    assert summary.intervals == {"": {"dice": pytest.approx((0.2 + 0.4 / 6, 0.2 + 5 * 0.4 / 6))}}, (
        "five patients have a cup"
    )
    assert summary.by_label == {"cup": {"dice": pytest.approx(0.2)}}
    five = Cases(tuple("pqrst"), {"dice": values[:5]})
    assert summarize({"dice": 0.36}, five, small_task()).intervals == {}, (
        "the interval of few patients is their range"
    )
    assert summarize({"dice": None}, Cases(), small_task()).by_label == {}, "no image"


def test_intervals_draw_patients_with_all_of_their_images() -> None:
    task = small_task("classification")
    # The four images of p, q and r are right, those of s, t and u wrong.
    probabilities = torch.eye(3)[[0] * 12 + [1] * 12].double()
    cases = Cases(
        tuple(name for name in "pqrstu" for _ in range(4)),
        {},
        probabilities,
        torch.zeros(24, dtype=torch.long),
    )
    assert summarize({"accuracy": 0.5}, cases, task).intervals[""] == {
        "accuracy": pytest.approx((1 / 6, 5 / 6))
    }


def of_patients(
    target: str, probabilities: torch.Tensor, targets: torch.Tensor, *names: str
) -> dict[str, Any]:
    """The intervals of these metrics; every image is of another patient."""
    labels = ["x", "y", "z"] if target == "multiclass" else ["x", "y"]
    loss = {"name": "ce" if target == "multiclass" else "bce"}
    task = small_task("classification", target=target, labels=labels, loss=loss)
    patients = list(map(str, range(len(targets))))
    scores = score(probabilities, targets, patients, task, names)
    return dict(summarize(scores.values, scores.cases, task).intervals[""])


def test_a_resample_without_a_class_does_not_count_for_a_mean_over_classes() -> None:
    """All answers are x; of 30 patients three have y, 4.2 % of the resamples none of them."""
    targets = torch.tensor([0] * 27 + [1] * 3)
    everywhere_x = torch.eye(3)[[0] * 30]
    intervals = of_patients(
        "multiclass", everywhere_x, targets, "balanced_accuracy", "f1_macro", "accuracy"
    )
    # x is always right, y always wrong.
    assert intervals["balanced_accuracy"] == (0.5, 0.5)
    # With n images of x, F1 of x is 2 n / (n + 30), that of y 0; 2.5 % have at most 23, if any of y.
    assert intervals["f1_macro"] == pytest.approx((23 / 53, 29 / 59), abs=0.01)
    assert intervals["f1_macro"][1] == pytest.approx(29 / 59)
    assert intervals["accuracy"][1] == 1.0, "a mean over images"


@pytest.mark.parametrize(
    ("target", "targets"),
    [
        ("multiclass", [0] * 15 + [1] * 14 + [2]),
        ("multilabel", [[1, 0]] * 15 + [[1, 1]] * 14 + [[0, 0]]),  # x is absent once
        ("multilabel", [[0, 0]] * 15 + [[0, 1]] * 14 + [[1, 0]]),  # x is present once
    ],
)
def test_a_class_of_one_patient_leaves_intervals_of_means_over_images_alone(
    target: str, targets: list[Any]
) -> None:
    """36 % of the resamples lack that patient."""
    random = np.random.default_rng(1)
    outputs = 3 if target == "multiclass" else 2
    probabilities = torch.tensor(random.dirichlet([1] * outputs, size=30))
    of_classes = ("balanced_accuracy", "f1_macro", "auc_macro", "auprc_macro")
    over_images = ("accuracy", "brier", "ece")
    intervals = of_patients(target, probabilities, torch.tensor(targets), *of_classes, *over_images)
    assert intervals.keys() == set(over_images)


def test_the_interval_of_a_mean_needs_six_values() -> None:
    # A resample has k threes with the binomial probability (6 over k) / 64: 1.6 % for none, 10.9 % for at most one.
    assert mean_interval([0.0, 0.0, 0.0, 3.0, 3.0, 3.0]) == (0.5, 2.5)
    # Of three values 3.7 % of the resamples have the smallest one only: the interval would be the smallest and the largest value.
    assert (
        mean_interval([0.0, 1.0, 3.0]) is None and mean_interval([0.0, 0.0, 0.0, 3.0, 3.0]) is None
    )
    low, high = mean_interval([place / 20 for place in range(20)]) or (0.0, 0.0)
    assert 0.3 < low < 0.475 < high < 0.65, "about 1.96 x 0.288 / sqrt(20) on either side"
