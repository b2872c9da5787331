"""A site's data: from the items of its datalist.json to the splits that batches are taken from.

An image goes through these stages; `load_site_data` calls one after the other:

1. datalist: `site_folder` finds the site's folder, and `usable_items` gives the items that the
   task can use, each with its split (`data.datalist`).
2. reading and decoding: `decoding.decoded_once` reads every item's files (`data.reading`), cuts
   them, scales intensities and size, and holds the `DecodedRow`s in memory or in the cache.
3. loading: the rows of each split become the tensors of a `Split`.
4. batches: while it trains, `training.site.Site` draws rows and takes them with `Split.take`.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from medflare.core.errors import DataError
from medflare.core.settings import no_such
from medflare.data.acquisition import Acquisition
from medflare.data.attributes import groups_of_patients
from medflare.data.class_counts import LazyTensors, class_counts
from medflare.data.datalist import FILE, LISTS, DatalistItem, assign_splits, site_name
from medflare.data.decoding import (
    Decoded,
    EmbeddedSource,
    Source,
    decoded_once,
    decoded_rows,
    decoded_when_used,
    no_images_like,
)
from medflare.data.local import DATA_ROOT_VARIABLE, CacheSettings, ImageBounds
from medflare.data.targets import annotation_of, encode_label, renumbering
from medflare.tasks.annotation import Annotation
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images, Spacing

NOT_LISTED = "label_values lists no label for them"


@dataclass(frozen=True, eq=False)
class Split(Dataset[tuple[Tensor, Tensor]]):
    """The images of a split with their targets and patients, in memory or on disk."""

    # float32 (N, C, H, W), ready for the network; or a sequence of (C, ...) where sizes differ or
    # images are on disk
    images: Images
    # segmentation long (N, H, W), multilabel float (N, C, H, W); classification long (N,),
    # multilabel float (N, C); or a sequence likewise
    targets: Images
    patients: tuple[str, ...]  # patient of every image
    names: tuple[str, ...]  # file of every image; slices of a volume end in "[number]"
    # millimetres between the voxels of every volume, None where unknown; empty for pictures
    spacings: tuple[Spacing | None, ...] = ()

    @property
    def in_memory(self) -> bool:
        """Whether all images are in memory."""
        if isinstance(self.images, ConcatDataset):
            return not any(isinstance(part, LazyTensors) for part in self.images.datasets)
        return not isinstance(self.images, LazyTensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all images and targets; for a split in memory."""
        return sum(tensor.nbytes for tensor in chain(self.images, self.targets))

    @property
    def on_gpu(self) -> bool:
        """Whether the images are in a GPU's memory."""
        return self.in_memory and len(self) > 0 and self.images[0].is_cuda

    def on(self, device: torch.device) -> "Split":
        """The split with its images and targets on a device; for a split in memory."""
        return replace(self, images=_on(self.images, device), targets=_on(self.targets, device))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.images[row], self.targets[row]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, ...) and targets (B, ...) of rows, long (B,), that have one size."""
        return _take(self.images, rows), _take(self.targets, rows)


def _take(tensors: Images, rows: Tensor) -> Tensor:
    if isinstance(tensors, Tensor):
        if tensors.is_cuda:  # rows that are not in pinned memory would wait for all pending work
            rows = rows.pin_memory().to(tensors.device, non_blocking=True)
        return tensors[rows]
    if not len(rows):
        return no_images_like(tensors[0])
    return torch.stack([tensors[row] for row in rows.tolist()])


def _on(tensors: Images, device: torch.device) -> Images:
    if isinstance(tensors, Tensor):
        return tensors.to(device)
    return [tensor.to(device) for tensor in tensors]


def joined(parts: Sequence[Split], names: Sequence[str]) -> Split:
    """Several splits of one task as one; patients and files get the prefix `names[i]/`."""
    patients = []
    files = []
    spacings: list[Spacing | None] = []
    for name, part in zip(names, parts, strict=True):
        patients += [f"{name}/{patient}" for patient in part.patients]
        files += [f"{name}/{file}" for file in part.names]
        spacings += part.spacings
    images = _joined([part.images for part in parts])
    targets = _joined([part.targets for part in parts])
    return Split(images, targets, tuple(patients), tuple(files), tuple(spacings))


def _joined(parts: list[Images]) -> Images:
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat(parts)
    return ConcatDataset(parts)


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
    # one line for each unusable image -> its patient
    left_out: Mapping[str, str] = field(default_factory=dict)
    # the patient of each image that the task leaves out, since no label of it lists the image's
    # value
    dropped: tuple[str, ...] = ()
    # the structures that the site annotated; (): it has no labels; None: it does not say, and all
    # count as annotated
    annotated: tuple[str, ...] | None = None
    # structures in none of the training masks of a site without "annotated", one line each with
    # the remedy
    absent: tuple[str, ...] = ()
    # training patient -> each of the files; empty where it was not computed
    acquired: Mapping[str, Sequence[Acquisition]] = field(default_factory=dict)
    # sex, age or scanner -> test patient -> group, see `attributes.groups_of_patients`; they stay
    # at the site
    test_groups: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def dropped_line(self) -> str:
        """One line about `dropped` for the site itself; "" if it is empty."""
        if not self.dropped:
            return ""
        return f"{len(self.dropped)} images left out: {NOT_LISTED}"

    def split(self, name: str) -> Split:
        """A split by its name, of `SPLITS`."""
        return getattr(self, name)


# -- the site's folder -----------------------------------------------------------------------------


def resolve_data_root(
    site: str, task: TaskConfig, local: str = "", data_root: Path | str | None = None
) -> Path | None:
    """The folder that holds a site's datalist.json, see `site_folder`; None where the task has
    embedded data and no root is set.

    Raises:
        DataError: a root without data of the site, or no root for a task without embedded data.
    """
    folder = site_folder(site, local, data_root)
    if folder is not None or task.embedded:
        return folder
    raise DataError(
        f"site {site}: no data root for task {task.name}; "
        'give --data-root FOLDER, write {"data_root": FOLDER} to the site\'s local/medflare.json, '
        f"or set {DATA_ROOT_VARIABLE}"
    )


def site_folder(site: str, local: str = "", data_root: Path | str | None = None) -> Path | None:
    """The folder that holds a site's datalist.json: the data root, or its subfolder named like the
    site; None without a data root.

    The root is `data_root`, else `local` ("data_root" of the site's local/medflare.json), else
    MEDFLARE_DATA_ROOT.

    Raises:
        DataError: a root without data of the site.
    """
    value = data_root or local or os.environ.get(DATA_ROOT_VARIABLE)
    if not value:
        return None
    if data_root:
        origin = "data_root"
    elif local:
        origin = '"data_root" of local/medflare.json'
    else:
        origin = f"--data-root or {DATA_ROOT_VARIABLE}"
    root = Path(value).expanduser()
    location = f"data root {root} ({origin})"
    if not root.is_dir():
        raise DataError(f"site {site}: {location} is not a folder; correct the path")
    for folder in (root / site, root):
        if (folder / FILE).is_file():
            return folder
    if (root / site).is_dir():
        raise DataError(
            f"site {site}: {root / site} holds no {FILE}; `medflare data init` writes one"
        )
    sites = sorted(site_name(path.parent) for path in root.glob(f"*/{FILE}"))
    if sites:
        raise DataError(no_such("site", site, sites, location))
    raise DataError(
        f"site {site}: {location} holds no {FILE} and no folder {site}; "
        "correct the path or add the data"
    )


# -- all stages ------------------------------------------------------------------------------------


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

    Images are decoded once per process, and with `cache` once per site: later processes read the
    decoded tensors from its folder unless a file, the datalist or the task's data settings changed.
    Images beyond `cache.memory_gb` stay on disk.

    Args:
        root: from `resolve_data_root`; None generates the embedded federation.
        role: "inside" needs images in every split, "outside" in the test split alone. A site
            without labels has training images alone, see `uncounted`.
        cache: with its folder, see `local.cache_with_folder`; None keeps decoded tensors in this
            process alone.
        folders: see `local.allowed_folders`.
        in_memory: False decodes most images again when they are used, without a cache: for a
            caller that uses few of them, see `decoded_when_used`.

    Raises:
        DataError: the data cannot be used; the message names the file or value and the remedy.
    """
    # 1. Datalist: the items that the task can use.
    source = open_source(site, task, root, folders, bounds)
    items, notes, dropped = usable_items(site, task, source, role=role)
    annotation = annotation_of(source.annotated(), task, f"site {site}: {FILE}")
    needed = LISTS if role == "inside" else ("test",)
    unlabelled = annotation is not None and not annotation.names
    if unlabelled:
        needed = ("training",)
        # No slice has foreground.
        task = replace(task, slices=replace(task.slices, keep="all"))
    _check_not_empty({item.split for item in items}, site, needed)

    # 2. Reading and decoding: a row for each picture, volume or used slice of a volume.
    if in_memory:
        decoded = decoded_once(site, task, source, items, cache)
    else:
        decoded = decoded_when_used(site, task, source, items)
    check_unreadable(decoded.failed, len(items), task, site)
    row_items = [items[row.item_index] for row in decoded.rows]
    _check_not_empty({item.split for item in row_items}, site, needed)

    # 3. Loading: the rows of each list as tensors. "training" becomes "train" here, nowhere else.
    train, validation, test = (_split(decoded, items, name, task) for name in LISTS)
    if unlabelled:
        train = uncounted(train, task)

    # 4. Notes: what its labels lack, and what is known of its patients' files.
    label_notes, absent = _notes_on_labels(train, task, annotation, role)
    acquired: dict[str, list[Acquisition]] = {}
    for row, item in zip(decoded.rows, row_items, strict=True):
        if item.split == "training" and row.row_index == 0:  # once for each file
            acquired.setdefault(item.patient, []).append(row.acquired)
    tested = [(item.patient, item.attributes) for item in row_items if item.split == "test"]
    return SiteData(
        train,
        validation,
        test,
        notes=(*notes, *label_notes, *absent),
        left_out={line: items[number].patient for number, line in decoded.failed.items()},
        dropped=dropped,
        annotated=None if annotation is None else annotation.names,
        absent=tuple(absent),
        acquired=acquired,
        test_groups=groups_of_patients(tested),
    )


# -- 1. datalist -----------------------------------------------------------------------------------


def open_source(
    site: str,
    task: TaskConfig,
    root: Path | None,
    folders: Sequence[str] = (),
    bounds: ImageBounds = ImageBounds(),
) -> Source:
    """A site's images before they are resized; arguments as for `load_site_data`."""
    if root is None:
        return EmbeddedSource(Path(site), task)
    return Source(root, task, folders, bounds)


def usable_items(
    site: str, task: TaskConfig, source: Source, *, role: str = "inside"
) -> tuple[list[DatalistItem], list[str], tuple[str, ...]]:
    """The items that the task can use of a site's datalist, each with its split; notes on renamed
    classes; and the patients of the items that it drops.

    Raises:
        DataError: see `datalist.assign_splits` and `targets.renumbering`, or a label that the task
            does not list.
    """
    items, notes = renumbered_items(site, task, source)
    used = []
    dropped = []
    for item in items:
        if task.kind == "segmentation" or encode_label(item.label, task, item.location) is not None:
            used.append(item)
        else:
            dropped.append(item.patient)
    if source.annotated() == ():
        if role == "outside":
            raise DataError(
                f"site {site}: an outside site measures models, and it has no labels "
                f'("annotated" of {FILE} is []); take it out'
            )
        used = [item for item in used if item.split == "training"]
    else:
        resplit = None if source.splits_are_fixed else task.resplit
        outside = role == "outside"
        used = assign_splits(used, source.listed_splits(), site, outside=outside, resplit=resplit)
    return used, notes, tuple(dropped)


def renumbered_items(
    site: str, task: TaskConfig, source: Source
) -> tuple[list[DatalistItem], list[str]]:
    """All items with the task's class numbers, and a note where the site's names or numbers differ,
    see `targets.renumbering`.

    Raises:
        DataError: see `datalist.read_datalist` and `targets.renumbering`.
    """
    items = source.listed_items()
    used = {item.label for item in items if type(item.label) is int}
    names = source.class_numbers() if items else {}
    numbers, note = renumbering(names, used, task, f"site {site}")
    for row, item in enumerate(items):
        if type(item.label) is int and item.label in numbers:
            items[row] = replace(item, label=numbers[item.label])
    return items, [note] if note else []


# -- 2. reading and decoding: what cannot be used --------------------------------------------------


def check_first_image(site: str, task: TaskConfig, *, role: str) -> None:
    """Raise DataError unless an image of the site, the first in its datalist that the task does not
    skip, can be decoded with its target; arguments as for `load_site_data`.
    """
    source = open_source(site, task, resolve_data_root(site, task))
    items, _, _ = usable_items(site, task, source, role=role)
    failed: dict[int, str] = {}
    if next(decoded_rows(task, source, items, failed), None) is None:
        reason = next(iter(failed.values()), "none is listed")
        raise DataError(f"site {site}: no image can be used; {reason}")


def check_unreadable(failed: Mapping[int, str], count: int, task: TaskConfig, site: str) -> None:
    """Compare the number of unusable images (`failed`: index -> why), of `count` images, with the
    task's `unreadable_limit`.

    Raises:
        DataError: there are more, with the first reason.
    """
    limit = task.unreadable_limit
    if len(failed) > min(limit.share * count, limit.count):
        first = next(iter(failed.values()))
        raise DataError(
            f"site {site}: {len(failed)} of {count} images cannot be used, the task's "
            f"unreadable_limit is {limit.share:g} of them and {limit.count}; "
            f"repair them, the first: {first}"
        )


def _check_not_empty(splits: Collection[str], site: str, needed: Sequence[str]) -> None:
    for split in needed:
        if split not in splits:
            raise DataError(
                f"site {site}: split {split!r} holds no image; "
                f"list some in {FILE}, or drop the list to have it drawn"
            )


# -- 3. loading ------------------------------------------------------------------------------------


def _split(decoded: Decoded, items: list[DatalistItem], name: str, task: TaskConfig) -> Split:
    rows = [row for row in decoded.rows if items[row.item_index].split == name]
    return Split(
        decoded.tensors(rows, "image", task),
        decoded.tensors(rows, "target", task),
        tuple(items[row.item_index].patient for row in rows),
        tuple(row.name for row in rows),
        tuple(row.spacing for row in rows) if task.spatial_dims == 3 else (),
    )


def uncounted(split: Split, task: TaskConfig) -> Split:
    """The split of a site without labels: its targets have no class in `class_counts`."""
    counts = torch.zeros(len(split), len(task.classes), dtype=torch.int64)
    return replace(split, targets=LazyTensors(len(split), split.targets.__getitem__, counts))


def _notes_on_labels(
    train: Split, task: TaskConfig, annotation: Annotation | None, role: str
) -> tuple[list[str], list[str]]:
    """What a site's labels lack: notes on what was not annotated and on each class that no training
    image shows, or lines for `SiteData.absent`.
    """
    if annotation and not annotation.names:
        return [f'no labels ("annotated" of {FILE} is []), so no model is measured here'], []
    missing = []
    if role == "inside":
        counts = class_counts(train.targets, task)
        missing = [name for name, count in zip(task.classes, counts, strict=True) if not count]
    if annotation is None and task.kind == "segmentation":
        return [], _absent_structures(missing, task)
    notes = []
    not_annotated = annotation.missing if annotation else ()
    if not_annotated:
        structures = ", ".join(not_annotated)
        notes.append(f"not annotated, so left out of losses and metrics: {structures}")
    for name in missing:
        if name not in not_annotated:
            notes.append(f"class {name} is absent from the training images")
    return notes, []


def _absent_structures(missing: Collection[str], task: TaskConfig) -> list[str]:
    """One line with the remedy for each `missing` structure, which no training mask shows, at a
    site without "annotated".
    """
    structures = task.structures
    present = [name for name in structures if name not in missing]
    occurs_nowhere = f"{_annotated_entry(structures)} if it does not occur here"
    not_annotated = _annotated_entry(present) if present else "take the site out"
    remedy = f"write to {FILE} {occurs_nowhere}, {not_annotated} if it was not annotated"
    lines = []
    for name in structures:
        if name in missing:
            lines.append(f"{name} is in no training mask and is trained as background; {remedy}")
    return lines


def _annotated_entry(names: Sequence[str]) -> str:
    """The line of datalist.json that says which structures are annotated."""
    return json.dumps({"annotated": names}, ensure_ascii=False)[1:-1]
