"""A site as a method's site half sees it: data in memory, networks, optimiser, batches, loss and metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medflare.core.errors import Aborted, ConfigError
from medflare.core.rng import Key, numpy_random_state, torch_generator
from medflare.core.store import MemoryStore
from medflare.data.splits import Batch, SiteData, class_counts, load_site_data, resolve_data_root
from medflare.data.transforms import Augmentation
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork, Probabilities
from medflare.privacy.ledger import Budget, Ledger, budget_of
from medflare.tasks.config import TaskConfig, unknown
from medflare.tasks.losses import build_loss
from medflare.tasks.metrics import Scores, score

Predictor = Callable[[Tensor], Tensor]
# What a site's own local/medflare.json may set; "outbound" is read where results leave (`flare.guard`).
LOCAL_SETTINGS = ("batch_size", "cache", "data_root", "device", "outbound", "privacy")
_SCORING_BATCH = 8  # larger ones are slower on a CPU: the feature maps of segmentation networks leave the cache


def scoring_batch(task: TaskConfig) -> int:
    """How many images a finished model is given at once: at least the task's batch, as test-time adaptation needs."""
    return max(_SCORING_BATCH, task.batch_size)


class Site:
    """One hospital: its name, task and data, and everything that a method needs to train and score models there.

    Attributes:
        abort: asked before every batch; where it answers True, `batches`, `ordered` and `score` raise `Aborted`.
        notes: what is worth knowing about the data, one line each (absent classes, images left out).
        n: images per split: train, validation, test.
        ledger: what this run has given away of the training patients' privacy (DP-SGD); its participant puts it on disk.
        budget: the site's own limit of that over all runs, None for none.
        batch_limit: most images that go through a network at once here, whatever the task says; None for no limit.
    """

    def __init__(self, name: str, task: TaskConfig, data: SiteData, seed: int = 0, device: torch.device | str = "cpu"):
        self.name = name
        self.task = task
        self.data = data
        self.seed = seed
        self.device = torch.device(device)
        self.abort: Callable[[], bool] = lambda: False
        self.ledger = Ledger(MemoryStore())
        self.budget: Budget | None = None
        self.batch_limit: int | None = None
        self.notes = list(data.notes)
        self._augmentation = Augmentation(task)
        self._loss = build_loss(task).to(self.device)

    @property
    def n(self) -> dict[str, int]:
        return {name: len(self.data.split(name)) for name in ("train", "validation", "test")}

    @property
    def batch_size(self) -> int:
        """Images in a training batch: the task's number, or what this site can bear."""
        return self._bearable(self.task.batch_size)

    def _bearable(self, size: int) -> int:
        return size if self.batch_limit is None else min(size, self.batch_limit)

    @property
    def training_patients(self) -> int:
        return len(set(self.data.train.patients))

    def class_counts(self) -> Tensor:
        """Training images, or pixels (segmentation), of each of `task.classes`; int64 (C,)."""
        return class_counts(self.data.train.targets, self.task)

    def network(self, purpose: str = "model", spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> FeatureNetwork:
        """A network on the site's device with the initial weights that all sites share, see `networks.initial_network`."""
        return initial_network(self.task, self.seed, purpose, spec, outputs).to(self.device)

    def optimizer(self, parameters: Iterable[nn.Parameter], **override: Any) -> torch.optim.Optimizer:
        """The task's optimiser; `override` replaces or adds arguments, for example lr=1e-4.

        Raises:
            ConfigError: an argument that torch's optimiser does not take.
        """
        settings = {**self.task.optimizer, **override}
        name = settings.pop("name")
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        try:
            return kinds[name](parameters, **settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task {self.task.name}: optimizer {name}: {error}; see torch.optim.{kinds[name].__name__}") from error

    def batches(
        self, split: str, *keys: Key, batch_size: int | None = None, augment: bool = True, drop_last: bool = False
    ) -> Iterator[Batch]:
        """One pass over a split in random order; equal (seed, name, keys) give equal batches.

        A last batch of one image joins the batch before it, and the only image of a split fills a batch twice:
        batch normalisation cannot train on a single sample. `batch_size` 1 is taken literally.

        Args:
            split: "train", "validation" or "test".
            keys: what sets this pass apart, by habit round, purpose, epoch.
            batch_size: other than the task's; the site's own limit holds for it too.
            augment: whether the task's random transforms are applied.
            drop_last: whether a last batch that is not full is left out (unless it is the only one).
        """
        size = self._bearable(batch_size or self.task.batch_size)
        order = torch.randperm(self.n[split], generator=torch_generator(self.seed, self.name, *keys, "order"))
        random = numpy_random_state(self.seed, self.name, *keys, "augment")
        for index in _training_portions(order, size, drop_last):
            batch = self._batch(split, index)
            yield Batch(*self._augmentation(batch.images, batch.targets, random), batch.index) if augment else batch

    def drawn_patients(self, rate: float, steps: int, random: np.random.Generator) -> Iterator[Batch]:
        """Poisson samples of the training patients, as DP-SGD needs them: a batch may be empty, and nothing in it knows of the rest.

        One image of every drawn patient, itself drawn, so that a patient of many images can move a step no more than one of few.

        Args:
            rate: probability with which a patient joins a batch.
            steps: number of batches.
            random: the source of every draw, augmentation included. DP-SGD counts on nobody else knowing it.
        """
        rows: dict[str, list[int]] = {}
        for row, patient in enumerate(self.data.train.patients):
            rows.setdefault(patient, []).append(row)
        augmenting = np.random.RandomState(random.bit_generator)  # MONAI's kind of generator on the same stream
        for _ in range(steps):
            joins = random.random(len(rows)) < rate
            chosen = [random.choice(own) for own, join in zip(rows.values(), joins, strict=True) if join]
            batch = self._batch("train", torch.tensor(chosen, dtype=torch.long))
            yield Batch(*self._augmentation(batch.images, batch.targets, augmenting), batch.index) if chosen else batch

    def ordered(self, split: str, batch_size: int | None = None) -> Iterator[Batch]:
        """One pass in fixed order, without augmentation."""
        for index in _portions(torch.arange(self.n[split]), self._bearable(batch_size or self.task.batch_size)):
            yield self._batch(split, index)

    def _batch(self, split: str, index: Tensor) -> Batch:
        if self.abort():
            raise Aborted(f"site {self.name}: stopped on request")
        data = self.data.split(split)
        return Batch(data.images[index].to(self.device), data.targets[index].to(self.device), index)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The task's loss, a scalar mean."""
        return self._loss(logits, targets)

    def predictor(self, model: nn.Module) -> Probabilities:
        """A model that gives logits as one that gives the task's probabilities."""
        return Probabilities(model, self.task)

    def score(self, predictor: Predictor, split: str = "validation", metrics: Sequence[str] | None = None) -> Scores:
        """Metrics of a model on a split.

        Args:
            predictor: images (N, C, H, W) to probabilities; a module is put in evaluation mode meanwhile.
            split: "train", "validation" or "test".
            metrics: see `score_outputs`.
        """
        return self.score_outputs(self.predict(predictor, split), split, metrics)

    def score_outputs(self, probabilities: Tensor, split: str = "validation", metrics: Sequence[str] | None = None) -> Scores:
        """Metrics of probabilities that stand in a split's order, (N, outputs, H, W) or (N, outputs).

        Args:
            probabilities: for example from `predict`.
            split: "train", "validation" or "test".
            metrics: which of `task.metrics`; None means all of them on the test split, all but the costly hd95 elsewhere.
        """
        if metrics is None:
            metrics = [name for name in self.task.metrics if split == "test" or name != "hd95"]
        data = self.data.split(split)
        return score(probabilities.cpu(), data.targets, data.patients, self.task, metrics)

    @property
    def scoring_batch(self) -> int:
        """How many images `predict` hands to a predictor at once, see `scoring_batch`."""
        return self._bearable(scoring_batch(self.task))

    def predict(self, predictor: Predictor, split: str) -> Tensor:
        """Probabilities of a whole split in its order, on the CPU: (N, outputs, H, W) or (N, outputs)."""
        with torch.no_grad(), _evaluating(predictor):
            parts = [predictor(batch.images).float().cpu() for batch in self.ordered(split, self.scoring_batch)]
        return torch.cat(parts) if parts else torch.zeros(0, self.task.outputs)


@contextmanager
def _evaluating(predictor: Predictor) -> Iterator[None]:
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


def _portions(order: Tensor, size: int) -> list[Tensor]:
    return list(order.split(size)) if len(order) else []


def _training_portions(order: Tensor, size: int, drop_last: bool) -> list[Tensor]:
    """`order` in batches of `size`, see `Site.batches`."""
    portions = _portions(order, size)
    if drop_last and len(portions) > 1 and len(portions[-1]) < size:
        return portions[:-1]
    if size > 1 and portions and len(portions[-1]) == 1:
        lonely = portions.pop()
        portions.append(torch.cat([portions.pop(), lonely]) if portions else lonely.repeat(2))
    return portions


def open_site(
    name: str,
    task: TaskConfig,
    *,
    seed: int = 0,
    role: str = "inside",
    data_root: Path | str | None = None,
    local: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    cache: Path | None = None,
    ledger: Path | None = None,
) -> Site:
    """A site with its data found, read and checked.

    Args:
        name: the site's name.
        task: what is learnt.
        seed: of the run.
        role: "inside" (trains) or "outside" (needs a test split only).
        data_root: overrides every other way of naming the data.
        local: content of the site's own local/medflare.json, see `LOCAL_SETTINGS` and `check_local`.
        device: where models run; None means the site's own "device", else the CPU.
        cache: folder for decoded images unless the site's own "cache" says otherwise.
        ledger: folder for the site's own privacy ledger unless its "privacy" names one.

    Raises:
        ConfigError: a setting of local/medflare.json that is unknown or unusable.
        DataError: the data cannot be used as they are.
    """
    own = check_local(local or {})
    chosen = cache if own.get("cache", True) is True else own["cache"]
    root = resolve_data_root(name, task, own, data_root)
    data = load_site_data(name, task, root, role=role, cache=Path(chosen).expanduser() if chosen else None)
    site = Site(name, task, data, seed, device or own.get("device", "cpu"))
    site.budget = budget_of(own["privacy"], name, ledger) if "privacy" in own else None
    site.batch_limit = own.get("batch_size")
    if site.batch_size < task.batch_size:
        site.notes.append(f"trains with batches of {site.batch_size}, not the task's {task.batch_size}: its local/medflare.json says so")
    return site


def check_local(local: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of local/medflare.json, those checked that concern data and device.

    "data_root" is the folder of the data, "device" where networks run, "cache" a folder for decoded images (true: the job's
    own; false: none), "batch_size" the most images at once (null: as the task says).

    Raises:
        ConfigError: an unknown setting, a value of the wrong type or a device that this machine lacks.
    """
    settings = dict(local)
    for key in settings:
        if key not in LOCAL_SETTINGS:
            raise unknown("setting", key, LOCAL_SETTINGS, "local/medflare.json")
    for key, kinds in (("data_root", (str,)), ("device", (str,)), ("cache", (str, bool))):
        if key in settings and not isinstance(settings[key], kinds):
            raise ConfigError(f"local/medflare.json: {key} must be {' or '.join(kind.__name__ for kind in kinds)}, got {settings[key]!r}")
    limit = settings.get("batch_size")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 2):
        raise ConfigError(
            f"local/medflare.json: batch_size must be 2 or more, got {limit!r}; batch normalisation cannot train on a single image"
        )
    try:
        device = torch.device(settings.get("device", "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"local/medflare.json: unknown device {settings['device']!r}; use cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"local/medflare.json: device {settings['device']!r} is not available here; use cpu or install a driver")
    return settings
