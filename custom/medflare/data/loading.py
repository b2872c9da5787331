"""A site's data: the folder found, images decoded once per process, and training, validation and test split by patient."""

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from medflare.core.errors import DataError
from medflare.core.settings import no_such
from medflare.data.datalist import FILE, SPLITS, DatalistItem, assign_splits, site_name
from medflare.data.decoding import Decoded, DecodedRow, EmbeddedSource, Source, decoded_once, decoded_rows
from medflare.data.local import CacheSettings, ImageBounds, allowed_folders
from medflare.data.progress import counted
from medflare.data.targets import LazyTensors, annotation_of, class_counts, encode_label, renumbering
from medflare.tasks.annotation import structures_of
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images, Spacing

ENVIRONMENT = "MEDFLARE_DATA_ROOT"
NOT_LISTED = "label_values lists no label for them"


@dataclass(frozen=True, eq=False)
class Split(Dataset[tuple[Tensor, Tensor]]):
    """The images of a split with their targets and patients, in memory or on disk."""

    images: Images  # float32 (N, C, H, W), ready for the network; or a sequence of (C, ...) where sizes differ or images are on disk
    # segmentation long (N, H, W), multilabel float (N, C, H, W); classification long (N,), multilabel float (N, C); or a sequence likewise
    targets: Images
    patients: tuple[str, ...]  # patient of every image
    names: tuple[str, ...]  # file of every image; slices of a volume end in "[number]"
    spacings: tuple[Spacing | None, ...] = ()  # millimetres between the voxels of every volume, None where unknown; empty for pictures

    @property
    def in_memory(self) -> bool:
        """Whether all images are in memory."""
        parts = self.images.datasets if isinstance(self.images, ConcatDataset) else [self.images]
        return not any(isinstance(part, LazyTensors) for part in parts)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.images[row], self.targets[row]

    def image(self, row: int) -> Tensor:
        """One image, float32 (C, ...)."""
        return self.images[row]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, ...) and targets (B, ...) of rows, long (B,), that have one size."""
        return _take(self.images, rows), _take(self.targets, rows)


def _take(tensors: Images, rows: Tensor) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors[rows]
    return torch.stack([tensors[row] for row in rows.tolist() or [0]])[: len(rows)]  # no rows: the size is that of the first image


def joined(parts: Sequence[Split], names: Sequence[str]) -> Split:
    """Several splits of one task as one; patients and files get the prefix `names[i]/`."""
    patients = tuple(f"{name}/{patient}" for name, part in zip(names, parts, strict=True) for patient in part.patients)
    files = tuple(f"{name}/{file}" for name, part in zip(names, parts, strict=True) for file in part.names)
    spacings = tuple(spacing for part in parts for spacing in part.spacings)
    return Split(_joined([part.images for part in parts]), _joined([part.targets for part in parts]), patients, files, spacings)


def _joined(parts: list[Images]) -> Images:
    return torch.cat(parts) if all(isinstance(part, Tensor) for part in parts) else ConcatDataset(parts)


class Batch(NamedTuple):
    """Images and targets on the site's device, and their rows in the split (on the CPU)."""

    images: Tensor
    targets: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index


@dataclass(frozen=True)
class SiteData:
    """The three splits of a site."""

    train: Split
    validation: Split
    test: Split
    notes: tuple[str, ...] = ()  # remarks about the data, one line each
    left_out: Mapping[str, str] = field(default_factory=dict)  # one line for each unusable image -> its patient
    dropped: tuple[str, ...] = ()  # the patient of each image that the task leaves out, since no label of it lists the image's value
    annotated: tuple[str, ...] | None = None  # the structures that the site annotated; None: it does not say, and all count as annotated
    absent: tuple[str, ...] = ()  # structures in none of the training masks of a site without "annotated", one line each with the remedy
    # float64 (N, ...), `data.acquisition.Acquisition.row` of every training file; empty where it was not computed
    acquired: Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    @property
    def dropped_line(self) -> str:
        """One line about `dropped` for the site itself; "" if it is empty."""
        return f"{len(self.dropped)} images left out: {NOT_LISTED}" if self.dropped else ""

    def split(self, name: str) -> Split:
        """A split by name: "train" (or "training"), "validation", "test"."""
        return {"train": self.train, "training": self.train, "validation": self.validation, "test": self.test}[name]


# -- folders ---------------------------------------------------------------------------------------------------------------


