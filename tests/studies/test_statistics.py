"""Statistics over seeds and over patients, against numbers worked out by hand."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from helpers.small_tasks import score, small_task
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.statistics import (
    ALL_SITES,
    Comparison,
    Results,
    case_table,
    common_classes,
    compare,
    compare_patients,
    conclusion,
    delong,
    detectable_difference,
    equivalence_p,
    holm,
    joined_cases,
    metrics_frame,
    split_ratio,
    study_values,
    weighted_metric,
)
from studies.conftest import leaving_out

NAN = float("nan")


def test_compare_by_hand() -> None:
    # Differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641 with 2 degrees of freedom, p = 1 - t / sqrt(t^2 + 2) = 0.0742;
    # the 97.5 % point of that t is 4.3027, so the interval is 2 ± 4.3027 / sqrt(3).
    comparison = compare([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert (comparison.difference, comparison.n) == (2.0, 3)
    assert comparison.p == pytest.approx(1 - 12**0.5 / 14**0.5)
    assert comparison.interval == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))


def test_compare_degenerate_seeds() -> None:
    assert (
        compare([], [])
        == compare([0.5, NAN, NAN], [NAN, 0.5, 0.5])
        == Comparison(None, None, None, 0)
    )
    assert compare([0.5], [0.75]) == Comparison(0.25, None, None, 1)
    assert compare([0.5, 0.2], [0.5, 0.2]) == Comparison(0.0, None, None, 2)
    shifted = compare([0.1, 0.2, 0.3], [0.6, 0.7, 0.8])
    assert (shifted.interval, shifted.p) == (None, None), "equal differences have no spread"


def test_seeds_that_share_images_have_a_wider_interval() -> None:
    # Differences 1, 2, 3 have a standard deviation of 1. With test / training = 1/4 the variance is 1/3 + 1/4 = 7/12.
    comparison = compare([1.0, 1.0, 1.0], [2.0, 3.0, 4.0], 0.25)
    error = (7 / 12) ** 0.5
    assert comparison.difference == 2.0 and comparison.error == pytest.approx(error)
    assert comparison.interval == pytest.approx((2 - 4.302653 * error, 2 + 4.302653 * error))
    t = 2 / error
    assert comparison.p == pytest.approx(1 - t / (t**2 + 2) ** 0.5)


def test_the_ratio_of_the_split_counts_only_where_seeds_draw_it_again() -> None:
    def split(resplit: int | None, **images: int) -> Results:
        sites = {"A": {"role": "inside", "n": images}, "X": {"role": "outside", "n": {"test": 50}}}
        return {"configuration": {"task": {"resplit": resplit}}, "sites": sites}

    assert split_ratio([split(0, train=70, test=20), split(1, train=50, test=10)]) == 0.25
    assert split_ratio([split(None, train=70, test=20)] * 2) == 0, "a fixed split"
    generated = [split(seed, train=70, test=20) for seed in (0, 1)]
    for run in generated:
        run["configuration"]["task"]["embedded"] = "mechanisms/wrong_labels"
    assert split_ratio(generated) == 0, "a seed draws images"
    assert split_ratio([split(0, test=20), split(1, test=20)]) == split_ratio([]) == 0, "unknown"


def test_holm_by_hand() -> None:
    # In order .01, .02, .04: 3 x .01, 2 x .02, 1 x .04.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    # .02 x 2 is above .03 x 1: no adjusted value is below that of a smaller p.
    assert holm([0.03, None, 0.02]) == [0.04, None, 0.04]
    assert holm([0.9, 0.6]) == [1.0, 1.0] and holm([]) == [] and holm([None]) == [None]


def test_equivalence_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, error 1 / sqrt(3). To 4 it is t = 2 sqrt(3), one-sided p = (1 - t / sqrt(t^2 + 2)) / 2 = 0.0371.
    comparison = compare([0.0] * 3, [1.0, 2.0, 3.0])
    assert equivalence_p(comparison, 4.0) == pytest.approx((1 - 12**0.5 / 14**0.5) / 2)
    assert equivalence_p(compare([1.0, 2.0, 3.0], [0.0] * 3), 4.0) == equivalence_p(
        comparison, 4.0
    ), "to the nearer bound"
    assert equivalence_p(comparison, 2.0) == 0.5, "on the bound"
    assert (
        equivalence_p(compare([0.5], [0.6]), 4.0) is None
        and equivalence_p(Comparison(), 4.0) is None
    )


def test_the_detectable_difference_has_80_percent_power() -> None:
    detectable = list(map(detectable_difference, (1, 2, 3, 10)))
    assert detectable == [
        None,
        pytest.approx(11.55, abs=0.005),
        pytest.approx(3.26, abs=0.005),
        pytest.approx(1.0, abs=0.005),
    ]
    ratio = detectable_difference(3, 2 / 3)
    assert ratio == pytest.approx(3.264044 * 3**0.5), "the variance is three times as large"
    random = np.random.default_rng(0)
    drawn = random.normal(3.264, 1, (20_000, 3))
    t = drawn.mean(axis=1) / (drawn.std(axis=1, ddof=1) / 3**0.5)
    assert np.mean(np.abs(t) > 4.302653) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("over_seeds", "interval", "adjusted_p", "expected"),
    [
        (Comparison(0.1, (0.05, 0.15), 0.01, 3, 0.01), (0.02, 0.2), 0.02, "confirmed"),
        (Comparison(-0.1, (-0.15, -0.05), 0.01, 3, 0.01), (-0.2, -0.02), 0.02, "opposite"),
        # Among other comparators.
        (Comparison(0.1, (0.05, 0.15), 0.01, 3, 0.01), (0.02, 0.2), 0.06, "study too small"),
        # Over seeds only.
        (Comparison(0.1, (0.05, 0.15), 0.01, 3, 0.01), (-0.02, 0.2), 0.02, "study too small"),
        # They contradict each other.
        (Comparison(0.1, (0.05, 0.15), 0.01, 3, 0.01), (-0.2, -0.02), 0.02, "study too small"),
        # d = .05: t = (.05 - .01) / .01 = 4 with 2 degrees of freedom, p = (1 - 4 / sqrt(18)) / 2 = .0286; with an error of .02 .0918.
        (Comparison(0.01, (-0.03, 0.05), 0.42, 3, 0.01), (-0.02, 0.04), 0.42, "smaller than d"),
        (Comparison(0.01, (-0.07, 0.09), 0.67, 3, 0.02), (-0.02, 0.04), 0.67, "study too small"),
        # Patients allow d.
        (Comparison(0.01, (-0.03, 0.05), 0.42, 3, 0.01), (-0.02, 0.06), 0.42, "study too small"),
        (Comparison(0.01, (-0.03, 0.05), 0.42, 3, 0.01), None, 0.42, "study too small"),
        (Comparison(0.0, None, None, 3), None, None, "smaller than d"),  # the same model
        # No spread to test against.
        (Comparison(0.1, None, None, 3), (0.02, 0.2), None, "study too small"),
        (Comparison(0.0, None, None, 1), (-0.01, 0.01), None, "study too small"),
        (Comparison(), None, None, "study too small"),
    ],
)
def test_verdicts_by_hand(
    over_seeds: Comparison,
    interval: tuple[float, float] | None,
    adjusted_p: float | None,
    expected: str,
) -> None:
    over_patients = Comparison(over_seeds.difference, interval, None, 100)
    assert conclusion(over_seeds, over_patients, adjusted_p, 0.05) == expected


@pytest.mark.parametrize(
    ("over_seeds", "adjusted_p", "expected"),
    [
        (Comparison(0.1, (0.05, 0.15), 0.01, 10, 0.01), 0.01, "confirmed"),
        (Comparison(-0.1, (-0.15, -0.05), 0.01, 10, 0.01), 0.01, "opposite"),
        (Comparison(0.1, (0.05, 0.15), 0.01, 10, 0.01), 0.06, "study too small"),
        (Comparison(0.01, (-0.01, 0.03), 0.4, 10, 0.01), 0.4, "smaller than d"),
        (Comparison(), None, "study too small"),
    ],
)
def test_seeds_alone_decide_where_each_draws_its_own_patients(
    over_seeds: Comparison, adjusted_p: float | None, expected: str
) -> None:
    assert conclusion(over_seeds, None, adjusted_p, 0.05) == expected


def values_of(
    runs: Sequence[Results], model: str, role: str = "inside", site: str = ALL_SITES
) -> list[float]:
    values: list[float] = (
        study_values(metrics_frame({"row": runs})).loc[("row", model, role, "dice", site)].tolist()
    )
    return values


def test_values_of_a_study_by_hand(runs: list[Results]) -> None:
    assert values_of(runs, "global") == pytest.approx([0.5, 0.5, 0.6])
    assert values_of(runs, "global", site="B") == pytest.approx([0.6, 0.5, NAN], nan_ok=True)
    assert values_of(runs, "deployed", "outside") == [0.1, 0.2, 0.6]


def test_a_seed_with_several_runs_counts_once(runs: list[Results]) -> None:
    """Left out in turn: A's values as an inside site are averaged within the seed, and then over sites."""
    both = [runs[0], leaving_out("B", 0.8, runs[0])]
    assert values_of(both, "global", site="A") == pytest.approx([0.4]), "inside in both runs"
    assert values_of(both, "global", site="B") == pytest.approx([0.6]), (
        "inside in the first run alone"
    )
    assert values_of(both, "global") == pytest.approx([(0.4 + 0.6) / 2])
    assert values_of(both, "deployed", "outside") == pytest.approx([(0.1 + 0.8) / 2]), (
        "X and B, each once"
    )
    assert values_of([runs[1], *both], "global", site="A") == pytest.approx([0.4, 0.5]), (
        "in the order of the seeds"
    )


