"""PRR's formulas: reference numbers, hand-computed values and degenerate cases."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from medflare.core.rng import torch_generator
from medflare.methods.prr_math import (
    EXCHANGE,
    RECOVER,
    SUBLIMATE,
    PrototypeMean,
    Treatment,
    aggregate_models,
    conjoint_mask,
    cpa_loss,
    distillation_loss,
    fourier_aggregate,
    frequency_ratio,
    global_prototypes,
    next_stage,
    prototype_gamma,
    treatments,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
OFFICIAL_EPS = {"rtol": 1e-4, "atol": 1e-4}  # the official code adds 1e-6 inside its logarithm and its quotients

VARIANTS = {
    "official_both": {"window": "official"},
    "official_miccai21_amp": {"window": "official", "components": "amplitude"},
    "ref64_official_both": {"window": "official"},
    "ref64_official_amp": {"window": "official", "components": "amplitude"},
    "ref64_official_phase": {"window": "official", "components": "phase"},
    "ref64_closed_both": {},
    "ref64_closed_amp": {"components": "amplitude"},
    "ref64_closed_phase": {"components": "phase"},
    "ref64_closed_both_circular": {"phase_mean": "circular"},
}


def normal(*shape, key="weights", dtype=torch.float64):
    return torch.randn(*shape, generator=torch_generator(7, key), dtype=dtype)


# ---- Fourier aggregation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", ["conv_8x3x3x3", "fc_10x12", "last_3x64"])
def test_fourier_aggregation_matches_the_reference(golden, layer, dtype):
    reference = golden("pfa")
    keys = [key for key in reference if key.startswith(layer) and key.split("/")[-1] in VARIANTS]
    assert len(keys) == (4 * 3 if layer.startswith("last") else 4 * 9)
    weights = torch.from_numpy(reference[f"{layer}/in"]).to(dtype)
    for key in keys:
        _, ratio, variant = key.split("/")
        found = fourier_aggregate(weights, float(ratio[1:]), classifier=layer.startswith("last"), **VARIANTS[variant])
        assert found.dtype == dtype and found.shape == weights.shape
        np.testing.assert_allclose(found.numpy(), reference[key], **CLOSE, err_msg=key)


def transcribed(matrices, r, window, components, phase_mean):
    """Eq. 1-4 word by word for (K, R, C): full complex FFT, centred spectrum, real part of the inverse."""
    spectra = torch.fft.fftshift(torch.fft.fft2(matrices), dim=(-2, -1))
    amplitude, phase = spectra.abs(), spectra.angle()
    rows, columns = matrices.shape[-2:]
    inside = torch.zeros(rows, columns, dtype=torch.bool)
    for i in range(rows):
        for j in range(columns):
            m, n, a, b = i - rows // 2, j - columns // 2, math.floor(rows * r), math.floor(columns * r)
            inside[i, j] = (-a <= m <= a and -b <= n <= b) if window == "closed" else (-a <= m < a and -b <= n < b)
    mean_phase = phase.mean(0) if phase_mean == "arithmetic" else torch.polar(torch.ones(()).double(), phase).mean(0).angle()
    mixed_amplitude = torch.where(inside, amplitude.mean(0), amplitude) if components != "phase" else amplitude
    mixed_phase = torch.where(inside, mean_phase, phase) if components != "amplitude" else phase
    return torch.fft.ifft2(torch.fft.ifftshift(torch.polar(mixed_amplitude, mixed_phase), dim=(-2, -1))).real


@pytest.mark.parametrize("phase_mean", ["arithmetic", "circular"])
@pytest.mark.parametrize("components", ["both", "amplitude", "phase"])
@pytest.mark.parametrize("window", ["closed", "official"])
@pytest.mark.parametrize(("sites", "size"), [(2, (7, 6)), (3, (8, 8)), (5, (5, 9)), (3, (1, 4)), (3, (4, 1)), (3, (2, 2)), (3, (1, 1))])
def test_half_a_spectrum_gives_what_the_whole_one_gives(sites, size, window, components, phase_mean):
    matrices = normal(sites, *size, key=f"{sites}{size}") + 0.3
    for r in (0.0, 0.2, 0.35, 0.43, 0.5):
        found = fourier_aggregate(matrices, r, window=window, components=components, phase_mean=phase_mean)
        torch.testing.assert_close(found, transcribed(matrices, r, window, components, phase_mean), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", ["in_major", "out_major"])
def test_layouts_are_the_matrices_they_say(layout):
    weights = normal(3, 4, 5, 3, 2)  # (K, O, I, kh, kw)
    if layout == "in_major":
        matrices = torch.stack([torch.cat([torch.cat([w[:, i, :, x].T for x in range(2)], 1) for i in range(5)]) for w in weights])
    else:
        matrices = torch.stack([torch.cat([torch.cat([w[o, i] for i in range(5)], 1) for o in range(4)]) for w in weights])
    expected = transcribed(matrices, 0.4, "closed", "both", "arithmetic")
    found = fourier_aggregate(weights, 0.4, layout=layout)
    if layout == "in_major":
        torch.testing.assert_close(found[1, 3, 2, :, 1], expected[1, 6:9, 4 + 3])
    else:
        torch.testing.assert_close(found[1, 3, 2], expected[1, 9:12, 4:6])


def test_a_classifier_is_aggregated_class_by_class():
    weights = normal(3, 4, 10)
    whole = fourier_aggregate(weights, 0.4, classifier=True)
    for c in range(4):
        alone = fourier_aggregate(weights[:, c : c + 1], 0.4, classifier=True)
        torch.testing.assert_close(whole[:, c : c + 1], alone)
    convolution = fourier_aggregate(weights.reshape(3, 4, 10, 1, 1), 0.4, classifier=True)
    torch.testing.assert_close(convolution.flatten(2), whole)


@pytest.mark.parametrize("options", VARIANTS.values())
def test_equal_sites_are_a_fixed_point_and_one_site_keeps_its_weights(options):
    weights = normal(1, 6, 5, 3, 3)
    found = fourier_aggregate(weights.expand(4, -1, -1, -1, -1), 0.4, **options)
    torch.testing.assert_close(found, weights.expand(4, -1, -1, -1, -1))
    assert torch.equal(fourier_aggregate(weights, 0.4, **options), weights)


def test_zero_weights_stay_zero():
    for options in VARIANTS.values():
        assert torch.equal(fourier_aggregate(torch.zeros(3, 4, 6), 0.4, **options), torch.zeros(3, 4, 6))
    one_silent = torch.stack([torch.zeros(4, 6), torch.ones(4, 6)])
    for options in VARIANTS.values():
        assert torch.isfinite(fourier_aggregate(one_silent, 0.4, **options)).all()


def test_the_band_is_shared_and_the_rest_is_not():
    weights = normal(3, 12, 10)
    spectra = torch.fft.fft2(fourier_aggregate(weights, 0.25, phase_mean="circular"))
    own = torch.fft.fft2(weights)
    for k in (1, 2):
        torch.testing.assert_close(spectra[k, 1:4, 1:3], spectra[0, 1:4, 1:3])
        torch.testing.assert_close(spectra[k, 4:9], own[k, 4:9])
        torch.testing.assert_close(spectra[k, :, 3:8], own[k, :, 3:8])
    assert not torch.allclose(spectra[0, 1:4, 1:3], own[0, 1:4, 1:3])


def test_opposite_numbers_average_to_nothing_in_the_circular_mean_and_to_a_right_angle_in_the_arithmetic_one():
    weights = torch.tensor([1.0, -1.0]).reshape(2, 1, 1)  # one real bin, phases 0 and pi
    assert fourier_aggregate(weights, 0.5, phase_mean="circular").abs().max() == 0
    torch.testing.assert_close(fourier_aggregate(weights, 0.5), torch.zeros(2, 1, 1), rtol=0, atol=1e-7)
    mostly_positive = torch.tensor([2.0, 2.0, 2.0, -2.0]).reshape(4, 1, 1)  # mean angle pi/4
    torch.testing.assert_close(fourier_aggregate(mostly_positive, 0.5), torch.full((4, 1, 1), 2 / math.sqrt(2)))


def test_half_precision_comes_back_as_half_precision():
    weights = normal(3, 8, 6, dtype=torch.float32)
    found = fourier_aggregate(weights.half(), 0.4)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), fourier_aggregate(weights, 0.4), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0.6}, "r = 0.6"),
        ({"r": math.nan}, "r = nan"),
        ({"layout": "paper"}, "layout = 'paper'"),
        ({"window": "open"}, "window = 'open'"),
        ({"components": "amp"}, "components = 'amp'"),
        ({"phase_mean": "median"}, "phase_mean = 'median'"),
        ({"weights": torch.zeros(3, 8)}, r"\(3, 8\)"),
    ],
)
def test_fourier_aggregation_refuses_what_it_cannot_do(change, message):
    arguments = {"weights": torch.zeros(3, 4, 5), "r": 0.4} | change
    with pytest.raises(ValueError, match=message):
        fourier_aggregate(arguments.pop("weights"), arguments.pop("r"), **arguments)


def test_frequency_ratio_follows_both_schedules(golden):
    reference = golden("pfa")
    paper = [frequency_ratio(t, 50) for t in range(50)]
    official = [frequency_ratio(t, 50, r1=0.475) for t in range(50)]
    np.testing.assert_allclose(paper, reference["schedule/paper_r_by_round_T50"], rtol=1e-12)
    np.testing.assert_allclose(official, reference["schedule/official_r_by_round_T50"], rtol=1e-12)


# ---- whole models -----------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Every kind of layer, with names that say the wrong thing."""

    def __init__(self):
        super().__init__()
        self.bn_conv = nn.Conv2d(3, 4, 3)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 6, 3)
        self.head = nn.Linear(6, 2)


