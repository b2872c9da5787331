"""The task configuration, read from `app_configs/<task>.json`, validated before anything runs."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from medflare.core.errors import ConfigError
from medflare.core.settings import checked, no_such, one_of, strict_dataclass, takes, unknown
from medflare.core.text import NAME, Json, JsonDict, is_name, printable, printable_json, read_json
from medflare.tasks.allowed_transforms import check_transforms
from medflare.tasks.metrics_table import (
    default_metrics,
    metrics_of,
    require_usable,
    selection_metrics,
)
from medflare.tasks.optimizers import (
    OPTIMIZERS,
    Fraction,
    Schedule,
    build_schedule,
    optimizer_class,
)

if TYPE_CHECKING:
    from torch import Tensor

_REMEDY = "see app_configs/ for working examples"
PRESETS = resources.files("medflare.tasks") / "presets"
Embedded = Literal[
    "",
    "phantom",
    "mechanisms/conventions",
    "mechanisms/two_disks",
    "mechanisms/wrong_labels",
    "mechanisms/clean_labels",
    "mechanisms/contrary_labels",
    "mechanisms/noisy_sites",
    "mechanisms/shifted_light",
]


def draws_images(embedded: str) -> bool:
    """Whether a task's draw of splits draws its generated images, so that splits share none."""
    return embedded.startswith("mechanisms/")


_FROM_8_BIT: JsonDict = {
    "name": "ScaleIntensityRange",
    "a_min": 0,
    "a_max": 255,
    "b_min": 0.0,
    "b_max": 1.0,
    "clip": True,
}


def _valid_name(value: str) -> str:
    if not is_name(value):
        raise ValueError(f"a name of 1 to {NAME} printable characters, not . or ..")
    return value


def _different(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or len(set(names)) < len(names):
        raise ValueError("at least one name, all of them different")
    return names


def _named(value: Any) -> JsonDict:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError('an object like {"name": ..., arguments}')
    return dict(value)


def _network(value: Any) -> Json:
    settings = _named(value)
    if "weights" in settings:
        if not isinstance(settings["weights"], Mapping):
            raise ValueError('weights: an object like {"file": ..., "sha256": ..., "format": ...}')
        settings["weights"] = asdict(Weights(**settings["weights"]))
    return settings


def _optimizer(value: Any) -> Json:
    settings = _named(value)
    _LearningRate(**{name: settings[name] for name in settings if name == "lr"})
    return settings


def _orientation(code: str) -> str:
    if len(code) != 3 or not all(set(code) & set(axis) for axis in ("LR", "AP", "SI")):
        raise ValueError("three letters, one each of L or R, A or P, S or I")
    return code


Name = Annotated[str, AfterValidator(_valid_name)]
Names = Annotated[tuple[Name, ...], AfterValidator(_different)]
_Words = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(printable)]
Named = Annotated[JsonDict, BeforeValidator(_named)]


@strict_dataclass
class Weights:
    """The file from which the server reads the initial weights, see `networks.weights`; its folder
    is the server's own setting.
    """

    file: Annotated[str, Field(pattern=r"^[^/\\]*[^/\\.][^/\\]*$")]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    format: Literal["medflare", "torch", "torchvision", "safetensors"]
    part: Literal["all", "body"] = "all"


@strict_dataclass
class _LearningRate:
    """The argument that every optimizer needs; torch validates the others."""

    lr: PositiveFloat


@strict_dataclass
class Clip:
    """Maximum norm of all gradients together, maximum absolute value of each number in them."""

    norm: PositiveFloat | None = None
    value: PositiveFloat | None = None


@strict_dataclass
class Sampling:
    """How the training images of an epoch are drawn; the weights are those of the groups of
    `training.batches`.
    """

    name: Literal["shuffle", "balanced", "weighted"] = "shuffle"
    weights: tuple[NonNegativeFloat, ...] = ()


