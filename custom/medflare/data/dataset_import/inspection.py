"""What a look at datalists and files tells about a task: what is learnt, how many channels and axes images have, what masks hold."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from medflare.core.errors import ConfigError, DataError
from medflare.data.checking.planning import Choice
from medflare.data.datalist import FILE, SPLITS, DatalistItem, class_numbers, mask_names, read_content, read_datalist, site_folders
from medflare.data.reading import NIFTI, PICTURES, explained, label_values, read_stored, suffix

_RENAMED: Final = "the numbers of the datalist, which calls some of them otherwise"
_LOOKED_AT: Final = 24  # images of a site whose channels are counted
_MASKS: Final = 200  # masks of a site whose values are read; `medflare data check` reads all
_MOST_VALUES: Final = 20  # a mask with more holds grey levels, not labels


@dataclass(frozen=True)
class Seen:
    """What is learnt, and what files mean.

    Attributes:
        settings: of the task: name, kind, target, labels, label_values, channels, spatial_dims.
        choices: the same with reasons.
        pictures: whether images are photographs or other pictures, and not volumes or DICOM.
    """

    settings: dict[str, Any]
    choices: tuple[Choice, ...]
    pictures: bool


@dataclass(frozen=True)
class Said:
    """What the user says about it; what is empty is looked for.

    Attributes:
        name: of the task.
        labels: names of classes or structures, without the background.
        channels: of an image.
        dims: 2 or 3.
    """

    name: str = ""
    labels: tuple[str, ...] = ()
    channels: int | None = None
    dims: int | None = None


def look(root: Path, said: Said) -> Seen:
    """What the datalists and files below a data root tell.

    Raises:
        ConfigError: labels that do not fit, or sites that name different ones.
        DataError: no datalist, an empty one, or files that cannot be read or understood.
    """
    if len(set(said.labels)) < len(said.labels):
        raise ConfigError(f"--labels {','.join(said.labels)}: a name stands there twice; give each label its own")
    headers = {folder: _header(folder) for folder in site_folders(root)}
    first, header = next(iter(headers.items()))
    for folder, other in headers.items():
        if other.get("labels") != header.get("labels"):
            raise ConfigError(f"{folder / FILE} and {first / FILE} name different labels; make them agree, or name a site that has all")
    label = _first_label(first, header)
    kind = "segmentation" if all(isinstance(part, str) for part in (label if isinstance(label, list) else [label])) else "classification"
    entries = [entry for folder in headers for entry in _spread(read_datalist(folder, kind), _LOOKED_AT)]
    masks = [entry for folder in headers for entry in _spread(read_datalist(folder, kind), _MASKS)]
    learnt = _structures(masks, header, said, label) if kind == "segmentation" else _classes(masks, header, said, label)
    channels, dims = _images(entries, header, said, first / FILE)
    lacking = sum(None in entry.channels for entry in masks)
    name = said.name or re.sub(r"\W+", "_", str(header.get("name") or root.resolve().name)).strip("_").lower() or "task"
    choices = (
        Choice("kind", kind, "labels are mask files" if kind == "segmentation" else "labels are numbers of classes"),
        *learnt,
        channels,
        dims,
        *([Choice("missing_channels", "zeros", f"{lacking} images lack a channel")] if lacking else []),
    )
    settings = {"name": name} | {choice.setting: choice.value for choice in choices}
    return Seen(settings, choices, all(suffix(entry.image) in PICTURES for entry in entries))


def _header(folder: Path) -> dict[str, Any]:
    read_datalist(folder, "classification")  # says what is wrong with the file; labels are looked at below
    content: dict[str, Any] = dict(read_content(folder))
    return content


def _first_label(folder: Path, header: Mapping[str, Any]) -> Any:
    for split in SPLITS:
        if header.get(split):
            return header[split][0]["label"]
    raise DataError(f"{folder / FILE}: lists no image; write it with medflare data init")


def _spread(entries: Sequence[DatalistItem], most: int) -> list[DatalistItem]:
    """At most so many of them, from the first to the last."""
    return [entries[row] for row in sorted(set(np.linspace(0, len(entries) - 1, min(most, len(entries))).astype(int).tolist()))]


# -- labels ----------------------------------------------------------------------------------------------------------------


def _classes(entries: Sequence[DatalistItem], header: Mapping[str, Any], said: Said, label: Any) -> Iterator[Choice]:
    """Classes by the names that the datalist gives, else by their numbers."""
    several = isinstance(label, list)
    found = len(label) if several else 1 + max((entry.label for entry in entries if isinstance(entry.label, int)), default=0)
    named = {number: name for name, numbers in class_numbers(header.get("labels")).items() for number in numbers}
    labels = said.labels or tuple(named.get(number, f"class_{number}") for number in range(max(found, len(named))))
    if len(labels) < found or several:
        _refuse_other_count(said, found, "classes")
    yield Choice("target", "multilabel" if several else "multiclass", "any of several findings" if several else "one class an image")
    yield Choice("labels", list(labels), "as said" if said.labels else "names from the datalist" if named else "the datalist names none")
    called = {name: label for number, label in enumerate(labels) if (name := named.get(number, str(number))) != str(number)}
    if not several and _in_part(called):
        yield Choice("label_values", {label: [number] for number, label in enumerate(labels)}, _RENAMED)


def _in_part(renamed: Mapping[str, str]) -> bool:
    """Whether some names were changed and others not, so that only numbers tell what is meant, see `loading.renumbering`."""
    return len({before == after for before, after in renamed.items()}) == 2


def _structures(entries: Sequence[DatalistItem], header: Mapping[str, Any], said: Said, label: Any) -> Iterator[Choice]:
    """Structures by the names that the datalist gives, else by the values that masks hold."""
    names = class_numbers(header.get("labels"))
    if isinstance(label, list):
        labels = said.labels or tuple(mask_names(names)) or tuple(f"structure_{number + 1}" for number in range(len(label)))
        _refuse_other_count(said, len(label), "mask files of an image")
        yield Choice("target", "multilabel", "a mask file for each structure")
        yield Choice("labels", list(labels), "as said" if said.labels else "in the order of the mask files")
        return
    known = {name: values for name, values in names.items() if values != [0]}
    if known:
        _refuse_other_count(said, len(known), f"structures of the datalist ({', '.join(known)})")
        meant, reason = dict(zip(said.labels or known, known.values(), strict=True)), "as the datalist says"
    else:
        values = _mask_values(entries)
        shown = ", ".join(map(str, values))
        _refuse_other_count(said, len(values), f'values ({shown}) in {len(entries)} masks; {FILE} may say which is which in "labels"')
        default = ("foreground",) if len(values) == 1 else tuple(f"structure_{value}" for value in values)
        meant, reason = dict(zip(said.labels or default, ([value] for value in values), strict=True)), f"masks hold 0 and {shown}"
    renamed = bool(known) and _in_part(dict(zip(known, meant, strict=True)))
    regions = any(len(listed) > 1 for listed in meant.values())
    if regions or len(meant) == 1:
        yield Choice("target", "multilabel" if regions else "binary", "structures overlap" if regions else "one structure")
        values_of = meant
    else:
        yield Choice("target", "multiclass", "every pixel is one of several structures or background")
        values_of = {"background": [0], **meant}
    yield Choice("labels", list(values_of), reason)
    plain = [[1]] if len(meant) == 1 else [[number] for number in range(len(values_of))]
    if renamed or regions or list(values_of.values()) != plain:
        yield Choice("label_values", values_of, _RENAMED if renamed else "the values that files use")


def _refuse_other_count(said: Said, count: int, what: str) -> None:
    if said.labels and len(said.labels) != count:
        raise ConfigError(f"--labels {','.join(said.labels)}: {len(said.labels)} names for {count} {what}; name each")


def _mask_values(entries: Sequence[DatalistItem]) -> list[int]:
    """What masks hold beside 0, in order."""
    found: set[int] = set()
    for entry in entries:
        mask = label_values(read_stored(entry.masks[0], mask=True).array, entry.masks[0])
        if len(mask) > 1:
            raise DataError(f"{entry.masks[0]}: a mask of {len(mask)} colour channels; store numbers of labels in one grey mask")
        found |= set(np.unique(mask).tolist()) - {0}
        if len(found) > _MOST_VALUES:
            raise DataError(f"{entry.masks[0]}: masks hold {len(found)} values and more (soft edges?); store numbers of labels as PNG")
    if not found:
        raise DataError(f"{entries[0].place}: none of {len(entries)} masks marks anything; are these the masks?")
    return sorted(found)


# -- images ----------------------------------------------------------------------------------------------------------------


def _images(entries: Sequence[DatalistItem], header: Mapping[str, Any], said: Said, file: Path) -> tuple[Choice, Choice]:
    """Channels and dimensions."""
    several = [len(entry.channels) for entry in entries if entry.channels]
    shapes = [_stored(entry) for entry in entries]
    deep = any(len(shape) > 2 for _, shape in shapes)
    if several:
        channels = Choice("channels", _channel_names(max(several), header, said, file), "a file for each channel")
    else:
        count = max(number for number, _ in shapes)
        reason = {1: "grey", 3: "colour"}.get(count, f"{count} channels in a file")
        channels = Choice("channels", said.channels or count, "as said" if said.channels else f"{reason} in {len(shapes)} images looked at")
    dims = said.dims or (3 if deep else 2)
    return channels, Choice("spatial_dims", dims, "as said" if said.dims else "volumes" if deep else "pictures")


def _channel_names(count: int, header: Mapping[str, Any], said: Said, file: Path) -> list[str]:
    """What the datalist calls the channels of images that have a file for each."""
    if said.channels not in (None, count):
        raise ConfigError(f"--channels {said.channels}: images have {count} files, one for each channel; leave it out")
    given = header.get("channel_names") or {}
    named = dict(enumerate(given)) if isinstance(given, list) else given
    if not isinstance(named, Mapping) or not all(isinstance(name, str | int) for name in named.values()):
        raise DataError(f'{file}: channel_names must be an object like {{"0": "T1", "1": "T2"}}, got {json.dumps(given)[:80]}; correct it')
    named = {str(number): str(name) for number, name in named.items()}
    return [named.get(str(number), f"channel_{number}") for number in range(count)]


def _stored(entry: DatalistItem) -> tuple[int, tuple[int, ...]]:
    """Channels and sides of an image's first file; colour that is grey everywhere counts as grey."""
    if suffix(entry.image) in NIFTI:
        import nibabel

        with explained(entry.image):
            shape = tuple(map(int, nibabel.load(entry.image).shape))
        return (shape[3] if len(shape) > 3 else 1), tuple(side for side in shape[:3] if side > 1)
    array = read_stored(entry.image).array
    grey = bool((array == array[:1]).all())
    return (1 if grey else 3), array.swapaxes(1, 2).shape[1:]
