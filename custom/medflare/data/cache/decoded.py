"""Images decoded once: per process, or with a cache folder once per site; from there into memory, or read as they are needed."""

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from medflare.core.errors import DataError, StateError
from medflare.core.message import Message
from medflare.core.packages import versions
from medflare.core.store import read_message, write_message
from medflare.data.cache.folder import GB, CacheSettings, Room, discard, hold, new_entry, remove
from medflare.data.cache.shards import Part, Shard, Shards, write
from medflare.data.datalist import Entry
from medflare.data.decoding import Decoded, DecodedRow, decode, decoded_rows, gathered
from medflare.data.progress import counted
from medflare.data.sources import Source
from medflare.data.targets import class_counts
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Spacing

_FORMAT: Final = 9  # raise when the meaning of cached tensors or of the index changes, or what is refused of images
_KEPT_SITES: Final = 16  # decoded sites that one process keeps
_INDEX: Final = "index.safetensors"  # of an entry: everything but images and targets
_BLOCK: Final = 256  # rows that are read at once into memory
_DECODERS: Final = ("torch", "monai", "numpy", "pillow", "pydicom", "nibabel")  # another release may read the same file otherwise
_memory: OrderedDict[tuple[str, CacheSettings | None], Decoded] = OrderedDict()
_log = logging.getLogger(__name__)


def decoded_once(site: str, task: TaskConfig, source: Source, entries: list[Entry], cache: CacheSettings | None) -> Decoded:
    """The decoded images of `entries`: as this process has them, else from the cache folder, else from the source.

    Args:
        site: its name, for messages.
        task: decides kind, size, channels and slices.
        source: gives pictures and masks.
        entries: of the datalist.
        cache: the folder, and how much comes from there into memory; None decodes into memory.

    Raises:
        DataError: an image cannot be used, or all of them fit neither into memory nor into the cache.
    """
    key = _key(task, source, entries)
    decoded = _memory.pop((key, cache), None)
    if decoded is None:
        decoded = decode(task, source, _read_of(site, entries)) if cache is None else _through(cache, key, site, task, source, entries)
    _memory[key, cache] = decoded
    while len(_memory) > _KEPT_SITES:
        _memory.popitem(last=False)
    return decoded


def _key(task: TaskConfig, source: Source, entries: list[Entry]) -> str:
    settings = task.to_dict()
    used = (
        *("kind", "target", "labels", "channels", "size", "intensity", "slices", "label_values", "unlisted_labels", "spatial_dims"),
        *("fit", "orientation", "spacing", "missing_channels", "pick", "unreadable"),
    )
    labels = [str(entry.label) for entry in entries]
    chosen = [entry.split for entry in entries] if task.slices["keep"] == "foreground" else []  # slices are chosen for training alone
    content = [
        _FORMAT,
        versions(_DECODERS),
        {name: settings[name] for name in used},
        source.state(entries),
        source.annotated(),
        labels,
        *chosen,
    ]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _through(cache: CacheSettings, key: str, site: str, task: TaskConfig, source: Source, entries: list[Entry]) -> Decoded:
    """From the cache's entry, which is made where there is none; past the cache where it cannot be written."""
    entry = Path(cache.folder) / key
    if _mended(entry, task, source, entries):
        remove(entry)
    if (found := _read(entry, cache, task, verify=True)) is not None:
        return found
    failed: dict[int, str] = {}
    written = _Weighed(decoded_rows(task, source, _read_of(site, entries), failed))
    try:
        with new_entry(entry) as partial:
            _write(partial, written, failed, task, Room(cache))
        if (found := _read(entry, cache, task, verify=False)) is not None:
            return found
        reason = "the entry is gone"
    except OSError as error:
        reason = error.strerror or str(error)
    refusal = DataError(
        f"site {site}: its decoded images take more than memory_gb = {cache.memory_gb:g}, and the cache {cache.folder} cannot take "
        f"them ({reason}); give it room (cache in local/medflare.json), or raise memory_gb"
    )
    if written.nbytes > cache.memory_gb * GB:
        raise refusal
    _log.warning("data cache %s cannot be written (%s); the next process decodes the images again", cache.folder, reason)
    failed = {}
    again = _Weighed(decoded_rows(task, source, _read_of(site, entries), failed))
    return gathered(_within(again, cache.memory_gb * GB, refusal), task, failed)


def _mended(entry: Path, task: TaskConfig, source: Source, entries: list[Entry]) -> bool:
    """Whether an image that the cache's entry lacks, since it could not be used, can be now: its file may have been out of reach."""
    if task.unreadable == "error":  # then no entry lacks any
        return False
    try:
        lacking = [entries[int(number)] for number in read_message(entry / _INDEX).facts["failed"]]
    except (StateError, OSError):  # there is no entry, or none that can be used
        return False
    return bool(lacking) and any(True for _ in decoded_rows(task, source, lacking, {}))


