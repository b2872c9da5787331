"""A site as a method's site algorithm uses it: data, networks, optimizer, batches, loss and
metrics.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medflare.core.errors import Aborted, ConfigError
from medflare.core.rng import Key, numpy_random_state
from medflare.core.states import StateDict
from medflare.data.acquisition import TrainedOn, range_of
from medflare.data.class_counts import class_counts
from medflare.data.datalist import SPLITS
from medflare.data.decoding import Source
from medflare.data.loading import Batch, SiteData, Split
from medflare.data.progress import with_progress
from medflare.data.transforms import Augmentation
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork, Probabilities
from medflare.networks.foreign import NetworkSpec
from medflare.tasks.annotation import Annotation
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import MetricParts, Portion, Scores, measure
from medflare.tasks.metrics_table import selection_metrics
from medflare.tasks.optimizers import build_optimizer
from medflare.training.batches import (
    check_drawn,
    in_random_order,
    read_ahead,
    rows_of_patients,
    sampling_weights,
)
from medflare.training.computing import Computing
from medflare.training.patches import Patches, WholeImages, windowed
from medflare.training.scoring import (
    BatchPrediction,
    Predictor,
    evaluating,
    predicts_by_patient,
    scoring_batch,
)


class Site:
    """One hospital: its name, task and data, and everything that a method needs to train and score
    models there.

    Name and seed (of the run) are keys of its random draws.

    Args:
        computing: device, precision and memory format of networks and batches; by default the CPU
            and the task's precision.
        batch_limit: most images that go through a network at once here; None for no limit.
        minimum_patients: numbers of fewer patients are suppressed.
        source: task -> the site's images before they are resized, read as that task says; None for
            a site made of data in memory.
        abort: called before every batch; if it returns True, `Aborted` is raised.

    Attributes:
        rate_factor: factor of the learning rate in this round, by the task's schedule; set before
            every step.
        start: initial weights of the task's network, set when the federation sends them; None:
            drawn at random.
        annotation: the structures that losses and metrics are about.
        cutter: cuts patches from images, or leaves them whole (`TaskConfig.image_mode`).
        notes: remarks about the data, one line each (absent classes, images left out).
        sampling_weights: "train" -> how the task draws its images, see `batches.sampling_weights`.
    """

    def __init__(
        self,
        name: str,
        task: TaskConfig,
        data: SiteData,
        seed: int = 0,
        *,
        computing: Computing | None = None,
        batch_limit: int | None = None,
        minimum_patients: int = 0,
        source: Callable[[TaskConfig], Source] | None = None,
        abort: Callable[[], bool] = lambda: False,
    ):
        self.name = name
        self.task = task
        self.data = data
        self.seed = seed
        self.computing = computing or Computing(torch.device("cpu"), task.precision)
        self.device = self.computing.device
        self.batch_limit = batch_limit
        self.minimum_patients = minimum_patients
        self.source = source
        self.abort = abort
        self.rate_factor = 1.0
        self.start: StateDict | None = None
        self.reads: Counter[str] = Counter()  # split -> how often its images were read
        self.notes = list(data.notes)
        self.cutter = Patches(task) if task.image_mode == "patch" else WholeImages()
        self.annotation = Annotation(task, data.annotated)
        # Each split as it was opened, and as batches are taken from it.
        self._resident: list[tuple[Split, Split]] = []
        self._augmentation = Augmentation(task)
        self._loss = self.annotation.loss().to(self.device)
        self.sampling_weights = {"train": sampling_weights(task, data.train.targets)}

    @property
    def n(self) -> dict[str, int]:
        """Images per split: train, validation, test."""
        return {name: len(self.data.split(name)) for name in SPLITS}

    @property
    def batch_size(self) -> int:
        """Images in a training batch: the task's number, at most `batch_limit`."""
        return self._limited(self.task.batch_size)

    @property
    def scoring_batch(self) -> int:
        """Images that a predictor gets at once, see `scoring.scoring_batch`."""
        return self._limited(scoring_batch(self.task))

    def _limited(self, size: int) -> int:
        if self.batch_limit is None:
            return size
        return min(size, self.batch_limit)

    def class_counts(self) -> Tensor:
        """Training images, or pixels (segmentation), of each of `task.classes`; int64 (C,)."""
        return class_counts(self.data.train.targets, self.task)

    def trained_on(self) -> TrainedOn | None:
        """The range of the site's training images as they were acquired, see
        `acquisition.range_of`.
        """
        return range_of(self.data.acquired, self.minimum_patients)

    def network(
        self, purpose: str = "model", spec: NetworkSpec | None = None, outputs: int | None = None
    ) -> FeatureNetwork:
        """A network on the site's device with the initial weights that all sites share, see
        `networks.catalogue.initial_network`.
        """
        return self.computing.placed(
            initial_network(self.task, self.seed, purpose, spec, outputs, self.start)
        )

    def optimizer(
        self, parameters: Iterable[nn.Parameter], **override: Any
    ) -> torch.optim.Optimizer:
        """The task's optimizer with the round's learning rate and the task's clipping; `override`
        sets arguments, for example lr=1e-4.
        """
        settings = {**self.task.optimizer, **override}
        settings["lr"] *= self.rate_factor
        return build_optimizer(
            settings,
            parameters,
            f"task {self.task.name}",
            self.task.clip.norm,
            self.task.clip.value,
        )

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The task's loss of logits (N, outputs, ...), a scalar mean; targets as in
        `data.loading.Split`. See `Annotation.loss`.
        """
        return self._loss(logits, targets)

    def batches(self, split: str, *keys: Key) -> Iterator[Batch]:
        """One pass over a split in random order; equal (seed, name, keys) give equal batches, see
        `batches.in_random_order`.

        Args:
            keys: of this pass, by convention round, purpose, epoch.
        """
        data = self._split(split)
        random = numpy_random_state(self.seed, self.name, *keys, "augment")
        samples = len(data) * self.cutter.per_image
        weights = self.sampling_weights.get(split)
        check_drawn(self.task, weights)
        orders = in_random_order(
            samples, self.batch_size, self.seed, self.name, *keys, "order", weights=weights
        )
        what = f"site {self.name}, batches of {split} images in this epoch"
        # Sample s is of image s % len(data).
        rows = (order % len(data) for order in with_progress(orders, len(orders), what))
        for index, images in read_ahead(data, rows, partial(self.cutter.read, data)):
            batch = self._batch(index, *self.cutter.samples(images, random))
            yield self.augmented(batch, random)

    def ordered(self, split: str, batch_size: int | None = None) -> Iterator[Batch]:
        """One pass in fixed order, without augmentation; with `image_mode` "patch", over the
        windows that cover the images.
        """
        data = self._split(split)
        size = self._limited(batch_size or self.task.batch_size)
        for index, samples in self.cutter.in_order(data, size):
            yield self._batch(index, *samples)

    def take(self, split: str, index: Tensor, random: np.random.RandomState) -> Batch:
        """The images of the rows `index`, long (B,), on the site's device; with `image_mode`
        "patch", a patch of each from `random`.
        """
        images = self.cutter.read(self._split(split), index)
        return self._batch(index, *self.cutter.samples(images, random))

    def augmented(self, batch: Batch, random: np.random.RandomState) -> Batch:
        """A batch of at least one image after the task's random transforms, with random numbers
        from `random`.
        """
        return Batch(*self._augmentation(batch.images, batch.targets, random), batch.index)

    def _split(self, name: str) -> Split:
        """The split that batches are taken from: from its first use on the device, where it may
        stay there; the test split is used too rarely.
        """
        self.reads[name] += 1
        data = self.data.split(name)
        if data is self.data.test:
            return data
        for opened, resident in self._resident:
            if opened is data:
                return resident
        self._resident.append((data, self.computing.resident(data)))
        return self._resident[-1][1]

    def _batch(self, index: Tensor, images: Tensor, targets: Tensor) -> Batch:
        if self.abort():
            raise Aborted(f"site {self.name}: stopped on request")
        return Batch(self.computing.on_device(images), self.computing.on_device(targets), index)

    def predictor(self, model: nn.Module) -> Probabilities:
        """A model of logits as a model of the task's probabilities."""
        return Probabilities(model, self.task)

    def predictions(self, predictor: Predictor, split: str) -> Iterator[BatchPrediction]:
        """Probabilities, targets and rows of a split, of a predictor from images (N, C, H, W) to
        probabilities.

        A module is in evaluation mode meanwhile.
        """
        data = self._split(split)
        return with_progress(
            self._predicted(predictor, data),
            len(data),
            f"site {self.name}, {split} images measured",
            size=lambda prediction: len(prediction[2]),
        )

    def _predicted(self, predictor: Predictor, data: Split) -> Iterator[BatchPrediction]:
        """Predictions batch by batch, or patient by patient for a `PatientPredictor`."""
        if self.task.image_mode == "resize" and predicts_by_patient(predictor):
            for of_patient in rows_of_patients(data.patients).values():
                rows = torch.tensor(of_patient)
                parts = [
                    self._batch(part, *data.take(part)) for part in rows.split(self.scoring_batch)
                ]
                with torch.no_grad(), evaluating(predictor):
                    probabilities = predictor.predict_patient([part.images for part in parts])
                targets = torch.cat([part.targets for part in parts])
                yield self._checked(probabilities), targets.cpu(), rows
            return
        whole = windowed(predictor, self.task, self.scoring_batch)
        for rows, samples in self.cutter.whole(data, self.scoring_batch):
            images, targets, _ = self._batch(rows, *samples)
            with torch.no_grad(), evaluating(predictor):
                probabilities = whole(images)
            yield self._checked(probabilities), targets.cpu(), rows

    def _checked(self, probabilities: Tensor) -> Tensor:
        """Probabilities (N, outputs, ...) on the CPU; ConfigError if they have another number of
        channels.
        """
        if probabilities.shape[1:2] != (self.task.outputs,):
            raise ConfigError(
                f"the model gives probabilities of shape {tuple(probabilities.shape)}; "
                f"task {self.task.name} needs (images, {self.task.outputs}, ...)"
            )
        return probabilities.float().cpu()

    def score(
        self, predictor: Predictor, split: str = "validation", metrics: Sequence[str] | None = None
    ) -> Scores:
        """Metrics of a model on a split: by default the task's, on other splits than the test split
        only those by which models can be selected.
        """
        names = set(self.task.test_metrics)
        if split != "test":
            names.intersection_update(selection_metrics(self.task.kind))
        predictions = self.predictions(predictor, split)
        measured = self.measure(predictions, split, metrics or sorted(names))
        return measured.scores(self.data.split(split).patients)

    def measure(
        self, predictions: Iterable[BatchPrediction], split: str, metrics: Sequence[str]
    ) -> MetricParts:
        """The parts of metrics, image by image in the split's order, of predictions for all images
        in any order; of the structures that were annotated here.
        """
        spacings = self.data.split(split).spacings
        order = []

        def portions() -> Iterator[Portion]:
            for probabilities, targets, rows in predictions:
                order.extend(rows.tolist())
                if not spacings:
                    yield probabilities, targets, None
                    continue
                images = zip(probabilities.split(1), targets.split(1), rows.tolist(), strict=True)
                for probability, target, row in images:
                    yield probability, target, spacings[row]

        measured = measure(portions(), self.annotation.task, metrics, self.annotation)
        return measured.of(torch.tensor(order, dtype=torch.long).argsort())
