"""How a downloaded folder is laid out: a table, images with masks, or a folder per class; and the images that this makes."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from medflare.core.errors import DataError
from medflare.data.dataset_import.finding import FileName, Holdings, Item, read_name, split_folder
from medflare.data.dataset_import.tables import GUESSED, Columns, read_table, sorted_labels, suits
from medflare.data.reading import NIFTI, suffix

Kind: TypeAlias = Literal["segmentation", "classification"]
Key: TypeAlias = tuple[str, ...]

_HEADER: Final = "dataset.json"  # of the Medical Segmentation Decathlon and of nnU-Net
_MOST_CLASSES: Final = 30  # more folders than that are patients rather than classes
_SHAPES: Final = "an image and its mask by name (a.png, a_mask.png), images/ and masks/, a folder per class, or a table (CSV)"


@dataclass(frozen=True)
class Found:
    """The images of a folder.

    Attributes:
        kind: whether they have masks or classes.
        items: the images.
        labels: what numbers mean, number as text -> name, as Decathlon has it; or name -> numbers, as nnU-Net has it; empty: unknown.
        channels: number of a channel as text -> its name; empty: unknown.
        by: what was recognised, for people.
        notes: what was passed over, one line each.
        missing: images without mask or label and the like, one line each.
    """

    kind: Kind
    items: tuple[Item, ...]
    labels: Mapping[str, Any]
    channels: Mapping[str, str]
    by: str
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def recognise(held: Holdings, *, kind: str = "", table: Path | None = None, columns: Columns = GUESSED) -> Found:
    """The images of a folder with their labels or masks.

    What was said counts first; then a table that speaks of the images, then masks, then a folder per class.

    Args:
        held: the folder's files.
        kind: "segmentation", "classification", or "" for what is there.
        table: the table to use, or None.
        columns: of the table, as far as they were said.

    Raises:
        DataError: nothing that is known, or something that may be read in two ways.
    """
    said = table is not None or columns != GUESSED
    chosen = table or _only_table(held, said)
    if chosen is not None:
        return _of_table(chosen, held, columns, kind)
    notes = tuple(f"{held.named(path)} is not used: it names no image of the folder" for path in held.tables)
    names = {image: read_name(image.relative_to(held.root)) for image in held.images}
    masks = sum(name.mask for name in names.values())
    if kind == "segmentation" or (masks and kind != "classification"):
        found = _pairs(held, names)
        return replace(found, notes=(*notes, *found.notes))
    found = _class_folders(held, [image for image, name in names.items() if not name.mask], sure=kind == "classification", passed=notes)
    return replace(found, notes=(*notes, *([f"{masks} masks are not used"] if masks else [])))


def _only_table(held: Holdings, said: bool) -> Path | None:
    """The one table that can be meant; None where there is none."""
    fitting = [path for path in held.tables if said or suits(path, held)]
    if len(fitting) > 1:
        names = ", ".join(held.named(path) for path in fitting[:4])
        raise DataError(f"{held.root}: {len(fitting)} tables may hold the labels ({names}); choose with --table")
    if said and not fitting:
        raise DataError(f"{held.root}: columns were named and there is no table (CSV or TSV); name it with --table")
    return fitting[0] if fitting else None


def _of_table(path: Path, held: Holdings, columns: Columns, kind: str) -> Found:
    read = read_table(path, held, columns, kind=kind)
    segments = bool(read.items and read.items[0].masks)
    labels = {str(number): name for number, name in enumerate(read.labels)}
    return Found("segmentation" if segments else "classification", read.items, labels, {}, f"{path.name}: {read.by}", missing=read.missing)


# -- images and masks ------------------------------------------------------------------------------------------------------


def _pairs(held: Holdings, names: Mapping[Path, FileName]) -> Found:
    """Every mask with its image; the channels of an image may lie in files of their own.

    An image has the mask of the same split, folders and name; else the only one of its name that no other image has so, and of no other
    split.
    """
    masks: dict[Key, Path] = {}
    for path, name in names.items():
        if name.mask and masks.setdefault(name.key, path) is not path:
            both = f"{held.named(masks[name.key])} and {held.named(path)}"
            raise DataError(f"{both}: two masks of one image; list them in a table and say --mask-column with a column for each")
    pictures = {path: name for path, name in names.items() if not name.mask}
    taken = {key for name in pictures.values() for key in (name.key, *(name.channel or ())[:1])}
    free = [key for key in masks if key not in taken]

    def mask_of(key: Key) -> Key | None:
        if key in masks:
            return key
        same = [other for other in free if other[-1] == key[-1] and (other[0] == key[0] or "" in (other[0], key[0]))]
        nearer = [other for other in same if other[1:] == key[1:]] or same
        return nearer[0] if len(nearer) == 1 else None

    images: dict[Key, dict[str, Path]] = {}
    for path, name in pictures.items():
        key, channel = name.key, ""
        # pictures have channels by number alone: their names end with words
        if mask_of(key) is None and name.channel and (name.channel[1].isdecimal() or suffix(path) in NIFTI) and mask_of(name.channel[0]):
            key, channel = name.channel
        if (other := images.setdefault(key, {}).setdefault(channel, path)) is not path:
            raise DataError(f"{held.named(path)} and {held.named(other)} go by one name; rename one, or list them in a table")
    masked = {key: place for key in images if (place := mask_of(key)) is not None}
    channels = sorted({channel for key in masked for channel in images[key]})
    items: list[Item] = []
    used: dict[Key, Path] = {}
    for key, place in masked.items():
        first = next(iter(images[key].values()))
        if used.setdefault(place, first) is not first:
            both = f"{held.named(used[place])} and {held.named(first)} would both have the mask {held.named(masks[place])}"
            raise DataError(f"{both}; lay images and masks in folders of the same names, or list them in a table")
        split = names[first].split or names[masks[place]].split
        items.append(Item(tuple(map(images[key].get, channels)), masks[place], split=split))
    if not items:
        raise DataError(f"{held.root}: {len(masks)} masks and none belongs to an image by its name; I know {_SHAPES}")
    if len(channels) > 1 and "" in channels:
        raise DataError(f"{held.root}: some images have a file for each channel ({channels[1]}) and some do not; list them in a table")
    without = [next(iter(files.values())) for key, files in images.items() if key not in masked]
    unlabelled = [path for path in without if names[path].split == "test" and not any(item.split == "test" for item in items)]
    missing = [f"{held.named(path)}: no mask" for path in without if path not in unlabelled]
    missing += [f"{held.named(masks[key])}: a mask without an image" for key in sorted(masks.keys() - used.keys())]
    notes = (f"{len(unlabelled)} test images without masks are not used",) if unlabelled else ()
    own = f", a file for each channel ({', '.join(channels)})" if len(channels) > 1 else ""
    labels, named = _header(held)
    named = named or {str(number): name for number, name in enumerate(channels) if name and not name.isdecimal()}
    return Found("segmentation", tuple(items), labels, named, f"images and masks by name{own}", notes, tuple(missing))


def _header(held: Holdings) -> tuple[dict[str, Any], dict[str, str]]:
    """Labels and names of channels that a dataset.json has; empty where there is none."""
    for path in (held.root / _HEADER, *sorted(held.root.glob(f"*/{_HEADER}"))):
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                channels = content.get("channel_names", content.get("modality")) or {}
                return dict(content.get("labels") or {}), {str(number): str(name) for number, name in channels.items()}
            except (AttributeError, ValueError) as error:
                raise DataError(f"{path}: no header of a dataset ({error}); correct it or delete it") from error
    return {}, {}


# -- a folder per class ----------------------------------------------------------------------------------------------------


def _class_folders(held: Holdings, images: Sequence[Path], *, sure: bool, passed: Sequence[str]) -> Found:
    folders = {image: image.relative_to(held.root).parent.parts for image in images}
    wrapper = _shared(list(folders.values()))
    items: list[tuple[str, Item]] = []
    loose = []
    for image, parts in folders.items():
        split = next((found for part in parts if (found := split_folder(part))), "")
        named = [part for part in parts[wrapper:] if not split_folder(part)]
        if named:
            items.append((named[0], Item((image,), None, split=split)))
        else:
            loose.append(image)
    counts = Counter(name for name, _ in items)
    if len(counts) < 2:
        tables = f" ({', '.join(passed)})" if passed else ""
        raise DataError(f"{held.root}: {len(images)} images and no sign of what they show{tables}; I know {_SHAPES}")
    if len(counts) > _MOST_CLASSES and not sure:
        some = ", ".join(sorted(counts)[:3])
        raise DataError(f"{held.root}: {len(counts)} folders ({some}, ...), too many for classes; if they are, say --kind classification")
    names = sorted_labels(counts)
    labelled = tuple(replace(item, label=names.index(name)) for name, item in items)
    missing = tuple(f"{held.named(image)}: in no class folder" for image in loose)
    labels = {str(number): name for number, name in enumerate(names)}
    return Found("classification", labelled, labels, {}, f"a folder per class: {', '.join(names)}", missing=missing)


def _shared(folders: Sequence[tuple[str, ...]]) -> int:
    """How many folders all images lie in together, above those of splits and classes."""
    depth = 0
    while len({parts[depth : depth + 1] for parts in folders}) == 1 and len(folders[0]) > depth + 1:
        depth += 1
    return depth
