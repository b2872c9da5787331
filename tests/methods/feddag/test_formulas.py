"""FedDAG's formulas: reference numbers, hand-computed values and degenerate cases."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.fixture_types import Golden
from medflare.core.rng import numpy_generator
from medflare.core.states import StateDict
from medflare.methods.feddag import formulas as feddag
from medflare.methods.feddag.generator import DomainGenerator, generated

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def reference(golden: Golden) -> dict[str, Tensor]:
    return {key: torch.from_numpy(np.asarray(value)) for key, value in golden("feddag").items()}


def state(value: float, count: int = 0) -> StateDict:
    return {
        "weight": torch.tensor([float(value), -float(value)]),
        "num_batches_tracked": torch.tensor(count),
    }


def test_discrepancy_matches_the_reference(reference: dict[str, Tensor]) -> None:
    f = reference["dis/f"]
    f_hat = reference["dis/f_hat"]
    torch.testing.assert_close(
        feddag.instance_discrepancy(f, f_hat), reference["dis/half_sq_dist_per_instance"], **CLOSE
    )
    torch.testing.assert_close(
        feddag.similarity_loss(f, f_hat), reference["dis/similarity_loss_mean"], **CLOSE
    )
    for m in ("0.01", "0.05", "0.1", "1.0"):
        torch.testing.assert_close(
            feddag.discrepancy(f, f_hat, float(m)), reference[f"dis/capped_mean_m{m}"], **CLOSE
        )
        torch.testing.assert_close(
            feddag.discrepancy(f, f_hat, float(m), "batch"),
            reference[f"dis/capped_batchlevel_m{m}"],
            **CLOSE,
        )


def test_a_capped_instance_has_no_gradient(reference: dict[str, Tensor]) -> None:
    f_hat = reference["dis/f_hat"].clone().requires_grad_()
    feddag.discrepancy(reference["dis/f"], f_hat, 0.1).backward()
    torch.testing.assert_close(f_hat.grad, reference["dis/grad_fhat_capped_m0.1"], **CLOSE)
    capped = reference["dis/half_sq_dist_per_instance"] > 0.1
    assert (
        f_hat.grad is not None
        and capped.any()
        and torch.equal(f_hat.grad[capped], torch.zeros_like(f_hat.grad[capped]))
    )


def test_discrepancy_of_degenerate_features() -> None:
    f = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert feddag.discrepancy(f, 7 * f, 0.1) == pytest.approx(0, abs=1e-7)
    assert feddag.discrepancy(f, -f, 0.0) == 0
    zero = torch.zeros(2, 4, requires_grad=True)
    feddag.discrepancy(f[:2], zero, 1.0).backward()
    assert zero.grad is not None and zero.grad.isfinite().all()


@pytest.mark.parametrize("decay", ["0.9", "0.99", "0.999"])
def test_ema_matches_the_reference(reference: dict[str, Tensor], decay: str) -> None:
    teacher = {"weight": reference["ema/teacher"].clone()}
    feddag.ema_update(teacher, {"weight": reference["ema/student"]}, float(decay))
    torch.testing.assert_close(teacher["weight"], reference[f"ema/out_{decay}"], **CLOSE)


@pytest.mark.parametrize("batches", [1, 10, 200])
def test_the_teacher_of_the_round_before_decays_to_exp_minus_5(batches: int) -> None:
    """exp(-1 / (0.2 B)) over B batches is exp(-5) for any B."""
    teacher = {"w": torch.ones((), dtype=torch.float64)}
    for _ in range(batches):
        feddag.ema_update(
            teacher, {"w": torch.zeros((), dtype=torch.float64)}, feddag.round_decay(batches)
        )
    assert teacher["w"].item() == pytest.approx(math.exp(-5), rel=1e-9)


def test_ema_copies_integers_and_works_on_a_module_in_place() -> None:
    teacher = torch.nn.BatchNorm1d(2)
    student = torch.nn.BatchNorm1d(2)
    student(torch.randn(8, 2, generator=torch.Generator().manual_seed(0)))
    assert teacher.running_mean is not None and student.running_mean is not None
    expected = 0.75 * teacher.running_mean + 0.25 * student.running_mean
    feddag.ema_update(teacher.state_dict(), student.state_dict(), 0.75)
    torch.testing.assert_close(teacher.running_mean, expected)
    assert teacher.num_batches_tracked == 1


def test_perturbation_matches_the_reference(reference: dict[str, Tensor]) -> None:
    names = [key.removeprefix("sharp/grad/") for key in reference if key.startswith("sharp/grad/")]
    epsilon = feddag.sharpness_perturbation(
        {name: reference[f"sharp/grad/{name}"] for name in names}, 0.3
    )
    for name in names:
        perturbed = reference[f"sharp/theta/{name}"] + epsilon[name]
        torch.testing.assert_close(
            perturbed, reference[f"sharp/wpoptim_perturbed_rho0.3/{name}"], **CLOSE
        )
        torch.testing.assert_close(
            perturbed.double(), reference[f"sharp/ref64_perturbed_rho0.3/{name}"], **CLOSE
        )


def test_scores_match_the_reference(reference: dict[str, Tensor]) -> None:
    metrics = reference["score/metric_matrix_model_by_client"]
    torch.testing.assert_close(
        feddag.generalization_scores(metrics), reference["score/s_mean_over_others"], **CLOSE
    )
    weighted = feddag.generalization_scores(metrics, reference["score/n_val"])
    torch.testing.assert_close(weighted, reference["score/s_weighted_by_nval"], **CLOSE)


def without_diagonal(metrics: Tensor) -> Tensor:
    return metrics.masked_fill(torch.eye(len(metrics), dtype=torch.bool), math.nan)


def test_centred_scores_do_not_have_the_evaluators_levels() -> None:
    """Each evaluator gives one constant: the plain means differ, the centred scores do not."""
    constants = without_diagonal(
        torch.tensor([0.221, 0.256, 0.446], dtype=torch.float64).expand(3, 3)
    )
    plain = feddag.generalization_scores(constants)
    centred = feddag.centred_scores(constants)
    assert plain.max() - plain.min() > 0.1
    assert centred.unique().numel() == 1 and centred[0].item() == pytest.approx(plain.mean().item())


@pytest.mark.parametrize("sites", [3, 5])
def test_centred_scores_are_the_models_own(sites: int) -> None:
    """a_ij = u_i + v_j: differences of scores are those of u."""
    generator = torch.Generator().manual_seed(sites)
    models = 0.2 * torch.rand(sites, 1, dtype=torch.float64, generator=generator)
    evaluators = 0.3 + 0.3 * torch.rand(1, sites, dtype=torch.float64, generator=generator)
    scores = feddag.centred_scores(without_diagonal(models + evaluators))
    torch.testing.assert_close(
        scores - scores[0], (models - models[0]).squeeze(1), rtol=0, atol=1e-8
    )


def test_centred_scores_without_common_evaluators() -> None:
    """Two sites score one model each: equal scores."""
    assert feddag.centred_scores(
        torch.tensor([[math.nan, 0.9], [0.3, math.nan]])
    ).tolist() == pytest.approx([0.6, 0.6])
    assert feddag.centred_scores(torch.tensor([[0.9]])).isnan().all()
    one_missing = torch.tensor([[math.nan, 0.9, 0.7], [0.3, math.nan, 0.5], [math.nan] * 3])
    scores = feddag.centred_scores(one_missing)
    # The third site scored both.
    assert scores[2].isnan() and (scores[0] - scores[1]).item() == pytest.approx(0.2)


def test_scores_without_the_own_site_and_undefined_metrics() -> None:
    metrics = torch.tensor([[0.0, 0.5, 0.7], [math.nan, 1.0, 0.3], [math.nan, math.nan, 1.0]])
    scores = feddag.generalization_scores(metrics)
    torch.testing.assert_close(scores[:2], torch.tensor([0.6, 0.3], dtype=torch.float64))
    assert scores[2].isnan()
    assert feddag.generalization_scores(torch.tensor([[0.9]])).isnan().all()


@pytest.mark.parametrize(
    ("name", "beta"),
    [
        ("power_beta0", 0.0),
        ("power_beta0.5", 0.5),
        ("power_beta1", 1.0),
        ("inverse_power_beta0.5", -0.5),
    ],
)
def test_weights_match_the_reference(reference: dict[str, Tensor], name: str, beta: float) -> None:
    weights = feddag.soft_balancing_weights(reference["score/s_mean_over_others"], beta)
    torch.testing.assert_close(weights, reference[f"weights/{name}"], **CLOSE)


@pytest.mark.parametrize("scores", [[0.8, 0.8, 0.8], [0.0, 0.0, 0.0], [math.nan] * 3])
@pytest.mark.parametrize("beta", [-1.0, 0.0, 1.0, 8.0])
def test_equal_scores_give_equal_weights(scores: list[float], beta: float) -> None:
    torch.testing.assert_close(feddag.soft_balancing_weights(scores, beta), torch.full((3,), 1 / 3))


@pytest.mark.parametrize("scores", [[0.5, -0.1], [0.5, math.inf]])
def test_invalid_scores_are_refused(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="scores"):
        feddag.soft_balancing_weights(scores)


def test_earlier_models_with_a_higher_score_join() -> None:
    states = [state(1, 1), state(2, 2), state(3, 3), state(7, 4)]
    mean, score = feddag.within_client_average(states, [0.9, 0.4, 0.8, 0.5], kappa=4)
    torch.testing.assert_close(mean["weight"], state(11 / 3)["weight"])
    assert mean["num_batches_tracked"] == 4
    assert score == pytest.approx((0.9 + 0.8 + 0.5) / 3)


def test_kappa_counts_rounds_not_models_with_a_higher_score() -> None:
    states = [state(1), state(2), state(3), state(7)]
    assert feddag.within_client_average(states, [0.9, 0.4, 0.8, 0.5], kappa=1)[0]["weight"][0] == 5
    assert feddag.within_client_average(states, [0.9, 0.4, 0.3, 0.5], kappa=2)[0]["weight"][0] == 7


def test_without_history_or_score_the_current_model_is_returned() -> None:
    states = [state(1), state(7)]
    assert feddag.within_client_average(states, [0.9, 0.5], 0)[0]["weight"][0] == 7
    assert feddag.within_client_average(states, [0.5, 0.5], 4)[0]["weight"][0] == 7
    assert feddag.within_client_average(states, [math.nan, 0.5], 4)[0]["weight"][0] == 7
    mean, score = feddag.within_client_average(states, [0.9, math.nan], 4)
    assert mean["weight"][0] == 7 and math.isnan(score)


def test_a_sampled_number_of_evaluators_never_holds_the_own_site() -> None:
    sites = [f"S{i}" for i in range(6)]
    drawn = feddag.choose_evaluators(sites, 2, numpy_generator(3, 1))
    assert drawn == feddag.choose_evaluators(sites, 2, numpy_generator(3, 1))
    assert drawn != feddag.choose_evaluators(sites, 2, numpy_generator(3, 2))
    for site, chosen in drawn.items():
        assert len(set(chosen)) == 2 and site not in chosen


def test_generator_matches_the_reference(reference: dict[str, Tensor]) -> None:
    our_names = {
        "backbone.1.weight": "backbone.0.weight",
        "backbone.4.conv_block.1.weight": "backbone.3.body.0.weight",
        "backbone.4.conv_block.5.weight": "backbone.3.body.3.weight",
        "gctx_fusion.0.weight": "fusion.0.weight",
        "regress.0.weight": "head.weight",
        "regress.0.bias": "head.bias",
    }
    network = DomainGenerator(3, width=4, blocks=1)
    network.load_state_dict(
        {ours: reference[f"gen/state/{name}"] for name, ours in our_names.items()}
    )
    images = reference["gen/x"]
    perturbation = network(images)
    torch.testing.assert_close(perturbation, reference["gen/official_perturbation_tanh"], **CLOSE)
    torch.testing.assert_close(
        generated(images, perturbation, 0.3), reference["gen/official_x_plus_0.3p"], **CLOSE
    )


@pytest.mark.parametrize("width", [16, 32, 64])
def test_generator_has_the_published_size(reference: dict[str, Tensor], width: int) -> None:
    network = DomainGenerator(3, width)
    assert sum(p.numel() for p in network.parameters()) == int(
        reference[f"gen/params_nc{width}_3blocks_gctx"]
    )
    assert not list(network.buffers())
