"""DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Alg. 1) with Opacus;
needs `medflare[privacy]`.

    g_t <- (Σ_{i in B_t} g_t(x_i) min(1, C / ||g_t(x_i)||_2) + N(0, σ² C² I)) / L

B_t holds every patient with probability q, by one image each, and L = q · patients is its expected
size. Each image gets a copy of the network; Opacus clips the gradients and has the accountant.
Noise and samples come from NumPy's generator: PyTorch's takes 32 bits of a seed on the CPU, few
enough to try them all.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
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
        """Clips and adds as Opacus, without the patients whose gradient is not finite: clipping
        makes it 0 · inf, which is NaN, and NaN plus noise is NaN.
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
    """Raises ConfigError for a network of which an image alone has no gradients.

    Tries noise of the shape of `images` (N, C, ...); the network must not be used afterwards.
    """
    parameters = [weight for weight in network.parameters() if weight.requires_grad]

    def sum_of_output(model: nn.Module, image: Tensor, _: Tensor) -> Tensor:
        return model(image).sum()

    try:
        with seeded(0, "check gradients"):
            noise = torch.rand_like(images)
            _note_gradients(network, parameters, sum_of_output, noise, noise)
    except (NotImplementedError, RuntimeError, ValueError, AttributeError, TypeError) as error:
        name = network.settings["spec"]["name"]
        raise ConfigError(
            f"dp_noise: network {name} cannot be trained with DP-SGD, which gives it each image "
            f"alone ({one_line(error)}); take unet, small_cnn or vgg11"
        ) from error


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
        model: gets each image alone.
        release: noise σ, sampling rate q and number of steps.
        clip: C, the largest norm of one patient's gradient.
        random: the source of samples, augmentation, dropout and noise.
        loss: (model, images, targets) -> mean loss of the images; default: the task's loss of the
            model's output.
    """
    model.train()
    noisy = NoisyOptimizer(
        optimizer,
        random,
        noise_multiplier=release.noise,
        max_grad_norm=clip,
        expected_batch_size=release.rate * training_patients(site),
    )

    def of_batch(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        return site.loss(network(images), targets)

    try:
        with seeded(int(random.integers(2**62)), "dropout"):
            for images, targets, _ in drawn_patients(site, release.rate, release.steps, random):
                noisy.zero_grad(set_to_none=True)
                _note_gradients(model, noisy.params, loss or of_batch, images, targets)
                noisy.step()
    finally:
        noisy.zero_grad(set_to_none=True)
        for parameter in noisy.params:
            vars(parameter).pop("grad_sample", None)


def _note_gradients(
    model: nn.Module, parameters: list[nn.Parameter], loss: Loss, images: Tensor, targets: Tensor
) -> None:
    """Sets every parameter's `grad_sample` (images, *shape), which Opacus clips.

    Each image gets a copy of the network: layers can mix no two, and what they keep of an image, in
    a buffer, a weight or an attribute, is gone with the copy. No noise would be added to it.
    """
    trained = {id(parameter) for parameter in parameters}
    names = [name for name, weight in model.named_parameters() if id(weight) in trained]
    samples = [weight.new_zeros((len(images), *weight.shape)) for weight in parameters]
    for row, (image, target) in enumerate(zip(images, targets, strict=True)):
        network = copy.deepcopy(model)
        weights = dict(network.named_parameters())
        value = loss(network, image[None], target[None])
        gradients = torch.autograd.grad(value, [weights[name] for name in names], allow_unused=True)
        for sample, gradient in zip(samples, gradients, strict=True):
            if gradient is not None:
                sample[row] = gradient
    for weight, sample in zip(parameters, samples, strict=True):
        weight.grad_sample = sample  # type: ignore[attr-defined]


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
