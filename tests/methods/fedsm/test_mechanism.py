"""What FedSM is for: sites that draw boundaries by conventions of their own, and whose images show where they are from."""

import pytest
import torch

from helpers.small_tasks import small_task
from medflare.data.loading import SiteData, Split
from medflare.federation.local.loop import run_local
from medflare.training.site import Site

TASK = small_task(size=[32, 32], network={"name": "unet", "channels": [8, 16], "norm": "instance"}, loss={"name": "dice_ce"}, batch_size=8)
MARGINS = {"A": -1.5, "B": 0.0, "C": 1.5, "D": 3.0}  # pixels by which a site draws outside of the edge
SPLITS = {"train": 32, "validation": 12, "test": 24}


def photographs(name: str, split: str) -> Split:
    """Blurred discs in noise; the light and the direction of the stripes tell the site, the disc's own edge does not tell its margin."""
    place = sorted(MARGINS).index(name)
    generator = torch.Generator().manual_seed(1000 * place + 100 * list(SPLITS).index(split))
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    style = 0.3 * place + 0.15 * torch.sin((rows, columns, rows + columns, rows - columns)[place])
    images, masks = [], []
    for _ in range(SPLITS[split]):
        top, left, size = torch.rand(3, generator=generator).tolist()
        distance, radius = ((rows - 10 - 12 * top) ** 2 + (columns - 10 - 12 * left) ** 2).sqrt(), 4 + 3 * size
        images.append(torch.sigmoid((radius - distance) / 1.5) + style + 0.3 * torch.randn(32, 32, generator=generator))
        masks.append((distance < radius + MARGINS[name]).long())
    names = tuple(f"{split}-{place}" for place in range(SPLITS[split]))
    return Split(torch.stack(images)[:, None], torch.stack(masks), names, names)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_super_model_gets_what_personal_models_gain(seed: int) -> None:
    def site(name: str, role: str) -> Site:
        train, validation, test = (photographs(name, split) for split in SPLITS)
        return Site(name, TASK, SiteData(train, validation, test), seed)

    results = run_local("fedsm", TASK, sorted(MARGINS), rounds=10, seed=seed, opener=site)
    dice = {model: metrics["dice"] for model, metrics in results["mean"]["inside"].items()}
    assert dice["deployed"] - dice["global"] >= 0.04
    assert dice["deployed"] >= max(dice["global"], dice["personal"]) - 0.01
    selector = results["selector"]
    assert selector["gamma"] in selector["candidates"] and selector["votes"].keys() == MARGINS.keys()
    assert sum(selector["confusion"][name][name] for name in MARGINS) >= 0.9 * 4 * SPLITS["test"]
