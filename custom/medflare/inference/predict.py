"""Prediction of images with a final model: masks, or a table of probabilities.

Images are preprocessed as in training, and predicted in the given order, in batches across files
and slices, as in the evaluation of a run: the same images in the same order give the same numbers,
also with a model that adapts to unlabeled images. The patients of the files are unknown: a model of
whole patients (FedSM's) gets all slices of a volume together, and pictures one by one.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from medflare.adaptation.online import Online
from medflare.adaptation.registry import ADAPTATIONS, NONE, parsed, remark, with_adaptation
from medflare.core.errors import ConfigError, DataError
from medflare.core.files import csv_text, make_folder, write_atomically
from medflare.core.packages import require
from medflare.core.text import JsonDict, Say
from medflare.data.acquisition import (
    TRAINED_ON,
    Acquisition,
    TrainedOn,
    acquisition_of,
    outside,
    read_range,
)
from medflare.data.geometry import Grid
from medflare.data.local import ImageBounds
from medflare.data.progress import with_progress
from medflare.data.reading import channel_files, read_image
from medflare.data.transforms import Preprocessing
from medflare.inference.deployed import CARD_FILE, Adaptive, Builder, Repeated, StoredModel, build
from medflare.inference.inputs import Input, find_inputs
from medflare.inference.masks import in_place, label_map, sizes, write_masks
from medflare.tasks.config import TaskConfig
from medflare.training.computing import usable_device
from medflare.training.patches import windows_of
from medflare.training.scoring import (
    PatientPredictor,
    predict_each,
    predicts_by_patient,
    scoring_batch,
)

AUTO = "auto"
TABLE = "predictions.csv"
OUTSIDE = "outside_training"  # column of the table: differences from the training images
_UNSEEN = "outside the range of the training images"
_LISTED = 10  # images that are printed one by one


@runtime_checkable
class Choosing(Protocol):
    """A deployed module that selects one of several networks for each image."""

    predicted_by: list[str]  # the networks selected for the last batch, image by image


@dataclass(frozen=True)
class PreparedImage:
    """One input as the network sees it."""

    source: Input
    images: Tensor  # float32 (S, C, ...); S = 1, or the slices of a volume
    size: tuple[int, ...]  # of a picture, slice or volume before it was resized
    volume: bool  # whether it was cut into slices
    acquired: Acquisition
    grids: tuple[Grid, Grid] | None = None  # for a 3-D task: as stored, and along the task's axes


@dataclass(frozen=True)
class Prediction:
    """The prediction for one input."""

    prepared: PreparedImage
    probabilities: Tensor  # (S, outputs, ...) on the network's grid, or (S, outputs)
    # For a super model, the network of each picture or slice; else "".
    predicted_by: tuple[str, ...]


@dataclass(repr=False)
class PredictionSummary:
    """The result of a call of `predict`, shown as its summary in lines."""

    table: Path
    say: Say
    images: int = 0  # predicted inputs
    pictures: int = 0  # the same, counting every slice of a volume
    # One line for each input that could not be predicted.
    failed: list[str] = field(default_factory=list)
    # Image -> see `acquisition.outside`; None: the card has no training range.
    outside: dict[str, dict[str, str]] | None = None
    # For a super model, the number of pictures of each network.
    predicted_by: Counter[str] = field(default_factory=Counter)
    adapted: str = ""  # how the model adapted to the images; "" if it did not
    left_over: int = 0  # files of earlier calls in the folder of the table

    def differs(self, image: str, differences: Mapping[str, str]) -> None:
        """Record an input's differences from the training range, if any; the first ones are printed
        one by one.
        """
        if not differences or self.outside is None:
            return
        self.outside[image] = dict(differences)
        if len(self.outside) <= _LISTED:
            self.say(f"{image}: {_UNSEEN}: {_listed(differences)}")
        elif len(self.outside) == _LISTED + 1:
            self.say(f"and further images, see the column {OUTSIDE} of {self.table.name}")

    def fail(self, line: str) -> None:
        """Record an input that could not be predicted."""
        self.failed.append(line)
        self.say(line)

    def __repr__(self) -> str:
        return self.render()

    def render(self) -> str:
        """The summary in lines."""
        slices = ""
        if self.pictures > self.images:
            slices = f" ({self.pictures} pictures with every slice of the volumes)"
        failed = f"{len(self.failed)} failed; table: {self.table}"
        lines = [f"{self.images} image{'s' * (self.images != 1)} predicted{slices}, {failed}"]
        if self.outside is None:
            lines.append(
                "the range of the training images is unknown: the card is of an older medflare, "
                "or the sites did not send it"
            )
        elif self.outside:
            kinds = Counter[str]()
            first: dict[str, str] = {}  # kind -> the text of the first image with it
            for differences in self.outside.values():
                kinds.update(differences.keys())
                first = {**differences, **first}
            listed = "; ".join(
                f"{kind} {first[kind]} ({count})" for kind, count in kinds.most_common()
            )
            lines.append(f"{len(self.outside)} of {self.images} images are {_UNSEEN}: {listed}")
        if self.left_over:
            lines.append(
                f"{self.left_over} files of earlier predictions are left in {self.table.parent}; "
                f"{self.table.name} lists those of this one"
            )
        if self.adapted:
            lines.append(f"adapted to these images: {self.adapted}")
        if self.predicted_by:
            used = ", ".join(
                f"{name}: {count}" for name, count in sorted(self.predicted_by.items())
            )
            lines.append(f"networks used: {used}")
        return "\n".join(lines)


def predict(
    stored: StoredModel,
    images: Sequence[Path],
    out: Path,
    *,
    builder: Builder = build,
    adapt: str = AUTO,
    device: str = "cpu",
    seg: bool = False,
    bounds: ImageBounds = ImageBounds(),
    strict: bool = False,
    force: bool = False,
    say: Say = lambda line: None,
) -> PredictionSummary:
    """Predict images and write masks (segmentation) and `predictions.csv` to `out`.

    Args:
        images: files and folders, see `find_inputs`.
        seg: write the masks of a DICOM series as a DICOM segmentation.
        strict: an image outside the training range, see `acquisition.outside`, fails; otherwise it
            is predicted and named.
        force: also predict grey volumes with a model of pictures in colour.
        say: called with a line for every image that cannot be read or predicted.

    Raises:
        ConfigError: an unknown adaptation or device, a network that cannot adapt, a missing
            package, or `strict` and no training range.
        StateError: weights that do not fit the task.
        OSError: the output folder cannot be written.
    """
    task = stored.task
    if seg:
        require("highdicom", "DICOM-SEG (the extra medflare[dicomseg])")
    inputs, problems = find_inputs(images, out, task.channel_names)
    trained = _trained_on(stored, strict)
    summary = PredictionSummary(out / TABLE, say, outside=None if trained is None else {})
    stored = adapted(stored, builder, adapt)
    model = stored.build(builder).to(usable_device(device, "predict")).eval()
    make_folder(out)
    earlier = _files(out)
    for problem in problems:
        summary.fail(problem)
    # All of them may not fit into memory.
    prepared = Repeated(lambda: _readable(inputs, task, bounds, summary, trained, strict, force))
    if isinstance(model, Adaptive) and adapt != NONE:
        summary.adapted = fit(model, prepared, task, device, stored.kind)
    elif isinstance(model, Online):
        parts = "image by image" if model.batch_size == 1 else "batch by batch"
        summary.adapted = f"{stored.kind}, {parts} while they were predicted"
    note = remark(stored.message)
    if note:
        say(note)
    rows = []
    for prediction in predictions(model, prepared, task, device):
        try:
            written = _written(prediction, task, out, seg)
        except DataError as error:
            summary.fail(str(error))
            continue
        summary.images += 1
        summary.pictures += len(prediction.predicted_by)
        summary.predicted_by.update(filter(None, prediction.predicted_by))
        if trained is not None:
            differences = _differences(prediction.prepared.acquired, trained, task)
            summary.differs(str(prediction.prepared.source.path), differences)
            for row in written:
                row[OUTSIDE] = _listed(differences)
        rows += written
    columns = list(dict.fromkeys(chain.from_iterable(rows))) or ["image"]
    write_atomically(summary.table, csv_text(rows, columns).encode())
    summary.left_over = len(earlier & _files(out))
    return summary


def _files(folder: Path) -> set[tuple[Path, int]]:
    """The files below a folder, each with its time."""
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def _trained_on(stored: StoredModel, strict: bool) -> TrainedOn | None:
    """The range of the training images in the card; None if it has none."""
    if TRAINED_ON not in stored.card:
        if strict:
            raise ConfigError(
                "strict: the card has no range of the training images; leave out --strict, "
                "and look at the masks"
            )
        return None
    trained = read_range(stored.card[TRAINED_ON])
    problem = trained.misfit(stored.task)
    if problem:
        raise ConfigError(f"{CARD_FILE}: {problem}; fetch the model again")
    return trained


def _differences(acquired: Acquisition, trained: TrainedOn, task: TaskConfig) -> dict[str, str]:
    """How an image differs from the training images, without its size in pixels if the task resizes
    pictures.
    """
    differences = outside(acquired, trained, task.channel_names)
    if task.spatial_dims == 2 and task.image_mode == "resize":
        differences.pop("size", None)
    return differences


def _refuse(
    prepared: PreparedImage, trained: TrainedOn, task: TaskConfig, strict: bool, force: bool
) -> None:
    """Raise DataError for an input that must not be predicted."""
    is_grey_volume = prepared.volume and not prepared.acquired.coloured
    if is_grey_volume and trained.coloured == (True,) and not force:
        raise DataError(
            f"{prepared.source.path}: a grey volume, and the model was trained on pictures "
            "in colour; use a model of such volumes, or --force"
        )
    if strict:
        differences = _differences(prepared.acquired, trained, task)
        if differences:
            raise DataError(f"{prepared.source.path}: {_UNSEEN}: {_listed(differences)}")


def _listed(differences: Mapping[str, str]) -> str:
    return "; ".join(f"{kind} {text}" for kind, text in differences.items())


def adapted(stored: StoredModel, builder: Builder = build, adapt: str = AUTO) -> StoredModel:
    """The final model with a test-time adaptation, see `registry.with_adaptation`.

    "auto" means the adaptation of the method: a model that adapts to unlabeled images (routed,
    dsbn, labelshift) is to be adapted to the predicted images, others adapt while they predict.
    "none" means no adaptation to the predicted images.

    Raises:
        ConfigError: an unknown adaptation.
    """
    name = AUTO if adapt == AUTO else parsed(adapt)[0]
    if adapt in (AUTO, stored.kind) or (name == NONE and stored.kind not in ADAPTATIONS):
        return stored
    if name == NONE and isinstance(stored.build(builder), Adaptive):
        return stored  # it is adapted to the images of its site
    return replace(stored, message=with_adaptation(stored.message, adapt))


def fit(
    model: Adaptive, prepared: Iterable[PreparedImage], task: TaskConfig, device: str, kind: str
) -> str:
    """Adapt the model to the inputs in the batches in which they will be predicted; returns a
    description, "" without inputs.
    """
    size = scoring_batch(task)
    counts = []  # pictures of each pass

    def batches() -> Iterator[Tensor]:
        counts.append(0)
        images = (image for part in prepared for image in part.images)
        if task.image_mode == "patch":
            images = (window for image in images for window in windows_of(image, task.size))
        for batch in _stacked(images, size):
            counts[-1] += len(batch)
            yield batch.to(device)

    if next(batches(), None) is None:
        return ""
    model.adapt(Repeated(batches))
    count = counts[-1]
    return f"{kind}, adapted to {count} picture{'s' * (count != 1)} before the first was predicted"


def _stacked(images: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The images in batches of `size`; the last one may be smaller."""
    rest = iter(images)
    while batch := list(islice(rest, size)):
        yield torch.stack(batch)


