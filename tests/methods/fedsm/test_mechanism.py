"""What FedSM is for: sites that draw boundaries by other conventions, and whose images show where they are from."""

import pytest
import torch

from medflare.data.sites.site import Site
from medflare.data.splits import SiteData, Split
from medflare.federation.local import run_local
from small import small_task

TASK = small_task(size=[32, 32], network={"name": "unet", "channels": [8, 16], "norm": "instance"}, loss={"name": "dice_ce"}, batch_size=8)
MARGINS = {"A": -1.5, "B": 0.0, "C": 1.5, "D": 3.0}  # pixels by which a site draws outside of the boundary


def photographs(name: str, split: str, patients: int) -> Split:
    """Blurred discs in noise; the stripes behind them and the light show the site, its margin does not."""
    place = sorted(MARGINS).index(name)
    generator = torch.Generator().manual_seed(1000 * place + 100 * ("train", "validation", "test").index(split))
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    images, targets = [], []
    for _ in range(patients):
        top, left, size = torch.rand(3, generator=generator).tolist()
        radius = 4 + 3 * size
        distance = ((rows - 10 - 12 * top) ** 2 + (columns - 10 - 12 * left) ** 2).sqrt()
        disc = torch.sigmoid((radius - distance) / 1.5)
        light = 0.3 * place + 0.15 * torch.sin((rows, columns, rows + columns, rows - columns)[place])
        images.append(disc + light + 0.3 * torch.randn(32, 32, generator=generator))
        targets.append((distance < radius + MARGINS[name]).long())
    names = tuple(f"{split}-{patient}" for patient in range(patients))
    return Split(torch.stack(images)[:, None], torch.stack(targets), names, names)


def site(name: str, role: str, seed: int = 0) -> Site:
    return Site(
        name, TASK, SiteData(photographs(name, "train", 32), photographs(name, "validation", 12), photographs(name, "test", 24)), seed
    )


@pytest.mark.parametrize("options", [{}, {"selector": "compact_selector"}], ids=str)
def test_the_super_model_gets_what_personal_models_gain(options) -> None:
    results = run_local("fedsm", TASK, sorted(MARGINS), rounds=10, seed=0, opener=site, **options)
    dice = {model: metrics["dice"] for model, metrics in results["mean"]["inside"].items()}
    print(dice)
    assert dice["deployed"] - dice["global"] >= 0.04
