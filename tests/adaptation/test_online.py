"""SAR, MEMO and test-time training: their steps by hand, what they leave alone, and no step at all."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medflare.adaptation.memo import MEMO, MEMOSettings, flipped
from medflare.adaptation.sar import SAR, SARSettings
from medflare.adaptation.tent import Tent, TentSettings, prediction_entropy
from medflare.adaptation.ttt import (
    ROTATION,
    TestTimeTraining,
    TTTSettings,
    rotation_head,
    rotation_loss,
    turned,
)
from medflare.core.errors import ConfigError, StateError
from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.networks.catalogue import task_network
from medflare.networks.features import Probabilities
from methods import squares


def images(n: int, size: int = 8) -> Tensor:
    return torch.randn(n, 2, size, size, generator=torch.Generator().manual_seed(n))


# -- SAR: with a normalised image (1, -1) and weights w, b the logits differ by d = w0 + w1 + b0 - b1


SIGNS = torch.tensor([1.0, 1.0, 1.0, -1.0])  # of w0, w1, b0, b1 in d


def tiny(d: float) -> nn.Sequential:
    layer = nn.LayerNorm(2, eps=0.0)
    nn.init.constant_(layer.weight, d / 2)
    return nn.Sequential(layer, nn.Softmax(dim=1))


def weights(sar: SAR) -> Tensor:
    return torch.cat([weight.detach() for weight in sar.weights])


def slope(d: float) -> float:
    """dH/dd of two classes whose logits differ by d."""
    p = 1 / (1 + math.exp(-d))
    return -d * p * (1 - p)


PAIR = torch.tensor([[1.0, -1.0]])


def test_a_step_of_sar_by_hand() -> None:
    settings = SARSettings(rate=0.1, rho=0.05)
    sar = SAR(tiny(4.0), "multiclass", settings, 8)
    before = weights(sar)
    expected = torch.softmax(torch.tensor([[2.0, -2.0]]), dim=1)
    torch.testing.assert_close(sar(PAIR), expected)  # before its step
    # The ascent has length 0.05 along (1, 1, 1, -1) / 2, to more entropy: d falls by 4 * 0.05 / 2.
    torch.testing.assert_close(weights(sar), before - 0.1 * slope(3.9) * SIGNS)


def test_sar_ignores_unreliable_predictions() -> None:
    uncertain = SAR(tiny(2.0), "multiclass", SARSettings(rate=0.1), 8)
    before = weights(uncertain)
    uncertain(PAIR)  # its entropy is above 0.4 ln 2
    assert torch.equal(weights(uncertain), before)

    def both(settings: SARSettings, shown: Tensor) -> Tensor:
        """Weights after a step; the second logit of an image (N, 2, 1, 2) is 0 in its second pixel."""
        layer = nn.GroupNorm(1, 2, eps=0.0)
        nn.init.constant_(layer.weight, 3.0)
        sar = SAR(nn.Sequential(layer, nn.Sigmoid()), "binary", settings, 8)
        sar(shown)
        return weights(sar)

    pixels = torch.tensor([[[[2.0, 0.0]], [[-2.0, 0.0]]]])  # certain, and even
    settings = SARSettings(rate=0.1, rho=0.0)
    assert not torch.equal(both(settings, pixels), torch.tensor([3.0, 3.0, 0.0, 0.0]))
    everything = replace(settings, margin=2.0)
    assert not torch.allclose(both(settings, pixels), both(everything, pixels))


def test_sar_without_ascent_and_limits_is_tent_with_sgd_and_it_resets() -> None:
    shown = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.Softmax(dim=1)).eval()
    free = SARSettings(rate=0.1, rho=0.0, margin=2.0, reset=0.0)
    sar = SAR(model, "multiclass", free, 8)
    start = weights(sar)
    layer = nn.BatchNorm1d(2)  # in training mode it normalises by the batch
    reference = nn.Sequential(layer, model[1], model[2])
    prediction_entropy(reference(shown), "multiclass").backward()
    sar(shown)
    assert layer.weight.grad is not None and layer.bias.grad is not None
    step = torch.cat([layer.weight.grad, layer.bias.grad])
    torch.testing.assert_close(weights(sar), start - 0.1 * step)
    collapsing = SAR(model, "multiclass", replace(free, reset=10.0), 8)
    collapsing(shown)
    assert torch.equal(weights(collapsing), start)


def test_sar_needs_a_normalisation() -> None:
    with pytest.raises(ConfigError, match="sar"):
        SAR(nn.Sequential(nn.Conv2d(2, 1, 1), nn.InstanceNorm2d(1)), "binary", SARSettings(), 8)


# -- MEMO ----------------------------------------------------------------------------------------


def pooling() -> nn.Sequential:
    """A classifier that no flip changes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3), nn.Softmax(dim=1)
    ).eval()


def pixelwise() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 1, 1), nn.Sigmoid()).eval()


