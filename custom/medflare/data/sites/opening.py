"""A site opened: its own settings applied, its data found, read and checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medflare.core.errors import ConfigError
from medflare.data.cache.folder import placed
from medflare.data.loading import load_site_data, resolve_data_root
from medflare.data.sites.local import PLACE, LocalSettings, local_settings
from medflare.data.sites.site import Site
from medflare.networks.dry_run import check_memory
from medflare.tasks.config import TaskConfig


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
        ConfigError: a setting of local/medflare.json that is unknown or unusable, or volumes too large for the site's memory.
        DataError: the data cannot be used as they are.
    """
    own = local if isinstance(local, LocalSettings) else local_settings(local or {})
    own_device = usable_device(own.device)
    root = resolve_data_root(name, task, own.data_root, data_root)
    data = load_site_data(name, task, root, role=role, cache=placed(own.cache, cache))
    site = Site(name, task, data, seed, device or own_device)
    site.batch_limit = own.batch_size
    if role == "inside" and task.spatial_dims == 3:
        check_memory(task, site.batch_size, site.device, f"site {name}")
    if site.batch_size < task.batch_size:
        site.notes.append(f"trains with batches of {site.batch_size}, not the task's {task.batch_size}: its {PLACE} says so")
    return site


def usable_device(name: str) -> torch.device:
    """The device that a site's own settings name.

    Raises:
        ConfigError: torch does not know it, or this machine lacks it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{PLACE}: unknown device {name!r}; use cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{PLACE}: device {name!r} is not available here; use cpu or install a driver")
    return device
