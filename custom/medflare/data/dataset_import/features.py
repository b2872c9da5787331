"""Sites of features: every image goes once through a frozen body, and what comes out is kept as an image of one row of numbers.

What is left to train is the head. A round then costs next to nothing, so that a processor affords many of them, and messages are small.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from medflare.core.errors import ConfigError, DataError
from medflare.core.store import write_atomically, write_json
from medflare.data.datalist import site_folders, site_name
from medflare.data.dataset_import.finding import Item
from medflare.data.dataset_import.writing import folder_of, refuse_existing, write_datalist
from medflare.data.decoding import decoded_rows
from medflare.data.loading import check_unreadable, open_source, renumbered_entries
from medflare.data.progress import counted
from medflare.data.targets import encode_label
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork, pooled
from medflare.networks.weights import starting_state
from medflare.tasks.config import TaskConfig, load_task

TASK: Final = "task.json"  # beside the sites' folders
_BATCH: Final = 32
_LEARNT: Final = (  # of a task, what says how it is learnt, and nothing of images
    *("kind", "target", "labels", "label_values", "unlisted_labels", "resplit", "metric"),
    *("loss", "optimizer", "schedule", "clip", "sampling", "batch_size", "accumulate", "local_epochs"),
)
_HEAD: Final = {"name": "mlp", "hidden": [64], "batch_norm": True}
_AS_STORED: Final = {"name": "ScaleIntensityRange", "a_min": 0.0, "a_max": 1.0, "b_min": 0.0, "b_max": 1.0, "clip": False}


@dataclass(frozen=True)
class Features:
    """What was written.

    Attributes:
        home: folder of the sites and of the task.
        task: that trains a head on the features.
        images: site -> images.
    """

    home: Path
    task: TaskConfig
    images: Mapping[str, int]

    def render(self) -> str:
        """A line a site, and where the task lies."""
        lines = [f"{site or 'images'}: {count} x {self.task.size[1]} features" for site, count in self.images.items()]
        return "\n".join([*lines, f"written: {self.home / TASK}, which trains a head on them: {self.task.network}"])


def write_features(root: Path, task: TaskConfig, home: Path, *, weights: Path | None = None, force: bool = False) -> Features:
    """Sites whose images are features of the task's network, with their patients, labels and splits as they were.

    Args:
        root: a site's folder, or the folder of several.
        task: a classification task whose network starts from a file of weights; its body stays as that file has it, in evaluation mode.
        home: folder for the sites, and for the task that trains the head.
        weights: the file, or its folder, see `networks.weights.found`.
        force: datalists of the same sites are written anew.

    Raises:
        ConfigError: a task that segments, or whose network starts from random weights or has no features; weights that do not fit.
        DataError: an image that cannot be used, `home` within `root`, or datalists that exist.
    """
    if task.kind != "classification":
        raise ConfigError(f"task {task.name}: features are of whole images, this task segments; take a classification task")
    if "weights" not in task.network:
        raise ConfigError(f"task {task.name}: network.weights names no file, and features of random weights know nothing; name one")
    if home.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{home} lies in {root}, where it would be taken for one of its sites; take another folder")
    folders = {"" if folder == root else site_name(folder): folder for folder in site_folders(root)}
    refuse_existing(home, folders, force=force)
    network = initial_network(task, 0, start=starting_state(task, 0, weights)).eval()
    if not network.has_features:
        raise ConfigError(f"task {task.name}: network {task.network['name']} has no last layer whose input could be kept; take another one")
    images = {site: _write_site(site, folder, task, network, folder_of(home, site)) for site, folder in sorted(folders.items())}
    head = head_task(task, _width(network, task))
    write_json(home / TASK, head.to_dict(), public=True)
    return Features(home, head, images)


def head_task(task: TaskConfig, width: int) -> TaskConfig:
    """The task that trains a head on features: what is learnt and how as before, of images only that they are one row of numbers."""
    whole = task.to_dict()
    kept = {name: whole[name] for name in _LEARNT}
    origin = f"features of {task.network['name']} from {task.network['weights']['file']}; {task.source}".removesuffix("; ")
    images = {"channels": 1, "size": [1, width], "intensity": _AS_STORED, "network": _HEAD, "source": origin}
    return load_task({**kept, **images, "name": f"{task.name}_features"})


def _width(network: FeatureNetwork, task: TaskConfig) -> int:
    with torch.no_grad():
        return _features(network, torch.zeros(1, task.image_channels, *task.size)).shape[1]


def _features(network: FeatureNetwork, images: Tensor) -> Tensor:
    """(N, D) of images (N, C, ...): what the last layer is given."""
    return pooled(network.features_and_output(images)[0])


def _write_site(site: str, folder: Path, task: TaskConfig, network: FeatureNetwork, to: Path) -> int:
    """The features of one site; the datalist comes last, so that a folder without one is not complete."""
    source = open_source(site, task, folder)
    known, _ = renumbered_entries(site or site_name(folder), task, source)
    entries = [entry for entry in known if encode_label(entry.label, task, entry.place) is not None]
    failed: dict[int, str] = {}
    read = counted(entries, len(entries), f"{site or site_name(folder)}, images through the network")
    rows = ((row.entry, row.image) for row in decoded_rows(task, source, read, failed))
    items = []
    for number, (entry, features) in enumerate(_through(network, rows)):
        file = to / "features" / f"{number:06d}.tiff"
        write_atomically(file, _picture(features))
        listed = entries[entry]
        items.append(Item((file,), listed.label, patient=listed.patient, split=listed.split))
    check_unreadable(failed, len(entries), task, site or str(folder))
    write_datalist(to, items, to, splits=source.listed())
    return len(items)


@torch.no_grad()
def _through(network: FeatureNetwork, rows: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """(entry, features (D,)) of every row (entry, image), batch by batch."""
    rows = iter(rows)
    while batch := list(islice(rows, _BATCH)):
        yield from zip((entry for entry, _ in batch), _features(network, torch.stack([image for _, image in batch])), strict=True)


def _picture(features: Tensor) -> bytes:
    """A TIFF file of one row of float32 numbers."""
    from PIL import Image

    content = BytesIO()
    Image.fromarray(features.float().numpy()[None]).save(content, format="TIFF")
    return content.getvalue()
