"""Messages survive FLARE's serialisation bit by bit, tensors as tensors."""

import math

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable, get_leaf_dxos
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.fuel.utils import fobs

from medflare.core.errors import UpdateError
from medflare.core.message import Message
from medflare.flare import messages
from medflare.flare.messages import (
    error_of,
    error_reply,
    register_decomposers,
    to_message,
    to_shareable,
)


@pytest.fixture(autouse=True, scope="module")
def _flare_serialisation() -> None:
    register_decomposers()


def sent(message: Message) -> Message:
    """The message after FLARE has turned it into bytes and back, as between two processes."""
    return to_message(fobs.loads(fobs.dumps(to_shareable(message))))


def test_messages_for_many_sites_share_the_weights_that_they_hold() -> None:
    """FLARE encodes an array when its site fetches it, so that no site's message is ever there as a copy."""
    weights = torch.randn(50, 50)
    message = Message({"model": {"w": weights}}, {"n": 1})
    arrays = [from_shareable(to_shareable(message)).data["model"].data["w"] for _ in range(3)]
    for array in arrays:
        assert np.shares_memory(array, weights.numpy())


TENSORS = {
    "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "float16": torch.tensor([0.1], dtype=torch.float16),
    "int64": torch.tensor([2**62, -1]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
    "zero_dim": torch.tensor(7),
    "special": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_survives(name: str) -> None:
    before = TENSORS[name]
    after = sent(Message({"model": {name: before}})).states["model"][name]
    assert after.dtype == before.dtype and after.shape == before.shape
    assert torch.equal(torch.signbit(after.double()), torch.signbit(before.double()))
    assert (
        torch.equal(after.nan_to_num(12345.0), before.nan_to_num(12345.0))
        if before.is_floating_point()
        else torch.equal(after, before)
    )


def test_metadata_and_the_order_of_states_survive() -> None:
    meta = {
        "n": {"train": 3},
        "loss": 0.1,
        "none": None,
        "list": [1, "two", [3.5]],
        "flag": True,
        "text": "Zürich",
    }
    states = {
        entry: {"b.weight": torch.ones(2), "a.bias": torch.zeros(1)}
        for entry in ("model", "personal", "selector")
    }
    after = sent(Message(states, meta))
    assert after.meta == meta and list(after.states) == ["model", "personal", "selector"]
    assert list(after.states["personal"]) == ["b.weight", "a.bias"]


def test_everything_is_in_dxos_that_filters_see() -> None:
    shareable = to_shareable(
        Message({"model": {"w": torch.ones(2)}, "personal": {"w": torch.ones(2)}}, {"n_samples": 4})
    )
    leaves, errors = get_leaf_dxos(from_shareable(shareable), "result")
    assert not errors
    assert {name: leaf.data_kind for name, leaf in leaves.items()} == {
        "result.model": DataKind.WEIGHTS,
        "result.personal": DataKind.WEIGHTS,
        "result.meta": DataKind.METRICS,
    }


def test_sent_tensors_are_free_of_the_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert (
        not to_message(to_shareable(Message({"model": {"w": weight}})))
        .states["model"]["w"]
        .requires_grad
    )


def test_reserved_name_and_foreign_content_are_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        to_shareable(Message({messages.META: {"w": torch.ones(1)}}))
    with pytest.raises(ValueError, match="model/w"):
        to_shareable(Message({"model": {"w": 1.0}}))  # type: ignore[dict-item]
    parts = {messages.META: DXO(DataKind.METRICS, {}), "model": DXO(DataKind.METRICS, {})}
    foreign = DXO(DataKind.WEIGHTS, {"w": torch.ones(1)}), DXO(DataKind.COLLECTION, parts)
    for shareable in (Shareable(), *(dxo.to_shareable() for dxo in foreign)):
        with pytest.raises(UpdateError):
            to_message(shareable)


def test_the_simulator_passes_messages_on_without_flares_headers() -> None:
    shareable = to_shareable(Message({"model": TENSORS}, {"n_samples": 4}))
    shareable.set_header("cookie", {"of": "FLARE"})
    relayed = fobs.loads(messages.to_bytes(shareable))
    assert relayed.get_header("cookie") is None
    after = to_message(relayed)
    assert after.meta == {"n_samples": 4}
    for name, tensor in TENSORS.items():
        assert torch.equal(after.states["model"][name].nan_to_num(), tensor.nan_to_num())


def test_filters_may_replace_arrays_by_scalars_and_tensors() -> None:
    messages.register_tensors()
    shareable = to_shareable(Message({"model": {"w": torch.ones(2)}}))
    model = from_shareable(shareable).data["model"].data
    model |= {
        "count": np.float32(3),
        "tensor": torch.ones(1),
        "fixed": np.broadcast_to(np.float32(1), (2, 2)),
    }
    for arrived in (shareable, fobs.loads(fobs.dumps(shareable))):
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in to_message(arrived).states["model"].items()
        }
        assert shapes == {"w": (2,), "count": (), "tensor": (1,), "fixed": (2, 2)}


def test_errors_are_sent_as_one_line() -> None:
    assert error_of(to_shareable(Message())) is None
    assert error_of(error_reply("mask 3.png\nis too small")) == "mask 3.png is too small"
    assert (
        error_of(make_reply(ReturnCode.TASK_ABORTED))
        == "the task ended with FLARE's return code TASK_ABORTED"
    )
