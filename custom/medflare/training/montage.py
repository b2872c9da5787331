"""PNG pictures with the outlines of masks: test images with a model's prediction, and rows of
training images of each site.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medflare.core.palette import structure_colours
from medflare.core.pictures import png
from medflare.data.loading import SiteData
from medflare.data.progress import with_progress
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Spacing, foreground, structures
from medflare.training.batches import rows_of_patients
from medflare.training.patches import Predictor
from medflare.training.scoring import evaluating, predict_each, predicts_by_patient
from medflare.training.site import Site

_SIDE = 320  # pixels of the longest side of a picture
_VOLUME_SIDE = 240  # of each of the three slices of a volume
_SMALL = 96  # pixels of a side in the contact sheet
_COLUMNS = 12
_OPAQUE = 0.45  # of a prediction over the image
_WHITE = (255, 255, 255)
_OPPOSITE = dict(zip("RLAPSI", "LRPAIS", strict=True))
# Direction of the axis across a plane -> the plane.
_PLANES = {
    "S": "axial",
    "I": "axial",
    "A": "coronal",
    "P": "coronal",
    "R": "sagittal",
    "L": "sagittal",
}
_SCALES = (100, 50, 20, 10, 5, 2, 1)  # mm


def overlay(site: Site, predictor: Predictor, row: int) -> bytes:
    """A PNG of one test image: the prediction filled, the truth an outline with a white edge.

    The colours are those of `palette.structure_colours`. The picture shows a patient and must stay
    at the site. Of a volume it shows the three slices with most true foreground, each with its
    plane, the patient's directions at its edges, and a scale bar where the spacing is known.
    """
    return photograph(site, row, _masks(site, predictor, row))


def photograph(site: Site, row: int, masks: Sequence[Tensor] = ()) -> bytes:
    """A PNG of one test image, alone or with masks as in `_picture`. It shows a patient and must
    stay at the site.
    """
    data = site.data.test
    image = data.images[row]
    limits = tuple(np.percentile(image.numpy(), [0.5, 99.5]))
    side = _SIDE if image.ndim == 3 else _VOLUME_SIDE
    spacing = data.spacings[row] if data.spacings else None
    return png(_picture(image, masks, spacing, limits, side, site.task.orientation))


def contact_sheet(data: Mapping[str, SiteData], task: TaskConfig) -> bytes:
    """A PNG with a row of training (else test) images for each site; all intensities have one
    scale, so that shift is visible.
    """
    from PIL import Image

    splits = {}
    sample = []
    for name, site in data.items():
        split = site.train if len(site.train) else site.test
        splits[name] = split
        drawn = range(0, len(split), max(1, len(split) // 50))
        for row in with_progress(
            drawn, len(drawn), f"site {name}, images for the scale of thumbnails"
        ):
            sample.append(split.images[row].numpy().ravel())
    limits = tuple(np.percentile(np.concatenate(sample), [0.5, 99.5]))
    sheet = Image.new("RGB", (_COLUMNS * _SMALL, len(splits) * _SMALL), "white")
    for top, (name, split) in enumerate(splits.items()):
        rows = np.linspace(0, len(split) - 1, min(_COLUMNS, len(split))).astype(int).tolist()
        for column, row in enumerate(with_progress(rows, len(rows), f"site {name}, thumbnails")):
            masks = []
            if task.kind == "segmentation":
                masks = [structures(split.targets[row][None], task)[0]]
            picture = _picture(split.images[row], masks, None, limits, _SMALL)
            first = picture[:, :_SMALL]  # slice of a volume
            sheet.paste(Image.fromarray(first), (column * _SMALL, top * _SMALL))
    return png(np.array(sheet))


def fullest_row(site: Site, patient: str) -> int:
    """The row of the patient's test image with the most true foreground."""
    data = site.data.test
    rows = rows_of_patients(data.patients)[patient]
    return max(rows, key=lambda row: int(structures(data.targets[row][None], site.task).sum()))


def _masks(site: Site, predictor: Predictor, row: int) -> list[Tensor]:
    """True and predicted masks of a test image, bool (C, ...) each."""
    data = site.data.test
    task = site.task
    if task.image_mode == "resize" and predicts_by_patient(predictor):
        rows = rows_of_patients(data.patients)[data.patients[row]]
        images = torch.stack([data.images[other] for other in rows]).to(site.device)
        with torch.no_grad(), evaluating(predictor):
            of_patient = predictor.predict_patient(images.split(site.scoring_batch))
            probabilities = of_patient.float().cpu()[[rows.index(row)]]
    else:
        image = data.images[row][None].to(site.device)
        probabilities = predict_each(predictor, [image], task, site.scoring_batch)[0][None]
    return [structures(data.targets[row][None], task)[0], foreground(probabilities, task)[0]]


