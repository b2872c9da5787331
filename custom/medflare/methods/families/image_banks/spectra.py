"""Banks of Fourier amplitudes: ELCFS and HarmoFL."""

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, fft, nn
from torch.func import functional_call
from torch.optim import Optimizer

from medflare.methods import FeatureNetwork, Plan, StateDict, TensorSpec, param, strict_dataclass
from medflare.methods.families.image_banks.bank import (
    BankHyper,
    BankSite,
    PreparedSite,
    prepared_model,
)
from medflare.methods.families.local_terms.fedsam import sharpness_aware_epochs
from medflare.methods.parts.tensors import named_gradients
from medflare.training.epochs import named_trainable


def half_widths(size: Sequence[int], window: float) -> list[int]:
    """floor(window N) of each axis of N pixels."""
    return [math.floor(window * pixels) for pixels in size]


def low_band(size: Sequence[int], half: Sequence[int]) -> tuple[Tensor, ...]:
    """The bins |k| <= half-width of each axis, as indices of the spectrum of `torch.fft.rfftn`."""
    axes = []
    for axis, (pixels, most) in enumerate(zip(size, half, strict=True)):
        frequencies = fft.rfftfreq if axis == len(size) - 1 else fft.fftfreq
        k = (frequencies(pixels) * pixels).round().abs()
        axes.append((k <= most).nonzero().flatten())
    return torch.meshgrid(*axes, indexing="ij")


def amplitudes(images: Tensor, window: float) -> Tensor:
    """The low band of the amplitude spectrum, (N, C, *band), of images (N, C, ...)."""
    size = images.shape[2:]
    band = (..., *low_band(size, half_widths(size, window)))
    return fft.rfftn(images, dim=tuple(range(2, images.ndim)))[band].abs()


def with_amplitude(images: Tensor, amplitude: Tensor, share: Tensor) -> Tensor:
    """F^-1 of (1 - λ) A + λ A' in the low band and A elsewhere, with the phase of the images.

    It follows the authors' code of ELCFS, whose λ is a multiple of 0.1. HarmoFL has λ = 1.

    Args:
        images: (N, C, ...).
        amplitude: A' (N or 1, C, *band); its shape says how wide the band is.
        share: λ, that broadcasts to A'.
    """
    size = images.shape[2:]
    axes = tuple(range(2, images.ndim))
    *others, last = amplitude.shape[2:]
    band = (..., *low_band(size, [*(bins // 2 for bins in others), last - 1]))
    spectrum = fft.rfftn(images, dim=axes)
    low = spectrum[band]
    spectrum[band] = torch.polar(torch.lerp(low.abs(), amplitude, share), low.angle())
    return fft.irfftn(spectrum, s=size, dim=axes)


def _spectrum(plan: Plan, *axes: int) -> StateDict:
    """The shape of amplitudes behind further axes."""
    size = plan.task.size
    shape = low_band(size, half_widths(size, plan.site_hyper.window))[0].shape
    return {"amplitude": torch.empty(*axes, plan.task.image_channels, *shape, device="meta")}


# -- ELCFS -----------------------------------------------------------------------------------------


@strict_dataclass
class ELCFSHyper(BankHyper):
    """Amplitudes and episodes."""

    window: float = param(
        0.1,
        "half-width of the exchanged band, as a share of each side",
        symbol="α",
        source="authors' code",
        low=0,
        high=0.5,
    )
    images: int = param(
        16, "amplitudes that a site shares; the paper: of all images", low=1, high=2000
    )
    step: float = param(1e-3, "inner step of an episode", symbol="β", source="authors' code", low=0)


class ELCFSSite(BankSite[ELCFSHyper]):
    """ELCFS (Liu et al., FedDG, CVPR 2021), without its boundary loss.

        min_θ  L(x; θ) + L(x'; θ - β ∇L(x; θ))

    x' has low-frequency amplitudes mixed with those of an image of another site, λ ~ U(0, 1). As in
    the authors' code, the inner gradient is a constant. With `minimum_patients` an amplitude is the
    mean of a group of patients, see `group_means`.
    """

    accumulates = False
    entry = TensorSpec(
        "survey",
        "brightness and coarse contrast of some training images (amplitudes of low spatial "
        "frequencies, without phases), which all sites receive",
        lambda plan: _spectrum(plan, plan.site_hyper.images),
        measured="train",
    )

    def described(self) -> StateDict:
        describe = partial(amplitudes, window=self.hyper.window)
        return {"amplitude": self.group_means(self.hyper.images, describe)}

    def batch_loss(
        self, network: nn.Module, images: Tensor, targets: Tensor, random: torch.Generator
    ) -> Tensor:
        """The loss of an episode; without other sites in the bank, the task's loss."""
        loss = self.site.loss(network(images), targets)
        others = [entry for site, entry in self.bank.items() if site != self.site.name]
        if not others:
            return loss
        bank = torch.cat([entry["amplitude"] for entry in others])
        drawn = torch.randint(len(bank), (len(images),), generator=random)
        share = torch.rand(len(images), *[1] * (images.ndim - 1), generator=random).to(images)
        exchanged = with_amplitude(images, bank[drawn].to(images), share)
        weights = named_trainable(network)
        gradients = named_gradients(loss, weights, retain_graph=True)
        fast = {name: w - self.hyper.step * gradients[name] for name, w in weights.items()}
        return loss + self.site.loss(functional_call(network, fast, (exchanged,)), targets)


# -- HarmoFL ---------------------------------------------------------------------------------------


@strict_dataclass
class HarmoFLHyper(BankHyper):
    """Normalisation and perturbation."""

    window: float = param(
        0.5,
        "half-width of the normalised band, as a share of each side; 0.5: all of it; 0, as in the "
        "authors' code: the mean alone",
        source="Sec. 3",
        low=0,
        high=0.5,
    )
    alpha: float = param(
        0.05, "length of the perturbation of the weights", symbol="α", source="authors' code", low=0
    )
    kind: ClassVar[str] = "amplitude_normalised"
    sends_mean: ClassVar[bool] = True


def amplitude_normalised(images: Tensor, amplitude: Tensor) -> Tensor:
    """Images (N, C, ...) with the amplitude (C, *band) of all sites; the phases stay."""
    return with_amplitude(images, amplitude[None], torch.ones_like(amplitude[None]))


class HarmoFLSite(PreparedSite[HarmoFLHyper]):
    """HarmoFL (Jiang et al., AAAI 2022): all images get one amplitude, weights are perturbed.

    The amplitude is the mean over the sites of their mean over the training images; the authors'
    code has a running mean of the first round, then fixed. Every step is taken at w along the
    gradient at w + α g / ||g||, as FedSAM's.
    """

    accumulates = False
    change = staticmethod(amplitude_normalised)
    entry = TensorSpec(
        "survey",
        "mean amplitude spectrum of the training images, for the mean of all sites",
        _spectrum,
        measured="train",
    )

    def described(self) -> StateDict:
        total = torch.zeros(())
        count = 0
        for batch in self.site.ordered("train"):
            total = total + amplitudes(batch.images, self.hyper.window).sum(dim=0).cpu().double()
            count += len(batch.images)
        return {"amplitude": (total / count).float()}

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        """Epochs of perturbed steps; returns the mean task loss before the perturbation."""
        prepared = self.prepared(model)
        return sharpness_aware_epochs(self.site, prepared, optimizer, round, self.hyper.alpha)


# The builder of final models of kind "amplitude_normalised".
amplitude_normalised_model = partial(prepared_model, change=amplitude_normalised)
