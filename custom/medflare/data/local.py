"""The settings that a site makes in its own local/medflare.json, and its folders; imported without
torch.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
)

from medflare.core.errors import ConfigError, DataError
from medflare.core.packages import trust_refusal
from medflare.core.settings import checked, strict_dataclass
from medflare.core.text import format_shape, read_json

if TYPE_CHECKING:
    from medflare.data.geometry import Grid
    from medflare.tasks.config import TaskConfig

_PILLOW = 178_956_970  # pixels beyond which Pillow opens no picture
_RAISE = "raise bounds.{0} in local/medflare.json, or --max-{0} of predict"
LOCAL_FILE = "medflare.json"  # in the site's local/ folder
PLACE = f"local/{LOCAL_FILE}"
# See `private_folder`; at the server also the results' folder in the job's folder.
FOLDER = "medflare"
CACHE = "medflare-cache"  # folder beside local/: decoded images, for all jobs of the site
OUTBOUND = "outbound.csv"  # in the site's folder of the job: what left, entry by entry
PROGRESS = "status.json"  # in the same folder: the current step or the last one, and the end
_CACHE_VARIABLE = "MEDFLARE_CACHE"
_POD_VARIABLE = "NVFL_WORKSPACE_OWNER_FQCN"  # set by FLARE in a job's pod in Kubernetes
DEVICE_VARIABLE = "MEDFLARE_DEVICE"
DATA_ROOT_VARIABLE = "MEDFLARE_DATA_ROOT"
DATA_FOLDERS_VARIABLE = "MEDFLARE_DATA_FOLDERS"  # separated as in PATH


# -- folders ---------------------------------------------------------------------------------------


def private_folder(run_folder: Path) -> Path:
    """A party's own files of a job, for example site-1/medflare/4711: outside the job's folder,
    which FLARE gives to the job's components.

    In a job's container only the job's folder outlives the job; there the files are in that folder.
    """
    if in_container(run_folder):
        return run_folder / FOLDER
    return run_folder.parent / FOLDER / run_folder.name


def in_container(run_folder: Path) -> bool:
    """Whether a job's process has a container of its own: in Docker the job's folder is mounted, in
    Kubernetes a pod has a copy of the workspace, and gives back the job's folder alone.
    """
    return run_folder.is_mount() or _POD_VARIABLE in os.environ


def find_private_folder(run_folder: Path) -> Path:
    """`private_folder` of a job that ran here or in a container."""
    folder = private_folder(run_folder)
    in_job = run_folder / FOLDER
    if in_job.exists() and not folder.exists():
        return in_job
    return folder


def allowed_folders(local: Sequence[str | Path] = ()) -> tuple[Path, ...]:
    """Further folders of a site's files: `local` ("data_folders" of local/medflare.json), else
    those of MEDFLARE_DATA_FOLDERS.
    """
    folders = local or filter(None, os.environ.get(DATA_FOLDERS_VARIABLE, "").split(os.pathsep))
    return tuple(Path(folder).expanduser() for folder in folders)


# -- settings --------------------------------------------------------------------------------------

_AtLeastOne = Annotated[int, Field(ge=1)]


@strict_dataclass
class CacheSettings:
    """The cache of decoded images."""

    folder: str = ""  # of the cache; "" for MEDFLARE_CACHE, else the engine's folder
    # most gigabytes that all files take on disk; the least recently used are deleted
    limit_gb: PositiveFloat = 100.0
    # gigabytes; images of a site that take more stay on disk and are read batch by batch
    memory_gb: NonNegativeFloat = 4.0


def cache_with_folder(
    cache: CacheSettings | None, default: Path | None = None
) -> CacheSettings | None:
    """The settings with the folder that is used: the site's, else MEDFLARE_CACHE, else `default`;
    None for no cache on disk.
    """
    if cache is None:
        return None
    folder = cache.folder or os.environ.get(_CACHE_VARIABLE) or default
    if not folder:
        return None
    return replace(cache, folder=str(Path(folder).expanduser()))


def _importable(packages: tuple[str, ...]) -> tuple[str, ...]:
    for name in packages:
        reason = trust_refusal(name, packages)
        if reason:
            raise ValueError(f"names of packages with extensions: {reason}")
    return packages


def _spelt_out(cache: Any) -> Any:
    """Shorthands: true for the engine's folder, a text for another folder, false for no cache."""
    if cache is True:
        return CacheSettings()
    if cache is False:
        return None
    if isinstance(cache, str):
        return CacheSettings(folder=cache)
    return cache


@strict_dataclass
class OutboundLimits:
    """Limits of what may leave the site, beyond what the method declares."""

    # names of a message's entries that may leave; None: all that the method declares
    entries: tuple[str, ...] | None = None
    # most bytes of tensors in one reply; None: no limit
    bytes: NonNegativeInt | None = None


@strict_dataclass
class PrivacyLimit:
    """The site's privacy budget over all jobs."""

    epsilon: PositiveFloat  # limit of the privacy loss ε at `delta`
    delta: Annotated[float, Field(gt=0, lt=1)]
    ledger: str | None = None  # folder for the site's ledger; None for the engine's choice


