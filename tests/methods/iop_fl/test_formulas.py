import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.fixture_types import Golden
from medflare.methods.iop_fl import formulas as iop_fl

ENTRIES = ("conv.weight", "bn.weight", "bn.running_mean", "bn.num_batches_tracked")


@pytest.fixture
def iop(golden: Golden) -> dict[str, Tensor]:
    return {key: torch.as_tensor(value) for key, value in golden("iop").items()}


@pytest.fixture
def probabilities(iop: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return iop["tta/logits"].double().softmax(dim=1), iop["tta/logits_noisy"].double().softmax(
        dim=1
    )


def close(value: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.as_tensor(value).double(), torch.as_tensor(expected).double(), rtol=rtol, atol=atol
    )


def test_trajectory_equals_the_published_code(iop: dict[str, Tensor]) -> None:
    local = []
    for t in range(4):
        local.append({name: iop[f"traj/w_local_round{t}/{name}"] for name in ENTRIES})
    adapted = local[0]  # the published code starts from the first local model
    for t in range(1, 4):
        adapted = iop_fl.local_adapted(adapted, local[t], 0.9)
        for name in ENTRIES[:-1]:
            close(adapted[name], iop[f"traj/official_alpha0.1_tau0.9/round{t}/{name}"])
        # theirs: 6.9999995.
        assert (
            adapted["bn.num_batches_tracked"].dtype == torch.int64
            and adapted["bn.num_batches_tracked"] == 7
        )


def test_readings_of_equation_4(iop: dict[str, Tensor]) -> None:
    weights = {"w": iop["eq4/w_g_t"]}
    previous = {"w": iop["eq4/P_t"]}
    tau = float(iop["eq4/tau"])
    local_step = {"w": -iop["eq4/eta_l"] * iop["eq4/sum_local_grad"]}
    global_step = {"w": -iop["eq4/eta_g"] * iop["eq4/global_grad"]}
    local = {"w": weights["w"] + local_step["w"]}
    next_global = {"w": weights["w"] + global_step["w"]}
    for adapted, expected in (
        (iop_fl.local_adapted(previous, local, tau), "sound_official_ema_of_local_model"),
        (
            iop_fl.local_adapted_explicit(previous, next_global, local_step, tau),
            "sound_explicit_global_step_first",
        ),
        (
            iop_fl.local_adapted_incremental(previous, local_step, global_step, tau),
            "incremental_P_minus_tau_grads",
        ),
    ):
        close(adapted["w"], iop[f"eq4/{expected}"], rtol=1e-12)


def test_statistics_have_no_gradient_step() -> None:
    global_ = {"w": torch.tensor(3.0), "running_var": torch.tensor(1.0)}
    # Of the statistics, the local ones.
    step = {"w": torch.tensor(-2.0), "running_var": torch.tensor(0.25)}
    previous = {"w": torch.tensor(0.0), "running_var": torch.tensor(0.75)}
    for adapted in (
        iop_fl.local_adapted_explicit(previous, global_, step, 0.5, learnt=["w"]),
        iop_fl.local_adapted_incremental(
            previous,
            step,
            {"w": torch.tensor(0.0), "running_var": torch.tensor(0.0)},
            0.5,
            learnt=["w"],
        ),
    ):
        assert adapted["running_var"] == 0.5


def test_result_shares_no_memory_with_the_live_model() -> None:
    previous = {"w": torch.zeros(2), "n": torch.tensor(1)}
    local = {"w": torch.ones(2), "n": torch.tensor(2)}
    adapted = iop_fl.local_adapted(previous, local, 1.0)
    local["w"].zero_(), local["n"].zero_()
    assert torch.equal(adapted["w"], torch.ones(2)) and adapted["n"] == 2


@pytest.mark.parametrize(
    ("local", "tau"),
    [
        ({}, 0.5),
        ({"w": torch.ones(1)}, 0.5),
        ({"w": torch.ones(2)}, 1.5),
        ({"w": torch.ones(2)}, math.nan),
    ],
)
def test_a_model_that_does_not_fit_and_tau_outside_its_range_are_refused(
    local: Any, tau: float
) -> None:
    with pytest.raises(ValueError, match=r"P_k|tau"):
        iop_fl.local_adapted({"w": torch.zeros(2)}, local, tau)


def test_consistency(iop: dict[str, Tensor], probabilities: tuple[Tensor, Tensor]) -> None:
    close(
        iop_fl.consistency_loss(*probabilities),
        iop["tta/ref64_paper_consistency_mean_pixel_prob"],
        rtol=1e-6,
    )
    close(iop_fl.consistency_loss(*probabilities) / 2, iop["tta/official_consistency_mean"])
    logits = iop["tta/logits"].double()
    noisy = iop["tta/logits_noisy"].double()
    close(
        iop_fl.consistency_loss(logits, noisy),
        iop["tta/ref64_paper_consistency_mean_pixel_logit"],
        rtol=1e-6,
    )


@pytest.mark.parametrize("d", [1, 10])
def test_shape(iop: dict[str, Tensor], probabilities: tuple[Tensor, Tensor], d: int) -> None:
    p, _ = probabilities
    close(iop_fl.neighbourhood_range(p, d), iop[f"tta/ref64_range_map_per_class_d{d}"])
    close(iop_fl.shape_loss(p, d), iop[f"tta/ref64_shape_mean_per_pixel_d{d}"])
    close(
        iop_fl.neighbourhood_range(p, d).sum(), iop[f"tta/ref64_paper_shape_sum_all_classes_d{d}"]
    )
    close(
        iop_fl.neighbourhood_range(p[:, 1:], d) * 1e-6,
        iop[f"tta/official_smooth_map_x1e-6_d{d}"],
        atol=1e-12,
    )
    close(
        iop_fl.shape_loss_official(p[:, 1:], d), iop[f"tta/official_smooth_L2norm_d{d}"], atol=1e-10
    )


def test_entropy(iop: dict[str, Tensor], probabilities: tuple[Tensor, Tensor]) -> None:
    p, _ = probabilities
    close(iop_fl.entropy_loss(p), iop["tta/ref64_paper_entropy_mean_pixel"])
    close(iop_fl.entropy_loss(p) * p[:, 0].numel(), iop["tta/ref64_paper_entropy_sum"])
    close(iop_fl.entropy_loss_official(p), iop["tta/official_entropy"])
    close(
        iop_fl.entropy_loss_official(p),
        iop_fl.entropy_loss(p) * p.shape[0] / (p.shape[1] * math.log(p.shape[1])),
    )


def test_published_total(iop: dict[str, Tensor], probabilities: tuple[Tensor, Tensor]) -> None:
    p, noisy = probabilities
    official = iop_fl.total_loss_official(
        iop_fl.consistency_loss(p, noisy),
        iop_fl.shape_loss_official(p[:, 1:], 10),
        iop_fl.entropy_loss_official(p),
        2,
    )
    close(official, iop["tta/official_total_d10"])


def test_turned_images_equal_the_published_augmentation(iop: dict[str, Tensor]) -> None:
    images = iop["tta/rot_in"]
    turns = iop["tta/rot_k"]
    flips = iop["tta/flip"]
    assert torch.equal(iop_fl.turned(images, turns, flips), iop["tta/rot_out"])
    assert torch.equal(iop_fl.turned_back(iop["tta/rot_out"], turns, flips), images)


def test_a_cube_window_equals_a_full_three_dimensional_search_and_one_slice_is_a_picture() -> None:
    p = torch.rand(2, 3, 5, 6, 4)
    largest = torch.nn.functional.max_pool3d(p, 3, stride=1, padding=1)
    smallest = -torch.nn.functional.max_pool3d(-p, 3, stride=1, padding=1)
    assert torch.equal(iop_fl.neighbourhood_range(p, 1), largest - smallest)
    assert torch.equal(
        iop_fl.neighbourhood_range(p[..., :1], 2)[..., 0], iop_fl.neighbourhood_range(p[..., 0], 2)
    )


def test_degenerate_predictions() -> None:
    constant = torch.full((1, 2, 6, 6), 0.5)
    assert iop_fl.shape_loss(constant, 3) == 0 and iop_fl.consistency_loss(constant, constant) == 0
    close(iop_fl.entropy_loss(constant), math.log(2))
    assert iop_fl.shape_loss(torch.rand(1, 2, 4, 4), 0) == 0
    assert iop_fl.shape_loss(torch.rand(1, 2, 4, 4), 50) > 0  # a window larger than the image
    certain = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    loss = iop_fl.entropy_loss(certain)
    loss.backward()
    assert loss == 0 and certain.grad is not None and torch.isfinite(certain.grad).all()


def test_every_class_of_a_sigmoid_output() -> None:
    p = torch.tensor([[0.2, 0.9]])
    close(iop_fl.all_classes(p, "multilabel"), [[0.8, 0.1, 0.2, 0.9]])
    assert iop_fl.all_classes(p, "multiclass") is p
