"""FedDAG (Che et al., arXiv 2501.13967): sites generate images of domains that nobody has, and learn not to mind.

On every batch (NDAG, Sec. III-B) a generator G learns perturbations x^ = x + α G(x) (Eq. 2) that move the student's features away
from the teacher's (Eq. 1, capped at m) while the image stays classifiable (Eq. 3); then the student S learns to give x^ the
features of x (Eq. 4) and the right answer, and the teacher T follows it as a moving average. The server aggregates with SHA
(`sha.py`). The formulas stand in `feddag_math.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.manifest import EntrySpec, Manifest
from medflare.core.message import Message
from medflare.core.packages import installed
from medflare.core.rng import seeded
from medflare.core.states import StateDict, copy_state
from medflare.methods.base import Plan, ServerContext, Step, plain_entry
from medflare.methods.fedavg import FedAvgSite, FedAvgSiteHyper
from medflare.methods.feddag.formulas import (
    discrepancy,
    ema_decay,
    ema_update,
    sharpness_perturbation,
    similarity_loss,
    soft_balancing_weights,
    within_client_average,
)
from medflare.methods.feddag.generator import DomainGenerator, generated, picture_grid
from medflare.methods.feddag.sha import ScoredSite, SHAHyper, SHAServer
from medflare.methods.parts.training import run_epochs, trainable
from medflare.networks.features import FeatureNetwork, pooled
from medflare.sites.site import Batch, Site
from medflare.tasks.config import TaskConfig

__all__ = [
    "FedDAGHyper",
    "FedDAGServer",
    "FedDAGSite",
    "discrepancy",
    "sharpness_perturbation",
    "soft_balancing_weights",
    "within_client_average",
]


@dataclass(frozen=True)
class FedDAGHyper(SHAHyper, FedAvgSiteHyper):
    """Settings of both halves; those of the aggregation stand in `SHAHyper`."""

    ndag: bool = param(True, "false: students learn from the original images alone (w/o NDAG)", source="Table V")
    warmup: int = param(5, "first rounds as FedAvg, at most a quarter of all", source="Sec. IV-A2", low=0)
    alpha: float = param(0.3, "strength of the perturbation", symbol="α", source="Eq. 2", low=0, high=1)
    clamp: tuple[float, float] | None = param(None, "low, high: range that generated images are clamped to", source="Eq. 2")
    m: float = param(0.1, "cap of the feature discrepancy 1 - cos; 2: none", symbol="m", source="Eq. 1", low=0)
    cap: str = param(
        "instance", "what the cap works on: each image, or the mean of the batch", source="Eq. 1", choices=("instance", "batch")
    )
    classifier: str = param("student", "who classifies generated images", source="Eq. 3", choices=("student", "teacher", "both"))
    train_on: str = param(
        "both",
        "the student's images: generated and original, generated, or the bare perturbations α G(x)",
        source="Eq. 4, Fig. 11",
        choices=("both", "generated", "perturbation"),
    )
    discrepancy_weight: float = param(1.0, "weight of L_dis (2, with m/2: Eq. 1 without the 1/2)", source="Sec. IV-A2", low=0)
    similarity_weight: float = param(1.0, "weight of L_sim", source="Sec. IV-A2", low=0)
    ema: float = param(
        0.9, "decay of the teacher's average; 0.99 where a round has hundreds of batches", source="Sec. III-B3", low=0, high=1
    )
    ema_ramp: bool = param(False, "let the decay grow as 1 - 1/(steps + 1) until it reaches ema")
    distribution: str = param(
        "type3",
        "1: θ_g to both models, 2: a global student beside θ_g, 3: θ_g to one, the other stays at the site",
        source="Sec. III-D, Fig. 5",
        choices=("type1", "type2", "type3"),
    )
    chain: str = param(
        "student_from_global",
        "types 1, 3: θ_g to the student and the teacher is sent back, or the reverse",
        source="Sec. III-D",
        choices=("student_from_global", "teacher_from_global"),
    )
    perturbation_loss: str = param(
        "task", "loss whose gradient perturbs: the task's, or all of L_S", source="Sec. III-C1", choices=("task", "full")
    )
    sam_rho: float = param(0.0, "FedSAM: length of the student's ascent step on every batch; 0: none", symbol="ρ", source="Fig. 9", low=0)
    generator_width: int = param(16, "the generator's feature channels (FCN16, FCN32)", source="Table VII", low=1)
    generator_blocks: int = param(3, "the generator's residual blocks", low=0)
    generator_scale: int = param(4, "the generator sees images shrunk by this factor; 1: full size, dear beside a slim network", low=1)
    generator_lr: float | None = param(None, "the generator's learning rate; none: the model's", low=0)
    pictures: int = param(4, "generated images that each site shows in its own report; they stay there", source="Fig. 4", low=0)

    def __post_init__(self) -> None:
        if self.clamp is not None and not (len(self.clamp) == 2 and self.clamp[0] < self.clamp[1]):
            raise ConfigError(f"hyper-parameter clamp = {self.clamp!r}: give a low and a higher value, or none")


def build_generator(task: TaskConfig, hyper: FedDAGHyper) -> DomainGenerator:
    return DomainGenerator(task.channels, hyper.generator_width, hyper.generator_blocks, hyper.generator_scale)


def initial_generator(task: TaskConfig, seed: int, hyper: FedDAGHyper) -> DomainGenerator:
    """The generator that every participant starts from."""
    with seeded(seed, "initial", "generator"):
        return build_generator(task, hyper)


class AdversarialGeneration:
    """NDAG (Sec. III-B, Alg. 1): one step of the generator and one of the student on each batch; the teacher follows."""

    def __init__(self, site: Site, hyper: FedDAGHyper, student: FeatureNetwork, teacher: FeatureNetwork, generator: nn.Module):
        self.site, self.hyper = site, hyper
        self.student, self.teacher, self.generator = student, teacher, generator
        self.teacher.eval()
        self.followed = teacher.state_dict(), student.state_dict()  # share memory with the networks
        rate = {} if hyper.generator_lr is None else {"lr": hyper.generator_lr}
        self.optimizers = {"model": site.optimizer(trainable(student)), "generator": site.optimizer(trainable(generator), **rate)}

    def step(self, batch: Batch, decay: float) -> dict[str, Tensor]:
        """Both stages on one batch and the teacher's update; returns the losses by name, detached."""
        images, targets, _ = batch
        losses: dict[str, Tensor] = {}
        reference = self.reference(images) if self.hyper.ndag else None
        if reference is not None and self.hyper.alpha > 0:
            losses |= self._generator_step(images, targets, reference)
        losses |= self._student_step(images, targets, reference)
        ema_update(*self.followed, decay)
        return {name: value.detach() for name, value in losses.items()}

    @torch.no_grad()
    def reference(self, images: Tensor) -> Tensor:
        """f = T(x): features (N, D) of the originals, the same for both stages."""
        return pooled(self.teacher.features_and_output(images)[0])

    @torch.no_grad()
    def student_images(self, images: Tensor) -> Tensor:
        """x^ of the student's stage: fixed images of the generator as it is now."""
        perturbation = self.generator(images)
        if self.hyper.train_on == "perturbation":
            return self.hyper.alpha * perturbation
        return generated(images, perturbation, self.hyper.alpha, self.hyper.clamp)

    def _generator_step(self, images: Tensor, targets: Tensor, reference: Tensor) -> dict[str, Tensor]:
        """Stage 1: G away from the teacher's features (Eq. 1), within what is still classified well (Eq. 3); S and T frozen."""
        self.student.eval()  # a frozen model also keeps its running statistics
        x_hat = generated(images, self.generator(images), self.hyper.alpha, self.hyper.clamp)
        features, logits = self.student.features_and_output(x_hat)
        away = discrepancy(reference, pooled(features), self.hyper.m, self.hyper.cap)
        judged = [logits] if self.hyper.classifier != "teacher" else []
        if self.hyper.classifier != "student":
            judged.append(self.teacher(x_hat))
        task = torch.stack([self.site.loss(output, targets) for output in judged]).mean()
        self.optimizers["generator"].zero_grad(set_to_none=True)
        (task - self.hyper.discrepancy_weight * away).backward(inputs=trainable(self.generator))
        self.optimizers["generator"].step()
        return {"discrepancy": away, "generator_task": task}

    def _student_step(self, images: Tensor, targets: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        """Stage 2: S gives generated images the teacher's features of the originals (Eq. 4) and the right answer; G and T frozen."""
        self.student.train()
        x_hat = self.student_images(images) if reference is not None else None
        losses: dict[str, Tensor] = {}

        def loss() -> Tensor:
            losses.update(self.student_losses(self.student, images, x_hat, targets, reference))
            return losses["student"]

        sharpness_aware_step(self.student, self.optimizers["model"], loss, self.hyper.sam_rho)
        return losses

    def student_losses(
        self, model: FeatureNetwork, images: Tensor, x_hat: Tensor | None, targets: Tensor, reference: Tensor | None
    ) -> dict[str, Tensor]:
        """L_S = L_sim + L_task and its parts; L_task alone, on the originals, without generated images."""
        if x_hat is None or reference is None:
            task = self.site.loss(model(images), targets)
            return {"task": task, "student": task}
        features, logits = model.features_and_output(x_hat)
        similarity = similarity_loss(reference, pooled(features))
        task = self.site.loss(logits, targets)
        if self.hyper.train_on == "both":
            task = (task + self.site.loss(model(images), targets)) / 2
        return {"task": task, "similarity": similarity, "student": task + self.hyper.similarity_weight * similarity}


def sharpness_aware_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], rho: float) -> None:
    """One optimiser step; with rho > 0 along the gradient at θ + ε (FedSAM: Caldarola et al., ECCV 2022), ε as in SHA."""
    optimizer.zero_grad(set_to_none=True)
    loss().backward()
    if rho > 0:
        moving = [weight for weight in trainable(model) if weight.grad is not None]
        origin = [weight.detach().clone() for weight in moving]
        with torch.no_grad():
            for weight, epsilon in zip(moving, sharpness_perturbation([w.grad for w in moving if w.grad is not None], rho), strict=True):
                weight.add_(epsilon)
        optimizer.zero_grad(set_to_none=True)
        with still_statistics(model):
            loss().backward()
        with torch.no_grad():
            for weight, start in zip(moving, origin, strict=True):
                weight.copy_(start)
    optimizer.step()


@contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Normalise by the batch inside the block without moving running statistics."""
    layers = [layer for layer in model.modules() if isinstance(layer, _NormBase) and layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


class FedDAGSite(ScoredSite, FedAvgSite):
    """Trains generator, student and teacher on every batch; sends back the teacher (or the student), the generator and θ^.

    In distribution type 3 one of the two models never leaves the site: it is the site's state.
    """

    Hyper: ClassVar[type] = FedDAGHyper
    phases: ClassVar[tuple[str, ...]] = ("warm_up", "train", "score", "validate")
    unprotected = "generator, student and teacher learn from each other on every batch, and the perturbed model shows a bare gradient"
    hyper: FedDAGHyper

    def __init__(self, site: Site, hyper: FedDAGHyper, sites: tuple[str, ...]):
        super().__init__(site, hyper, sites)
        self.kept: StateDict | None = None
        self.ema_steps = 0
        self._generation: AdversarialGeneration | None = None
        self._last_batch: Batch | None = None

    @cached_property
    def generator(self) -> DomainGenerator:
        return initial_generator(self.site.task, self.site.seed, self.hyper).to(self.site.device)

    @classmethod
    def outbound(cls, phase: str, plan: Plan) -> Manifest:
        if phase == "warm_up":
            return FedAvgSite.outbound("train", plan)
        entries = super().outbound(phase, plan)
        if phase == "train" and plan.hyper.ndag:
            with torch.device("meta"):
                generator = build_generator(plan.task, plan.hyper)
            purpose = "the site's generator of perturbations, for the mean; without an image it yields none"
            entries["generator"] = EntrySpec.like(generator.state_dict(), purpose)
        if phase == "train" and plan.hyper.distribution == "type2":
            entries["student"] = plain_entry(plan, "the site's student, for the mean that students start from")
        return entries

    def warm_up(self, round: int, incoming: Message) -> Message:
        """A round of FedAvg."""
        return FedAvgSite.train(self, round, incoming)

    def train(self, round: int, incoming: Message) -> Message:
        validation = self.validation(self.network("model", incoming.states["model"]))
        generation = self._begin(incoming)
        losses = self._epochs(generation, round)
        student, teacher = copy_state(generation.student.state_dict()), copy_state(generation.teacher.state_dict())
        sends_teacher = self.hyper.distribution == "type2" or self.hyper.chain == "student_from_global"
        states = {"model": teacher if sends_teacher else student}
        if self.hyper.ndag:
            states["generator"] = copy_state(generation.generator.state_dict())
        if self.hyper.distribution == "type2":
            states["student"] = student
        if self.hyper.distribution == "type3":
            self.kept = states["model"]
        reply = Message(states, self.facts(loss=losses["student"], validation={"global": validation}, losses=losses))
        self.add_perturbed(round, reply)
        return reply

    def _begin(self, incoming: Message) -> AdversarialGeneration:
        """Student, teacher and generator at the start of a round (Sec. III-D); what a site does not have yet is θ_g."""
        received = incoming.states["model"]
        kept = received if self.kept is None else self.kept
        starts = {
            "type1": (received, received),
            "type2": (incoming.states.get("student", received), received),
            "type3": (received, kept) if self.hyper.chain == "student_from_global" else (kept, received),
        }
        student, teacher = starts[self.hyper.distribution]
        if "generator" in incoming.states:
            self.generator.load_state_dict(incoming.states["generator"])
        networks = cast(FeatureNetwork, self.network("model", student)), cast(FeatureNetwork, self.network("teacher", teacher))
        self._generation = AdversarialGeneration(self.site, self.hyper, *networks, self.generator)
        return self._generation

    def _epochs(self, generation: AdversarialGeneration, round: int) -> dict[str, float]:
        """The task's local epochs; mean losses by name."""

        def step(batch: Batch) -> dict[str, Tensor]:
            losses = generation.step(batch, ema_decay(self.ema_steps, self.hyper.ema, self.hyper.ema_ramp))
            self.ema_steps += 1
            self._last_batch = batch
            return losses

        with self.continued(generation.optimizers):
            return run_epochs(self.site, round, "model", step)

    def last_batch(self, round: int) -> Batch:
        return cast(Batch, self._last_batch)  # `train` has just set it

    def perturbation_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.hyper.perturbation_loss == "task" or not self.hyper.ndag:
            return super().perturbation_loss(model, batch)
        generation = cast(AdversarialGeneration, self._generation)  # `train` has just made it
        x_hat, reference = generation.student_images(batch.images), generation.reference(batch.images)
        return generation.student_losses(cast(FeatureNetwork, model), batch.images, x_hat, batch.targets, reference)["student"]

    def pictures(self, incoming: Message) -> dict[str, bytes]:
        """Some of the site's training images, what the final generator adds to them, and the sums; none without Pillow to store them."""
        images = self.site.data.train.images[: self.hyper.pictures]
        if "generator" not in incoming.states or not len(images) or not installed("PIL"):
            return {}
        self.generator.load_state_dict(incoming.states["generator"])
        with torch.no_grad():
            perturbations = self.generator(images.to(self.site.device)).cpu()
        x_hat = generated(images, perturbations, self.hyper.alpha, self.hyper.clamp)
        return {"generated": picture_grid(images, perturbations, x_hat)}

    def state(self) -> Message:
        message = super().state()
        message.facts["ema_steps"] = self.ema_steps
        if self.kept is not None:
            message.states["kept"] = self.kept
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        self.ema_steps = state.facts["ema_steps"]
        self.kept = state.states.get("kept")


