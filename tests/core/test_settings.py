"""Settings that somebody wrote: what is accepted, and the one line that says what is wrong with the rest."""

import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError, DataError
from medflare.core.settings import STRICT, checked, first_problem, nested, no_such, one_of, refuse_arguments, takes, unknown


@dataclass(frozen=True, config=STRICT)
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
    seed: int | None = None
    kind: Literal["a", "b"] = "a"
    embedded: Literal["", "phantom"] = ""
    channels: Annotated[int, one_of(1, 3)] = 1
    size: tuple[int, int] = (1, 1)
    labels: Annotated[tuple[str, ...], Field(min_length=1)] = ("x",)
    values: dict[str, list[int]] = field(default_factory=dict)
    files: str | Annotated[tuple[str, ...], Field(min_length=1)] = ""
    place: Annotated[tuple[int, int], takes("[row, column]")] = (0, 0)
    limit: Annotated[Limit | None, nested(Limit)] = None


def made(**values: Any) -> Settings:
    return checked(Settings, {"rounds": 1, **values}, "job")


def refused(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        made(**values)
    return str(caught.value)


class TestAccepted:
    def test_values_of_the_right_type(self) -> None:
        settings = made(rounds=100, rate=0.5, name="y", cache="/tmp", seed=7, kind="b", embedded="phantom", channels=3)
        assert (settings.rounds, settings.rate, settings.cache, settings.seed, settings.channels) == (100, 0.5, "/tmp", 7, 3)

    def test_what_is_left_out_has_its_default(self) -> None:
        assert made() == Settings(1) == checked(Settings, {"rounds": 1}, "job")

    def test_lists_stand_for_tuples_but_not_within_objects(self) -> None:
        settings = made(size=[2, 3], labels=["a", "b"], values={"a": [1]}, files=["f", "g"])
        assert settings.size == (2, 3) and settings.labels == ("a", "b") and settings.files == ("f", "g")
        assert settings.values == {"a": [1]}

    def test_a_whole_number_where_a_number_is_expected_becomes_one(self) -> None:
        assert isinstance(made(limit={"epsilon": 8}).limit.epsilon, float)  # type: ignore[union-attr]

    def test_whole_numbers_stay_whole_where_both_are_allowed(self) -> None:
        assert repr(made(weight=2).weight) == "2" and repr(made(weight=2.0).weight) == "2.0"

    def test_nested_settings_as_an_object_or_as_an_instance(self) -> None:
        assert made(limit={"epsilon": 2.0}).limit == Limit(2.0, 0.5) == made(limit=Limit(2.0)).limit
        assert made(limit=None).limit is None

    def test_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            made().rounds = 2  # type: ignore[misc]


class TestRefused:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"rounds": 0}, "job: rounds must be at least 1, got 0"),
            ({"rounds": 101}, "job: rounds must be at most 100, got 101"),
            ({"rounds": 1.5}, "job: rounds must be a whole number, got 1.5"),
            ({"rounds": "3"}, "job: rounds must be a whole number, got '3'"),
            ({"rounds": True}, "job: rounds must be a whole number, got True"),
            ({"rounds": None}, "job: rounds must be a whole number, got None"),
            ({"rate": 0}, "job: rate must be above 0, got 0"),
            ({"rate": 1.0}, "job: rate must be below 1, got 1.0"),
            ({"rate": "0.5"}, "job: rate must be a number, got '0.5'"),
            ({"rate": math.nan}, "job: rate must be a finite number, got nan"),
            ({"rate": math.inf}, "job: rate must be a finite number, got inf"),
            ({"weight": -1}, "job: weight must be at least 0, got -1"),
            ({"weight": "x"}, "job: weight must be a number, got 'x'"),
            ({"weight": math.nan}, "job: weight must be a finite number, got nan"),
            ({"name": ""}, "job: name must be a non-empty text, got ''"),
            ({"name": 3}, "job: name must be text, got 3"),
            ({"cache": 1}, "job: cache must be text or true or false, got 1"),
            ({"seed": "x"}, "job: seed must be a whole number, got 'x'"),
            ({"kind": "c"}, "job: kind must be one of a, b, got 'c'"),
            ({"embedded": "other"}, "job: embedded must be one of \"\", phantom, got 'other'"),
            ({"channels": 2}, "job: channels must be one of 1, 3, got 2"),
            ({"channels": True}, "job: channels must be a whole number, got True"),
            ({"size": 3}, "job: size must be a list, got 3"),
            ({"size": [1]}, "job: size must be a longer list, got [1]"),
            ({"size": [1, 2, 3]}, "job: size must be a list of at most 2, got [1, 2, 3]"),
            ({"size": [1, "2"]}, "job: size[1] must be a whole number, got '2'"),
            ({"labels": []}, "job: labels must be a list of at least 1, got []"),
            ({"labels": "ab"}, "job: labels must be a list, got 'ab'"),
            ({"values": []}, "job: values must be an object, got []"),
            ({"values": {"a": ["1", "2"]}}, "job: values.a[0] must be a whole number, got '1'"),
            ({"values": {"a": 1}}, "job: values.a must be a list, got 1"),
            ({"files": 1}, "job: files must be text or a list, got 1"),
            ({"files": []}, "job: files must be text or a list of at least 1, got []"),
            ({"files": ["a", 1]}, "job: files[1] must be text, got 1"),
            ({"place": [1]}, "job: place must be [row, column], got [1]"),
            ({"place": ["a", 1]}, "job: place must be [row, column], got ['a', 1]"),
            ({"limit": 8}, "job: limit must be an object, got 8"),
            ({"limit": {}}, "job: setting 'limit.epsilon' is missing"),
            ({"limit": {"epsilon": -1}}, "job: limit.epsilon must be above 0, got -1"),
            ({"limit": {"epsilon": 1, "delta": 1}}, "job: limit.delta must be below 1, got 1"),
            ({"limit": {"epsilom": 1}}, "job: limit: unknown setting 'epsilom'; did you mean epsilon? known: delta, epsilon"),
        ],
        ids=str,
    )
    def test_in_one_line(self, values: dict[str, Any], message: str) -> None:
        assert refused(**values) == message

    def test_an_unknown_name_before_anything_else(self) -> None:
        with pytest.raises(ConfigError, match=r"^job: unknown setting 'round'; did you mean rounds\? known: cache, channels, embedded, "):
            checked(Settings, {"rate": "x", "round": 1}, "job")

    def test_a_missing_one_with_the_remedy(self) -> None:
        with pytest.raises(ConfigError, match=r"^job: setting 'rounds' is missing$"):
            checked(Settings, {}, "job")
        with pytest.raises(ConfigError, match=r"^job: setting 'rounds' is missing; see the examples$"):
            checked(Settings, {}, "job", remedy="see the examples")

    def test_the_first_of_several(self) -> None:
        assert refused(rate=2, name=3, kind="c") == "job: rate must be below 1, got 2"

    def test_a_long_value_is_cut(self) -> None:
        message = refused(rounds="x" * 1000)
        assert message.startswith("job: rounds must be a whole number, got 'xxx") and message.endswith("xxx...") and len(message) < 130

    def test_as_the_error_that_is_wanted(self) -> None:
        with pytest.raises(DataError, match=r"^list\[3\]: name must be text, got 3$"):
            checked(Settings, {"rounds": 1, "name": 3}, "list[3]", error=DataError)


