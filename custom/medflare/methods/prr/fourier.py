"""Progressive Fourier Aggregation: what PRR's server does with the sites' models, as pure functions.

Paper: Chen et al., "Personalized Retrogress-Resilient Federated Learning Toward Imbalanced Medical Data", IEEE TMI 41(12),
2022, Sec. III-B. "Official" is the authors' published code where it differs from the printed equations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from medflare.core.backing import empty
from medflare.core.states import StateDict, batch_norm_entries, split_state, weighted_mean

_TRANSPOSED = (nn.ConvTranspose2d, nn.ConvTranspose3d)
_WEIGHTED = (nn.Linear, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_BINS_AT_ONCE = 2**18  # frequency bins aggregated at a time: few enough for the processor's cache


def frequency_ratio(round: int, num_rounds: int, r0: float = 0.35, r1: float = 0.48) -> float:
    """Low-frequency threshold of a round, r_t = r0 + (r1 - r0) t / T (PRR, Sec. III-B), t from 0.

    The official schedule is this line with r1 = 0.475 and T = 50.

    Args:
        round: t.
        num_rounds: T.
        r0: the ratio at t = 0.
        r1: the ratio at t = T.

    Examples:
        >>> frequency_ratio(0, 50), frequency_ratio(50, 50), frequency_ratio(25, 50, r0=0.25, r1=0.75)
        (0.35, 0.48, 0.5)
    """
    return r0 + (r1 - r0) * round / num_rounds


def fourier_aggregate(
    weights: Tensor,
    r: float,
    *,
    classifier: bool = False,
    layout: str = "in_major",
    window: str = "closed",
    components: str = "both",
    phase_mean: str = "arithmetic",
) -> Tensor:
    """Average one layer's low frequencies over the sites and keep each site's high frequencies (PRR, Eq. 1-4).

    A real FFT is enough, although the official window is not symmetric and the mean phase of a self-conjugate bin (DC,
    Nyquist) may be neither 0 nor pi: the real part of an inverse transform depends on the Hermitian half
    (S(k) + conj S(-k)) / 2 of the spectrum S alone, and that half is what is built here.

    Args:
        weights: (K, O, I, kh, kw) convolutions or (K, O, I) linear layers of K sites with O outputs and I inputs. The paper knows no
            volumes: a kernel (kh, kw, kd) has its depth beside kw, so one of depth 1 is aggregated as the plane that it is.
        r: half-width of the low band as a share of each axis, 0 <= r <= 0.5.
        classifier: transform one output (class) at a time along its other axes, so that rare classes keep their own norm.
        layout: the matrix of a convolution: "in_major" (I kh, kw O) as in the official code, "out_major" (O kh, I kw) as printed;
            with a depth (I kh, kw kd O) and (O kh, I kw kd).
        window: "closed" |k| <= floor(r N), Eq. 2, or "official" -floor(r N) <= k < floor(r N).
        components: what is averaged: "amplitude" (as in the MICCAI 2021 paper), "phase" or "both".
        phase_mean: "arithmetic" mean of the angles, Eq. 4, or "circular", the angle of the mean unit phasor. Phasors that
            cancel have no mean direction; the circular mean then leaves the bin empty.

    Returns:
        (K, ...) aggregated weights, one version per site, of the dtype of `weights`, without a graph. A single site gets its own weights
        back.

    Raises:
        ValueError: r outside [0, 0.5], an unknown option, or a shape that belongs to no convolution and no linear layer.

    Examples:
        >>> weights = torch.tensor([[[1.0, 3.0]], [[5.0, 3.0]]])  # two sites, one output, two inputs
        >>> fourier_aggregate(weights, r=0.0).flatten(1)  # the mean over the inputs is shared, the differences stay
        tensor([[2., 4.],
                [4., 2.]])
    """
    check_choice("layout", layout, ("in_major", "out_major"))
    check_choice("window", window, ("closed", "official"))
    check_choice("components", components, ("both", "amplitude", "phase"))
    check_choice("phase_mean", phase_mean, ("arithmetic", "circular"))
    if not 0 <= r <= 0.5:
        raise ValueError(f"r = {r} is outside [0, 0.5]: a band cannot be wider than the spectrum")
    if weights.dim() not in (3, 5, 6):
        raise ValueError(f"weights of shape {tuple(weights.shape)} are neither (K, O, I) nor (K, O, I, kh, kw[, kd]); average them plainly")
    weights = weights.detach()
    if len(weights) == 1:
        return weights.clone()
    order = _axis_order(weights.dim(), classifier, layout)
    turned = weights.permute(order)
    matrices = turned.flatten(2) if classifier else turned.flatten(3).flatten(1, 2) if weights.dim() > 3 else turned
    if matrices.dtype in (torch.float16, torch.bfloat16):
        matrices = matrices.float()  # the CPU has no FFT of half precision
    axes = (-1,) if classifier else (-2, -1)
    rows, columns = matrices.shape[1:]
    spectra = empty((*matrices.shape[:-1], columns // 2 + 1), matrices.dtype.to_complex())
    torch.fft.rfftn(matrices, dim=axes, out=spectra)
    _settle_real_bins(spectra, rows, columns, classifier)
    share = _band_share(rows, columns, r, classifier, window).to(matrices)
    block = max(1, _BINS_AT_ONCE // (len(weights) * max(1, share.shape[1])))
    for start in range(0, len(share), block):
        part = slice(start, start + block)
        if bool(share[part].any()):
            band = spectra[:, part, : share.shape[1]]
            band.copy_(share[part] * _aggregate(band, components, phase_mean) + (1 - share[part]) * band)
    mixed = empty(weights.shape, weights.dtype)
    back = torch.fft.irfftn(spectra, s=matrices.shape[-len(axes) :], dim=axes)
    mixed.permute(order).copy_(back.reshape(turned.shape))
    return mixed


def _axis_order(dimensions: int, classifier: bool, layout: str) -> tuple[int, ...]:
    """The order of the axes (K, O, I, kh, kw[, kd]) in which merging neighbours makes the matrix."""
    if dimensions == 3 or classifier:
        return tuple(range(dimensions))
    further = tuple(range(4, dimensions))
    return (0, 2, 3, *further, 1) if layout == "in_major" else (0, 1, 3, 2, *further)


def _settle_real_bins(spectra: Tensor, rows: int, columns: int, classifier: bool) -> None:
    """Give self-conjugate bins (DC, Nyquist) the imaginary part +0 instead of rounding noise.

    The phase of a negative number is then +pi at every site; with noise it would be +pi or -pi by chance, and so would the mean.
    """
    real_rows = slice(None) if classifier else _self_conjugate(rows)
    for column in _self_conjugate(columns):
        spectra.imag[:, real_rows, column] = 0.0


def _self_conjugate(bins: int) -> list[int]:
    return [0, bins // 2] if bins % 2 == 0 else [0]


def _band_share(rows: int, columns: int, r: float, classifier: bool, window: str) -> Tensor:
    """Share of the aggregate in each bin of a half spectrum: (R, c) with c the last column of the band.

    The Hermitian half of the window: 1 where k and -k lie inside, 1/2 where one of them does.
    """
    row, mirrored_row = (torch.ones(2, rows)) if classifier else _low_band(rows, r, window)
    column, mirrored_column = _low_band(columns, r, window)[:, : columns // 2 + 1]
    share = (torch.outer(row, column) + torch.outer(mirrored_row, mirrored_column)) / 2
    return share[:, : int(share.any(dim=0).sum())]


def _low_band(bins: int, r: float, window: str) -> Tensor:
    """(2, bins): 1 where bin k of an axis, in FFT order, is a low frequency, else 0; and the same for -k."""
    half_width = int(bins * r)
    frequency = (torch.arange(bins) + bins // 2) % bins - bins // 2
    upper = frequency <= half_width if window == "closed" else frequency < half_width
    inside = (upper & (frequency >= -half_width)).float()
    return torch.stack([inside, inside[-torch.arange(bins) % bins]])


def _aggregate(band: Tensor, components: str, phase_mean: str) -> Tensor:
    """Eq. 3-4 for spectra (K, R, C): mean amplitude, mean phase or both, as (K, R, C) or, where all sites agree, (1, R, C)."""
    amplitude = band.abs()
    mean_amplitude = amplitude.mean(dim=0, keepdim=True)
    if components == "amplitude":
        return torch.where(amplitude > 0, band * (mean_amplitude / amplitude), mean_amplitude)
    magnitude = amplitude if components == "phase" else mean_amplitude
    if phase_mean == "circular":
        phasors = torch.where(amplitude > 0, band.sgn(), 1.0)  # the phase of zero is 0
        return magnitude * phasors.mean(dim=0, keepdim=True).sgn()
    phase = torch.angle(band).mean(dim=0, keepdim=True)
    return torch.polar(*torch.broadcast_tensors(magnitude, phase))


Kind = Literal["local", "mean", "kernel", "classifier"]


@dataclass(frozen=True)
class Treatment:
    """What the server does with one entry of a model's state.

    Attributes:
        kind: "local" never leaves the site (batch normalisation, as in FedBN), "mean" is averaged plainly (biases, other
            normalisation), "kernel" gets the 2-D Fourier aggregation and "classifier" the 1-D one.
        inputs_first: the weight is stored as (I, O, ...): a transposed convolution.
    """

    kind: Kind
    inputs_first: bool = False


def treatments(network: nn.Module) -> dict[str, Treatment]:
    """How each entry of `network`'s state is aggregated, by the type of the layer that it belongs to, never by its name.

    The classifier is the last convolution or linear layer in order of registration, the one that gives the logits.

    Examples:
        >>> found = treatments(nn.Sequential(nn.Linear(2, 2, bias=False), nn.InstanceNorm1d(2, affine=True), nn.Linear(2, 1, bias=False)))
        >>> {name: treatment.kind for name, treatment in found.items()}
        {'0.weight': 'kernel', '1.weight': 'mean', '1.bias': 'mean', '2.weight': 'classifier'}
    """
    local = batch_norm_entries(network)
    weighted = {f"{name}.weight".lstrip("."): layer for name, layer in network.named_modules() if isinstance(layer, _WEIGHTED)}
    last = next(reversed(weighted), None)
    found = {name: Treatment("local" if name in local else "mean") for name in network.state_dict()}
    for name, layer in weighted.items():
        found[name] = Treatment("classifier" if name == last else "kernel", isinstance(layer, _TRANSPOSED))
    return found


def without_rule(network: nn.Module) -> str | None:
    """The first layer whose weights are none that Fourier aggregation knows, "features.0 (Conv1d)"; None where it knows them all.

    Biases and normalisation are averaged plainly and need none.

    Args:
        network: whose state is to be aggregated.

    Examples:
        >>> without_rule(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 3))), without_rule(nn.Conv3d(1, 1, 1))
        ('1 (Conv1d)', None)
    """
    for name, layer in network.named_modules():
        if isinstance(layer, (*_WEIGHTED, nn.LayerNorm)):
            continue
        if any(weight.ndim > 1 for weight in layer.parameters(recurse=False)):
            return f"{name or 'the network'} ({type(layer).__name__})"
    return None


def aggregate_models(
    states: Mapping[str, StateDict], plan: Mapping[str, Treatment], r: float, *, fourier: bool = True, **options: str
) -> dict[str, StateDict]:
    """The aggregated model S_k of each site (PRR, Alg. 1 line 7): Fourier aggregation by layer, the plain mean elsewhere.

    Args:
        states: site -> state, without the entries that stay local.
        plan: how each entry is treated, see `treatments`.
        r: low-frequency threshold of the round, see `frequency_ratio`.
        fourier: False averages everything plainly, which with local batch normalisation is FedBN.
        options: `layout`, `window`, `components` and `phase_mean` of `fourier_aggregate`.

    Returns:
        Site -> aggregated state.

    Examples:
        >>> states = {"A": {"w": torch.tensor([[1.0, 3.0]])}, "B": {"w": torch.tensor([[5.0, 3.0]])}}
        >>> aggregate_models(states, {"w": Treatment("kernel")}, 0.0, fourier=False)["A"]
        {'w': tensor([[3., 3.]])}
    """
    sites = sorted(states)
    mixed = [name for name in states[sites[0]] if fourier and plan[name].kind in ("kernel", "classifier")]
    averaged = {site: split_state(states[site], frozenset(mixed))[1] for site in sites}
    mean = weighted_mean(averaged, dict.fromkeys(sites, 1.0))
    aggregated: dict[str, StateDict] = {site: dict(mean) for site in sites}
    for name in mixed:
        treatment = plan[name]
        stacked = empty((len(sites), *states[sites[0]][name].shape), states[sites[0]][name].dtype)
        torch.stack([states[site][name] for site in sites], out=stacked)
        stacked = stacked.transpose(1, 2) if treatment.inputs_first else stacked
        found = fourier_aggregate(stacked, r, classifier=treatment.kind == "classifier", **options)
        found = found.transpose(1, 2) if treatment.inputs_first else found
        for site, weight in zip(sites, found, strict=True):
            aggregated[site][name] = weight.contiguous()
    return {site: {name: aggregated[site][name] for name in states[site]} for site in sites}


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Nothing where `value` is one of the choices.

    Args:
        name: of the option, for the message.
        value: as it was given.
        choices: allowed values.

    Raises:
        ValueError: it is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: choose one of {', '.join(choices)}")


def treatments_by_shape(states: Mapping[str, StateDict]) -> dict[str, Treatment]:
    """What becomes of each entry, where only states are at hand: two or more axes make a weight, the last of them the classifier.

    Args:
        states: site -> state; all with the same names and shapes.

    Examples:
        >>> {name: found.kind for name, found in treatments_by_shape({"A": {"w": torch.zeros(2, 2), "b": torch.zeros(2)}}).items()}
        {'w': 'classifier', 'b': 'mean'}
    """
    first = next(iter(states.values()))
    weights = [name for name, tensor in first.items() if tensor.ndim >= 2 and tensor.is_floating_point()]
    found = {name: Treatment("kernel" if name in weights else "mean") for name in first}
    return {**found, **{name: Treatment("classifier") for name in weights[-1:]}}
