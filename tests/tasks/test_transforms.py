"""MONAI's transforms by name: in both forms, and refused when the task is loaded."""

from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.tasks import transforms
from medflare.tasks.config import load_task
from medflare.tasks.transforms import intensity_transforms, photometric_augmentations, spatial_augmentations
from small import small_task


@pytest.mark.parametrize("ending", ["", "d", "D", "Dict"])
def test_dictionary_forms_mean_their_array_forms(ending: str) -> None:
    for name in intensity_transforms():
        assert small_task(intensity={"name": f"{name}{ending}"}).intensity == {"name": name}
    for name in (*spatial_augmentations(), *photometric_augmentations()):
        assert small_task(augment=[{"name": f"{name}{ending}", "prob": 0.5}]).augment == ({"name": name, "prob": 0.5},)


def test_both_forms_are_one_task() -> None:
    plain = small_task(intensity={"name": "NormalizeIntensity", "nonzero": True}, augment=[{"name": "RandFlip", "spatial_axis": 0}])
    forms = small_task(
        intensity={"name": "NormalizeIntensityd", "keys": ["image"], "nonzero": True},
        augment=[{"name": "RandFlipd", "keys": ["image", "label"], "spatial_axis": 0}],
    )
    assert forms == plain and forms.fingerprint() == plain.fingerprint() and load_task(forms.to_dict()) == plain


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"augment": [{"name": "RandFlipd", "keys": ["image"]}]}, "RandFlipd"),
        ({"augment": [{"name": "RandFlipd", "keys": "image"}]}, "RandFlipd"),
        ({"augment": [{"name": "RandFlipd", "keys": ["image", "seg"]}]}, "RandFlipd"),
        ({"augment": [{"name": "RandGaussianNoised", "keys": ["image", "label"]}]}, "RandGaussianNoised"),
        ({"intensity": {"name": "ScaleIntensityd", "keys": "label"}}, "ScaleIntensityd"),
        ({"intensity": {"name": "ScaleIntensityd", "keys": 3}}, "ScaleIntensityd"),
    ],
)
def test_keys_of_something_else_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        small_task(**changes)


def test_of_a_class_no_mask_moves() -> None:
    small_task("classification", augment=[{"name": "RandFlipd", "keys": "image"}, {"name": "RandFlipd", "keys": ["image"]}])
    with pytest.raises(ConfigError, match="RandFlipd"):
        small_task("classification", augment=[{"name": "RandFlipd", "keys": ["image", "label"]}])


@pytest.mark.parametrize(
    "changes", [{"intensity": {"name": "NormaliseIntensity"}}, {"intensity": {"name": "RandFlip"}}, {"augment": [{"name": "RandFlpd"}]}]
)
def test_a_wrong_name_is_refused_when_the_task_is_loaded(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"NormaliseIntensity|RandFlip|RandFlpd"):
        small_task(**changes)


def test_what_is_known_without_monai_is_monais() -> None:
    assert transforms._USUAL["intensity"] <= set(intensity_transforms())
    assert transforms._USUAL["augment"] <= {*spatial_augmentations(), *photometric_augmentations()}
