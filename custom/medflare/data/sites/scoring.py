"""How a finished model is measured at a site: in evaluation mode, without gradients, in batches that suit the machine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from medflare.data.sites.fitting import Predictor, windowed
from medflare.data.splits import Batch, Samples
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Portion, Scores, score_portions

_SCORING_BATCH = 8  # larger ones are slower on a CPU: the feature maps of segmentation networks leave the cache


def scoring_batch(task: TaskConfig) -> int:
    """How many images a finished model is given at once: at least the task's batch, as test-time adaptation needs."""
    return max(_SCORING_BATCH, task.batch_size)


def predict(predictor: Predictor, batches: Iterable[Batch], outputs: int) -> Tensor:
    """Probabilities of all images of `batches` in their order.

    Args:
        predictor: a module is put in evaluation mode meanwhile.
        batches: images (N, C, H, W) each.
        outputs: of the task, for the shape where there is no image.

    Returns:
        float32 (images, outputs, H, W) or (images, outputs), on the CPU.
    """
    with torch.no_grad(), evaluating(predictor):
        parts = [predictor(batch.images).float().cpu() for batch in batches]
    return torch.cat(parts) if parts else torch.zeros(0, outputs)


@runtime_checkable
class PatientWise(Protocol):
    """A predictor that may look at all images of a patient before it answers for any of them."""

    @property
    def of_patients(self) -> bool:
        """Whether it does."""

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """Probabilities (N, outputs, ...) of all images of one patient, which come in batches."""


def asks_patients(predictor: object, images: int) -> bool:
    """Whether a predictor is to be asked patient by patient.

    Args:
        predictor: any.
        images: of the split.
    """
    return images > 0 and isinstance(predictor, PatientWise) and predictor.of_patients


def predict_patients(predictor: Predictor, data: Samples, placed: Callable[[Tensor, Tensor, Tensor], Batch], batch: int) -> Tensor:
    """Probabilities of a whole split in its order, one patient at a time.

    Args:
        predictor: one of which `asks_patients` says yes; a module is put in evaluation mode meanwhile.
        data: the split, at least one image.
        placed: (rows, images, targets) -> the batch on the site's device.
        batch: most images at once.

    Returns:
        float32 (images, outputs, ...), on the CPU.
    """
    rows: dict[str, list[int]] = {}
    for row, patient in enumerate(data.patients):
        rows.setdefault(patient, []).append(row)
    found: dict[int, Tensor] = {}
    with torch.no_grad(), evaluating(predictor):
        for own in rows.values():
            parts = [placed(part, *data.take(part)).images for part in torch.tensor(own).split(batch)]
            found |= dict(zip(own, cast(PatientWise, predictor).together(parts).float().cpu(), strict=True))
    return torch.stack([found[row] for row in range(len(data))])


def predict_each(predictor: Predictor, images: Iterable[Tensor], task: TaskConfig, batch: int) -> list[Tensor]:
    """Probabilities of images that have sizes of their own, by the task's sliding window.

    Args:
        predictor: of what the network is fed with; a module is put in evaluation mode meanwhile.
        images: (1, C, ...) each.
        task: says how the window slides.
        batch: most windows at once.

    Returns:
        float32 (outputs, ...) each, on the CPU.
    """
    whole = windowed(predictor, task, batch)
    with torch.no_grad(), evaluating(predictor):
        return [whole(image)[0].float().cpu() for image in images]


def score(predictor: Predictor, batches: Iterable[Batch], data: Samples, task: TaskConfig, metrics: Sequence[str], windows: int) -> Scores:
    """Metrics of a model, measured while it answers: no more than a batch of images and probabilities is in memory.

    Args:
        predictor: of what the network is fed with; a module is put in evaluation mode meanwhile.
        batches: all images of the split, in its order; one whole image each where a window slides over them.
        data: the split.
        task: says what its targets mean.
        metrics: names, of `TaskConfig.metrics`.
        windows: most windows at once.
    """
    whole = windowed(predictor, task, windows)

    def portions() -> Iterator[Portion]:
        for images, targets, rows in batches:
            probabilities, truth = whole(images).float().cpu(), targets.cpu()
            if not data.spacings:
                yield probabilities, truth, None
                continue
            for one, target, row in zip(probabilities.split(1), truth.split(1), rows.tolist(), strict=True):
                yield one, target, data.spacings[row]

    with torch.no_grad(), evaluating(predictor):
        return score_portions(portions(), data.patients, task, metrics)


@contextmanager
def evaluating(predictor: object) -> Iterator[None]:
    """Evaluation mode for a module and all its parts, each of which returns to its own mode afterwards."""
    if not isinstance(predictor, nn.Module):
        yield
        return
    modes = {part: part.training for part in predictor.modules()}
    predictor.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
