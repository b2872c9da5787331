import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from medflare.core.message import Message
from medflare.core.states import (
    StateDict,
    batch_norm_entries,
    blend,
    copy_state,
    difference,
    moved,
    split_state,
    transferred,
    weighted_mean,
)
from medflare.core.store import read_message, write_message


def state(weight: list[float], count: int = 0) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor(weight), "num_batches_tracked": torch.tensor(count)}


def test_one_move_of_all_tensors_of_a_dtype(tmp_path: Path) -> None:
    layer = nn.Conv2d(2, 3, 3)
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    network = nn.Sequential(layer, nn.BatchNorm2d(3))
    original = {**network.state_dict(), "empty": torch.zeros(0, 4)}
    moves: list[torch.dtype] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moves.append(tensor.dtype)
        return tensor.clone()

    together = transferred(original, move)
    assert moves == [torch.float32, torch.int64] and together.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(together[name], tensor) and together[name].shape == tensor.shape
        assert together[name].is_contiguous() and not together[name].requires_grad
    assert transferred({}, move) == {}
    write_message(tmp_path / "state", Message({"model": together}))
    stored = read_message(tmp_path / "state").states["model"]
    for name, tensor in original.items():
        assert torch.equal(stored[name], tensor)


def test_weighted_mean_by_hand() -> None:
    # (1 * 1 + 3 * 5) / 4 = 4 and (1 * 2 + 3 * 10) / 4 = 8
    mean = weighted_mean({"A": state([1.0, 2.0], 7), "B": state([5.0, 10.0], 3)}, {"A": 1, "B": 3})
    assert mean["weight"].tolist() == [4.0, 8.0]
    assert mean["weight"].dtype == torch.float32
    assert mean["num_batches_tracked"].item() == 7, "integer buffers are never averaged"


def test_weighted_mean_depends_on_ratios_only_and_not_on_arrival_order() -> None:
    states = {
        site: {"w": torch.randn(1000, generator=torch.Generator().manual_seed(i))}
        for i, site in enumerate("ABCD")
    }
    weights = {"A": 0.1, "B": 0.7, "C": 1e-3, "D": 2.0}
    reference = weighted_mean(states, weights)["w"]
    for order in itertools.permutations("ABCD"):
        assert torch.equal(
            weighted_mean({site: states[site] for site in order}, weights)["w"], reference
        )
    torch.testing.assert_close(
        weighted_mean(states, {k: 8 * v for k, v in weights.items()})["w"], reference
    )


def test_weighted_mean_accumulates_in_float64() -> None:
    # In float32, 1e8 + 1 = 1e8 and the mean of (1e8, 1, -1e8) would be 0.
    mean = weighted_mean(
        {"A": state([1e8]), "B": state([1.0]), "C": state([-1e8])}, {"A": 1, "B": 1, "C": 1}
    )
    assert mean["weight"].item() == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mean_of_identical_states_is_that_state(dtype: torch.dtype) -> None:
    same = {"w": torch.linspace(-3, 3, 50).to(dtype)}
    mean = weighted_mean({"A": same, "B": same, "C": same}, {"A": 1, "B": 5, "C": 3})["w"]
    assert mean.dtype == dtype
    torch.testing.assert_close(mean, same["w"], rtol=1e-15, atol=0)


def test_weight_zero_leaves_a_site_out_and_the_mean_of_one_site_is_its_state() -> None:
    assert (
        weighted_mean({"A": state([1.0]), "B": state([9.0])}, {"A": 2, "B": 0})["weight"].item()
        == 1.0
    )
    broken = {"A": state([math.nan]), "B": state([9.0]), "C": state([math.inf])}
    assert weighted_mean(broken, {"A": 0, "B": 2, "C": 0})["weight"].item() == 9.0
    assert weighted_mean({"A": state([1.5])}, {"A": 0.3})["weight"].item() == 1.5
    assert (
        weighted_mean({"A": state([1.0], 5), "B": state([1.0], 2**62)}, {"A": 1, "B": 0})[
            "num_batches_tracked"
        ]
        == 5
    )


@pytest.mark.parametrize(
    "weights",
    [
        {"A": 0, "B": 0},
        {"A": 2, "B": -1},
        {"A": math.nan, "B": 1},
        {"A": math.inf, "B": 1},
        {"A": 1},
    ],
    ids=str,
)
def test_weighted_mean_refuses_weights_and_no_state(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights must be finite"):
        weighted_mean({"A": state([1.0]), "B": state([2.0])}, weights)
    with pytest.raises(ValueError, match=r"one for each state, got \{\}"):
        weighted_mean({}, {})


@pytest.mark.parametrize(
    "odd", [{"weight": torch.ones(1)}, {**state([1.0]), "more": torch.ones(1)}, state([1.0, 2.0])]
)
def test_weighted_mean_names_the_site_whose_state_differs(odd: StateDict) -> None:
    with pytest.raises(ValueError, match="A and B differ in"):
        weighted_mean({"A": state([1.0]), "B": odd}, {"A": 1, "B": 1})


def test_parameters_of_a_network_have_a_mean() -> None:
    mean = weighted_mean(
        {site: dict(nn.Linear(2, 2).named_parameters()) for site in "AB"}, {"A": 1.0, "B": 1.0}
    )
    for tensor in mean.values():
        assert not tensor.requires_grad


def test_copy_shares_no_memory() -> None:
    original = {"w": torch.arange(6.0).reshape(2, 3).t()}
    copied = copy_state(original)
    copied["w"].add_(1)
    assert copied["w"].is_contiguous()
    assert original["w"][0, 0].item() == 0


def test_difference_and_moved_are_inverse() -> None:
    old = state([1.0, 2.0], 3)
    new = state([1.5, 0.0], 8)
    delta = difference(new, old)
    assert delta["weight"].tolist() == [0.5, -2.0]
    back = moved(old, delta)
    assert back["weight"].tolist() == new["weight"].tolist()
    assert back["num_batches_tracked"].item() == 8
    assert moved(old, delta, scale=0.5)["weight"].tolist() == [1.25, 1.0]


def test_blend_by_hand_and_at_its_ends() -> None:
    first = state([0.0, 8.0], 1)
    second = state([4.0, 0.0], 2)
    assert blend(first, second, 0.25)["weight"].tolist() == [1.0, 6.0]
    assert blend(first, second, 0.0)["weight"].tolist() == [0.0, 8.0]
    assert blend(first, second, 1.0)["weight"].tolist() == [4.0, 0.0]
    assert blend(first, second, 0.25)["num_batches_tracked"].item() == 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Conv2d(3, 4, 1)  # called norm, and none
        self.misleading = nn.BatchNorm2d(4)
        self.plain = nn.InstanceNorm2d(4, affine=True)
        self.tracking = nn.InstanceNorm2d(4, track_running_stats=True)
        self.again = self.misleading


def test_batch_norm_is_selected_by_type_also_where_a_layer_has_two_names() -> None:
    net = Net()
    entries = batch_norm_entries(net)
    bn = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    expected = set()
    for where in ("misleading", "again"):
        for name in bn:
            expected.add(f"{where}.{name}")
    expected |= {
        f"tracking.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert entries == expected
    local, shared = split_state(net.state_dict(), entries)
    assert set(local) == expected
    assert set(local) | set(shared) == set(net.state_dict())
    assert not set(local) & set(shared)
    assert batch_norm_entries(nn.BatchNorm1d(2)) == bn
    assert batch_norm_entries(nn.Linear(2, 2)) == frozenset()