def test_settings_that_do_not_go_together() -> None:
    @dataclass(frozen=True, config=STRICT)
    class Range:
        low: int
        high: int

        @model_validator(mode="after")
        def _ordered(self) -> "Range":
            if self.low > self.high:
                raise ValueError("low is above high")
            return self

    with pytest.raises(ConfigError, match=r"^job: low is above high$"):
        checked(Range, {"low": 2, "high": 1}, "job")


def test_first_problem_of_an_instance_that_was_made_directly() -> None:
    values: Mapping[str, Any] = {"rounds": 0}
    with pytest.raises(ValidationError) as caught:
        Settings(**values)
    assert first_problem(caught.value, values) == "rounds must be at least 1, got 0"
    with pytest.raises(ValidationError) as caught:
        Settings(rounds=1, ruonds=2)  # type: ignore[call-arg]
    assert first_problem(caught.value, {"rounds": 1, "ruonds": 2}) == "unknown setting 'ruonds'"


def test_names_that_do_not_exist() -> None:
    assert no_such("metric", "dise", ["iou", "dice"], "task x") == "task x: unknown metric 'dise'; did you mean dice? known: dice, iou"
    assert no_such("metric", "zzz", ["iou", "dice"]) == "unknown metric 'zzz'; known: dice, iou"
    assert no_such("loss", "dic", ["dice", "disc"]) == "unknown loss 'dic'; did you mean disc or dice? known: dice, disc"
    assert str(unknown("metric", "zzz", ["dice"], "here")) == "here: unknown metric 'zzz'; known: dice"


def test_arguments_that_are_not_taken() -> None:
    def build(task: str, gamma: float = 2.0, weights: object = None) -> None: ...

    refuse_arguments(build, ["gamma", "weights"], "loss focal", taken=["task"])
    with pytest.raises(ConfigError, match=r"^loss focal: unknown argument 'gama'; did you mean gamma\? known: gamma, weights$"):
        refuse_arguments(build, ["gama"], "loss focal", taken=["task"])
    with pytest.raises(ConfigError, match="unknown argument 'task'"):
        refuse_arguments(build, ["task"], "loss focal", taken=["task"])