def test_entries_are_told_apart_by_the_type_of_their_layer():
    found = treatments(Mixed())
    assert found.keys() == Mixed().state_dict().keys()
    assert found["bn_conv.weight"] == Treatment("kernel") and found["bn_conv.bias"] == Treatment("mean")
    assert found["downsample.0.weight"] == Treatment("kernel")
    assert {name for name, treatment in found.items() if treatment.kind == "local"} == {
        f"downsample.1.{entry}" for entry in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert found["norm.weight"] == Treatment("mean")
    assert found["up.weight"] == Treatment("kernel", inputs_first=True)
    assert found["head.weight"] == Treatment("classifier")


def models(count):
    found = {}
    for k in range(count):
        torch.manual_seed(0)
        state = Mixed().state_dict()
        noise = {name: normal(*tensor.shape, key=f"{k}{name}", dtype=torch.float32) for name, tensor in state.items() if tensor.dim()}
        found[f"site-{k}"] = {name: tensor for name, tensor in noise.items() if "downsample.1" not in name}
    return found


def test_every_site_gets_its_own_model():
    states, plan = models(3), treatments(Mixed())
    aggregated = aggregate_models(states, plan, 0.4)
    assert aggregated.keys() == states.keys()
    for name in states["site-0"]:
        stacked = torch.stack([states[site][name] for site in states])
        found = torch.stack([aggregated[site][name] for site in states])
        if plan[name].kind == "mean":
            expected = stacked.mean(0).expand_as(stacked)
        elif name == "up.weight":
            expected = fourier_aggregate(stacked.transpose(1, 2), 0.4).transpose(1, 2)
        else:
            expected = fourier_aggregate(stacked, 0.4, classifier=name == "head.weight")
        torch.testing.assert_close(found, expected)
    assert not torch.equal(aggregated["site-0"]["head.weight"], aggregated["site-1"]["head.weight"])


def test_without_fourier_everybody_gets_the_mean():
    states = models(3)
    aggregated = aggregate_models(states, treatments(Mixed()), 0.4, fourier=False)
    for name in states["site-0"]:
        mean = torch.stack([state[name] for state in states.values()]).mean(0)
        for site in states:
            torch.testing.assert_close(aggregated[site][name], mean)


def test_equal_models_are_a_fixed_point():
    state = models(1)["site-0"]
    for found in aggregate_models({"a": state, "b": state, "c": state}, treatments(Mixed()), 0.4).values():
        torch.testing.assert_close(found, state)


# ---- DET --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "key"), [("official", "official_stage"), ("threshold", "paper_threshold_stage")])
@pytest.mark.parametrize("sequence", ["seq0", "seq1"])
def test_stages_match_the_reference(golden, sequence, rule, key):
    reference = golden("det")
    stage, found = 0, []
    for deputy, personal in zip(reference[f"{sequence}/deputy"], reference[f"{sequence}/personal"], strict=True):
        stage = next_stage(stage, deputy, personal, rule=rule)
        found.append(stage)
    assert found == reference[f"{sequence}/{key}"].tolist()


@pytest.mark.parametrize(
    ("stage", "deputy", "personal", "expected"),
    [
        (0, 1.0, 0.1, RECOVER),  # a round starts with recovery
        (RECOVER, 0.69, 1.0, RECOVER),
        (RECOVER, 0.7, 1.0, EXCHANGE),  # the threshold itself is enough
        (RECOVER, 1.0, 1.0, EXCHANGE),  # no sublimation without an exchange before
        (EXCHANGE, 0.89, 1.0, EXCHANGE),
        (EXCHANGE, 0.9, 1.0, SUBLIMATE),
        (SUBLIMATE, 0.89, 1.0, EXCHANGE),
        (SUBLIMATE, 0.1, 1.0, RECOVER),
        (RECOVER, 0.0, 0.0, EXCHANGE),  # 0 >= 0.7 * 0
        (EXCHANGE, math.nan, 0.5, RECOVER),
        (EXCHANGE, 0.5, math.nan, RECOVER),
    ],
)
def test_official_stage_machine(stage, deputy, personal, expected):
    assert next_stage(stage, deputy, personal) == expected


def test_unknown_stage_or_rule_is_refused():
    with pytest.raises(ValueError, match="stage = 4"):
        next_stage(4, 1.0, 1.0)
    with pytest.raises(ValueError, match="rule = 'paper'"):
        next_stage(1, 1.0, 1.0, rule="paper")


def test_distillation_matches_the_reference_and_teaches_the_student_only(golden):
    reference = golden("cpa")
    student = torch.from_numpy(reference["kl/student_logits"]).requires_grad_()
    teacher = torch.from_numpy(reference["kl/teacher_logits"]).requires_grad_()
    value = distillation_loss(student, teacher)
    np.testing.assert_allclose(value.item(), reference["kl/value"], **CLOSE)
    value.backward()
    torch.testing.assert_close(student.grad, (student.softmax(1) - teacher.softmax(1)).detach() / 5)  # d KL / d z = (p - q) / M
    assert teacher.grad is None


def test_squared_difference_by_hand():
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3), 0.0]])  # (1/2, 1/2) and (3/4, 1/4)
    torch.testing.assert_close(distillation_loss(student, teacher, "mse10"), torch.tensor(10 / 16))
    assert distillation_loss(teacher, teacher) == distillation_loss(teacher, teacher, "mse10") == 0


