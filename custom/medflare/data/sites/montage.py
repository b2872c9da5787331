"""Test images as pictures, volumes by their middle slices, with the outlines of what is true and of what a model predicts."""

from collections.abc import Sequence
from io import BytesIO
from typing import Final

import numpy as np
import torch
from torch import Tensor

from medflare.data.sites.fitting import Predictor
from medflare.data.sites.scoring import asks_patients, evaluating, predict_each
from medflare.data.sites.site import Site
from medflare.tasks.metrics import Spacing, foreground, structures

_LARGE: Final = 320  # pixels of the longest side of a small picture
_SIDE: Final = 160  # pixels of the longest side of a slice
_TRUE: Final = (0, 255, 80)
_PREDICTED: Final = (255, 60, 200)


def montage(site: Site, predictor: Predictor, most: int = 4) -> bytes:
    """A PNG with a row for each of the first test volumes: their slices through the middle of the true foreground, else of the volume.

    Truth is outlined in green, the prediction over it in magenta. It shows patients and stays at the site.

    Args:
        site: with at least one test volume, of a segmentation task.
        predictor: as for `Site.score`.
        most: volumes.
    """
    return _png(np.concatenate([_planes(site, predictor, row) for row in range(min(most, len(site.data.test)))]))


def overlay(site: Site, predictor: Predictor, row: int) -> bytes:
    """A PNG of one test image, truth and prediction outlined as in `montage`; of a volume its slices.

    It shows a patient and stays at the site.

    Args:
        site: of a segmentation task.
        predictor: as for `Site.score`.
        row: of the image.
    """
    if site.task.spatial_dims == 3:
        return _png(_planes(site, predictor, row))
    image = site.data.test.image(row)
    colours = image if len(image) == 3 else image[:1].expand(3, *image.shape[1:])
    low, high = np.percentile(colours.numpy(), [0.5, 99.5])
    canvas = _enlarged(as_grey(colours.permute(1, 2, 0).numpy(), low, high))
    for mask, colour in zip(_masks(site, predictor, row), (_TRUE, _PREDICTED), strict=True):
        for structure in mask.numpy():
            draw_outline(canvas, np.ascontiguousarray(structure), colour)
    return _png(canvas)


def fullest_row(site: Site, patient: str) -> int:
    """The patient's test image with the most true foreground.

    Args:
        site: of a segmentation task.
        patient: one of its test patients.
    """
    data = site.data.test
    rows = [row for row, name in enumerate(data.patients) if name == patient]
    return max(rows, key=lambda row: int(structures(data.targets[row][None], site.task).sum()))


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    buffer = BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG", compress_level=4)  # a quarter of the default's time, and 1 % larger
    return buffer.getvalue()


def _enlarged(picture: np.ndarray) -> np.ndarray:
    """A small picture (H, W, 3) with its longest side at `_LARGE`."""
    from PIL import Image

    height, width = picture.shape[:2]
    scale = max(1.0, _LARGE / max(height, width))
    size = round(width * scale), round(height * scale)
    return np.array(Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR))


def _masks(site: Site, predictor: Predictor, row: int) -> list[Tensor]:
    """True and predicted masks of a test image, bool (C, ...) each."""
    data, task = site.data.test, site.task
    image = data.image(row)[None].to(site.device)
    if task.fit == "resize" and asks_patients(predictor, len(data)):
        rows = [other for other, name in enumerate(data.patients) if name == data.patients[row]]
        images = torch.stack([data.image(other) for other in rows]).to(site.device)
        with torch.no_grad(), evaluating(predictor):
            probabilities = predictor.together(images.split(site.scoring_batch)).float().cpu()[[rows.index(row)]]
    else:
        probabilities = predict_each(predictor, [image], task, site.scoring_batch)[0][None]
    return [structures(data.targets[row][None], task)[0], foreground(probabilities, task)[0]]


def _planes(site: Site, predictor: Predictor, row: int) -> np.ndarray:
    """The slices of a test volume, side by side."""
    masks, spacing = _masks(site, predictor, row), site.data.test.spacings[row] or (1.0,) * 3
    return np.concatenate([_plane(site.data.test.image(row)[0], masks, axis, spacing) for axis in (2, 1, 0)], axis=1)


def _plane(volume: Tensor, masks: Sequence[Tensor], axis: int, spacing: Spacing) -> np.ndarray:
    """One slice across an axis, in a square, with the outlines of both masks (C, X, Y, Z); its sides are as long as in the patient."""
    from PIL import Image

    others = [other for other in range(3) if other != axis]
    counts = masks[0].any(dim=0).sum(dim=others)
    place = int(counts.argmax()) if counts.any() else volume.shape[axis] // 2
    low, high = np.percentile(volume.numpy(), [0.5, 99.5])
    grey = as_grey(volume.select(axis, place).numpy(), low, high)
    sides = [volume.shape[other] * spacing[other] for other in others]
    width, height = (max(1, round(_SIDE * side / max(sides))) for side in sides)
    picture = Image.fromarray(_upright(grey)).resize((width, height), Image.Resampling.BILINEAR)
    canvas = np.zeros((_SIDE, _SIDE, 3), np.uint8)
    shown = np.repeat(np.asarray(picture)[..., None], 3, axis=2)
    for mask, colour in zip(masks, (_TRUE, _PREDICTED), strict=True):
        for structure in mask.select(axis + 1, place).numpy():
            draw_outline(shown, _upright(structure), colour)
    canvas[:height, :width] = shown
    return canvas


def as_grey(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Intensities as the bytes of a picture, of one channel or each of several.

    Args:
        values: of any shape.
        low: what is black.
        high: what is white.

    Returns:
        uint8, of the same shape.

    Examples:
        >>> as_grey(np.array([-1.0, 0.0, 0.5, 2.0]), 0.0, 1.0).tolist(), as_grey(np.zeros(1), 0.0, 0.0).tolist()
        ([0, 0, 127, 255], [0])
    """
    return (255 * (values - low) / max(high - low, 1e-6)).clip(0, 255).astype(np.uint8)


def draw_outline(canvas: np.ndarray, mask: np.ndarray, colour: tuple[int, int, int]) -> None:
    """Draw the border of a mask into a picture.

    Args:
        canvas: uint8 (H, W, 3), changed in place.
        mask: bool, of any size; enlarged to the picture's by the nearest pixel.
        colour: red, green, blue.
    """
    from PIL import Image
    from scipy import ndimage

    large = np.asarray(Image.fromarray(mask).resize((canvas.shape[1], canvas.shape[0]), Image.Resampling.NEAREST))
    canvas[large & ~ndimage.binary_erosion(large)] = colour


def _upright(plane: np.ndarray) -> np.ndarray:
    """Rows from the far end of the second axis to the near one: a patient in RAS stands and looks up."""
    return np.ascontiguousarray(plane.T[::-1])
