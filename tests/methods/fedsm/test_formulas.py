"""FedSM's formulas against the reference numbers and by hand, and its federation on small data."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from medflare.core.states import weighted_mean
from medflare.methods.fedsm.formulas import (
    GAMMAS,
    apfl_mixture,
    choose_model,
    ensemble_output,
    extra_labels,
    gamma_candidates,
    gamma_within_error,
    jackknife_error,
    median_by_gamma,
    patient_scores,
    soft_pull,
    tuned_gamma,
)
from medflare.methods.fedsm.ridge import impossible_statistics, ridge_solution

Golden = Callable[[str], dict[str, np.ndarray]]
SITES = ("c0", "c1", "c2")


def state(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values)}


class TestSoftPull:
    @pytest.mark.parametrize(
        ("other", "lam", "words"),
        [
            ({"w": torch.ones(3, 2)}, 0.5, r"states of A and B differ in \['w'\]"),
            ({"w": torch.tensor(1.0)}, 0.5, "differ in"),
            ({"w": torch.ones(2, 3), "v": torch.ones(1)}, 0.5, r"differ in \['v'\]"),
            ({"w": torch.ones(2, 3)}, 1.5, r"lam = 1.5 is outside \[0, 1\]"),
            ({"w": torch.ones(2, 3)}, float("nan"), "lam = nan"),
        ],
    )
    def test_what_cannot_be_pulled_together(self, other: dict[str, torch.Tensor], lam: float, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            soft_pull({"A": {"w": torch.zeros(2, 3)}, "B": other}, lam)

    def test_every_model_keeps_its_own_dtype(self) -> None:
        pulled = soft_pull({"A": {"w": torch.zeros(2, requires_grad=True)}, "B": {"w": torch.ones(2).half()}}, 0.5)
        assert [pulled[site]["w"].dtype for site in "AB"] == [torch.float32, torch.float16]
        assert all(model["w"].tolist() == [0.5, 0.5] and not model["w"].requires_grad for model in pulled.values())

    def test_reference_numbers(self, golden: Golden) -> None:
        numbers = golden("fedsm")
        case = "K3_l0.7"
        personal = {c: {n: torch.from_numpy(numbers[f"{case}/{c}/person/{n}"]) for n in "wb"} for c in SITES}
        pulled = soft_pull(personal, float(numbers[f"{case}/lambda"]))
        for c in SITES:
            for name in "wb":
                np.testing.assert_allclose(pulled[c][name].numpy(), numbers[f"{case}/official/person_{c}/{name}"], rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(pulled[c][name].numpy(), numbers[f"{case}/ref64/person_{c}/{name}"], rtol=1e-5, atol=1e-6)

    def test_by_hand(self) -> None:
        pulled = soft_pull({"a": state(0.0), "b": state(3.0), "c": state(9.0)}, 0.5)
        assert pulled["a"]["w"].item() == pytest.approx(0.5 * 0 + 0.25 * (3 + 9))
        assert pulled["c"]["w"].item() == pytest.approx(0.5 * 9 + 0.25 * 3)

    def test_one_over_k_is_the_uniform_mean(self) -> None:
        states = {"a": state(0.0, 1.0), "b": state(3.0, -5.0), "c": state(9.0, 7.0)}
        mean = weighted_mean(states, dict.fromkeys(states, 1.0))
        for pulled in soft_pull(states, 1 / 3).values():
            torch.testing.assert_close(pulled["w"], mean["w"])

    def test_one_leaves_models_alone(self) -> None:
        states = {"a": state(0.1), "b": state(3.3)}
        assert all(torch.equal(pulled["w"], states[site]["w"]) for site, pulled in soft_pull(states, 1.0).items())

    def test_equal_sites_are_a_fixed_point(self) -> None:
        for lam in (0.0, 0.3, 0.7, 1.0):
            torch.testing.assert_close(soft_pull({s: state(1.25, -2.5) for s in SITES}, lam)["c1"]["w"], state(1.25, -2.5)["w"])

    def test_one_site_is_left_alone(self) -> None:
        assert soft_pull({"a": state(2.0)}, 0.3)["a"]["w"].item() == 2.0

    def test_the_mean_stays_and_deviations_shrink_by_the_stated_factor(self) -> None:
        states, lam = {"a": state(0.0), "b": state(3.0), "c": state(9.0)}, 0.7
        pulled = soft_pull(states, lam)
        assert sum(s["w"].item() for s in pulled.values()) == pytest.approx(12.0)
        assert (pulled["c"]["w"].item() - 4) / (9 - 4) == pytest.approx((lam * 3 - 1) / 2)

    def test_integer_buffers_stay_the_sites_own(self) -> None:
        states = {s: {"steps": torch.tensor(i)} for i, s in enumerate(SITES)}
        assert [int(soft_pull(states, 0.5)[s]["steps"]) for s in SITES] == [0, 1, 2]


class TestAggregation:
    def test_reference_numbers(self, golden: Golden) -> None:
        numbers, case = golden("fedsm"), "K3_l0.7"
        weights = dict(zip(SITES, numbers[f"{case}/steps"].tolist(), strict=True))
        for entry, names in {"global_diff": "wb", "select_diff": "s", "exp_avg": "0", "exp_avg_sq": "0"}.items():
            states = {c: {n: torch.from_numpy(numbers[f"{case}/{c}/{entry}/{n}"]) for n in names} for c in SITES}
            mean = weighted_mean(states, weights)
            for name in names:
                np.testing.assert_allclose(mean[name].numpy(), numbers[f"{case}/official/{entry}/{name}"], rtol=1e-5, atol=1e-6)


class TestChooseModel:
    @pytest.mark.parametrize("gamma", ["0.0", "0.9", "1.0"])
    def test_reference_numbers(self, golden: Golden, gamma: str) -> None:
        numbers = golden("fedsm")
        choice = choose_model(torch.from_numpy(numbers["selector/prob"]), float(gamma))
        assert choice.dtype == torch.long
        np.testing.assert_array_equal(choice.numpy(), numbers[f"selector/choice_gamma{gamma}"])

    def test_the_threshold_is_strict(self) -> None:
        probabilities = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
        assert choose_model(probabilities, 0.5).tolist() == [0, 2]
        assert choose_model(torch.tensor([[1.0, 0.0]]), 1.0).tolist() == [0]


class TestEnsemble:
    def test_reference_numbers(self, golden: Golden) -> None:
        numbers = golden("fedsm")
        outputs, scores = torch.from_numpy(numbers["ensemble/h"]), torch.from_numpy(numbers["ensemble/score"])
        np.testing.assert_allclose(ensemble_output(outputs, scores).numpy(), numbers["ensemble/out"], rtol=1e-5, atol=1e-6)

    def test_one_hot_scores_pick_one_model(self) -> None:
        outputs = torch.rand(2, 3, 1, 4, 4)
        scores = torch.eye(3)[[2, 0]]
        torch.testing.assert_close(ensemble_output(outputs, scores), torch.stack([outputs[0, 2], outputs[1, 0]]))

    def test_extra_labels_are_the_models_of_least_loss(self) -> None:
        assert extra_labels(torch.tensor([[0.3, 0.1, 0.2], [0.0, 0.5, 0.5]])).tolist() == [1, 0]

    def test_a_model_without_a_loss_is_no_label(self) -> None:
        assert extra_labels(torch.tensor([[torch.nan, 0.4, 0.2], [torch.nan, torch.nan, torch.inf]])).tolist() == [2, 0]


class TestTunedGamma:
    @staticmethod
    def facts(best: float, count: int, high: float = 0.9) -> dict[str, object]:
        return {"gammas": {f"{g:g}": high if g == best else 0.5 for g in GAMMAS}, "n_validation": count}

    def test_best_over_sites_weighted_by_images(self) -> None:
        assert tuned_gamma({"a": self.facts(0.3, 10), "b": self.facts(0.9, 11)}) == 0.9

    def test_smallest_of_equals(self) -> None:
        assert tuned_gamma({"a": {"gammas": {f"{g:g}": 0.5 for g in GAMMAS}, "n_validation": 3}}) == 0.0

    def test_undefined_everywhere(self) -> None:
        assert tuned_gamma({"a": {"gammas": {f"{g:g}": None for g in GAMMAS}, "n_validation": 0}}) == 0.0


class TestGammaWithinError:
    @staticmethod
    def facts(metrics: dict[str, float | None], error: float, count: int = 10) -> dict[str, object]:
        return {"gammas": metrics, "errors": dict.fromkeys(metrics, error), "n_validation": count}

    def test_ties_favour_the_global_model(self) -> None:
        assert gamma_within_error({"a": self.facts({"0": 0.5, "0.4": 0.5, "1": 0.5}, 0.0)}) == 1.0

    def test_personal_models_have_to_show_that_they_are_better(self) -> None:
        metrics: dict[str, float | None] = {"0": 0.60, "0.5": 0.58, "1": 0.50}
        assert [gamma_within_error({"a": self.facts(metrics, error)}) for error in (0.0, 0.05, 0.2)] == [0.0, 0.5, 1.0]

    def test_errors_of_several_sites_are_pooled(self) -> None:
        """Two equal sites halve the variance: 0.05 each is 0.035 together, too little for a difference of 0.04."""
        facts = self.facts({"0": 0.60, "1": 0.56}, 0.05)
        assert gamma_within_error({"a": facts}) == 1.0 and gamma_within_error({"a": facts, "b": facts}) == 0.0

    def test_undefined_everywhere_is_the_global_model(self) -> None:
        assert gamma_within_error({"a": self.facts({"0": None, "1": None}, 0.0, 0)}) == 1.0

    def test_an_error_that_is_missing_is_0(self) -> None:
        sites = {name: {"gammas": {"0": 0.5}, "errors": {"0": error}} for name, error in (("a", 0.2), ("b", None), ("c", 0.3), ("d", 0.2))}
        assert median_by_gamma(sites, ["0"]) == {"gammas": {"0": 0.5}, "errors": {"0": 0.1}}


class TestCandidates:
    def test_they_are_where_the_selector_is(self) -> None:
        deciles = [0.3 + 0.01 * place for place in range(9)]
        found = gamma_candidates({"a": deciles, "b": deciles}, {"a": 5, "b": 5})
        assert found[0] == 0.0 and found[-1] == 1.0 and all(0.3 <= gamma <= 0.38 for gamma in found[1:-1])

    def test_without_images_there_are_two(self) -> None:
        assert gamma_candidates({"a": []}, {"a": 0}) == [0.0, 1.0]


def test_jackknife_is_the_standard_error_of_a_mean() -> None:
    values = torch.tensor([0.2, 0.5, 0.9, 0.4], dtype=torch.float64)
    left_out = [float((values.sum() - value) / 3) for value in values]
    assert jackknife_error(left_out) == pytest.approx(float(values.std() / 2))
    assert jackknife_error([]) == 0.0


def test_a_patients_images_share_their_scores() -> None:
    scores = torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
    assert patient_scores(scores, ["p", "p", "q"]).argmax(dim=1).tolist() == [1, 1, 0]
    assert torch.equal(patient_scores(scores, ["p", "q", "r"]), scores) and patient_scores(scores[:0], []).shape == (0, 2)


def test_apfl_keeps_what_the_mixture_collected() -> None:
    four, nothing = ({name: torch.tensor(value) for name in ("w", "mean")} for value in (4.0, 0.0))
    assert apfl_mixture(four, nothing, 0.5, ["mean"]) == {"w": torch.tensor(2.0), "mean": torch.tensor(4.0)}


class TestRidge:
    @staticmethod
    def statistics(features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": features.mean(dim=0), "products": features.T @ features / len(features)}

    def test_it_is_weighted_least_squares_on_one_hot_labels(self) -> None:
        generator = torch.Generator().manual_seed(0)
        classes = [torch.randn(count, 4, generator=generator, dtype=torch.float64) + k for k, count in enumerate((5, 50, 20))]
        weight, bias = ridge_solution({k: self.statistics(features) for k, features in enumerate(classes)}, 3, 0.0)
        rows = torch.cat([torch.cat([f, torch.ones(len(f), 1)], dim=1) / len(f) ** 0.5 for f in classes])
        targets = torch.cat([torch.eye(3, dtype=torch.float64)[k].expand(len(f), 3) / len(f) ** 0.5 for k, f in enumerate(classes)])
        expected = torch.linalg.lstsq(rows, targets).solution.T.float()
        torch.testing.assert_close(torch.cat([weight, bias[:, None]], dim=1), expected, rtol=1e-4, atol=1e-5)

    def test_predictions_add_up_to_one_and_scale_does_not_matter(self) -> None:
        generator = torch.Generator().manual_seed(1)
        classes = [torch.randn(9, 3, generator=generator, dtype=torch.float64) + k for k in range(2)]
        scales = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, 100.0, 0.01], dtype=torch.float64)
        outputs = []
        for scale in scales:
            weight, bias = ridge_solution({k: self.statistics(f * scale) for k, f in enumerate(classes)}, 2, 0.1)
            outputs.append((classes[1] * scale).float() @ weight.T + bias)
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(outputs[0].sum(dim=1), torch.ones(9))

    def test_equal_sites_cannot_be_told_apart(self) -> None:
        same = self.statistics(torch.randn(9, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
        weight, bias = ridge_solution({0: same, 1: same}, 2, 0.01)
        torch.testing.assert_close(weight, torch.zeros(2, 3))
        torch.testing.assert_close(bias, torch.full((2,), 0.5))

    def test_constant_features_and_absent_classes_do_no_harm(self) -> None:
        weight, bias = ridge_solution({0: self.statistics(torch.ones(4, 2, dtype=torch.float64))}, 2, 0.0)
        assert torch.isfinite(weight).all() and bias.tolist() == [1.0, 0.0]

    IMAGES = torch.tensor(  # of 1 x 1 pixel thumbnails, five quantiles and two edge strengths
        [[0.5, 0.0, 0.2, 0.5, 0.8, 1.0, 0.1, 0.1], [0.4, 0.0, 0.1, 0.5, 0.8, 1.0, 0.1, 0.2], [0.7, 0.1, 0.3, 0.7, 0.9, 1.0, 0.3, 0.2]],
        dtype=torch.float64,
    )

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda told: told["products"].mul_(-1), "not those of any features"),
            (lambda told: told["products"][0, 1].add_(0.01), "not symmetric"),
            (lambda told: told["products"].diagonal().add_(0.01), "more directions than 3 images"),
            (lambda told: told["mean"].mul_(2), "not those of any features"),
            (lambda told: (told["mean"].mul_(1e10), told["products"].mul_(1e20)), "beyond the square of any intensity"),
            (lambda told: told["mean"].mul_(-1), "its quantiles fall"),
        ],
    )
    def test_statistics_that_no_images_have(self, change: Callable[[dict[str, torch.Tensor]], Any], words: str) -> None:
        told = self.statistics(self.IMAGES)
        assert impossible_statistics(told, 1, 2, images=3) is None
        assert impossible_statistics(self.statistics(self.IMAGES[:1]), 1, 2, images=1) is None, "one image varies in no direction"
        assert impossible_statistics(self.statistics(torch.zeros(3, 8, dtype=torch.float64)), 1, 2, images=3) is None
        change(told)
        assert words in str(impossible_statistics(told, 1, 2, images=3))

    def test_unnormalised_images_are_possible(self) -> None:
        generator = torch.Generator().manual_seed(3)
        ranked = (4e4 + 1e-2 * torch.rand(50, 5, generator=generator)).sort(dim=1).values
        features = torch.cat([ranked[:, 2:3], ranked, torch.rand(50, 2, generator=generator)], dim=1).double()
        assert impossible_statistics(self.statistics(features), 1, 2, images=50) is None
