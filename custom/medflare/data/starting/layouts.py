"""How a downloaded folder is laid out: a table, images with masks, or a folder per class; and the images that this makes."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from medflare.core.errors import DataError
from medflare.data.reading import NIFTI, suffix
from medflare.data.starting.finding import Holdings, Item
from medflare.data.starting.tables import GUESSED, Columns, read_table, sorted_labels, suits
from medflare.data.starting.words import FileName, read_name, split_folder

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
    notes = tuple(f"{held.named(path)} is not used: it names no image of the folder" for path in held.tables if path != chosen and not said)
    if chosen is not None:
        return replace(_of_table(chosen, held, columns, kind), notes=notes)
    names = {image: read_name(image.relative_to(held.root)) for image in held.images}
    masks = sum(name.mask for name in names.values())
    if kind == "segmentation" or (masks and kind != "classification"):
        found = _pairs(held, names)
        return replace(found, notes=(*notes, *found.notes))
    pictures = [image for image, name in names.items() if not (masks and name.mask)]
    found = _class_folders(held, pictures, sure=kind == "classification", passed=notes)
    return replace(found, notes=(*notes, f"{masks} masks are not used") if masks else notes)


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
    labels: dict[str, Any] = {} if segments and not read.labels else {str(number): name for number, name in enumerate(read.labels)}
    return Found("segmentation" if segments else "classification", read.items, labels, {}, f"{path.name}: {read.by}", missing=read.missing)


# -- images and masks ------------------------------------------------------------------------------------------------------


def _pairs(held: Holdings, names: Mapping[Path, FileName]) -> Found:
    """Every mask with its image; the channels of an image may lie in files of their own."""
    masks = _keyed(held, {path: name for path, name in names.items() if name.mask})
    pictures = {path: name for path, name in names.items() if not name.mask}
    free = _free(masks, pictures.values())
    images: dict[Key, dict[str, Path]] = {}
    for path, name in pictures.items():
        key, channel = _image_of(path, name, masks, free)
        others = images.setdefault(key, {})
        if channel in others:
            raise DataError(f"{held.named(path)} and {held.named(others[channel])} go by one name; rename one, or list them in a table")
        others[channel] = path
    items: list[Item] = []
    used: dict[Key, Path] = {}
    without = []
    channels = sorted({channel for key, files in images.items() if _place(key, masks, free) for channel in files})
    for key, files in images.items():
        place = _place(key, masks, free)
        first = next(iter(files.values()))
        if place is None:
            without.append(first)
            continue
        mask = masks[place]
        if used.setdefault(place, first) is not first:
            both = f"{held.named(used[place])} and {held.named(first)} would both have the mask {held.named(mask)}"
            raise DataError(f"{both}; lay images and masks in folders of the same names, or list them in a table")
        items.append(Item(tuple(map(files.get, channels)), mask, split=names[first].split or names[mask].split))
    if not items:
        raise DataError(f"{held.root}: {len(masks)} masks and none belongs to an image by its name; I know {_SHAPES}")
    if len(channels) > 1 and "" in channels:
        raise DataError(f"{held.root}: some images have a file for each channel ({channels[1]}) and some do not; list them in a table")
    unlabelled = [path for path in without if names[path].split == "test" and not any(item.split == "test" for item in items)]
    missing = [f"{held.named(path)}: no mask" for path in without if path not in unlabelled]
    missing += [f"{held.named(masks[key])}: a mask without an image" for key in sorted(masks.keys() - used.keys())]
    own = f", a file for each channel ({', '.join(channels)})" if len(channels) > 1 else ""
    notes = (f"{len(unlabelled)} test images without masks are not used",) if unlabelled else ()
    header = _header(held)
    named = _header_channels(header) or {str(number): name for number, name in enumerate(channels) if not name.isdecimal() and name}
    return Found("segmentation", tuple(items), _header_labels(header), named, f"images and masks by name{own}", notes, tuple(missing))


def _image_of(path: Path, name: FileName, masks: Mapping[Key, Path], free: Mapping[str, Sequence[Key]]) -> tuple[Key, str]:
    """The image that a file belongs to, and the channel that it holds; "" where it holds all. Pictures have channels by number alone."""
    if _place(name.key, masks, free) is None and name.channel is not None:
        key, channel = name.channel
        if _place(key, masks, free) is not None and (channel.isdecimal() or suffix(path) in NIFTI):
            return key, channel
    return name.key, ""


def _keyed(held: Holdings, masks: Mapping[Path, FileName]) -> dict[Key, Path]:
    keyed: dict[Key, Path] = {}
    for path, name in masks.items():
        if keyed.setdefault(name.key, path) is not path:
            both = f"{held.named(keyed[name.key])} and {held.named(path)}"
            raise DataError(f"{both}: two masks of one image; list them in a table and say --mask-column with a column for each")
    return keyed


def _free(masks: Mapping[Key, Path], images: Iterable[FileName]) -> dict[str, list[Key]]:
    """Name -> the masks of that name which no image has by split, folders and name."""
    taken = {key for image in images for key in (image.key, *(image.channel or ())[:1])}
    free: dict[str, list[Key]] = {}
    for key in masks:
        if key not in taken:
            free.setdefault(key[-1], []).append(key)
    return free


def _place(key: Key, masks: Mapping[Key, Path], free: Mapping[str, Sequence[Key]]) -> Key | None:
    """The key of an image's mask: the same, or of those that no other image has the only one of that name and of no other split.

    One in folders of the same names comes before one in others.
    """
    if key in masks:
        return key
    same = [other for other in free.get(key[-1], ()) if other[0] == key[0] or "" in (other[0], key[0])]
    nearer = [other for other in same if other[1:] == key[1:]] or same
    return nearer[0] if len(nearer) == 1 else None


def _header(held: Holdings) -> dict[str, Any]:
    """What dataset.json says, where there is one."""
    for path in (held.root / _HEADER, *sorted(held.root.glob(f"*/{_HEADER}"))):
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{path}: not valid JSON ({error}); correct it or delete it") from error
            return content if isinstance(content, dict) else {}
    return {}


def _header_labels(header: Mapping[str, Any]) -> dict[str, Any]:
    labels = header.get("labels")
    return dict(labels) if isinstance(labels, Mapping) else {}


def _header_channels(header: Mapping[str, Any]) -> dict[str, str]:
    named = header.get("channel_names", header.get("modality"))
    return {str(number): str(name) for number, name in named.items()} if isinstance(named, Mapping) else {}


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
    place = {name: number for number, name in enumerate(names)}
    labelled = tuple(replace(item, label=place[name]) for name, item in items)
    missing = tuple(f"{held.named(image)}: in no class folder" for image in loose)
    labels = {str(number): name for name, number in place.items()}
    return Found("classification", labelled, labels, {}, f"a folder per class: {', '.join(names)}", missing=missing)


def _shared(folders: Sequence[tuple[str, ...]]) -> int:
    """How many folders all images lie in together, above those of splits and classes."""
    depth = 0
    while len({parts[depth : depth + 1] for parts in folders}) == 1 and len(folders[0]) > depth + 1:
        depth += 1
    return depth
