"""FedSM's formulas against reference numbers and by hand."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from helpers.fixture_types import Golden
from medflare.core.states import weighted_mean
from medflare.methods.fedsm import formulas as fedsm

SITES = ("c0", "c1", "c2")
CASE = "K3_l0.7"


@pytest.fixture
def numbers(golden: Golden) -> dict[str, Any]:
    return {key: torch.as_tensor(value) for key, value in golden("fedsm").items()}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, check_dtype=False)


def state(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values)}


class TestSoftPull:
    @pytest.mark.parametrize(
        ("other", "offender"),
        [({"w": torch.ones(3, 2)}, "w"), ({"w": torch.ones(2, 3), "v": torch.ones(1)}, "v")],
    )
    def test_unlike_models_are_refused(self, other: dict[str, torch.Tensor], offender: str) -> None:
        with pytest.raises(ValueError, match=offender):
            fedsm.soft_pull({"A": {"w": torch.zeros(2, 3)}, "B": other}, 0.5)

    def test_reference_numbers(self, numbers: dict[str, Any]) -> None:
        personal = {}
        for c in SITES:
            personal[c] = {n: numbers[f"{CASE}/{c}/person/{n}"] for n in "wb"}
        pulled = fedsm.soft_pull(personal, float(numbers[f"{CASE}/lambda"]))
        for source, c, name in product(("official", "ref64"), SITES, "wb"):
            close(pulled[c][name], numbers[f"{CASE}/{source}/person_{c}/{name}"])

    def test_by_hand(self) -> None:
        pulled = fedsm.soft_pull({"a": state(0.0), "b": state(3.0), "c": state(9.0)}, 0.5)
        assert pulled["a"]["w"].item() == pytest.approx(0.5 * 0 + 0.25 * (3 + 9))
        assert pulled["c"]["w"].item() == pytest.approx(0.5 * 9 + 0.25 * 3)
        assert fedsm.soft_pull({"a": state(2.0)}, 0.3)["a"]["w"].item() == 2.0, "of one site"

    def test_the_mean_stays_and_deviations_shrink_by_the_stated_factor(self) -> None:
        states = {"a": state(0.0), "b": state(3.0), "c": state(9.0)}
        lam = 0.7
        pulled = fedsm.soft_pull(states, lam)
        assert sum(s["w"].item() for s in pulled.values()) == pytest.approx(12.0)
        assert (pulled["c"]["w"].item() - 4) / (9 - 4) == pytest.approx((lam * 3 - 1) / 2)

    def test_integer_buffers_stay_the_sites_own(self) -> None:
        states = {s: {"steps": torch.tensor(i)} for i, s in enumerate(SITES)}
        assert [int(fedsm.soft_pull(states, 0.5)[s]["steps"]) for s in SITES] == [0, 1, 2]


def test_reference_numbers_of_aggregation(numbers: dict[str, Any]) -> None:
    weights = dict(zip(SITES, numbers[f"{CASE}/steps"].tolist(), strict=True))
    for entry, names in {
        "global_diff": "wb",
        "select_diff": "s",
        "exp_avg": "0",
        "exp_avg_sq": "0",
    }.items():
        mean = weighted_mean(
            {c: {n: numbers[f"{CASE}/{c}/{entry}/{n}"] for n in names} for c in SITES}, weights
        )
        for name in names:
            close(mean[name], numbers[f"{CASE}/official/{entry}/{name}"])


def test_reference_numbers_of_the_choice_and_the_ensemble(numbers: dict[str, Any]) -> None:
    for gamma in ("0.0", "0.9", "1.0"):
        assert torch.equal(
            fedsm.choose_model(numbers["selector/prob"], float(gamma)),
            numbers[f"selector/choice_gamma{gamma}"],
        )
    close(
        fedsm.ensemble_output(numbers["ensemble/h"], numbers["ensemble/score"]),
        numbers["ensemble/out"],
    )


def test_nan_losses_are_ignored() -> None:
    assert fedsm.extra_labels(
        torch.tensor([[torch.nan, 0.4, 0.2], [torch.nan, torch.nan, torch.inf]])
    ).tolist() == [2, 0]


def gains(**personal: Any) -> dict[str, dict[str, float | None]]:
    """Site -> γ -> gain: one number for every γ below 1, or a number for some γ and 0 for the others."""
    sites: dict[str, dict[str, float | None]] = {}
    for site, gain in personal.items():
        by_gamma = gain if isinstance(gain, dict) else dict.fromkeys(fedsm.GAMMAS[:-1], gain)
        sites[site] = {
            f"{gamma:g}": by_gamma.get(gamma, None if gain is None else 0.0)
            for gamma in fedsm.GAMMAS
        }
    return sites


class TestTunedGamma:
    @pytest.mark.parametrize(
        ("sites", "expected"),
        [
            # The best mean.
            (
                {
                    "a": {0.0: 0.02, 0.5: 0.04},
                    "b": {0.0: 0.02, 0.5: 0.05},
                    "c": {0.0: 0.02, 0.5: 0.03},
                },
                0.5,
            ),
            ({"a": {0.0: -0.1, 0.7: 0.05}, "b": {0.0: -0.1, 0.7: 0.04}}, 0.7),
            ({"a": {0.3: 0.1, 0.4: 0.1, 0.5: 0.1}}, 0.3),  # ties: the smallest
            ({"a": 0.0, "b": 0.0, "c": 0.0}, 0.0),
            # Personal models lose; no score is above 0.7.
            ({"a": {gamma: -0.1 for gamma in fedsm.GAMMAS if gamma < 0.7}}, 1.0),
            ({"a": 0.1}, 0.0),
            ({"a": -0.1}, 1.0),
            ({"a": 0.05, "b": -0.3}, 1.0),  # of two sites the mean decides
            ({"a": 0.3, "b": -0.05}, 0.0),
            ({"a": None, "b": None}, 1.0),  # undefined gains do not count
            ({"a": None, "b": 0.1}, 0.0),
        ],
    )
    def test_by_hand(self, sites: dict[str, Any], expected: float) -> None:
        assert fedsm.tuned_gamma(gains(**sites)) == expected

    @pytest.mark.parametrize("noise", [0.0, 0.001, -0.002, 0.005, -0.005])
    def test_a_single_site_decides_if_the_others_hardly_differ(self, noise: float) -> None:
        assert fedsm.tuned_gamma(gains(a=0.3, b=noise, c=noise, d=noise)) == 0.0
        if noise >= 0:
            assert fedsm.tuned_gamma(gains(a=-0.05, b=noise, c=noise, d=noise)) == 1.0

    @pytest.mark.parametrize("others", [3, 4, 9])
    @pytest.mark.parametrize("honest", [0.02, 0.1, -0.02, -0.1])
    @pytest.mark.parametrize("false", [-1.0, 1.0])
    def test_false_gains_of_one_site_do_not_outvote_a_majority(
        self, false: float, honest: float, others: int
    ) -> None:
        """Neither with one candidate praised and all others damned, nor if one honest site gains much more than the rest."""
        for largest in (honest, 5 * honest):
            sites = {"s0": largest, **{f"s{number}": honest for number in range(1, others)}}
            reports = [
                dict.fromkeys(fedsm.GAMMAS[:-1], false),
                *(
                    {**dict.fromkeys(fedsm.GAMMAS[:-1], -false), gamma: false}
                    for gamma in fedsm.GAMMAS[:-1]
                ),
            ]
            for report in reports:
                chosen = fedsm.tuned_gamma(gains(liar=report, **sites))
                assert chosen < 1.0 if honest > 0 else chosen == 1.0

    def test_the_harm_of_false_gains_is_bounded(self) -> None:
        """The others lose together at most the largest difference of one of them and 0.01 a site."""
        generator = np.random.default_rng(0)
        for _ in range(300):
            values = generator.normal(0.0, 0.05, size=4).tolist()
            for false in (-1.0, 1.0):
                chosen = fedsm.tuned_gamma(
                    gains(liar=false, **{f"s{number}": gain for number, gain in enumerate(values)})
                )
                lost = sum(values) if chosen == 1.0 else -sum(values)
                assert lost <= max(map(abs, values)) + 4 * 0.01 + 1e-9


def test_gains_are_of_patients_with_both_values() -> None:
    values = torch.tensor([0.9, 0.5, torch.nan, 0.3])
    reference = torch.tensor([0.8, 0.6, 0.1, torch.nan])
    assert fedsm.paired_gain(values, reference) == pytest.approx(0.0, abs=1e-7)
    assert (
        fedsm.paired_gain(values[2:], reference[2:]) is None
        and fedsm.paired_gain(values[:0], reference[:0]) is None
    )


class TestTemperature:
    @staticmethod
    def site(own: int, confidence: float, right: int, wrong: int) -> list[float]:
        logits = torch.zeros(right + wrong, 2)
        logits[:right, own] = logits[right:, 1 - own] = confidence
        return fedsm.calibration_losses(logits, own, None)

    def test_scores_become_how_often_they_are_right(self) -> None:
        """Always sure at 10, right three times in four: (15 + 1) / (20 + 2) with Laplace's rule, at log-odds near 10 / T."""
        temperature = fedsm.fitted_temperature(
            {"A": self.site(0, 10.0, 300, 100), "B": self.site(1, 10.0, 300, 100)}
        )
        assert torch.tensor(10 / temperature).sigmoid() == pytest.approx(0.75, abs=0.05)

    def test_more_cases_without_an_error_are_surer_and_none_are_certain(self) -> None:
        few = fedsm.fitted_temperature({"A": self.site(0, 1.0, 4, 0)})
        many = fedsm.fitted_temperature({"A": self.site(0, 1.0, 400, 0)})
        assert fedsm.TEMPERATURES[0] < many < few

    def test_a_patient_is_one_case(self) -> None:
        logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        assert fedsm.calibration_losses(logits[[0, 2]], 0, None) == pytest.approx(
            fedsm.calibration_losses(logits, 0, ["a", "a", "b"])
        )

    def test_losses_are_finite_however_sure_the_selector_is(self) -> None:
        losses = fedsm.calibration_losses(torch.tensor([[1e4, -1e4]]), 1, None)
        for loss in losses:
            assert 0 <= loss < 14


