"""What is learnt: the task configuration, read from `app_configs/<task>.json`, checked before anything runs."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

SEGMENTATION_METRICS = ("dice", "iou", "hd95")
CLASSIFICATION_METRICS = ("accuracy", "balanced_accuracy", "f1_macro", "auc_macro")
_TARGETS = ("binary", "multiclass", "multilabel")
_REMEDY = "see app_configs/ for working examples"


@dataclass(frozen=True)
class TaskConfig:
    """One learning problem, the same at every site.

    Attributes:
        name: short name, for example "brain_lgg".
        kind: "segmentation" or "classification" (2-D).
        target: "binary" (one structure or one finding), "multiclass" (exactly one class each) or "multilabel" (any of several).
        labels: the foreground structures (binary, multilabel) or all classes, index = label (multiclass; in segmentation
            label 0 is the background).
        channels: image channels fed to the network, 1 (RGB files become luminance) or 3 (grey files are repeated).
        size: (H, W) in pixels that every image is resized to.
        network: {"name": ..., arguments}, see `tasks.networks`.
        loss: {"name": ..., arguments}, see `tasks.losses`.
        optimizer: {"name": "adam" | "adamw" | "sgd", "lr": ..., arguments of torch's optimiser}.
        batch_size: images per training step.
        local_epochs: passes over a site's training images per round.
        metric: validation metric that selects models; higher is better.
        intensity: one MONAI intensity transform {"name": ..., arguments}, applied to stored intensities once.
        augment: MONAI random transforms, applied to training batches in this order.
        slices: how volumes are cut: "axis" (0, 1, 2; 2 is the third stored axis) and "keep" ("all" or "foreground").
        label_values: label -> values that files use for it; empty: binary 1, multiclass the label's index,
            multilabel one mask (or 0/1 entry) per label.
        unlisted_labels: what a value that no label lists means: "error", or "drop" (classification: the image is left out;
            segmentation: the pixel is background).
        resplit: seed that draws the given splits anew by patient, or None for the splits as given.
        embedded: "phantom" where generated images stand in when no data root is given, else "".
        source: citation and licence of the data; says so where images are synthetic.
    """

    name: str
    kind: str
    target: str
    labels: tuple[str, ...]
    channels: int
    size: tuple[int, int]
    network: dict[str, Any]
    loss: dict[str, Any]
    optimizer: dict[str, Any]
    batch_size: int
    local_epochs: int
    metric: str
    intensity: dict[str, Any] = field(
        default_factory=lambda: {"name": "ScaleIntensityRange", "a_min": 0, "a_max": 255, "b_min": 0.0, "b_max": 1.0, "clip": True}
    )
    augment: tuple[dict[str, Any], ...] = ()
    slices: dict[str, Any] = field(default_factory=lambda: {"axis": 2, "keep": "all"})
    label_values: dict[str, list[int]] = field(default_factory=dict)
    unlisted_labels: str = "error"
    resplit: int | None = None
    embedded: str = ""
    source: str = ""

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
        return SEGMENTATION_METRICS if self.kind == "segmentation" else CLASSIFICATION_METRICS

    def probabilities(self, logits: "Tensor") -> "Tensor":
        """Probabilities of the same shape: softmax over dimension 1 (multiclass) or sigmoid (binary, multilabel)."""
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

    Raises:
        ConfigError: unknown preset, unreadable file, or a key or value that is unknown, missing or out of range.
    """
    if isinstance(source, TaskConfig):
        return load_task(source.to_dict())
    if isinstance(source, Mapping):
        return _checked(source, f"task {source.get('name', '(unnamed)')!r}")
    text, place = _read(source)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not valid JSON ({error}); {_REMEDY}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: a task is one JSON object, found {type(content).__name__}; {_REMEDY}")
    return _checked(content, place)


def presets() -> tuple[str, ...]:
    """Names of the tasks that come with medflare."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _preset_folder().iterdir() if entry.name.endswith(".json")))


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


def unknown(what: str, value: str, known: Iterable[str], place: str = "") -> ConfigError:
    """The error for a setting's name that does not exist."""
    return ConfigError(no_such(what, value, known, place))


def no_such(what: str, value: str, known: Iterable[str], place: str = "") -> str:
    """One line about a name that does not exist, with the closest names that do."""
    names = sorted(known)
    close = get_close_matches(str(value), names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{place + ': ' if place else ''}unknown {what} {value!r}; {hint}known: {', '.join(names)}"


def _checked(content: Mapping[str, Any], place: str) -> TaskConfig:
    fields = {item.name: item for item in dataclasses.fields(TaskConfig)}
    for key in content:
        if key not in fields:
            raise unknown("setting", key, fields, place)
    for key, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and key not in content:
            raise ConfigError(f"{place}: setting {key!r} is missing; {_REMEDY}")
    values = {key: _CHECKS[key](value, f"{place}: {key}") for key, value in content.items()}
    task = TaskConfig(**values)
    _check_together(task, place)
    return task


def _check_together(task: TaskConfig, place: str) -> None:
    """Settings that are fine alone and wrong in company."""
    if task.target == "binary" and len(task.labels) != 1:
        raise ConfigError(f"{place}: a binary task has one label, got {list(task.labels)}; use target 'multiclass' or 'multilabel'")
    if task.target == "multiclass" and len(task.labels) < 2:
        raise ConfigError(f"{place}: a multiclass task needs at least two labels, got {list(task.labels)}; use target 'binary'")
    if task.metric not in task.metrics or task.metric == "hd95":
        raise unknown("metric", task.metric, [name for name in task.metrics if name != "hd95"], place)
    if task.kind == "classification" and task.slices["keep"] == "foreground":
        raise ConfigError(f"{place}: slices.keep 'foreground' needs masks, which a classification task lacks; use 'all'")
    for label in task.label_values:
        if label not in task.labels:
            raise unknown("label", label, task.labels, f"{place}: label_values")
    missing = [label for label in task.labels if label not in task.label_values]
    if task.label_values and missing:
        raise ConfigError(f"{place}: label_values says nothing about {', '.join(missing)}; list every label's values")


def _fail(place: str, expected: str, value: Any) -> ConfigError:
    return ConfigError(f"{place} must be {expected}, got {value!r}")


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _fail(place, "text", value)
    return value


def _name(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _fail(place, "a non-empty text", value)
    return value


def _one_of(*choices: Any) -> Any:
    def check(value: Any, place: str) -> Any:
        if value not in choices or isinstance(value, bool):
            raise _fail(place, " or ".join(repr(choice) for choice in choices), value)
        return value

    return check


def _count(value: Any, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _fail(place, "a whole number of at least 1", value)
    return value


def _optional_seed(value: Any, place: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise _fail(place, "a whole number or null", value)
    return value


def _labels(value: Any, place: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value or len(set(map(str, value))) != len(value):
        raise _fail(place, "a list of different label names", value)
    return tuple(_name(item, place) for item in value)


def _size(value: Any, place: str) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _fail(place, "[height, width] in pixels", value)
    return _count(value[0], place), _count(value[1], place)


def _named(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise _fail(place, 'an object like {"name": ..., arguments}', value)
    return dict(value)


def _named_list(value: Any, place: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple):
        raise _fail(place, "a list of transforms", value)
    return tuple(_named(item, f"{place}[{index}]") for index, item in enumerate(value))


def _optimizer(value: Any, place: str) -> dict[str, Any]:
    settings = _named(value, place)
    _one_of("adam", "adamw", "sgd")(settings["name"], f"{place}.name")
    rate = settings.get("lr")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < float("inf"):
        raise _fail(f"{place}.lr", "a positive learning rate", rate)
    return settings


def _slices(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _fail(place, 'an object like {"axis": 2, "keep": "all"}', value)
    checks = {"axis": _one_of(0, 1, 2), "keep": _one_of("all", "foreground")}
    for key in value:
        if key not in checks:
            raise unknown("setting", key, checks, place)
    settings = {"axis": 2, "keep": "all", **value}
    return {key: checks[key](item, f"{place}.{key}") for key, item in settings.items()}


def _label_values(value: Any, place: str) -> dict[str, list[int]]:
    if not isinstance(value, Mapping):
        raise _fail(place, 'an object like {"tumour": [1, 4]}', value)
    for label, numbers in value.items():
        whole = isinstance(numbers, list | tuple) and all(isinstance(item, int) and not isinstance(item, bool) for item in numbers)
        if not whole or not numbers:
            raise _fail(f"{place}.{label}", "a list of whole numbers", numbers)
    return {label: list(numbers) for label, numbers in value.items()}


_CHECKS: dict[str, Any] = {
    "name": _name,
    "kind": _one_of("segmentation", "classification"),
    "target": _one_of(*_TARGETS),
    "labels": _labels,
    "channels": _one_of(1, 3),
    "size": _size,
    "network": _named,
    "loss": _named,
    "optimizer": _optimizer,
    "batch_size": _count,
    "local_epochs": _count,
    "metric": _name,
    "intensity": _named,
    "augment": _named_list,
    "slices": _slices,
    "label_values": _label_values,
    "unlisted_labels": _one_of("error", "drop"),
    "resplit": _optional_seed,
    "embedded": _one_of("", "phantom"),
    "source": _text,
}