def prepare(source: Input, task: TaskConfig, bounds: ImageBounds = ImageBounds()) -> PreparedImage:
    """An input, read and prepared as in training; for a 2-D task all slices of a volume.

    Raises:
        DataError: it is unreadable, or too large.
    """
    preprocessing = Preprocessing(task)
    files = channel_files(source.channels, task, source.name) if source.channels else (source.path,)
    image = read_image(files, task, bounds)
    array = image.array
    acquired = acquisition_of(image, task)
    if task.spatial_dims == 3:
        assert image.stored_grid is not None and image.grid is not None
        grids = (image.stored_grid, image.grid)
        volume = preprocessing.image(array)[None]
        return PreparedImage(source, volume, image.grid.shape, False, acquired, grids)
    is_volume = array.ndim == 4
    pictures = np.moveaxis(array, task.slices.axis + 1, 0) if is_volume else array[None]
    images = torch.stack([preprocessing.image(picture) for picture in pictures])
    return PreparedImage(source, images, pictures[0].shape[1:], is_volume, acquired)


def _readable(
    inputs: list[Input],
    task: TaskConfig,
    bounds: ImageBounds,
    summary: PredictionSummary,
    trained: TrainedOn | None,
    strict: bool,
    force: bool,
) -> Iterator[PreparedImage]:
    """The prepared inputs; one that cannot be read, or is refused, is reported and removed from
    `inputs`.
    """
    for source in with_progress(list(inputs), len(inputs), "images read"):
        try:
            prepared = prepare(source, task, bounds)
            if trained is not None:
                _refuse(prepared, trained, task, strict, force)
            yield prepared
        except DataError as error:
            inputs.remove(source)
            summary.fail(str(error))


