"""Progressive Fourier Aggregation: reference numbers, a transcription of the equations, degenerate cases, whole models."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.fixture_types import Golden
from medflare.core.rng import torch_generator
from medflare.methods.prr import fourier
from medflare.methods.prr.fourier import (
    Treatment,
    aggregate_models,
    fourier_aggregate,
    frequency_ratio,
    treatments,
    without_rule,
)

VARIANTS: dict[str, dict[str, Any]] = {
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


def normal(*shape: int, key: str = "weights", dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(7, key), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", ["conv_8x3x3x3", "fc_10x12", "last_3x64"])
def test_fourier_aggregation_matches_the_reference(
    golden: Golden, layer: str, dtype: torch.dtype
) -> None:
    reference = golden("pfa")
    keys = [key for key in reference if key.startswith(layer) and key.split("/")[-1] in VARIANTS]
    assert len(keys) == (4 * 3 if layer.startswith("last") else 4 * 9)
    weights = torch.from_numpy(reference[f"{layer}/in"]).to(dtype)
    for key in keys:
        _, ratio, variant = key.split("/")
        actual = fourier_aggregate(
            weights, float(ratio[1:]), classifier=layer.startswith("last"), **VARIANTS[variant]
        )
        assert actual.dtype == dtype and actual.shape == weights.shape
        np.testing.assert_allclose(
            actual.numpy(), reference[key], rtol=1e-5, atol=1e-6, err_msg=key
        )


def transcribed(matrices: Any, r: float, window: str, components: str, phase_mean: str) -> Tensor:
    """Eq. 1-4 word by word for (K, R, C): full complex FFT, centred spectrum, real part of the inverse."""
    spectra = torch.fft.fftshift(torch.fft.fft2(matrices), dim=(-2, -1))
    amplitude = spectra.abs()
    phase = spectra.angle()
    rows, columns = matrices.shape[-2:]
    inside = torch.zeros(rows, columns, dtype=torch.bool)
    for i in range(rows):
        for j in range(columns):
            m = i - rows // 2
            n = j - columns // 2
            a = math.floor(rows * r)
            b = math.floor(columns * r)
            inside[i, j] = (
                (-a <= m <= a and -b <= n <= b)
                if window == "closed"
                else (-a <= m < a and -b <= n < b)
            )
    mean_phase = (
        phase.mean(0)
        if phase_mean == "arithmetic"
        else torch.polar(torch.ones(()).double(), phase).mean(0).angle()
    )
    mixed_amplitude = (
        torch.where(inside, amplitude.mean(0), amplitude) if components != "phase" else amplitude
    )
    mixed_phase = torch.where(inside, mean_phase, phase) if components != "amplitude" else phase
    return torch.fft.ifft2(
        torch.fft.ifftshift(torch.polar(mixed_amplitude, mixed_phase), dim=(-2, -1))
    ).real


@pytest.mark.parametrize("phase_mean", ["arithmetic", "circular"])
@pytest.mark.parametrize("components", ["both", "amplitude", "phase"])
@pytest.mark.parametrize("window", ["closed", "official"])
@pytest.mark.parametrize(
    ("sites", "size"),
    [(2, (7, 6)), (3, (8, 8)), (5, (5, 9)), (3, (1, 4)), (3, (4, 1)), (3, (2, 2)), (3, (1, 1))],
)
def test_half_a_spectrum_gives_what_the_whole_one_gives(
    sites: int, size: tuple[int, int], window: Any, components: Any, phase_mean: Any
) -> None:
    matrices = normal(sites, *size, key=f"{sites}{size}") + 0.3
    for r in (0.0, 0.2, 0.35, 0.43, 0.5):
        actual = fourier_aggregate(
            matrices, r, window=window, components=components, phase_mean=phase_mean
        )
        torch.testing.assert_close(
            actual, transcribed(matrices, r, window, components, phase_mean), rtol=1e-9, atol=1e-9
        )


def test_the_matrix_of_a_convolution_has_rows_of_inputs_and_columns_of_outputs() -> None:
    weights = normal(3, 4, 5, 3, 2)  # (K, O, I, kh, kw)
    matrices = []
    for w in weights:
        rows = []
        for i in range(5):
            rows.append(torch.cat([w[:, i, :, x].T for x in range(2)], dim=1))
        matrices.append(torch.cat(rows))
    expected = transcribed(torch.stack(matrices), 0.4, "closed", "both", "arithmetic")
    actual = fourier_aggregate(weights, 0.4)
    torch.testing.assert_close(actual[1, 3, 2, :, 1], expected[1, 6:9, 4 + 3])


def test_a_classifier_is_aggregated_class_by_class() -> None:
    weights = normal(3, 4, 10)
    whole = fourier_aggregate(weights, 0.4, classifier=True)
    for c in range(4):
        alone = fourier_aggregate(weights[:, c : c + 1], 0.4, classifier=True)
        torch.testing.assert_close(whole[:, c : c + 1], alone)
    convolution = fourier_aggregate(weights.reshape(3, 4, 10, 1, 1), 0.4, classifier=True)
    torch.testing.assert_close(convolution.flatten(2), whole)


@pytest.mark.parametrize("options", VARIANTS.values())
def test_equal_sites_are_a_fixed_point_and_one_site_keeps_its_weights(
    options: dict[str, Any],
) -> None:
    weights = normal(1, 6, 5, 3, 3)
    actual = fourier_aggregate(weights.expand(4, -1, -1, -1, -1), 0.4, **options)
    torch.testing.assert_close(actual, weights.expand(4, -1, -1, -1, -1))
    assert torch.equal(fourier_aggregate(weights, 0.4, **options), weights)


def test_large_layers_are_transformed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((2, 30, 57), (2, 6, 20, 3, 3)):
        weights = normal(*shape)
        expected = [
            fourier_aggregate(weights, 0.4, classifier=classifier) for classifier in (False, True)
        ]
        with monkeypatch.context() as patched:
            patched.setattr(fourier, "_BLOCK", 128)
            patched.setattr(fourier, "_TILE", 64)
            for classifier in (False, True):
                torch.testing.assert_close(
                    fourier_aggregate(weights, 0.4, classifier=classifier), expected[classifier]
                )


def test_half_precision_comes_back_as_half_precision() -> None:
    weights = normal(3, 8, 6, dtype=torch.float32)
    actual = fourier_aggregate(weights.half(), 0.4)
    assert actual.dtype == torch.float16
    torch.testing.assert_close(
        actual.float(), fourier_aggregate(weights, 0.4), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.zeros(3, 8), r"\(3, 8\)"),
        (torch.zeros(2, 0, 3), r"\(2, 0, 3\)"),
        (torch.zeros(3, 4, 5, dtype=torch.long), "int64"),
    ],
)
def test_fourier_aggregation_refuses_what_it_cannot_do(weights: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fourier_aggregate(weights, 0.4)


def test_frequency_ratio_follows_both_schedules(golden: Golden) -> None:
    reference = golden("pfa")
    paper = [frequency_ratio(t, 50) for t in range(50)]
    official = [frequency_ratio(t, 50, r1=0.475) for t in range(50)]
    np.testing.assert_allclose(paper, reference["schedule/paper_r_by_round_T50"], rtol=1e-12)
    np.testing.assert_allclose(official, reference["schedule/official_r_by_round_T50"], rtol=1e-12)


# ---- whole models -----------------------------------------------------------------------------------------------------------


def mixed() -> nn.Module:
    """Every kind of layer, with names that say the wrong thing."""
    layers = {
        "bn_conv": nn.Conv2d(3, 4, 3),
        "downsample": nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)),
        "norm": nn.GroupNorm(2, 4),
        "up": nn.ConvTranspose2d(4, 6, 3),
        "head": nn.Linear(6, 2),
    }
    return nn.ModuleDict(layers)


def test_entries_are_told_apart_by_the_type_of_their_layer() -> None:
    actual = treatments(mixed())
    assert actual.keys() == mixed().state_dict().keys()
    assert actual["bn_conv.weight"] == Treatment("kernel") and actual["bn_conv.bias"] == Treatment(
        "mean"
    )
    assert actual["downsample.0.weight"] == Treatment("kernel")
    assert {name for name, treatment in actual.items() if treatment.kind == "local"} == {
        f"downsample.1.{entry}"
        for entry in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert actual["norm.weight"] == Treatment("mean")
    assert actual["up.weight"] == Treatment("kernel", inputs_first=True)
    assert actual["head.weight"] == Treatment("classifier")


@pytest.mark.parametrize("classifier", [False, True])
def test_a_kernel_of_depth_one_is_the_plane_that_it_is(classifier: bool) -> None:
    planes = normal(3, 5, 4, 3, 2)
    flat = fourier_aggregate(planes, 0.4, classifier=classifier)
    deep = fourier_aggregate(planes[..., None], 0.4, classifier=classifier)
    assert torch.equal(deep[..., 0], flat)
    whole = fourier_aggregate(normal(3, 5, 4, 3, 2, 3), 0.4, classifier=classifier)
    assert whole.shape == (3, 5, 4, 3, 2, 3) and not torch.allclose(whole[0], whole[1])


def test_layers_of_volumes_have_their_rule_and_layers_without_one_are_named() -> None:
    network = nn.Sequential(
        nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2), nn.ConvTranspose3d(2, 2, 2), nn.Conv3d(2, 1, 1)
    )
    actual = treatments(network)
    assert [actual[f"{place}.weight"].kind for place in range(4)] == [
        "kernel",
        "local",
        "kernel",
        "classifier",
    ]
    assert (
        actual["2.weight"].inputs_first
        and without_rule(network) is None
        and without_rule(mixed()) is None
    )
    assert without_rule(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2))) == "1 (Embedding)"


def models(count: int) -> dict[str, dict[str, Tensor]]:
    shapes = {}
    for name, tensor in mixed().state_dict().items():
        if "downsample.1" not in name:
            shapes[name] = tensor.shape
    states = {}
    for k in range(count):
        state = {}
        for n, shape in shapes.items():
            state[n] = normal(*shape, key=f"{k}{n}", dtype=torch.float32)
        states[f"site-{k}"] = state
    return states


def test_aggregate_models_calls_fourier_aggregate_for_each_kernel() -> None:
    states = models(3)
    plan = treatments(mixed())
    aggregated = aggregate_models(states, plan, 0.4)
    assert aggregated.keys() == states.keys()
    for name in states["site-0"]:
        stacked = torch.stack([states[site][name] for site in states])
        actual = torch.stack([aggregated[site][name] for site in states])
        if plan[name].kind == "mean":
            expected = stacked.mean(0).expand_as(stacked)
        elif name == "up.weight":
            expected = fourier_aggregate(stacked.transpose(1, 2), 0.4).transpose(1, 2)
        else:
            expected = fourier_aggregate(stacked, 0.4, classifier=name == "head.weight")
        torch.testing.assert_close(actual, expected)
    assert not torch.equal(aggregated["site-0"]["head.weight"], aggregated["site-1"]["head.weight"])
