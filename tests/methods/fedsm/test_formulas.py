"""FedSM's formulas against the reference numbers and by hand, and its federation on small data."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from medflare.core.states import weighted_mean
from medflare.methods.fedsm.formulas import (
    GAMMAS,
    TEMPERATURES,
    apfl_mixture,
    calibration_losses,
    choose_model,
    ensemble_output,
    extra_labels,
    fitted_temperature,
    limited_total,
    paired_gain,
    patient_scores,
    ridge_solution,
    soft_pull,
    tuned_gamma,
)

Golden = Callable[[str], dict[str, np.ndarray]]
SITES = ("c0", "c1", "c2")


def state(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values)}


class TestSoftPull:
    @pytest.mark.parametrize(
        ("other", "lam", "offender"),
        [
            ({"w": torch.ones(3, 2)}, 0.5, "w"),
            ({"w": torch.ones(2, 3), "v": torch.ones(1)}, 0.5, "v"),
            ({"w": torch.ones(2, 3)}, 1.5, "lam"),
        ],
    )
    def test_unlike_models_and_shares_beyond_one_are_refused(self, other: dict[str, torch.Tensor], lam: float, offender: str) -> None:
        with pytest.raises(ValueError, match=offender):
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

    def test_a_model_without_a_loss_is_no_label(self) -> None:
        assert extra_labels(torch.tensor([[torch.nan, 0.4, 0.2], [torch.nan, torch.nan, torch.inf]])).tolist() == [2, 0]


def gains(**personal: float | dict[float, float] | None) -> dict[str, dict[str, float | None]]:
    """Site -> γ -> gain: one number for every γ below 1, or some of their own and 0 elsewhere."""
    told: dict[str, dict[str, float | None]] = {}
    for site, gain in personal.items():
        by_gamma = gain if isinstance(gain, dict) else dict.fromkeys(GAMMAS[:-1], gain)
        told[site] = {f"{gamma:g}": by_gamma.get(gamma, None if gain is None else 0.0) for gamma in GAMMAS}
    return told


class TestTunedGamma:
    def test_the_demos_votes_give_the_personal_models(self) -> None:
        """Dice of γ = 0 and 0.7755 on validation, seed 0: the median over sites took the second one, 0.024 below the first on test."""
        levels = {"a": (0.890, 0.784), "b": (0.938, 0.943), "c": (0.946, 0.934), "d": (0.930, 0.930)}
        votes = {site: {gamma: low - high if gamma < 0.7 else 0.0 for gamma in GAMMAS} for site, (low, high) in levels.items()}
        assert tuned_gamma(gains(**votes)) == 0.0

    @pytest.mark.parametrize("noise", [0.0, 0.001, -0.001, -0.002, 0.005, -0.005])
    def test_the_site_that_gains_alone_gets_its_model(self, noise: float) -> None:
        assert tuned_gamma(gains(a=0.3, b=noise, c=noise, d=noise)) == 0.0
        doubtful: dict[float, float] = {0.0: -0.005, 0.5: 0.005}
        assert tuned_gamma(gains(a={0.0: 0.3, 0.5: 0.15}, b=noise, c=doubtful, d=doubtful)) == 0.0

    @pytest.mark.parametrize("noise", [0.0, 0.001, 0.005])
    def test_the_site_that_loses_alone_is_heard(self, noise: float) -> None:
        assert tuned_gamma(gains(a=-0.05, b=noise, c=noise, d=noise)) == 1.0

    @pytest.mark.parametrize("others", [3, 4, 9])
    @pytest.mark.parametrize("honest", [0.02, 0.1, -0.02, -0.1])
    @pytest.mark.parametrize("lie", [-1.0, 1.0])
    def test_a_liar_turns_no_majority(self, lie: float, honest: float, others: int) -> None:
        """Also not by praising one candidate and damning all others, and not where one honest site gains much more than the rest."""
        expected = 0.0 if honest > 0 else 1.0
        for largest in (honest, 5 * honest):
            sites = {"s0": largest, **{f"s{place}": honest for place in range(1, others)}}
            lies = [dict.fromkeys(GAMMAS[:-1], lie), *({**dict.fromkeys(GAMMAS[:-1], -lie), gamma: lie} for gamma in GAMMAS[:-1])]
            for told in lies:
                chosen = tuned_gamma(gains(liar=told, **sites))
                assert chosen == 1.0 if expected else chosen < 1.0

    def test_a_liar_does_bounded_harm(self) -> None:
        """What the others lose together is at most the stake of one of them and 0.01 a site."""
        generator = np.random.default_rng(0)
        for _ in range(300):
            honest = {f"s{place}": {0.0: float(gain)} for place, gain in enumerate(generator.normal(0.0, 0.05, size=4))}
            values = [of[0.0] for of in honest.values()]
            for lie in (-1.0, 1.0):
                votes = {site: {**dict.fromkeys(GAMMAS[:-1], of[0.0])} for site, of in honest.items()}
                chosen = tuned_gamma(gains(liar=dict.fromkeys(GAMMAS[:-1], lie), **votes))
                lost = sum(values) if chosen == 1.0 else -sum(values)
                assert lost <= max(map(abs, values)) + 4 * 0.01 + 1e-9

    def test_the_best_mean_where_no_site_stands_out(self) -> None:
        votes = {site: {0.0: 0.02, 0.5: 0.04 + shift, 0.9: 0.01} for site, shift in (("a", 0.0), ("b", 0.01), ("c", -0.01))}
        assert tuned_gamma(gains(**votes)) == 0.5

    def test_a_threshold_that_serves_some_images_of_each(self) -> None:
        assert tuned_gamma(gains(a={0.0: -0.1, 0.7: 0.05}, b={0.0: -0.1, 0.7: 0.04})) == 0.7

    def test_ties_go_to_the_smallest(self) -> None:
        assert tuned_gamma(gains(a=0.0, b=0.0, c=0.0)) == 0.0
        assert tuned_gamma(gains(a={0.3: 0.1, 0.4: 0.1, 0.5: 0.1})) == 0.3

    def test_where_personal_models_lose_the_global_one_is_taken_for_all_images(self) -> None:
        """No validation image has a score above 0.7; one that has is not sent to a model that is worse."""
        assert tuned_gamma(gains(a={gamma: -0.1 for gamma in GAMMAS if gamma < 0.7})) == 1.0

    @pytest.mark.parametrize(("gain", "expected"), [(0.1, 0.0), (0.0, 0.0), (-0.1, 1.0), (None, 1.0)])
    def test_one_site_decides_for_itself(self, gain: float | None, expected: float) -> None:
        assert tuned_gamma(gains(a=gain)) == expected

    def test_of_two_sites_the_mean_decides(self) -> None:
        assert tuned_gamma(gains(a=0.05, b=-0.3)) == 1.0 and tuned_gamma(gains(a=0.3, b=-0.05)) == 0.0

    def test_undefined_is_no_vote(self) -> None:
        assert tuned_gamma(gains(a=None, b=None)) == 1.0 and tuned_gamma({"a": {}}) == 1.0
        assert tuned_gamma(gains(a=None, b=0.1)) == 0.0


def test_no_site_counts_for_more_than_the_next_and_a_hundredth_for_each_other() -> None:
    assert limited_total([0.5, 0.1, 0.0, -0.1]) == pytest.approx(0.1 + 3 * 0.01)
    assert limited_total([0.5, 0.5, 0.0, -0.1]) == pytest.approx(0.9), "two that agree are believed"
    assert limited_total([-0.5]) == -0.5


def test_gains_are_of_patients_who_have_both() -> None:
    values, reference = torch.tensor([0.9, 0.5, torch.nan, 0.3]), torch.tensor([0.8, 0.6, 0.1, torch.nan])
    assert paired_gain(values, reference) == pytest.approx(0.0, abs=1e-7)
    assert paired_gain(values[2:], reference[2:]) is None and paired_gain(values[:0], reference[:0]) is None


class TestTemperature:
    @staticmethod
    def site(own: int, confidence: float, right: int, wrong: int) -> list[float]:
        logits = torch.zeros(right + wrong, 2)
        logits[:right, own] = logits[right:, 1 - own] = confidence
        return calibration_losses(logits, own, None)

    def test_scores_become_how_often_they_are_right(self) -> None:
        """Always sure at 10, right three times in four: (15 + 1) / (20 + 2) with Laplace's rule, at log-odds near 10 / T."""
        temperature = fitted_temperature({"A": self.site(0, 10.0, 300, 100), "B": self.site(1, 10.0, 300, 100)})
        assert torch.tensor(10 / temperature).sigmoid() == pytest.approx(0.75, abs=0.05)

    def test_more_cases_without_an_error_are_surer_and_none_are_certain(self) -> None:
        few, many = (fitted_temperature({"A": self.site(0, 1.0, count, 0)}) for count in (4, 400))
        assert TEMPERATURES[0] < many < few

    def test_a_patient_is_one_case(self) -> None:
        logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        assert calibration_losses(logits[[0, 2]], 0, None) == pytest.approx(calibration_losses(logits, 0, ["a", "a", "b"]))

    def test_nothing_is_fitted_to_nothing(self) -> None:
        assert fitted_temperature({"A": [], "B": [1.0]}) == 1.0

    def test_losses_are_finite_however_sure_the_selector_is(self) -> None:
        losses = calibration_losses(torch.tensor([[1e4, -1e4]]), 1, None)
        assert all(0 <= loss < 14 for loss in losses)


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
        assert torch.isfinite(weight).all() and bias[0] == 1.0 and bias[1] < -1000
