"""What is learnt: the task configuration, read from `app_configs/<task>.json`, checked before anything runs."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError
from medflare.core.settings import STRICT, checked, nested, one_of, takes, unknown
from medflare.core.text import NAME, is_name, printable, printable_json
from medflare.tasks.metrics_table import metrics_of, selection_metrics
from medflare.tasks.optimizers import OPTIMIZERS, optimizer_class, with_rate
from medflare.tasks.schedules import written_out
from medflare.tasks.transforms import check_transforms

if TYPE_CHECKING:
    from torch import Tensor

_REMEDY: Final = "see app_configs/ for working examples"
_EVERY_ROUND: Final = 2**31 - 1  # of freeze; more than any run has


def _a_name(value: str) -> str:
    if not value.strip():
        raise ValueError("a non-empty text")
    if not is_name(value):
        raise ValueError(f"a name of at most {NAME} characters that can be printed, and not . or ..")
    return value


def _different(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or len(set(names)) < len(names):
        raise ValueError("a list of different label names")
    return names


def _named(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError('an object like {"name": ..., arguments}')
    return dict(value)


def _file_name(value: str) -> str:
    if not value or value in (".", "..") or "/" in value or "\\" in value:
        raise ValueError("a file's name; its folder stands in the server's local/medflare.json, or in MEDFLARE_WEIGHTS")
    return value


@dataclass(frozen=True, config=STRICT)
class _Weights:
    """The file that the server reads the first weights from, see `networks.weights`."""

    file: Annotated[str, AfterValidator(_file_name)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    format: Literal["medflare", "torch", "torchvision", "safetensors"]
    part: Literal["all", "body"] = "all"


def _network(value: Any) -> dict[str, Any]:
    settings = _named(value)
    if "weights" in settings:
        try:
            settings["weights"] = dataclasses.asdict(checked(_Weights, settings["weights"], "weights"))
        except (ConfigError, TypeError, AttributeError) as error:
            raise ValueError(f"an object with weights as documented ({error})") from error
    return settings


@dataclass(frozen=True, config=STRICT)
class _Clip:
    """Largest norm of all gradients together, or largest absolute value of each number in them."""

    norm: Annotated[float, Field(gt=0)] | None = None
    value: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True, config=STRICT)
class _Sampling:
    """How the training images of an epoch are drawn; the weights are those of the groups of `training.batches`."""

    name: Literal["shuffle", "balanced", "weighted"] = "shuffle"
    weights: tuple[Annotated[float, Field(ge=0)], ...] = ()


@dataclass(frozen=True, config=STRICT)
class _Freeze:
    """Parts of the network, by the paths of its modules ("body"), that rest for the first so many rounds."""

    parts: tuple[str, ...] = ()
    rounds: Annotated[int, Field(ge=0)] = 0


def _channel_names(value: int | tuple[str, ...]) -> int | tuple[str, ...]:
    if isinstance(value, tuple):
        return _different(value)
    if value < 1:
        raise ValueError("at least 1")
    return value


def _orientation(code: str) -> str:
    axes = ("LR", "AP", "SI")
    if sorted(axis for letter in code for axis in axes if letter in axis) != sorted(axes) or len(code) != 3:
        raise ValueError("three letters, one each of L or R, A or P, S or I")
    return code


@dataclass(frozen=True, config=STRICT)
class _UnreadableLimit:
    share: Annotated[float, Field(ge=0, le=1)] = 0.05
    count: Annotated[int, Field(ge=0)] = 50


@dataclass(frozen=True, config=STRICT)
class _Slices:
    axis: Annotated[int, one_of(0, 1, 2)] = 2
    keep: Literal["all", "foreground"] = "all"


def _written_out(settings: Any) -> Any:
    """JSON with the defaults, so that they count in the fingerprint; what is no such object is left to the next check."""
    return dataclasses.asdict(settings) if isinstance(settings, _Slices | _Clip | _Sampling | _Freeze | _UnreadableLimit) else settings


def _sampling(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _freeze(value: Any) -> Any:
    return {"parts": value, "rounds": _EVERY_ROUND if value else 0} if isinstance(value, list | tuple) else value


Name = Annotated[str, AfterValidator(_a_name)]
Count = Annotated[int, Field(ge=1)]
Named = Annotated[dict[str, Any], BeforeValidator(_named)]
Network = Annotated[dict[str, Any], BeforeValidator(_network)]
Optimizer = Annotated[dict[str, Any], BeforeValidator(with_rate), BeforeValidator(_named)]
Clip = Annotated[dict[str, Any], BeforeValidator(_written_out), nested(_Clip)]
Freeze = Annotated[dict[str, Any], BeforeValidator(_written_out), nested(_Freeze), BeforeValidator(_freeze)]
Sampling = Annotated[dict[str, Any], BeforeValidator(_written_out), nested(_Sampling), BeforeValidator(_sampling)]
Slices = Annotated[dict[str, Any], BeforeValidator(_written_out), nested(_Slices)]
UnreadableLimit = Annotated[dict[str, Any], BeforeValidator(_written_out), nested(_UnreadableLimit)]
Channels = Annotated[
    Annotated[int | tuple[Name, ...], AfterValidator(_channel_names)],
    takes("a number of image channels, at least 1, or a list of their names, all different"),
]
Millimetres = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, config=STRICT)
class TaskConfig:
    """One learning problem, the same at every site.

    Attributes:
        name: short name, for example "brain_lgg".
        kind: "segmentation" or "classification".
        target: "binary" (one structure or one finding), "multiclass" (exactly one class each) or "multilabel" (any of several).
        labels: the foreground structures (binary, multilabel) or all classes, index = label (multiclass; in segmentation
            label 0 is the background).
        channels: image channels fed to the network: a number (with 1, RGB files become luminance; with 3, grey files are repeated),
            or their names, where an entry lists a file for each ("pre", "flair", "post").
        size: (H, W) in pixels, or (X, Y, Z) in voxels in the order of `orientation`, of the network's input: see `image_mode`.
        network: {"name": ..., arguments}, see `networks.catalogue`; "weights": {"file", "sha256", "format", "part"} to start from, see
            `networks.weights`.
        loss: {"name": ..., arguments}, see `tasks.losses`.
        optimizer: {"name": one of `tasks.optimizers`, "lr": ..., arguments of torch's optimizer}.
        schedule: {"name": one of `tasks.schedules`, its settings}, the learning rate over the rounds.
        clip: {"norm": ...} or {"value": ...}, the gradient limit of every optimizer step.
        sampling: how an epoch draws its training images: "shuffle" (each once), "balanced" (every class equally often),
            or {"name": "weighted", "weights": [...]}, see `training.batches`.
        freeze: {"parts": ["body"], "rounds": ...}: parts of the network that are frozen, and not sent, in the first rounds; a list of
            parts: in every round.
        batch_size: images per training step.
        local_epochs: passes over a site's training images per round.
        precision: number format of training and evaluation: "fp32", "bf16" or "fp16" (with loss scaling); weights, losses and steps
            are always fp32.
        accumulate: number of batches whose mean gradient one step uses.
        metric: validation metric that selects models; higher is better.
        intensity: one deterministic MONAI intensity transform {"name": ..., arguments}, see
            `tasks.transforms`.
        augment: MONAI random transforms, applied to training batches in this order.
        slices: 2-D: how volumes are cut into slices: "axis" (0, 1, 2; 2 is the third stored axis) and "keep" ("all", or
            "foreground": of training volumes the slices that show a structure; validation and test always keep all).
        label_values: label -> values that files use for it; empty: binary 1, multiclass the index, multilabel a mask (or 0/1) per label.
        unlisted_labels: values that no label lists: "error", or "drop" (the image is left out; in a mask: background).
        resplit: seed that draws the splits again by patient; null: the splits of the datalist.
        spatial_dims: 2 for pictures and slices, 3 for volumes.
        image_mode: "resize" resizes every image to `size`; "patch" trains on random patches of `size` at the resolution of the files and
            predicts with a sliding window.
        patches_per_image: with "patch": patches per image in an epoch.
        orientation: 3-D: the patient's axes along which voxels run, as "RAS".
        spacing: 3-D: voxel spacing in millimetres to which volumes are resampled; null: as stored.
        missing_channels: an image without one of the channels: "error", or "zeros" for the missing channel.
        pick: of a 4-D NIfTI file: indices (from 0) of the volumes that are the channels; empty: all.
        surface_tolerance: 3-D: tolerance of surface Dice in millimetres.
        unreadable: an image that cannot be read: "error", or "skip", up to `unreadable_limit`.
        unreadable_limit: maximum of skipped images at a site: "share" of all and "count".
        embedded: "phantom": synthetic images are used if no data root is given; else "".
        source: citation and licence of the data, or that images are synthetic.
    """

    name: Annotated[Name, Field(pattern=r"^[^/\\]*$"), takes(f"a name of at most {NAME} printable characters without / and \\")]
    kind: Literal["segmentation", "classification"]
    target: Literal["binary", "multiclass", "multilabel"]
    labels: Annotated[tuple[Name, ...], AfterValidator(_different)]
    channels: Channels
    size: Annotated[tuple[Count, ...], takes("[height, width] in pixels, or [X, Y, Z] in voxels, each at least 1")]
    network: Network
    loss: Named
    optimizer: Optimizer
    batch_size: Count
    local_epochs: Count
    metric: Name
    intensity: Named = field(
        default_factory=lambda: {"name": "ScaleIntensityRange", "a_min": 0, "a_max": 255, "b_min": 0.0, "b_max": 1.0, "clip": True}
    )
    augment: tuple[Named, ...] = ()
    schedule: Named = field(default_factory=lambda: {"name": "constant"})
    clip: Clip = field(default_factory=lambda: dataclasses.asdict(_Clip()))
    sampling: Sampling = field(default_factory=lambda: dataclasses.asdict(_Sampling()))
    freeze: Freeze = field(default_factory=lambda: dataclasses.asdict(_Freeze()))
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: Count = 1
    slices: Slices = field(default_factory=lambda: dataclasses.asdict(_Slices()))
    label_values: dict[str, Annotated[list[int], Field(min_length=1)]] = field(default_factory=dict)
    unlisted_labels: Literal["error", "drop"] = "error"
    resplit: int | None = None
    spatial_dims: Annotated[int, one_of(2, 3)] = 2
    image_mode: Literal["resize", "patch"] = "resize"
    patches_per_image: Count = 1
    orientation: Annotated[str, AfterValidator(_orientation)] = "RAS"
    spacing: Annotated[tuple[Millimetres, Millimetres, Millimetres] | None, takes("three millimetres above 0, or null as stored")] = None
    missing_channels: Literal["error", "zeros"] = "error"
    pick: tuple[Annotated[int, Field(ge=0)], ...] = ()
    surface_tolerance: Annotated[float, Field(ge=0)] = 2.0
    unreadable: Literal["error", "skip"] = "error"
    unreadable_limit: UnreadableLimit = field(default_factory=lambda: dataclasses.asdict(_UnreadableLimit()))
    embedded: Literal["", "phantom"] = ""
    source: Annotated[str, AfterValidator(printable)] = ""

    @property
    def image_channels(self) -> int:
        """How many channels an image has."""
        return self.channels if isinstance(self.channels, int) else len(self.channels)

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the image channels; none where the task gives their number alone."""
        return () if isinstance(self.channels, int) else self.channels

    @property
    def outputs(self) -> int:
        """Output channels of the network: 1 for binary, one per label otherwise."""
        return 1 if self.target == "binary" else len(self.labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of what `Site.class_counts` counts: the negative and the positive class of a binary task, else the labels."""
        return (f"not {self.labels[0]}", self.labels[0]) if self.target == "binary" else self.labels

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics that there are for the task."""
        return metrics_of(self.kind, self.spatial_dims)

    def probabilities(self, logits: "Tensor") -> "Tensor":
        """Probabilities of the same shape: softmax over dimension 1 (multiclass) or sigmoid (binary, multilabel).

        Args:
            logits: (N, outputs, ...).
        """
        return logits.softmax(dim=1) if self.target == "multiclass" else logits.sigmoid()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values that `load_task` turns back into an equal configuration."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any setting: sites and server compare it before they exchange weights."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def load_task(source: "str | Path | Mapping[str, Any] | TaskConfig") -> TaskConfig:
    """The task named by a preset ("brain_lgg"), a JSON file or a mapping.

    Args:
        source: name of a preset, path of a JSON file, its content, or a configuration, which is checked again.

    Raises:
        ConfigError: unknown preset, unreadable file, or a key or value that is unknown, missing or out of range.
    """
    if isinstance(source, TaskConfig):
        return load_task(source.to_dict())
    if isinstance(source, Mapping):
        return _checked(source, f"task {source.get('name', '(unnamed)')!r:.60}")
    text, place = _read(source)
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON ({error}); {_REMEDY}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: a task is one JSON object, found {type(content).__name__}; {_REMEDY}")
    return _checked(content, place)


def presets() -> tuple[str, ...]:
    """Names of the tasks that come with medflare; those of the papers begin with "papers/"."""
    files = [f"{place}{entry.name}" for place in ("", "papers/") for entry in (_preset_folder() / place).iterdir()]
    return tuple(sorted(file.removesuffix(".json") for file in files if file.endswith(".json")))


def _preset_folder() -> Any:
    return resources.files("medflare.tasks") / "presets"


def _read(source: str | Path) -> tuple[str, str]:
    path = Path(source)
    if isinstance(source, str) and source in presets():
        return (_preset_folder() / f"{source}.json").read_text(encoding="utf-8"), f"preset {source}"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not readable as text ({error}); {_REMEDY}") from error
    if path.suffix == ".json" or len(path.parts) > 1:
        raise ConfigError(f"{path}: no such task file; give a JSON file or a preset ({', '.join(presets())})")
    raise unknown("task", str(source), presets())


def _checked(content: Mapping[str, Any], place: str) -> TaskConfig:
    try:
        printable_json(content)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}; {_REMEDY}") from error
    task = checked(TaskConfig, content, place, remedy=_REMEDY)
    if task.optimizer["name"] not in OPTIMIZERS:
        optimizer_class(task.optimizer["name"], place)
    task.schedule.update(written_out(task.schedule, f"{place}: schedule"))
    _check_together(task, place)
    check_transforms(task.intensity, task.augment, place)
    return task


def _check_together(task: TaskConfig, place: str) -> None:
    """Settings that are fine alone and wrong in company, and those that nothing would read."""
    if task.metric not in selection_metrics(task.kind):
        raise unknown("metric", task.metric, selection_metrics(task.kind), place)
    if strange := [label for label in task.label_values if label not in task.labels]:
        raise unknown("label", strange[0], task.labels, f"{place}: label_values")
    volumes, masks, patches = task.spatial_dims == 3, task.kind == "segmentation", task.image_mode == "patch"
    unlisted = [label for label in task.labels if label not in task.label_values] if task.label_values else []
    twice = _meant_twice(task)
    read = {"orientation": volumes, "spacing": volumes, "slices": not volumes, "surface_tolerance": volumes and masks}
    ignored = [name for name, used in {**read, "patches_per_image": patches}.items() if not used and getattr(task, name) != _default(name)]
    for wrong, reason in (
        (len(task.size) != task.spatial_dims, f"size {list(task.size)} has {len(task.size)} sides, spatial_dims is {task.spatial_dims}"),
        (None not in task.clip.values(), "clip takes norm or value, got both"),
        (bool(task.freeze["parts"]) != bool(task.freeze["rounds"]), "freeze takes parts and rounds, both or neither"),
        (bool(task.sampling["weights"]) != (task.sampling["name"] == "weighted"), "sampling has weights where it is weighted alone"),
        (
            ignored,
            f"{', '.join(ignored)}: not used with kind {task.kind}, spatial_dims {task.spatial_dims}, image_mode {task.image_mode}",
        ),
        (task.embedded and (volumes or task.channels not in (1, 3)), f"embedded {task.embedded!r} is pictures of 1 or 3 channels"),
        (patches and not masks, "image_mode 'patch' is for segmentation: a class belongs to a whole image"),
        (task.pick and len(task.pick) != task.image_channels, f"pick names {len(task.pick)} volumes for {task.image_channels} channels"),
        (task.missing_channels == "zeros" and not task.channel_names, "missing_channels 'zeros' needs the channels' names"),
        (task.target == "binary" and len(task.labels) != 1, f"a binary task has one label, got {list(task.labels)}"),
        (task.target == "multiclass" and len(task.labels) < 2, f"a multiclass task needs two labels or more, got {list(task.labels)}"),
        (not masks and task.slices["keep"] == "foreground", "slices.keep 'foreground' needs masks, which a classification task lacks"),
        (unlisted, f"label_values says nothing about {', '.join(unlisted)}"),
        (twice, f"label_values: {twice} means two labels, a {task.target} task takes one"),
    ):
        if wrong:
            raise ConfigError(f"{place}: {reason}")


def _meant_twice(task: TaskConfig) -> str:
    """A stored value that means two labels where only one can be, and the second of them; "" where there is none."""
    owners = {0: ""} if task.target == "binary" else {}
    for label, values in task.label_values.items() if task.target != "multilabel" else ():
        if twice := [value for value in values if owners.setdefault(value, label) != label]:
            return f"{twice[0]} of {label!r}"
    return ""


def _default(name: str) -> Any:
    (found,) = [field for field in dataclasses.fields(TaskConfig) if field.name == name]
    return found.default if found.default_factory is dataclasses.MISSING else found.default_factory()