def predictions(
    model: nn.Module, prepared: Iterable[PreparedImage], task: TaskConfig, device: str = "cpu"
) -> Iterator[Prediction]:
    """The prediction of every input, in order, with probabilities on the CPU.

    Inputs are predicted in batches of `scoring_batch` across inputs, or by the sliding window. A
    model of whole patients gets all slices of a volume together.
    """
    size = scoring_batch(task)
    if task.image_mode == "patch":
        for whole in prepared:
            images = (image[None].to(device) for image in whole.images)
            outputs = predict_each(model, images, task, size)
            yield Prediction(whole, torch.stack(outputs), ("",) * len(outputs))
        return
    by_patient = predicts_by_patient(model)
    for together, parts in groupby(prepared, lambda part: part.volume and by_patient):
        if not together:
            yield from _in_batches(model, parts, size, device)
            continue
        assert isinstance(model, PatientPredictor)
        for part in parts:
            with torch.no_grad():
                slices = model.predict_patient(part.images.to(device).split(size)).float().cpu()
            names = model.predicted_by if isinstance(model, Choosing) else [""] * len(slices)
            yield Prediction(part, slices, tuple(names))


@contextmanager
def _selections(model: nn.Module) -> Iterator[list[str]]:
    """The networks that a super model selects in the block, image by image."""
    selected: list[str] = []
    with ExitStack() as hooks:
        for module in model.modules():  # it may be inside an adapted model
            if isinstance(module, Choosing):
                hook = module.register_forward_hook(
                    lambda module, _images, _output: selected.extend(module.predicted_by)
                )
                hooks.enter_context(hook)
        yield selected


