from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.volume_sites import cube_task
from medflare.core.palette import COLOURS, structure_colours
from medflare.data.loading import SiteData, Split
from medflare.training import montage
from medflare.training.montage import contact_sheet, fullest_row, overlay
from medflare.training.site import Site
from methods import squares

OUTLINE, FILL = (0xE6, 0x9F, 0x00), (0x56, 0xB4, 0xE9)  # orange and sky blue of Okabe and Ito
WHITE = (255, 255, 255)


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
    assert OUTLINE in shown and FILL not in shown and tinted(picture) == 0
    picture, shown = colours(overlay(site, corner, 0))
    assert OUTLINE in shown and FILL in shown and tinted(picture) > 0


def tinted(picture: np.ndarray) -> int:
    """Pixels of the upper left corner that are neither grey nor an outline."""
    part = picture[:80, :80].reshape(-1, 3).astype(int)
    return int(((np.ptp(part, axis=1) > 10) & (part != OUTLINE).any(axis=1)).sum())


def contrast(first: tuple[int, ...], second: tuple[int, ...], matrix: np.ndarray) -> float:
    """The distance of two colours, 0 to 441, as a dichromat sees them."""
    return float(np.linalg.norm((matrix @ np.array(first)) - (matrix @ np.array(second))))


def test_truth_and_prediction_differ_for_dichromats() -> None:
    """Matrices for sRGB of Machado, Oliveira and Fernandes (2009), severity 1."""
    protan = "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998"
    deutan = "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881"
    tritan = "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900"
    for vision in ("1 0 0 0 1 0 0 0 1", protan, deutan, tritan):
        matrix = np.array(vision.split(), float).reshape(3, 3)
        assert contrast(OUTLINE, FILL, matrix) > 100


def drawn(truth: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """Masks (S, 160, 160) over a grey image, at their size: a line is one pixel wide."""
    masks = [torch.from_numpy(truth), torch.from_numpy(prediction)]
    return montage.tile(torch.full((1, 160, 160), 0.5), masks, (1.0, 1.0), (0.0, 1.0), 160)


def test_the_outline_leaves_a_thin_vessel_visible() -> None:
    vessel = np.zeros((1, 160, 160), bool)
    vessel[0, 50:52, 20:140] = True
    picture = drawn(vessel, vessel)
    assert (picture[50:52, 80] == FILL).all(), "the prediction inside"
    assert (picture[[49, 52], 80] == OUTLINE).all(), "the truth around it"
    assert (picture[[48, 53], 80] == WHITE).all(), "the edge"
    assert (picture[[47, 54], 80] == 127).all(), "the image"


def test_an_image_full_of_the_structure_has_an_outline() -> None:
    full = np.ones((1, 160, 160), bool)
    picture = drawn(full, ~full)
    assert (picture[0] == OUTLINE).all() and (picture[:, -1] == OUTLINE).all()
    assert (picture[80, 80] == 127).all()


def test_several_structures_keep_their_colours() -> None:
    disc, cup = np.zeros((2, 160, 160), bool)
    disc[20:120, 20:120] = True
    cup[50:90, 50:90] = True
    nothing_predicted = np.zeros((2, 160, 160), bool)
    picture = drawn(np.stack([disc, cup]), nothing_predicted)
    first, second = (tuple(bytes.fromhex(code[1:])) for code in COLOURS[:2])
    assert structure_colours(2) == [(COLOURS[0], COLOURS[0]), (COLOURS[1], COLOURS[1])]
    assert (picture[70, [19, 120]] == first).all() and (picture[70, [18, 121]] == WHITE).all()
    assert (picture[70, [49, 90]] == second).all() and (picture[70, [48, 91]] == WHITE).all()


def test_a_volume_has_planes_directions_and_a_scale() -> None:
    task = cube_task(orientation="LPS")
    volume = torch.zeros(1, 8, 8, 8)
    truth = torch.zeros(8, 8, 8, dtype=torch.long)
    truth[2:5, 2:5, 2:5] = 1
    part = Split(volume[None], truth[None], ("p",), ("p",), spacings=((5.0, 5.0, 5.0),))
    picture, shown = colours(overlay(Site("A", task, SiteData(part, part, part)), nothing, 0))
    assert picture.shape == (240, 720, 3) and OUTLINE in shown and (255, 255, 255) in shown
    unknown = replace(part, spacings=(None,))
    without_scale = colours(
        overlay(Site("A", task, SiteData(unknown, unknown, unknown)), nothing, 0)
    )[0]
    assert (without_scale[230:, 4:60] != picture[230:, 4:60]).any(), (
        "a bar of 10 mm at the lower left"
    )


def test_letters_of_a_flat_volume_are_large_and_beside_it() -> None:
    """Two slices of 5 mm, 100 mm wide: a strip of 24 pixels, less than two lines of text."""
    task = cube_task(orientation="LPS")
    volume = torch.rand(1, 20, 20, 2)
    truth = torch.zeros(20, 20, 2, dtype=torch.long)
    part = Split(volume[None], truth[None], ("p",), ("p",), spacings=((5.0, 5.0, 5.0),))
    picture, _ = colours(overlay(Site("A", task, SiteData(part, part, part)), nothing, 0))
    coronal = picture[:, 240:480]
    rows = np.flatnonzero((coronal == 255).all(axis=2).any(axis=1))
    assert (coronal[108:132, 20:220] > 0).any(), "the strip in the middle"
    assert not coronal[30:100].any() and not coronal[140:180].any(), "black beside the strip"
    top = rows[rows < 40]
    assert len(top) >= 11, "the plane's name and the direction above the strip"


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
            return torch.cat(list(map(corner, parts)))

    data = site.data.test
    site.data = replace(
        site.data, test=replace(data, patients=("one", "two", "two", "two", "three"))
    )
    model = ByPatient()
    assert tinted(colours(overlay(site, model, 2))[0]) and model.sizes == [3]


def test_the_fullest_image_of_a_patient_is_shown(site: Site) -> None:
    data = site.data.test
    targets = torch.zeros_like(data.targets)
    targets[1, :2] = 1
    targets[3, :5] = 1
    site.data = replace(
        site.data, test=replace(data, targets=targets, patients=("one", "two", "one", "two", "one"))
    )
    assert fullest_row(site, "two") == 3 and fullest_row(site, "one") == 0
