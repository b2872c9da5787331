"""How a finished model is measured at a site: in evaluation mode, without gradients, in batches that suit the machine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from medflare.data.splits import Batch, Split
from medflare.tasks.annotation import Annotation
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Measured, Portion, measure
from medflare.training.patches import Fitting, Predictor, windowed

Answer: TypeAlias = tuple[Tensor, Tensor, Tensor]  # probabilities (B, outputs, ...) and targets (B, ...), on the CPU, and rows (B,)
_SCORING_BATCH = 8  # larger ones are slower on a CPU: the feature maps of segmentation networks leave the cache


def scoring_batch(task: TaskConfig) -> int:
    """How many images a finished model is given at once: at least the task's batch, as test-time adaptation needs."""
    return max(_SCORING_BATCH, task.batch_size)


@runtime_checkable
class PatientWise(Protocol):
    """A predictor that may look at all images of a patient before it answers for any of them."""

    @property
    def of_patients(self) -> bool:
        """Whether it does."""

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """Probabilities (N, outputs, ...) of all images of one patient, which come in batches."""


def asks_patients(predictor: object, images: int) -> TypeGuard[PatientWise]:
    """Whether a predictor is to be asked patient by patient.

    Args:
        predictor: any.
        images: of the split.
    """
    return images > 0 and isinstance(predictor, PatientWise) and predictor.of_patients


def answers(predictor: Predictor, batches: Iterable[Batch], task: TaskConfig, windows: int) -> Iterator[Answer]:
    """What a model says of images, a batch at a time: no more of images and probabilities is in memory.

    Args:
        predictor: of what the network is fed with; a module is in evaluation mode while it answers.
        batches: whole images; one each where a window slides over them.
        task: says how.
        windows: most windows at once.
    """
    whole = windowed(predictor, task, windows)
    for images, targets, rows in batches:
        with torch.no_grad(), evaluating(predictor):
            probabilities = whole(images).float().cpu()
        yield probabilities, targets.cpu(), rows


def answers_of_patients(
    predictor: PatientWise, data: Split, placed: Callable[[Tensor, Tensor, Tensor], Batch], batch: int
) -> Iterator[Answer]:
    """As `answers`, one patient at a time, from a model that looks at all of a patient's images before it answers for any.

    Args:
        predictor: one of which `asks_patients` says yes.
        data: the split.
        placed: (rows, images, targets) -> the batch on the site's device.
        batch: most images at once.
    """
    owned: dict[str, list[int]] = {}
    for row, patient in enumerate(data.patients):
        owned.setdefault(patient, []).append(row)
    for own in map(torch.tensor, owned.values()):
        parts = [placed(rows, *data.take(rows)) for rows in own.split(batch)]
        with torch.no_grad(), evaluating(predictor):
            probabilities = predictor.together([part.images for part in parts]).float().cpu()
        yield probabilities, torch.cat([part.targets for part in parts]).cpu(), own


def answers_of_split(
    predictor: Predictor, data: Split, placed: Callable[[Tensor, Tensor, Tensor], Batch], fitting: Fitting, task: TaskConfig, batch: int
) -> Iterator[Answer]:
    """What a model says of a whole split: `answers`, or `answers_of_patients` where it looks at whole patients.

    Args:
        predictor: of what the network is fed with.
        data: the split.
        placed: (rows, images, targets) -> the batch on the site's device.
        fitting: how images come to the network's size.
        task: says how.
        batch: most images or windows at once.
    """
    if task.image_mode == "resize" and asks_patients(predictor, len(data)):
        return answers_of_patients(predictor, data, placed, batch)
    return answers(predictor, (placed(rows, *taken) for rows, taken in fitting.whole(data, batch)), task, batch)


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


def measured(found: Iterable[Answer], data: Split, annotation: Annotation, metrics: Sequence[str]) -> Measured:
    """What metrics are made of, image by image in the split's order.

    Args:
        found: the answers for all images, in any order.
        data: the split.
        annotation: says what its targets mean, and which structures count.
        metrics: names, of `TaskConfig.metrics`.
    """
    places: list[int] = []

    def portions() -> Iterator[Portion]:
        for probabilities, targets, rows in found:
            places.extend(rows.tolist())
            if not data.spacings:
                yield probabilities, targets, None
                continue
            for one, target, row in zip(probabilities.split(1), targets.split(1), rows.tolist(), strict=True):
                yield one, target, data.spacings[row]

    return measure(portions(), annotation.task, metrics, annotation).of(torch.tensor(places, dtype=torch.long).argsort())


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
