"""MONAI transforms by configuration: resizing and intensity scaling once per image, random augmentation per training batch."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import ConfigError, one_line
from medflare.core.settings import refuse_arguments
from medflare.tasks.config import TaskConfig
from medflare.tasks.transforms import SIZING, smooth_augmentations, spatial_augmentations

_DRAWS: Final = 8  # of such a one, before training


class Preprocessing:
    """Deterministic part: stored intensities of any size to what the network sees. Needed again at inference."""

    def __init__(self, task: TaskConfig):
        self._size = task.size
        self._resizes = task.image_mode == "resize"
        self._intensity = _construct("intensity", "", task.intensity)

    def image(self, array: np.ndarray) -> Tensor:
        """float32 (C, h, w) to (C, H, W): intensity transform, then area averaging (shrinking) or linear interpolation.

        With `image_mode` "patch" the size stays as it is.

        Args:
            array: stored intensities of a picture, slice or volume.
        """
        with plain_tensors():
            return self._resize(self._intensity(torch.as_tensor(array, dtype=torch.float32)), mask=False)

    def intensities(self, array: np.ndarray) -> Tensor:
        """The intensity transform alone, float32 (C, h, w).

        Args:
            array: stored intensities of a picture, slice or volume.
        """
        with plain_tensors():
            return self._intensity(torch.as_tensor(array, dtype=torch.float32))

    def mask(self, array: np.ndarray) -> Tensor:
        """Targets int64 (M, h, w) to (M, H, W) by the nearest pixel; with `image_mode` "patch" as they are.

        Args:
            array: targets at the size of the picture.
        """
        if not self._resizes or array.shape[1:] == self._size:
            return torch.as_tensor(array)
        with plain_tensors():
            return self._resize(torch.as_tensor(array, dtype=torch.float32), mask=True).to(torch.int64)

    def _resize(self, image: Tensor, mask: bool) -> Tensor:
        from monai.transforms.spatial.array import Resize

        if not self._resizes or tuple(image.shape[1:]) == self._size:
            return image
        shrinks = all(side >= new for side, new in zip(image.shape[1:], self._size, strict=True))
        linear = "bilinear" if len(self._size) == 2 else "trilinear"
        mode = "nearest-exact" if mask else "area" if shrinks else linear
        return Resize(self._size, mode=mode)(image)


class Augmentation:
    """Random part, by MONAI's dictionary transforms: image and mask move together, intensities change in the image alone."""

    def __init__(self, task: TaskConfig):
        self._masks, self._size = task.kind == "segmentation", task.size
        self._names = [settings["name"] for settings in task.augment]
        self._transforms = [self._build(settings) for settings in task.augment]
        for settings in task.augment:
            if settings["name"] == "RandRotate90" or (SIZING & set(settings) and settings["name"] in spatial_augmentations()):
                self._try(settings)

    def _build(self, settings: Mapping[str, Any]) -> Any:
        name = settings["name"]
        spatial = name in spatial_augmentations() and self._masks
        keys = ["image", "target"] if spatial else ["image"]
        extra: dict[str, Any] = {"keys": keys}
        if name in smooth_augmentations():
            extra |= _of_field(settings, self._size)
        if spatial and name == "RandSmoothDeform":
            extra["grid_mode"] = _modes(settings, "grid_mode", "nearest", "nearest")
        if spatial and "mode" in inspect.signature(_transform_class(f"{name}d")).parameters:
            nearest = "nearest-exact" if name == "RandZoom" else "nearest"  # the other transforms sample a grid
            extra["mode"] = _modes(settings, "mode", "bilinear", nearest)
        return _construct("augment", "d", {**settings, **extra})

    def _try(self, settings: Mapping[str, Any]) -> None:
        """One that may change the size of an image, some draws of it."""
        name, blank = settings["name"], torch.zeros(1, *self._size)
        transform = self._build({**settings, "prob": 1.0})
        for seed in range(_DRAWS):
            transform.set_random_state(seed)
            sample = {"image": blank, "target": blank} if self._masks else {"image": blank}
            try:
                with plain_tensors():
                    found = transform(sample)["image"]
            except (TypeError, ValueError, IndexError, RuntimeError) as error:
                raise ConfigError(f"augment {name}: {one_line(error)}; check its arguments for {_sides(blank)} images") from error
            _check_size(name, blank, found)

    def __call__(self, images: Tensor, targets: Tensor, random: np.random.RandomState) -> tuple[Tensor, Tensor]:
        """A batch, image by image, with draws from `random`.

        Args:
            images: float32 (N, C, ...).
            targets: long (N, ...), or float (N, C, ...) (multilabel); classification targets pass unchanged.
            random: the source of every draw.
        """
        if not self._transforms:
            return images, targets
        for transform in self._transforms:
            transform.set_random_state(state=random)
        with plain_tensors():
            samples = [self._sample(image, target) for image, target in zip(images, targets, strict=True)]
        images = torch.stack([sample["image"] for sample in samples]).to(images.dtype)
        if self._masks:
            targets = torch.stack([sample["target"] for sample in samples]).reshape(targets.shape).to(targets.dtype)
        return images, targets

    def _sample(self, image: Tensor, target: Tensor) -> dict[str, Tensor]:
        sample = {"image": image.clone()}  # some of MONAI's transforms write into what they are given
        if self._masks:
            sample["target"] = target.reshape(-1, *image.shape[1:]).to(torch.float32)
        for name, transform in zip(self._names, self._transforms, strict=True):
            sample = transform(sample)
            _check_size(name, image, sample["image"])
        return sample