def _read_of(site: str, entries: list[Entry]) -> Iterator[Entry]:
    return counted(entries, len(entries), f"site {site}, images read")


def _within(rows: "_Weighed", most: float, refusal: DataError) -> Iterator[DecodedRow]:
    """The rows, as long as they take no more bytes than `most`: a folder that takes nothing has not told how many they are."""
    for row in rows:
        if rows.nbytes > most:
            raise refusal
        yield row


class _Weighed:
    """Rows, with the bytes that those which came so far take in memory."""

    def __init__(self, rows: Iterator[DecodedRow]):
        self._rows = rows
        self.nbytes = 0

    def __iter__(self) -> Iterator[DecodedRow]:
        for row in self._rows:
            self.nbytes += row.image.nbytes + row.target.nbytes
            yield row


def _write(folder: Path, rows: _Weighed, failed: dict[int, str], task: TaskConfig, room: Room) -> None:
    """All rows, decoded, counted and written in one pass."""
    numbers, names, spacings, dtypes = list[int](), list[str](), list[Spacing | None](), set[str]()
    counts: list[list[int]] = []
    acquired: list[list[float]] = []

    def noted() -> Iterator[tuple[Tensor, Tensor]]:
        for row in rows:
            numbers.append(row.entry)
            names.append(row.name)
            spacings.append(row.spacing)
            acquired.append(row.acquired)
            counts.append(class_counts(row.target[None], task).tolist())
            dtypes.add(str(row.target.dtype).removeprefix("torch."))
            yield row.image, row.target

    shards = write(folder, noted(), room)
    facts = {
        "shards": shards,
        "names": names,
        "spacings": spacings,
        "nbytes": rows.nbytes,
        "target_dtype": next(iter(dtypes), "int64"),
        "failed": {str(number): why for number, why in failed.items()},
    }
    found = torch.tensor(counts, dtype=torch.int64).reshape(-1, len(task.classes))
    index = {"entries": torch.tensor(numbers, dtype=torch.int64), "counts": found, "acquired": torch.tensor(acquired, dtype=torch.float64)}
    write_message(folder / _INDEX, Message({"rows": index}, facts))


def _read(entry: Path, cache: CacheSettings, task: TaskConfig, *, verify: bool) -> Decoded | None:
    """What an entry holds, or None where there is none that can be used."""
    held = hold(entry)
    if held is None:
        return None
    try:
        message = read_message(entry / _INDEX)
        shards = _shards(entry, message, held)
        if verify:
            shards.verify()
        if message.facts["nbytes"] > cache.memory_gb * GB:
            return _decoded(shards, message, task, resident=False)
        with held:
            return _decoded(shards, message, task, resident=True)
    except (StateError, OSError) as error:
        _log.warning("data cache is made anew: %s", error)
        held.close()
        discard(entry)
        return None


def _shards(entry: Path, message: Message, held: IO[bytes]) -> Shards:
    def part(listed: Sequence[Any]) -> Part:
        offset, dtype, shape = listed
        return Part(offset, dtype, tuple(shape))

    files = (Shard(name, rows, digest, part(images), part(targets)) for name, rows, digest, images, targets in message.facts["shards"])
    return Shards(entry, tuple(files), getattr(torch, message.facts["target_dtype"]), message.states["rows"]["counts"], held)


def _decoded(shards: Shards, message: Message, task: TaskConfig, *, resident: bool) -> Decoded:
    facts, entries = message.facts, message.states["rows"]["entries"].tolist()
    spacings = [None if spacing is None else tuple(spacing) for spacing in facts["spacings"]]
    failed = {int(number): why for number, why in facts["failed"].items()}
    acquired = message.states["rows"]["acquired"]
    if resident:
        blocks = ((rows, shards.images(rows), shards.targets(rows)) for rows in shards.portions(_BLOCK))
        pairs = (
            (row, image, target) for block, images, targets in blocks for row, image, target in zip(block, images, targets, strict=True)
        )
        rows = (DecodedRow(image, target, entries[n], facts["names"][n], spacings[n], acquired[n].tolist()) for n, image, target in pairs)
        return gathered(rows, task, failed)
    labels = torch.cat([shards.targets(rows) for rows in shards.portions(_BLOCK)]) if task.kind == "classification" else ()
    return Decoded(shards, labels, entries, facts["names"], spacings if task.spatial_dims == 3 else [], failed, acquired)