@strict_dataclass
class Freeze:
    """Modules of the network, by their paths ("body"), that are frozen in the first `rounds`
    rounds.
    """

    parts: tuple[str, ...] = ()
    rounds: NonNegativeInt = 0


@strict_dataclass
class UnreadableLimit:
    """Maximum of skipped images at a site."""

    share: Fraction = 0.05
    count: NonNegativeInt = 50


@strict_dataclass
class Slices:
    """How volumes are cut into slices."""

    axis: Annotated[int, one_of(0, 1, 2)] = 2
    keep: Literal["all", "foreground"] = "all"


@strict_dataclass
class Code:
    """A coded concept (PS3.3, Sec. 8); the scheme "SCT" is SNOMED CT."""

    value: _Words
    meaning: _Words
    scheme: Annotated[str, Field(min_length=1, max_length=16), AfterValidator(printable)] = "SCT"


@strict_dataclass
class Structure(Code):
    """The code of a label, its category (PS3.16, CID 7150) and its color as #rrggbb; "" for one of
    a palette.
    """

    category: Code = Code("91723000", "Anatomical Structure")
    color: Annotated[str, Field(pattern="^(#[0-9a-fA-F]{6})?$")] = ""


def _sampling(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _freeze(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    every_round = 2**31 - 1  # more than any run has
    return {"parts": value, "rounds": every_round if value else 0}


@strict_dataclass
class TaskConfig:
    """One learning problem, the same at every site.

    Attributes:
        name: short name, for example "brain_lgg".
        kind: "segmentation" or "classification".
        target: "binary" (one structure or one finding), "multiclass" (exactly one class each) or
            "multilabel" (any of several).
        labels: the foreground structures (binary, multilabel) or all classes, index = label
            (multiclass; in segmentation label 0 is the background).
        channels: image channels fed to the network: a number (with 1, RGB files become luminance;
            with 3, grey files are repeated), or their names, where an entry lists a file for each
            ("pre", "flair", "post").
        size: (H, W) in pixels, or (X, Y, Z) in voxels in the order of `orientation`, of the
            network's input: see `image_mode`.
        network: {"name": ..., arguments}, see `networks.catalogue`; "weights": {"file", "sha256",
            "format", "part"} to start from, see `networks.weights`.
        loss: {"name": ..., arguments}, see `tasks.losses`.
        optimizer: {"name": one of `tasks.optimizers`, "lr": ..., arguments of torch's optimizer}.
        schedule: {"name": one of `tasks.optimizers`, its settings}, the learning rate over the
            rounds.
        clip: {"norm": ...} or {"value": ...}, the gradient limit of every optimizer step.
        sampling: how an epoch draws its training images: "shuffle" (each once), "balanced" (every
            class equally often), or {"name": "weighted", "weights": [...]}, see `training.batches`.
        freeze: {"parts": ["body"], "rounds": ...}: parts of the network that are frozen, and not
            sent, in the first rounds; a list of parts: in every round. On a CPU, a classifier of
            medflare with frozen "body", without `augment`, computes features once.
        batch_size: images per training step.
        local_epochs: passes over a site's training images per round.
        precision: number format of training and evaluation: "fp32", "bf16" or "fp16" (with loss
            scaling); weights, losses and steps are always fp32.
        accumulate: number of batches whose mean gradient one step uses.
        metric: validation metric that selects models; higher is better.
        metrics: metrics of the test images beside `metric`, see `tasks.metrics_table`; empty: those
            of `default_metrics`.
        intensity: one deterministic MONAI intensity transform {"name": ..., arguments}, see
            `tasks.allowed_transforms`.
        augment: MONAI random transforms, applied to training batches in this order.
        slices: 2-D: how volumes are cut into slices: "axis" (0, 1 or 2 of rows, columns and slices;
            NIfTI is turned to LPS before) and "keep" ("all", or "foreground": of training volumes
            the slices that show a structure; validation and test always keep all).
        label_values: label -> values that files use for it; empty: binary 1, multiclass the index,
            multilabel a mask (or 0/1) per label.
        unlisted_labels: values that no label lists: "error", or "drop" (the image is left out; in a
            mask: background).
        resplit: seed that draws the splits again by patient; null: the splits of the datalist.
        codes: structure -> its code in a DICOM segmentation: {"liver": {"value": "10200004",
            "scheme": "SCT", "meaning": "Liver", "color": "#dd8265"}}; "category" of a tumour:
            {"value": "49755003", "meaning": "Morphologically Abnormal Structure"}, default
            Anatomical Structure.
        spatial_dims: 2 for pictures and slices, 3 for volumes.
        image_mode: "resize" resizes every image to `size`; "patch" trains on random patches of
            `size` at the resolution of the files and predicts with a sliding window.
        patches_per_image: with "patch": patches per image in an epoch.
        orientation: 3-D: the patient's axes along which voxels run, as "RAS".
        spacing: 3-D: voxel spacing in millimetres to which volumes are resampled; null: as stored.
        missing_channels: an image without one of the channels: "error", or "zeros" for the missing
            channel.
        pick: of a 4-D NIfTI file: indices (from 0) of the volumes that are the channels; empty:
            all.
        surface_tolerance: 3-D: tolerance of surface Dice in millimetres.
        unreadable: an image that cannot be read: "error", or "skip", up to `unreadable_limit`.
        unreadable_limit: maximum of skipped images at a site: "share" of all and "count".
        embedded: the generated images that are used if no data root is given: "phantom", or
            "mechanisms/NAME", where `resplit` draws images and not splits; else "".
        source: citation and licence of the data, or that images are synthetic.
    """

    name: Annotated[Name, Field(pattern=r"^[^/\\]*$")]
    kind: Literal["segmentation", "classification"]
    target: Literal["binary", "multiclass", "multilabel"]
    labels: Names
    channels: PositiveInt | Names
    size: Annotated[
        tuple[PositiveInt, ...], takes("the sides in pixels, [64, 64], of volumes [64, 64, 32]")
    ]
    network: Annotated[JsonDict, BeforeValidator(_network)]
    loss: Named
    optimizer: Annotated[JsonDict, BeforeValidator(_optimizer)]
    batch_size: PositiveInt
    local_epochs: PositiveInt
    metric: Name
    intensity: Named = field(default_factory=_FROM_8_BIT.copy)
    augment: tuple[Named, ...] = ()
    schedule: Annotated[Schedule, BeforeValidator(build_schedule)] = Schedule()
    clip: Clip = Clip()
    sampling: Annotated[Sampling, BeforeValidator(_sampling)] = Sampling()
    freeze: Annotated[Freeze, BeforeValidator(_freeze)] = Freeze()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: PositiveInt = 1
    slices: Slices = Slices()
    label_values: dict[str, Annotated[list[int], Field(min_length=1)]] = field(default_factory=dict)
    unlisted_labels: Literal["error", "drop"] = "error"
    codes: dict[str, Structure] = field(default_factory=dict)
    resplit: int | None = None
    spatial_dims: Annotated[int, one_of(2, 3)] = 2
    image_mode: Literal["resize", "patch"] = "resize"
    patches_per_image: PositiveInt = 1
    orientation: Annotated[str, AfterValidator(_orientation)] = "RAS"
    spacing: Annotated[
        tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None,
        takes("millimetres along each axis of a volume, [1, 1, 2]"),
    ] = None
    missing_channels: Literal["error", "zeros"] = "error"
    pick: tuple[NonNegativeInt, ...] = ()
    surface_tolerance: NonNegativeFloat = 2.0
    unreadable: Literal["error", "skip"] = "error"
    unreadable_limit: UnreadableLimit = UnreadableLimit()
    metrics: tuple[Name, ...] = ()
    embedded: Embedded = ""
    source: Annotated[str, AfterValidator(printable)] = ""

    @model_validator(mode="after")
    def _consistent(self) -> "TaskConfig":
        """Raises ValueError for settings that contradict each other, and for settings that would be
        ignored.
        """
        self._validate_names()
        self._validate_images()
        self._validate_training()
        self._validate_label_values()
        return self

    def _validate_names(self) -> None:
        structures = self.structures if self.kind == "segmentation" else ()
        test_metrics = metrics_of(self.kind, self.spatial_dims)
        for what, names, choices, setting in (
            ("metric", [self.metric], selection_metrics(self.kind), ""),
            ("metric", self.metrics, test_metrics, "metrics"),
            ("label", self.label_values, self.labels, "label_values"),
            ("structure", self.codes, structures, "codes"),
        ):
            for name in names:
                if what == "metric":
                    require_usable(name)
                if name not in choices:
                    raise ValueError(no_such(what, name, choices, setting))

    def _validate_images(self) -> None:
        volumes = self.spatial_dims == 3
        masks = self.kind == "segmentation"
        patches = self.image_mode == "patch"
        if len(self.size) != self.spatial_dims:
            raise ValueError(
                f"size {list(self.size)} does not have spatial_dims {self.spatial_dims} sides"
            )
        ignored = []
        for name, is_used, default in (
            ("orientation", volumes, "RAS"),
            ("spacing", volumes, None),
            ("slices", not volumes, Slices()),
            ("surface_tolerance", volumes and masks, 2.0),
            ("patches_per_image", patches, 1),
        ):
            if not is_used and getattr(self, name) != default:
                ignored.append(name)
        if ignored:
            raise ValueError(
                f"{', '.join(ignored)}: not used with kind {self.kind}, "
                f"spatial_dims {self.spatial_dims}, image_mode {self.image_mode}"
            )
        if self.embedded and (volumes or self.channels not in (1, 3)):
            raise ValueError(f"embedded {self.embedded!r} needs 2-D images of 1 or 3 channels")
        if patches and not masks:
            raise ValueError("image_mode 'patch' is for segmentation only")
        if self.pick and len(self.pick) != self.image_channels:
            raise ValueError(
                f"pick has {len(self.pick)} entries for {self.image_channels} channels"
            )
        if self.missing_channels == "zeros" and not self.channel_names:
            raise ValueError("missing_channels 'zeros' needs channel names")

    def _validate_training(self) -> None:
        if self.target == "binary" and len(self.labels) != 1:
            raise ValueError(f"a binary task has one label, got {list(self.labels)}")
        if self.target == "multiclass" and len(self.labels) < 2:
            raise ValueError(f"a multiclass task needs two labels or more, got {list(self.labels)}")
        if self.kind != "segmentation" and self.slices.keep == "foreground":
            raise ValueError("slices.keep 'foreground' is for segmentation only")
        missing = [label for label in self.labels if label not in self.label_values]
        if self.label_values and missing:
            raise ValueError(f"label_values lacks {', '.join(missing)}")
        if bool(self.sampling.weights) != (self.sampling.name == "weighted"):
            raise ValueError("sampling: weights and the name weighted need each other")
        if bool(self.freeze.parts) != bool(self.freeze.rounds):
            raise ValueError("freeze: parts and rounds are needed together")

    def _validate_label_values(self) -> None:
        if self.target == "multilabel":
            return
        label_of = {}
        if self.target == "binary":
            label_of[0] = ""  # the background
        for label, values in self.label_values.items():
            for value in values:
                if label_of.setdefault(value, label) != label:
                    raise ValueError(
                        f"label_values: {value} of {label!r} has another label too, "
                        f"in a {self.target} task"
                    )

    @property
    def image_channels(self) -> int:
        """Number of image channels."""
        return self.channels if isinstance(self.channels, int) else len(self.channels)

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the image channels; empty if the task has only their number."""
        return () if isinstance(self.channels, int) else self.channels

    @property
    def outputs(self) -> int:
        """Output channels of the network: 1 for binary, one per label otherwise."""
        return 1 if self.target == "binary" else len(self.labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes: the negative and the positive class of a binary task, else the
        labels.
        """
        if self.target == "binary":
            return (f"not {self.labels[0]}", self.labels[0])
        return self.labels

    @property
    def structures(self) -> tuple[str, ...]:
        """Labels of a segmentation without the background of exclusive classes; all labels of a
        classification.
        """
        has_background = self.kind == "segmentation" and self.target == "multiclass"
        return self.labels[1:] if has_background else self.labels

    @property
    def mask_per_label(self) -> bool:
        """Whether every structure has a mask of its own: multilabel without `label_values`."""
        overlap = self.kind == "segmentation" and self.target == "multilabel"
        return overlap and not self.label_values

    @property
    def test_metrics(self) -> tuple[str, ...]:
        """Names of all metrics of the test images."""
        if not self.metrics:
            return default_metrics(self.kind, self.spatial_dims)
        return tuple(dict.fromkeys([self.metric, *self.metrics]))

    def probabilities(self, logits: "Tensor") -> "Tensor":
        """Probabilities of logits (N, outputs, ...): softmax over dimension 1 (multiclass) or
        sigmoid (binary, multilabel).
        """
        return logits.softmax(dim=1) if self.target == "multiclass" else logits.sigmoid()

    def to_dict(self) -> JsonDict:
        """Plain JSON values that `load_task` turns back into an equal configuration."""
        return json.loads(json.dumps(asdict(self)))

    def fingerprint(self) -> str:
        """64 hexadecimal digits that change with any setting; sites and server compare them at
        enrollment. Who writes the task cannot find another one with the same digits.
        """
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode(), digest_size=32).hexdigest()


def load_task(source: "str | Path | Json | TaskConfig") -> TaskConfig:
    """A task from the name of a preset ("brain_lgg"), the path of a JSON file, or its content.

    Raises:
        ConfigError: unknown preset, unreadable file, or a setting that is unknown, missing or out
            of range.
    """
    if isinstance(source, TaskConfig):
        return load_task(source.to_dict())
    if isinstance(source, Mapping):
        content = source
        location = f"task {source.get('name', '(unnamed)')!r:.60}"
    else:
        content, location = _read(source)
        if not isinstance(content, dict):
            raise ConfigError(
                f"{location}: a task is one JSON object, got {type(content).__name__}; {_REMEDY}"
            )
    try:
        printable_json(content)
    except ValueError as error:
        raise ConfigError(f"{location}: {error}; {_REMEDY}") from error
    task = checked(TaskConfig, content, location, remedy=_REMEDY)
    if task.optimizer["name"] not in OPTIMIZERS:
        optimizer_class(task.optimizer["name"], location)
    check_transforms(task.intensity, task.augment, location)
    return task


def presets() -> tuple[str, ...]:
    """Names of the tasks of the package; "papers/" are those of the papers, "mechanisms/" those of
    generated images for one mechanism.
    """
    return tuple(sorted(json_files(PRESETS, "papers/", "mechanisms/")))


def json_files(folder: Any, *subfolders: str) -> JsonDict:
    """Name -> JSON file, of a folder of the package and of these subfolders."""
    files = {}
    for subfolder in ("", *subfolders):
        for file in (folder / subfolder).iterdir():
            if file.name.endswith(".json"):
                files[subfolder + file.name.removesuffix(".json")] = file
    return files


def _read(source: str | Path) -> tuple[Any, str]:
    """The JSON value of a preset or a file, and what to call it."""
    path = Path(source)
    if isinstance(source, str) and source in presets():
        text = (PRESETS / f"{source}.json").read_text(encoding="utf-8")
        return json.loads(text), f"preset {source}"
    if path.is_file():
        try:
            return read_json(path), str(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not valid JSON ({error}); {_REMEDY}") from error
    files = get_close_matches(str(path), map(str, path.parent.glob("*.json")), n=1)
    if path.suffix == ".json":
        hint = f"; did you mean {files[0]}?" if files else ""
        raise ConfigError(f"{path}: there is no such file{hint}")
    raise unknown("task file or preset", str(source), {*presets(), *files})
