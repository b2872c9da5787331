"""Volumes as pictures: middle slices along three axes with the outlines of what is true and of what a model predicts."""

from collections.abc import Sequence
from io import BytesIO
from typing import Final

import numpy as np
import torch
from torch import Tensor

from medflare.data.sites.fitting import Predictor
from medflare.data.sites.scoring import predict, predict_each
from medflare.data.sites.site import Site
from medflare.data.splits import Batch
from medflare.tasks.metrics import Spacing, foreground, structures

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
    from PIL import Image

    data, task = site.data.test, site.task
    rows = []
    for row in range(min(most, len(data))):
        image = data.image(row)[None].to(site.device)
        if task.fit == "patch":
            probabilities = predict_each(predictor, [image], task, site.scoring_batch)[0][None]
        else:
            probabilities = predict(predictor, [Batch(image, image, torch.tensor([row]))], task.outputs)
        masks = [structures(data.targets[row][None], task)[0], foreground(probabilities, task)[0]]
        spacing = data.spacings[row] or (1.0,) * 3
        rows.append(np.concatenate([_plane(data.image(row)[0], masks, axis, spacing) for axis in (2, 1, 0)], axis=1))
    buffer = BytesIO()
    Image.fromarray(np.concatenate(rows)).save(buffer, format="PNG")
    return buffer.getvalue()


def _plane(volume: Tensor, masks: Sequence[Tensor], axis: int, spacing: Spacing) -> np.ndarray:
    """One slice across an axis, in a square, with the outlines of both masks (C, X, Y, Z); its sides are as long as in the patient."""
    from PIL import Image

    others = [other for other in range(3) if other != axis]
    counts = masks[0].any(dim=0).sum(dim=others)
    place = int(counts.argmax()) if counts.any() else volume.shape[axis] // 2
    low, high = np.percentile(volume.numpy(), [0.5, 99.5])
    grey = (255 * (volume.select(axis, place).numpy() - low) / max(high - low, 1e-6)).clip(0, 255).astype(np.uint8)
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