# ---- CPA --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpa(golden):
    return {key: torch.from_numpy(np.asarray(value)) for key, value in golden("cpa").items()}


def test_conjoint_mask_matches_the_reference(cpa):
    found = conjoint_mask(cpa["counts"], 0.8)
    torch.testing.assert_close(found, cpa["mask_beta0.8/ref64"], **CLOSE)
    torch.testing.assert_close(found.float(), cpa["mask_beta0.8/official"], **OFFICIAL_EPS)


def test_conjoint_mask_by_hand_and_for_classes_that_nobody_has():
    expected = torch.tensor([[1, 0.5, 1], [1, 1, 1], [1, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(conjoint_mask(torch.tensor([8, 2, 0]), 0.5), expected)
    ones = torch.ones(3, 3, dtype=torch.float64)
    for counts, beta in (([5, 5, 5], 0.8), ([0, 0, 0], 0.8), ([9, 4, 1], 0.0)):
        assert torch.equal(conjoint_mask(torch.tensor(counts), beta), ones)


@pytest.mark.parametrize("signed", ["", "_signed"])
def test_gamma_matches_the_reference(cpa, signed):
    local, global_ = cpa[f"local_proto{signed}"].double(), cpa[f"global_proto{signed}"].double()
    torch.testing.assert_close(prototype_gamma(local, global_, 3.0), cpa[f"beta0.8_tau3.0/ref64_gamma{signed}"], **CLOSE)
    similarity = 4.0 / prototype_gamma(local, global_, 3.0) - 3.0
    torch.testing.assert_close(similarity, cpa[f"ref64_cos{signed}"], **CLOSE)


def test_gamma_of_aligned_orthogonal_opposite_and_missing_prototypes():
    local = torch.tensor([[2.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    global_ = torch.tensor([[5.0, 0.0], [0.0, 3.0], [-2.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(prototype_gamma(local, global_, 3.0), torch.tensor([1.0, 4 / 3, 2.0, 1.0, 1.0]))
    steep = prototype_gamma(local, global_, 1.0)  # cos = -1 and tau = 1: the formula itself divides by zero
    assert torch.isfinite(steep).all() and steep[2] == pytest.approx(2000, rel=1e-4)


def test_cpa_loss_matches_the_reference(cpa):
    logits, targets, counts = cpa["logits"].double(), cpa["targets"], cpa["counts"]
    gamma = {sign: cpa[f"beta0.8_tau3.0/ref64_gamma{sign}"] for sign in ("", "_signed")}
    group = "beta0.8_tau3.0"
    torch.testing.assert_close(cpa_loss(logits, targets, counts, gamma[""], 0.8), cpa[f"{group}/ref64_loss"], **CLOSE)
    torch.testing.assert_close(cpa_loss(logits, targets, counts, None, 0.8), cpa[f"{group}/ref64_global_only"], **CLOSE)
    torch.testing.assert_close(cpa_loss(logits, targets, None, gamma[""], 0.8), cpa[f"{group}/ref64_local_only"], **CLOSE)
    for sign in gamma:
        found = cpa_loss(logits, targets, counts, gamma[sign], 0.8)
        torch.testing.assert_close(found, cpa[f"{group}/official_loss{sign}"].double(), **OFFICIAL_EPS)
    torch.testing.assert_close(cpa_loss(logits, targets, counts, None, 0.8), cpa[f"{group}/official_global_only"].double(), **OFFICIAL_EPS)


def test_gradient_of_the_cpa_loss_matches_the_reference(cpa):
    logits = cpa["logits"].clone().requires_grad_()
    gamma = prototype_gamma(cpa["local_proto"], cpa["global_proto"], 3.0)
    cpa_loss(logits, cpa["targets"], cpa["counts"], gamma, 0.8).backward()
    torch.testing.assert_close(logits.grad, cpa["beta0.8_tau3.0/official_grad_logits"], **OFFICIAL_EPS)


def test_cpa_loss_is_the_cross_entropy_for_equal_counts_and_aligned_prototypes(cpa):
    logits, targets = cpa["logits"], cpa["targets"]
    expected = nn.functional.cross_entropy(logits, targets)
    for counts, gamma in ((None, None), (torch.tensor([4, 4, 4]), torch.ones(3)), (torch.tensor([0, 0, 0]), None)):
        torch.testing.assert_close(cpa_loss(logits, targets, counts, gamma, 0.8), expected)


def test_pixels_are_samples(cpa):
    logits, targets = cpa["logits"], cpa["targets"]  # (10, 3): two pictures of five pixels
    pictures, labels = logits.reshape(2, 5, 3).transpose(1, 2), targets.reshape(2, 5)
    gamma = torch.tensor([1.0, 1.5, 2.0])
    for counts, weight in ((cpa["counts"], gamma), (None, None)):
        torch.testing.assert_close(cpa_loss(pictures, labels, counts, weight, 0.8), cpa_loss(logits, targets, counts, weight, 0.8))
    teacher = logits.flip(0)
    for form in ("kl", "mse10"):
        found = distillation_loss(pictures, teacher.reshape(2, 5, 3).transpose(1, 2), form)
        torch.testing.assert_close(found, distillation_loss(logits, teacher, form))
    means, by_pixel = PrototypeMean(3, 3), PrototypeMean(3, 3)
    means.add(logits, targets)
    by_pixel.add(pictures, labels)
    torch.testing.assert_close(by_pixel.means(), means.means())


def test_cpa_loss_survives_large_logits():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    value = cpa_loss(logits, torch.tensor([1]), torch.tensor([10**9, 1, 0]), torch.tensor([1.0, 2.0, 1.0]), 0.8)
    value.backward()
    assert value.item() == pytest.approx(4e4) and torch.isfinite(logits.grad).all()


# ---- prototypes -------------------------------------------------------------------------------------------------------------


def test_prototypes_are_means_by_class_over_all_batches():
    mean = PrototypeMean(3, 2)
    mean.add(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0]))
    mean.add(torch.tensor([[5.0, 3.0], [0.0, 7.0]], requires_grad=True), torch.tensor([0, 2]))
    torch.testing.assert_close(mean.means(), torch.tensor([[3.0, 1.0], [0.0, 0.0], [0.0, 7.0]]))
    assert mean.counts.tolist() == [3, 0, 1] and not mean.means().requires_grad


def test_global_prototypes_match_the_reference(cpa):
    local, noise = cpa["protos_clients"].double(), cpa["proto_gaussian_noise_seed77"].double()
    present = torch.ones(4, 3)
    torch.testing.assert_close(global_prototypes(local, present, noise, "mean"), cpa["proto_mean"].double(), **CLOSE)
    deviation = global_prototypes(local, present, torch.ones(3, 64)) - cpa["proto_mean"]
    torch.testing.assert_close(deviation, cpa["proto_std_population_paper"], **CLOSE)
    clamped = global_prototypes(local, present, torch.ones(3, 64), "clamped") - cpa["proto_mean"]
    torch.testing.assert_close(clamped, cpa["proto_std_unbiased_clamped_min1_official"].double(), **CLOSE)
    torch.testing.assert_close(global_prototypes(local, present, noise, "clamped"), cpa["proto_gaussian_official_seed77"].double(), **CLOSE)


@pytest.mark.parametrize("spread", ["gaussian", "clamped", "mean"])
def test_sites_without_a_class_do_not_count_for_it(spread):
    local, noise = normal(3, 2, 4), normal(2, 4, key="noise")
    present = torch.tensor([[1, 0], [1, 0], [0, 0]])
    found = global_prototypes(local, present, noise, spread)
    torch.testing.assert_close(found[0], global_prototypes(local[:2, :1], torch.ones(2, 1), noise[:1], spread)[0])
    assert torch.equal(found[1], torch.zeros(4, dtype=torch.float64))


def test_one_site_alone_gives_its_own_prototype():
    local, noise = normal(1, 2, 4), normal(2, 4, key="noise")
    for spread in ("gaussian", "mean"):
        torch.testing.assert_close(global_prototypes(local, torch.ones(1, 2), noise, spread), local[0])
    torch.testing.assert_close(global_prototypes(local, torch.ones(1, 2), noise, "clamped"), local[0] + noise)
