"""Statistics over seeds and over patients, against numbers worked out by hand."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from helpers.small_tasks import score, small_task
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.statistics import (
    ALL_SITES,
    Comparison,
    Run,
    case_table,
    compare,
    compare_patients,
    joined_cases,
    mean_interval,
    study_values,
    weighted_metric,
)
from studies.conftest import leaving_out

NAN = float("nan")


def test_the_interval_of_a_mean_needs_six_values() -> None:
    # A resample has k threes with the binomial probability (6 over k) / 64: 1.6 % for none, 10.9 % for at most one.
    assert mean_interval([0.0, 0.0, 0.0, 3.0, 3.0, 3.0]) == (0.5, 2.5)
    # Of three values 3.7 % of the resamples have the smallest one only: the interval would be the smallest and the largest value.
    assert mean_interval([0.0, 1.0, 3.0]) is None and mean_interval([0.0, 0.0, 0.0, 3.0, 3.0]) is None


def test_compare_by_hand() -> None:
    # Differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641 with 2 degrees of freedom, p = 1 - t / sqrt(t^2 + 2) = 0.0742;
    # the 97.5 % point of that t is 4.3027, so the interval is 2 ± 4.3027 / sqrt(3).
    comparison = compare([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert (comparison.difference, comparison.n) == (2.0, 3)
    assert comparison.p == pytest.approx(1 - 12**0.5 / 14**0.5)
    assert comparison.interval == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))


def test_compare_degenerate_seeds() -> None:
    assert compare([], []) == compare([0.5, NAN, NAN], [NAN, 0.5, 0.5]) == Comparison(None, None, None, 0)
    assert compare([0.5], [0.75]) == Comparison(0.25, None, None, 1)
    assert compare([0.5, 0.2], [0.5, 0.2]) == Comparison(0.0, None, None, 2)
    shifted = compare([0.1, 0.2, 0.3], [0.6, 0.7, 0.8])
    assert (shifted.interval, shifted.p) == (None, None), "equal differences have no spread"


def values_of(runs: Sequence[Run], model: str, role: str = "inside", site: str = ALL_SITES) -> list[float]:
    values: list[float] = study_values({"row": runs}).loc[("row", model, role, "dice", site)].tolist()
    return values


def test_values_of_a_study_by_hand(runs: list[Run]) -> None:
    assert values_of(runs, "global") == pytest.approx([0.5, 0.5, 0.6])
    assert values_of(runs, "global", site="B") == pytest.approx([0.6, 0.5, NAN], nan_ok=True)
    assert values_of(runs, "deployed", "outside") == [0.1, 0.2, 0.6]


def test_a_seed_with_several_runs_counts_once(runs: list[Run]) -> None:
    """Left out in turn: A's values as an inside site are averaged within the seed, and then over sites."""
    both = [runs[0], leaving_out("B", 0.8, runs[0])]
    assert values_of(both, "global", site="A") == pytest.approx([0.4]), "inside in both runs"
    assert values_of(both, "global", site="B") == pytest.approx([0.6]), "inside in the first run alone"
    assert values_of(both, "global") == pytest.approx([(0.4 + 0.6) / 2])
    assert values_of(both, "deployed", "outside") == pytest.approx([(0.1 + 0.8) / 2]), "X and B, each once"
    assert values_of([runs[1], *both], "global", site="A") == pytest.approx([0.4, 0.5]), "in the order of the seeds"


def test_models_of_several_sites_are_averaged(record: RunRecord) -> None:
    of_sites = {"global": {"dice": 0.1}, "personal/A": {"dice": 0.2}, "personal/B": {"dice": 0.6}}
    run = build_results(dataclasses.replace(record, sites={"X": SiteRecord("outside", metrics=of_sites)}))
    assert values_of([run], "personal/*", "outside") == pytest.approx([0.4])


def run(seed: int, sites: Mapping[str, Mapping[str, Any]], outside: str = "") -> Run:
    """A run in which the model "m" scored these cases."""
    about: dict[str, Any] = {name: {"role": "outside" if name == outside else "inside", "metrics": {}} for name in sites}
    return {"seed": seed, "sites": about, "scores": {name: {"m": cases} for name, cases in sites.items()}}


def dice(**patients: float | None) -> dict[str, Any]:
    return {"patients": list(patients), "values": {"dice": list(patients.values())}}


def predictions(positive: Sequence[float], truth: Sequence[int], patients: str = "") -> dict[str, Any]:
    names = list(patients) or [str(number) for number in range(len(truth))]
    return {"patients": names, "probabilities": [[1 - p, p] for p in positive], "targets": list(truth)}


def compared(first: Run | list[Run], second: Run | list[Run], metric: str = "dice") -> Comparison:
    runs = [of if isinstance(of, list) else [of] for of in (first, second)]
    return compare_patients((runs[0], "m"), (runs[1], "m"), metric)


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
    cases = case_table(scores.cases.to_dict(), metric)
    assert cases is not None
    assert weighted_metric(cases, metric, np.ones(24)) == pytest.approx(scores.values[metric], abs=1e-6)
    twice = weighted_metric(joined_cases([cases, cases]), metric, np.ones(48))
    assert weighted_metric(cases, metric, np.full(24, 2.0)) == pytest.approx(twice)


