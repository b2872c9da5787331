"""Confusion counts and ROC curves: values by hand and degenerate cases."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, roc_auc_score, roc_curve

from medflare.tasks.classes import (
    FALSE_ALARMS,
    Cases,
    area_interval,
    class_report,
    curve_points,
    patients_of_classes,
)

EMPTY: dict[str, Any] = {"auc": None, "low": None, "high": None, "sensitivity": []}


def cases(probabilities: list[list[float]], targets: list[Any], patients: str = "abcd") -> Cases:
    return Cases(
        tuple(patients), {}, torch.tensor(probabilities, dtype=torch.float64), torch.tensor(targets)
    )


def test_two_classes_by_hand() -> None:
    """Scores 0.9+ 0.6- 0.2+ 0.1-: the curve goes up to one half, right to one half, up to 1, right to 1."""
    report = class_report(cases([[0.9], [0.2], [0.6], [0.1]], [1, 1, 0, 0]), "binary", ["disc"])
    assert report["confusion"] == [[[1, 1], [1, 1]]]
    (curve,) = report["roc"]
    assert curve["auc"] == 0.75 and curve["low"] is None and curve["high"] is None, "four patients"
    assert curve["sensitivity"] == [0.5] * 10 + [1.0] * 11 and len(FALSE_ALARMS) == 21
    exclusive = class_report(
        cases([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6], [0.9, 0.1]], [1, 1, 0, 0]),
        "multiclass",
        ["no", "yes"],
    )
    assert exclusive == report, "two exclusive classes are the same task"


def test_an_area_and_its_interval_by_hand() -> None:
    """V10 = (1, 1/2), V01 = (1/2, 1): variances 1/8 each, their mean over two 1/16 each, together 1/8."""
    area = area_interval(np.array([4.0, 2.0, 3.0, 1.0]), np.array([True, True, False, False]))
    assert (
        area.value == 0.75
        and area.low == pytest.approx(0.75 - 1.959964 * 0.125**0.5, abs=1e-6)
        and area.high == 1.0
    )
    perfect = area_interval(np.arange(4.0), np.array([False, False, True, True]))
    assert (perfect.value, perfect.low, perfect.high) == (1.0, 1.0, 1.0), "nothing varies"
    single = area_interval(np.arange(3.0), np.array([False, False, True]))
    assert single.value == 1.0 and np.isnan(single.low) and np.isnan(single.high)
    assert np.isnan(area_interval(np.arange(2.0), np.array([True, True])).value)


def test_several_classes_are_each_against_the_rest() -> None:
    actual = class_report(
        cases([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.7, 0.2, 0.1]], [0, 1, 1, 0]),
        "multiclass",
        "xyz",
    )
    assert actual["confusion"] == [[[2, 0, 0], [1, 1, 0], [0, 0, 0]]]
    assert [curve["auc"] for curve in actual["roc"]] == [1.0, 1.0, None] and actual["roc"][
        2
    ] == EMPTY


def test_every_label_of_a_multilabel_task_has_a_matrix() -> None:
    answered = cases(
        [[0.8, 0.1], [0.2, 0.5], [0.6, 0.9], [0.7, 0.2]], [[1, 0], [0, 0], [0, 1], [1, 0]]
    )
    actual = class_report(answered, "multilabel", ["p", "q"])
    assert actual["confusion"] == [[[1, 1], [0, 2]], [[3, 0], [0, 1]]], "0.5 is no"
    assert [curve["auc"] for curve in actual["roc"]] == [1.0, 1.0]


def test_six_patients_have_an_interval() -> None:
    """V10 = (1, 1, 2/3), V01 = (1, 1, 2/3): variances 1/27, their mean over three 1/81 each, together 2/81."""
    (curve,) = class_report(
        cases([[0.9], [0.8], [0.3], [0.4], [0.2], [0.1]], [1, 1, 1, 0, 0, 0], "abcdef"),
        "binary",
        ["disc"],
    )["roc"]
    assert curve["auc"] == pytest.approx(8 / 9) and curve["low"] == pytest.approx(
        8 / 9 - 1.959964 * (2 / 81) ** 0.5
    )


def test_images_of_one_patient_have_no_interval() -> None:
    (curve,) = class_report(
        cases([[0.9], [0.2], [0.6], [0.1]], [1, 1, 0, 0], "aabb"), "binary", ["disc"]
    )["roc"]
    assert curve["auc"] == 0.75 and curve["low"] is None and curve["high"] is None


def test_one_class_alone_has_counts_and_no_curve() -> None:
    assert class_report(cases([[0.9], [0.2]], [1, 1], "ab"), "binary", ["disc"]) == {
        "confusion": [[[0, 0], [1, 1]]],
        "roc": [EMPTY],
    }


def test_without_images_or_with_many_classes_the_report_is_empty() -> None:
    assert class_report(Cases(("a",), {"dice": torch.ones(1)}), "binary", ["disc"]) == {}, (
        "segmentation"
    )
    assert class_report(cases([], [], ""), "binary", ["disc"]) == {}
    many = list(map(str, range(17)))
    assert class_report(cases([[1.0] * 17], [0], "a"), "multiclass", many) == {}, "meta are small"


@pytest.mark.parametrize("distinct", [2, 7, 1000])
def test_points_of_a_curve_are_those_of_scikit_learn(distinct: int) -> None:
    random = np.random.default_rng(distinct)
    truth = random.random(200) < 0.3
    scores = random.integers(distinct, size=200) / distinct
    false_alarms, hits, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert curve_points(scores, truth) == list(zip(false_alarms, hits, strict=True))
    assert curve_points(scores, np.ones(200, dtype=bool)) == [], "one class alone has no curve"


def test_counts_of_decisions_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    probabilities = random.dirichlet(np.ones(4), 50)
    truth = random.integers(3, size=50)
    answered = cases(probabilities.tolist(), truth.tolist(), "p" * 50)
    expected = confusion_matrix(truth, probabilities.argmax(axis=1), labels=range(4)).tolist()
    assert class_report(answered, "multiclass", "wxyz")["confusion"] == [expected]


def test_a_curve_does_not_reveal_scores() -> None:
    """Every increasing function of the scores gives the same curve, on a fixed grid."""

    def curve(scores: np.ndarray, truth: np.ndarray) -> list[float]:
        answered = cases(scores[:, None].tolist(), truth.tolist(), "p" * len(scores))
        sensitivity: list[float] = class_report(answered, "binary", ["disc"])["roc"][0][
            "sensitivity"
        ]
        return sensitivity

    random = np.random.default_rng(0)
    truth = random.random(500) < 0.3
    scores = random.random(500)
    assert curve(scores, truth) == curve(scores**3, truth)
    assert len(curve(scores, truth)) == 21 and curve(scores, truth)[-1] == 1.0
    assert curve(np.ones(4), np.array([True, False, True, False]))[:3] == [0.0, 0.05, 0.1], (
        "ties lie on the diagonal"
    )


def test_patients_behind_the_counts() -> None:
    assert patients_of_classes("aabc", np.array([1, 1, 0, 1]), 1) == [2, 1]
    assert patients_of_classes("abc", np.array([[1, 0], [0, 0], [1, 0]]), 2) == [2, 1, 0, 3]


def test_stored_probabilities_have_the_area_of_the_probabilities() -> None:
    """Three of the four pairs are in order, two of them by the seventh decimal or a later one."""
    scores = [[1e-9], [2e-9], [0.9999998], [0.9999999]]
    stored = cases(scores, [0, 1, 0, 1]).to_dict()
    assert stored["probabilities"] == scores
    assert roc_auc_score(stored["targets"], [row[0] for row in stored["probabilities"]]) == 0.75
    single = torch.rand(100, generator=torch.Generator().manual_seed(0)) ** 8
    rows = Cases(("p",) * 100, {}, single.double()[:, None], torch.zeros(100)).to_dict()
    assert torch.equal(torch.tensor(rows["probabilities"])[:, 0], single), "float32 has nine digits"