def resolve_data_root(site: str, task: TaskConfig, local: str = "", data_root: Path | str | None = None) -> Path | None:
    """The folder that holds a site's datalist.json, see `site_folder`; None where the task has embedded data and no root is set.

    Raises:
        DataError: a root without data of the site, or no root for a task without embedded data.
    """
    folder = site_folder(site, local, data_root)
    if folder is not None or task.embedded:
        return folder
    remedy = f'give --data-root FOLDER, write {{"data_root": FOLDER}} to the site\'s local/medflare.json, or set {ENVIRONMENT}'
    raise DataError(f"site {site}: no data root for task {task.name}; {remedy}")


def site_folder(site: str, local: str = "", data_root: Path | str | None = None) -> Path | None:
    """The folder that holds a site's datalist.json: the data root, or its subfolder named like the site; None without a data root.

    The root is `data_root`, else `local` ("data_root" of the site's local/medflare.json), else MEDFLARE_DATA_ROOT.

    Raises:
        DataError: a root without data of the site.
    """
    variable, setting = f"--data-root or {ENVIRONMENT}", '"data_root" of local/medflare.json'
    roots = {"data_root": data_root, setting: local, variable: os.environ.get(ENVIRONMENT)}
    root, origin = next(((Path(value).expanduser(), origin) for origin, value in roots.items() if value), (None, ""))
    if root is None:
        return None
    if not root.is_dir():
        raise DataError(f"site {site}: data root {root} ({origin}) is not a folder; correct the path")
    for folder in (root / site, root):
        if (folder / FILE).is_file():
            return folder
    if (root / site).is_dir():
        raise DataError(f"site {site}: {root / site} holds no {FILE}; `medflare data init` writes one")
    sites = sorted(site_name(path.parent) for path in root.glob(f"*/{FILE}"))
    if sites:
        raise DataError(no_such("site", site, sites, f"data root {root} ({origin})"))
    raise DataError(f"site {site}: data root {root} ({origin}) holds no {FILE} and no folder {site}; correct the path or add the data")


# -- data ------------------------------------------------------------------------------------------------------------------


def load_site_data(
    site: str,
    task: TaskConfig,
    root: Path | None,
    *,
    role: str = "inside",
    cache: CacheSettings | None = None,
    folders: Sequence[str] = (),
    bounds: ImageBounds = ImageBounds(),
    in_memory: bool = True,
) -> SiteData:
    """A site's data, ready for the network.

    Images are decoded once per process, and with `cache` once per site: later processes read the decoded tensors from its folder unless a
    file, the datalist or the task's data settings changed. Images beyond `cache.memory_gb` stay on disk.

    Args:
        root: from `resolve_data_root`; None generates the embedded federation.
        role: "inside" needs images in every split, "outside" in the test split alone.
        cache: with its folder, see `local.cache_with_folder`; None keeps decoded tensors in this process alone.
        folders: see `local.allowed_folders`.
        in_memory: False decodes an image again when it is used, without a cache: for a caller that uses few of them.

    Raises:
        DataError: the data cannot be used; the message names the file or value and the remedy.
    """
    source = open_source(site, task, root, folders, bounds)
    entries, notes, dropped = usable_entries(site, task, source, role=role)
    annotation = annotation_of(source.annotated(), task, f"site {site}: {FILE}")
    _check_not_empty(Counter(entry.split for entry in entries), site, role)
    decoded = decoded_once(site, task, source, entries, cache) if in_memory else _decoded_when_used(site, task, source, entries)
    check_unreadable(decoded.failed, len(entries), task, site)
    _check_not_empty(Counter(entries[row.entry].split for row in decoded.rows), site, role)
    train, validation, test = (_split(decoded, entries, name, task) for name in SPLITS)
    if annotation is not None and annotation.missing:
        notes.append(f"not annotated, so left out of losses and metrics: {', '.join(annotation.missing)}")
    missing: list[str] = []
    if role == "inside":
        missing = [name for name, count in zip(task.classes, class_counts(train.targets, task), strict=True) if not count]
    absent = _absent_structures(missing, task) if annotation is None and task.kind == "segmentation" else []
    if annotation is not None or task.kind == "classification":
        missing = [name for name in missing if annotation is None or name not in annotation.missing]
        notes += [f"class {name} is absent from the training images" for name in missing]
    acquired = {row.entry: row.acquired for row in decoded.rows if entries[row.entry].split == "training"}
    numbers = torch.tensor(list(acquired.values()), dtype=torch.float64)
    left_out = {line: entries[place].patient for place, line in decoded.failed.items()}
    annotated = None if annotation is None else annotation.names
    return SiteData(
        train,
        validation,
        test,
        notes=(*notes, *absent),
        left_out=left_out,
        dropped=dropped,
        annotated=annotated,
        absent=tuple(absent),
        acquired=numbers,
    )


