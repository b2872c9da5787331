from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from medflare.data.checking.contact_sheet import write_contact_sheet
from medflare.data.loading import load_site_data
from medflare.tasks.config import TaskConfig

TaskOf = Callable[..., TaskConfig]


def test_masks_are_outlined(make_site: Callable[..., Path], make_task: TaskOf, tmp_path: Path) -> None:
    data = {name: load_site_data(name, make_task(), make_site(name=name)) for name in ("A", "B")}
    path = write_contact_sheet(tmp_path / "sheets/sheet.png", data, make_task())
    sheet = np.asarray(Image.open(path)).astype(int)
    assert sheet.shape == (2 * (96 + 16), 12 * 96, 3)
    green = (sheet == (0, 255, 80)).all(axis=-1)
    for top in (16, 16 + 112):
        for column in range(5):  # five training images
            outline = green[top : top + 96, 96 * column : 96 * (column + 1)].sum()
            assert outline == 4 * 24 - 4  # a 4 x 4 square, enlarged six times


def test_classes_are_written_on_the_images(make_site: Callable[..., Path], make_task: TaskOf, tmp_path: Path) -> None:
    task = make_task("classification")
    data = {"A": load_site_data("A", task, make_site(kind="classification"))}
    sheet = np.asarray(Image.open(write_contact_sheet(tmp_path / "sheet.png", data, task)))
    assert (sheet[16 + 80 :, :96] > 180).all(axis=-1).any()  # white letters at the bottom of a dark image
