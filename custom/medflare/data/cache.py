"""Images decoded once: per process, or with a folder once per site."""

import hashlib
import json
import logging
from collections import OrderedDict
from pathlib import Path

from torch import Tensor

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.core.store import StateStore
from medflare.data.datalist import Entry
from medflare.data.decoding import Decoded, decode
from medflare.data.sources import Source
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images

_FORMAT = 2  # raise when the meaning of cached tensors changes
_KEPT_SITES = 16  # decoded sites that one process keeps
_memory: OrderedDict[str, Decoded] = OrderedDict()
_log = logging.getLogger(__name__)


def decoded_once(site: str, task: TaskConfig, source: Source, entries: list[Entry], cache: Path | None) -> Decoded:
    """The decoded images of `entries`: from memory, else from the cache folder, else from the source.

    Args:
        site: its name, part of the cache file's name.
        task: decides kind, size, channels and slices.
        source: gives pictures and masks.
        entries: of the datalist.
        cache: folder for decoded images; None for none.
    """
    key = _key(task, source, entries)
    decoded = _memory.pop(key, None)
    if decoded is None and cache is not None:
        decoded = _read_cache(cache, f"{task.name}-{site}", key)
    if decoded is None:
        decoded = decode(task, source, entries)
        if cache is not None:
            _write_cache(cache, f"{task.name}-{site}", key, decoded)
    _memory[key] = decoded
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
    content = [_FORMAT, {name: settings[name] for name in used}, source.state(entries), labels, *chosen]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _read_cache(folder: Path, name: str, key: str) -> Decoded | None:
    try:
        message = StateStore(folder).load(name)
    except StateError as error:
        _log.warning("data cache is read anew: %s", error)
        return None
    if message is None or message.facts.get("key") != key:
        return None
    facts = message.facts
    images, targets = (_unpacked(message.states[name], facts["stacked"], len(facts["names"])) for name in ("images", "targets"))
    spacings = [None if spacing is None else tuple(spacing) for spacing in facts["spacings"]]
    failed = {int(number): why for number, why in facts["failed"].items()}
    return Decoded(images, targets, facts["entries"], facts["names"], spacings, failed)


def _write_cache(folder: Path, name: str, key: str, decoded: Decoded) -> None:
    described = {"entries": decoded.entries, "names": decoded.names, "spacings": decoded.spacings}
    failed = {str(number): why for number, why in decoded.failed.items()}
    facts = {"key": key, "stacked": isinstance(decoded.images, Tensor), **described, "failed": failed}
    try:
        StateStore(folder).save(name, Message({"images": _packed(decoded.images), "targets": _packed(decoded.targets)}, facts))
    except OSError as error:
        _log.warning("data cache %s cannot be written (%s); the next process decodes the images again", folder, error)


def _packed(images: Images) -> StateDict:
    """Images of one size as one tensor, others by row."""
    return {"all": images} if isinstance(images, Tensor) else {str(row): image for row, image in enumerate(images)}


def _unpacked(state: StateDict, stacked: bool, count: int) -> Images:
    return state["all"] if stacked else [state[str(row)] for row in range(count)]
