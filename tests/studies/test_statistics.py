"""Statistics over repeated runs and over their patients, against numbers worked out by hand."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from helpers.small_tasks import score, small_task
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.statistics import (
    Comparison,
    Estimate,
    PatientComparison,
    Run,
    compare,
    compare_patients,
    estimate,
    joined_cases,
    values_of,
    weighted_metric,
)


def leaving_out(site: str, value: float, run: Run) -> Run:
    """The run with `site` outside in X's place, where the deployed model has this Dice."""
    outside = {**run["sites"]["X"], "metrics": {"deployed": {"dice": value}}}
    return {**run, "sites": {"A": run["sites"]["A"], site: outside}}


def test_estimate_by_hand() -> None:
    found = estimate([1.0, 2.0, 6.0])
    assert found.mean == pytest.approx(3.0)
    assert found.sd == pytest.approx(math.sqrt((4 + 1 + 9) / 2)), "n - 1 in the denominator"
    assert found.n == 3
    assert found.interval is not None
    low, high = found.interval
    assert 1.0 <= low < 3.0 < high <= 6.0


def test_interval_of_three_runs_is_the_range_of_their_resampled_means() -> None:
    # 1/27 = 3.7 % of all resamples are (0, 0, 0): more than 2.5 %, so the interval reaches the smallest and the largest value.
    assert estimate([0.0, 1.0, 3.0]).interval == (0.0, 3.0)


def test_estimate_of_little() -> None:
    assert estimate([]) == Estimate(None, None, 0, None)
    assert estimate([None, math.nan, 0.5]) == Estimate(0.5, None, 1, None)
    assert estimate([0.5, 0.5]) == Estimate(0.5, 0.0, 2, (0.5, 0.5))


