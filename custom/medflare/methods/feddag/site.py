"""FedDAG's site algorithm (Sec. III-B, III-D, Alg. 1), which trains generator, student and teacher
on every batch.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from medflare.core.message import FinalModels
from medflare.core.rng import seeded
from medflare.data.loading import Batch
from medflare.methods import (
    MEASURED,
    MODEL,
    ConfigError,
    FeatureNetwork,
    FedAvgSite,
    FedAvgSiteHyper,
    Message,
    MetaSpec,
    PersistentState,
    Plan,
    Site,
    StateDict,
    TaskConfig,
    TensorSpec,
    copied_state,
    extends,
    number,
    param,
    phase,
    run_epochs,
    strict_dataclass,
    table,
    trainable,
)
from medflare.methods.fedavg.site import PRIVACY
from medflare.methods.feddag.formulas import (
    discrepancy,
    ema_update,
    round_decay,
    sharpness_perturbation,
    similarity_loss,
)
from medflare.methods.feddag.generator import DomainGenerator, generated, picture_grid
from medflare.methods.feddag.sha import PERTURBED, ScoredSite
from medflare.methods.parts.few_patients import LastBatches
from medflare.methods.parts.normalisation import batch_statistics, still_statistics
from medflare.networks.features import overwrite, pooled
from medflare.training.epochs import samples_of_pass

_PICTURES = 4  # generated images in the site's own report


@strict_dataclass
class FedDAGSiteHyper(FedAvgSiteHyper):
    """Domain-adversarial generation; the server reads it too."""

    ndag: bool = param(
        True,
        "false: students are trained on the original images alone (w/o NDAG)",
        source="Table V",
    )
    alpha: float = param(
        0.3,
        "strength of the perturbation, in deviations of the site's training images",
        symbol="α",
        source="Eq. 2",
        low=0,
        high=1,
    )
    m: float = param(
        0.1, "cap of the feature discrepancy 1 - cos; 2: none", symbol="m", source="Eq. 1", low=0
    )
    train_on: Literal["both", "perturbation"] = param(
        "both",
        "the student's images: generated and original, or the bare perturbations α G(x)",
        source="Eq. 4, Fig. 11",
    )
    ema: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = param(
        "auto",
        "decay of the teacher's average; auto: by the round's length, see round_decay",
        source="Sec. III-B3",
    )
    distribution: Literal["type1", "type2", "type3"] = param(
        "type3",
        "1: θ_g to student and teacher, 2: a global student beside θ_g, "
        "3: θ_g to the student, the teacher stays at the site",
        source="Sec. III-D, Fig. 5",
    )
    sam_rho: float = param(
        0.0,
        "FedSAM: length of the student's ascent step on every batch; 0: none",
        symbol="ρ",
        source="Fig. 9",
        low=0,
    )
    generator_width: int = param(
        16, "the generator's feature channels (FCN16, FCN32)", source="Table VII", low=1
    )


def initial_generator(task: TaskConfig, seed: int, hyper: FedDAGSiteHyper) -> DomainGenerator:
    """The common initial generator."""
    with seeded(seed, "initial", "generator"):
        return DomainGenerator(task.image_channels, hyper.generator_width, dims=task.spatial_dims)


def _generator_template(plan: Plan[FedDAGSiteHyper, Any]) -> StateDict:
    with torch.device("meta"):
        return initial_generator(plan.task, 0, plan.site_hyper).state_dict()


GENERATOR = TensorSpec(
    "generator",
    "the site's generator of perturbations, for the mean; without an image it yields none",
    _generator_template,
    lambda plan: plan.site_hyper.ndag,
)
STUDENT = TensorSpec(
    "student",
    "the site's student, for the mean that students start from",
    when=lambda plan: plan.site_hyper.distribution == "type2",
)
LOSSES = MetaSpec[dict[str, float | None]](
    "losses", "mean of each loss of the round", table(number(optional=True)), "train"
)


class FedDAGSite(ScoredSite, FedAvgSite[FedDAGSiteHyper]):
    """Trains generator, student and teacher on every batch.

    The site sends the teacher, the generator and θ^. In distribution type 3 the teacher is never
    overwritten: it is the site's state.
    """

    dp_unsupported_reason = (
        "generator, student and teacher are trained on every batch, "
        "and the perturbed model reveals a gradient"
    )
    teacher = PersistentState("teacher")  # type 3: the teacher, which stays at the site
    _last_batches: LastBatches  # of a round, set by `train`

    @classmethod
    def needs_features(cls, hyper: FedDAGSiteHyper) -> bool:
        return hyper.ndag

    @cached_property
    def generator(self) -> DomainGenerator:
        """The site's generator network; its weights come with every round."""
        return initial_generator(self.site.task, self.site.seed, self.hyper).to(self.site.device)

    @property
    def unit(self) -> Tensor:
        """The unit of α: standard deviations of the training images by channel (C, 1, 1), which
        stay at the site.
        """
        meta = self.memory.meta
        if "deviations" not in meta:
            batches = (batch.images for batch in self.site.ordered("train"))
            meta["deviations"] = channel_deviations(batches)
        deviations = torch.tensor(meta["deviations"], dtype=torch.float32, device=self.site.device)
        return deviations.view(-1, *[1] * self.site.task.spatial_dims)

    @phase(request=(MODEL,), reply=(MODEL,), meta=(*MEASURED, PRIVACY.as_optional()))
    def warm_up(self, round: int, incoming: Message) -> Message:
        """A round of FedAvg."""
        return FedAvgSite.train(self, round, incoming)

    @phase(
        request=(MODEL, GENERATOR.as_optional(), STUDENT.as_optional()),
        reply=(MODEL, GENERATOR, STUDENT, PERTURBED),
        meta=(*MEASURED, LOSSES),
    )
    def train(self, round: int, incoming: Message) -> Message:
        """A round of NDAG (Alg. 1); the reply has the teacher, the states of the distribution type
        and the perturbed model.
        """
        validation = self.validation(self.network("model", incoming[MODEL]))
        generation = self._generation(incoming)
        decay = self._decay()

        last = LastBatches(self.site)
        self._last_batches = last

        def step(batch: Batch) -> dict[str, Tensor]:
            last.add(batch)
            return generation.step(batch, decay)

        with self.continued(generation.optimizers):
            losses = run_epochs(self.site, round, "model", step)
        teacher = copied_state(generation.teacher)
        if self.hyper.distribution == "type3":
            self.teacher = teacher
        entries = {LOSSES: losses, MODEL: teacher}
        reply = self.reply(entries, loss=losses["student"], validation={"global": validation})
        if self.hyper.ndag:
            reply[GENERATOR] = copied_state(generation.generator)
        if self.hyper.distribution == "type2":
            self._check_difference(decay, last)
            reply[STUDENT] = copied_state(generation.student)
        self.add_perturbed(round, reply)
        return reply

    def _decay(self) -> float:
        """The decay of the teacher's average."""
        if self.hyper.ema != "auto":
            return self.hyper.ema
        batches = math.ceil(samples_of_pass(self.site) / self.site.batch_size)
        return round_decay(max(1, self.site.task.local_epochs * batches))

    def _check_difference(self, decay: float, last: LastBatches) -> None:
        """Raise ConfigError if student and teacher, which both leave the site, differ mostly by the
        last steps, of fewer patients than its `minimum_patients`.
        """
        if self.minimum_patients < 2 or decay in (0, 1):
            return
        batches = math.ceil(math.log(0.1) / math.log(decay))  # with 0.9 of the difference
        if batches < len(last.batches):
            raise ConfigError(
                f"site {self.site.name} sends no model: with distribution=type2 student and "
                "teacher leave it, whose difference is the last steps', on fewer patients than its "
                f"minimum_patients ({self.minimum_patients}); take a larger ema, or type3"
            )

    def _generation(self, incoming: Message) -> "AdversarialGeneration":
        """Student, teacher and generator at the start of a round (Sec. III-D); θ_g replaces a state
        that the site does not have.
        """
        shared = incoming[MODEL]
        if GENERATOR in incoming:
            self.generator.load_state_dict(incoming[GENERATOR])
        student = self.network("model", incoming.get(STUDENT) or shared)
        teacher = self.network("teacher", self.teacher or shared)
        unit = self.unit if self.hyper.ndag else 1.0
        return AdversarialGeneration(self.site, self.hyper, student, teacher, self.generator, unit)

    def last_batches(self, round: int) -> Collection[Batch]:
        return self._last_batches.batches

    @extends(request=(GENERATOR.as_optional(),))
    def finalize(self, incoming: Message) -> FinalModels:
        """The selected global model in all roles."""
        return super().finalize(incoming)

    def pictures(self, incoming: Message) -> dict[str, bytes]:
        """Some training images, the final generator's perturbations of them, and their sums (the
        paper's Fig. 4).
        """
        if GENERATOR not in incoming or not self.site.n["train"]:
            return {}
        images = next(self.site.ordered("train", _PICTURES)).images.cpu()
        self.generator.load_state_dict(incoming[GENERATOR])
        with torch.no_grad():
            perturbations = self.generator(images.to(self.site.device)).cpu()
        x_hat = generated(images, perturbations, self.hyper.alpha, unit=self.unit.cpu())
        return {"generated": picture_grid(images, perturbations, x_hat)}


