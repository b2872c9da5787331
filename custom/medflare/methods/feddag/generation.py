"""NDAG: what a site does on every batch (FedDAG, Sec. III-B, Alg. 1): the generator's step, the student's, the teacher's update."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from medflare.core.rng import seeded
from medflare.data.loading import Batch
from medflare.methods.feddag.formulas import discrepancy, ema_update, sharpness_perturbation, similarity_loss
from medflare.methods.feddag.generator import DomainGenerator, generated
from medflare.methods.feddag.hyper import FedDAGSiteHyper
from medflare.methods.parts.normalisation import batch_statistics, still_statistics
from medflare.networks.features import FeatureNetwork, pooled
from medflare.tasks.config import TaskConfig
from medflare.training.epochs import trainable
from medflare.training.site import Site


def build_generator(task: TaskConfig, hyper: FedDAGSiteHyper) -> DomainGenerator:
    """The generator of these settings with random weights."""
    return DomainGenerator(task.image_channels, hyper.generator_width, scale=hyper.generator_scale, dims=task.spatial_dims)


def initial_generator(task: TaskConfig, seed: int, hyper: FedDAGSiteHyper) -> DomainGenerator:
    """The generator that every participant starts from."""
    with seeded(seed, "initial", "generator"):
        return build_generator(task, hyper)


class AdversarialGeneration:
    """NDAG (Sec. III-B, Alg. 1): one step of the generator and one of the student on each batch; the teacher follows.

    Args:
        generator: images (N, C, H, W) -> perturbations of the same shape.
        unit: what α counts, in values of the network's input: one number, or one for each channel (C, 1, 1).
    """

    def __init__(
        self,
        site: Site,
        hyper: FedDAGSiteHyper,
        student: FeatureNetwork,
        teacher: FeatureNetwork,
        generator: nn.Module,
        unit: Tensor | float = 1.0,
    ):
        self.site, self.hyper, self.unit = site, hyper, unit
        self.student, self.teacher, self.generator = student, teacher, generator
        self.teacher.eval()
        self.followed = teacher.state_dict(), student.state_dict()  # share memory with the networks
        self.optimizers = {"model": site.optimizer(trainable(student)), "generator": site.optimizer(trainable(generator))}

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

        Normalised by the batch, as the student's are, so that equal networks give equal images equal features.
        """
        with batch_statistics(self.teacher):
            return pooled(self.teacher.features_and_output(images)[0])

    @torch.no_grad()
    def student_images(self, images: Tensor) -> Tensor:
        """x^ of the student's stage: fixed images of the generator as it is now.

        Returns:
            (N, C, H, W) without a graph; α G(x) alone where `train_on` is "perturbation".
        """
        perturbation = self.generator(images)
        if self.hyper.train_on == "perturbation":
            return self.hyper.alpha * self.unit * perturbation
        return generated(images, perturbation, self.hyper.alpha, unit=self.unit)

    def _generator_step(self, images: Tensor, targets: Tensor, reference: Tensor) -> dict[str, Tensor]:
        """Stage 1: G away from the teacher's features (Eq. 1), within what is still classified well (Eq. 3); S and T frozen.

        The student is attacked as it is when it trains. On running statistics G learns a constant shift of colours, which normalisation
        by the batch takes away again: nothing would be left of the attack in stage 2.
        """
        self.student.eval()  # a frozen model also keeps its running statistics
        x_hat = generated(images, self.generator(images), self.hyper.alpha, unit=self.unit)
        with batch_statistics(self.student):
            features, logits = self.student.features_and_output(x_hat)
        away = discrepancy(reference, pooled(features), self.hyper.m)
        task = self.site.loss(logits, targets)
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
            losses.update(self.student_losses(images, x_hat, targets, reference))
            return losses["student"]

        sharpness_aware_step(self.student, self.optimizers["model"], loss, self.hyper.sam_rho)
        return losses

    def student_losses(self, images: Tensor, x_hat: Tensor | None, targets: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        """L_S = L_sim + L_task and its parts; L_task alone, on the originals, without generated images.

        The student's running statistics are the originals': they serve images of hospitals, and generated ones among them would shift
        every prediction.

        Args:
            images: the originals (N, C, H, W).
            x_hat: the generated images (N, C, H, W); None without.
            targets: as in `data.loading.Split`.
            reference: f, features of the originals (N, D); None without generated images.

        Returns:
            The scalars "task", "student" (what is minimised) and, with generated images, "similarity".
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
        return {"task": task, "similarity": similarity, "student": task + self.hyper.similarity_weight * similarity}


def sharpness_aware_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], rho: float) -> None:
    """One optimiser step; with rho > 0 along the gradient at θ + ε (FedSAM: Caldarola et al., ECCV 2022), ε as in SHA.

    Args:
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


def channel_deviations(batches: Iterable[Tensor]) -> list[float]:
    """The standard deviation of every channel over all pixels of all images (population form, float64); 0 for a constant channel.

    Examples:
        >>> channel_deviations([torch.tensor([[[1.0, 3.0], [2.0, 2.0]]]), torch.tensor([[[1.0, 3.0], [2.0, 2.0]]])])
        [1.0, 0.0]
    """
    moments = [
        (values.shape[1], values.mean(dim=1), values.square().mean(dim=1))
        for values in (images.to(torch.float64).transpose(0, 1).flatten(1) for images in batches)
    ]
    counts = torch.tensor([count for count, _, _ in moments], dtype=torch.float64).unsqueeze(1)
    mean, square = ((counts * torch.stack(part).cpu()).sum(dim=0) / counts.sum() for part in list(zip(*moments, strict=True))[1:])
    return (square - mean.square()).clamp(min=0).sqrt().tolist()
