"""Predicted masks as files: label values as the task's files use them, in the geometry of the image that they belong to."""

import gzip
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from medflare.core.errors import DataError
from medflare.core.store import write_atomically
from medflare.data.geometry import Grid, restore_grid
from medflare.data.reading import NIFTI, is_dicom, series_grid, suffix
from medflare.data.targets import stored_values
from medflare.inference.dicom_seg import dicom_seg, unwritable
from medflare.inference.inputs import Input
from medflare.tasks.config import TaskConfig

_PNG_VALUES = range(2**16)


def restored(probabilities: Tensor, size: tuple[int, ...]) -> Tensor:
    """Probabilities (N, C, ...) at an image's stored size: interpolated linearly, or by area averaging where that is smaller.

    Both keep the corners of the picture in place, as the resizing before the network does.

    Args:
        probabilities: on the network's grid.
        size: (h, w) in pixels, or three sides in voxels.

    Returns:
        (N, C, *size).
    """
    if tuple(probabilities.shape[2:]) == tuple(size):
        return probabilities
    if all(side <= old for side, old in zip(size, probabilities.shape[2:], strict=True)):
        return functional.interpolate(probabilities, size, mode="area")
    return functional.interpolate(probabilities, size, mode="bilinear" if len(size) == 2 else "trilinear", align_corners=False)


def in_place(probabilities: Tensor, size: tuple[int, ...], grids: tuple[Grid, Grid] | None, task: TaskConfig) -> Tensor:
    """Probabilities (outputs, ...) on the network's grid, where the image has its pixels or voxels as stored.

    Args:
        grids: of a volume: where its voxels lie as stored, and along the task's axes.
        task: gives these axes.
    """
    values = restored(probabilities[None], size)[0]
    if grids is None:
        return values
    stored, here = grids
    return restore_grid(values, here, stored, task)


def label_map(probabilities: Tensor, task: TaskConfig) -> np.ndarray:
    """Stored values of the predicted labels: (outputs, ...) -> int64 (M, ...), M = 1, or one mask per label.

    As the metrics have it, a binary or multilabel structure is where its probability exceeds one half, and a multiclass pixel
    is of its most probable class. A label with several values is written as the first one. Where several structures share one
    mask (multilabel with `label_values`), a pixel gets its most probable value: with p_l the structures' independent
    probabilities, the value that maximises the product of p_l over the structures that it means and 1 - p_l over the others.
    Wherever a value exists for exactly the structures above one half, it is that one.

    Args:
        task: gives target, labels and their stored values.
    """
    if task.target == "multilabel" and not task.label_values:
        return (probabilities > 0.5).long().cpu().numpy()
    values = stored_values(task)
    if task.target == "multilabel":
        return _most_probable_value(probabilities, values).cpu().numpy()[None]
    if task.target == "binary":
        return torch.where(probabilities > 0.5, values[0][0], 0).cpu().numpy()
    return torch.tensor([listed[0] for listed in values])[probabilities.argmax(dim=0).cpu()].numpy()[None]


def _most_probable_value(probabilities: Tensor, values: list[list[int]]) -> Tensor:
    """(C, ...) -> (...): see `label_map`."""
    candidates = [0, *sorted({value for listed in values for value in listed} - {0})]
    meant = torch.tensor([[float(value in listed) for listed in values] for value in candidates], dtype=torch.float64)
    p = probabilities.cpu().double().clamp(1e-12, 1 - 1e-12)
    likelihood = torch.einsum("vc,c...->v...", meant, p.log()) + torch.einsum("vc,c...->v...", 1 - meant, (1 - p).log())
    return torch.tensor(candidates)[likelihood.argmax(dim=0)]


def label_masks(mask: np.ndarray, task: TaskConfig) -> dict[str, np.ndarray]:
    """Where every foreground label is in what `label_map` gave for one picture or volume.

    Args:
        mask: (M, ...) of stored values.
        task: gives target, labels and their stored values.

    Returns:
        Label -> bool (...), the background left out.
    """
    if task.target == "multilabel" and not task.label_values:
        return {label: part > 0 for label, part in zip(task.labels, mask, strict=True)}
    found = {label: np.isin(mask[0], listed) for label, listed in zip(task.labels, stored_values(task), strict=True)}
    return dict(list(found.items())[task.target == "multiclass" :])  # there, the first label is the background


def pixels(mask: np.ndarray, task: TaskConfig) -> dict[str, int]:
    """Pixels of every foreground label in what `label_map` gave for one picture or volume.

    Args:
        mask: (M, ...) of stored values.
        task: gives target, labels and their stored values.
    """
    return {label: int(found.sum()) for label, found in label_masks(mask, task).items()}


