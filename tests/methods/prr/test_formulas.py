"""PRR's transfer stages, CPA loss and prototypes: reference numbers, hand-computed values and degenerate cases."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.fixture_types import Golden
from medflare.core.rng import torch_generator
from medflare.methods.prr import formulas as prr

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
# The official code adds 1e-6 inside its logarithm and its quotients.
OFFICIAL_EPS: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize(
    ("rule", "key"), [("official", "official_stage"), ("threshold", "paper_threshold_stage")]
)
@pytest.mark.parametrize("sequence", ["seq0", "seq1"])
def test_stages_match_the_reference(golden: Golden, sequence: Any, rule: Any, key: str) -> None:
    reference = golden("det")
    stage = 0
    actual = []
    for deputy, personal in zip(
        reference[f"{sequence}/deputy"], reference[f"{sequence}/personal"], strict=True
    ):
        stage = prr.next_stage(stage, deputy, personal, rule=rule)
        actual.append(stage)
    assert actual == reference[f"{sequence}/{key}"].tolist()


def test_distillation_matches_the_reference_and_teaches_the_student_only(golden: Golden) -> None:
    reference = golden("cpa")
    student = torch.from_numpy(reference["kl/student_logits"]).requires_grad_()
    teacher = torch.from_numpy(reference["kl/teacher_logits"]).requires_grad_()
    value = prr.distillation_loss(student, teacher)
    np.testing.assert_allclose(value.item(), reference["kl/value"], **CLOSE)
    value.backward()
    # D KL / d z = (p - q) / M.
    torch.testing.assert_close(student.grad, (student.softmax(1) - teacher.softmax(1)).detach() / 5)
    assert teacher.grad is None


@pytest.fixture(scope="module")
def cpa(golden: Golden) -> dict[str, Tensor]:
    return {key: torch.from_numpy(np.asarray(value)) for key, value in golden("cpa").items()}


def test_conjoint_mask_matches_the_reference(cpa: dict[str, Tensor]) -> None:
    actual = prr.conjoint_mask(cpa["counts"], 0.8)
    torch.testing.assert_close(actual, cpa["mask_beta0.8/ref64"], **CLOSE)
    torch.testing.assert_close(actual.float(), cpa["mask_beta0.8/official"], **OFFICIAL_EPS)


def test_conjoint_mask_by_hand_and_for_classes_that_nobody_has() -> None:
    expected = torch.tensor([[1, 0.5, 1], [1, 1, 1], [1, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(prr.conjoint_mask(torch.tensor([8, 2, 0]), 0.5), expected)
    ones = torch.ones(3, 3, dtype=torch.float64)
    for counts, beta in (([5, 5, 5], 0.8), ([0, 0, 0], 0.8), ([9, 4, 1], 0.0)):
        assert torch.equal(prr.conjoint_mask(torch.tensor(counts), beta), ones)


@pytest.mark.parametrize("signed", ["", "_signed"])
def test_gamma_matches_the_reference(cpa: dict[str, Tensor], signed: bool) -> None:
    local = cpa[f"local_proto{signed}"].double()
    global_ = cpa[f"global_proto{signed}"].double()
    torch.testing.assert_close(
        prr.prototype_gamma(local, global_, 3.0),
        cpa[f"beta0.8_tau3.0/ref64_gamma{signed}"],
        **CLOSE,
    )
    similarity = 4.0 / prr.prototype_gamma(local, global_, 3.0) - 3.0
    torch.testing.assert_close(similarity, cpa[f"ref64_cos{signed}"], **CLOSE)


def test_gamma_of_aligned_orthogonal_opposite_and_missing_prototypes() -> None:
    local = torch.tensor([[2.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    global_ = torch.tensor([[5.0, 0.0], [0.0, 3.0], [-2.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(
        prr.prototype_gamma(local, global_, 3.0), torch.tensor([1.0, 4 / 3, 2.0, 1.0, 1.0])
    )
    # cos = -1 and tau = 1: the formula itself divides by zero.
    steep = prr.prototype_gamma(local, global_, 1.0)
    assert torch.isfinite(steep).all() and steep[2] == pytest.approx(2000, rel=1e-4)


def test_cpa_loss_matches_the_reference(cpa: dict[str, Tensor]) -> None:
    logits = cpa["logits"].double()
    targets = cpa["targets"]
    counts = cpa["counts"]
    gamma = {sign: cpa[f"beta0.8_tau3.0/ref64_gamma{sign}"] for sign in ("", "_signed")}
    group = "beta0.8_tau3.0"
    torch.testing.assert_close(
        prr.cpa_loss(logits, targets, counts, gamma[""], 0.8), cpa[f"{group}/ref64_loss"], **CLOSE
    )
    torch.testing.assert_close(
        prr.cpa_loss(logits, targets, counts, None, 0.8), cpa[f"{group}/ref64_global_only"], **CLOSE
    )
    torch.testing.assert_close(
        prr.cpa_loss(logits, targets, None, gamma[""], 0.8),
        cpa[f"{group}/ref64_local_only"],
        **CLOSE,
    )
    for sign in gamma:
        actual = prr.cpa_loss(logits, targets, counts, gamma[sign], 0.8)
        torch.testing.assert_close(
            actual, cpa[f"{group}/official_loss{sign}"].double(), **OFFICIAL_EPS
        )
    torch.testing.assert_close(
        prr.cpa_loss(logits, targets, counts, None, 0.8),
        cpa[f"{group}/official_global_only"].double(),
        **OFFICIAL_EPS,
    )


def test_gradient_of_the_cpa_loss_matches_the_reference(cpa: dict[str, Tensor]) -> None:
    logits = cpa["logits"].clone().requires_grad_()
    gamma = prr.prototype_gamma(cpa["local_proto"], cpa["global_proto"], 3.0)
    prr.cpa_loss(logits, cpa["targets"], cpa["counts"], gamma, 0.8).backward()
    torch.testing.assert_close(
        logits.grad, cpa["beta0.8_tau3.0/official_grad_logits"], **OFFICIAL_EPS
    )


def test_pixels_are_samples(cpa: dict[str, Tensor]) -> None:
    logits, targets = cpa["logits"], cpa["targets"]  # (10, 3): two pictures of five pixels
    pictures = logits.reshape(2, 5, 3).transpose(1, 2)
    labels = targets.reshape(2, 5)
    gamma = torch.tensor([1.0, 1.5, 2.0])
    for counts, weight in ((cpa["counts"], gamma), (None, None)):
        torch.testing.assert_close(
            prr.cpa_loss(pictures, labels, counts, weight, 0.8),
            prr.cpa_loss(logits, targets, counts, weight, 0.8),
        )
    teacher = logits.flip(0)
    actual = prr.distillation_loss(pictures, teacher.reshape(2, 5, 3).transpose(1, 2))
    torch.testing.assert_close(actual, prr.distillation_loss(logits, teacher))
    means = prr.PrototypeMean(3, 3)
    by_pixel = prr.PrototypeMean(3, 3)
    means.add(logits, targets)
    by_pixel.add(pictures, labels)
    torch.testing.assert_close(by_pixel.means(), means.means())


def test_cpa_loss_survives_large_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    value = prr.cpa_loss(
        logits, torch.tensor([1]), torch.tensor([10**9, 1, 0]), torch.tensor([1.0, 2.0, 1.0]), 0.8
    )
    value.backward()
    assert (
        value.item() == pytest.approx(4e4)
        and logits.grad is not None
        and torch.isfinite(logits.grad).all()
    )


def test_global_prototypes_match_the_reference(cpa: dict[str, Tensor]) -> None:
    local = cpa["protos_clients"].double()
    noise = cpa["proto_gaussian_noise_seed77"].double()
    present = torch.ones(4, 3)
    torch.testing.assert_close(
        prr.global_prototypes(local, present, noise, "mean"), cpa["proto_mean"].double(), **CLOSE
    )
    deviation = prr.global_prototypes(local, present, torch.ones(3, 64)) - cpa["proto_mean"]
    torch.testing.assert_close(deviation, cpa["proto_std_population_paper"], **CLOSE)
    clamped = (
        prr.global_prototypes(local, present, torch.ones(3, 64), "clamped") - cpa["proto_mean"]
    )
    torch.testing.assert_close(
        clamped, cpa["proto_std_unbiased_clamped_min1_official"].double(), **CLOSE
    )
    torch.testing.assert_close(
        prr.global_prototypes(local, present, noise, "clamped"),
        cpa["proto_gaussian_official_seed77"].double(),
        **CLOSE,
    )


@pytest.mark.parametrize("spread", ["gaussian", "clamped", "mean"])
def test_sites_without_a_class_do_not_count_for_it(spread: Any) -> None:
    local, noise = (
        torch.randn(shape, generator=torch_generator(7, str(shape)), dtype=torch.float64)
        for shape in ((3, 2, 4), (2, 4))
    )
    present = torch.tensor([[1, 0], [1, 0], [0, 0]])
    actual = prr.global_prototypes(local, present, noise, spread)
    torch.testing.assert_close(
        actual[0], prr.global_prototypes(local[:2, :1], torch.ones(2, 1), noise[:1], spread)[0]
    )
    assert torch.equal(actual[1], torch.zeros(4, dtype=torch.float64))


def test_prototypes_are_means_by_class_over_all_batches() -> None:
    mean = prr.PrototypeMean(3, 2)
    mean.add(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0]))
    mean.add(torch.tensor([[5.0, 3.0], [0.0, 7.0]], requires_grad=True), torch.tensor([0, 2]))
    torch.testing.assert_close(mean.means(), torch.tensor([[3.0, 1.0], [0.0, 0.0], [0.0, 7.0]]))
    assert mean.counts.tolist() == [3, 0, 1] and not mean.means().requires_grad
