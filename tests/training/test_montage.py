from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.volume_sites import cube_task
from medflare.core.palette import rgb
from medflare.data.loading import SiteData, Split
from medflare.training.montage import contact_sheet, fullest_row, overlay
from medflare.training.site import Site
from methods import squares

OUTLINE = rgb(0)


@pytest.fixture
def site() -> Site:
    return squares.site("A")


def colours(png: bytes) -> tuple[np.ndarray, set[tuple[int, ...]]]:
    picture = np.asarray(Image.open(BytesIO(png)))
    return picture, set(map(tuple, picture.reshape(-1, 3).tolist()))


def nothing(images: Tensor) -> Tensor:
    return torch.zeros(len(images), 1, *images.shape[2:])


def corner(images: Tensor) -> Tensor:
    answer = nothing(images)
    answer[..., :4, :4] = 0.9
    return answer


def test_truth_is_outlined_and_the_prediction_filled(site: Site) -> None:
    picture, shown = colours(overlay(site, nothing, 0))
    assert picture.shape == (320, 320, 3), "small pictures are enlarged"
    assert OUTLINE in shown and tinted(picture) == 0 < tinted(colours(overlay(site, corner, 0))[0])


def tinted(picture: np.ndarray) -> int:
    """Pixels of the upper left corner that are neither grey nor an outline."""
    part = picture[:80, :80].reshape(-1, 3).astype(int)
    return int(((np.ptp(part, axis=1) > 10) & (part != OUTLINE).any(axis=1)).sum())


def test_a_volume_has_planes_directions_and_a_scale() -> None:
    task = cube_task(orientation="LPS")
    volume = torch.zeros(1, 8, 8, 8)
    truth = torch.zeros(8, 8, 8, dtype=torch.long)
    truth[2:5, 2:5, 2:5] = 1
    part = Split(volume[None], truth[None], ("p",), ("p",), spacings=((5.0, 5.0, 5.0),))
    picture, shown = colours(overlay(Site("A", task, SiteData(part, part, part)), nothing, 0))
    assert picture.shape == (240, 720, 3) and OUTLINE in shown and (255, 255, 255) in shown
    unknown = replace(part, spacings=(None,))
    without_scale = colours(overlay(Site("A", task, SiteData(unknown, unknown, unknown)), nothing, 0))[0]
    assert (without_scale[230:, 4:60] != picture[230:, 4:60]).any(), "a bar of 10 mm at the lower left"


def test_a_contact_sheet_has_a_row_for_each_site(site: Site) -> None:
    picture, shown = colours(contact_sheet({"A": site.data, "B": site.data}, site.task))
    assert picture.shape == (2 * 96, 12 * 96, 3) and OUTLINE in shown
    assert (picture[:96] == picture[96:]).all()


def test_a_model_of_whole_patients_is_asked_for_all_images_of_one(site: Site) -> None:
    class ByPatient:
        by_patient = True

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def __call__(self, images: Tensor) -> Tensor:
            raise AssertionError("called without its patient")

        def predict_patient(self, parts: tuple[Tensor, ...]) -> Tensor:
            self.sizes.append(sum(map(len, parts)))
            return torch.cat([corner(part) for part in parts])

    data = site.data.test
    site.data = replace(site.data, test=replace(data, patients=("one", "two", "two", "two", "three")))
    model = ByPatient()
    assert tinted(colours(overlay(site, model, 2))[0]) and model.sizes == [3]


def test_the_fullest_image_of_a_patient_is_shown(site: Site) -> None:
    data = site.data.test
    targets = torch.zeros_like(data.targets)
    targets[1, :2], targets[3, :5] = 1, 1
    site.data = replace(site.data, test=replace(data, targets=targets, patients=("one", "two", "one", "two", "one")))
    assert fullest_row(site, "two") == 3 and fullest_row(site, "one") == 0
