"""FedSM's formulas against the reference numbers and by hand, and its federation on small data."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from medflare.core.states import weighted_mean
from medflare.methods.fedsm.formulas import GAMMAS, choose_model, ensemble_output, extra_labels, soft_pull, tuned_gamma

Golden = Callable[[str], dict[str, np.ndarray]]
SITES = ("c0", "c1", "c2")


def state(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values)}


class TestSoftPull:
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
