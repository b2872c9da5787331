"""Messages survive FLARE's serialisation bit by bit, tensors as tensors."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, get_leaf_dxos
from nvflare.apis.dxo import from_shareable as dxo_of
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.fuel.utils import fobs

from medflare.core.errors import StateError, UpdateError
from medflare.core.message import Message
from medflare.flare.messages import (
    FACTS,
    error_of,
    error_reply,
    from_bytes,
    readable,
    register_decomposers,
    to_bytes,
    to_message,
    to_shareable,
    together_from_bytes,
    together_to_bytes,
    turn_into_arrays,
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
    arrays = [next(iter(get_leaf_dxos(dxo_of(to_shareable(message)), "")[0].values())).data["w"] for _ in range(3)]
    assert all(np.shares_memory(array, weights.numpy()) for array in arrays)


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
def test_tensor_survives(name: str) -> None:
    before = TENSORS[name]
    after = sent(Message({"model": {name: before}})).states["model"][name]
    assert after.dtype == before.dtype
    assert after.shape == before.shape
    assert torch.equal(torch.signbit(after.double()), torch.signbit(before.double()))
    assert torch.equal(after.nan_to_num(12345.0), before.nan_to_num(12345.0)) if before.is_floating_point() else torch.equal(after, before)


def test_facts_survive() -> None:
    meta = {"n": {"train": 3}, "loss": 0.1, "none": None, "list": [1, "two", [3.5]], "flag": True, "text": "Zürich"}
    assert sent(Message({}, meta)).meta == meta


def test_many_states_keep_their_names_and_order() -> None:
    message = Message({entry: {"b.weight": torch.ones(2), "a.bias": torch.zeros(1)} for entry in ("model", "personal", "selector")})
    after = sent(message)
    assert list(after.states) == ["model", "personal", "selector"]
    assert list(after.states["personal"]) == ["b.weight", "a.bias"]


def test_everything_lies_in_dxos_that_filters_see() -> None:
    shareable = to_shareable(Message({"model": {"w": torch.ones(2)}, "personal": {"w": torch.ones(2)}}, {"n_samples": 4}))
    leaves, errors = get_leaf_dxos(dxo_of(shareable), "result")
    assert not errors
    assert {name: leaf.data_kind for name, leaf in leaves.items()} == {
        "result.model": DataKind.WEIGHTS,
        "result.personal": DataKind.WEIGHTS,
        "result.meta": DataKind.METRICS,
    }


def test_sent_tensors_are_free_of_the_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert not to_message(to_shareable(Message({"model": {"w": weight}}))).states["model"]["w"].requires_grad


def test_reserved_name_and_foreign_content_are_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        to_shareable(Message({FACTS: {"w": torch.ones(1)}}))
    with pytest.raises(ValueError, match="model/w"):
        to_shareable(Message({"model": {"w": 1.0}}))  # type: ignore[dict-item]
    with pytest.raises(UpdateError):
        to_message(Shareable())
    with pytest.raises(UpdateError):
        to_message(DXO(DataKind.WEIGHTS, {"w": torch.ones(1)}).to_shareable())
    parts = {FACTS: DXO(DataKind.METRICS, {}), "model": DXO(DataKind.METRICS, {})}
    with pytest.raises(UpdateError, match="model"):
        to_message(DXO(DataKind.COLLECTION, parts).to_shareable())


def test_a_relayed_message_stays_what_it_is() -> None:
    shareable = to_shareable(Message({"model": TENSORS}, {"n_samples": 4}))
    shareable.set_header("cookie", {"of": "FLARE"})
    relayed = from_bytes(to_bytes(shareable))
    assert relayed.get_header("cookie") is None
    after = to_message(relayed)
    assert after.meta == {"n_samples": 4}
    assert all(torch.equal(after.states["model"][name].nan_to_num(), tensor.nan_to_num()) for name, tensor in TENSORS.items())


def test_what_messages_share_is_relayed_once() -> None:
    shared, own = {"model": {**TENSORS, "large": torch.arange(50_000.0)}}, torch.ones(2)
    messages = {"A": Message(shared, {"step": 1}), "B": Message({**shared, "own": {"w": own}}, {"step": 2})}
    content = together_to_bytes({site: to_shareable(message) for site, message in messages.items()})
    assert len(content) < 1.5 * messages["A"].nbytes
    found = together_from_bytes(content)
    for site, message in messages.items():
        after = to_message(found[site])
        assert after.meta == message.meta and after.states.keys() == message.states.keys()
        for entry, state in message.states.items():
            for name, tensor in state.items():
                other = after.states[entry][name]
                assert other.dtype == tensor.dtype and other.shape == tensor.shape
                assert torch.equal(other.nan_to_num(), tensor.nan_to_num())
    one, other = (dxo_of(found[site]).data["model"] for site in ("A", "B"))
    assert one.data["large"] is other.data["large"] and one is not other, "a filter of one site's message leaves the other's alone"


def test_what_filters_leave_in_place_of_arrays() -> None:
    shareable = to_shareable(Message({"model": {"w": torch.ones(2)}}))
    model = dxo_of(shareable).data["model"].data
    model |= {"count": np.float32(3), "tensor": torch.ones(1), "fixed": np.broadcast_to(np.float32(1), (2, 2))}
    assert {name: tuple(tensor.shape) for name, tensor in to_message(shareable).states["model"].items()} == {
        "w": (2,),
        "count": (),
        "tensor": (1,),
        "fixed": (2, 2),
    }
    model["names"] = "a patient"
    with pytest.raises(UpdateError, match="model/names"):
        to_message(shareable)


def test_tensors_that_a_filter_leaves_travel_as_arrays() -> None:
    """The simulator's server process has no torch: FLARE ends the whole job for a type that it cannot read."""
    shareable = to_shareable(Message({"model": {"w": torch.ones(2)}}, {"n": 1}))
    model = dxo_of(shareable).data["model"].data
    model |= {"w": torch.ones(2), "algorithm": torch.ones(1, dtype=torch.bfloat16)}
    shareable["more"] = [torch.zeros(1), {"x": torch.zeros(1)}]
    turn_into_arrays(shareable)
    found = [*model.values(), shareable["more"][0], shareable["more"][1]["x"]]
    assert all(isinstance(value, np.ndarray) for value in found) and to_message(shareable).states["model"]["w"].tolist() == [1.0, 1.0]


