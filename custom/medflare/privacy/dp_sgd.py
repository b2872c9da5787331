"""DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Alg. 1) with Opacus;
needs `medflare[privacy]`.

    g_t <- (Σ_{i in B_t} g_t(x_i) min(1, C / ||g_t(x_i)||_2) + N(0, σ² C² I)) / L

B_t holds every patient with probability q, by one image each, and L = q · patients is its expected
size. Opacus gives the gradient of every image and the accountant. Noise and samples come from
NumPy's generator: PyTorch's takes 32 bits of a seed on the CPU, few enough to try them all.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from medflare.core.errors import ConfigError, one_line
from medflare.core.rng import seeded
from medflare.data.loading import Batch
from medflare.networks.features import FeatureNetwork
from medflare.privacy.ledger import Release, training_patients
from medflare.training.batches import rows_of_patients
from medflare.training.epochs import Loss
from medflare.training.site import Site

_log = logging.getLogger(__name__)


def epsilon_of(releases: Sequence[Release], delta: float) -> float:
    """Upper bound of ε at δ of all releases: Rényi DP of the sampled Gaussian mechanism (Mironov et
    al., arXiv 1908.10530).

    Neighbouring data sets differ by one patient, added or removed.
    """
    accountant = RDPAccountant()
    accountant.history = [tuple(release) for release in releases]
    with warnings.catch_warnings():  # another order α might give a smaller bound
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


class NoisyOptimizer(DPOptimizer):
    """Opacus's optimizer with noise from a NumPy generator; settings: noise_multiplier σ,
    max_grad_norm C, expected_batch_size L.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, random: np.random.Generator, **settings: Any
    ):
        super().__init__(optimizer, **settings)
        self.random = random

    def clip_and_accumulate(self) -> None:
        """As Opacus, without the patients whose gradient is not finite: clipping makes it 0 · inf,
        which is NaN, and NaN plus noise is NaN.
        """
        samples = self.grad_samples
        if len(samples[0]):
            finite = [sample.reshape(len(sample), -1).isfinite().all(dim=1) for sample in samples]
            not_finite = ~torch.stack(finite).all(dim=0)
            for sample in samples:
                sample[not_finite] = 0.0
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Sets every parameter's gradient to the clipped sum plus N(0, σ² C²) noise; Opacus divides
        by L afterwards.
        """
        deviation = self.noise_multiplier * self.max_grad_norm
        for parameter in self.params:
            noise = torch.from_numpy(self.random.normal(0.0, deviation, tuple(parameter.shape)))
            parameter.grad = parameter.summed_grad.view_as(parameter) + noise.to(parameter)


def check_gradients(network: FeatureNetwork, images: Tensor) -> None:
    """Raises ConfigError for a layer that Opacus does not support, that changes its input in place,
    that keeps numbers of the images in a buffer, where no noise is added, that mixes the images of
    a batch, or that the network itself freezes (`TaskConfig.freeze` comes later, in the training).

    Tries gradients of each image with noise of the shape of `images` (2, C, ...); the network must
    not be used afterwards.
    """
    buffers = {path: buffer.clone() for path, buffer in network.named_buffers()}
    try:
        hooks = GradSampleModule(network, loss_reduction="mean")
        with seeded(0, "check gradients"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            hooks(torch.rand_like(images)).sum().backward()
        for path, buffer in network.named_buffers():
            if not torch.equal(buffer, buffers[path]):
                raise ValueError(f"buffer {path} changes with the images")
        for path, weight in network.named_parameters():
            if not weight.requires_grad:
                raise ValueError(f"{path} is frozen")
            if getattr(weight, "grad_sample", None) is None:
                raise ValueError(f"{path} has no part in the output")
        _check_independent(network, images)
    except (NotImplementedError, RuntimeError, ValueError, AttributeError, TypeError) as error:
        name = network.settings["spec"]["name"]
        raise ConfigError(
            f"dp_noise: network {name} cannot be trained with DP-SGD ({one_line(error)}); "
            "choose an activation that changes nothing in place, or take unet, small_cnn or vgg11"
        ) from error


@torch.no_grad()
def _check_independent(network: FeatureNetwork, images: Tensor) -> None:
    """Raises ValueError if the output of an image changes with the other one of its batch, as with
    a softmax over the batch: then no gradient is of one patient.

    With random weights, since a start may be 0, and noise, also of large numbers, of the shape of
    `images` (2, C, ...).
    """
    with seeded(0, "weights"):
        for weight in network.parameters():
            weight.normal_(0.0, 0.1)
        noise = torch.rand_like(images)
    for scale in (1.0, 1000.0):
        first, second = scale * noise
        outputs = []
        for other in (second, -second):
            with seeded(0, "dropout"):
                outputs.append(network(torch.stack([first, other]))[0])
        if not torch.equal(*outputs):
            raise ValueError("it mixes the images of a batch")


def train_dp_sgd(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    site: Site,
    release: Release,
    clip: float,
    random: np.random.Generator,
    loss: Loss | None = None,
) -> None:
    """Trains `model` in place for the steps of `release`.

    Args:
        model: without layers that mix the images of a batch (`settings.check_private`).
        release: noise σ, sampling rate q and number of steps.
        clip: C, the largest norm of one patient's gradient.
        random: the source of samples, augmentation, dropout and noise.
        loss: (model, images, targets) -> mean loss of the images; default: the task's loss of the
            model's output.
    """
    model.train()
    expected = release.rate * training_patients(site)
    hooks = GradSampleModule(model, loss_reduction="mean")
    noisy = NoisyOptimizer(
        optimizer,
        random,
        noise_multiplier=release.noise,
        max_grad_norm=clip,
        expected_batch_size=expected,
    )
    try:
        with seeded(int(random.integers(2**62)), "dropout"), warnings.catch_warnings():
            # Expected of the first layer:
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            for images, targets, _ in drawn_patients(site, release.rate, release.steps, random):
                noisy.zero_grad(set_to_none=True)
                if not len(images):  # no patient was drawn: the step is noise alone
                    for parameter in noisy.params:
                        parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
                elif loss is None:
                    site.loss(model(images), targets).backward()
                else:
                    loss(model, images, targets).backward()
                noisy.step()
    finally:
        noisy.zero_grad(set_to_none=True)
        hooks.remove_hooks()
        hooks.del_grad_sample()


def drawn_patients(
    site: Site, rate: float, steps: int, random: np.random.Generator
) -> Iterator[Batch]:
    """`steps` Poisson samples of the site's training patients, each with probability `rate`; a
    batch may be empty.

    A batch has one random image of every drawn patient, so patients with many images have no more
    influence. `random` is the source of every draw, augmentation included; DP-SGD needs it to be
    secret.
    """
    rows = rows_of_patients(site.data.train.patients)
    # MONAI's kind of generator, on the same stream.
    augmenting = np.random.RandomState(random.bit_generator)
    for _ in range(steps):
        draws = zip(rows.values(), random.random(len(rows)) < rate, strict=True)
        chosen = [random.choice(images) for images, join in draws if join]
        batch = site.take("train", torch.tensor(chosen, dtype=torch.long), augmenting)
        yield _augmented(site, batch, augmenting) if chosen else batch


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def _augmented(site: Site, batch: Batch, random: np.random.RandomState) -> Batch:
    """The batch with each image augmented, apart from those whose augmentation fails: a failure
    would end the round, without noise, and tell of that patient's pixels.
    """
    images = []
    targets = []
    for row in range(len(batch.images)):
        one = Batch(*(values[row : row + 1] for values in batch))
        try:
            one = site.augmented(one, random)
        except Exception as error:  # of a transform that the task names
            _warn_once(f"images stay without augmentation: {one_line(error)}")
        images.append(one.images)
        targets.append(one.targets)
    return Batch(torch.cat(images), torch.cat(targets), batch.index)