def _in_batches(
    model: nn.Module, prepared: Iterable[PreparedImage], size: int, device: str
) -> Iterator[Prediction]:
    """Predictions by batches of `size` that run across inputs."""
    waiting: deque[PreparedImage] = deque()
    done: list[tuple[Tensor, str]] = []

    def images() -> Iterator[Tensor]:
        for part in prepared:
            waiting.append(part)
            yield from part.images

    for batch in _stacked(images(), size):
        with torch.no_grad(), _selections(model) as selected:
            outputs = model(batch.to(device)).float().cpu()
        # Tent runs a batch several times.
        names = selected if len(selected) == len(batch) else [""] * len(batch)
        done += zip(outputs, names, strict=True)
        while waiting and len(done) >= len(waiting[0].images):
            first = waiting.popleft()
            count = len(first.images)
            probabilities, networks = zip(*done[:count], strict=True)
            del done[:count]
            yield Prediction(first, torch.stack(probabilities), networks)


def _written(prediction: Prediction, task: TaskConfig, out: Path, seg: bool) -> list[JsonDict]:
    """Write the masks of an input, and return its rows of the table, one per picture or slice.

    Raises:
        DataError: NaN or infinity in the prediction.
    """
    prepared = prediction.prepared
    if not torch.isfinite(prediction.probabilities).all():
        raise DataError(
            f"{prepared.source.path}: the prediction is NaN or infinite; "
            "check the image's intensities"
        )
    if task.kind == "classification":
        results = [_classified(p, task) for p in prediction.probabilities]
    else:
        masks = [
            label_map(in_place(p, prepared.size, prepared.grids, task), task)
            for p in prediction.probabilities
        ]
        grid = None if prepared.grids is None else prepared.grids[0]
        whole = np.stack(masks, axis=task.slices.axis + 1) if prepared.volume else masks[0]
        files = write_masks(prepared.source, whole, task, out, grid, seg=seg)
        named = ";".join(str(file.relative_to(out)) for file in files)
        results = [{"mask": named, **sizes(mask, task, grid)} for mask in masks]
    rows = []
    for number, (result, name) in enumerate(zip(results, prediction.predicted_by, strict=True)):
        slice_number = number if prepared.volume else ""
        row = {"image": str(prepared.source.path), "slice": slice_number, **result}
        if name:
            row["model"] = name
        rows.append(row)
    return rows


def _classified(probabilities: Tensor, task: TaskConfig) -> JsonDict:
    """The predicted label (multilabel: all that apply) and a column for every class, with nine
    digits, which represent a float32 exactly.
    """
    p = probabilities
    if task.target == "binary":
        p = torch.stack([1 - p[0], p[0]])
    if task.target == "multilabel":
        label = ";".join(name for name, value in zip(task.labels, p, strict=True) if value > 0.5)
    else:
        label = task.classes[int(p.argmax())]
    columns = {"label": label}
    for name, value in zip(task.classes, p.tolist(), strict=True):
        columns[f"probability_{name}"] = f"{value:.9g}"
    return columns
