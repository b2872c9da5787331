"""Predicted masks as files, with the task's label values, in the geometry of their image."""

import gzip
import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import DataError
from medflare.core.files import write_atomically
from medflare.core.text import JsonDict
from medflare.data.geometry import Grid, apply_turn, restore_grid
from medflare.data.reading import NIFTI, SLICES, is_dicom, series_grid, suffix
from medflare.data.targets import stored_values
from medflare.data.transforms import resized
from medflare.inference.dicom_seg import dicom_seg, unwritable
from medflare.inference.inputs import Input
from medflare.tasks.config import TaskConfig

_PNG_VALUES = range(2**16)


def in_place(
    probabilities: Tensor, size: tuple[int, ...], grids: tuple[Grid, Grid] | None, task: TaskConfig
) -> Tensor:
    """Probabilities (outputs, ...) on the pixels or voxels of the file; `grids` of a volume: as
    stored, and along the task's axes.
    """
    values = resized(probabilities[None], size)[0]
    if grids is None:
        return values
    return restore_grid(values, grids[1], grids[0], task)


def label_map(probabilities: Tensor, task: TaskConfig) -> np.ndarray:
    """Stored values of the predicted labels: (outputs, ...) on the CPU -> int64 (M, ...), with M =
    1 or one mask per label.

    As in the metrics, a binary or multilabel structure is where its probability exceeds 0.5, and a
    multiclass pixel is of its most probable class. A label with several values is written as the
    first one. If several structures share one mask (multilabel with `label_values`), a pixel gets
    its most probable value: with p_l the structures' independent probabilities, the value that
    maximizes the product of p_l over its structures and 1 - p_l over the others.
    """
    if task.mask_per_label:
        return (probabilities > 0.5).long().numpy()
    values = stored_values(task)
    if task.target == "multilabel":
        return _most_probable_value(probabilities, values).numpy()[None]
    if task.target == "binary":
        return torch.where(probabilities > 0.5, values[0][0], 0).numpy()
    first_values = torch.tensor([listed[0] for listed in values])
    return first_values[probabilities.argmax(dim=0)].numpy()[None]


def _most_probable_value(probabilities: Tensor, values: list[list[int]]) -> Tensor:
    """(C, ...) -> (...): see `label_map`."""
    candidates = [0, *sorted(set[int]().union(*values) - {0})]
    # has[v, l]: 1 if value v has structure l, else 0.
    rows = [[float(value in listed) for listed in values] for value in candidates]
    has = torch.tensor(rows, dtype=torch.float64)
    p = probabilities.double().clamp(1e-12, 1 - 1e-12)
    # log of the product: sum over l of has[v, l] log(p_l) + (1 - has[v, l]) log(1 - p_l).
    inside = torch.einsum("vc,c...->v...", has, p.log())
    outside = torch.einsum("vc,c...->v...", 1 - has, (1 - p).log())
    return torch.tensor(candidates)[(inside + outside).argmax(dim=0)]


def label_masks(mask: np.ndarray, task: TaskConfig) -> dict[str, np.ndarray]:
    """Foreground label -> bool (...), from the stored values (M, ...) of `label_map`."""
    if task.mask_per_label:
        return {label: part > 0 for label, part in zip(task.labels, mask, strict=True)}
    values_of = zip(task.labels, stored_values(task), strict=True)
    masks = {label: np.isin(mask[0], values) for label, values in values_of}
    if task.target == "multiclass":
        del masks[task.labels[0]]  # the background
    return masks


def sizes(mask: np.ndarray, task: TaskConfig, grid: Grid | None = None) -> JsonDict:
    """Columns of the table: pixels of every label, of a volume voxels, and millilitres if its
    spacing is known.
    """
    counts = {label: int(pixels.sum()) for label, pixels in label_masks(mask, task).items()}
    unit = "voxels" if grid else "pixels"
    columns: JsonDict = {f"{unit}_{label}": count for label, count in counts.items()}
    if grid and grid.voxel_volume is not None:
        for label, count in counts.items():
            columns[f"ml_{label}"] = f"{count * grid.voxel_volume / 1000:.6g}"
    return columns


