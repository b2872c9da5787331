import math
from typing import Any

import pytest
import torch

from medflare.core.message import Message
from medflare.core.specs import MetaSpec, TensorSpec, by_model, count, listing, number, table, text


def test_an_optional_declaration_keeps_everything_else() -> None:
    entry = TensorSpec("a", "why", measured="train", per_class="values")
    assert vars(entry.as_optional()) == {**vars(entry), "optional": True}
    item = MetaSpec[int]("b", "what", count(), "train", per_class="counts")
    assert vars(item.as_optional()) == {**vars(item), "optional": True}


def test_entries_are_read_and_written_by_their_declarations() -> None:
    model = TensorSpec("model")
    loss = MetaSpec[float]("loss")
    message = Message.of({model: {"w": torch.ones(1)}, loss: 0.5})
    assert message.states.keys() == {"model"} and message.meta == {"loss": 0.5}
    assert (
        model in message and loss in message and message[loss] == 0.5 and message[model]["w"] == 1
    )
    assert MetaSpec("model") not in message and message.get(TensorSpec("loss")) is None
    with pytest.raises(KeyError, match="other"):
        message[TensorSpec("other")]


@pytest.mark.parametrize("name", ["", " ", "a\nb", "$x$", "\ud800", "x" * 101, 3])
def test_only_printable_plain_names_are_names_of_models(name: object) -> None:
    item = MetaSpec[Any]("item", type=by_model(number()))
    assert item.problem({name: 0.5})
    assert item.problem({"global": 0.5, "personal/Zürich-2": 1, "mixture running": 0}) is None


@pytest.mark.parametrize(
    ("type", "right", "wrong"),
    [
        (number(0, 1), [0, 0.5, 1], [-1, 2, True, "0.5", math.nan, None, [0.5], 10**400]),
        (number(), [-7, 1e300], [math.inf, "high"]),
        (number(optional=True), [None, 0.5], ["none"]),
        (count(3), [0, 3], [4, -1, 1.0, True, "1", None]),
        (count(optional=True), [None, 3], [-1]),
        (text("a", "b"), ["a"], ["c", 3, ["a"]]),
        (text(), ["x" * 1000], ["x" * 1001, 3, b"x"]),
        (table(count()), [{}, {"train": 3}], [{"train": "many"}, {3: 3}, [], "train"]),
        (by_model(most=2), [dict.fromkeys("ab")], [dict.fromkeys("abc"), []]),
        (listing(number(0), 2), [[], [1, 2]], [[1, 2, 3], [-1], {}, "12"]),
        (table(listing(number(0))), [{"a": [0.5]}], [{"a": ["high"]}, {"a": 1}]),
    ],
)
def test_an_item_accepts_values_of_its_type(
    type: object, right: list[object], wrong: list[object]
) -> None:
    item = MetaSpec[Any]("item", type=type)
    assert list(map(item.problem, right)) == [None] * len(right)
    for value in wrong:
        problem = item.problem(value)
        assert problem and problem.isprintable() and len(problem) < 300, value