def test_patients_are_compared_within_their_sites() -> None:
    """A's patients gain 0.1 and 0.3, B's 0: the mean over sites of 0.2 and 0."""
    unchanged = dice(c=0.4, d=0.8, e=0.5, f=0.6)
    first = run(0, {"A": dice(a=0.5, b=0.5), "B": unchanged})
    second = run(0, {"A": dice(a=0.6, b=0.8), "B": unchanged})
    comparison = compared(first, second)
    assert comparison.difference == pytest.approx(0.1)
    assert comparison.interval == pytest.approx((0.05, 0.15)), "A's resampled means are 0.1, 0.2 and 0.3"
    assert comparison.p == pytest.approx(0.5) and comparison.n == 6
    assert compared(second, first).difference == pytest.approx(-0.1)
    assert compared(run(0, {"A": dice(a=0.5)}), run(0, {"A": dice(a=0.75)})) == Comparison(0.25, None, None, 1), "one patient"
    five = compared(run(0, {"A": dice(a=0.5, b=0.5, c=0.4, d=0.8, e=0.5)}), run(0, {"A": dice(a=0.6, b=0.8, c=0.4, d=0.8, e=0.5)}))
    assert five.interval is None and five.n == 5


def test_a_patient_of_two_seeds_is_one_patient() -> None:
    first = [run(0, {"A": dice(a=0.5, b=0.5)}), run(1, {"A": dice(a=0.5, c=0.5)})]
    second = [run(0, {"A": dice(a=0.7, b=0.5)}), run(1, {"A": dice(a=0.9, c=None)})]
    comparison = compared(first, second)
    assert comparison.difference == pytest.approx((0.1 + 0.4) / 2), "0.1 with the first seed, 0.4 with the second, where c is undefined"
    assert comparison.n == 2, "c has no value under the second model"


def test_difference_interval_and_test_are_of_the_same_patients() -> None:
    """e and f have empty masks: no Dice if the first model predicts nothing, and 0 if the second one predicts something."""
    first = run(0, {"A": dice(a=0.8, b=0.7, c=0.6, d=0.8, e=None, f=None, g=0.5, h=0.4)})
    second = run(0, {"A": dice(a=0.85, b=0.75, c=0.65, d=0.85, e=0.0, f=0.0, g=0.55, h=0.45)})
    for one, other, gain in ((first, second, 0.05), (second, first, -0.05)):
        comparison = compared(one, other)
        assert comparison.difference == pytest.approx(gain) and comparison.interval == pytest.approx((gain, gain))
        assert (comparison.p, comparison.n) == (0.03125, 6), "2 of 2^6 signs"
    assert compared(first, run(0, {"A": dice(a=None, b=None, c=None, d=None, e=0.5, f=0.5)})) == Comparison()


@pytest.mark.parametrize(("positive", "defined"), [(3, True), (1, False)])
def test_an_interval_allows_a_tenth_of_undefined_resamples(positive: int, defined: bool) -> None:
    """A resample of 30 images misses all three positive ones in 4 % of cases, a single positive one in 36 %."""
    scores = np.random.default_rng(0).random(30)
    better = np.where(np.arange(30) < positive, 0.5 + scores / 2, scores)
    truth = [1] * positive + [0] * (30 - positive)
    first, second = (run(0, {"A": predictions(of.tolist(), truth)}) for of in (scores, better))
    comparison = compared(first, second, "auc_macro")
    assert comparison.difference is not None and (comparison.interval is not None) == defined
    if comparison.interval is not None:
        assert comparison.interval[0] <= comparison.difference <= comparison.interval[1]


def test_patients_in_another_order_are_paired_by_name() -> None:
    first = run(0, {"A": dice(a=0.5, b=0.5, c=None, d=0.25)})
    orders = dice(a=0.6, b=0.8, c=0.5, d=0.5), dice(d=0.5, c=0.5, b=0.8, a=0.6)
    same, reversed_ = (compared(first, run(0, {"A": cases})) for cases in orders)
    assert same == reversed_ and same.n == 3
    truth, scores = [1, 1, 0, 0], [0.9, 0.5, 0.7, 0.1]
    areas = run(0, {"A": predictions(scores, truth, "abcd")})
    assert compared(areas, run(0, {"A": predictions(scores[::-1], truth[::-1], "dcba")}), "auc_macro").n == 4
    one, other = (run(0, {"A": predictions(scores, truth, patients)}) for patients in ("xxyy", "xyxy"))
    assert compared(one, other, "auc_macro") == Comparison(), "several images of a patient in different order"


@pytest.mark.parametrize(
    "other",
    [
        run(1, {"A": dice(a=0.6, b=0.6)}),
        run(0, {"A": dice(a=0.6, z=0.6)}),
        run(0, {"A": dice(a=0.6, b=0.6)}, outside="A"),
        {**run(0, {"A": dice(a=0.6, b=0.6)}), "scores": {}},
    ],
    ids=["seed", "patients", "role", "no scores"],
)
def test_runs_of_other_patients_are_not_paired(other: Run) -> None:
    assert compared(run(0, {"A": dice(a=0.5, b=0.5)}), other) == Comparison()
