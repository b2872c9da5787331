"""A site's data: found, read, checked, brought to the network's size once per process, and split by patient."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from medflare.core.errors import DataError
from medflare.core.settings import no_such
from medflare.data.cache.decoded import decoded_once
from medflare.data.cache.folder import CacheSettings
from medflare.data.cache.shards import Shards
from medflare.data.datalist import FILE, SPLITS, Entry, assign_splits
from medflare.data.files.bounds import ImageBounds
from medflare.data.files.decoding import Decoded
from medflare.data.files.sources import FileSource, PhantomSource, Source
from medflare.data.splits import OnDisk, OneByOne, Samples, SiteData, Split
from medflare.data.targets import class_counts, encode_label
from medflare.tasks.config import TaskConfig

ENVIRONMENT = "MEDFLARE_DATA_ROOT"
FOLDERS = "MEDFLARE_DATA_FOLDERS"  # as PATH has them


def resolve_data_root(site: str, task: TaskConfig, own: str = "", given: Path | str | None = None) -> Path | None:
    """The folder that holds a site's datalist.json, or None where the task's embedded data stand in.

    First of: `given` by the caller, the site's `own`, the environment variable MEDFLARE_DATA_ROOT. Within it, the subfolder
    named like the site where there is one.

    Args:
        site: its name.
        task: what the data are for.
        own: "data_root" of the site's own local/medflare.json; "" where it names none.
        given: overrides every other way of naming the data.

    Raises:
        DataError: a root that holds no data for the site, or no root at all for a task without embedded data.
    """
    named = [
        (given, "data_root"),
        (own, '"data_root" of local/medflare.json'),
        (os.environ.get(ENVIRONMENT), f"--data-root or {ENVIRONMENT}"),
    ]
    for value, origin in named:
        if value:
            return _site_folder(Path(value).expanduser(), site, origin)
    if task.embedded:
        return None
    remedy = f'give --data-root FOLDER, write {{"data_root": FOLDER}} to the site\'s local/medflare.json, or set {ENVIRONMENT}'
    raise DataError(f"site {site}: no data root for task {task.name}; {remedy}")


def _site_folder(root: Path, site: str, origin: str) -> Path:
    if not root.is_dir():
        raise DataError(f"site {site}: data root {root} ({origin}) is not a folder; correct the path")
    for folder in (root / site, root):
        if (folder / FILE).is_file():
            return folder
    if (root / site).is_dir():
        raise DataError(f"site {site}: {root / site} holds no {FILE}; `medflare data init` writes one")
    known = sorted(folder.parent.name for folder in root.glob(f"*/{FILE}"))
    if known:
        raise DataError(no_such("site", site, known, f"data root {root} ({origin})"))
    raise DataError(f"site {site}: data root {root} ({origin}) holds no {FILE} and no folder {site}; correct the path or add the data")


def allowed_folders(own: Sequence[str] = ()) -> tuple[Path, ...]:
    """The folders beside its own that a site's datalist may name files in: the site's `own`, else those of MEDFLARE_DATA_FOLDERS.

    Args:
        own: "data_folders" of the site's own local/medflare.json.
    """
    named = own or filter(None, os.environ.get(FOLDERS, "").split(os.pathsep))
    return tuple(Path(folder).expanduser() for folder in named)


def load_site_data(
    site: str,
    task: TaskConfig,
    root: Path | None,
    *,
    role: str = "inside",
    cache: CacheSettings | None = None,
    folders: Sequence[str] = (),
    bounds: ImageBounds = ImageBounds(),
) -> SiteData:
    """A site's data, ready for the network.

    Decoding happens once per process, and with `cache` once per site: later processes read the decoded tensors from that
    folder unless a file, the datalist or the task's data settings changed. What is too large for the memory stays there.

    Args:
        site: its name.
        task: what is learnt.
        root: from `resolve_data_root`; None generates the embedded federation.
        role: "inside" needs images in every split, "outside" only in the test split.
        cache: with its folder, see `cache.folder.placed`; None keeps decoded tensors in this process alone.
        folders: see `allowed_folders`.
        bounds: how large an image may be.

    Raises:
        DataError: anything wrong with the data; the message names the file or value and the remedy.
    """
    source = source_of(site, task, root, folders, bounds)
    entries, dropped = used_entries(site, task, source, role=role)
    _refuse_empty(Counter(entry.split for entry in entries), site, role)
    decoded = decoded_once(site, task, source, entries, cache)
    refuse_too_many(decoded.failed, len(entries), task, site)
    splits = {name: _split(decoded, entries, name) for name in SPLITS}
    _refuse_empty({name: len(split) for name, split in splits.items()}, site, role)
    notes = [f"{dropped} images left out: label_values lists no label for them"] if dropped else []
    if role == "inside":
        counts = class_counts(splits["training"].targets, task)
        notes += [f"class {name} is absent from the training images" for name, n in zip(task.classes, counts, strict=True) if n == 0]
    return SiteData(splits["training"], splits["validation"], splits["test"], tuple(notes), tuple(decoded.failed.values()))


def source_of(site: str, task: TaskConfig, root: Path | None, folders: Sequence[str] = (), bounds: ImageBounds = ImageBounds()) -> Source:
    """Where a site's images come from, as they are stored.

    Args:
        site: its name.
        task: what the images are for.
        root: see `load_site_data`.
        folders: see `allowed_folders`.
        bounds: how large an image may be.
    """
    return PhantomSource(site, task) if root is None else FileSource(root, task, allowed_folders(folders), bounds)


def used_entries(site: str, task: TaskConfig, source: Source, *, role: str = "inside") -> tuple[list[Entry], int]:
    """The entries that the task can use, each with its split.

    Args:
        site: its name.
        task: what is learnt.
        source: the site's data.
        role: see `load_site_data`.

    Returns:
        The entries, and how many others were dropped because no label is listed for them.

    Raises:
        DataError: see `datalist.assign_splits`, or a label that the task does not know.
    """
    found = source.entries()
    kept = [entry for entry in found if task.kind == "segmentation" or encode_label(entry.label, task, entry.place) is not None]
    return assign_splits(kept, source.listed(), site, outside=role == "outside", resplit=task.resplit), len(found) - len(kept)


def _split(decoded: Decoded, entries: list[Entry], name: str) -> Samples:
    rows = [row for row, number in enumerate(decoded.entries) if entries[number].split == name]
    patients = tuple(entries[decoded.entries[row]].patient for row in rows)
    names = tuple(decoded.names[row] for row in rows)
    spacings = tuple(decoded.spacings[row] for row in rows if decoded.spacings)
    if isinstance(decoded.images, Shards):
        labels = decoded.targets[rows] if isinstance(decoded.targets, Tensor) else None
        return OnDisk(decoded.images, tuple(rows), labels, patients, names, spacings)
    if isinstance(decoded.images, Tensor) and isinstance(decoded.targets, Tensor):
        return Split(decoded.images[rows], decoded.targets[rows], patients, names)
    images, targets = (tuple(part[row] for row in rows) for part in (decoded.images, decoded.targets))
    return OneByOne(images, targets, patients, names, spacings)


def refuse_too_many(failed: Mapping[int, str], images: int, task: TaskConfig, site: str) -> None:
    """Nothing where the task's `unreadable_limit` allows that so many images are left out.

    Args:
        failed: number of an entry that cannot be used -> why.
        images: how many there are in all.
        task: gives the limit.
        site: its name.

    Raises:
        DataError: there are more, with the first reason.
    """
    share, count = task.unreadable_limit["share"], task.unreadable_limit["count"]
    if len(failed) > min(share * images, count):
        first = next(iter(failed.values()))
        raise DataError(
            f"site {site}: {len(failed)} of {images} images cannot be used, the task's unreadable_limit is {share:g} of them and {count}; "
            f"repair them, the first: {first}"
        )


def _refuse_empty(counts: Mapping[str, int], site: str, role: str) -> None:
    for split in SPLITS if role == "inside" else ("test",):
        if not counts.get(split):
            raise DataError(f"site {site}: split {split!r} holds no image; list some in {FILE}, or drop the list to have it drawn")
