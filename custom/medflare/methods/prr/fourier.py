"""Progressive Fourier Aggregation: what PRR's server does with the sites' models.

Paper: Chen et al., "Personalized Retrogress-Resilient Federated Learning Toward Imbalanced Medical
Data", IEEE TMI 41(12), 2022, Sec. III-B. "Official" is the authors' published code where it differs
from the printed equations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from medflare.core.states import (
    StateDict,
    States,
    batch_norm_entries,
    check_same_shapes,
    split_state,
)
from medflare.methods.aggregation import plain_mean
from medflare.methods.parts.tensors import widened

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
# Numbers that are transformed along rows at a time.
_BLOCK = 2**21
# Bins that are transformed along columns at a time: 2 MB, about a second-level cache.
_TILE = 2**18

Window = Literal["closed", "official"]
Components = Literal["both", "amplitude", "phase"]
PhaseMean = Literal["arithmetic", "circular"]


def frequency_ratio(round: int, num_rounds: int, r0: float = 0.35, r1: float = 0.48) -> float:
    """Low-frequency threshold of a round, r_t = r0 + (r1 - r0) t / T (PRR, Sec. III-B), t from 0.

    The official schedule is this line with r1 = 0.475 and T = 50.
    """
    return r0 + (r1 - r0) * round / num_rounds


@dataclass(frozen=True)
class Reading:
    """How the paper's equations are read.

    Attributes:
        window: "closed" |k| <= floor(r N), Eq. 2, or "official" -floor(r N) <= k < floor(r N).
        components: what is averaged: "amplitude" (as in the MICCAI 2021 paper), "phase" or "both".
        phase_mean: "arithmetic" mean of the angles, Eq. 4, or "circular", the angle of the mean
            unit phasor. Phasors that cancel have no mean direction; the circular mean then leaves
            the bin empty.
    """

    window: Window = "closed"
    components: Components = "both"
    phase_mean: PhaseMean = "arithmetic"


def fourier_aggregate(
    weights: Tensor,
    r: float,
    *,
    classifier: bool = False,
    window: Window = "closed",
    components: Components = "both",
    phase_mean: PhaseMean = "arithmetic",
) -> Tensor:
    """Average one layer's low frequencies over the sites and keep each site's high frequencies.

    PRR, Eq. 1-4. The matrix of a convolution is (I kh, kw O), as in the official code.

    Args:
        weights: (K, O, I, kh, kw) convolutions or (K, O, I) linear layers of K sites with O outputs
            and I inputs. The paper has 2-D kernels only: a kernel (kh) is treated as (kh, 1), and
            the depth of a kernel (kh, kw, kd) is joined with kw.
        r: half-width of the low band as a share of each axis, 0 <= r <= 0.5.
        classifier: transform one output (class) at a time along its other axes, so that rare
            classes keep their own norm.
        window: see `Reading`, as `components` and `phase_mean`.

    Returns:
        (K, ...) aggregated weights, one version per site, of the dtype of `weights`, without a
        graph. A single site gets its own weights.

    Raises:
        ValueError: an integer dtype, or a shape of no convolution and no linear layer.
    """
    if not weights.is_floating_point():
        raise ValueError(
            f"weights of {weights.dtype} have no spectrum; PFA takes floating-point weights"
        )
    if not 3 <= weights.dim() <= 6 or 0 in weights.shape:
        raise ValueError(
            f"weights of shape {tuple(weights.shape)} are not (K, O, I[, kh[, kw[, kd]]]); "
            "average them plainly"
        )
    aggregated = torch.empty(weights.shape, dtype=weights.dtype)
    reading = Reading(window, components, phase_mean)
    _aggregate_layer(weights.detach().unbind(), aggregated.unbind(), r, classifier, reading)
    return aggregated


def _aggregate_layer(
    weights: Sequence[Tensor], into: Sequence[Tensor], r: float, classifier: bool, reading: Reading
) -> None:
    """Writes `fourier_aggregate` of K tensors (O, I, ...) to K other tensors.

    The result is w + F⁻¹((S - F(w)) s) with the aggregated spectrum S and the window s, so only the
    low band is transformed along both axes. The half spectrum of a real FFT suffices for any S: the
    real part of the inverse transform depends on the Hermitian half (S(k) + conj S(-k)) / 2 alone,
    so s is the mean of the window at k and at -k.
    """
    order, row_axes = _axis_order(weights[0].dim(), classifier)
    matrices = []
    for weight in weights:
        matrix = weight.permute(order).flatten(row_axes).flatten(0, row_axes - 1)
        matrices.append(widened(matrix))  # the CPU has no FFT of half precision
    rows, columns = matrices[0].shape
    row_window = torch.ones(2, rows) if classifier else _low_band(rows, r, reading.window)
    column_window = _low_band(columns, r, reading.window)[:, : columns // 2 + 1]
    low_columns = int(column_window.any(dim=0).sum())
    if len(weights) == 1 or low_columns == 0:
        for target, weight in zip(into, weights, strict=True):
            target.copy_(weight)
        return
    # An odd number of cache lines: strides of powers of two collide in the cache.
    lines = max(1, _TILE // (8 * rows))
    odd_lines = lines if lines % 2 else lines - 1
    width = 8 * odd_lines
    tiles = [_row_spectra(matrix, low_columns, width) for matrix in matrices]
    for index, start in enumerate(range(0, low_columns, width)):
        spectra = [of_site[index] for of_site in tiles]
        end = min(start + width, low_columns)
        window = column_window[:, start:end]
        real_columns = [bin - start for bin in _self_conjugate(columns) if start <= bin < end]
        _change_tile(spectra, row_window, window, real_columns, classifier, reading)
    del spectra  # the tiles of all sites
    for target, matrix in zip(into, matrices, strict=True):
        # A site's spectrum is freed before the next result takes memory.
        _write_moved(target.permute(order), matrix, tiles.pop(0))


def _change_tile(
    spectra: Sequence[Tensor],
    row_window: Tensor,
    column_window: Tensor,
    real_columns: Sequence[int],
    classifier: bool,
    reading: Reading,
) -> None:
    """Replaces some columns (R, c) of all sites' row spectra by what aggregation adds to them.

    Real bins get no imaginary part: else rounding noise decides whether the phase of a negative
    number is +pi or -pi.
    """
    if classifier:
        for spectrum in spectra:
            spectrum.imag[:, real_columns] = 0.0
        _replace_by_change(spectra, row_window, column_window, reading)
        return
    planes = [torch.fft.fft(spectrum, dim=0) for spectrum in spectra]
    for plane in planes:
        for row in _self_conjugate(len(plane)):
            plane.imag[row, real_columns] = 0.0
    _replace_by_change(planes, row_window, column_window, reading)
    for spectrum, plane in zip(spectra, planes, strict=True):
        spectrum.copy_(torch.fft.ifft(plane, dim=0))


def _axis_order(dimensions: int, classifier: bool) -> tuple[tuple[int, ...], int]:
    """How the axes (O, I, kh[, kw[, kd]]) make a matrix by merging neighbours.

    Returns:
        The order of the axes, and how many of them are the matrix's rows.
    """
    if dimensions == 2 or classifier:
        return tuple(range(dimensions)), 1
    return (*range(1, dimensions), 0), 2


def _low_band(bins: int, r: float, window: Window) -> Tensor:
    """(2, bins): 1 where bin k of an axis, in FFT order, is a low frequency, else 0; the second row
    is for -k.
    """
    half_width = int(bins * r)
    frequency = (torch.arange(bins) + bins // 2) % bins - bins // 2
    inside = frequency.abs() <= half_width
    if window == "official":
        inside &= frequency < half_width
    mirrored = inside[-torch.arange(bins) % bins]
    return torch.stack([inside, mirrored]).float()


def _self_conjugate(bins: int) -> list[int]:
    """Bins of an axis whose spectrum is real: DC, and Nyquist where there is one."""
    if bins % 2 == 1:
        return [0]
    return [0, bins // 2]


def _replace_by_change(
    spectra: Sequence[Tensor], row_window: Tensor, column_window: Tensor, reading: Reading
) -> None:
    """Replaces the spectra of all sites, (R, C) each, by what aggregation adds to them, with
    windows as by `_low_band`.

    Neighbouring rows that are all low, or all high, are computed together.
    """
    low, counts = torch.unique_consecutive(row_window.any(dim=0), return_counts=True)
    start = 0
    for is_low, count in zip(low.tolist(), counts.tolist(), strict=True):
        rows = slice(start, start + count)
        start += count
        parts = [spectrum[rows] for spectrum in spectra]
        if not is_low:
            for part in parts:
                part.zero_()
            continue
        real = torch.stack([part.real for part in parts])
        imaginary = torch.stack([part.imag for part in parts])
        aggregate = aggregated_spectrum(real, imaginary, reading)
        at_k = torch.outer(row_window[0, rows], column_window[0])
        at_minus_k = torch.outer(row_window[1, rows], column_window[1])
        window = (at_k + at_minus_k) / 2
        whole = (window == 1).all()
        for part, target in zip(parts, aggregate.expand(len(parts), -1, -1), strict=True):
            torch.sub(target, part, out=part)
            if not whole:
                part.mul_(window)


def aggregated_spectrum(real: Tensor, imaginary: Tensor, reading: Reading) -> Tensor:
    """Eq. 3-4 for spectra (K, R, C): mean amplitude, mean phase or both.

    Returns:
        (K, R, C), or (1, R, C) where it is one for all sites.
    """
    # Several times as fast as the amplitude of complex numbers, and so is the angle below.
    amplitude = torch.hypot(real, imaginary)
    mean_amplitude = amplitude.mean(dim=0, keepdim=True)  # Eq. 3
    if reading.components == "amplitude":
        scale = mean_amplitude / amplitude
        silent = amplitude == 0  # the phase of zero is 0
        scaled_real = torch.where(silent, mean_amplitude, real * scale)
        scaled_imaginary = torch.where(silent, 0.0, imaginary * scale)
        return torch.complex(scaled_real, scaled_imaginary)
    magnitude = mean_amplitude
    if reading.components == "phase":
        magnitude = amplitude
    if reading.phase_mean == "circular":
        cosine = torch.where(amplitude > 0, real / amplitude, 1.0).mean(dim=0, keepdim=True)
        sine = torch.where(amplitude > 0, imaginary / amplitude, 0.0).mean(dim=0, keepdim=True)
        return magnitude * torch.complex(cosine, sine).sgn()
    phase = torch.atan2(imaginary, real).mean(dim=0, keepdim=True)  # Eq. 4
    return torch.complex(magnitude * phase.cos(), magnitude * phase.sin())


def _blocks(matrix: Tensor) -> Iterator[slice]:
    """Blocks of rows that are transformed at a time."""
    step = max(1, _BLOCK // matrix.shape[1])
    for start in range(0, len(matrix), step):
        yield slice(start, start + step)


def _row_spectra(matrix: Tensor, columns: int, width: int) -> list[Tensor]:
    """The first columns of the transformed rows of (R, C), as tiles (R, width) of neighbours."""
    rows = len(matrix)
    spectrum = torch.empty(rows * columns, dtype=matrix.dtype.to_complex())
    tiles = [tile.view(rows, -1) for tile in spectrum.split(rows * width)]
    for block in _blocks(matrix):
        low = torch.fft.rfft(matrix[block])[:, :columns]
        for tile, part in zip(tiles, low.split(width, dim=1), strict=True):
            tile[block] = part
    return tiles


def _write_moved(target: Tensor, matrix: Tensor, tiles: Sequence[Tensor]) -> None:
    """target = matrix (R, C) + the inverse transform of the tiles, whose further columns are 0."""
    direct = target.is_contiguous() and target.dtype == matrix.dtype
    moved = target.view(matrix.shape) if direct else torch.empty_like(matrix)
    for rows in _blocks(matrix):
        spectrum = torch.cat([tile[rows] for tile in tiles], dim=1)
        change = torch.fft.irfft(spectrum, n=matrix.shape[1])
        torch.add(matrix[rows], change, out=moved[rows])
    if direct:
        return
    if target.stride(-1) > target.stride(0):
        # A matrix is transposed faster by itself than on the way.
        moved = moved.view(-1, target.shape[-1]).t().contiguous()
        target = target.movedim(-1, 0)
    target.copy_(moved.view(target.shape))


# -- whole models ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Treatment:
    """What the server does with one entry of a model's state.

    Attributes:
        kind: "local" never leaves the site (batch normalisation, as in FedBN), "mean" is averaged
            plainly (biases, other normalisation), "kernel" gets the 2-D Fourier aggregation and
            "classifier" the 1-D one.
        inputs_first: the weight is stored as (I, O, ...): a transposed convolution.
    """

    kind: Literal["local", "mean", "kernel", "classifier"]
    inputs_first: bool = False


def treatments(network: nn.Module) -> dict[str, Treatment]:
    """How each entry of `network`'s state is aggregated, by the type of its layer, not by its name.

    The classifier is the last convolution or linear layer in order of registration, the one that
    gives the logits.
    """
    plan = {name: Treatment("mean") for name in network.state_dict()}
    plan |= dict.fromkeys(batch_norm_entries(network), Treatment("local"))
    last = None
    for name, layer in network.named_modules():
        if isinstance(layer, _WEIGHTED):
            last = f"{name}.weight".lstrip(".")
            plan[last] = Treatment("kernel", inputs_first=isinstance(layer, _TRANSPOSED))
    if last is not None:
        plan[last] = Treatment("classifier", plan[last].inputs_first)
    return plan


def treatments_by_shape(states: States) -> dict[str, Treatment]:
    """How each entry is aggregated where only states are at hand.

    Tensors of two or more axes are weights, the last is the classifier.
    """
    plan = {}
    last = None
    for name, tensor in next(iter(states.values())).items():
        if tensor.ndim >= 2 and tensor.is_floating_point():
            plan[name] = Treatment("kernel")
            last = name
        else:
            plan[name] = Treatment("mean")
    if last is not None:
        plan[last] = Treatment("classifier")
    return plan


def without_rule(network: nn.Module) -> str | None:
    """The first layer that has weights and no rule in Fourier aggregation, for example "features.0
    (Embedding)"; None if there is none.
    """
    for name, layer in network.named_modules():
        if isinstance(layer, (*_WEIGHTED, nn.LayerNorm)):
            continue
        if any(weight.ndim > 1 for weight in layer.parameters(recurse=False)):
            return f"{name or 'the network'} ({type(layer).__name__})"
    return None


def aggregate_models(
    states: States,
    plan: Mapping[str, Treatment],
    r: float,
    *,
    fourier: bool = True,
    components: Components = "both",
) -> dict[str, StateDict]:
    """The aggregated model S_k of each site (PRR, Alg. 1 line 7): Fourier aggregation by layer, the
    plain mean for every other entry.

    Args:
        states: site -> state, without the entries that stay local.
        plan: entry -> how it is aggregated.
        r: see `fourier_aggregate`.
        fourier: False averages everything plainly, which with local batch normalisation is FedBN.
        components: see `Reading`.

    Raises:
        ValueError: states that differ in names or shapes.
    """
    check_same_shapes(states)
    sites = sorted(states)
    names = list(states[sites[0]])
    mixed = []
    if fourier:
        mixed = [name for name in names if plan[name].kind in ("kernel", "classifier")]
    mean = plain_mean({site: split_state(states[site], frozenset(mixed))[1] for site in sites})
    aggregated = {site: dict(mean) for site in sites}
    reading = Reading(components=components)
    for name in mixed:
        weights = []
        into = []
        for site in sites:
            weight = states[site][name].detach()
            result = torch.empty(weight.shape, dtype=weight.dtype)
            aggregated[site][name] = result
            if plan[name].inputs_first:
                weight = weight.transpose(0, 1)
                result = result.transpose(0, 1)
            weights.append(weight)
            into.append(result)
        _aggregate_layer(weights, into, r, plan[name].kind == "classifier", reading)
    models = {}
    for site in sites:
        models[site] = {name: aggregated[site][name] for name in states[site]}
    return models