@pytest.mark.parametrize("make", [pooling, pixelwise])
def test_memo_steps_along_the_entropy_of_all_parameters(make: Any) -> None:
    """Where no augmentation changes the prediction, the marginal is the prediction itself."""
    model = make()
    before = copy_state(model.state_dict())
    target = "multiclass" if make is pooling else "binary"
    memo = MEMO(model, target, MEMOSettings(rate=0.5, intensity=0.0, copies=5))
    shown = images(2)
    first = memo(shown[:1])
    second = memo(shown)[:1]
    assert torch.equal(first, second)  # every image starts from the trained model
    reference = make()
    prediction_entropy(reference(shown[:1]), target).backward()
    with torch.no_grad():
        for weight in reference.parameters():
            assert weight.grad is not None
            weight -= 0.5 * weight.grad
    torch.testing.assert_close(first, reference(shown[:1]))
    assert not torch.allclose(first, model(shown[:1]))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_memo_without_a_step_is_the_model_and_flips_undo_themselves() -> None:
    model = nn.Sequential(nn.Conv2d(2, 1, 3, padding=1), nn.Sigmoid()).eval()
    shown = images(3)
    torch.testing.assert_close(MEMO(model, "binary", MEMOSettings(rate=0.0))(shown), model(shown))
    flips = torch.tensor([[True, False], [False, True], [True, True]])
    torch.testing.assert_close(flipped(shown, flips)[0], shown[0].flip(1))
    assert torch.equal(flipped(flipped(shown, flips), flips), shown)
    memo = MEMO(model, "binary", MEMOSettings(intensity=0.0, copies=3))
    # A marginal of unequal copies is the mean of their predictions at the same pixels.
    p = torch.stack([model(copy[None])[0] for copy in flipped(shown, flips)])
    expected = (p[0].flip(1) + p[1].flip(2) + p[2].flip(1, 2)) / 3
    torch.testing.assert_close(memo.marginal(flipped(shown, flips), flips)[0], expected)


# -- test-time training --------------------------------------------------------------------------


@pytest.fixture(params=[squares.SEGMENTATION, squares.CLASSIFICATION])
def trained(request: pytest.FixtureRequest) -> Any:
    """Task, model and a head that is not zero."""
    task = request.param
    torch.manual_seed(0)
    head = rotation_head(task)
    nn.init.normal_(head.weight)
    return task, Probabilities(task_network(task), task).eval(), head


def test_every_image_is_trained_by_its_four_turns(trained: Any) -> None:
    task, model, head = trained
    before = copy_state(model.state_dict())
    message = Message({ROTATION: copy_state(head.state_dict())})
    shown = squares.site("A", task).data.test.images
    turns = torch.arange(4)
    ttt = TestTimeTraining(model, task, message, TTTSettings(rate=0.01))
    last = ttt(shown)
    copies = shown[-1:].expand(4, *shown.shape[1:])
    with torch.no_grad():
        after = rotation_loss(ttt.network, head, copies, turns)
        assert after < rotation_loss(model.network, head, copies, turns)
    assert torch.equal(ttt(shown[-1:]), last[-1:]) and not torch.allclose(last, model(shown))
    assert torch.equal(ttt.model.state_dict()["network.head.bias"], before["network.head.bias"])
    still = TestTimeTraining(model, task, message, TTTSettings(rate=0.0))
    torch.testing.assert_close(still(shown), model(shown))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_an_untrained_head_knows_nothing(trained: Any) -> None:
    task, model, _ = trained
    shown = squares.site("A", task).data.test.images[:4]
    loss = rotation_loss(model.network, rotation_head(task), shown, torch.arange(4))
    assert loss.item() == pytest.approx(math.log(4))


def test_a_missing_and_a_wrong_head_are_refused(trained: Any) -> None:
    task, model, head = trained
    with pytest.raises(ConfigError, match="rotation head"):
        TestTimeTraining(model, task, Message(), TTTSettings())
    with pytest.raises(StateError, match="another network"):
        TestTimeTraining(model, task, Message({ROTATION: {"w": head.weight}}), TTTSettings())


def test_images_that_are_not_square_are_turned_by_halves() -> None:
    assert rotation_head(replace(squares.SEGMENTATION, size=(16, 32))).out_features == 2
    oblong = torch.arange(6.0).view(1, 1, 2, 3)
    assert torch.equal(turned(oblong, torch.tensor([1])), oblong.flip(2, 3))


@pytest.mark.parametrize("episodic", [False, True])
def test_tent_without_steps_normalizes_by_the_batch(episodic: bool) -> None:
    network = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 64, 3), nn.Softmax(1))
    adapted = Tent(network, "multiclass", TentSettings(steps=0, episodic=episodic))
    batch = images(4)
    expected = network.train()(batch)
    torch.testing.assert_close(adapted.adapted(batch), expected)


def test_sar_leaves_a_normalisation_without_part_in_the_output_alone() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = tiny(4.0), nn.LayerNorm(2)

        def forward(self, images: Tensor) -> Tensor:
            return self.used(images)

    sar = SAR(Half(), "multiclass", SARSettings(rate=0.1, rho=0.05), 8)
    before = weights(sar)
    sar(PAIR)
    step = torch.cat([-0.1 * slope(3.9) * SIGNS, torch.zeros(4)])
    torch.testing.assert_close(weights(sar), before + step)
