"""Transforms of MONAI and extensions by configuration: resizing and intensity scaling once per
image, random augmentation per training batch.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from medflare.core.errors import ConfigError, one_line
from medflare.core.settings import refuse_arguments
from medflare.core.text import format_shape
from medflare.tasks.allowed_transforms import (
    SIZING,
    TRANSFORMS,
    smooth_augmentations,
    spatial_augmentations,
)
from medflare.tasks.config import TaskConfig

_DRAWS = 8  # tries of an augmentation that may change the size of an image


class Preprocessing:
    """The deterministic transforms, from stored intensities of any size to the network's images;
    used in inference too.
    """

    def __init__(self, task: TaskConfig):
        self._size = task.size
        self._resizes = task.image_mode == "resize"
        self._name = (task.intensity or {}).get("name", "")
        self._intensity = _construct("intensity", task.intensity)

    def image(self, array: np.ndarray) -> Tensor:
        """float32 (C, h, w) to (C, H, W): intensity transform, then area averaging (shrinking) or
        linear interpolation.

        With `image_mode` "patch" the size is kept.
        """
        return self._sized(self.intensities(array))

    def intensities(self, array: np.ndarray) -> Tensor:
        """The intensity transform alone, float32 (C, h, w); the array is not changed.

        Raises:
            ConfigError: the transform changes channels or size.
        """
        with plain_tensors():  # of a copy: some transforms write into their images
            image = torch.tensor(array, dtype=torch.float32)
            scaled: Tensor = self._intensity(image)
        _check_shape(f"intensity {self._name}", image, scaled)
        return scaled

    def mask(self, array: np.ndarray) -> Tensor:
        """Targets int64 (M, h, w) to (M, H, W) by the nearest pixel; with `image_mode` "patch"
        unchanged.
        """
        return self._sized(torch.as_tensor(array), "nearest-exact").to(torch.int64)

    def _sized(self, image: Tensor, mode: str = "") -> Tensor:
        if not self._resizes:
            return image
        return resized(image[None].float().contiguous(), self._size, mode)[0]


def resized(images: Tensor, size: tuple[int, ...], mode: str = "") -> Tensor:
    """Images or probabilities (N, C, ...) in this size (N, C, *size): by area averaging if all
    sides shrink, else linearly, or by another `mode`.
    """
    if images.shape[2:] == size:
        return images
    if not mode:
        mode = "bilinear" if len(size) == 2 else "trilinear"
        if all(side <= old for side, old in zip(size, images.shape[2:], strict=True)):
            mode = "area"
    return functional.interpolate(images, size, mode=mode)


class Augmentation:
    """The random transforms, MONAI's dictionary forms: spatial ones move image and mask alike.

    Raises:
        ConfigError: an argument that MONAI refuses, or an augmentation that changes the size of
            images.
    """

    def __init__(self, task: TaskConfig):
        self._masks = task.kind == "segmentation"
        self._size = task.size
        self._transforms = [(settings["name"], self._build(settings)) for settings in task.augment]
        for settings in task.augment:
            name = settings["name"]
            may_resize = SIZING & set(settings) and name in spatial_augmentations()
            if may_resize or name == "RandRotate90":
                self._check_sizes(settings)

    def _build(self, settings: Mapping[str, Any]) -> Any:
        if _ours(**settings):
            return _construct("augment", settings)
        name = settings["name"]
        cls = _transform_class("augment", name)
        spatial = getattr(cls, "spatial", name in spatial_augmentations()) and self._masks
        extra: dict[str, Any] = {"keys": ["image", "target"] if spatial else ["image"]}
        if name in smooth_augmentations():
            # The generators and the deformation's grid are on the CPU.
            extra |= {"spatial_size": self._size, "device": torch.device("cpu")}
        if spatial and name == "RandSmoothDeform":
            extra["grid_mode"] = [_interpolation(settings.get("grid_mode", "nearest")), "nearest"]
        if spatial and "mode" in inspect.signature(cls).parameters:
            # The other transforms sample a grid.
            nearest = "nearest-exact" if name == "RandZoom" else "nearest"
            extra["mode"] = [_interpolation(settings.get("mode", "bilinear")), nearest]
        return _construct("augment", {**settings, **extra})

    def _check_sizes(self, settings: Mapping[str, Any]) -> None:
        name = settings["name"]
        transform = self._build({**settings, "prob": 1.0})
        blank = torch.zeros(1, *self._size)
        try:
            with plain_tensors():
                for seed in range(_DRAWS):
                    transform.set_random_state(seed)
                    transformed = transform({"image": blank, "target": blank})
                    _check_shape(f"augment {name}", blank, transformed["image"])
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ConfigError(
                f"augment {name}: {one_line(error)}; "
                f"check its arguments for {format_shape(self._size)} images"
            ) from error

    def __call__(
        self, images: Tensor, targets: Tensor, random: np.random.RandomState
    ) -> tuple[Tensor, Tensor]:
        """The batch, augmented image by image.

        Args:
            images: float32 (N, C, ...).
            targets: long (N, ...), or float (N, C, ...) (multilabel); classification targets are
                returned unchanged.
            random: the generator of all random numbers.
        """
        if not self._transforms:
            return images, targets
        for _, transform in self._transforms:
            transform.set_random_state(state=random)
        with plain_tensors():
            pairs = zip(images, targets, strict=True)
            samples = [self._sample(image, target) for image, target in pairs]
        images = torch.stack([sample["image"] for sample in samples]).to(images.dtype)
        if self._masks:
            masks = torch.stack([sample["target"] for sample in samples])
            targets = masks.reshape(targets.shape).to(targets.dtype)
        return images, targets

    def _sample(self, image: Tensor, target: Tensor) -> dict[str, Tensor]:
        sample = {"image": image.clone()}  # some of MONAI's transforms change their input in place
        if self._masks:
            sample["target"] = target.reshape(-1, *image.shape[1:]).to(torch.float32)
        for name, transform in self._transforms:
            sample = transform(sample)
            _check_shape(f"augment {name}", image, sample["image"])
        return sample


def _check_shape(name: str, before: Tensor, after: Tensor) -> None:
    if after.shape == before.shape:
        return
    raise ConfigError(
        f"{name}: it makes {format_shape(after.shape)} images of {format_shape(before.shape)} "
        "ones; the images of a task have one size and number of channels; leave it out, or take "
        "other arguments or equal sides"
    )


def _interpolation(mode: Any) -> str:
    """The interpolation of the image; masks are always moved by the nearest pixel."""
    return str(mode if isinstance(mode, str) else mode[0])


def _construct(setting: str, settings: Mapping[str, Any]) -> Any:
    """The transform that `settings` names, with its arguments checked against its signature."""
    arguments = dict(settings)
    name = arguments.pop("name")
    transform = _ours(name, **arguments) or _transform_class(setting, name)
    names = [key for key in arguments if key != "keys"]
    refuse_arguments(transform, names, f"{setting} {name}", reserved=["keys"])
    try:
        return transform(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{setting} {name}: {one_line(error)}; see the documentation of {name}"
        ) from error


@dataclass
class _ScaleIntensityRange:
    a_min: float
    a_max: float
    b_min: float
    b_max: float
    clip: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        shifted = image.contiguous() - self.a_min
        if self.a_max == self.a_min:
            return shifted + self.b_min
        scaled = shifted / (self.a_max - self.a_min)
        scaled = scaled * (self.b_max - self.b_min) + self.b_min
        return scaled.clamp(self.b_min, self.b_max) if self.clip else scaled


class _RandFlip:
    def __init__(self, prob: float = 0.1, spatial_axis: int | Sequence[int] | None = None):
        self._prob = min(max(prob, 0.0), 1.0)
        self._axes = [spatial_axis] if isinstance(spatial_axis, int) else spatial_axis

    def set_random_state(self, state: np.random.RandomState) -> None:
        self._random = state

    def __call__(self, sample: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._random.rand() >= self._prob:
            return sample
        spatial = list(range(1, sample["image"].ndim))
        axes = spatial if self._axes is None else [spatial[axis] for axis in self._axes]
        return {key: image.flip(axes) for key, image in sample.items()}


# Equal to MONAI's bit by bit, without its import, which takes seconds.
_OURS = {"RandFlip": _RandFlip, "ScaleIntensityRange": _ScaleIntensityRange}


def _ours(name: str, **arguments: Any) -> Any:
    """The class in `_OURS`, if it accepts exactly these arguments, else None."""
    try:
        inspect.signature(_OURS[name]).bind(**arguments)
    except (KeyError, TypeError):
        return None
    return _OURS[name]


def _transform_class(setting: str, name: str) -> Any:
    """The array form for `intensity`, the dictionary form for `augment`."""
    from monai import transforms

    extension = TRANSFORMS.foreign(name)
    if extension is None:
        return getattr(transforms, name + "d" * (setting == "augment"))
    use = "augment" if issubclass(extension, transforms.Randomizable) else "intensity"
    if use != setting:
        raise ConfigError(f"{setting} {name}: this transform is for {use}")
    return extension


@contextmanager
def plain_tensors() -> Iterator[None]:
    """MONAI's transforms without its metadata tracking, which takes five times as long as the
    transform on small images.
    """
    if "monai" not in sys.modules:  # no transform of MONAI was made
        yield
        return
    from monai.data.meta_obj import get_track_meta, set_track_meta

    before = get_track_meta()
    set_track_meta(False)
    try:
        yield
    finally:
        set_track_meta(before)


def middle_slice(image: Tensor) -> Tensor:
    """A picture (..., H, W): the image itself (C, H, W), or the middle of the third axis of a
    volume (C, X, Y, Z).
    """
    if image.ndim == 3:
        return image
    return image[..., image.shape[-1] // 2]
