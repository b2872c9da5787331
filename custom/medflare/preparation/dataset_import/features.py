"""Sites of pretrained features.

Every image goes once through a frozen network, and its features are stored as an image of one row.
Only a head remains to be trained, so a round takes a fraction of a second and messages are small.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from medflare.core.errors import ConfigError, DataError
from medflare.core.files import write_atomically, write_json
from medflare.data.datalist import site_folders, site_name
from medflare.data.decoding import DecodedRow, decoded_rows
from medflare.data.loading import check_unreadable, open_source, renumbered_items
from medflare.data.progress import with_progress
from medflare.data.targets import encode_label
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork, pooled
from medflare.networks.weights import starting_state
from medflare.preparation.dataset_import.folders import Item
from medflare.preparation.dataset_import.site_files import check_target, write_datalist
from medflare.tasks.config import TaskConfig, load_task

TASK = "task.json"  # beside the sites' folders
_BATCH = 32
_COPIED = (  # settings that do not describe images
    "kind",
    "target",
    "labels",
    "label_values",
    "unlisted_labels",
    "resplit",
    "metric",
    "loss",
    "optimizer",
    "schedule",
    "clip",
    "sampling",
    "batch_size",
    "accumulate",
    "local_epochs",
)
_HEAD = {"name": "mlp", "hidden": [64], "batch_norm": True}
_UNCHANGED = {
    "name": "ScaleIntensityRange",
    "a_min": 0.0,
    "a_max": 1.0,
    "b_min": 0.0,
    "b_max": 1.0,
    "clip": False,
}


@dataclass(frozen=True)
class Features:
    """What was written."""

    home: Path  # folder of the sites and of the task
    task: TaskConfig  # trains a head on the features
    images: Mapping[str, int]  # site -> number of images

    def render(self) -> str:
        """A line per site, and the task file."""
        lines = []
        for site, count in self.images.items():
            lines.append(f"{site or 'images'}: {count} x {self.task.size[1]} features")
        head = f"which trains a head on them: {self.task.network}"
        return "\n".join([*lines, f"written: {self.home / TASK}, {head}"])


def write_features(
    root: Path, task: TaskConfig, home: Path, *, weights: Path | None = None, force: bool = False
) -> Features:
    """Write sites whose images are features of the task's network.

    Patients, labels and splits are unchanged.

    Args:
        root: a site's folder, or the folder of several.
        task: a classification task whose network starts from a file of weights.
        home: folder for the sites and for the task of the head.
        weights: the file or its folder, see `networks.weights.find_weights`.

    Raises:
        ConfigError: the task is a segmentation, or its network has no weights or features; weights
            that do not fit.
        DataError: an image that cannot be used, `home` within `root`, or datalists that exist.
    """
    if task.kind != "classification":
        raise ConfigError(f"task {task.name}: features need a classification task")
    if "weights" not in task.network:
        raise ConfigError(
            f"task {task.name}: features need pretrained weights; set network.weights"
        )
    if home.resolve().is_relative_to(root.resolve()):
        raise DataError(
            f"{home} is in {root} and would be read as one of its sites; take another folder"
        )
    folders = {}
    for folder in site_folders(root):
        site = "" if folder == root else site_name(folder)
        folders[site] = folder
    check_target(home, folders, force=force)
    network = initial_network(task, 0, start=starting_state(task, 0, weights)).eval()
    name = task.network["name"]
    if not network.has_features:
        raise ConfigError(f"task {task.name}: network {name} has no features; take another one")
    images = {}
    for site, folder in sorted(folders.items()):
        images[site] = _write_site(site, folder, task, network, home / site)
    width = _features(network, torch.zeros(1, task.image_channels, *task.size)).shape[1]
    source = f"features of {name} from {task.network['weights']['file']}; {task.source}"
    settings = task.to_dict()
    head = load_task(
        {
            **{name: settings[name] for name in _COPIED},
            "name": f"{task.name}_features",
            "channels": 1,
            "size": [1, width],
            "intensity": _UNCHANGED,
            "network": _HEAD,
            "source": source.removesuffix("; "),
        }
    )
    write_json(home / TASK, head.to_dict(), public=True)
    return Features(home, head, images)


@torch.no_grad()
def _features(network: FeatureNetwork, images: Tensor) -> Tensor:
    """Features (N, D) of images (N, C, ...): the input of the last layer."""
    return pooled(network.features_and_output(images)[0])


def _write_site(
    site: str, folder: Path, task: TaskConfig, network: FeatureNetwork, target: Path
) -> int:
    """The features of one site.

    The datalist is written last, so a folder without one is incomplete.
    """
    name = site or site_name(folder)
    source = open_source(site, task, folder)
    listed, _ = renumbered_items(name, task, source)
    entries = []
    for entry in listed:
        if encode_label(entry.label, task, entry.location) is not None:
            entries.append(entry)
    failed: dict[int, str] = {}
    images = with_progress(entries, len(entries), f"{name}, images through the network")
    rows = decoded_rows(task, source, images, failed)
    items = []
    for number, (index, features) in enumerate(_through(network, rows)):
        file = target / "features" / f"{number:06d}.tiff"
        content = BytesIO()
        Image.fromarray(features.float().numpy()[None]).save(content, format="TIFF")
        write_atomically(file, content.getvalue())
        entry = entries[index]
        attributes = entry.attributes
        item = Item((file,), entry.label, entry.patient, entry.split, attributes=attributes)
        items.append(item)
    check_unreadable(failed, len(entries), task, site or str(folder))
    write_datalist(target, items, target, splits=source.listed_splits())
    return len(items)


def _through(network: FeatureNetwork, rows: Iterable[DecodedRow]) -> Iterator[tuple[int, Tensor]]:
    """(index of the entry, features (D,)) of every row, computed in batches."""
    rows = iter(rows)
    while batch := list(islice(rows, _BATCH)):
        features = _features(network, torch.stack([row.image for row in batch]))
        for row, of_row in zip(batch, features, strict=True):
            yield row.item_index, of_row
