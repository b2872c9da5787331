"""The transforms that a task may use: of MONAI by the name of their array form, and extensions.
Light to import.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from medflare.core.errors import ConfigError
from medflare.core.extensions import Extensions
from medflare.core.settings import unknown
from medflare.core.text import Json

# They return several patches, or change intensities only.
_NOT_SPATIAL = ("RandGridPatch", "RandSimulateLowResolution")
# Their input or output is not one image.
_NOT_INTENSITY = ("ComputeHoVerMaps", "ForegroundMask", "MaskIntensity")

# Those of the presets and plans: known without importing MONAI, which takes seconds.
_USUAL = {
    "intensity": frozenset(
        {
            "NormalizeIntensity",
            "ScaleIntensity",
            "ScaleIntensityRange",
            "ScaleIntensityRangePercentiles",
        }
    ),
    "augment": frozenset(
        {
            "RandAdjustContrast",
            "RandAffine",
            "RandFlip",
            "RandGaussianNoise",
            "RandRotate90",
            "RandScaleIntensity",
            "RandScaleIntensityFixedMean",
        }
    ),
}
# Arguments by which a transform may change the size of an image.
SIZING = frozenset({"keep_size", "spatial_size"})


def is_usual(settings: Json) -> bool:
    """Whether no argument makes the transform {"name": ..., arguments} slow or its result large.

    Raises:
        ConfigError: an extension cannot be used.
    """
    TRANSFORMS.foreign(settings["name"])
    return settings["name"] in frozenset.union(*_USUAL.values()) and not SIZING & settings.keys()


def intensity_transforms() -> tuple[str, ...]:
    """Names of MONAI's deterministic intensity transforms."""
    return tuple(
        name
        for name in _dictionary_forms("intensity")
        if not name.startswith("Rand") and name not in _NOT_INTENSITY
    )


def spatial_augmentations() -> tuple[str, ...]:
    """Names of MONAI's random transforms that move pixels, and the mask with them."""
    names = [name for name in _random_forms("spatial") if name not in _NOT_SPATIAL]
    return (*names, "RandSmoothDeform")


def photometric_augmentations() -> tuple[str, ...]:
    """Names of MONAI's random transforms of intensities only."""
    spatial = spatial_augmentations()
    smooth = [name for name in smooth_augmentations() if name not in spatial]
    return ("RandSimulateLowResolution", *_random_forms("intensity"), *smooth)


def _random_forms(package: str) -> list[str]:
    return [name for name in _dictionary_forms(package) if name.startswith("Rand")]


def smooth_augmentations() -> tuple[str, ...]:
    """Names of MONAI's random transforms by a smooth field, which depend on the image size."""
    return _dictionary_forms("smooth_field")


@cache
def _dictionary_forms(package: str) -> tuple[str, ...]:
    """Names without the d of the dictionary transforms of a package in monai.transforms, sorted."""
    module = import_module(f"monai.transforms.{package}.dictionary")
    names = []
    for name, cls in vars(module).items():
        # Without imported classes, and without aliases of a class.
        is_defined_here = getattr(cls, "__module__", "") == module.__name__
        if is_defined_here and name == cls.__name__ and name.endswith("d"):
            names.append(name.removesuffix("d"))
    return tuple(sorted(names))


def _names() -> set[str]:
    return {*intensity_transforms(), *spatial_augmentations(), *photometric_augmentations()}


def _check_class(candidate: Any) -> None:
    from monai.transforms import MapTransform, Randomizable, Transform

    if not (isinstance(candidate, type) and issubclass(candidate, Transform)):
        raise TypeError(f"{candidate!r} is no class derived from monai.transforms.Transform")
    if issubclass(candidate, MapTransform) != issubclass(candidate, Randomizable):
        raise TypeError("it must be both MapTransform and Randomizable (augment), or neither")
    spatial = getattr(candidate, "spatial", None)
    if issubclass(candidate, Randomizable) and not isinstance(spatial, bool):
        raise TypeError("set spatial = True if it moves pixels, and masks with them, else False")


TRANSFORMS = Extensions("transform", "transforms", _names, _check_class)


def check_transforms(intensity: Json, augment: Sequence[Json], location: str) -> None:
    """Raises ConfigError for a transform, {"name": ..., arguments}, that MONAI does not have there
    and no extension has, or with the argument keys. No extension is imported.
    """
    _check_transform("intensity", intensity, location)
    for transform in augment:
        _check_transform("augment", transform, location)


def _check_transform(setting: str, transform: Json, location: str) -> None:
    name = transform["name"]
    if "keys" in transform:
        raise ConfigError(
            f"{location}: {setting} {name}: keys follow from the task; leave them out"
        )
    if name in _USUAL[setting] or name in TRANSFORMS.names():
        return
    names = intensity_transforms()
    if setting == "augment":
        names = (*spatial_augmentations(), *photometric_augmentations())
    if name not in names:
        raise unknown("transform", name, {*names, *TRANSFORMS.names()}, f"{location}: {setting}")
