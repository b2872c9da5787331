"""Small sites on disk and in memory, and tasks to read them with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import small_tasks
from helpers.fixture_types import Edit, SiteOf, TaskOf
from medflare.data.loading import SiteData, Split
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.site import Site

# As small tasks are, but for U-Net's own norm and what its tests expect of loss and metric.
SEGMENTATION = {
    **small_tasks.SEGMENTATION,
    "network": {"name": "unet", "channels": [4, 8]},
    "loss": {"name": "dice_ce"},
}
CLASSIFICATION = {**small_tasks.CLASSIFICATION, "metric": "f1_macro"}


@pytest.fixture
def make_task() -> TaskOf:
    """A small task: `make_task()` segments, `make_task("classification")` classifies; keywords change settings."""

    def make(kind: str = "segmentation", **settings: Any) -> TaskConfig:
        return load_task(
            {**(SEGMENTATION if kind == "segmentation" else CLASSIFICATION), **settings}
        )

    return make


@pytest.fixture
def make_site(tmp_path: Path) -> SiteOf:
    """Writes a site's folder with 16 x 16 grey pictures and square masks; returns the folder.

    Splits are given as {"training": [patient, ...], ...}: one image per mention of a patient. Classification labels are
    0, 1, 2 in turn, and the picture's brightness tells them.
    """

    def make(
        splits: dict[str, list[str]] | None = None,
        kind: str = "segmentation",
        name: str = "A",
        ending: str = ".png",
        side: int = 16,
    ) -> Path:
        splits = splits or {
            "training": ["p0", "p0", "p1", "p2", "p3"],
            "validation": ["p4", "p5"],
            "test": ["p6", "p6", "p7"],
        }
        folder = tmp_path / name
        (folder / "images").mkdir(parents=True)
        random = np.random.default_rng(len(splits))
        listed: dict[str, list[dict[str, Any]]] = {}
        number = 0
        for split, patients in splits.items():
            listed[split] = []
            for patient in patients:
                picture = random.integers(20, 60, (side, side)).astype(np.uint8)
                mask = np.zeros((side, side), np.uint8)
                row, column = random.integers(2, side - 6, 2)
                mask[row : row + 4, column : column + 4] = 1
                label: Any = number % 3
                picture += (
                    np.uint8(70 * label) if kind == "classification" else np.uint8(150) * mask
                )
                Image.fromarray(picture).save(folder / f"images/{number}{ending}")
                if kind == "segmentation":
                    Image.fromarray(mask).save(folder / f"images/{number}_mask.png")
                    label = f"images/{number}_mask.png"
                listed[split].append(
                    {"image": f"images/{number}{ending}", "label": label, "patient": patient}
                )
                number += 1
        (folder / "datalist.json").write_text(json.dumps(listed))
        return folder

    return make


@pytest.fixture
def edit() -> Edit:
    """Changes a site's datalist in place."""

    def change(folder: Path, how: Callable[[dict[str, Any]], None]) -> None:
        content = json.loads((folder / "datalist.json").read_text())
        how(content)
        (folder / "datalist.json").write_text(json.dumps(content))

    return change


def labelled(targets: torch.Tensor) -> Split:
    """Black images of 16 x 16 pixels with these targets, each of a patient of its own."""
    names = tuple(map(str, range(len(targets))))
    return Split(torch.zeros(len(targets), 1, 16, 16), targets, names, names)


def grades(*of: int) -> Split:
    return labelled(torch.tensor(of, dtype=torch.long))


def masks(rows: int, images: int) -> Split:
    """Masks whose first rows are filled."""
    targets = torch.zeros(images, 16, 16, dtype=torch.long)
    targets[:, :rows] = 1
    return labelled(targets)


def numbered_split(number: int, task: TaskConfig) -> Split:
    """Image n is filled with n, its mask has n pixels, and it is of patient pn."""
    images = (
        torch.arange(number)
        .float()[:, None, None, None]
        .expand(number, task.image_channels, *task.size)
        .contiguous()
    )
    pixels = torch.arange(task.size[0] * task.size[1]).view(*task.size)
    targets = (
        torch.stack([(pixels < n).long() for n in range(number)])
        if number
        else torch.zeros(0, *task.size, dtype=torch.long)
    )
    return Split(
        images,
        targets,
        tuple(f"p{n}" for n in range(number)),
        tuple(f"{n}.png" for n in range(number)),
    )


def numbered_site(
    task: TaskConfig,
    train: int = 10,
    validation: int = 3,
    test: int = 3,
    name: str = "A",
    seed: int = 0,
) -> Site:
    """A site of three numbered splits."""
    training = numbered_split(train, task)
    validating = numbered_split(validation, task)
    testing = numbered_split(test, task)
    return Site(name, task, SiteData(training, validating, testing, ("a note",)), seed)
