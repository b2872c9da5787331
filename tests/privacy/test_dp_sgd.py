"""DP-SGD by hand: clipping, averaging, noise and epsilon; per-image gradients of the task networks against plain autograd."""

import math
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("opacus", reason="needs medflare[privacy]")

from opacus.accountants import RDPAccountant
from scipy.stats import kstest

from helpers.picture_sites import SEGMENTATION, numbered_split
from helpers.small_tasks import tiny_phantom
from medflare.core.errors import Aborted, ConfigError
from medflare.data.loading import Batch, SiteData, Split
from medflare.federation.local.loop import run_local
from medflare.methods.catalogue import get_method, method_names
from medflare.privacy.dp_sgd import check_gradients, drawn_patients, epsilon_of, train_dp_sgd
from medflare.privacy.ledger import Release, training_patients
from medflare.tasks.config import load_task
from medflare.training.site import Site
from methods import squares


def linear_site(values: list[float], batch_size: int = 4) -> Site:
    """Image i is 16 x 16 pixels of value values[i]; its class is ignored by the losses below."""
    task = squares.task("classification", batch_size=batch_size)
    images = torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 1, 16, 16).contiguous()
    names = tuple(map(str, range(len(values))))
    split = Split(images, torch.zeros(len(values), dtype=torch.long), names, names)
    return Site("A", task, SiteData(split, split, split), 0)


