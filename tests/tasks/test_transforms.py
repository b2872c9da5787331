"""MONAI's transforms by name: in both forms, and refused when the task is loaded."""

from typing import Any

import pytest

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.tasks import transforms
from medflare.tasks.transforms import intensity_transforms, photometric_augmentations, spatial_augmentations


@pytest.mark.parametrize(
    "changes",
    [
        {"intensity": {"name": "NormaliseIntensity"}},
        {"intensity": {"name": "RandFlip"}},
        {"augment": [{"name": "RandFlpd"}]},
        {"augment": [{"name": "RandFlip", "keys": ["image"]}]},
    ],
)
def test_a_wrong_name_is_refused_when_the_task_is_loaded(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"NormaliseIntensity|RandFlip|RandFlpd"):
        small_task(**changes)


def test_the_usual_transforms_are_among_monais() -> None:
    assert transforms._USUAL["intensity"] <= set(intensity_transforms())
    assert transforms._USUAL["augment"] <= {*spatial_augmentations(), *photometric_augmentations()}
