"""What a message may hold: numbers that are finite, and not below 0 where none can be; tables of models with names that can be shown."""

import math

import pytest
import torch

from medflare.core.manifest import Entry, EntrySpec, Fact, anything, count, listing, models, negative, non_finite, number, table, text
from medflare.core.message import Message


def test_large_numbers_whose_sum_overflows_are_finite() -> None:
    state = {"w": torch.full((4,), 3e38), "count": torch.tensor(3), "none": torch.zeros(0)}
    assert non_finite(Message({"model": state})) is None
    for bad in (math.nan, math.inf, -math.inf):
        state["w"][1] = bad
        assert non_finite(Message({"model": state})) == "model/w holds NaN or infinity"
    both = torch.tensor([math.inf, -math.inf])
    assert non_finite(Message({"model": {"w": both}})) is not None


def test_a_running_variance_is_never_below_zero() -> None:
    state = {"1.running_var": torch.tensor([0.5, 0.0]), "1.running_mean": torch.tensor([-1.0])}
    manifest = {"model": EntrySpec.like(state, "")}
    assert negative(Message({"model": state}), manifest) is None
    state["1.running_var"] = torch.tensor([0.5, -1e-6])
    problem = "model/1.running_var holds a number below 0, which a variance or a mean square cannot be"
    assert negative(Message({"model": state}), manifest) == problem


def test_an_entry_says_that_none_of_its_numbers_is() -> None:
    squares = Entry("squares", "", lambda plan: {"w": torch.zeros(1)}, unsigned=True)
    for entry in (squares, squares.maybe()):
        assert negative(Message({"squares": {"w": torch.tensor([-1.0])}}), {"squares": entry.spec(None)}) is not None
    assert squares.maybe().sometimes and not squares.sometimes and squares.maybe() == squares


def test_no_tensor_at_all() -> None:
    assert non_finite(Message()) is None and negative(Message(), {}) is None


@pytest.mark.parametrize("name", ["", " ", "a\nb", "$x$", "\ud800", "x" * 101, 3])
def test_names_that_a_figure_cannot_show(name: object) -> None:
    assert models()({name: 0.5}) is not None


def test_names_that_it_can() -> None:
    assert models(number())({"global": 0.5, "personal/Zürich-2": 1, "mixture running": 0}) is None
    assert models()(dict.fromkeys("abc")) is None and models(most=2)(dict.fromkeys("abc")) == "names 3 models, more than 2"


@pytest.mark.parametrize(
    "wrong", ["\x1b]0;PWN\x07", "\u202eevil", "a\nb", "x" * 1001], ids=["escape", "right to left", "two lines", "long"]
)
def test_texts_and_names_that_a_terminal_obeys_are_refused(wrong: str) -> None:
    nested = [{"a": [wrong]}]
    for problem in (
        text()(wrong),
        table(text())({"a": wrong}),
        table(count())({wrong: 1}),
        anything(nested),
        models(table())({"a": {"b": wrong}}),
    ):
        assert problem is not None and problem.isprintable() and len(problem) < 200


def test_what_an_optional_declaration_keeps() -> None:
    entry = Entry("a", "why", unsigned=True, exact=True, step=True, measured="train", per_class="values")
    assert vars(entry.maybe()) == {**vars(entry), "sometimes": True} and entry.maybe() == "a"
    fact = Fact("b", "what", count(), "train", per_class="counts")
    assert vars(fact.maybe()) == {**vars(fact), "sometimes": True}


def test_bounds_of_lists_counts_and_texts() -> None:
    assert listing(number(0), 2)([1, 2, 3]) == "has 3 items, more than 2"
    assert count(3)(4) == "is 4, expected a count" and count(optional=True)(None) is None and count()(True) is not None
    assert text("a")("a") is None and text("a")(["a"]) == "is list, expected a"
