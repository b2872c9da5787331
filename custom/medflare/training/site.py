"""A site as a method's site algorithm sees it: data in memory, networks, optimiser, batches, loss and metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medflare.core.errors import Aborted
from medflare.core.rng import Key, numpy_random_state
from medflare.core.states import StateDict
from medflare.data.acquisition import TrainedOn, range_of
from medflare.data.progress import counted
from medflare.data.sources import Source
from medflare.data.splits import Batch, SiteData
from medflare.data.targets import class_counts
from medflare.data.transforms import Augmentation
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork, Probabilities
from medflare.tasks.annotation import Annotation
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Measured, Scores
from medflare.tasks.metrics_table import selection_metrics
from medflare.tasks.optimizers import build_optimizer
from medflare.training import patches, scoring
from medflare.training.batches import drawing_weights, in_random_order, read_ahead
from medflare.training.computing import Computing


class Site:
    """One hospital: its name, task and data, and everything that a method needs to train and score models there.

    Args:
        name: the site's, a key of its random draws.
        task: what is learnt.
        data: its three splits.
        seed: of the run.
        device: where networks and batches go.

    Attributes:
        abort: asked before every batch; where it answers True, whatever takes batches raises `Aborted`.
        rate_factor: what the task's schedule makes of the learning rate in the round at hand; set before every step.
        start: what the task's network starts from; None: a random draw.
        source: task -> the site's images as they are stored, read as that task says; None where the site was made of data in memory.
        computing: how networks and batches come to the device, and what they compute in there.
        batch_limit: most images that go through a network at once here, whatever the task says; None for no limit.
        annotation: the structures that losses and metrics are about.
        fitting: how images come to the network's size.
        notes: what is worth knowing about the data, one line each (absent classes, images left out).
    """

    def __init__(self, name: str, task: TaskConfig, data: SiteData, seed: int = 0, device: torch.device | str = "cpu"):
        self.name, self.task, self.data, self.seed = name, task, data, seed
        self.device = torch.device(device)
        self.computing = Computing(self.device, task.precision)
        self.abort: Callable[[], bool] = lambda: False
        self.rate_factor = 1.0
        self.start: StateDict | None = None
        self.source: Callable[[TaskConfig], Source] | None = None
        self.batch_limit: int | None = None
        self.notes = list(data.notes)
        self._augmentation = Augmentation(task)
        self.fitting = patches.of_task(task)
        self.annotation = Annotation(task, data.annotated)
        self._loss = self.annotation.loss().to(self.device)
        self._drawing = {"train": drawing_weights(task, data.train.targets)}

    @property
    def n(self) -> dict[str, int]:
        """Images per split: train, validation, test."""
        return {name: len(self.data.split(name)) for name in ("train", "validation", "test")}

    @property
    def batch_size(self) -> int:
        """Images in a training batch: the task's number, or what this site can bear."""
        return self._bearable(self.task.batch_size)

    @property
    def scoring_batch(self) -> int:
        """How many images `predict` hands to a predictor at once, see `scoring.scoring_batch`."""
        return self._bearable(scoring.scoring_batch(self.task))

    def class_counts(self) -> Tensor:
        """Training images, or pixels (segmentation), of each of `task.classes`; int64 (C,)."""
        return class_counts(self.data.train.targets, self.task)

    def trained_on(self, minimum_patients: int = 0) -> TrainedOn | None:
        """The range of its training images as they were acquired, see `acquisition.range_of`; None where it is not told."""
        patients = len(set(self.data.train.patients))
        return range_of(self.data.acquired, patients, self.task.spatial_dims, minimum_patients)

    # -- what trains -------------------------------------------------------------------------------------------------------------

    def network(self, purpose: str = "model", spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> FeatureNetwork:
        """A network on the site's device with the initial weights that all sites share, see `networks.catalogue.initial_network`.

        Args:
            purpose: sets its initial weights apart from those of other networks.
            spec: the network; None: the task's.
            outputs: output channels; None: the task's.
        """
        return self.computing.placed(initial_network(self.task, self.seed, purpose, spec, outputs, self.start))

    def optimizer(self, parameters: Iterable[nn.Parameter], **override: Any) -> torch.optim.Optimizer:
        """The task's optimiser at the round's rate, clipping as the task says; `override` replaces or adds arguments, as lr=1e-4."""
        settings = {**self.task.optimizer, **override}
        settings["lr"] *= self.rate_factor
        return build_optimizer(settings, parameters, f"task {self.task.name}", self.task.clip.norm, self.task.clip.value)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The task's loss of logits (N, outputs, ...), a scalar mean; targets as in `data.splits.Split`. See `Annotation.loss`."""
        return self._loss(logits, targets)

    def batches(
        self, split: str, *keys: Key, batch_size: int | None = None, augment: bool = True, drop_last: bool = False
    ) -> Iterator[Batch]:
        """One pass over a split in random order; equal (seed, name, keys) give equal batches, see `batches.in_random_order`.

        Args:
            split: "train", "validation" or "test".
            keys: what sets this pass apart, by habit round, purpose, epoch.
            batch_size: other than the task's; the site's own limit holds for it too.
            augment: whether the task's random transforms are applied.
            drop_last: whether a last batch that is not full is left out (unless it is the only one).
        """
        size, drawing = self._bearable(batch_size or self.task.batch_size), self._drawing.get(split)
        random = numpy_random_state(self.seed, self.name, *keys, "augment")
        count = self.n[split] * self.fitting.per_image
        orders = in_random_order(count, size, drop_last, self.seed, self.name, *keys, "order", weights=drawing)
        data = self.data.split(split)
        told = counted(orders, len(orders), f"site {self.name}, batches of {split} images in this epoch")
        portions = (order % len(data) for order in told)
        for index, found in read_ahead(data, portions, lambda rows: self.fitting.read(data, rows)):
            batch = self._batch(index, *self.fitting.samples(found, random))
            yield self.augmented(batch, random) if augment else batch

    def ordered(self, split: str, batch_size: int | None = None) -> Iterator[Batch]:
        """One pass in fixed order, without augmentation; with `image_mode` "patch", over the windows that cover the images."""
        for index, taken in self.fitting.in_order(self.data.split(split), self._bearable(batch_size or self.task.batch_size)):
            yield self._batch(index, *taken)

    def take(self, split: str, index: Tensor, random: np.random.RandomState) -> Batch:
        """The images of the rows `index`, long (B,), on the site's device; with `image_mode` "patch", a patch of each from `random`."""
        return self._batch(index, *self.fitting.samples(self.fitting.read(self.data.split(split), index), random))

    def _batch(self, index: Tensor, images: Tensor, targets: Tensor) -> Batch:
        if self.abort():
            raise Aborted(f"site {self.name}: stopped on request")
        return Batch(self.computing.moved(images), self.computing.moved(targets), index)

    def augmented(self, batch: Batch, random: np.random.RandomState) -> Batch:
        """A batch of at least one image after the task's random transforms, with draws from `random`."""
        return Batch(*self._augmentation(batch.images, batch.targets, random), batch.index)

    def _bearable(self, size: int) -> int:
        return size if self.batch_limit is None else min(size, self.batch_limit)

    # -- scoring -----------------------------------------------------------------------------------------------------------------

    def predictor(self, model: nn.Module) -> Probabilities:
        """A model that gives logits as one that gives the task's probabilities."""
        return Probabilities(model, self.task)

    def answers(self, predictor: scoring.Predictor, split: str) -> Iterator[scoring.Answer]:
        """Probabilities, targets and rows of a whole split, a batch at a time; of a model that looks at whole patients, patient by patient.

        Args:
            predictor: images (N, C, H, W) to probabilities; a module is in evaluation mode while it answers.
            split: "train", "validation" or "test".
        """
        data, batch = self.data.split(split), self.scoring_batch
        found = scoring.answers_of_split(predictor, data, self._batch, self.fitting, self.task, batch)
        return counted(found, len(data), f"site {self.name}, {split} images measured", size=lambda answer: len(answer[2]))

    def score(self, predictor: scoring.Predictor, split: str = "validation", metrics: Sequence[str] | None = None) -> Scores:
        """Metrics of a model on a split, measured while it answers.

        Args:
            predictor: see `answers`.
            split: "train", "validation" or "test".
            metrics: which of `task.metrics`; None means all of them on the test split, elsewhere those by which models are selected.
        """
        chosen, data = metrics or (self.task.metrics if split == "test" else selection_metrics(self.task.kind)), self.data.split(split)
        return self.measured(self.answers(predictor, split), split, chosen).scores(data.patients)

    def measured(self, answers: Iterable[scoring.Answer], split: str, metrics: Sequence[str]) -> Measured:
        """What metrics of answers for a whole split are made of; of structures that were annotated here.

        Args:
            answers: see `answers`.
            split: "train", "validation" or "test".
            metrics: names, of `TaskConfig.metrics`.
        """
        return scoring.measured(answers, self.data.split(split), self.annotation, metrics)
