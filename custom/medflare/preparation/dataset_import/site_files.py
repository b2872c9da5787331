"""The files of a site: its datalist, and its images as links or copies."""

import filecmp
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medflare.core.errors import DataError
from medflare.core.files import make_folder, write_atomically, write_json
from medflare.data.datalist import FILE, LISTS
from medflare.data.progress import with_progress
from medflare.data.reading import dicom_files
from medflare.preparation.dataset_import.folders import Item


def check_files(items: Iterable[Item], root: Path, made: Collection[Path] = ()) -> None:
    """Raise DataError for a file that does not exist, and for an image that is listed twice.

    Folders that will be `made` need not exist.
    """
    listed = set()
    for item in items:
        for file in item.paths:
            if file not in item.rendered and file not in made and not file.exists():
                raise DataError(
                    f"{file}: file not found; restore it, or take its link or its row out"
                )
        if item.first in listed:
            path = item.first.relative_to(root).as_posix()
            raise DataError(f"{root}: {path} is listed twice")
        listed.add(item.first)


def check_target(home: Path, sites: Iterable[str], *, force: bool) -> None:
    """Raise DataError for a datalist that would be overwritten, and for other sites in the folder.

    Their patients may be the same.
    """
    names = list(sites)
    for site in names:
        path = home / site / FILE
        if path.exists() and not force:
            raise DataError(f"{path} exists; keep it, or replace it with --force")
    if "" in names:
        return
    for path in sorted(home.glob(f"*/{FILE}")):
        if path.parent.name not in names:
            raise DataError(
                f"{path.parent} is a site of an earlier import; remove it, or take another folder"
            )


def write_datalist(
    folder: Path,
    items: Sequence[Item],
    root: Path,
    *,
    splits: Sequence[str] = LISTS,
    header: Mapping[str, Any] | None = None,
) -> None:
    """Write a site's datalist.json.

    Args:
        folder: of the site; its files have the same relative paths as in `root`.
        splits: the lists to write; a list that is missing is drawn when the data are read.
        header: "labels" and "channel_names" of the Decathlon layout, "structure" and
            "annotated" as of `Dataset`; empty ones are left out.
    """

    def relative(path: Path | None) -> str | None:
        return None if path is None else path.relative_to(root).as_posix()

    def entry(item: Item) -> dict[str, Any]:
        files = list(map(relative, item.files))
        listed: dict[str, Any] = {"image": files, "label": item.label}
        if len(files) == 1:
            listed["image"] = files[0]
        if item.masks:
            masks = list(map(relative, item.masks))
            listed["label"] = masks if isinstance(item.label, list) else masks[0]
        if item.patient:
            listed["patient"] = item.patient
        listed |= item.attributes.to_dict()
        return listed

    content: dict[str, Any] = {"name": root.resolve().name}
    for name, values in (header or {}).items():
        if values:
            content[name] = values
    for split in splits:
        content[split] = [entry(item) for item in items if item.split == split]
    write_json(folder / FILE, content)


def place_files(
    folder: Path,
    items: Sequence[Item],
    root: Path,
    *,
    copy: bool,
    slices: Mapping[Path, Sequence[Path]],
) -> None:
    """Link or copy a site's files into its folder; DataError if another file is there.

    `Item.rendered` is written, `slices` in folders.
    """
    for item in with_progress(items, len(items), f"{folder}, images imported"):
        for file in item.paths:
            target = folder / file.relative_to(root)
            if file in item.rendered:
                write_atomically(target, item.rendered[file]())
            elif file in slices:
                for inner in slices[file]:
                    _place(inner, target / inner.name, copy)
            else:
                _place(file, target, copy)


def _place(source: Path, target: Path, copy: bool) -> None:
    """A hard link or a copy of a file, or of the slices of a folder, in a private folder; links are
    followed.

    It never replaces another file.
    """
    if source.is_dir():
        for inner in dicom_files(source):
            _place(inner, target / inner.name, copy)
        return
    if target.exists():
        if not (target.samefile(source) or filecmp.cmp(source, target, shallow=False)):
            raise DataError(f"{target} exists and differs from {source}; take an empty folder")
        return
    make_folder(target.parent)
    try:
        if copy:
            shutil.copyfile(source.resolve(), target)
            target.chmod(0o600)
        else:
            os.link(source.resolve(), target)
    except OSError as error:
        remedy = "take a folder on the disk of the images, or copy them with --copy"
        if copy:
            remedy = "free space there, or take a folder on another disk"
        raise DataError(f"{target}: {error.strerror}; {remedy}") from error