@dataclasses.dataclass
class AdversarialGeneration:
    """NDAG (Sec. III-B, Alg. 1) on each batch: one step of the generator, one of the student, then
    the teacher's update.

    Attributes:
        generator: images (N, C, H, W) -> perturbations of the same shape.
        unit: of α, in values of the network's input: one number, or one for each channel (C, 1, 1).
    """

    site: Site
    hyper: FedDAGSiteHyper
    student: FeatureNetwork
    teacher: FeatureNetwork
    generator: nn.Module
    unit: Tensor | float = 1.0

    def __post_init__(self) -> None:
        self.teacher.eval()
        # They share memory with the networks.
        self._averaged = (self.teacher.state_dict(), self.student.state_dict())
        self.optimizers = {
            "model": self.site.optimizer(trainable(self.student)),
            "generator": self.site.optimizer(trainable(self.generator)),
        }

    def step(self, batch: Batch, decay: float) -> dict[str, Tensor]:
        """Both stages on one batch and the teacher's update.

        Returns:
            The losses by name.
        """
        images, targets, _ = batch
        losses: dict[str, Tensor] = {}
        reference = None
        if self.hyper.ndag:
            reference = self.reference(images)
            if self.hyper.alpha > 0:
                losses |= self._generator_step(images, targets, reference)
        losses |= self._student_step(images, targets, reference)
        ema_update(*self._averaged, decay)
        return losses

    @torch.no_grad()
    def reference(self, images: Tensor) -> Tensor:
        """f = T(x): features (N, D) of the originals, normalised by the batch as the student's."""
        with batch_statistics(self.teacher):
            features, _ = self.teacher.features_and_output(images)
        return pooled(features)

    @torch.no_grad()
    def student_images(self, images: Tensor) -> Tensor:
        """x^ of the student's stage (N, C, H, W), without a graph; α G(x) alone for
        train_on=perturbation.
        """
        perturbation = self.generator(images)
        if self.hyper.train_on == "perturbation":
            return self.hyper.alpha * self.unit * perturbation
        return generated(images, perturbation, self.hyper.alpha, unit=self.unit)

    def _generator_step(
        self, images: Tensor, targets: Tensor, reference: Tensor
    ) -> dict[str, Tensor]:
        """Stage 1: G moves features away from the teacher's (Eq. 1); S and T are frozen.

        The image stays classifiable (Eq. 3). The student normalises by the batch, as in its
        training. With running statistics G would learn a constant shift of colours, which
        normalisation by the batch removes in stage 2.
        """
        self.student.eval()  # running statistics do not change
        x_hat = generated(images, self.generator(images), self.hyper.alpha, unit=self.unit)
        with batch_statistics(self.student):
            features, logits = self.student.features_and_output(x_hat)
        away = discrepancy(reference, pooled(features), self.hyper.m)
        task = self.site.loss(logits, targets)
        self.optimizers["generator"].zero_grad()
        (task - away).backward(inputs=trainable(self.generator))
        self.optimizers["generator"].step()
        return {"discrepancy": away, "generator_task": task}

    def _student_step(
        self, images: Tensor, targets: Tensor, reference: Tensor | None
    ) -> dict[str, Tensor]:
        """Stage 2: S learns from generated images the teacher's features of the originals (Eq. 4)
        and the targets; G and T are frozen.
        """
        self.student.train()
        x_hat = None if reference is None else self.student_images(images)
        losses = {}

        def loss() -> Tensor:
            losses.update(self.student_losses(images, x_hat, targets, reference))
            return losses["student"]

        sharpness_aware_step(self.student, self.optimizers["model"], loss, self.hyper.sam_rho)
        return losses

    def student_losses(
        self, images: Tensor, x_hat: Tensor | None, targets: Tensor, reference: Tensor | None
    ) -> dict[str, Tensor]:
        """L_S = L_sim + L_task and its parts; L_task of the originals without generated images.

        Running statistics are those of the originals: the generated images of training would shift
        predictions for real ones.

        Args:
            images: the originals (N, C, H, W).
            x_hat: the generated images (N, C, H, W); None without.
            reference: f, features of the originals (N, D); None without generated images.

        Returns:
            The scalars "task", "student" (the minimised one) and, with generated images,
            "similarity".
        """
        student = self.student
        if x_hat is None or reference is None:
            task = self.site.loss(student(images), targets)
            return {"task": task, "student": task}
        with still_statistics(student):
            features, logits = student.features_and_output(x_hat)
        similarity = similarity_loss(reference, pooled(features))
        task = self.site.loss(logits, targets)
        if self.hyper.train_on == "both":
            task = (task + self.site.loss(student(images), targets)) / 2
        else:
            with torch.no_grad():
                student(images)  # for the running statistics alone
        return {"task": task, "similarity": similarity, "student": task + similarity}


