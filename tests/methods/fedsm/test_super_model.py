import pytest
import torch
from torch import Tensor, nn

from helpers.small_tasks import predicted
from medflare.data.loading import SiteData, Split
from medflare.methods.fedsm.extra import ExtraSuperModel
from medflare.methods.fedsm.super_model import SuperModel
from medflare.networks.catalogue import initial_network
from medflare.training.site import Site
from methods import squares

SITES = ["A", "B", "C"]


class Brightness(nn.Module):
    """A selector that takes an image of mean brightness k for one of class k, surely."""

    levels: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("levels", torch.arange(float(classes)))

    def forward(self, images: Tensor) -> Tensor:
        return -10 * (images.mean(dim=(1, 2, 3))[:, None] - self.levels).square()


def super_model_of(kind: str = "segmentation", combine: str | None = None) -> SuperModel:
    """K = 3 personal networks and a global one, untrained but different."""
    task = squares.task(kind)
    networks: list[nn.Module] = [initial_network(task, 1, name).eval() for name in ("global", *SITES)]
    names = ["global", *SITES]
    if combine is not None:
        return ExtraSuperModel(task, networks, Brightness(4), names, combine).eval()
    return SuperModel(task, networks, Brightness(3), names, gamma=0.6).eval()


def images_of(*levels: float) -> Tensor:
    noise = 0.2 * torch.randn(len(levels), 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return noise - noise.mean(dim=(1, 2, 3), keepdim=True) + torch.tensor(levels).view(-1, 1, 1, 1)


@torch.no_grad()
def test_who_answered_is_told_image_by_image() -> None:
    model = super_model_of()
    images = images_of(2.0, 0.0, 0.5, 1.0, 0.0)
    output = model(images)
    assert model.answered == ["C", "A", "global", "B", "A"]  # half way between A and B nobody is sure
    for image, answer, name in zip(images, output, model.answered, strict=True):
        torch.testing.assert_close(answer, model.networks[model.names.index(name)](image[None]).sigmoid()[0])
    model(images[:1])
    assert model.answered == ["C"]
    report = model.report()
    assert {name: report[name] for name in model.names} == {"global": 1, "A": 2, "B": 1, "C": 2}
    assert sum(report["selector"].values()) == 6 and report["selector"]["C"] == 2, "the selector's own answer, whatever γ"


@torch.no_grad()
def test_a_patients_images_are_answered_by_one_model() -> None:
    """Single images of a patient that look like another site's are outvoted by the others."""
    model, images = super_model_of(), images_of(2.0, 2.0, 1.2, 0.0)
    data = Split(images, torch.zeros(4, 16, 16, dtype=torch.long), ("p", "p", "p", "q"), tuple("abcd"))
    site = Site("O", squares.SEGMENTATION, SiteData(data, data, data), 0)
    for choose_by, expected in (("image", ["C", "C", "B", "A"]), ("patient", ["C", "C", "C", "A"])):
        model.choose_by = choose_by
        found = predicted(site, model, "test")
        for image, answer, name in zip(images, found, expected, strict=True):
            torch.testing.assert_close(answer, model.networks[model.names.index(name)](image[None]).sigmoid()[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
@pytest.mark.parametrize("combine", [None, "extra", "ensemble"])
@torch.no_grad()
def test_without_branches_the_answers_are_the_same(kind: str, combine: str | None) -> None:
    model, images = super_model_of(kind, combine), images_of(2.0, 0.0, 0.5, 1.0, 0.1, 2.9)
    torch.testing.assert_close(model.unbranched()(images), model(images), rtol=0, atol=1e-6)
    assert len(set(model.answered)) == 4, "all networks should have had their turn"