class FedDAGServer(SHAServer):
    """SHA with a warm-up of FedAvg rounds; the generator (and the global student of type 2) are averaged along with the model."""

    Hyper: ClassVar[type] = FedDAGHyper
    hyper: FedDAGHyper

    def __init__(self, context: ServerContext, hyper: FedDAGHyper):
        super().__init__(context, hyper)
        self.warmup = min(hyper.warmup, context.rounds // 4)
        if self.warmup < hyper.warmup:
            text = f"warm-up of {self.warmup} instead of {hyper.warmup} rounds: it takes at most a quarter of {context.rounds} rounds"
            context.events.add("warning", text)
        if hyper.ndag:
            self.companions["generator"] = initial_generator(context.task, context.seed, hyper).state_dict()
        if hyper.distribution == "type2":
            self.companions["student"] = self.model

    def steps(self) -> list[Step]:
        warm_up = [Step("warm_up", round) for round in range(self.warmup)]
        return [*warm_up, *(step for step in super().steps() if step.round >= self.warmup)]

    def accept(self, step: Step, replies: Mapping[str, Message]) -> None:
        super().accept(step, replies)
        if step.phase == "warm_up" and "student" in self.companions:
            self.companions["student"] = self.model

    def delivery(self, site: str) -> Message:
        message = super().delivery(site)
        if self.hyper.pictures and "generator" in self.companions and site in self.context.sites:
            message.states["generator"] = self.companions["generator"]
        return message