def test_models_of_several_sites_are_averaged(record: RunRecord) -> None:
    of_sites = {"global": {"dice": 0.1}, "personal/A": {"dice": 0.2}, "personal/B": {"dice": 0.6}}
    run = build_results(
        dataclasses.replace(record, sites={"X": SiteRecord("outside", metrics=of_sites)})
    )
    assert values_of([run], "personal/*", "outside") == pytest.approx([0.4])


def run(seed: int, sites: Mapping[str, Mapping[str, Any]], outside: str = "") -> Results:
    """A run in which the model "m" scored these cases."""
    about: dict[str, Any] = {
        name: {"role": "outside" if name == outside else "inside", "metrics": {}} for name in sites
    }
    return {
        "seed": seed,
        "sites": about,
        "scores": {name: {"m": cases} for name, cases in sites.items()},
    }


def dice(**patients: float | None) -> dict[str, Any]:
    return {"patients": list(patients), "values": {"dice": list(patients.values())}}


def predictions(
    positive: Sequence[float], truth: Sequence[int], patients: str = ""
) -> dict[str, Any]:
    names = list(patients) or list(map(str, range(len(truth))))
    return {
        "patients": names,
        "probabilities": [[1 - p, p] for p in positive],
        "targets": list(truth),
    }


def compared(
    first: Results | list[Results], second: Results | list[Results], metric: str = "dice"
) -> Comparison:
    runs = [of if isinstance(of, list) else [of] for of in (first, second)]
    return compare_patients((runs[0], "m"), (runs[1], "m"), metric)


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy", "f1_macro", "auc_macro"])
@pytest.mark.parametrize("target", ["binary", "multiclass", "multilabel"])
def test_unweighted_metrics_are_those_of_the_task(metric: str, target: str) -> None:
    labels = ["bright"] if target == "binary" else ["dark", "medium", "bright"]
    loss = {"name": "ce"} if target == "multiclass" else {"name": "bce"}
    task = small_task("classification", target=target, labels=labels, loss=loss)
    random = np.random.default_rng(3)
    probabilities = torch.tensor(
        random.dirichlet([1, 1, 1], size=24)
        if target == "multiclass"
        else random.uniform(size=(24, len(labels)))
    )
    targets = (
        torch.tensor(random.integers(0, 2, (24, 3)))
        if target == "multilabel"
        else torch.tensor(random.integers(0, 2, 24))
    )
    scores = score(probabilities, targets, list(map(str, range(24))), task, [metric])
    cases = case_table(scores.cases.to_dict(), metric)
    assert cases is not None
    assert weighted_metric(cases, metric, np.ones(24)) == pytest.approx(
        scores.values[metric], abs=1e-6
    )
    twice = weighted_metric(joined_cases([cases, cases]), metric, np.ones(48))
    assert weighted_metric(cases, metric, np.full(24, 2.0)) == pytest.approx(twice)