@strict_dataclass
class ImageBounds:
    """The largest image that is read: a file of a megabyte can hold many gigabytes."""

    pixels: Annotated[int, Field(ge=1, le=_PILLOW)] = 2**26  # of a picture: 8192 x 8192
    # of a volume with all its channels: 512 x 512 x 1024
    voxels: _AtLeastOne = 2**28

    def check(self, path: Path, shape: Sequence[int], *, volume: bool) -> None:
        """Raise DataError for an image whose size in its header is larger; to be called before its
        pixels are read.
        """
        unit, limit = ("voxels", self.voxels) if volume else ("pixels", self.pixels)
        if math.prod(shape) > limit:
            unpacked = math.prod(shape) * 4 / 2**30  # as float32
            raise DataError(
                f"{path}: {format_shape(shape)} {unit}, {unpacked:.3g} GiB once unpacked, "
                f"above the bound of {limit}; store the image smaller, or {_RAISE.format(unit)}"
            )

    def check_task(self, task: "TaskConfig", location: str) -> None:
        """Raise ConfigError for a task whose images are larger."""
        volume = task.spatial_dims == 3
        unit, limit = ("voxels", self.voxels) if volume else ("pixels", self.pixels)
        if math.prod(task.size) > limit:
            raise ConfigError(
                f"{location}: task {task.name} has size {format_shape(task.size)}, "
                f"more than {limit} {unit}; {_RAISE.format(unit)}"
            )

    def check_resampled(self, path: Path, grid: "Grid", task: "TaskConfig") -> None:
        """Raise DataError for a volume that is larger at the task's spacing, as where the header's
        millimetres are wrong.
        """
        turned = grid.turned(task.orientation)
        if task.spacing is None or turned.spacing is None:
            return
        sides = zip(turned.spacing, turned.shape, task.spacing, strict=True)
        shape = [math.floor(old * (count - 1) / new + 0.5) + 1 for old, count, new in sides]
        if task.image_channels * math.prod(shape) > self.voxels:
            raise DataError(
                f"{path}: with the task's spacing it has {format_shape(shape)} voxels; "
                f"its header says {format_shape(grid.spacing or ())} mm; "
                f"correct one of them, or {_RAISE.format('voxels')}"
            )


@strict_dataclass
class Bounds(ImageBounds):
    """Limits of what a job may demand of the site, and of the size of images."""

    # of the site's images that a task may leave out, by its labels or unread
    drop_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    epochs: _AtLeastOne = 1000  # passes over the training images in a round
    # of models on test images, over all jobs on one data folder
    evaluations: _AtLeastOne = 1000
    # of work on one job, without waits; then the site only receives the final models
    hours: PositiveFloat = 720.0
    # that a job must have, this site included, for the site to train
    inside_sites: _AtLeastOne = 1
    # GiB that a training step needs at least; a transform of one image may take a quarter
    memory: PositiveFloat = 64.0
    minutes: PositiveFloat = 1440.0  # of one step of the federation; a day
    model_bytes: _AtLeastOne = 2**33  # of the task's network, and of each state of a reply
    rounds: NonNegativeInt = 10_000  # of one job
    # largest `batch_size`, `accumulate` and `patches_per_image` of a task
    batch: _AtLeastOne = 2**16
    # metrics of models on validation images, over all jobs on one data folder
    validations: _AtLeastOne = 20_000


@strict_dataclass
class LocalSettings:
    """The content of local/medflare.json; every setting may be left out."""

    # most images in a network at once (2 for batch normalization); None: the task's
    batch_size: Annotated[int, Field(ge=2)] | None = None
    bounds: Bounds = Bounds()
    # of decoded images
    cache: Annotated[CacheSettings | None, BeforeValidator(_spelt_out)] = CacheSettings()
    # whether networks use torch's channels-last memory format, faster on most GPUs
    channels_last: bool = False
    # whether torch compiles networks at their first use; needs a C++ compiler
    compile: bool = False
    # whether a GPU repeats training steps as CUDA graphs, which changes no number
    cuda_graph: bool = True
    data_folders: tuple[str, ...] = ()  # further folders in which a datalist may name files
    data_root: str = ""  # folder of the data, see `data.loading.site_folder`
    device: str = ""  # torch device; "" for MEDFLARE_DEVICE, else cpu
    # the model that is deployed here in the end; None: the method's choice
    keep: Literal["global", "personal"] | None = None
    # numbers of fewer patients do not leave the site, nor a model trained on fewer
    minimum_patients: NonNegativeInt = 0
    outbound: OutboundLimits = OutboundLimits()
    # installed, whose networks and methods a job may name
    packages: Annotated[tuple[str, ...], AfterValidator(_importable)] = ()
    privacy: PrivacyLimit | None = None
    # folder of what is counted over all jobs, where these run in containers; "" for privacy/ beside
    # this file
    records: str = ""
    # whether the site's personal model may leave it, to be tested at the other sites (`cross_site`
    # of a run)
    share_model: bool = False
    # at the server: file of initial weights, or the folder of such files; "" for MEDFLARE_WEIGHTS
    weights: str = ""

    def chosen_device(self) -> str:
        """The site's device, else MEDFLARE_DEVICE, else cpu."""
        return self.device or os.environ.get(DEVICE_VARIABLE) or "cpu"


def read_local(path: Path) -> dict[str, Any]:
    """The content of a site's local/medflare.json, empty where the file does not exist; ConfigError
    if it is no JSON object.
    """
    try:
        settings = read_json(path) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); correct it or delete it") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must be a JSON object; correct it or delete it")
    return settings


def local_settings(content: Mapping[str, Any]) -> LocalSettings:
    """The validated settings of the JSON object in local/medflare.json.

    Raises:
        ConfigError: a setting that is unknown, missing, of another type or outside its range.
    """
    for name in ("outbound", "privacy"):  # null looks like a limit and would be none
        limits = content.get(name, {})
        if limits is None or (isinstance(limits, Mapping) and None in limits.values()):
            raise ConfigError(f"{PLACE}: {name}: null is no limit; leave out what is not limited")
    return checked(LocalSettings, content, PLACE)
