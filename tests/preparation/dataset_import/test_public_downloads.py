"""Public data sets as they are downloaded: each is read as it is meant, or asked about."""

import re
from pathlib import Path

import pytest

from helpers.downloaded_folders import mask, picture
from preparation.dataset_import.test_segmentation_layouts import error_of, imported


@pytest.mark.parametrize("names", [("trainx/X_{n}", "trainy/Y_{n}"), ("b/{n}a", "c/{n}z")])
def test_a_class_of_masks_is_asked_about(names: tuple[str, str], tmp_path: Path) -> None:
    """As of a copy of PH2: before, the masks were images of a class."""
    images, masks = names
    for number in range(8):
        picture(tmp_path / f"{images.format(n=number)}.bmp", 80 + number, channels=3)
        mask(tmp_path / f"{masks.format(n=number)}.bmp", (255,))
    first = masks.format(n=0)
    assert f"{first}.bmp has two values, as masks have, beside" in error_of(tmp_path)
    assert len(imported(tmp_path, kind="classification").dataset.items) == 16


def test_one_more_mask_of_an_image_is_no_mask_of_another_file(tmp_path: Path) -> None:
    """As of LES-AV; before, colours of vessels were images with the mask of the vessels."""
    for number in range(6):
        for name in ("images", "arteries-and-veins"):
            picture(tmp_path / name / f"{number}.png", 60 + len(name), channels=3)
        for name in ("masks", "vessel-segmentations"):
            mask(tmp_path / name / f"{number}.png", (255,))
    assert "two masks of one image; unite them, leave one out" in error_of(tmp_path)
    text = error_of(tmp_path, leave_out=("masks",))
    assert "arteries-and-veins/0.png and images/0.png would both have the mask" in text
    for item in imported(tmp_path, leave_out=("masks", "arteries-and-veins")).dataset.items:
        assert item.masks == [tmp_path / "vessel-segmentations" / item.first.name]


def test_two_divisions_of_the_same_pictures_are_asked_about(tmp_path: Path) -> None:
    """As of RIM-ONE DL; pictures of two classes have the same names, and sizes in bytes."""
    for number in range(12):
        for name in ("glaucoma", "normal"):
            for way, part in (("randomly", number % 3), ("by_hospital", number // 8)):
                split = ("training_set", "test_set")[bool(part)]
                home = tmp_path / f"partitioned_{way}" / split / name
                picture(home / f"{number}.bmp", 80, channels=3, seed=number + 20 * len(name))
    for kind in ("", "classification"):
        text = error_of(tmp_path, kind=kind)
        assert "hold the same 24 pictures; leave one folder out, as with --leave-out" in text
    (option,) = re.findall("--leave-out ([^;]+)$", text)
    assert len(imported(tmp_path, leave_out=(option,)).dataset.items) == 24


@pytest.mark.parametrize("top", ["Infection Segmentation Data", "annotations/A"])
def test_folders_of_images_in_one_that_is_called_like_masks(top: str, tmp_path: Path) -> None:
    """As of COVID-QU-Ex; before, all images were masks."""
    for number in range(6):
        home = tmp_path / top
        picture(home / "images" / f"{number}.png", 60 + number)
        mask(home / "infection masks" / f"{number}.png", (255,))
        picture(tmp_path / "Lung" / "images" / f"{number}L.png", 60 + number)
        mask(tmp_path / "Lung" / "lung masks" / f"{number}L.png", (255,))
    items = imported(tmp_path).dataset.items
    assert len(items) == 12
    for item in items:
        (path,) = item.masks
        assert (path.name, path.parents[1]) == (item.first.name, item.first.parents[1])
        assert item.first.parent.name == "images"