def test_patients_are_compared_within_their_sites() -> None:
    """A's patients gain 0.1 and 0.3, B's 0: the mean over sites of 0.2 and 0."""
    unchanged = dice(c=0.4, d=0.8, e=0.5, f=0.6)
    first = run(0, {"A": dice(a=0.5, b=0.5), "B": unchanged})
    second = run(0, {"A": dice(a=0.6, b=0.8), "B": unchanged})
    comparison = compared(first, second)
    assert comparison.difference == pytest.approx(0.1)
    assert comparison.interval == pytest.approx((0.05, 0.15)), (
        "A's resampled means are 0.1, 0.2 and 0.3"
    )
    assert comparison.p == pytest.approx(0.5) and comparison.n == 6
    assert compared(second, first).difference == pytest.approx(-0.1)
    assert compared(run(0, {"A": dice(a=0.5)}), run(0, {"A": dice(a=0.75)})) == Comparison(
        0.25, None, None, 1
    ), "one patient"
    five = compared(
        run(0, {"A": dice(a=0.5, b=0.5, c=0.4, d=0.8, e=0.5)}),
        run(0, {"A": dice(a=0.6, b=0.8, c=0.4, d=0.8, e=0.5)}),
    )
    assert five.interval is None and five.n == 5


def test_a_patient_of_two_seeds_is_one_patient() -> None:
    first = [run(0, {"A": dice(a=0.5, b=0.5)}), run(1, {"A": dice(a=0.5, c=0.5)})]
    second = [run(0, {"A": dice(a=0.7, b=0.5)}), run(1, {"A": dice(a=0.9, c=None)})]
    comparison = compared(first, second)
    assert comparison.difference == pytest.approx((0.1 + 0.4) / 2), (
        "0.1 with the first seed, 0.4 with the second, where c is undefined"
    )
    assert comparison.n == 2, "c has no value under the second model"