def _decoded_when_used(site: str, task: TaskConfig, source: Source, entries: list[DatalistItem]) -> Decoded:
    """Every image is decoded and checked, none stays in memory; of those that are used again the last file's stay."""
    failed: dict[int, str] = {}
    rows = []
    for row in decoded_rows(task, source, counted(entries, len(entries), f"site {site}, images read"), failed):
        label = row.target if task.kind == "classification" else None
        rows.append(row._replace(image=None, target=label))

    @lru_cache(maxsize=1)
    def rows_of(entry: int) -> list[DecodedRow]:
        return list(decoded_rows(task, source, [entries[entry]], {}))

    return Decoded(rows, failed, lambda row, name: getattr(rows_of(row.entry)[row.place], name))


def _split(decoded: Decoded, entries: list[DatalistItem], name: str, task: TaskConfig) -> Split:
    rows = [row for row in decoded.rows if entries[row.entry].split == name]
    images, targets = (decoded.tensors(rows, part, task) for part in ("image", "target"))
    patients, names = tuple(entries[row.entry].patient for row in rows), tuple(row.name for row in rows)
    return Split(images, targets, patients, names, tuple(row.spacing for row in rows) if task.spatial_dims == 3 else ())


def _absent_structures(missing: Collection[str], task: TaskConfig) -> list[str]:
    """One line with the remedy for each `missing` structure, which no training mask shows, at a site without "annotated"."""
    structures = structures_of(task)
    present = [name for name in structures if name not in missing]
    all_of_them, some = (json.dumps({"annotated": names}, ensure_ascii=False)[1:-1] for names in (structures, present))
    remedy = f"write to {FILE} {all_of_them} if it does not occur here, {some if present else 'take the site out'} if it was not annotated"
    return [f"{name} is in no training mask and is trained as background; {remedy}" for name in structures if name in missing]


def open_source(site: str, task: TaskConfig, root: Path | None, folders: Sequence[str] = (), bounds: ImageBounds = ImageBounds()) -> Source:
    """A site's images at their stored size; arguments as for `load_site_data`."""
    return EmbeddedSource(site, task) if root is None else Source(root, task, allowed_folders(folders), bounds)


class UsableEntries(NamedTuple):
    """The items that a task can use, each with its split; notes on renamed classes; the patients of the items that it drops."""

    entries: list[DatalistItem]
    notes: list[str]
    dropped: tuple[str, ...]


def usable_entries(site: str, task: TaskConfig, source: Source, *, role: str = "inside") -> UsableEntries:
    """What the task can use of a site's datalist.

    Raises:
        DataError: see `datalist.assign_splits` and `targets.renumbering`, or a label that the task does not list.
    """
    entries, notes = renumbered_entries(site, task, source)
    used: list[DatalistItem] = []
    dropped: list[str] = []
    for entry in entries:
        if task.kind == "segmentation" or encode_label(entry.label, task, entry.place) is not None:
            used.append(entry)
        else:
            dropped.append(entry.patient)
    resplit = None if source.splits_are_fixed else task.resplit
    split = assign_splits(used, source.listed(), site, outside=role == "outside", resplit=resplit)
    return UsableEntries(split, notes, tuple(dropped))


def renumbered_entries(site: str, task: TaskConfig, source: Source) -> tuple[list[DatalistItem], list[str]]:
    """All items with the task's class numbers, and a note where the site's names or numbers differ, see `targets.renumbering`.

    Raises:
        DataError: see `datalist.read_datalist` and `targets.renumbering`.
    """
    entries = source.entries()
    used = {entry.label for entry in entries if type(entry.label) is int}
    numbers, note = renumbering(source.names() if entries else {}, used, task, f"site {site}")
    if numbers:
        entries = [replace(entry, label=numbers.get(entry.label, entry.label)) if type(entry.label) is int else entry for entry in entries]
    return entries, [note] if note else []


def check_unreadable(failed: Mapping[int, str], images: int, task: TaskConfig, site: str) -> None:
    """Compare the number of unusable images (`failed`: index -> why) with the task's `unreadable_limit`.

    Raises:
        DataError: there are more, with the first reason.
    """
    share, count = task.unreadable_limit.share, task.unreadable_limit.count
    if len(failed) > min(share * images, count):
        first = next(iter(failed.values()))
        found = f"{len(failed)} of {images} images cannot be used, the task's unreadable_limit is {share:g} of them and {count}"
        raise DataError(f"site {site}: {found}; repair them, the first: {first}")


def _check_not_empty(counts: Mapping[str, int], site: str, role: str) -> None:
    for split in SPLITS if role == "inside" else ("test",):
        if not counts.get(split):
            raise DataError(f"site {site}: split {split!r} holds no image; list some in {FILE}, or drop the list to have it drawn")
