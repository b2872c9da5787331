"""Open a site: apply its local settings; find, read and check its data."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from medflare.core.errors import ConfigError, one_line
from medflare.core.states import state_bytes
from medflare.data.loading import load_site_data, open_source, resolve_data_root
from medflare.data.local import PLACE, Bounds, LocalSettings, cache_with_folder, local_settings
from medflare.data.trial import try_task
from medflare.networks.catalogue import PROBLEMS, meta_network
from medflare.networks.dry_run import step_bytes
from medflare.networks.features import zero_images
from medflare.tasks.config import TaskConfig
from medflare.training.computing import Computing, be_deterministic, check_precision, usable_device
from medflare.training.site import Site

_NOT_ON_META = tuple(problem for problem in PROBLEMS if problem is not ValueError)


def open_site(
    name: str,
    task: TaskConfig,
    *,
    seed: int = 0,
    role: str = "inside",
    data_root: Path | str | None = None,
    local: Mapping[str, Any] | LocalSettings | None = None,
    device: str | None = None,
    cache: Path | None = None,
    abort: Callable[[], bool] = lambda: False,
) -> Site:
    """A site with its data.

    Args:
        role: "inside" (trains) or "outside" (needs a test split only).
        data_root: of the data; comes before the local settings and MEDFLARE_DATA_ROOT.
        local: the site's settings, or the content of its local/medflare.json.
        device: of networks; comes before the local settings and MEDFLARE_DEVICE.
        cache: folder for decoded images; the local settings' "cache" and MEDFLARE_CACHE come first.
        abort: see `Site`.

    Raises:
        ConfigError: an unusable local setting, a precision that the device lacks, a task beyond the
            site's bounds, a training step beyond its memory, or batches on which the network cannot
            train.
        DataError: the data cannot be used.
    """
    settings = local if isinstance(local, LocalSettings) else local_settings(local or {})
    chosen = usable_device(device or settings.chosen_device(), f"site {name}")
    check_precision(task.precision, chosen, f"site {name}")
    if chosen.type == "cuda":
        be_deterministic()
    check_task_bounds(task, settings.bounds, f"site {name}")
    if role == "inside":
        check_single_batches(task)
        check_step_memory(task, settings, f"site {name}")
        check_batch_bounds(task, settings.bounds, f"site {name}")
    root = resolve_data_root(name, task, settings.data_root, data_root)
    data = load_site_data(
        name,
        task,
        root,
        role=role,
        cache=cache_with_folder(settings.cache, cache),
        folders=settings.data_folders,
        bounds=settings.bounds,
    )
    site = Site(
        name,
        task,
        data,
        seed,
        computing=Computing(
            chosen, task.precision, settings.channels_last, settings.compile, settings.cuda_graph
        ),
        batch_limit=settings.batch_size,
        minimum_patients=settings.minimum_patients,
        source=lambda other: open_source(name, other, root, settings.data_folders, settings.bounds),
        abort=abort,
    )
    if site.batch_size < task.batch_size:
        site.notes.append(
            f"trains with batches of {site.batch_size}, not the task's {task.batch_size}: "
            f"its {PLACE} says so"
        )
    return site


def check_task_bounds(task: TaskConfig, bounds: Bounds, location: str) -> None:
    """Compare a task's image size, epochs, network and transforms with a party's bounds, before
    images are read.

    Raises:
        ConfigError: the task is beyond them, its network takes too long to build, or a transform
            fails on an image of its size.
    """
    bounds.check_task(task, location)
    if task.local_epochs > bounds.epochs:
        raise ConfigError(
            f"{location}: task {task.name} has {task.local_epochs} local_epochs, "
            f"{_named('epochs')} allows {bounds.epochs}"
        )
    try_task(task, bounds.memory / 4, f"{location}: task {task.name}", _named("memory"))
    needed = state_bytes(meta_network(task).state_dict())
    if needed > bounds.model_bytes:
        raise ConfigError(
            f"{location}: task {task.name}: the network has {needed} bytes, "
            f"{_named('model_bytes')} allows {bounds.model_bytes}"
        )


def check_step_memory(task: TaskConfig, settings: LocalSettings, location: str) -> None:
    """Compare the memory of a training step on a whole batch with a site's bound.

    It does not depend on the site's number of images, which a lead would learn from the answer.

    Raises:
        ConfigError: the step needs more.
    """
    batch = min(task.batch_size, settings.batch_size or task.batch_size)
    needed = step_bytes(task, batch) / 2**30
    if needed > settings.bounds.memory:
        raise ConfigError(
            f"{location}: a training step on {batch} x {list(task.size)} takes about "
            f"{needed:.1f} GiB, {_named('memory')} allows {settings.bounds.memory:g}; "
            "make size or batch_size smaller"
        )


def check_batch_bounds(task: TaskConfig, bounds: Bounds, location: str) -> None:
    """Compare a task's batches and patches with a site's bounds.

    Raises:
        ConfigError: the task is beyond them.
    """
    for setting in ("batch_size", "accumulate", "patches_per_image"):
        count = getattr(task, setting)
        if count > bounds.batch:
            raise ConfigError(
                f"{location}: task {task.name} has {setting} {count}, "
                f"{_named('batch')} allows {bounds.batch}"
            )


def check_single_batches(task: TaskConfig) -> None:
    """Raise ConfigError where batches have one image and batch normalization sees one number."""
    if task.batch_size > 1:
        return
    image = zero_images(task)[:1]
    try:
        with torch.no_grad(), suppress(*_NOT_ON_META):
            meta_network(task).train()(image)
    except ValueError as error:
        raise ConfigError(
            f"task {task.name}: its network {task.network['name']} cannot train on batches of "
            f"one image ({one_line(error)}); set batch_size to 2 or more, or size to larger images"
        ) from error


def _named(bound: str) -> str:
    return f"bounds.{bound} in {PLACE}"
