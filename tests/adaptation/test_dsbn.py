"""DSBN: statistics of all images for any batches, in layers actual by type."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medflare.adaptation.dsbn import TargetStatistics, TestTimeNorm, batch_norm_layers, estimate_statistics
from medflare.core.errors import ConfigError, DataError, StateError


def images(n: int, seed: int = 0, size: int = 8) -> Tensor:
    return 3 * torch.randn(n, 2, size, size, generator=torch.Generator().manual_seed(seed)) + 1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(3, 1, 3)
    ).eval()


def test_first_layer_has_mean_and_unbiased_variance_of_all_images() -> None:
    network: Any = model()
    shown = images(7)
    estimate_statistics(network, shown.split(3))  # batches of 3, 3 and 1
    torch.testing.assert_close(network[0].running_mean, shown.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(network[0].running_var, shown.transpose(0, 1).flatten(1).var(dim=1))


def test_weights_and_source_model_do_not_change() -> None:
    network = model()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    adapted = TargetStatistics(network)
    torch.testing.assert_close(adapted(images(2)), network(images(2)))  # not adapted yet
    adapted.adapt([images(4)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    changed = {name for name, tensor in adapted.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"0.running_mean", "0.running_var", "2.running_mean", "2.running_var"}


def test_one_image_with_one_value_per_channel_keeps_the_trained_statistics() -> None:
    network: Any = nn.Sequential(nn.Conv2d(2, 3, 8), nn.BatchNorm2d(3)).eval()
    trained = network[1].running_mean.clone()
    estimate_statistics(network, [images(1)])
    assert torch.equal(network[1].running_mean, trained)
    estimate_statistics(network, images(3).split(1))  # single values batch by batch, three of them in all
    torch.testing.assert_close(network[1].running_mean, network[0](images(3)).mean(dim=(0, 2, 3)))


def test_one_value_per_channel_is_normalised_by_running_statistics() -> None:
    layer, pixel = nn.BatchNorm2d(3).eval(), torch.rand(1, 3, 1, 1)
    assert layer.running_mean is not None
    layer.running_mean.fill_(2.0)
    torch.testing.assert_close(TestTimeNorm(layer)(pixel), layer(pixel))
    pooled = TestTimeNorm(nn.BatchNorm1d(3).eval())
    assert torch.isfinite(pooled(torch.rand(1, 3))).all() and torch.isfinite(pooled(torch.rand(2, 3))).all()


def test_layer_used_twice() -> None:
    shared = nn.BatchNorm2d(2)
    network = nn.Sequential(shared, nn.ReLU(), shared)
    assert list(batch_norm_layers(network)) == ["0", "2"]
    estimate_statistics(network, [images(5)])
    assert shared.running_var is not None and torch.isfinite(shared.running_var).all()


def test_statistics_can_be_stored_and_restored() -> None:
    adapted, other = TargetStatistics(model()), TargetStatistics(model())
    adapted.adapt([images(4)])
    kept = adapted.statistics()
    assert kept.keys() == {"0.running_mean", "0.running_var", "2.running_mean", "2.running_var"}
    other.load_statistics(kept)
    assert torch.equal(other(images(3)), adapted(images(3)))
    with pytest.raises(StateError, match="running_"):
        other.load_statistics({"0.running_mean": torch.zeros(2)})


def test_network_without_batch_norm_or_images() -> None:
    with pytest.raises(ConfigError, match="BatchNorm"):
        TargetStatistics(nn.Sequential(nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2)))
    with pytest.raises(DataError, match="DSBN"):
        estimate_statistics(model(), [])
