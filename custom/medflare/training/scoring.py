"""Predictors of one image or of all images of a patient, in evaluation mode, without gradients."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from medflare.tasks.config import TaskConfig
from medflare.training.patches import Predictor, windowed

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
        """Whether it predicts all images of a patient together."""

    def predict_patient(self, parts: Sequence[Tensor]) -> Tensor:
        """Probabilities (N, outputs, ...) of all images of one patient, which come in batches."""


def predicts_by_patient(predictor: object) -> TypeGuard[PatientPredictor]:
    """Whether a predictor needs all images of a patient at once."""
    return isinstance(predictor, PatientPredictor) and predictor.by_patient


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


@contextmanager
def evaluating(predictor: object) -> Iterator[None]:
    """A context with a module and all its parts in evaluation mode; each returns to its own mode at
    its end.
    """
    modes = {}
    if isinstance(predictor, nn.Module):
        modes = {part: part.training for part in predictor.modules()}
        predictor.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
