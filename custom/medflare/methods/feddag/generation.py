"""NDAG: what a site does on every batch (FedDAG, Sec. III-B, Alg. 1): the generator's step, the student's, the teacher's update."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from medflare.core.rng import seeded
from medflare.data.sites.site import Site
from medflare.data.splits import Batch
from medflare.methods.feddag.formulas import discrepancy, ema_update, sharpness_perturbation, similarity_loss
from medflare.methods.feddag.generator import DomainGenerator, generated
from medflare.methods.feddag.hyper import FedDAGSiteHyper
from medflare.methods.parts.training import trainable
from medflare.networks.features import FeatureNetwork, pooled
from medflare.tasks.config import TaskConfig


def build_generator(task: TaskConfig, hyper: FedDAGSiteHyper) -> DomainGenerator:
    """The generator of these settings with random weights."""
    return DomainGenerator(task.image_channels, hyper.generator_width, hyper.generator_blocks, hyper.generator_scale, task.spatial_dims)


def initial_generator(task: TaskConfig, seed: int, hyper: FedDAGSiteHyper) -> DomainGenerator:
    """The generator that every participant starts from.

    Args:
        task: gives the channels.
        seed: of the run.
        hyper: gives width, blocks and scale.
    """
    with seeded(seed, "initial", "generator"):
        return build_generator(task, hyper)


class AdversarialGeneration:
    """NDAG (Sec. III-B, Alg. 1): one step of the generator and one of the student on each batch; the teacher follows.

    Args:
        site: gives loss, optimizers and device.
        hyper: the site half's hyper-parameters.
        student: the network that learns from generated images.
        teacher: follows the student by EMA; kept in evaluation mode.
        generator: images (N, C, H, W) -> perturbations of the same shape.
    """

    def __init__(self, site: Site, hyper: FedDAGSiteHyper, student: FeatureNetwork, teacher: FeatureNetwork, generator: nn.Module):
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
        """f = T(x): features (N, D) of the originals, the same for both stages.

        Args:
            images: (N, C, H, W).
        """
        return pooled(self.teacher.features_and_output(images)[0])

    @torch.no_grad()
    def student_images(self, images: Tensor) -> Tensor:
        """x^ of the student's stage: fixed images of the generator as it is now.

        Args:
            images: (N, C, H, W).

        Returns:
            (N, C, H, W) without a graph; α G(x) alone where `train_on` is "perturbation".
        """
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
        """L_S = L_sim + L_task and its parts; L_task alone, on the originals, without generated images.

        Args:
            model: the student, or a model in its place.
            images: the originals (N, C, H, W).
            x_hat: the generated images (N, C, H, W); None without.
            targets: as in `data.splits.Split`.
            reference: f, features of the originals (N, D); None without generated images.

        Returns:
            The scalars "task", "student" (what is minimised) and, with generated images, "similarity".
        """
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
    """One optimiser step; with rho > 0 along the gradient at θ + ε (FedSAM: Caldarola et al., ECCV 2022), ε as in SHA.

    Args:
        model: changed in place.
        optimizer: of its trainable parameters.
        loss: computes the batch's loss anew at the weights of the moment.
        rho: length of ε; 0 for a plain step.
    """
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