def test_compare_by_hand() -> None:
    # Differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641 with 2 degrees of freedom, p = 1 - t / sqrt(t^2 + 2) = 0.0742;
    # the 97.5 % point of that t is 4.3027, so the interval is 2 ± 4.3027 / sqrt(3).
    found = compare([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert found.difference == 2.0
    assert found.p == pytest.approx(1 - 12**0.5 / 14**0.5)
    assert found.interval == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert found.n == 3


def test_compare_degenerate() -> None:
    assert compare([], []) == Comparison(None, None, None, 0)
    assert compare([0.5], [0.75]) == Comparison(0.25, None, None, 1)
    assert compare([0.5, None, math.nan], [None, 0.5, 0.5]) == Comparison(None, None, None, 0)
    assert compare([0.5, 0.2], [0.5, 0.2]) == Comparison(0.0, None, None, 2)
    shifted = compare([0.1, 0.2, 0.3], [0.6, 0.7, 0.8])
    assert (shifted.interval, shifted.p) == (None, None), "equal differences have no spread"
    with pytest.raises(ValueError, match="pairs"):
        compare([0.5], [0.5, 0.5])


def test_values_of(runs: list[Run]) -> None:
    assert values_of(runs, "global", "dice") == pytest.approx([0.5, 0.5, 0.6])
    assert values_of(runs, "global", "dice", site="B") == [0.6, 0.5, None]
    assert values_of(runs, "deployed", "dice", role="outside") == [0.1, 0.2, 0.6]
    assert values_of(runs, "global", "dice", role="outside", site="B") == [None] * 3, "B is never outside"
    assert values_of(runs, "global", "dice", site="nobody") == [None] * 3


def test_a_seed_with_several_runs_counts_once(runs: list[Run]) -> None:
    """Left out in turn: A's values as an inside site are averaged within the seed, and then over sites."""
    without_x, without_b = runs[0], leaving_out("B", 0.8, runs[0])
    both = [without_x, without_b]
    assert values_of(both, "global", "dice", site="A") == pytest.approx([0.4]), "inside in both runs"
    assert values_of(both, "global", "dice", site="B") == pytest.approx([0.6]), "inside in the first run alone"
    assert values_of(both, "global", "dice") == pytest.approx([(0.4 + 0.6) / 2])
    assert values_of(both, "deployed", "dice", role="outside") == pytest.approx([(0.1 + 0.8) / 2]), "X and B, each once"
    assert values_of([runs[1], *both], "global", "dice", site="A") == pytest.approx([0.4, 0.5]), "in the order of the seeds"


def test_models_of_several_sites_are_averaged(record: RunRecord) -> None:
    of_sites = {"global": {"dice": 0.1}, "personal/A": {"dice": 0.2}, "personal/B": {"dice": 0.6}}
    run = build_results(dataclasses.replace(record, sites={"X": SiteRecord("outside", metrics=of_sites)}))
    assert values_of([run], "personal/*", "dice", role="outside") == pytest.approx([0.4])


# -- over patients ----------------------------------------------------------------------------------------------------

Values = Sequence[float | None]


def run(seed: int, sites: Mapping[str, Mapping[str, Any]], outside: str = "") -> Run:
    """A run in which the model "m" scored these cases."""
    about: dict[str, Any] = {name: {"role": "outside" if name == outside else "inside", "metrics": {}} for name in sites}
    return {"seed": seed, "sites": about, "scores": {name: {"m": cases} for name, cases in sites.items()}}


def dice(**patients: float | None) -> dict[str, Any]:
    return {"patients": list(patients), "values": {"dice": list(patients.values())}}


def answers(positive: Sequence[float], truth: Sequence[int], patients: str = "") -> dict[str, Any]:
    names = list(patients) or [str(number) for number in range(len(truth))]
    return {"patients": names, "probabilities": [[1 - p, p] for p in positive], "targets": list(truth)}


def test_weighted_areas_are_scikit_learns() -> None:
    """With ties, and with cases that a resample leaves out or draws several times; where one class is left out there is none."""
    rng = np.random.default_rng(0)
    positive, truth = rng.integers(0, 6, 40) / 5, rng.integers(0, 2, 40)
    weights = rng.multinomial(40, np.full(40, 1 / 40), size=20).astype(float)
    found = weighted_metric(answers(positive.tolist(), truth.tolist()), "auc_macro", weights)
    assert found == pytest.approx([roc_auc_score(truth, positive, sample_weight=drawn) for drawn in weights])
    assert np.isnan(weighted_metric(answers(positive.tolist(), truth.tolist()), "auc_macro", (truth == 1).astype(float)))


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy", "f1_macro", "auc_macro"])
@pytest.mark.parametrize("target", ["binary", "multiclass", "multilabel"])
def test_unweighted_metrics_are_those_of_the_task(metric: str, target: str) -> None:
    labels = ["bright"] if target == "binary" else ["dark", "medium", "bright"]
    loss = {"name": "ce"} if target == "multiclass" else {"name": "bce"}
    task = small_task("classification", target=target, labels=labels, loss=loss)
    random = np.random.default_rng(3)
    probabilities = torch.tensor(random.dirichlet([1, 1, 1], size=24) if target == "multiclass" else random.uniform(size=(24, len(labels))))
    targets = torch.tensor(random.integers(0, 2, (24, 3))) if target == "multilabel" else torch.tensor(random.integers(0, 2, 24))
    scores = score(probabilities, targets, [str(n) for n in range(24)], task, [metric])
    assert weighted_metric(scores.cases.to_dict(), metric, np.ones(24)) == pytest.approx(scores.values[metric], abs=1e-6)
    twice = joined_cases([scores.cases.to_dict(), scores.cases.to_dict()], metric)
    assert weighted_metric(scores.cases.to_dict(), metric, np.full(24, 2.0)) == pytest.approx(weighted_metric(twice, metric, np.ones(48)))


def test_segmentation_cases_make_up_the_mean() -> None:
    task = small_task()
    probabilities, targets = torch.zeros(3, 1, 4, 4), torch.zeros(3, 4, 4, dtype=torch.long)
    probabilities[0, :, :2], targets[0, :2] = 1.0, 1
    targets[1, :2] = 1
    scores = score(probabilities, targets, ["a", "b", "c"], task, ["dice"])
    assert scores.cases.to_dict() == {"patients": ["a", "b", "c"], "values": {"dice": [1.0, 0.0, None]}}
    assert scores.values["dice"] == pytest.approx(float(weighted_metric(scores.cases.to_dict(), "dice", np.ones(3)))) == 0.5


def test_patients_are_compared_within_their_sites() -> None:
    """A's patients gain 0.1 and 0.3, B's 0 and 0: the mean over sites of 0.2 and 0."""
    first = [run(0, {"A": dice(a=0.5, b=0.5), "B": dice(c=0.4, d=0.8)})]
    second = [run(0, {"A": dice(a=0.6, b=0.8), "B": dice(c=0.4, d=0.8)})]
    found = compare_patients((first, "m"), (second, "m"), "dice")
    assert found.difference == pytest.approx(0.1)
    assert found.interval == pytest.approx((0.05, 0.15)), "A's resampled means are 0.1, 0.2 and 0.3"
    assert found.p == pytest.approx(0.5)
    assert found.patients == 4
    back = compare_patients((second, "m"), (first, "m"), "dice")
    assert back.difference == pytest.approx(-0.1)


def test_a_patient_of_two_seeds_is_one_patient() -> None:
    first = [run(0, {"A": dice(a=0.5, b=0.5)}), run(1, {"A": dice(a=0.5, c=0.5)})]
    second = [run(0, {"A": dice(a=0.7, b=0.5)}), run(1, {"A": dice(a=0.9, c=None)})]
    found = compare_patients((first, "m"), (second, "m"), "dice")
    assert found.difference == pytest.approx((0.1 + 0.4) / 2), "0.1 with the first seed, 0.4 with the second, where c is undefined"
    assert found.patients == 2, "c has no value under the second model"


def test_estimate_interval_and_test_are_of_the_same_patients() -> None:
    """e and f have empty masks: no Dice where the first model finds nothing, and 0 where the second one finds something."""
    first = [run(0, {"A": dice(a=0.8, b=0.7, c=0.6, d=0.8, e=None, f=None)})]
    second = [run(0, {"A": dice(a=0.85, b=0.75, c=0.65, d=0.85, e=0.0, f=0.0)})]
    for one, other, gain in ((first, second, 0.05), (second, first, -0.05)):
        found = compare_patients((one, "m"), (other, "m"), "dice")
        assert found.difference == pytest.approx(gain) and found.interval == pytest.approx((gain, gain))
        assert (found.p, found.patients) == (0.125, 4)
    nobody = [run(0, {"A": dice(a=None, b=None, c=None, d=None, e=0.5, f=0.5)})]
    assert compare_patients((first, "m"), (nobody, "m"), "dice") == PatientComparison()


def test_resamples_without_a_value_do_not_take_the_interval_away() -> None:
    """A resample of 30 images misses all three positive ones in 4 % of cases, a single positive one in 36 %."""
    rng = np.random.default_rng(0)
    one = rng.random(30)
    for positive, known in ((3, True), (1, False)):
        truth = [1] * positive + [0] * (30 - positive)
        other = np.where(np.arange(30) < positive, 0.5 + one / 2, one)
        models = [[run(0, {"A": answers(scores.tolist(), truth)})] for scores in (one, other)]
        found = compare_patients((models[0], "m"), (models[1], "m"), "auc_macro")
        assert found.difference is not None and (found.interval is not None) == known
        if found.interval is not None:
            assert found.interval[0] <= found.difference <= found.interval[1]


def test_patients_in_another_order_are_paired_by_name() -> None:
    first = [run(0, {"A": dice(a=0.5, b=0.5, c=None, d=0.25)})]
    same, turned = dice(a=0.6, b=0.8, c=0.5, d=0.5), dice(d=0.5, c=0.5, b=0.8, a=0.6)
    found = [compare_patients((first, "m"), ([run(0, {"A": second})], "m"), "dice") for second in (same, turned)]
    assert found[0] == found[1] and found[0].patients == 3
    truth, scores = [1, 1, 0, 0], [0.9, 0.5, 0.7, 0.1]
    areas = [run(0, {"A": answers(scores, truth, "abcd")})]
    back = [run(0, {"A": answers([0.1, 0.5, 0.7, 0.9], truth[::-1], "dcba")})]
    assert compare_patients((areas, "m"), (back, "m"), "auc_macro").patients == 4
    several = [run(0, {"A": answers(scores, truth, "xxyy")})], [run(0, {"A": answers(scores, truth, "xyxy")})]
    assert compare_patients((several[0], "m"), (several[1], "m"), "auc_macro") == PatientComparison(), "nobody knows which image is which"


def test_only_equal_splits_are_paired() -> None:
    one = run(0, {"A": dice(a=0.5, b=0.5)})
    assert compare_patients(([one], "m"), ([run(1, {"A": dice(a=0.6, b=0.6)})], "m"), "dice") == PatientComparison()
    assert compare_patients(([one], "m"), ([run(0, {"A": dice(a=0.6, z=0.6)})], "m"), "dice") == PatientComparison()
    assert compare_patients(([one], "m"), ([run(0, {"A": dice(a=0.6, b=0.6)}, outside="A")], "m"), "dice") == PatientComparison()
    assert compare_patients(([one], "m"), ([{**one, "scores": {}}], "m"), "dice") == PatientComparison(), "no scores were kept"


def test_one_patient_has_a_difference_and_no_interval() -> None:
    found = compare_patients(([run(0, {"A": dice(a=0.5)})], "m"), ([run(0, {"A": dice(a=0.75)})], "m"), "dice")
    assert found == PatientComparison(0.25, None, None, 1)
