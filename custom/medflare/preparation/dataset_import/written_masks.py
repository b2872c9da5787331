"""Masks that an import writes, since the folder has none of this form."""

import gzip
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np

from medflare.core.errors import DataError
from medflare.data.reading import NIFTI, PICTURES, explained, read_stored, stem, suffix
from medflare.training.montage import png


def can_be_written(file: Path) -> bool:
    """Whether a mask can be written that fits the grid of an image or mask."""
    return suffix(file) in (*PICTURES, *NIFTI)


def path_of_mask(file: Path, ending: str) -> Path:
    """Where to write a mask, beside the image or mask that it is of; DataError for a file there."""
    kind = ".nii.gz" if suffix(file) in NIFTI else ".png"
    path = file.with_name(f"{stem(file)}_{ending}{kind}")
    if path.exists():
        raise DataError(f"{path} has the name of a mask that the import writes; take it out")
    return path


def mask_of(
    file: Path, is_structure: Callable[[np.ndarray], np.ndarray], *, of_image: bool = False
) -> bytes:
    """The mask of the pixels or voxels that `is_structure` tells, as PNG (0 and 255) or as NIfTI
    (0 and 1), on the grid of a mask, or with `of_image` of an image.
    """
    if suffix(file) in NIFTI:
        with explained(file):
            image = nibabel.load(file)
            voxels = is_structure(np.asarray(image.dataobj)).astype(np.uint8)
            mask = nibabel.Nifti1Image(voxels, image.affine, image.header, dtype=np.uint8)
        return gzip.compress(mask.to_bytes(), mtime=0)
    stored = read_stored(file, mask=not of_image)
    pixels = is_structure(stored.as_slices(stored.array)[0])
    return png(np.where(pixels, 255, 0).astype(np.uint8))


def empty_mask(image: Path) -> bytes:
    """A mask without any structure, on the grid of an image."""
    return mask_of(image, lambda pixels: np.zeros(pixels.shape[:3], bool), of_image=True)
