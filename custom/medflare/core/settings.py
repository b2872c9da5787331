"""Settings as strict pydantic dataclasses, and their errors as one line that names the place and
the setting.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    WrapValidator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema
from pydantic_core.core_schema import json_or_python_schema, no_info_before_validator_function
from typing_extensions import dataclass_transform

from medflare.core.errors import ConfigError, MedflareError
from medflare.core.text import Json, is_site_name

# Of a pydantic dataclass: no conversion between numbers, texts and booleans.
STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", arbitrary_types_allowed=True)
_SHOWN = 80  # characters of a wrong value
_MOST_LISTED = 20  # names that are all listed beside a close one

S = TypeVar("S")


@dataclass_transform(frozen_default=True)
def strict_dataclass(cls: type[S]) -> type[S]:
    """A decorator that makes a frozen pydantic dataclass; a setting of this type may be an object
    of JSON. ConfigError for a list as a default, or a setting without a type.
    """
    inherited = getattr(cls, "__dataclass_fields__", {})
    for name, value in vars(cls).items():
        is_setting = isinstance(value, FieldInfo) or name in inherited
        if is_setting and name not in inspect.get_annotations(cls):
            raise ConfigError(f"{cls.__name__}.{name}: write its type, as {name}: float = ...")
        if isinstance(getattr(value, "default", value), list):
            raise ConfigError(
                f"{cls.__name__}.{name}: a list, which code could change; "
                "write a tuple, and tuple[float, ...] or the like as its type"
            )
    cls.__get_pydantic_core_schema__ = classmethod(_schema)  # type: ignore[attr-defined]
    return dataclass(frozen=True, config=STRICT)(cls)  # type: ignore[return-value]


def _schema(cls: type, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """The schema of what pydantic accepts for the dataclass; it calls this at the decoration."""

    def build(value: Any) -> Any:
        return _built(cls, value) if isinstance(value, Mapping) else value

    schema = handler(source)
    of_python = no_info_before_validator_function(build, schema)
    return json_or_python_schema(json_schema=schema, python_schema=of_python)


def checked(
    kind: type[S],
    values: Json,
    location: str,
    *,
    error: type[MedflareError] = ConfigError,
    remedy: str = "",
) -> S:
    """An instance of the pydantic dataclass `kind` from JSON values.

    Args:
        kind: declared with `STRICT`.
        values: setting -> value; a list may stand for a tuple.
        location: the beginning of an error: a file, a task, a method.
        error: the class to raise.
        remedy: the end of the error if a setting is missing.

    Raises:
        error: a setting is unknown (with the nearest names), missing, of another type or outside
            its range.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            raise error(no_such("setting", name, names, location))
    try:
        return _built(kind, values)
    except ValidationError as problem:
        text = f"{location}: {first_problem(problem)}"
        if remedy and problem.errors()[0]["type"] == "missing":
            text += f"; {remedy}"
        raise error(text) from None


def first_problem(problem: ValidationError) -> str:
    """The first wrong setting of a pydantic error, on one line: "optimizer.lr: Input should be
    greater than 0, got -1".
    """
    errors = problem.errors(include_url=False)
    first = errors[0]
    location: tuple[int | str, ...] = ()
    messages: list[str] = []
    for item in errors:
        if item["loc"][:1] == first["loc"][:1]:  # a union has one for each member
            location = max(location, item["loc"], key=len)
            messages.append(item["msg"].removeprefix("Value error, "))
    text = " or ".join(dict.fromkeys(messages)).replace("a valid tuple", "a list")
    path = ".".join(str(part) for part in location if not str(part).startswith("function-"))
    if path:
        text = f"{path}: {text}"
    value = first["input"]
    if first["type"] == "missing" or not (path or isinstance(value, str | int | float | None)):
        return text
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = f"{shown[: _SHOWN - 3]}..."
    return f"{text}, got {shown}"


def one_of(*choices: Any) -> AfterValidator:
    """For `Annotated[int, one_of(1, 3)]`: allowed values; a `Literal` would accept true for 1."""

    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"one of {', '.join(map(str, choices))}")
        return value

    return AfterValidator(check)


def takes(words: str) -> WrapValidator:
    """For `Annotated[tuple[int, int], takes("[height, width]")]`: one error text, whatever is wrong
    with the value.
    """

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(f"expected {words}") from None

    return WrapValidator(check)


def unknown(kind: str, value: str, names: Iterable[str], location: str = "") -> ConfigError:
    """The error for a name that does not exist, see `no_such`."""
    return ConfigError(no_such(kind, value, names, location))


def no_such(kind: str, value: str, names: Iterable[str], location: str = "") -> str:
    """One line about a name that does not exist, with the closest names that do, and all names
    unless they are many.

    Examples:
        >>> no_such("metric", "dise", ["dice", "iou"], "task brain")
        "task brain: unknown metric 'dise'; did you mean dice? known: dice, iou"
    """
    choices = sorted(names)
    close = get_close_matches(str(value), choices, n=2, cutoff=0.5)
    start = f"{location}: " if location else ""
    hints = [f"did you mean {' or '.join(close)}?"] if close else []
    if not close or len(choices) <= _MOST_LISTED:
        hints.append(f"known: {', '.join(choices)}")
    return f"{start}unknown {kind} {value!r}; {' '.join(hints)}"


def refuse_arguments(
    build: Callable[..., Any], arguments: Iterable[str], location: str, reserved: Iterable[str]
) -> None:
    """Raise ConfigError for an argument that the signature of `build` does not have, or that is
    `reserved`: it is not a setting.
    """
    accepted = set(inspect.signature(build).parameters) - set(reserved)
    for name in arguments:
        if name not in accepted:
            raise unknown("argument", name, accepted, location)


def _built(kind: type[S], values: Json) -> S:
    return kind(**{str(name): _with_tuples(value) for name, value in values.items()})


def _with_tuples(value: Any) -> Any:
    """Lists of JSON as tuples; mappings are not changed."""
    if isinstance(value, list):
        return tuple(_with_tuples(item) for item in value)
    return value


def check_site_name(name: object) -> None:
    """Raise ConfigError unless it can name a site and its folder."""
    if not isinstance(name, str) or not is_site_name(name):
        raise ConfigError(
            f"site {name!r}: a site's name is also a folder's name; use letters, digits, - and _"
        )
