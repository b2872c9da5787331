"""A contact sheet: a row of images per site with the outlines of their masks, to see what a federation looks like."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from medflare.core.store import write_atomically
from medflare.data.sites.montage import as_grey, draw_outline
from medflare.data.splits import SiteData, Split, middle_slice
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import structures

_COLUMNS = 12
_SIDE = 96  # pixels of a thumbnail
_COLOURS = ((0, 255, 80), (60, 130, 255), (255, 60, 200), (255, 220, 0))  # outlines by label


def write_contact_sheet(path: Path, data: Mapping[str, SiteData], task: TaskConfig) -> Path:
    """Writes a PNG with one row of training images per site; intensities are scaled alike at all sites, so shift shows.

    Args:
        path: of the PNG file.
        data: site -> its splits; the test split stands in where a site has no training images.
        task: decides how masks are drawn.
    """
    splits = {name: site.train if len(site.train) else site.test for name, site in data.items()}
    sampled = [(split, row) for split in splits.values() for row in range(0, len(split), max(1, len(split) // 50))]
    sample = np.concatenate([split.image(row).numpy().ravel() for split, row in sampled])
    low, high = np.percentile(sample, [0.5, 99.5])
    strip = 16  # height of the caption
    sheet = Image.new("RGB", (_COLUMNS * _SIDE, len(splits) * (_SIDE + strip)), (255, 255, 255))
    pen = ImageDraw.Draw(sheet)
    for row, (name, split) in enumerate(splits.items()):
        top = row * (_SIDE + strip)
        caption = f"{name}: {len(split)} images. {task.source}"
        pen.text((4, top + 2), caption, fill=(0, 0, 0))
        for column, number in enumerate(np.linspace(0, len(split) - 1, min(_COLUMNS, len(split))).astype(int)):
            sheet.paste(_thumbnail(split, int(number), task, float(low), float(high)), (column * _SIDE, top + strip))
    buffer = BytesIO()
    sheet.save(buffer, format="PNG")
    write_atomically(path, buffer.getvalue())
    return path


def _thumbnail(split: Split, number: int, task: TaskConfig, low: float, high: float) -> Image.Image:
    """An image, or of a volume the slice with most foreground, else the middle one."""
    shown, masks = split.image(number), None
    if task.kind == "segmentation":
        masks = structures(split.targets[number][None], task)[0]
        if task.spatial_dims == 3:
            place = int(masks.sum(dim=(0, 1, 2)).argmax()) if masks.any() else masks.shape[-1] // 2
            shown, masks = shown[..., place], masks[..., place]
    scaled = as_grey(middle_slice(shown).numpy(), low, high)
    coloured = scaled if len(scaled) == 3 else np.repeat(scaled[:1], 3, axis=0)
    picture = Image.fromarray(coloured.transpose(1, 2, 0)).resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
    if masks is not None:
        canvas = np.array(picture)
        for mask, colour in zip(masks.numpy(), _COLOURS * 8, strict=False):
            draw_outline(canvas, mask, colour)
        return Image.fromarray(canvas)
    named = (
        [task.labels[int(c)] for c in np.atleast_1d(split.targets[number].numpy().nonzero()[0])] if task.target == "multilabel" else None
    )
    text = ", ".join(named) if named is not None else task.classes[int(split.targets[number])]
    ImageDraw.Draw(picture).text((3, _SIDE - 12), text, fill=(255, 255, 255), stroke_width=1, stroke_fill=(0, 0, 0))
    return picture
