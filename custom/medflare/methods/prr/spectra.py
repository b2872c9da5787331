"""Changes to the spectra of large matrices, in pieces that fit the processor's cache: next to nothing is made beside the result.

Matrices are transformed along their rows block by block, and of every block only the columns that may change are kept. A few neighbouring
columns of all sites at a time are then transformed, changed, and transformed back before the next ones are touched. What has changed goes
back along the rows, and is added to the matrix.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from medflare.core.states import allocate

_BLOCK: Final = 2**21  # numbers transformed along rows at a time: enough that the tables, made for every call, cost little beside them
_TILE: Final = 2**18  # bins transformed along columns at a time: 2 MB, about a second-level cache; smaller tiles mean many small copies

Change = Callable[[list[Tensor], slice], None]


def change_spectra(weights: Sequence[Tensor], into: Sequence[Tensor], lead: int, kept: int, change: Change, *, planes: bool = True) -> None:
    """into_k = weights_k + F^-1(D_k), where D_k is made of the spectra F(weights_k) of all sites side by side.

    Args:
        weights: K real tensors of one shape, each taken as a matrix (R, C): its first `lead` axes are the rows, the others the columns.
        into: K tensors of that shape, whose memory is not that of the weights.
        lead: number of axes.
        kept: columns of the half spectrum (R, C // 2 + 1), from the first, where D_k is not 0.
        change: is given K spectra (r, c), and which columns c of the half spectrum these are; it writes D_k in their place.
        planes: whether to transform along both axes, so that r = R; else every row by itself, some rows at a time.
    """
    matrices = _Matrices(weights, lead)
    if planes:
        _change_planes(matrices, into, kept, change)
    else:
        _change_rows(matrices, into, kept, change)


class _Matrices:
    """The weights of K sites, some rows at a time."""

    def __init__(self, weights: Sequence[Tensor], lead: int):
        first = weights[0]
        self.weights = weights
        self.rows, self.columns = math.prod(first.shape[:lead]), math.prod(first.shape[lead:])
        half = first.dtype in (torch.float16, torch.bfloat16)
        self.dtype = torch.float32 if half else first.dtype  # the CPU has no FFT of half precision

    def blocks(self, numbers: int) -> Iterator[tuple[slice, slice]]:
        """Blocks of about so many numbers: indices of the first axis, and rows of the matrix."""
        length = len(self.weights[0])
        together = self.rows // length
        step = max(1, numbers // (together * self.columns))
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield slice(start, stop), slice(start * together, stop * together)

    def transformed(self, site: int, part: slice) -> Tensor:
        """(r, C // 2 + 1) of indices of the first axis: their rows, each transformed."""
        return torch.fft.rfft(self.weights[site][part].reshape(-1, self.columns).to(self.dtype))

    def move(self, site: int, part: slice, changes: Tensor, into: Tensor) -> None:
        """Write the same rows to their place in `into`, moved by changes of the transformed ones."""
        weights, target = self.weights[site][part], into[part]
        moved = torch.fft.irfft(changes, n=self.columns).view(weights.shape)
        if weights.stride(-1) > weights.stride(0):  # a matrix is transposed faster by itself than on the way
            weights, target = weights.movedim(-1, 0), target.movedim(-1, 0)
            moved = moved.flatten(0, -2).t().contiguous().view(weights.shape)
        torch.add(moved, weights, out=target)


def _change_rows(matrices: _Matrices, into: Sequence[Tensor], kept: int, change: Change) -> None:
    for part, _ in matrices.blocks(_BLOCK // len(into)):
        spectra = [matrices.transformed(site, part) for site in range(len(into))]
        change([spectrum[:, :kept] for spectrum in spectra], slice(0, kept))
        for site, spectrum in enumerate(spectra):
            spectrum[:, kept:] = 0
            matrices.move(site, part, spectrum, into[site])


def _change_planes(matrices: _Matrices, into: Sequence[Tensor], kept: int, change: Change) -> None:
    stored = [_Tiles(matrices, target, kept) for target in into]
    for site, tiles in enumerate(stored):
        for (part, _), block in zip(matrices.blocks(_BLOCK), tiles.blocks, strict=True):
            tiles.put(block, matrices.transformed(site, part))
    for columns in stored[0].all():
        spectra = [torch.fft.fft(tiles.tile(columns), dim=0) for tiles in stored]
        change(spectra, columns)
        for tiles, spectrum in zip(stored, spectra, strict=True):
            tiles.replace(columns, torch.fft.ifft(spectrum, dim=0))
    for site, tiles in enumerate(stored):
        for (part, _), block in zip(matrices.blocks(_BLOCK), tiles.blocks, strict=True):
            matrices.move(site, part, tiles.spectrum(block), into[site])


class _Tiles:
    """The kept columns of one site's transformed rows: block after block, and within a block by tiles of neighbouring columns.

    What a tile has of a block is one piece, so that going through all tiles reads every page of memory about once. A block lies where
    its rows of the result will lie: until these are written nobody needs that memory.

    Attributes:
        blocks: the memory of each, flat.
    """

    def __init__(self, matrices: _Matrices, into: Tensor, kept: int):
        self.kept, self.half = kept, matrices.columns // 2 + 1
        lines = max(1, _TILE // (8 * matrices.rows))
        self.width = 8 * (lines - 1 + lines % 2)  # an odd number of cache lines: powers of two would get in each other's way
        self.whole = kept // self.width  # tiles of that width; one more has the rest
        room = _room(matrices, into, kept)
        self.blocks = [room[rows].reshape(-1)[: (rows.stop - rows.start) * kept] for _, rows in matrices.blocks(_BLOCK)]

    def all(self) -> Iterator[slice]:
        """The columns of each tile."""
        return (slice(start, min(start + self.width, self.kept)) for start in range(0, self.kept, self.width))

    def put(self, block: Tensor, spectrum: Tensor) -> None:
        """Store the kept columns of a block's spectrum (r, C // 2 + 1)."""
        for stored, part in zip(self._stored(block), self._parts(spectrum), strict=True):
            stored.copy_(part)

    def spectrum(self, block: Tensor) -> Tensor:
        """(r, C // 2 + 1): a block's columns, and 0 where none was kept."""
        spectrum = torch.empty(len(block) // self.kept, self.half, dtype=block.dtype)
        spectrum[:, self.kept :] = 0
        for stored, part in zip(self._stored(block), self._parts(spectrum), strict=True):
            part.copy_(stored)
        return spectrum

    def tile(self, columns: slice) -> Tensor:
        """(R, c) of these columns."""
        return torch.cat(self._pieces(columns))

    def replace(self, columns: slice, tile: Tensor) -> None:
        """Store a tile in the place of the one that was there."""
        pieces = self._pieces(columns)
        for stored, piece in zip(pieces, tile.split([len(stored) for stored in pieces]), strict=True):
            stored.copy_(piece)

    def _pieces(self, columns: slice) -> list[Tensor]:
        each = [(block, len(block) // self.kept) for block in self.blocks]
        return [block[rows * columns.start : rows * columns.stop].view(rows, -1) for block, rows in each]

    def _stored(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """A block as tiles (t, r, width), and the rest of its columns (r, c)."""
        rows, end = len(block) // self.kept, self.whole * self.width
        return block[: rows * end].view(self.whole, rows, self.width), block[rows * end :].view(rows, self.kept - end)

    def _parts(self, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a spectrum."""
        end = self.whole * self.width
        return spectrum[:, :end].unflatten(1, (self.whole, self.width)).transpose(0, 1), spectrum[:, end : self.kept]


def _room(matrices: _Matrices, into: Tensor, kept: int) -> Tensor:
    """Complex numbers (R, at least `kept`)."""
    paired = matrices.columns % 2 == 0 and into.storage_offset() % 2 == 0
    if paired and 2 * kept <= matrices.columns and into.dtype == matrices.dtype and into.is_contiguous():
        return torch.view_as_complex(into.view(matrices.rows, -1, 2))
    return allocate((matrices.rows, kept), matrices.dtype.to_complex())