def test_a_patients_images_share_their_scores() -> None:
    scores = torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
    assert fedsm.patient_scores(scores, ["p", "p", "q"]).argmax(dim=1).tolist() == [1, 1, 0]
    assert torch.equal(
        fedsm.patient_scores(scores, ["p", "q", "r"]), scores
    ) and fedsm.patient_scores(scores[:0], []).shape == (0, 2)


class TestRidge:
    @staticmethod
    def statistics(features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": features.mean(dim=0), "products": features.T @ features / len(features)}

    def test_it_is_weighted_least_squares_on_one_hot_labels(self) -> None:
        generator = torch.Generator().manual_seed(0)
        classes = [
            torch.randn(count, 4, generator=generator, dtype=torch.float64) + k
            for k, count in enumerate((5, 50, 20))
        ]
        weight, bias = fedsm.ridge_solution(
            {k: self.statistics(features) for k, features in enumerate(classes)}, 3, 0.0
        )
        rows = torch.cat(
            [torch.cat([f, torch.ones(len(f), 1)], dim=1) / len(f) ** 0.5 for f in classes]
        )
        targets = torch.cat(
            [
                torch.eye(3, dtype=torch.float64)[k].expand(len(f), 3) / len(f) ** 0.5
                for k, f in enumerate(classes)
            ]
        )
        expected = torch.linalg.lstsq(rows, targets).solution.T.float()
        torch.testing.assert_close(
            torch.cat([weight, bias[:, None]], dim=1), expected, rtol=1e-4, atol=1e-5
        )

    def test_equal_sites_cannot_be_told_apart(self) -> None:
        same = self.statistics(
            torch.randn(9, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        )
        weight, bias = fedsm.ridge_solution({0: same, 1: same}, 2, 0.01)
        torch.testing.assert_close(weight, torch.zeros(2, 3))
        torch.testing.assert_close(bias, torch.full((2,), 0.5))

    def test_constant_features_and_absent_classes_do_no_harm(self) -> None:
        weight, bias = fedsm.ridge_solution(
            {0: self.statistics(torch.ones(4, 2, dtype=torch.float64))}, 2, 0.0
        )
        assert torch.isfinite(weight).all() and bias[0] == 1.0 and bias[1] < -1000
