"""What a site decides for itself, in its own local/medflare.json, and where its files lie. Light to import: it needs no torch."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError
from medflare.core.packages import untrusted
from medflare.core.settings import STRICT, checked, nested
from medflare.data.reading import ImageBounds
from medflare.data.settings import CacheSettings

LOCAL_FILE: Final = "medflare.json"  # in the site's local/ folder
PLACE: Final = f"local/{LOCAL_FILE}"
FOLDER: Final = "medflare"  # see `private_folder`; at the server also below the job's folder: the results
CACHE: Final = "medflare-cache"  # folder beside local/: decoded images, for all jobs of the site
OUTBOUND: Final = "outbound.csv"  # in the site's folder of the job: what left, entry by entry
PROGRESS: Final = "status.json"  # beside it: the step at hand, or the last one
MODELS_GB: Final = 2.0


def private_folder(run_folder: Path) -> Path:
    """Where a party keeps what is its own of a job: beside the jobs' folders, which FLARE hands to what a job names.

    In the container of a job nothing else outlives the job than its folder, which is mounted there: then that holds it.

    Args:
        run_folder: the job's folder, named after its id.

    Examples:
        >>> private_folder(Path("site-1/4711")).as_posix()
        'site-1/medflare/4711'
    """
    return run_folder / FOLDER if run_folder.is_mount() else run_folder.parent / FOLDER / run_folder.name


def kept_of(run_folder: Path) -> Path:
    """Where that is of a job that may be an earlier medflare's, which kept it in the job's folder.

    Args:
        run_folder: as for `private_folder`.
    """
    own, earlier = private_folder(run_folder), run_folder / FOLDER
    return earlier if earlier.exists() and not own.exists() else own


def _trains(size: int) -> int:
    if size < 2:
        raise ValueError("2 or more, since batch normalisation cannot train on a single image")
    return size


def _devices(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(value, tuple) and len(set(value)) < max(len(value), 1):
        raise ValueError("text, or a list of different devices")
    return value


def _importable(packages: tuple[str, ...]) -> tuple[str, ...]:
    for name in packages:
        if reason := untrusted(name, packages):
            raise ValueError(f"names of packages with networks or methods: {reason}")
    return packages


def _spelt_out(cache: Any) -> Any:
    """true for the settings as they are, a text for the folder, false for no cache, which null must not be taken for."""
    if isinstance(cache, bool):
        return CacheSettings() if cache else None
    if isinstance(cache, str):
        return CacheSettings(folder=cache)
    if not isinstance(cache, Mapping | CacheSettings):
        raise ValueError("true, false, a folder, or an object with folder, limit_gb and memory_gb")
    return cache


@dataclass(frozen=True, config=STRICT)
class OutboundLimits:
    """What may leave the site, beyond what every method declares.

    Attributes:
        entries: names of a message's entries that may leave; None for all that the method declares, none for an empty list.
        bytes: most bytes of tensors in one reply; None for no limit.
    """

    entries: tuple[str, ...] | None = None
    bytes: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True, config=STRICT)
class PrivacyLimit:
    """The most that the site gives away of its patients' privacy over all jobs.

    Attributes:
        epsilon: limit of the privacy loss ε at `delta`.
        ledger: folder for the site's ledger; None for the engine's choice.
    """

    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    ledger: str | None = None


@dataclass(frozen=True, config=STRICT)
class Bounds(ImageBounds):
    """The most that a job may ask of the site, beside how large an image may be. The defaults are beyond what an honest job asks.

    Attributes:
        epochs: passes over the training images in a round.
        hours: of the site's work on one job, waiting for others aside; then it takes part no longer, but for the final models.
        memory: GiB that a training step needs at least; a transform of one image may take a quarter of it.
        minutes: of one step of the federation.
        model_bytes: of the task's network.
        batch: the task's images a step, batches whose gradient a step follows, or patches an image gives in an epoch.
    """

    epochs: Annotated[int, Field(ge=1)] = 1000
    hours: Annotated[float, Field(gt=0)] = 720.0  # thirty days
    memory: Annotated[float, Field(gt=0)] = 64.0
    minutes: Annotated[float, Field(gt=0)] = 1440.0  # a day
    model_bytes: Annotated[int, Field(ge=1)] = 2**33
    batch: Annotated[int, Field(ge=1)] = 2**16


@dataclass(frozen=True, config=STRICT)
class LocalSettings:
    """The content of local/medflare.json; every setting may be left out.

    Attributes:
        batch_size: most images that go through a network at once; None as the task says.
        bounds: the most that an image may be, and that a job may ask.
        cache: where decoded images are kept; true for the engine's folder, a text for another one, false for none.
        channels_last: whether networks keep their channels last in memory, which suits the convolutions of most GPUs.
        compile: whether torch compiles networks when they are first used; needs a C++ compiler.
        data_folders: folders beside the data's own in which a datalist may name files.
        data_root: folder of the data; "" where it is found otherwise, see `data.loading.resolve_data_root`.
        device: where networks run, as torch spells it; a list of GPUs shares every batch among them.
        keep: what is deployed here in the end: its "global" or its "personal" model; left out: what the method deploys.
        minimum_patients: of how many a metric must be for it to leave the site.
        models_gb: at the server: gigabytes that a model of every site may take for all models to lie in memory; beyond, their large tensors
            lie in files beside the checkpoints, which the operating system keeps in memory as far as it can.
        outbound: limits of what leaves the site.
        packages: installed packages whose networks ("package.module:name") and methods a job may name.
        privacy: limit of what training gives away; None for no limit.
        weights: at the server: the file that a task's network starts from, or the folder of such files; "" for the environment's
            MEDFLARE_WEIGHTS.
    """

    batch_size: Annotated[int, AfterValidator(_trains)] | None = None
    bounds: Annotated[Bounds, nested(Bounds)] = Bounds()
    cache: Annotated[CacheSettings | None, nested(CacheSettings), BeforeValidator(_spelt_out)] = CacheSettings()
    channels_last: bool = False
    compile: bool = False
    data_folders: tuple[str, ...] = ()
    data_root: str = ""
    device: Annotated[str | tuple[str, ...], AfterValidator(_devices)] = "cpu"
    keep: Literal["global", "personal"] | None = None
    minimum_patients: Annotated[int, Field(ge=0)] = 0
    models_gb: Annotated[float, Field(ge=0)] = MODELS_GB
    outbound: Annotated[OutboundLimits, nested(OutboundLimits)] = OutboundLimits()
    packages: Annotated[tuple[str, ...], AfterValidator(_importable)] = ()
    privacy: Annotated[PrivacyLimit | None, nested(PrivacyLimit)] = None
    weights: str = ""


def read_local(path: Path) -> dict[str, Any]:
    """The content of a site's local/medflare.json; nothing where the file does not exist.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); correct it or delete it") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold a JSON object with the site's own settings; correct it or delete it")
    return settings


def local_settings(content: Mapping[str, Any]) -> LocalSettings:
    """The settings as JSON has them, checked: one that is misspelt must not be taken for none.

    Args:
        content: the JSON object of the file.

    Raises:
        ConfigError: a setting that is unknown, missing, of another type or outside its range.
    """
    if nulls := list(_null_limits(content)):
        raise ConfigError(f"{PLACE}: {nulls[0]} must not be null, which looks like a limit and is none; leave it out where none is meant")
    return checked(LocalSettings, content, PLACE)


def _null_limits(content: Mapping[str, Any]) -> Iterator[str]:
    for name in ("bounds", "outbound", "privacy"):
        limits = content.get(name, {})
        if limits is None:
            yield name
        elif isinstance(limits, Mapping):
            yield from (f"{name}.{inner}" for inner, limit in limits.items() if limit is None)
