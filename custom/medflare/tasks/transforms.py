"""The transforms of MONAI that a task may use, by the name of their array form. Light to import."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

from medflare.core.errors import ConfigError
from medflare.core.settings import unknown

_NOT_SPATIAL: Final = ("RandGridPatch", "RandSimulateLowResolution")  # several patches; intensities only
_NOT_INTENSITY: Final = ("ComputeHoVerMaps", "ForegroundMask", "MaskIntensity")  # their input or output is not one image

# Those of the presets and plans: known without importing MONAI, which takes seconds.
_USUAL: Final = {
    "intensity": frozenset({"NormalizeIntensity", "ScaleIntensityRange", "ScaleIntensityRangePercentiles"}),
    "augment": frozenset({"RandAffine", "RandFlip", "RandRotate90", "RandScaleIntensity"}),
}
SIZING: Final = frozenset({"keep_size", "spatial_size"})  # arguments by which a transform may change the size of an image


def is_usual(settings: Mapping[str, Any]) -> bool:
    """Whether no argument makes the transform {"name": ..., arguments} slow or its result large."""
    return settings["name"] in frozenset.union(*_USUAL.values()) and not SIZING & settings.keys()


def intensity_transforms() -> tuple[str, ...]:
    """Names of MONAI's deterministic intensity transforms."""
    return tuple(name for name in _dictionary_forms("intensity") if not name.startswith("Rand") and name not in _NOT_INTENSITY)


def spatial_augmentations() -> tuple[str, ...]:
    """Names of MONAI's random transforms that move pixels, and the mask with them."""
    names = tuple(name for name in _dictionary_forms("spatial") if name.startswith("Rand") and name not in _NOT_SPATIAL)
    return (*names, "RandSmoothDeform")


def photometric_augmentations() -> tuple[str, ...]:
    """Names of MONAI's random transforms of intensities only."""
    smooth = (name for name in smooth_augmentations() if name not in spatial_augmentations())
    return ("RandSimulateLowResolution", *(name for name in _dictionary_forms("intensity") if name.startswith("Rand")), *smooth)


def smooth_augmentations() -> tuple[str, ...]:
    """Names of MONAI's random transforms by a smooth field, which depend on the image size."""
    return _dictionary_forms("smooth_field")


@cache
def _dictionary_forms(package: str) -> tuple[str, ...]:
    """Names, without the d, of the dictionary transforms of a package in monai.transforms, sorted."""
    module = import_module(f"monai.transforms.{package}.dictionary")
    names = [name for name, cls in vars(module).items() if getattr(cls, "__module__", "") == module.__name__ and name == cls.__name__]
    return tuple(sorted(name.removesuffix("d") for name in names if name.endswith("d")))


def check_transforms(intensity: Mapping[str, Any], augment: Sequence[Mapping[str, Any]], place: str) -> None:
    """Raises ConfigError for a transform, {"name": ..., arguments}, that MONAI does not have there, or with the argument keys."""
    for setting, settings in [("intensity", intensity), *(("augment", transform) for transform in augment)]:
        name = settings["name"]
        if "keys" in settings:
            raise ConfigError(f"{place}: {setting} {name}: keys follow from the task; leave them out")
        if name not in _USUAL[setting]:
            names = intensity_transforms() if setting == "intensity" else (*spatial_augmentations(), *photometric_augmentations())
            if name not in names:
                raise unknown("transform", name, names, f"{place}: {setting}")