def mean_pixel(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """w times the mean pixel x_i, whose gradient by w is x_i."""
    return model(images.mean(dim=(1, 2, 3)).unsqueeze(1)).mean()


def trained(
    model: nn.Module,
    site: Site,
    *,
    clip: float,
    noise: float = 0,
    rate: float = 1,
    steps: int = 1,
    loss: Any = mean_pixel,
    seed: int = 0,
) -> list[Tensor]:
    """`model` after plain gradient descent with rate 1; returns its parameters' moves, so minus the summed gradients."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train_dp_sgd(
        model, optimizer, site, Release(noise, rate, steps), clip, np.random.default_rng(seed), loss
    )
    return [
        parameter.detach() - origin
        for parameter, origin in zip(model.parameters(), before, strict=True)
    ]


class TestStep:
    def test_each_step_takes_its_own_gradients(self) -> None:
        """Three steps of (0.5 - 1 + 1) / 3."""
        site = linear_site([0.5, -3.0, 2.0])
        (move,) = trained(nn.Linear(1, 1, bias=False), site, clip=1.0, steps=3)
        assert move.item() == pytest.approx(-0.5, abs=1e-6)

    def test_the_mean_of_clipped_gradients(self) -> None:
        """Gradients 0.5, -3 and 2 clipped to 1: (0.5 - 1 + 1) / 3."""
        (move,) = trained(nn.Linear(1, 1, bias=False), linear_site([0.5, -3.0, 2.0]), clip=1.0)
        assert move.item() == pytest.approx(-0.5 / 3, abs=1e-6)

    def test_all_parameters_are_clipped_together(self) -> None:
        """The gradient (x, 1) of weight and bias has the norm sqrt(x² + 1), 5/4 for x = 3/4: clipped to 1 it is (3/5, 4/5)."""
        weight, bias = trained(nn.Linear(1, 1), linear_site([0.75]), clip=1.0)
        assert weight.item() == pytest.approx(-0.6, abs=1e-5) and bias.item() == pytest.approx(
            -0.8, abs=1e-5
        )

    def test_divided_by_the_expected_number_of_patients(self) -> None:
        """Whoever is drawn, of gradients of 1 the step takes (number drawn) / (rate · patients)."""
        site = linear_site([1.0] * 10)
        moves = set()
        for seed in range(20):
            model = nn.Linear(1, 1, bias=False)
            (weight,) = trained(model, site, clip=5.0, rate=0.4, seed=seed)
            moves.add(round(weight.item(), 5))
        assert len(moves) > 3
        for move in moves:
            assert any(math.isclose(-move, drawn / 4, abs_tol=1e-4) for drawn in range(11))

    def test_noise_has_the_deviation_that_is_accounted_for(self) -> None:
        """Gradients of zero leave N(0, (σ C / L)²): σ = 2, C = 3, L = 4."""
        nothing = lambda model, images, targets: 0 * mean_pixel(model, images, targets)  # noqa: E731
        (move, _) = trained(
            nn.Linear(1, 4000), linear_site([0.0] * 4), clip=3.0, noise=2.0, loss=nothing
        )
        assert kstest(move.flatten().numpy() / (2.0 * 3.0 / 4), "norm").pvalue > 1e-3

    def test_an_empty_batch_is_a_step_of_noise(self) -> None:
        site = linear_site([1.0])
        assert not any(
            move.any() for move in trained(nn.Linear(1, 1), site, clip=1.0, rate=1e-9, steps=3)
        )
        (move, _) = trained(nn.Linear(1, 50), site, clip=1.0, rate=0.01, noise=1.0)
        assert move.abs().min() > 0

    @pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
    def test_a_gradient_that_is_not_finite_is_left_out(self, value: float) -> None:
        """Of the gradients (x, 1) one overflows, or its norm does: the others and the noise stay.

        A model can be made to overflow for one patient only; NaN would say so through any noise.
        """
        ordinary, overflowing = (
            trained(nn.Linear(1, 1), linear_site([1.0, last]), clip=1.0, noise=1.0)
            for last in (0.0, value)
        )
        (of_zero_weight, of_zero_bias) = ordinary
        (weight, bias) = overflowing
        assert torch.allclose(weight, of_zero_weight)
        # The ordinary patient's gradient (0, 1) is half of a sum over two.
        assert torch.allclose(bias, of_zero_bias + 0.5)

    def test_opacus_hooks_are_removed(self) -> None:
        model = nn.Linear(1, 1)
        trained(model, linear_site([1.0]), clip=1.0)
        parameter = next(model.parameters())
        assert parameter.grad is None and not hasattr(parameter, "grad_sample")
        assert not model._forward_hooks and not model._backward_hooks
        trained(model, linear_site([1.0]), clip=1.0)  # and goes on again


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("segmentation", {"name": "unet", "channels": [4, 8], "norm": "instance"}),
        (
            "segmentation",
            {"name": "unet", "channels": [4, 8], "norm": "instance", "num_res_units": 1},
        ),
        ("classification", {"name": "small_cnn", "channels": [4, 8]}),
        ("classification", {"name": "compact_selector", "side": 4, "hidden": 8}),
    ],
)
def test_gradients_of_task_networks_equal_autograds(kind: str, network: dict[str, Any]) -> None:
    """Without noise and with every patient drawn, a step is the mean over images of each one's clipped gradient."""
    task = squares.task(kind, network=network, batch_size=3)
    site = squares.site(task=task, counts=(3, 1, 1))
    gradients = []
    for image, target in zip(site.data.train.images, site.data.train.targets, strict=True):
        model = site.network().train()
        gradients.append(
            torch.autograd.grad(
                site.loss(model(image[None]), target[None]), list(model.parameters())
            )
        )
    norms = []
    for gradient in gradients:
        norms.append(torch.cat([part.flatten() for part in gradient]).norm().item())
    clip = sorted(norms)[1]  # one of three is clipped
    factors = [min(1.0, clip / norm) for norm in norms]
    assert min(factors) < 1 - 1e-4
    expected = []
    for parts in zip(*gradients, strict=True):
        expected.append(sum(f * part for f, part in zip(factors, parts, strict=True)) / 3)
    moves = trained(site.network(), site, clip=clip, loss=None)
    for move, gradient in zip(moves, expected, strict=True):
        torch.testing.assert_close(-move, gradient, atol=1e-5, rtol=1e-3)


class TestEpsilon:
    @pytest.mark.parametrize(
        ("noise", "rate", "steps"), [(1.0, 0.01, 1000), (2.0, 0.25, 40), (0.7, 1.0, 5)]
    )
    def test_equals_opacus_step_by_step(self, noise: float, rate: float, steps: int) -> None:
        accountant = RDPAccountant()
        for _ in range(steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
        assert epsilon_of([Release(noise, rate, steps)], 1e-5) == pytest.approx(
            accountant.get_epsilon(1e-5)
        )

    def test_bounds_the_gaussian_mechanism_without_sampling(self) -> None:
        """T steps of deviation σ are one of σ / sqrt(T), whose exact δ(ε) is Balle and Wang's (ICML 2018, Theorem 8)."""
        from scipy.stats import norm

        steps = 4
        noise = 4.0
        epsilon = epsilon_of([Release(noise, 1.0, steps)], 1e-5)
        ratio = math.sqrt(steps) / noise
        exact_delta = norm.cdf(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * norm.cdf(
            -ratio / 2 - epsilon / ratio
        )
        assert 1e-8 < exact_delta < 1e-5

    def test_grows_with_every_release(self) -> None:
        one = Release(1.0, 0.1, 10)
        two = Release(3.0, 0.2, 10)
        assert epsilon_of([], 1e-5) == 0
        assert 0 < epsilon_of([two], 1e-5) < epsilon_of([one], 1e-5) < epsilon_of([one, two], 1e-5)
        assert epsilon_of([one, one], 1e-5) == pytest.approx(
            epsilon_of([one._replace(steps=20)], 1e-5)
        )


class TestDrawnPatients:
    @pytest.fixture
    def site(self) -> Site:
        """Patient k of eight has the images k, k + 8, k + 16, ...: five, or four of p4 to p7."""
        task = load_task(
            {**SEGMENTATION, "augment": [{"name": "RandFlip", "prob": 0.5, "spatial_axis": 0}]}
        )
        split = numbered_split(36, task)
        split = Split(
            split.images, split.targets, tuple(f"p{n % 8}" for n in range(len(split))), split.names
        )
        return Site("A", task, SiteData(split, split, split), 0)

    def test_each_patient_joins_independently_by_one_image(self, site: Site) -> None:
        assert training_patients(site) == 8
        drawn = [
            batch.index % 8 for batch in drawn_patients(site, 0.3, 2000, np.random.default_rng(1))
        ]
        for rows in drawn:
            assert len(set(rows.tolist())) == len(rows), "nobody twice"
        sizes = torch.tensor([float(len(rows)) for rows in drawn])
        assert sizes.mean().item() == pytest.approx(8 * 0.3, abs=0.1)
        assert sizes.var().item() == pytest.approx(8 * 0.3 * 0.7, abs=0.2), (
            "a binomial number of them"
        )
        shares = torch.bincount(torch.cat(drawn), minlength=8) / 2000
        assert shares.sub(0.3).abs().max() < 0.05, "patients with fewer images are drawn as often"

    def test_images_and_masks_are_augmented_together(self, site: Site) -> None:
        (batch,) = drawn_patients(site, 1.0, 1, np.random.default_rng(3))
        assert batch.images[:, 0, 0, 0].tolist() == batch.index.tolist()
        upright = site.data.train.targets[batch.index]
        flipped = [
            torch.equal(mask, plain.flip(0))
            for mask, plain in zip(batch.targets, upright, strict=True)
        ]
        assert 0 < sum(flipped) < 8
        for flip, mask, plain in zip(flipped, batch.targets, upright, strict=True):
            assert flip or torch.equal(mask, plain)

    def test_an_augmentation_that_fails_on_a_patient_does_not_end_the_round(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its failure would leave the site without noise, and tell of a pixel."""
        augmented = site.augmented

        def failing(batch: Batch, random: np.random.RandomState) -> Batch:
            if (batch.images % 8 == 3).any():
                raise OverflowError("of patient 3")
            return augmented(batch, random)

        (expected,) = drawn_patients(site, 1.0, 1, np.random.default_rng(3))
        monkeypatch.setattr(site, "augmented", failing)
        (batch,) = drawn_patients(site, 1.0, 1, np.random.default_rng(3))
        assert torch.equal(batch.index, expected.index)
        assert torch.equal(batch.images, site.data.train.images[batch.index])
        (row,) = (batch.index % 8 == 3).nonzero()[0]
        assert torch.equal(batch.targets[row], site.data.train.targets[batch.index[row]])

    def test_empty_batches_and_abort(self, site: Site) -> None:
        assert [
            batch.images.shape for batch in drawn_patients(site, 0.0, 2, np.random.default_rng())
        ] == [(0, 1, 16, 16)] * 2
        site.abort = lambda: True
        with pytest.raises(Aborted):
            next(drawn_patients(site, 0.5, 1, np.random.default_rng()))


class Idle(nn.Module):
    settings = MappingProxyType({"spec": {"name": "own"}})

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.used(images)


class Refusing(Idle):
    def forward(self, images: Tensor) -> Tensor:
        raise TypeError("two\nlines")


class Frozen(Idle):
    def __init__(self) -> None:
        super().__init__()
        self.idle.requires_grad_(False)


class Constant(Idle):
    def forward(self, images: Tensor) -> Tensor:
        return torch.zeros(len(images), 2)


class Mixing(Idle):
    """As an activation of MONAI that is given the dimension of the images."""

    def forward(self, images: Tensor) -> Tensor:
        return self.used(images - images.mean(dim=0)) + self.idle(images[:, :2])


class Averaging(nn.Module):
    """Keeps the mean of its images, as an exponential moving average does."""

    mean: Tensor
    settings = Idle.settings

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * images.detach().mean(dim=0)
        return self.used(images - self.mean)


class Codebook(Idle):
    """Overwrites a weight without a gradient in every forward pass, as MONAI's VQVAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.idle.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        before = self.idle.weight[:, 0].clone()
        self.idle.weight.data[:, 0] = images.detach().mean()
        return self.used(images) + before


class Remembering(Idle):
    """Keeps the last batch in an attribute."""

    last: Tensor | float = 0.0

    def forward(self, images: Tensor) -> Tensor:
        shifted = images - self.last
        self.last = images.detach().mean()
        return self.used(shifted)


@pytest.mark.parametrize(
    ("kind", "reason"), [(Refusing, "two"), (Constant, "does not require grad")]
)
def test_networks_without_gradients_are_refused_in_one_line(
    kind: type[nn.Module], reason: str
) -> None:
    network: Any = kind()
    with pytest.raises(ConfigError, match=f"network own .*{reason}") as refused:
        check_gradients(network, torch.zeros(2, 3))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [Idle, Frozen, Mixing, Averaging, Codebook, Remembering])
def test_no_layer_mixes_patients(kind: type[nn.Module]) -> None:
    """Replacing one of four patients moves the clipped sum by at most 2 C, whatever a layer does
    with a batch; what is not trained keeps nothing of them.
    """
    sums = []
    for last in (1.0, 50.0):
        torch.manual_seed(0)
        network: Any = kind()
        check_gradients(kind(), torch.zeros(2, 3))  # type: ignore[arg-type]
        trainable = {name for name, weight in network.named_parameters() if weight.requires_grad}
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        site = linear_site([0.2, -0.4, 0.9, last])
        moves = trained(network, site, clip=0.1, loss=first_output)
        sums.append(torch.cat([move.flatten() for move in moves]) * 4)
        for name, tensor in network.state_dict().items():
            assert name in trainable or torch.equal(tensor, before[name])
        assert getattr(network, "last", 0.0) == 0.0
    assert 0 < (sums[1] - sums[0]).norm() <= 2 * 0.1 + 1e-6


def first_output(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    return model(images[:, 0, 0, :3])[:, 0].mean()


PRIVATE = [name for name in method_names() if not get_method(name).dp_unsupported_reason]


@pytest.mark.parametrize("name", [name for name in PRIVATE if get_method(name).trains])
def test_every_method_that_offers_dp_sgd_runs_with_it(name: str) -> None:
    """Nothing that the method sends is refused, an outside site's models included."""
    task = tiny_phantom()
    outside = ["site-3"] if get_method(name).outside else []
    hyper: dict[str, Any] = (
        {"rho": 0.0} if name == "sha" else {}
    )  # its perturbed models are refused
    results = run_local(name, task, 2, outside=outside, rounds=2, seed=0, dp_noise=1.0, **hyper)
    assert (results["status"], results["reason"]) == ("COMPLETED", None)
