"""A site's data: found, read, checked, brought to the network's size once per process, and split by patient."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from medflare.core.errors import DataError
from medflare.core.settings import no_such
from medflare.data.cache import decoded_once
from medflare.data.datalist import FILE, SPLITS, DatalistItem, assign_splits, names_of_masks, site_name
from medflare.data.decoding import Decoded
from medflare.data.reading import ImageBounds
from medflare.data.settings import CacheSettings
from medflare.data.sources import FileSource, PhantomSource, Source
from medflare.data.splits import SiteData, Split
from medflare.data.targets import LazyTensors, annotation_of, class_counts, encode_label, plain_name, stored_values
from medflare.tasks.annotation import structures_of
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images

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
    folder = site_folder(site, own, given)
    if folder is not None or task.embedded:
        return folder
    remedy = f'give --data-root FOLDER, write {{"data_root": FOLDER}} to the site\'s local/medflare.json, or set {ENVIRONMENT}'
    raise DataError(f"site {site}: no data root for task {task.name}; {remedy}")


def site_folder(site: str, own: str = "", given: Path | str | None = None) -> Path | None:
    """The folder that holds a site's datalist.json, see `resolve_data_root`; None where nobody names a data root.

    Args:
        site: its name.
        own: see `resolve_data_root`.
        given: see there.

    Raises:
        DataError: a root that holds no data for the site.
    """
    named = [
        (given, "data_root"),
        (own, '"data_root" of local/medflare.json'),
        (os.environ.get(ENVIRONMENT), f"--data-root or {ENVIRONMENT}"),
    ]
    for value, origin in named:
        if value:
            return _folder_within(Path(value).expanduser(), site, origin)
    return None


def _folder_within(root: Path, site: str, origin: str) -> Path:
    if not root.is_dir():
        raise DataError(f"site {site}: data root {root} ({origin}) is not a folder; correct the path")
    for folder in (root / site, root):
        if (folder / FILE).is_file():
            return folder
    if (root / site).is_dir():
        raise DataError(f"site {site}: {root / site} holds no {FILE}; `medflare data init` writes one")
    known = sorted(site_name(path.parent) for path in root.glob(f"*/{FILE}"))
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
        cache: with its folder, see `settings.placed`; None keeps decoded tensors in this process alone.
        folders: see `allowed_folders`.
        bounds: how large an image may be.

    Raises:
        DataError: anything wrong with the data; the message names the file or value and the remedy.
    """
    source = source_of(site, task, root, folders, bounds)
    entries, notes = used_entries(site, task, source, role=role)
    annotation = annotation_of(source.annotated(), task, f"site {site}: {FILE}")
    _refuse_empty(Counter(entry.split for entry in entries), site, role)
    decoded = decoded_once(site, task, source, entries, cache)
    refuse_too_many(decoded.failed, len(entries), task, site)
    splits = {name: _split(decoded, entries, name) for name in SPLITS}
    _refuse_empty({name: len(split) for name, split in splits.items()}, site, role)
    named = None if annotation is None else annotation.names
    if annotation is not None and annotation.missing:
        notes.append(f"not annotated, so left out of losses and metrics: {', '.join(annotation.missing)}")
    absent: list[str] = []
    if role == "inside":
        counts = class_counts(splits["training"].targets, task)
        missing = [name for name, n in zip(task.classes, counts, strict=True) if n == 0]
        if annotation is None and task.kind == "segmentation":
            absent = unexplained(missing, task)
        else:
            missing = [name for name in missing if annotation is None or name not in annotation.missing]
            notes += [f"class {name} is absent from the training images" for name in missing]
    first = {number: row for row, number in reversed([*enumerate(decoded.entries)]) if entries[number].split == "training"}
    acquired = decoded.acquired[sorted(first.values())]
    told, left_out = (*notes, *absent), tuple(decoded.failed.values())
    return SiteData(splits["training"], splits["validation"], splits["test"], told, left_out, named, tuple(absent), acquired)


def unexplained(missing: Collection[str], task: TaskConfig) -> list[str]:
    """What is to be said of structures that no training mask shows at a site that does not say what it annotated, one line each.

    Args:
        missing: labels that no training mask shows.
        task: of segmentation.

    Examples:
        >>> from types import SimpleNamespace
        >>> task = SimpleNamespace(kind="segmentation", target="multiclass", labels=("background", "liver", "spleen"))
        >>> for line in unexplained(["spleen"], task): print(line[:59])
        spleen is in no training mask and is trained as background;
    """
    structures = structures_of(task)
    shown = [name for name in structures if name not in missing]
    if_not = f"{_annotated(shown)} if nobody annotated it, " if shown else "take the site out if nobody annotated it, "
    remedy = f"write to {FILE} {if_not}{_annotated(structures)} if it is not there"
    return [f"{name} is in no training mask and is trained as background; {remedy}" for name in structures if name in missing]


def _annotated(names: Sequence[str]) -> str:
    return f'"annotated": {json.dumps(list(names), ensure_ascii=False)}'


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