STRANGE = {
    "of another byte order": lambda model: model.data.update(w=np.ones(3, ">f4")),
    "ragged": lambda model: model.data.update(w=[[1.0], [1.0, 2.0]]),
    "dates": lambda model: model.data.update(w=np.zeros(2, "datetime64[s]")),
    "a number said to be bfloat16": lambda model: (model.data.update(w=np.float32(3)), model.meta.update(bfloat16=["w"])),
    "bytes said to be bfloat16": lambda model: (model.data.update(w=np.ones(3, np.uint8)), model.meta.update(bfloat16=["w"])),
    "no list of names": lambda model: model.meta.update(bfloat16=3),
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
def test_what_no_tensor_can_be_made_of_is_its_sites_fault_alone(change: Callable[[DXO], object]) -> None:
    """FLARE carries all of it: an exception would end the job for everybody."""
    shareable = to_shareable(Message({"model": {"w": torch.ones(2)}}))
    change(dxo_of(shareable).data["model"])
    arrived = fobs.loads(fobs.dumps(shareable))
    message, problem, kind = readable(arrived, to_message)
    assert message is None and kind == "rejected" and problem


def test_no_answer_raises_but_the_servers_own_errors() -> None:
    headless = to_shareable(Message())
    headless["__headers__"] = [1]
    assert readable(headless, to_message)[2] == "rejected"

    def full(answer: Shareable) -> None:
        raise StateError("no space left")

    with pytest.raises(StateError):
        readable(to_shareable(Message()), full)


def test_errors_travel_as_one_line() -> None:
    assert error_of(to_shareable(Message())) is None
    assert error_of(error_reply("mask 3.png\nis too small")) == "mask 3.png is too small"
    assert error_of(make_reply(ReturnCode.TASK_ABORTED)) == "the task ended with FLARE's return code TASK_ABORTED"
