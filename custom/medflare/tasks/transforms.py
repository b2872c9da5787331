"""The transforms of MONAI's that a task may name, by the name of their array form or of their dictionary form. Light to import."""

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
_ENDINGS: Final = ("Dict", "D", "d")  # MONAI's names of a dictionary form


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


def plain_forms(intensity: Mapping[str, Any], augment: Sequence[Mapping[str, Any]], masks: bool, place: str) -> dict[str, Any]:
    """A task's transforms, each under the name of its array form and without `keys`, which follow from what it does.

    Args:
        intensity: {"name": ..., arguments}.
        masks: whether the task has masks, which move with their images.

    Returns:
        "intensity" and "augment".

    Raises:
        ConfigError: a name that MONAI does not have there, or keys that the transform cannot have.
    """
    found = [_plain_form(settings, "augment", masks, place) for settings in augment]
    return {"intensity": _plain_form(intensity, "intensity", masks, place), "augment": tuple(found)}


def _plain_form(settings: Mapping[str, Any], setting: str, masks: bool, place: str) -> dict[str, Any]:
    name = settings["name"]
    if name in _USUAL[setting] and "keys" not in settings:
        return dict(settings)
    known = intensity_transforms() if setting == "intensity" else (*spatial_augmentations(), *photometric_augmentations())
    plain = next((form for form in (name, *map(name.removesuffix, _ENDINGS)) if form in known), None)
    if plain is None:
        raise unknown("transform", name, known, f"{place}: {setting}")
    _check_keys(settings, masks and plain in spatial_augmentations(), f"{place}: {setting} {name}")
    return {**{key: value for key, value in settings.items() if key != "keys"}, "name": plain}


def _check_keys(settings: Mapping[str, Any], moves_masks: bool, place: str) -> None:
    """Nothing where a dictionary form names what the transform is given anyway, or names nothing."""
    wanted, reason = (["image", "label"], "image and mask move together") if moves_masks else (["image"], "it changes the image alone")
    given = settings.get("keys", wanted)
    if ([given] if isinstance(given, str) else given) not in (wanted, wanted[::-1]):
        raise ConfigError(f"{place}: keys are {given!r}, and {reason}; write {wanted} or leave keys out")
