"""Tent: scale and shift alone change, entropy falls, online and episodic adaptation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medflare.adaptation.tent import Tent, prediction_entropy
from medflare.core.errors import ConfigError
from medflare.core.states import StateDict


def images(n: int, seed: int = 0, size: int = 8) -> Tensor:
    return 3 * torch.randn(n, 2, size, size, generator=torch.Generator().manual_seed(seed)) + 1


class Classifier(nn.Module):
    """Images to probabilities of three classes, with dropout that must stay off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).softmax(dim=1)


def state(module: nn.Module) -> StateDict:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_entropy_by_hand() -> None:
    exclusive = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert prediction_entropy(exclusive, "multiclass").item() == pytest.approx(math.log(2) / 2, abs=1e-5)
    independent = torch.tensor([[[[0.5, 1.0]]]])
    assert prediction_entropy(independent, "binary").item() == pytest.approx(math.log(2) / 2, abs=1e-5)
    assert prediction_entropy(torch.full((1, 2, 1, 1), 0.5), "multilabel").item() == pytest.approx(math.log(2))


def test_entropy_gradient_is_finite_where_predictions_are_certain() -> None:
    logits = torch.tensor([[200.0, -200.0], [0.0, 1.0]], requires_grad=True)
    prediction_entropy(logits.softmax(dim=1), "multiclass").backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all() and logits.grad[1].abs().sum() > 0


def test_only_scale_and_shift_change() -> None:
    source = Classifier().eval()
    before = state(source)
    tent = Tent(source, "multiclass")
    start = state(tent.model)
    tent(images(4))
    changed = {name for name, tensor in tent.model.state_dict().items() if not torch.equal(tensor, start[name])}
    assert changed == {"body.1.layer.weight", "body.1.layer.bias"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())


def test_online_predicts_before_its_step_and_accumulates() -> None:
    tent = Tent(Classifier(), "multiclass", rate=0.05)
    unadapted = Tent(Classifier(), "multiclass", rate=0.0)
    first = tent(images(6))
    torch.testing.assert_close(first, unadapted(images(6)))
    entropies = [prediction_entropy(first, "multiclass").item()] + [
        prediction_entropy(tent(images(6)), "multiclass").item() for _ in range(10)
    ]
    assert entropies[-1] < entropies[0]
    tent.reset()
    torch.testing.assert_close(tent(images(6)), first)


def test_many_images_are_cut_into_batches() -> None:
    shown = images(7)
    together, separate = Tent(Classifier(), "multiclass", rate=0.05, batch_size=3), Tent(Classifier(), "multiclass", rate=0.05)
    expected = torch.cat([separate(batch) for batch in shown.split([3, 2, 2])])
    assert torch.equal(together(shown), expected)
    assert not torch.allclose(expected[3:], Tent(Classifier(), "multiclass", rate=0.0, batch_size=3)(shown)[3:])


def test_episodic_predicts_after_its_steps_and_resets() -> None:
    tent = Tent(Classifier(), "multiclass", rate=0.05, steps=3, episodic=True)
    first, _, again = tent(images(6)), tent(images(6, seed=1)), tent(images(6))
    assert torch.equal(first, again)
    before = Tent(Classifier(), "multiclass")(images(6))
    assert prediction_entropy(first, "multiclass") < prediction_entropy(before, "multiclass")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_works_without_gradients(context: Any) -> None:
    expected = Tent(Classifier(), "multiclass")
    expected(images(4))
    tent = Tent(Classifier(), "multiclass")
    with context():
        tent(images(4))
        actual = tent(images(4))
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected(images(4)))


def test_one_image() -> None:
    assert torch.isfinite(Tent(Classifier(), "multiclass")(images(1))).all()
    flat = nn.Sequential(nn.Conv2d(2, 3, 8), nn.BatchNorm2d(3), nn.Sigmoid()).eval()  # one value per channel: no variance
    torch.testing.assert_close(Tent(flat, "multilabel", rate=0.0)(images(1)), flat(images(1)))


def test_errors() -> None:
    with pytest.raises(ConfigError, match="BatchNorm"):
        Tent(nn.Sequential(nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2, affine=True)), "binary")
    with pytest.raises(ConfigError, match="Tent"):
        Tent(nn.Sequential(nn.BatchNorm2d(2, affine=False)), "binary")