def _check_size(name: str, before: Tensor, after: Tensor) -> None:
    if after.shape != before.shape:
        remedy = "the images of a task have one size; leave it out, or take other arguments or equal sides"
        raise ConfigError(f"augment {name}: it makes {_sides(after)} images of {_sides(before)} ones; {remedy}")


def _sides(image: Tensor) -> str:
    return " x ".join(map(str, image.shape[1:]))


def _of_field(settings: Mapping[str, Any], size: tuple[int, ...]) -> dict[str, Any]:
    """What a transform by a smooth field is given beside its settings: the size of the images, and where the field lies.

    On the CPU, whatever the images are on: the draws come from there, and the deformation samples where its grid is.
    """
    place = f"augment {settings['name']}"
    if given := [name for name in ("spatial_size", "device") if name in settings]:
        raise ConfigError(f"{place}: {given[0]} is not the task's to set, it follows from its images; leave it out")
    points = settings.get("rand_size")
    if not isinstance(points, list | tuple) or len(points) != len(size) or max(points) < 2:
        wanted = f"{len(size)} numbers of random points, one an axis and one of them 2 or more"
        raise ConfigError(f"{place}: rand_size must be {wanted}, got {points!r}")
    return {"spatial_size": size, "device": torch.device("cpu")}


def _modes(settings: Mapping[str, Any], argument: str, usual: str, nearest: str) -> list[str]:
    """How image and mask are sampled: the image as it was said, the mask by the nearest pixel."""
    given = settings.get(argument, usual)
    image, *masks = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if any(mask not in ("nearest", nearest) for mask in masks):
        raise ConfigError(f"augment {settings['name']}: {argument} {given!r} would invent labels; masks are moved by the nearest pixel")
    return [image, nearest]


def _construct(setting: str, ending: str, settings: Mapping[str, Any]) -> Any:
    """The transform that `settings` names, with its arguments checked against MONAI's signature."""
    name = settings["name"]
    transform = _transform_class(name + ending)
    arguments = {key: value for key, value in settings.items() if key != "name"}
    refuse_arguments(transform, [key for key in arguments if key != "keys"], f"{setting} {name}", taken=["keys"])
    try:
        return transform(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting} {name}: {' '.join(str(error).split())}; see MONAI's documentation of {name}") from error


@cache
def _transform_class(name: str) -> Any:
    from monai import transforms

    return getattr(transforms, name)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """MONAI's transforms without MONAI's metadata tracking, which costs five times the transform itself on small images."""
    from monai.data.meta_obj import get_track_meta, set_track_meta

    before = get_track_meta()
    set_track_meta(False)
    try:
        yield
    finally:
        set_track_meta(before)


def middle_slice(image: Tensor) -> Tensor:
    """A picture (..., H, W): the image itself (C, H, W), or what lies in the middle of the third axis of a volume (C, X, Y, Z).

    Examples:
        >>> middle_slice(torch.arange(3.0).reshape(1, 1, 1, 3))
        tensor([[[1.]]])
    """
    return image if image.ndim == 3 else image[..., image.shape[-1] // 2]
