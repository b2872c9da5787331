"""Changes to spectra in pieces: what whole transforms give, wherever blocks and tiles end and wherever the pieces lie."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from medflare.core.rng import torch_generator
from medflare.core.states import memory_mapped
from medflare.methods.prr import spectra
from medflare.methods.prr.fourier import fourier_aggregate
from medflare.methods.prr.spectra import change_spectra


def normal(*shape: int, key: str = "weights") -> Tensor:
    return torch.randn(*shape, generator=torch_generator(3, key), dtype=torch.float64)


def mixed(found: list[Tensor], columns: slice) -> None:
    """A change that depends on all sites, and on where a column stands."""
    total = torch.stack(found).sum(dim=0)
    for place, spectrum in enumerate(found):
        spectrum.mul_(place).add_(total * torch.arange(columns.start, columns.stop))


def whole(weights: Tensor, kept: int, planes: bool) -> Tensor:
    """The same of matrices (K, R, C) with one transform of all."""
    axes = (-2, -1) if planes else (-1,)
    found = torch.fft.rfftn(weights, dim=axes)
    changes = torch.zeros_like(found)
    changes[..., :kept] = found[..., :kept]
    mixed([change[..., :kept] for change in changes], slice(0, kept))
    return weights + torch.fft.irfftn(changes, s=[weights.shape[axis] for axis in axes], dim=axes)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, and tiles of eight columns."""
    monkeypatch.setattr(spectra, "_BLOCK", 128)
    monkeypatch.setattr(spectra, "_TILE", 64)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize(("columns", "kept"), [(60, 8), (60, 16), (60, 21), (60, 30), (60, 31), (61, 21), (61, 31), (3, 2), (1, 1)])
def test_pieces_give_what_the_whole_gives(columns: int, kept: int, planes: bool) -> None:
    weights = normal(3, 11, columns)
    found = torch.full_like(weights, torch.nan)
    change_spectra(weights.unbind(), found.unbind(), 1, kept, mixed, planes=planes)
    torch.testing.assert_close(found, whole(weights, kept, planes), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("order", [(1, 2, 3, 0), (0, 2, 1, 3)])
def test_axes_in_another_order_come_back_in_their_own(order: tuple[int, ...]) -> None:
    weights = normal(2, 6, 5, 3, 2)
    found = torch.full_like(weights, torch.nan)
    turned = [weight.permute(order) for weight in weights]
    change_spectra(turned, [target.permute(order) for target in found], 2, 3, mixed)
    matrices = torch.stack([weight.flatten(2).flatten(0, 1) for weight in turned])
    expected = whole(matrices, 3, planes=True).view(2, *turned[0].shape)
    torch.testing.assert_close(torch.stack([target.permute(order) for target in found]), expected, rtol=1e-10, atol=1e-10)


def test_large_layers_in_files_end_in_the_same_bits(tmp_path: Path) -> None:
    for shape in ((2, 130, 257), (2, 64, 40, 3, 3)):
        weights = normal(*shape).float()
        with memory_mapped(tmp_path):
            filed = fourier_aggregate(weights, 0.4)
        assert filed.is_shared() and torch.equal(filed, fourier_aggregate(weights, 0.4))