def sizes(counts: dict[str, int], grid: Grid | None) -> dict[str, Any]:
    """Columns of the table: pixels of every label; of a volume, voxels, and millilitres where the file says how large a voxel is.

    Args:
        counts: from `pixels`.
        grid: where the voxels of a volume lie as stored.
    """
    if grid is None:
        return {f"pixels_{label}": count for label, count in counts.items()}
    voxel = math.prod(grid.spacing or ()) / 1000
    volumes = {f"ml_{label}": f"{count * voxel:.6g}" for label, count in counts.items() if grid.known}
    return {**{f"voxels_{label}": count for label, count in counts.items()}, **volumes}


def write_masks(
    source: Input, masks: np.ndarray, task: TaskConfig, out: Path, grid: Grid | None = None, *, seg: bool = False
) -> list[Path]:
    """One file per mask: PNG for a picture; NIfTI with the stored affine, axes and header for NIfTI; NIfTI for a DICOM volume.

    Args:
        source: the image that they belong to.
        masks: int64 (M, rows, columns[, slices]) laid out as `readers.read_image` gives the image, or (M, i, j, k) on `grid`.
        task: gives the labels, for the files' names.
        grid: where the voxels of a volume lie as stored, for a task of volumes.
        seg: write a DICOM series' masks as one DICOM segmentation, NAME_seg.dcm.

    Returns:
        The files, named after the input: NAME_seg.png, NAME_seg.nii.gz, or NAME_seg_LABEL... with a mask per label.

    Raises:
        DataError: `seg`, and the image is DICOM and can have no segmentation object; or values that a PNG cannot hold.
    """
    if seg and source.path.is_file() and is_dicom(source.path):
        raise unwritable(source.path, "it is no series of slices that have a place each")
    if seg and source.path.is_dir():
        structures = label_masks(masks if grid else np.swapaxes(masks, 1, 2), task)
        file = out / f"{source.name}_seg.dcm"
        write_atomically(file, dicom_seg(source.path, structures, grid.affine if grid else series_grid(source.path).affine, task))
        return [file]
    files = []
    for mask, label in zip(masks, _endings(task.labels) if len(masks) > 1 else [""], strict=True):
        nifti = suffix(source.path) in NIFTI or mask.ndim == 3
        file = out / f"{source.name}_seg{label}{'.nii.gz' if nifti else '.png'}"
        write_atomically(file, _nifti(source.path, mask, grid) if nifti else _png(source.path, mask))
        files.append(file)
    return files


def _endings(labels: Sequence[str]) -> list[str]:
    """What sets the names of the labels' files apart, letters and digits of any script; numbered where nothing else does."""
    plain = [re.sub(r"[\W_]+", "-", label) for label in labels]
    same = Counter(map(str.casefold, plain))  # file systems may not tell large letters from small ones
    return [f"_{name}_{number}" if same[name.casefold()] > 1 else f"_{name}" for number, name in enumerate(plain, start=1)]


def _png(path: Path, mask: np.ndarray) -> bytes:
    from PIL import Image

    if mask.min(initial=0) not in _PNG_VALUES or mask.max(initial=0) not in _PNG_VALUES:
        held = f"label values from {mask.min()} to {mask.max()} do not fit a PNG mask (0 to {_PNG_VALUES[-1]})"
        raise DataError(f"{path}: {held}; give the image as NIfTI, or train with other label_values")
    content = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8 if mask.max(initial=0) < 256 else np.uint16)).save(content, format="PNG")
    return content.getvalue()


def _nifti(path: Path, mask: np.ndarray, grid: Grid | None) -> bytes:
    """A compressed NIfTI file of bytes, or of 32-bit integers where values do not fit a byte."""
    import nibabel

    compact = mask.astype(np.uint8 if mask.min(initial=0) >= 0 and mask.max(initial=0) < 256 else np.int32)
    if suffix(path) in NIFTI:
        image = nibabel.load(path)
        header = image.header.copy()
        header["cal_min"] = header["cal_max"] = 0  # the image's display range
        volume = image.__class__(compact if grid else _as_stored(compact, image.affine), image.affine, header)
    else:
        lies = grid or series_grid(path)
        voxels = compact if grid else np.swapaxes(compact, 0, 1)
        volume = nibabel.Nifti1Image(voxels, lies.affine if lies.known else None)  # a header without a code says that nobody knows
    volume.set_data_dtype(compact.dtype)
    return gzip.compress(volume.to_bytes(), mtime=0)


def _as_stored(mask: np.ndarray, affine: np.ndarray) -> np.ndarray:
    """Undoes what `readers` does to a NIfTI volume: rows, columns and slices in LPS back to the axes of the file."""
    from nibabel import orientations

    if mask.ndim == 2:
        return mask.T
    lps = orientations.axcodes2ornt(("L", "P", "S"))
    stored = orientations.io_orientation(affine)
    return orientations.apply_orientation(np.swapaxes(mask, 0, 1), orientations.ornt_transform(lps, stored))