def test_difference_interval_and_test_are_of_the_same_patients() -> None:
    """e and f have empty masks: no Dice if the first model predicts nothing, and 0 if the second one predicts something."""
    first = run(0, {"A": dice(a=0.8, b=0.7, c=0.6, d=0.8, e=None, f=None, g=0.5, h=0.4)})
    second = run(0, {"A": dice(a=0.85, b=0.75, c=0.65, d=0.85, e=0.0, f=0.0, g=0.55, h=0.45)})
    for one, other, gain in ((first, second, 0.05), (second, first, -0.05)):
        comparison = compared(one, other)
        assert comparison.difference == pytest.approx(
            gain
        ) and comparison.interval == pytest.approx((gain, gain))
        assert (comparison.p, comparison.n) == (0.03125, 6), "2 of 2^6 signs"
    assert (
        compared(first, run(0, {"A": dice(a=None, b=None, c=None, d=None, e=0.5, f=0.5)}))
        == Comparison()
    )


@pytest.mark.parametrize(("predicted", "defined"), [(3, True), (1, False)])
def test_an_interval_allows_a_tenth_of_undefined_resamples(predicted: int, defined: bool) -> None:
    """A resample of 30 images misses all three predictions of a class in 4 % of cases, a single one in 36 %."""
    positive = [0.9] * predicted + [0.1] * (30 - predicted)
    truth = [1] * 15 + [0] * 15
    first = run(0, {"A": predictions(positive, truth)})
    second = run(0, {"A": predictions(positive, truth[:14] + [1] + [0] * 15)})
    comparison = compared(first, second, "ppv_macro")
    assert comparison.difference == 0 and (comparison.interval is not None) == defined


def images_of(truth: NDArray[np.int64], right: NDArray[np.bool_]) -> dict[str, Any]:
    """Each image of another patient; those that are not right are predicted as the next class."""
    classes = int(truth.max()) + 1
    predicted = np.where(right, truth, (truth + 1) % classes)
    probabilities = np.eye(classes)[predicted]
    return {
        "patients": list(map(str, range(len(truth)))),
        "probabilities": probabilities.tolist(),
        "targets": truth.tolist(),
    }


def many(counts: Sequence[int], hits: Sequence[int]) -> dict[str, Any]:
    """So many images of each class, of which the first ones are right."""
    truth = np.repeat(np.arange(len(counts)), counts)
    right = np.concatenate(
        [np.arange(count) < hit for count, hit in zip(counts, hits, strict=True)]
    )
    return images_of(truth, right)


