import math
from dataclasses import field
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError, DataError
from medflare.core.hyper import param
from medflare.core.settings import (
    STRICT,
    checked,
    no_such,
    one_of,
    refuse_arguments,
    strict_dataclass,
    takes,
)


@strict_dataclass
class Limit:
    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.5


@dataclass(frozen=True, config=STRICT)
class Settings:
    rounds: Annotated[int, Field(ge=1, le=100)]
    rate: Annotated[float, Field(gt=0, lt=1)] = 0.1
    weight: Annotated[int | float, Field(ge=0)] = 1
    name: Annotated[str, Field(min_length=1)] = "x"
    cache: str | bool = True
    kind: Literal["a", "b"] = "a"
    channels: Annotated[int, one_of(1, 3)] = 1
    size: tuple[int, int] = (1, 1)
    values: dict[str, list[int]] = field(default_factory=dict)
    files: str | Annotated[tuple[str, ...], Field(min_length=1)] = ""
    place: Annotated[tuple[int, int], takes("[row, column]")] = (0, 0)
    limit: Limit | None = None


def made(**values: Any) -> Settings:
    return checked(Settings, {"rounds": 1, **values}, "job")


@pytest.mark.parametrize("default", [param([0.1], "weights"), [0.1]])
def test_a_list_as_default_is_refused_with_the_type_to_write(default: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^Hyper\.mus: a list, .*; write a tuple, and tuple\[float"
    ):
        strict_dataclass(
            type("Hyper", (), {"__annotations__": {"mus": list[float]}, "mus": default})
        )


def test_a_setting_without_a_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Hyper\.mu: write its type, as mu: float"):
        strict_dataclass(type("Hyper", (), {"mu": param(0.1, "weight")}))


def test_json_values_of_the_right_type_are_accepted() -> None:
    settings = made(
        rounds=100,
        rate=0.5,
        cache="/tmp",
        kind="b",
        channels=3,
        size=[2, 3],
        files=["f"],
        values={"a": [1]},
    )
    assert (settings.rounds, settings.cache, settings.size, settings.files, settings.values) == (
        100,
        "/tmp",
        (2, 3),
        ("f",),
        {"a": [1]},
    )
    assert (
        made() == Settings(1)
        and repr(made(weight=2).weight) == "2"
        and repr(made(weight=2.0).weight) == "2.0"
    )
    assert (
        made(limit={"epsilon": 2}).limit == Limit(2.0, 0.5) == made(limit=Limit(2.0)).limit
        and made(limit=None).limit is None
    )


@pytest.mark.parametrize(
    ("values", "token"),
    [
        ({"rounds": 0}, "rounds"),
        ({"rounds": "3"}, "rounds"),
        ({"rounds": "x" * 1000}, "rounds"),
        ({"rate": math.nan}, "rate"),
        ({"channels": 2}, "channels"),
        ({"size": [1, "2"]}, r"size\.1"),
        ({"values": {"a": ["1"]}}, r"values\.a\.0"),
        ({"files": ["a", 1]}, r"files.*1"),
        ({"place": ["a", 1]}, "row, column"),
        ({"limit": {}}, r"limit\.epsilon"),
        ({"limit": {"epsilon": 1, "epsilom": 1}}, r"limit\.epsilom"),
        ({"rate": 2, "name": 3}, "rate"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named_in_one_line(values: dict[str, Any], token: str) -> None:
    with pytest.raises(ConfigError, match=f"^job: .*{token}") as caught:
        made(**values)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_of_many_names_only_the_close_ones_are_listed() -> None:
    many = [f"name_{number}" for number in range(50)]
    assert no_such("loss", "name_77", [*many, "name_7x"]).endswith(
        "did you mean name_7 or name_7x?"
    )
    assert "known: name_0, name_1, name_10" in no_such("loss", "zzz", many)


def test_an_unknown_or_missing_setting_is_named() -> None:
    assert "did you mean disc or dice?" in no_such(
        "loss", "dic", ["dice", "disc"]
    ) and "mean" not in no_such("loss", "zzz", ["dice"])
    with pytest.raises(ConfigError, match=r"round'.*rounds"):
        checked(Settings, {"rate": "x", "round": 1}, "job")
    with pytest.raises(ConfigError, match=r"^job: rounds.*see the examples$"):
        checked(Settings, {}, "job", remedy="see the examples")
    with pytest.raises(DataError, match=r"^list\[3\]: name"):
        checked(Settings, {"rounds": 1, "name": 3}, "list[3]", error=DataError)


def test_an_argument_that_a_function_does_not_have_raises() -> None:
    def build(task: str, gamma: float = 2.0, weights: object = None) -> None: ...

    refuse_arguments(build, ["gamma", "weights"], "loss focal", reserved=["task"])
    for name in ("gama", "task"):
        with pytest.raises(ConfigError, match=f"'{name}'"):
            refuse_arguments(build, [name], "loss focal", reserved=["task"])
