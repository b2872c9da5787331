"""Folders as somebody downloads them: small pictures, their masks, tables beside them."""

from pathlib import Path

import numpy as np
from PIL import Image


def picture(
    path: Path, value: int = 100, side: int = 16, channels: int = 1, seed: int | None = None
) -> Path:
    """A picture that is noisy around a value, which is the noise's seed if none is given; of several channels each is darker than the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = (
        np.random.default_rng(value if seed is None else seed).integers(
            -9, 10, (side, side, channels)
        )
        + value
        - 20 * np.arange(channels)
    )
    Image.fromarray(noise.clip(0, 255).astype(np.uint8).squeeze()).save(path)
    return path


def mask(path: Path, values: tuple[int, ...] = (1,), side: int = 16) -> Path:
    """A mask with a stripe of each value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = np.zeros((side, side), np.uint8)
    for number, value in enumerate(values):
        drawn[3 * number + 1 : 3 * number + 4, 4:12] = value
    Image.fromarray(drawn).save(path)
    return path


def classes(
    root: Path, patients: int = 20, each: int = 2, names: tuple[str, ...] = ("cat", "dog")
) -> Path:
    """A folder per class; every patient has so many pictures of one class, called p00_0.png, p00_1.png, ..."""
    for patient in range(patients):
        number = patient % len(names)
        for view in range(each):
            file = root / names[number] / f"p{patient:02}_{view}.png"
            picture(file, 60 + 120 * number, seed=each * patient + view)
    return root


def pairs(
    root: Path,
    images: int = 10,
    image: str = "{n}.png",
    label: str = "{n}_mask.png",
    values: tuple[int, ...] = (1,),
) -> Path:
    """Pictures with masks, by the pattern of their paths."""
    for number in range(images):
        picture(root / image.format(n=f"IMG_{number:02}"), 80 + number)
        mask(root / label.format(n=f"IMG_{number:02}"), values)
    return root


def table(path: Path, *rows: tuple[object, ...]) -> Path:
    """A table of these rows, the first its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n", encoding="utf-8")
    return path