def test_a_class_of_few_patients_is_left_out_at_its_site() -> None:
    first = run(0, {"A": many([20, 10, 9], [10, 5, 0]), "B": many([20, 5, 1], [10, 0, 0])})
    second = run(0, {"A": many([20, 10, 9], [15, 6, 9]), "B": many([20, 5, 1], [0, 5, 1])})
    assert (
        common_classes([first, second], "inside") == {"A": (0, 1), "B": ()}
        and common_classes([first], "outside") == {}
    )
    comparison = compared(first, second, "balanced_accuracy")
    assert comparison.difference == pytest.approx((5 / 20 + 1 / 10) / 2) and comparison.n == 39, (
        "B does not count"
    )
    assert (
        comparison.interval is not None and comparison.interval[0] < 0.175 < comparison.interval[1]
    )
    fewer = run(1, {"A": many([20, 9, 30], [10, 5, 0])})
    assert common_classes([first, fewer], "inside")["A"] == (), "class 0 alone is in both runs"
    rare = run(0, {"A": many([9, 9], [9, 9])}), run(0, {"A": many([9, 9], [0, 9])})
    assert compared(*rare, "balanced_accuracy") == Comparison(-0.5, None, None, 18), "no interval"
    assert compared(*rare, "accuracy").interval is not None, "a mean over images has no classes"
    assert compared(first, second, "quadratic_kappa").interval is None, "no class can be left out"


def test_patients_of_a_class_are_counted_not_images_and_a_label_needs_both_groups() -> None:
    twice = {
        "patients": ["a", "b"] * 10,
        "probabilities": [[0.5, 0.5]] * 20,
        "targets": [0, 1] * 10,
    }
    assert common_classes([run(0, {"A": twice})], "inside") == {"A": ()}
    labels = {
        "patients": list(map(str, range(20))),
        "probabilities": [[0.5, 0.5]] * 20,
        "targets": [[1, 1]] * 9 + [[0, 1]] + [[0, 0]] * 10,
    }
    assert common_classes([run(0, {"A": labels})], "inside") == {"A": (1,)}
    binary = {**labels, "probabilities": [[0.5]] * 20, "targets": [1] * 10 + [0] * 10}
    assert common_classes([run(0, {"A": binary})], "inside") == {"A": (0,)}
    assert compared(run(0, {"A": binary}), run(0, {"A": binary}), "auc_macro").interval == (0, 0)
    assert compared(run(0, {"A": labels}), run(0, {"A": labels}), "auc_macro").interval == (0, 0)


def equal_models(
    random: np.random.Generator, sizes: Sequence[Sequence[int]]
) -> tuple[list[Results], list[Results]]:
    """Three seeds of two models that have the same population accuracy of each class."""
    runs: tuple[list[Results], list[Results]] = ([], [])
    for seed in range(3):
        for of_model in runs:
            sites = {}
            for place, size in enumerate(sizes):
                truth = np.repeat(np.arange(len(size)), size)
                accuracy = np.array([0.8, 0.35, 0.45])[truth]
                sites[f"site {place}"] = images_of(truth, random.random(len(truth)) < accuracy)
            of_model.append(run(seed, sites))
    return runs


@pytest.mark.parametrize(
    ("sizes", "simulations"),
    [
        (((96, 48, 36), (122, 37, 43), (208, 5, 1), (56, 1, 11)), 400),
        (((12, 11, 10),), 100),
        (((60, 40, 1), (30, 12, 10)), 100),
    ],
    ids=["ham10000", "small", "two sites"],
)
def test_an_interval_over_patients_rarely_excludes_a_true_difference_of_zero(
    sizes: Sequence[Sequence[int]], simulations: int
) -> None:
    random = np.random.default_rng(36)
    excluded = 0
    for _ in range(simulations):
        first, second = equal_models(random, sizes)
        interval = compared(first, second, "balanced_accuracy").interval
        assert interval is not None
        excluded += not interval[0] <= 0 <= interval[1]
    assert excluded <= 0.08 * simulations


@pytest.mark.parametrize("patients", [(3, 3, 3, 3), (5, 5, 5, 5), (20,), (8, 8, 8, 8)], ids=str)
def test_an_interval_of_values_of_patients_rarely_excludes_the_true_difference(
    patients: Sequence[int],
) -> None:
    """Three seeds of training, which have the same patients; the second model is 0.02 better."""
    random = np.random.default_rng(37)
    excluded = 0
    for _ in range(200):
        gains = {}
        for place, count in enumerate(patients):
            for number in range(count):
                gains[f"site {place}", f"patient {number}"] = random.normal(0.02, 0.05)
        first = []
        second = []
        for seed in range(3):
            sites: dict[str, dict[str, dict[str, Any]]] = {}
            for (site, patient), gain in gains.items():
                before = random.normal(0.5, 0.1)
                of_site = sites.setdefault(site, {"first": {}, "second": {}})
                of_site["first"][patient] = before
                of_site["second"][patient] = before + gain
            first.append(
                run(seed, {site: dice(**values["first"]) for site, values in sites.items()})
            )
            second.append(
                run(seed, {site: dice(**values["second"]) for site, values in sites.items()})
            )
        interval = compared(first, second).interval
        assert interval is not None
        excluded += not interval[0] <= 0.02 <= interval[1]
    assert excluded <= 0.08 * 200


