"""The transforms of MONAI's that a task may name, by the name of their array form. Light to import."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

from medflare.core.errors import ConfigError
from medflare.core.settings import unknown

# These do not keep one image of one size, or move nothing although they lie among those that do.
_NOT_SPATIAL: Final = ("RandGridPatch", "RandSimulateLowResolution")
_NOT_INTENSITY: Final = ("ComputeHoVerMaps", "ForegroundMask", "MaskIntensity")  # they need or make something beside the image

# Known without asking MONAI, whose import takes seconds: those that the tasks which come with medflare name, and the plans.
_USUAL: Final = {
    "intensity": frozenset({"NormalizeIntensity", "ScaleIntensityRange", "ScaleIntensityRangePercentiles"}),
    "augment": frozenset({"RandAffine", "RandFlip", "RandRotate90", "RandScaleIntensity"}),
}
SIZING: Final = frozenset({"keep_size", "spatial_size"})  # arguments by which a transform may change the size of an image


def is_usual(settings: Mapping[str, Any]) -> bool:
    """Whether a transform is one of those that no argument makes long or large: it changes each number by itself, or turns the image.

    Args:
        settings: {"name": ..., arguments}.
    """
    return settings["name"] in frozenset.union(*_USUAL.values()) and not SIZING & settings.keys()


@cache
def intensity_transforms() -> tuple[str, ...]:
    """Names of MONAI's intensity transforms that do the same to an image every time."""
    return tuple(name for name in _dictionary_forms("intensity") if not name.startswith("Rand") and name not in _NOT_INTENSITY)


@cache
def spatial_augmentations() -> tuple[str, ...]:
    """Names of MONAI's random transforms that move the pixels of an image, and its mask along with them."""
    found = tuple(name for name in _dictionary_forms("spatial") if name.startswith("Rand") and name not in _NOT_SPATIAL)
    return (*found, "RandSmoothDeform")


@cache
def photometric_augmentations() -> tuple[str, ...]:
    """Names of MONAI's random transforms that change intensities alone."""
    smooth = (name for name in smooth_augmentations() if name not in spatial_augmentations())
    return ("RandSimulateLowResolution", *(name for name in _dictionary_forms("intensity") if name.startswith("Rand")), *smooth)


@cache
def smooth_augmentations() -> tuple[str, ...]:
    """Names of MONAI's random transforms by a smooth field, a few random points with values between them; they know an image's size."""
    return tuple(_dictionary_forms("smooth_field"))


def _dictionary_forms(room: str) -> list[str]:
    """Names, without the d, of the transforms of a room of MONAI's that have a dictionary form, sorted."""
    module = import_module(f"monai.transforms.{room}.dictionary")
    found = [name for name, cls in vars(module).items() if getattr(cls, "__module__", "") == module.__name__ and name == cls.__name__]
    return sorted(name.removesuffix("d") for name in found if name.endswith("d"))


def check_transforms(intensity: Mapping[str, Any], augment: Sequence[Mapping[str, Any]], place: str) -> None:
    """Before anything starts: every transform has the name of an array form of MONAI's.

    Args:
        intensity: {"name": ..., arguments}.
        augment: the same, of every augmentation.
        place: the beginning of a message.

    Raises:
        ConfigError: a name that MONAI does not have there, or keys, which belong to a dictionary form.
    """
    for setting, transforms in (("intensity", [intensity]), ("augment", augment)):
        for settings in transforms:
            if "keys" in settings:
                raise ConfigError(f"{place}: {setting} {settings['name']}: keys follow from the task; leave them out")
            if settings["name"] not in _USUAL[setting]:
                known = intensity_transforms() if setting == "intensity" else (*spatial_augmentations(), *photometric_augmentations())
                if settings["name"] not in known:
                    raise unknown("transform", settings["name"], known, f"{place}: {setting}")
