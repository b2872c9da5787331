"""Prediction and measurement of a final model at a site: in evaluation mode, without gradients, in
small batches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from medflare.data.loading import Batch, Split
from medflare.tasks.annotation import Annotation
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import MetricParts, Portion, measure
from medflare.training.batches import rows_of_patients
from medflare.training.patches import Predictor, WholeImages, windowed

# Probabilities (B, outputs, ...) and targets (B, ...), on the CPU, and rows (B,).
BatchPrediction: TypeAlias = tuple[Tensor, Tensor, Tensor]
# Larger ones are slower on a CPU: feature maps of segmentation networks leave the processor's
# cache.
_SCORING_BATCH = 8


def scoring_batch(task: TaskConfig) -> int:
    """How many images a final model gets at once: at least the task's batch, as test-time
    adaptation needs.
    """
    return max(_SCORING_BATCH, task.batch_size)


@runtime_checkable
class PatientPredictor(Protocol):
    """A predictor that may use all images of a patient for the prediction of each."""

    @property
    def by_patient(self) -> bool:
        """Whether it does."""

    def predict_patient(self, parts: Sequence[Tensor]) -> Tensor:
        """Probabilities (N, outputs, ...) of all images of one patient, which come in batches."""


def predicts_by_patient(predictor: object) -> TypeGuard[PatientPredictor]:
    """Whether a predictor needs all images of a patient at once."""
    return isinstance(predictor, PatientPredictor) and predictor.by_patient


def predict_split(
    predictor: Predictor,
    data: Split,
    batch_of: Callable[[Tensor, Tensor, Tensor], Batch],
    cutter: WholeImages,
    task: TaskConfig,
    batch: int,
) -> Iterator[BatchPrediction]:
    """Predictions for a split, a batch at a time; patient by patient for a `PatientPredictor`.

    Args:
        predictor: of images of the network's size; a module is in evaluation mode meanwhile.
        batch_of: (rows, images, targets) -> the batch on the site's device.
        batch: most images or windows at once.
    """
    if task.image_mode == "resize" and predicts_by_patient(predictor):
        for of_patient in rows_of_patients(data.patients).values():
            rows = torch.tensor(of_patient)
            parts = [batch_of(part, *data.take(part)) for part in rows.split(batch)]
            with torch.no_grad(), evaluating(predictor):
                probabilities = predictor.predict_patient([part.images for part in parts])
            targets = torch.cat([part.targets for part in parts])
            yield probabilities.float().cpu(), targets.cpu(), rows
        return
    whole = windowed(predictor, task, batch)
    for rows, samples in cutter.whole(data, batch):
        images, targets, _ = batch_of(rows, *samples)
        with torch.no_grad(), evaluating(predictor):
            probabilities = whole(images).float().cpu()
        yield probabilities, targets.cpu(), rows


def predict_each(
    predictor: Predictor, images: Iterable[Tensor], task: TaskConfig, batch: int
) -> list[Tensor]:
    """Probabilities, float32 (outputs, ...) on the CPU, of images (1, C, ...) of any size, by the
    task's sliding window.

    Args:
        predictor: of images of the network's size; a module is in evaluation mode meanwhile.
        batch: most windows at once.
    """
    whole = windowed(predictor, task, batch)
    with torch.no_grad(), evaluating(predictor):
        return [whole(image)[0].float().cpu() for image in images]


def measure_split(
    predictions: Iterable[BatchPrediction],
    data: Split,
    annotation: Annotation,
    metrics: Sequence[str],
) -> MetricParts:
    """The parts of metrics, image by image in the split's order, of predictions for all images in
    any order.
    """
    order = []

    def portions() -> Iterator[Portion]:
        for probabilities, targets, rows in predictions:
            order.extend(rows.tolist())
            if not data.spacings:
                yield probabilities, targets, None
                continue
            images = zip(probabilities.split(1), targets.split(1), rows.tolist(), strict=True)
            for probability, target, row in images:
                yield probability, target, data.spacings[row]

    measured = measure(portions(), annotation.task, metrics, annotation)
    return measured.of(torch.tensor(order, dtype=torch.long).argsort())


@contextmanager
def evaluating(predictor: object) -> Iterator[None]:
    """Evaluation mode for a module and all its parts; each returns to its own mode afterwards."""
    modes = {}
    if isinstance(predictor, nn.Module):
        modes = {part: part.training for part in predictor.modules()}
        predictor.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
