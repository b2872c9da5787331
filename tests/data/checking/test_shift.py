"""How much sites differ, as one figure."""

import numpy as np
import torch

from medflare.data.checking.shift import site_shift
from medflare.data.loading import load_site_data
from medflare.data.splits import SiteData, Split
from medflare.tasks.config import load_task


def _data(brightness: float, seed: int, patients: int = 30) -> SiteData:
    images = torch.tensor(np.random.default_rng(seed).normal(brightness, 1, (2 * patients, 1, 16, 16)), dtype=torch.float32)
    names = tuple(f"p{number // 2}" for number in range(2 * patients))
    whole = Split(images, torch.zeros(2 * patients, 16, 16, dtype=torch.long), names, names)
    none = Split(images[:0], torch.zeros(0, 16, 16, dtype=torch.long), (), ())
    return SiteData(whole, none, none)


def test_shift_tells_cameras_apart_and_nothing_else() -> None:
    apart, _ = site_shift({"A": _data(0, 1), "B": _data(2, 2)})
    alike, _ = site_shift({"A": _data(0, 1), "B": _data(0, 2)})
    assert apart is not None and alike is not None
    assert apart > 0.95 and 0.3 < alike < 0.7
    assert site_shift({"A": _data(0, 1), "B": _data(0, 2, patients=2)}) == (None, "site B has fewer than three patients")


def test_phantom_sites_differ_like_cameras() -> None:
    task = load_task("phantom")
    shift, _ = site_shift({name: load_site_data(name, task, None) for name in ("site-1", "site-2", "site-3")})
    assert shift is not None and shift > 0.9
