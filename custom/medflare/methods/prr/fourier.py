"""Progressive Fourier Aggregation: what PRR's server does with the sites' models, as pure functions.

Paper: Chen et al., "Personalized Retrogress-Resilient Federated Learning Toward Imbalanced Medical Data", IEEE TMI 41(12),
2022, Sec. III-B. "Official" is the authors' published code where it differs from the printed equations.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from medflare.core.states import StateDict, allocate, batch_norm_entries, check_same_shapes, split_state, weighted_mean
from medflare.methods.prr.spectra import change_spectra

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def frequency_ratio(round: int, num_rounds: int, r0: float = 0.35, r1: float = 0.48) -> float:
    """Low-frequency threshold of a round, r_t = r0 + (r1 - r0) t / T (PRR, Sec. III-B), t from 0.

    The official schedule is this line with r1 = 0.475 and T = 50.

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

    What is added to a site's weights is the inverse transform of the change inside the window, so that nothing else of the spectrum is
    needed. A real FFT is enough, although the official window is not symmetric and the mean phase of a self-conjugate bin (DC,
    Nyquist) may be neither 0 nor pi: the real part of an inverse transform depends on the Hermitian half
    (S(k) + conj S(-k)) / 2 of the spectrum S alone, and that half is what is built here.

    Args:
        weights: (K, O, I, kh, kw) convolutions or (K, O, I) linear layers of K sites with O outputs and I inputs. The paper knows pictures
            alone: a kernel (kh) is one (kh, 1), and a kernel (kh, kw, kd) has its depth beside kw, so one of depth 1 is aggregated as the
            plane that it is.
        r: half-width of the low band as a share of each axis, 0 <= r <= 0.5.
        classifier: transform one output (class) at a time along its other axes, so that rare classes keep their own norm.

    Returns:
        (K, ...) aggregated weights, one version per site, of the dtype of `weights`, without a graph. A single site gets its own weights
        back.

    Raises:
        ValueError: r outside [0, 0.5], an unknown option, whole numbers, or a shape that belongs to no convolution and no linear layer.

    Examples:
        >>> weights = torch.tensor([[[1.0, 3.0]], [[5.0, 3.0]]])  # two sites, one output, two inputs
        >>> fourier_aggregate(weights, r=0.0).flatten(1)  # the mean over the inputs is shared, the differences stay
        tensor([[2., 4.],
                [4., 2.]])
    """
    if not weights.is_floating_point():
        raise ValueError(f"weights of {weights.dtype} have no spectrum; PFA takes floating-point weights")
    if not 3 <= weights.dim() <= 6 or 0 in weights.shape:
        raise ValueError(f"weights of shape {tuple(weights.shape)} are not (K, O, I[, kh[, kw[, kd]]]); average them plainly")
    found = allocate(weights.shape, weights.dtype)
    _aggregate_layer(weights.detach().unbind(), found.unbind(), r, classifier, Reading(layout, window, components, phase_mean))
    return found


@dataclass(frozen=True)
class Reading:
    """How the paper's equations are read.

    Attributes:
        layout: the matrix of a convolution: "in_major" (I kh, kw O) as in the official code, "out_major" (O kh, I kw) as printed;
            with a depth (I kh, kw kd O) and (O kh, I kw kd).
        window: "closed" |k| <= floor(r N), Eq. 2, or "official" -floor(r N) <= k < floor(r N).
        components: what is averaged: "amplitude" (as in the MICCAI 2021 paper), "phase" or "both".
        phase_mean: "arithmetic" mean of the angles, Eq. 4, or "circular", the angle of the mean unit phasor. Phasors that
            cancel have no mean direction; the circular mean then leaves the bin empty.
    """

    layout: str = "in_major"
    window: str = "closed"
    components: str = "both"
    phase_mean: str = "arithmetic"

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, ("in_major", "out_major"))
        check_choice("window", self.window, ("closed", "official"))
        check_choice("components", self.components, ("both", "amplitude", "phase"))
        check_choice("phase_mean", self.phase_mean, ("arithmetic", "circular"))


def _aggregate_layer(weights: Sequence[Tensor], into: Sequence[Tensor], r: float, classifier: bool, reading: Reading) -> None:
    """`fourier_aggregate` of K tensors (O, I, ...), written to K others."""
    if not 0 <= r <= 0.5:
        raise ValueError(f"r = {r} is outside [0, 0.5]: a band cannot be wider than the spectrum")
    order, lead = _axis_order(weights[0].dim(), classifier, reading.layout)
    turned = [weight.permute(order) for weight in weights]
    shape = turned[0].shape
    band = _Band.of(math.prod(shape[:lead]), math.prod(shape[lead:]), r, classifier, reading.window)
    if len(weights) == 1 or not band.columns.numel():
        for target, weight in zip(into, weights, strict=True):
            target.copy_(weight)
        return
    change = partial(_share_band, band=band, reading=reading)
    change_spectra(turned, [target.permute(order) for target in into], lead, band.columns.shape[1], change, planes=not classifier)


def _axis_order(dimensions: int, classifier: bool, layout: str) -> tuple[tuple[int, ...], int]:
    """The order of the axes (O, I, kh[, kw[, kd]]) in which merging neighbours makes the matrix, and how many of them are its rows."""
    if dimensions == 2 or classifier:
        return tuple(range(dimensions)), 1
    further = tuple(range(3, dimensions))
    return ((1, 2, *further, 0) if layout == "in_major" else (0, 2, 1, *further)), 2


@dataclass(frozen=True)
class _Band:
    """The low frequencies of a half spectrum: the Hermitian half of the window.

    Attributes:
        rows: (2, R) 1 where a row's frequency k lies inside, and where -k does; (2, 1) where only columns are transformed.
        columns: (2, c) the same of the columns up to the last one of the band.
        real_rows: rows of bins that are real, where the column is one of `real_columns`.
    """

    rows: Tensor
    columns: Tensor
    real_rows: slice | list[int]
    real_columns: list[int]

    @classmethod
    def of(cls, rows: int, columns: int, r: float, classifier: bool, window: str) -> "_Band":
        """The band of matrices with so many rows and columns."""
        row = torch.ones(2, 1) if classifier else _low_band(rows, r, window)
        column = _low_band(columns, r, window)[:, : columns // 2 + 1]
        real_rows = slice(None) if classifier else _self_conjugate(rows)
        return cls(row, column[:, : int(column.any(dim=0).sum())], real_rows, _self_conjugate(columns))

    def runs(self) -> Iterator[tuple[slice, bool]]:
        """Neighbouring rows, and whether they have a part in the band."""
        if self.rows.shape[1] == 1:
            yield slice(None), True
            return
        inside, counts = torch.unique_consecutive(self.rows.any(dim=0), return_counts=True)
        ends = [0, *counts.cumsum(0).tolist()]
        yield from zip(map(slice, ends, ends[1:]), inside.tolist(), strict=True)

    def share(self, rows: slice, columns: slice) -> Tensor | None:
        """Share of the aggregate in each bin: 1 where k and -k lie inside, 1/2 where one of them does; None where it is 1 everywhere."""
        row, column = self.rows[:, rows], self.columns[:, columns]
        if bool(row.all() and column.all()):
            return None
        return (torch.outer(row[0], column[0]) + torch.outer(row[1], column[1])) / 2


def _self_conjugate(bins: int) -> list[int]:
    return [0, bins // 2] if bins % 2 == 0 else [0]


def _low_band(bins: int, r: float, window: str) -> Tensor:
    """(2, bins): 1 where bin k of an axis, in FFT order, is a low frequency, else 0; and the same for -k."""
    half_width = int(bins * r)
    frequency = (torch.arange(bins) + bins // 2) % bins - bins // 2
    upper = frequency <= half_width if window == "closed" else frequency < half_width
    inside = (upper & (frequency >= -half_width)).float()
    return torch.stack([inside, inside[-torch.arange(bins) % bins]])


def _share_band(spectra: list[Tensor], columns: slice, *, band: _Band, reading: Reading) -> None:
    """Write what aggregation adds to some columns of all sites' spectra in their place.

    Bins that are their own conjugates (DC, Nyquist) first get the imaginary part +0 instead of rounding noise. The phase of a negative
    number is then +pi at every site; with noise it would be +pi or -pi by chance, and so would the mean.
    """
    for column in set(band.real_columns) & set(range(columns.start, columns.stop)):
        for spectrum in spectra:
            spectrum.imag[band.real_rows, column - columns.start] = 0.0
    for rows, inside in band.runs():
        parts = [spectrum[rows] for spectrum in spectra]
        if not inside:
            for part in parts:
                part.zero_()
            continue
        real, imaginary = (torch.stack(numbers) for numbers in ([part.real for part in parts], [part.imag for part in parts]))
        aggregate = _aggregate(real, imaginary, reading)
        share = band.share(rows, columns)
        for part, target in zip(parts, aggregate.expand(len(parts), -1, -1), strict=True):
            torch.sub(target, part, out=part)
            if share is not None:
                part.mul_(share)


def _aggregate(real: Tensor, imaginary: Tensor, reading: Reading) -> Tensor:
    """Eq. 3-4 for spectra (K, R, C): mean amplitude, mean phase or both, as (K, R, C) or, where all sites agree, (1, R, C)."""
    amplitude = torch.hypot(real, imaginary)  # of parts that lie apart: several times as fast as of complex numbers, and so is the angle
    mean_amplitude = amplitude.mean(dim=0, keepdim=True)
    if reading.components == "amplitude":
        scale = mean_amplitude / amplitude
        silent = amplitude == 0  # the phase of zero is 0
        return torch.complex(torch.where(silent, mean_amplitude, real * scale), torch.where(silent, 0.0, imaginary * scale))
    magnitude = amplitude if reading.components == "phase" else mean_amplitude
    if reading.phase_mean == "circular":
        cosine = torch.where(amplitude > 0, real / amplitude, 1.0).mean(dim=0, keepdim=True)
        sine = torch.where(amplitude > 0, imaginary / amplitude, 0.0).mean(dim=0, keepdim=True)
        return magnitude * torch.complex(cosine, sine).sgn()
    phase = torch.atan2(imaginary, real).mean(dim=0, keepdim=True)
    return torch.complex(magnitude * phase.cos(), magnitude * phase.sin())


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
    """The first layer whose weights are none that Fourier aggregation knows, "features.0 (Embedding)"; None where it knows them all.

    Biases and normalisation are averaged plainly and need none.

    Examples:
        >>> without_rule(nn.Sequential(nn.Linear(2, 2), nn.Embedding(2, 2))), without_rule(nn.Conv3d(1, 1, 1))
        ('1 (Embedding)', None)
    """
    for name, layer in network.named_modules():
        if isinstance(layer, (*_WEIGHTED, nn.LayerNorm)):
            continue
        if any(weight.ndim > 1 for weight in layer.parameters(recurse=False)):
            return f"{name or 'the network'} ({type(layer).__name__})"
    return None


def aggregate_models(
    states: Mapping[str, StateDict], plan: Mapping[str, Treatment], r: float, *, fourier: bool = True, components: str = "both"
) -> dict[str, StateDict]:
    """The aggregated model S_k of each site (PRR, Alg. 1 line 7): Fourier aggregation by layer, the plain mean elsewhere.

    Args:
        states: site -> state, without the entries that stay local.
        fourier: False averages everything plainly, which with local batch normalisation is FedBN.

    Returns:
        Site -> aggregated state.

    Raises:
        ValueError: no states, or states that differ in names or shapes.

    Examples:
        >>> states = {"A": {"w": torch.tensor([[1.0, 3.0]])}, "B": {"w": torch.tensor([[5.0, 3.0]])}}
        >>> aggregate_models(states, {"w": Treatment("kernel")}, 0.0, fourier=False)["A"]
        {'w': tensor([[3., 3.]])}
    """
    if not states:
        raise ValueError("aggregate_models needs at least one state")
    check_same_shapes(states)
    sites = sorted(states)
    mixed = [name for name in states[sites[0]] if fourier and plan[name].kind in ("kernel", "classifier")]
    averaged = {site: split_state(states[site], frozenset(mixed))[1] for site in sites}
    mean = weighted_mean(averaged, dict.fromkeys(sites, 1.0))
    reading = Reading(components=components)
    aggregated: dict[str, StateDict] = {site: dict(mean) for site in sites}
    for name in mixed:
        treatment, given = plan[name], [states[site][name].detach() for site in sites]
        found = [allocate(states[site][name].shape, states[site][name].dtype) for site in sites]
        weights, into = ([tensor.transpose(0, 1) if treatment.inputs_first else tensor for tensor in of] for of in (given, found))
        _aggregate_layer(weights, into, r, treatment.kind == "classifier", reading)
        for site, weight in zip(sites, found, strict=True):
            aggregated[site][name] = weight
    return {site: {name: aggregated[site][name] for name in states[site]} for site in sites}


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Nothing where `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: choose one of {', '.join(choices)}")


def treatments_by_shape(states: Mapping[str, StateDict]) -> dict[str, Treatment]:
    """What becomes of each entry, where only states are at hand: two or more axes make a weight, the last of them the classifier.

    Examples:
        >>> {name: found.kind for name, found in treatments_by_shape({"A": {"w": torch.zeros(2, 2), "b": torch.zeros(2)}}).items()}
        {'w': 'classifier', 'b': 'mean'}
    """
    first = next(iter(states.values()))
    weights = [name for name, tensor in first.items() if tensor.ndim >= 2 and tensor.is_floating_point()]
    found = {name: Treatment("kernel" if name in weights else "mean") for name in first}
    return {**found, **{name: Treatment("classifier") for name in weights[-1:]}}
