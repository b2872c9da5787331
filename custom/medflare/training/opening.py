"""A site opened: its own settings applied, its data found, read and checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medflare.core.errors import ConfigError
from medflare.data.loading import load_site_data, open_source, resolve_data_root
from medflare.data.local import PLACE, Bounds, LocalSettings, cache_with_folder, local_settings
from medflare.data.trial import try_transforms
from medflare.networks.catalogue import meta_network
from medflare.networks.dry_run import step_bytes
from medflare.tasks.config import TaskConfig
from medflare.training.computing import Computing, check_precision, usable_device
from medflare.training.site import Site


def open_site(
    name: str,
    task: TaskConfig,
    *,
    seed: int = 0,
    role: str = "inside",
    data_root: Path | str | None = None,
    local: Mapping[str, Any] | LocalSettings | None = None,
    device: torch.device | str | None = None,
    cache: Path | None = None,
) -> Site:
    """A site with its data found, read and checked.

    Args:
        name: the site's name.
        task: what is learnt.
        seed: of the run.
        role: "inside" (trains) or "outside" (needs a test split only).
        data_root: overrides every other way of naming the data.
        local: the site's own settings, or the content of its local/medflare.json.
        device: where models run; None means the site's own "device".
        cache: folder for decoded images, unless the site's own "cache" or MEDFLARE_CACHE says otherwise.

    Raises:
        ConfigError: a setting of local/medflare.json that is unknown or unusable, a precision that the device lacks, a task beyond the
            site's bounds, or images too large for its memory.
        DataError: the data cannot be used as they are.
    """
    own = local if isinstance(local, LocalSettings) else local_settings(local or {})
    own_devices = usable_devices(own)
    used, *further = own_devices if device is None else (torch.device(device),)
    for one in (used, *further):
        check_precision(task.precision, one, f"site {name}")
    check_task_bounds(task, own.bounds, f"site {name}")
    root, kept = resolve_data_root(name, task, own.data_root, data_root), cache_with_folder(own.cache, cache)
    data = load_site_data(name, task, root, role=role, cache=kept, folders=own.data_folders, bounds=own.bounds)
    site = Site(name, task, data, seed, used)
    site.computing = Computing(used, task.precision, tuple(further), own.channels_last, own.compile)
    site.batch_limit = own.batch_size
    site.source = lambda other: open_source(name, other, root, own.data_folders, own.bounds)
    if role == "inside":
        _refuse_large_step(site, own.bounds)
        check_batch_bounds(task, own.bounds, f"site {name}")
    if site.batch_size < task.batch_size:
        site.notes.append(f"trains with batches of {site.batch_size}, not the task's {task.batch_size}: its {PLACE} says so")
    return site


def usable_devices(own: LocalSettings) -> tuple[torch.device, ...]:
    """The device, or all devices, that a site's own settings name.

    Args:
        own: the settings.

    Raises:
        ConfigError: see `computing.usable_device`; several that are no GPUs, or with `compile`.
    """
    devices = tuple(usable_device(name, PLACE) for name in ((own.device,) if isinstance(own.device, str) else own.device))
    if len(devices) == 1:
        return devices
    if others := [str(device) for device in devices if device.type != "cuda" or device.index is None]:
        raise ConfigError(f"{PLACE}: device: batches are shared among GPUs such as 'cuda:0', {others[0]!r} is none; name it alone")
    if own.compile:
        raise ConfigError(f"{PLACE}: compile is for one device, device names {len(devices)}; leave out compile")
    return devices


def check_task_bounds(task: TaskConfig, bounds: Bounds, place: str) -> None:
    """Nothing where a task asks no more of a site than its bounds allow; before any image is read.

    Args:
        task: gives size, network, epochs and transforms.
        bounds: the site's.
        place: the beginning of a message.

    Raises:
        ConfigError: it asks more, or a transform fails on an image of its size.
    """
    bounds.check_task(task, place)
    if task.local_epochs > bounds.epochs:
        raise ConfigError(f"{place}: task {task.name} has {task.local_epochs} local_epochs, {_named('epochs')} allows {bounds.epochs}")
    needed = sum(tensor.nbytes for tensor in meta_network(task).state_dict().values())
    if needed > bounds.model_bytes:
        allowed = f"{_named('model_bytes')} allows {bounds.model_bytes}"
        raise ConfigError(f"{place}: task {task.name}: the network has {needed} bytes, {allowed}")
    try_transforms(task, bounds.memory / 4, f"{place}: task {task.name}", _named("memory"))


def check_batch_bounds(task: TaskConfig, bounds: Bounds, place: str) -> None:
    """Nothing where as much as a task trains on at once is within a site's bounds.

    Args:
        task: gives batches and patches.
        bounds: the site's.
        place: the beginning of a message.

    Raises:
        ConfigError: it is more.
    """
    for setting in ("batch_size", "accumulate", "patches_per_image"):
        if (count := getattr(task, setting)) > bounds.batch:
            raise ConfigError(f"{place}: task {task.name} has {setting} {count}, {_named('batch')} allows {bounds.batch}")


def _refuse_large_step(site: Site, bounds: Bounds) -> None:
    """ConfigError where a training step needs more than the site's bound of memory."""
    batch = min(site.batch_size, site.n["train"] * site.task.patches_per_image)
    if (needed := step_bytes(site.task, batch) / 2**30) > bounds.memory:
        asked = f"a training step on {batch} x {list(site.task.size)} takes about {needed:.1f} GiB"
        raise ConfigError(f"site {site.name}: {asked}, {_named('memory')} allows {bounds.memory:g}; make size or batch_size smaller")


def _named(bound: str) -> str:
    return f"bounds.{bound} in {PLACE}"