def test_patients_in_another_order_are_paired_by_name() -> None:
    first = run(0, {"A": dice(a=0.5, b=0.5, c=None, d=0.25)})
    orders = dice(a=0.6, b=0.8, c=0.5, d=0.5), dice(d=0.5, c=0.5, b=0.8, a=0.6)
    same, reversed_ = (compared(first, run(0, {"A": cases})) for cases in orders)
    assert same == reversed_ and same.n == 3
    truth = [1, 1, 0, 0]
    scores = [0.9, 0.5, 0.7, 0.1]
    areas = run(0, {"A": predictions(scores, truth, "abcd")})
    assert (
        compared(
            areas, run(0, {"A": predictions(scores[::-1], truth[::-1], "dcba")}), "auc_macro"
        ).n
        == 4
    )
    one = run(0, {"A": predictions(scores, truth, "xxyy")})
    other = run(0, {"A": predictions(scores, truth, "xyxy")})
    assert compared(one, other, "auc_macro") == Comparison(), (
        "several images of a patient in different order"
    )


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
def test_runs_of_other_patients_are_not_paired(other: Results) -> None:
    assert compared(run(0, {"A": dice(a=0.5, b=0.5)}), other) == Comparison()


def test_delong_is_the_variance_of_the_u_statistics() -> None:
    """Against scikit-learn's areas, and the covariances of DeLong's Eq. 5 to 8 written as loops."""
    rng = np.random.default_rng(0)
    truth = np.array([1] * 13 + [0] * 22)
    scores = [np.round(truth * shift + rng.normal(size=35), 1) for shift in (0.8, 1.5)]  # with ties
    comparison = delong(truth, scores[0], scores[1], np.arange(35))
    areas = [roc_auc_score(truth, score) for score in scores]
    assert comparison.difference == pytest.approx(areas[1] - areas[0])
    of_cases = np.zeros((2, 13))
    of_controls = np.zeros((2, 22))
    for model, values in enumerate(scores):
        for i, x in enumerate(values[truth == 1]):
            for j, y in enumerate(values[truth == 0]):
                kernel = 1.0 if x > y else 0.5 if x == y else 0.0
                of_cases[model, i] += kernel / 22
                of_controls[model, j] += kernel / 13
    contrast = np.array([-1, 1])
    covariance = np.cov(of_cases) / 13 + np.cov(of_controls) / 22
    error = float(np.sqrt(contrast @ covariance @ contrast))
    assert comparison.error == pytest.approx(error)
    z = (areas[1] - areas[0]) / error
    assert comparison.p == pytest.approx(2 * norm.sf(abs(z)))
    low, high = comparison.interval or (NAN, NAN)
    assert (high - low) / 2 == pytest.approx(1.959964 * error) and comparison.n == 35


def test_delong_of_patients_with_several_cases() -> None:
    """Cases twice say nothing new; else the error is that of a bootstrap over patients."""
    rng = np.random.default_rng(1)
    patients = np.repeat(np.arange(120), 3)
    truth = rng.random(360) < 0.4  # a patient has cases with and without the class
    common = rng.normal(size=(2, 120))[:, patients]
    scores = common + truth * [[0.8], [1.2]] + rng.normal(size=(2, 360))
    first, second = scores
    one = delong(truth[::3], first[::3], second[::3], patients[::3])
    every = np.repeat(np.arange(120), 2) * 3
    twice = delong(truth[every], first[every], second[every], patients[every])
    assert twice.error == pytest.approx(one.error) and twice.n == 120
    rows = np.arange(360).reshape(120, 3)
    drawn: list[float] = []
    for _ in range(600):
        cases = rows[rng.integers(120, size=120)].ravel()
        areas = [roc_auc_score(truth[cases], values[cases]) for values in scores]
        drawn.append(areas[1] - areas[0])
    assert delong(truth, first, second, patients).error == pytest.approx(np.std(drawn), rel=0.1)


def test_delong_without_a_variance() -> None:
    scores = [0.1, 0.2, 0.3, 0.4]
    patients = list("abcd")
    assert delong([0, 0, 1, 1], scores, scores, patients) == Comparison(0.0, n=4)
    one_with_the_class = [0, 0, 0, 1]
    assert delong(one_with_the_class, scores, scores, patients) == Comparison(n=4)
