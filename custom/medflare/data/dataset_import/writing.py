"""Sites on disk: images looked at before anything is written, then the files of a site and its datalist."""

import filecmp
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

from medflare.core.errors import DataError
from medflare.core.store import write_atomically, write_json
from medflare.data.datalist import FILE, SPLITS
from medflare.data.dataset_import.cutting import check_picture, write_windows
from medflare.data.dataset_import.finding import Item, named
from medflare.data.geometry import format_shape
from medflare.data.progress import counted
from medflare.data.reading import NIFTI, PICTURES, explained, suffix

Recode: TypeAlias = Callable[[Path], Any]  # a mask file -> the values that the task lists, as a uint8 array (H, W)


def folder_of(home: Path, site: str) -> Path:
    """Where a site's datalist lies: `home` itself where the site has no name."""
    return home / site if site else home


# -- checked ---------------------------------------------------------------------------------------------------------------


def usable_items(items: Sequence[Item], root: Path) -> tuple[list[Item], list[str]]:
    """Images whose files open and whose masks have their size, and a line for each of the others. Only headers are read.

    Args:
        items: images with their masks, or the windows that they will be cut from.
        root: the folder that files are named by in messages.
    """
    usable, bad = [], []
    listed: set[Path] = set()
    check = cache(check_picture)  # many images come from one picture
    for item in counted(items, len(items), f"{root}, headers read"):
        try:
            if item.first in listed:
                raise DataError(f"{named(item.first, root)}: listed twice")
            listed.add(item.first)
            if item.window is None:
                _check_files(item, root)
            else:
                check(item.window.source, item.window.size)
        except DataError as error:
            bad.append(str(error))
        else:
            usable.append(item)
    return usable, bad


def _check_files(item: Item, root: Path) -> None:
    sizes = {file: _size(file) for file in (*filter(None, item.files), *item.masks)}
    for file, size in sizes.items():
        first = sizes[item.first]
        if size and first and size != first:
            raise DataError(f"{named(file, root)}: {format_shape(size)}, {named(item.first, root)} is {format_shape(first)}")


def _size(path: Path) -> tuple[int, ...]:
    """The sides of a picture, the smaller first since EXIF may turn it, or of a volume; () where the header does not say."""
    with explained(path):
        if suffix(path) in PICTURES:
            from PIL import Image

            with Image.open(path) as picture:
                return tuple(sorted(picture.size))
        if suffix(path) in NIFTI:
            import nibabel

            return tuple(map(int, nibabel.load(path).shape[:3]))
    return ()


def refuse_existing(home: Path, sites: Iterable[str], *, force: bool) -> None:
    """DataError where a datalist of these sites exists (unless `force`), or one of another site: its patients would be at two sites."""
    names = list(sites)
    for site in names:
        path = folder_of(home, site) / FILE
        if path.exists() and not force:
            raise DataError(f"{path} exists; keep it, or write it anew with --force")
    strangers = sorted(path for path in home.glob(f"*/{FILE}") if path.parent.name not in names)
    if strangers and "" not in names:
        raise DataError(f"{strangers[0].parent} is a site of an earlier deal; remove it, or take another folder")


# -- written ---------------------------------------------------------------------------------------------------------------


def write_datalist(
    folder: Path, items: Sequence[Item], root: Path, *, splits: Sequence[str] = SPLITS, tables: Mapping[str, Any] | None = None
) -> None:
    """A site's datalist.json, whose files lie in its folder as they lie below `root`.

    Args:
        folder: of the site.
        items: with their splits; those without are left out.
        root: the folder that was given.
        splits: lists to write; one that is not there is drawn when the data are read.
        tables: "labels" and "channel_names" of the Decathlon layout; empty ones are left out.
    """
    content: dict[str, Any] = {"name": root.resolve().name}
    content |= {name: dict(values) for name, values in (tables or {}).items() if values}
    content |= {split: [_entry(item, root) for item in items if item.split == split] for split in splits}
    write_json(folder / FILE, content)


def bring_files(folder: Path, items: Iterable[Item], root: Path, *, copy: bool, recode: Recode | None = None) -> list[Item]:
    """The files of a site below its folder, as hard links or copies; windows are cut and written.

    Args:
        folder: of the site.
        items: its images with their masks.
        root: the folder that was given, below which they lie.
        copy: files are copied and not linked.
        recode: masks become PNG files with other values, see `Recode`; None: they are brought like images.

    Returns:
        The images as they are listed: with the masks that were written, named as if they lay below `root`.

    Raises:
        DataError: another file lies there, links cannot be made, or a picture that is cut is damaged.
    """
    brought, listed = [], list(items)
    write_windows({folder / item.first.relative_to(root): item.window for item in listed if item.window is not None})
    for item in counted(listed, len(listed), f"{folder}, images brought"):
        images = filter(None, item.files if item.window is None else ())
        masks = item.masks if recode is None else []
        for file in (*images, *masks):
            _bring(file, folder / file.relative_to(root), copy)
        brought.append(item if recode is None else _recoded(item, folder, root, recode))
    return brought


def _recoded(item: Item, folder: Path, root: Path, recode: Recode) -> Item:
    from PIL import Image

    placed = []
    for mask in item.masks:
        with explained(mask):
            values = recode(mask)
        file = mask.with_name(f"{mask.name.removesuffix(suffix(mask))}.png")
        content = BytesIO()
        Image.fromarray(values).save(content, format="PNG")
        write_atomically(folder / file.relative_to(root), content.getvalue())
        placed.append(file)
    return replace(item, label=placed if isinstance(item.label, list) else placed[0])


def _bring(source: Path, target: Path, copy: bool) -> None:
    """A second name of the same file, or a copy; of a folder, of every file in it. Nothing that lies there is replaced."""
    if source.is_dir():
        for inner in sorted(source.iterdir()):
            _bring(inner, target / inner.name, copy)
        return
    if target.exists():
        if not (target.samefile(source) or filecmp.cmp(source, target, shallow=False)):
            raise DataError(f"{target} exists and is another file than {source}; take an empty folder")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if copy:
            shutil.copyfile(source, target)
        else:
            os.link(source, target)
    except OSError as error:
        raise DataError(f"{target}: {error.strerror}; take a folder on the disk of the images, or copy them with --copy") from error


def _entry(item: Item, root: Path) -> dict[str, Any]:
    files = [None if file is None else named(file, root) for file in item.files]
    masks = [named(mask, root) for mask in item.masks]
    label = (masks if isinstance(item.label, list) else masks[0]) if masks else item.label
    entry = {"image": files[0] if len(files) == 1 else files, "label": label}
    return entry | ({"patient": item.patient} if item.patient else {})
