"""DSBN and Tent on layers that are found by type: statistics of all images; scale and shift alone, online and episodic."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.small_tasks import small_task
from medflare.adaptation.dsbn import (
    TargetStatistics,
    TestTimeNorm,
    batch_norm_layers,
    estimate_statistics,
)
from medflare.adaptation.tent import Tent, TentSettings, prediction_entropy
from medflare.core.errors import ConfigError, StateError
from medflare.core.states import copy_state
from medflare.data.loading import SiteData, Split
from medflare.methods.fedsm.super_model import SuperModel
from medflare.training.site import Site


def images(n: int, seed: int = 0, size: int = 8) -> Tensor:
    return 3 * torch.randn(n, 2, size, size, generator=torch.Generator().manual_seed(seed)) + 1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(2),
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, affine=False),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(3, 1, 3),
    ).eval()


class Classes(nn.Module):
    """Logits (N, 3) of one class, whatever the images are."""

    def __init__(self, label: int) -> None:
        super().__init__()
        self.label = label

    def forward(self, images: Tensor) -> Tensor:
        return torch.eye(3)[self.label].expand(len(images), -1)


def test_first_layer_has_mean_and_unbiased_variance_of_all_images() -> None:
    network: Any = model()
    shown = images(7)
    estimate_statistics(network, shown.split(3))  # batches of 3, 3 and 1
    torch.testing.assert_close(network[0].running_mean, shown.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(network[0].running_var, shown.transpose(0, 1).flatten(1).var(dim=1))


def test_weights_and_source_model_do_not_change() -> None:
    network = model()
    before = copy_state(network.state_dict())
    adapted = TargetStatistics(network)
    torch.testing.assert_close(adapted(images(2)), network(images(2)))  # not adapted yet
    adapted.adapt([images(4)])
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])
    changed = set()
    for name, tensor in adapted.model.state_dict().items():
        if not torch.equal(tensor, before[name]):
            changed.add(name)
    assert changed == {"0.running_mean", "0.running_var", "2.running_mean", "2.running_var"}


def test_one_image_with_one_value_per_channel_keeps_the_trained_statistics() -> None:
    network: Any = nn.Sequential(nn.Conv2d(2, 3, 8), nn.BatchNorm2d(3)).eval()
    trained = network[1].running_mean.clone()
    estimate_statistics(network, [images(1)])
    assert torch.equal(network[1].running_mean, trained)
    # Single values batch by batch, three of them in all.
    estimate_statistics(network, images(3).split(1))
    torch.testing.assert_close(network[1].running_mean, network[0](images(3)).mean(dim=(0, 2, 3)))


def test_one_value_per_channel_is_normalised_by_running_statistics() -> None:
    cases: list[tuple[Any, Tensor]] = [
        (nn.BatchNorm2d(3).eval(), torch.rand(1, 3, 1, 1)),
        (nn.BatchNorm1d(3).eval(), torch.rand(1, 3)),
    ]
    for layer, pixel in cases:
        layer.running_mean.fill_(2.0)
        torch.testing.assert_close(TestTimeNorm(layer)(pixel), layer(pixel))


def test_layer_used_twice() -> None:
    shared = nn.BatchNorm2d(2)
    network = nn.Sequential(shared, nn.ReLU(), shared)
    assert list(batch_norm_layers(network)) == ["0", "2"]
    estimate_statistics(network, [images(5)])
    assert shared.running_var is not None and torch.isfinite(shared.running_var).all()


def test_statistics_can_be_stored_and_restored() -> None:
    adapted = TargetStatistics(model())
    other = TargetStatistics(model())
    adapted.adapt([images(4)])
    kept = adapted.statistics()
    assert kept.keys() == {"0.running_mean", "0.running_var", "2.running_mean", "2.running_var"}
    other.load_statistics(kept)
    assert torch.equal(other(images(3)), adapted(images(3)))
    with pytest.raises(StateError, match="running_"):
        other.load_statistics({"0.running_mean": torch.zeros(2)})


def test_networks_without_batch_norm_or_its_scale_are_refused() -> None:
    instance = nn.Sequential(nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2, affine=True))
    for adapt in (TargetStatistics, partial(Tent, target="binary", settings=TentSettings())):
        with pytest.raises(ConfigError, match="BatchNorm"):
            adapt(instance)
    with pytest.raises(ConfigError, match="Tent"):
        Tent(nn.Sequential(nn.BatchNorm2d(2, affine=False)), "binary", TentSettings())


def classifier() -> nn.Sequential:
    """Images to probabilities of three classes, with dropout that must stay off."""
    torch.manual_seed(0)
    body = (
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
    )
    return nn.Sequential(*body, nn.Linear(4, 3), nn.Softmax(dim=1))


def test_entropy_by_hand() -> None:
    exclusive = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert prediction_entropy(exclusive, "multiclass").item() == pytest.approx(
        math.log(2) / 2, abs=1e-5
    )
    independent = torch.tensor([[[[0.5, 1.0]]]])
    assert prediction_entropy(independent, "binary").item() == pytest.approx(
        math.log(2) / 2, abs=1e-5
    )
    assert prediction_entropy(torch.full((1, 2, 1, 1), 0.5), "multilabel").item() == pytest.approx(
        math.log(2)
    )


def test_entropy_gradient_is_finite_where_predictions_are_certain() -> None:
    logits = torch.tensor([[200.0, -200.0], [0.0, 1.0]], requires_grad=True)
    prediction_entropy(logits.softmax(dim=1), "multiclass").backward()
    assert (
        logits.grad is not None
        and torch.isfinite(logits.grad).all()
        and logits.grad[1].abs().sum() > 0
    )


def test_only_scale_and_shift_change() -> None:
    source = classifier().eval()
    before = copy_state(source.state_dict())
    tent = Tent(source, "multiclass", TentSettings())
    start = copy_state(tent.model.state_dict())
    tent(images(4))
    changed = set()
    for name, tensor in tent.model.state_dict().items():
        if not torch.equal(tensor, start[name]):
            changed.add(name)
    assert changed == {"1.layer.weight", "1.layer.bias"}
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_online_predicts_before_its_step_and_accumulates() -> None:
    tent = Tent(classifier(), "multiclass", TentSettings(rate=0.05))
    unadapted = Tent(classifier(), "multiclass", TentSettings(rate=0.0))
    first = tent(images(6))
    torch.testing.assert_close(first, unadapted(images(6)))
    for _ in range(10):
        last = tent(images(6))
    assert prediction_entropy(last, "multiclass") < prediction_entropy(first, "multiclass")
    tent.reset()
    torch.testing.assert_close(tent(images(6)), first)


def test_many_images_are_cut_into_batches() -> None:
    shown = images(7)
    together = Tent(classifier(), "multiclass", TentSettings(rate=0.05), batch_size=3)
    separate = Tent(classifier(), "multiclass", TentSettings(rate=0.05))
    expected = torch.cat(list(map(separate, shown.split([3, 2, 2]))))
    assert torch.equal(together(shown), expected)
    assert not torch.allclose(
        expected[3:],
        Tent(classifier(), "multiclass", TentSettings(rate=0.0), batch_size=3)(shown)[3:],
    )


def test_episodic_predicts_after_its_steps_and_resets() -> None:
    tent = Tent(classifier(), "multiclass", TentSettings(rate=0.05, steps=3, episodic=True))
    first = tent(images(6))
    _ = tent(images(6, seed=1))
    again = tent(images(6))
    assert torch.equal(first, again)
    before = Tent(classifier(), "multiclass", TentSettings())(images(6))
    assert prediction_entropy(first, "multiclass") < prediction_entropy(before, "multiclass")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_tent_works_without_gradients(context: Any) -> None:
    expected = Tent(classifier(), "multiclass", TentSettings())
    expected(images(4))
    tent = Tent(classifier(), "multiclass", TentSettings())
    with context():
        tent(images(4))
        actual = tent(images(4))
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected(images(4)))


def test_tent_on_one_image() -> None:
    assert torch.isfinite(Tent(classifier(), "multiclass", TentSettings())(images(1))).all()
    # One value per channel: no variance.
    flat = nn.Sequential(nn.Conv2d(2, 3, 8), nn.BatchNorm2d(3), nn.Sigmoid()).eval()
    torch.testing.assert_close(
        Tent(flat, "multilabel", TentSettings(rate=0.0))(images(1)), flat(images(1))
    )


def test_a_layer_that_no_image_reaches_keeps_its_statistics() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.BatchNorm2d(2), nn.BatchNorm2d(2)

        def forward(self, images: Tensor) -> Tensor:
            return self.used(images)

    network: Any = Half().eval()
    shown = images(5)
    estimate_statistics(network, [shown])
    torch.testing.assert_close(network.used.running_mean, shown.mean(dim=(0, 2, 3)))
    assert torch.equal(network.idle.running_mean, torch.zeros(2))
    assert torch.equal(network.idle.running_var, torch.ones(2))


def test_an_adapted_model_chooses_for_patients_if_its_model_does() -> None:
    """Bright images choose site A; patient p has more of them than dark ones, q has none."""

    class Brightness(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            bright = images.mean(dim=(1, 2, 3)) - 0.5
            return 40 * torch.stack([bright, -bright], dim=1)

    task = small_task("classification")
    networks: list[nn.Module] = [nn.Sequential(model(), Classes(n)) for n in range(3)]
    level = torch.tensor([0.9, 0.8, 0.3, 0.2]).reshape(-1, 1, 1, 1)
    shown = level.expand(-1, 2, 16, 16)
    split = Split(shown, torch.zeros(4, dtype=torch.long), tuple("pppq"), tuple("abcd"), ())
    answers = {}
    for choose_by in ("patient", "image"):
        names = ["global", "A", "B"]
        deployed = SuperModel(task, networks, Brightness(), names, choose_by=choose_by)
        adapted = TargetStatistics(deployed.eval())
        parts = Site("A", task, SiteData(split, split, split)).predictions(adapted, "test")
        answers[choose_by] = torch.cat([part.argmax(dim=1) for part, _, _ in parts]).tolist()
    assert answers == {"patient": [1, 1, 1, 2], "image": [1, 1, 2, 2]}