def write_masks(
    source: Input,
    masks: np.ndarray,
    task: TaskConfig,
    out: Path,
    grid: Grid | None = None,
    *,
    seg: bool = False,
) -> list[Path]:
    """One file per mask: PNG for a picture, NIfTI for a volume.

    The file of a NIfTI volume has the stored affine, axes and header.

    Args:
        masks: int64 (M, rows, columns[, slices]) in the layout of `reading.read_image`, or
            (M, i, j, k) on `grid`.
        grid: of the stored volume, for a 3-D task.
        seg: write the masks of a DICOM series as one DICOM segmentation, NAME_seg.dcm.

    Returns:
        The files: NAME_seg.png, NAME_seg.nii.gz, or NAME_seg_LABEL... with a mask per label.

    Raises:
        DataError: `seg`, and the DICOM image cannot have a segmentation object; or values that a
            PNG cannot hold.
    """
    if seg and (source.path.is_dir() or is_dicom(source.path)):
        if masks.ndim < 4:
            raise unwritable(source.path, "it is not a series of slices with positions")
        if not grid:
            masks = np.swapaxes(masks, 1, 2)
        structures = label_masks(masks, task)
        file = out / f"{source.name}_seg.dcm"
        write_atomically(file, dicom_seg(source.path, structures, task))
        return [file]
    endings = _endings(task.labels) if len(masks) > 1 else [""]
    files = []
    for mask, ending in zip(masks, endings, strict=True):
        if suffix(source.path) in NIFTI or mask.ndim == 3:
            ending += ".nii.gz"
            content = _nifti(source.path, mask, grid)
        else:
            ending += ".png"
            content = _png(source.path, mask)
        file = out / f"{source.name}_seg{ending}"
        write_atomically(file, content)
        files.append(file)
    return files


def _endings(labels: Sequence[str]) -> list[str]:
    """Ends of the labels' file names: their letters and digits, numbered if two are equal."""
    plain = [re.sub(r"[\W_]+", "-", label) for label in labels]
    same = Counter(map(str.casefold, plain))  # some file systems ignore case
    endings = []
    for number, name in enumerate(plain, start=1):
        ending = f"_{name}"
        if same[name.casefold()] > 1:
            ending += f"_{number}"
        endings.append(ending)
    return endings


def _png(path: Path, mask: np.ndarray) -> bytes:
    from PIL import Image

    if mask.min(initial=0) not in _PNG_VALUES or mask.max(initial=0) not in _PNG_VALUES:
        raise DataError(
            f"{path}: label values from {mask.min()} to {mask.max()} do not fit a PNG mask (0 to "
            f"{_PNG_VALUES[-1]})"
        )
    content = io.BytesIO()
    compact = mask.astype(np.uint8 if mask.max(initial=0) < 256 else np.uint16)
    Image.fromarray(compact).save(content, format="PNG")
    return content.getvalue()


def _nifti(path: Path, mask: np.ndarray, grid: Grid | None) -> bytes:
    """A compressed NIfTI file of bytes, or of 32-bit integers if a value does not fit."""
    import nibabel

    fits = mask.min(initial=0) >= 0 and mask.max(initial=0) < 256
    compact = mask.astype(np.uint8 if fits else np.int32)
    voxels = compact if grid else np.swapaxes(compact, 0, 1)
    if suffix(path) in NIFTI:
        image = nibabel.load(path)
        header = image.header.copy()
        header["cal_min"] = header["cal_max"] = 0  # the image's display range
        if not grid and mask.ndim == 3:
            file_grid = Grid(image.shape[:3], image.affine)
            turn = file_grid.turned(SLICES).turn(file_grid.codes)
            voxels = apply_turn(voxels[None], turn)[0]
        volume = image.__class__(voxels, image.affine, header)
    else:
        stored = grid or series_grid(path)
        volume = nibabel.Nifti1Image(voxels, stored.affine if stored.has_affine else None)
    volume.set_data_dtype(compact.dtype)
    return gzip.compress(volume.to_bytes(), mtime=0)
