"""Transforms with arguments that would stop a site: one image of the task's size shows it before work starts."""

from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.data import trial
from medflare.data.trial import try_transforms
from medflare.tasks.config import load_task

TASK = load_task("phantom").to_dict()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("intensity", {"name": "GaussianSmooth", "sigma": 1e7}),
        ("intensity", {"name": "MedianSmooth", "radius": 3000}),
        ("augment", [{"name": "RandFlip"}, {"name": "RandZoom", "min_zoom": 4000, "max_zoom": 5000}]),
    ],
)
def test_transforms_that_need_too_much_memory_are_refused(setting: str, value: Any) -> None:
    name = value["name"] if isinstance(value, dict) else value[-1]["name"]
    with pytest.raises(ConfigError, match=rf"{setting} {name}"):
        try_transforms(load_task({**TASK, setting: value}), 4.0, "site A", "bounds.memory")


def test_transforms_that_take_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_SECONDS", 1)
    task = load_task({**TASK, "augment": [{"name": "RandGridDistortion", "num_cells": 10**7}]})
    with pytest.raises(ConfigError, match=r"RandGridDistortion.* 1 s"):
        try_transforms(task, 4.0, "site A", "bounds.memory")


def test_ordinary_arguments_are_accepted() -> None:
    augment = [
        {"name": "RandGridDistortion"},
        {"name": "Rand2DElastic", "spacing": [8, 8], "magnitude_range": [0, 1]},
        {"name": "RandGaussianSmooth"},
        {"name": "RandCoarseDropout", "holes": 6, "spatial_size": 5},
        {"name": "RandAffine", "prob": 0.5, "spatial_size": [64, 64]},
        {"name": "RandBiasField"},
    ]
    task = load_task({**TASK, "augment": augment, "intensity": {"name": "GaussianSmooth", "sigma": 2.0}})
    try_transforms(task, 4.0, "site A", "bounds.memory")


def test_common_transforms_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_problem", None)
    intensity = {"name": "ScaleIntensityRange", "a_min": -1000, "a_max": 1e6, "b_min": 0, "b_max": 1}
    try_transforms(load_task({**TASK, "intensity": intensity}), 4.0, "site A", "bounds.memory")