def _picture(
    image: Tensor,
    masks: Sequence[Tensor],
    spacing: Spacing | None,
    limits: tuple[float, ...],
    side: int,
    orientation: str = "",
) -> np.ndarray:
    """An image (C, H, W) as uint8 (h, w, 3); of a volume (C, X, Y, Z) three orthogonal slices in
    squares, with the volume's proportions.

    Args:
        masks: truth and prediction, bool (S, ...) each; empty: the image alone.
        orientation: the directions of a volume's axes, to label them; "": no labels.
    """
    if image.ndim == 3:
        return tile(image, masks, (1.0, 1.0), limits, side)
    from PIL import Image

    gaps = spacing or (1.0,) * 3
    tiles = []
    for axis, right, up in ((2, 0, 1), (1, 0, 2), (0, 1, 2)):
        index = image.shape[axis + 1] // 2
        if masks and masks[0].any():
            index = int(masks[0].any(dim=0).sum(dim=(right, up)).argmax())
        slices = [part.select(axis + 1, index).transpose(1, 2).flip(1) for part in (image, *masks)]
        view = tile(slices[0], slices[1:], (gaps[up], gaps[right]), limits, side)
        millimetres = image.shape[right + 1] * gaps[right] / view.shape[1] if spacing else 0.0
        # In the middle of a black square: its letters have room beside a flat slice.
        square = Image.new("RGB", (side, side))
        square.paste(Image.fromarray(view), ((side - view.shape[1]) // 2, (side - len(view)) // 2))
        if orientation:
            plane = _PLANES[orientation[axis]]
            _label(square, plane, orientation[right], orientation[up], millimetres)
        tiles.append(np.array(square))
    return np.concatenate(tiles, axis=1)


def _label(picture: Any, plane: str, right: str, up: str, millimetres: float) -> None:
    """Write its plane into a slice, directions ("RLAPSI") of columns and rows at its edges, and a
    bar; millimetres of a pixel, 0 if unknown.
    """
    from PIL import ImageDraw, ImageFont

    draw = ImageDraw.Draw(picture)
    width, height = picture.size
    font = ImageFont.load_default(size=16)
    write = partial(draw.text, font=font, fill="white", stroke_width=2, stroke_fill="black")
    write((3, 2), plane)
    write((width - 4, height // 2), right, anchor="rm")
    write((4, height // 2), _OPPOSITE[right], anchor="lm")
    write((width // 2, 2), up, anchor="ma")
    write((width // 2, height - 3), _OPPOSITE[up], anchor="md")
    lengths = [length for length in _SCALES if millimetres and length / millimetres < width / 3]
    if lengths:
        end = 4 + lengths[0] / millimetres
        draw.rectangle([2, height - 8, end + 2, height - 3], fill="black")
        draw.rectangle([4, height - 7, end, height - 4], fill="white")
        write((4, height - 10), f"{lengths[0]} mm", anchor="ld")


def tile(
    plane: Tensor,
    masks: Sequence[Tensor],
    gaps: tuple[float, float],
    limits: tuple[float, ...],
    side: int,
) -> np.ndarray:
    """A plane (C, H, W) with truth and prediction, masks (S, H, W) each, as uint8 (h, w, 3).

    `limits` are the intensities of black and white, `side` is the longer side in pixels. A
    prediction's edge has the full colour: its fill mixes with the image, for example to grey on a
    red fundus.
    """
    from PIL import Image, ImageColor
    from scipy import ndimage

    channels = plane if len(plane) == 3 else plane[:1].expand(3, *plane.shape[1:])
    colours = channels.permute(1, 2, 0).numpy()
    contrast = max(limits[1] - limits[0], 1e-6)
    scaled = (255 * (colours - limits[0]) / contrast).clip(0, 255).astype(np.uint8)
    tall = plane.shape[1] * gaps[0]
    wide = plane.shape[2] * gaps[1]
    height = max(1, round(side * tall / max(tall, wide)))
    width = max(1, round(side * wide / max(tall, wide)))
    canvas = np.array(Image.fromarray(scaled).resize((width, height), Image.Resampling.BILINEAR))

    def resized(mask: Tensor) -> np.ndarray:
        picture = Image.fromarray(np.ascontiguousarray(mask.numpy()))
        return np.asarray(picture.resize((width, height), Image.Resampling.NEAREST))

    truth, *predictions = masks or [torch.zeros(0, 1, 1, dtype=torch.bool)]
    pairs = structure_colours(len(truth))
    for prediction in predictions:
        for structure, (_, colour) in zip(prediction, pairs, strict=True):
            filled = resized(structure)
            full = np.array(ImageColor.getrgb(colour))
            canvas[filled] = (1 - _OPAQUE) * canvas[filled] + _OPAQUE * full
            canvas[filled & ~ndimage.binary_erosion(filled)] = full
    for structure, (colour, _) in zip(truth, pairs, strict=True):
        line, edge = _outline(resized(structure), max(1, side // 160))
        canvas[edge] = _WHITE
        canvas[line] = ImageColor.getrgb(colour)
    return canvas


def _outline(mask: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """A line around a mask, and the edge of one pixel around the line.

    Both are outside the mask, so that the prediction in a thin vessel stays visible. At the border
    of the picture the line is inside.
    """
    from scipy import ndimage

    around = ndimage.binary_dilation(mask, iterations=width)
    border = np.ones_like(mask)
    border[width:-width, width:-width] = False
    line = (around & ~mask) | (mask & border)
    edge = ndimage.binary_dilation(around) & ~around
    return line, edge