def sharpness_aware_step(
    model: nn.Module, optimizer: Optimizer, loss: Callable[[], Tensor], rho: float
) -> None:
    """One optimiser step; with rho > 0 along the gradient at θ + ε, ε of length rho as in SHA
    (FedSAM, Caldarola et al., ECCV 2022).
    """
    optimizer.zero_grad()
    loss().backward()
    if rho > 0:
        named = model.named_parameters()
        gradients = {name: weight.grad for name, weight in named if weight.grad is not None}
        weights = [model.get_parameter(name) for name in gradients]
        origin = [weight.detach().clone() for weight in weights]
        epsilon = sharpness_perturbation(gradients, rho).values()
        moves = zip(origin, epsilon, strict=True)
        overwrite(weights, [weight + move for weight, move in moves])
        optimizer.zero_grad()
        with still_statistics(model):
            loss().backward()
        overwrite(weights, origin)
    optimizer.step()


def channel_deviations(batches: Iterable[Tensor]) -> list[float]:
    """The standard deviation (population form, float64) of every channel over all pixels of all
    images; 0 for a constant channel.
    """
    counts = []
    means = []
    squares = []
    for images in batches:
        values = images.double().transpose(0, 1).flatten(1)
        counts.append(values.shape[1])
        means.append(values.mean(dim=1))
        squares.append(values.square().mean(dim=1))
    weights = torch.tensor(counts, dtype=torch.float64).unsqueeze(1)
    mean = (weights * torch.stack(means).cpu()).sum(dim=0) / weights.sum()
    square = (weights * torch.stack(squares).cpu()).sum(dim=0) / weights.sum()
    return (square - mean.square()).clamp(min=0).sqrt().tolist()