def used_entries(site: str, task: TaskConfig, source: Source, *, role: str = "inside") -> tuple[list[DatalistItem], list[str]]:
    """The entries that the task can use, each with its split.

    Args:
        site: its name.
        task: what is learnt.
        source: the site's data.
        role: see `load_site_data`.

    Returns:
        The entries, and notes: what their classes are called at the site, and how many others have no label that the task lists.

    Raises:
        DataError: see `datalist.assign_splits` and `known_entries`, or a label that the task does not know.
    """
    found, notes = known_entries(site, task, source)
    kept = [entry for entry in found if task.kind == "segmentation" or encode_label(entry.label, task, entry.place) is not None]
    if dropped := len(found) - len(kept):
        notes.append(f"{dropped} images left out: label_values lists no label for them")
    return assign_splits(kept, source.listed(), site, outside=role == "outside", resplit=task.resplit), notes


def known_entries(site: str, task: TaskConfig, source: Source) -> tuple[list[DatalistItem], list[str]]:
    """All entries, their classes numbered as the task numbers them, see `renumbering`.

    Args:
        site: its name.
        task: what is learnt.
        source: the site's data.

    Returns:
        The entries, and a note where the site's names or numbers of classes are others than the task's.

    Raises:
        DataError: see `datalist.read_datalist` and `renumbering`.
    """
    entries = source.entries()
    used = {entry.label for entry in entries if type(entry.label) is int}
    numbers, note = renumbering(source.names() if entries else {}, used, task, f"site {site}")
    if numbers:
        entries = [replace(entry, label=numbers.get(entry.label, entry.label)) if type(entry.label) is int else entry for entry in entries]
    return entries, [note] if note else []


def renumbering(names: Mapping[str, Sequence[int]], used: Collection[int], task: TaskConfig, place: str) -> tuple[dict[int, int], str]:
    """How a site's numbers of classes become the task's.

    Every site numbers its classes by itself: one that lacks a class numbers those behind it otherwise, and by numbers alone they
    would be taken for others. So names decide where the datalist gives some. Where none is the task's (but for a background's), and
    each of its labels has another, they are taken for the same in other words. Where some are the task's and one is not, nobody can
    tell what that one is, unless the task's label_values say so. Structures are never renumbered, since masks stay as they are. Case
    does not matter, nor "_" in place of a space.

    Args:
        names: what the datalist calls its numbers, see `datalist.names_in`; none where it does not say.
        used: the numbers that images of a classification have.
        task: gives the labels and their values.
        place: the beginning of a message.

    Returns:
        Number of the datalist -> number that the task takes for it, where they differ; and a note where a class counts under another
        name or number, else "".

    Raises:
        DataError: a name that the task has for another number, or one that it does not have beside others that it has.
    """
    values = dict(zip(task.labels, stored_values(task), strict=True))
    meant = {number: label for label, numbers in values.items() for number in numbers}
    own: defaultdict[str, set[int]] = defaultdict(set)
    for label, numbers in values.items():
        own[plain_name(label)].update(numbers)
    a_mask_each = task.kind == "segmentation" and task.target == "multilabel" and not task.label_values
    called = list(enumerate(names_of_masks(names))) if a_mask_each else sorted((n, name) for name, of in names.items() for n in of)
    background = {0} if task.target == "binary" or (task.kind == "segmentation" and not a_mask_each) else set()
    classes = meant.keys() - background

    same = {number for number, name in called if number in own.get(plain_name(name), ())}
    moved = {number: name for number, name in called if plain_name(name) in own and number not in own[plain_name(name)]}
    strange = {number: name for number, name in called if plain_name(name) not in own and name != str(number) and number in classes}
    if moved and task.kind == "classification" and task.target == "multiclass" and set(used) & meant.keys() <= same | moved.keys():
        theirs = {number: min(own[plain_name(name)]) for number, name in moved.items()}
        return theirs, _counted_as((number, name, theirs[number], meant[theirs[number]]) for number, name in moved.items())
    in_other_words = same <= background and classes <= dict(called).keys()
    if not moved and (not strange or in_other_words or task.label_values):  # a task that says what numbers mean may name them otherwise
        return {}, _counted_as((number, name, number, meant[number]) for number, name in strange.items())
    number, name = min((moved or strange).items())
    has = ", ".join(f"{number} {label}" for number, label in sorted(meant.items()))
    remedy = "write the task's name there if it means the same, or say in the task's label_values what numbers mean"
    raise DataError(f'{place}: "labels" of {FILE} call {number} {name!r}, task {task.name} has {has}; {remedy}')


def _counted_as(classes: Iterable[tuple[int, str, int, str]]) -> str:
    listed = ", ".join(f"{number} {name} as {wanted} {label}" for number, name, wanted, label in classes)
    return f'"labels" of {FILE} count so: {listed}' if listed else ""


def _split(decoded: Decoded, entries: list[DatalistItem], name: str) -> Split:
    rows = [row for row, number in enumerate(decoded.entries) if entries[number].split == name]
    patients = tuple(entries[decoded.entries[row]].patient for row in rows)
    names = tuple(decoded.names[row] for row in rows)
    spacings = tuple(decoded.spacings[row] for row in rows if decoded.spacings)
    return Split(_part(decoded.images, rows), _part(decoded.targets, rows), patients, names, spacings)


def _part(tensors: Images, rows: list[int]) -> Images:
    if isinstance(tensors, Tensor):
        return tensors[rows]
    return tensors.part(rows) if isinstance(tensors, LazyTensors) else tuple(tensors[row] for row in rows)


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
    share, count = task.unreadable_limit.share, task.unreadable_limit.count
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
