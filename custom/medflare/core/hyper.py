"""Hyper-parameters: frozen pydantic dataclasses whose fields have the paper's symbol, source and
range.

Each belongs to the site algorithm or the server algorithm: `site.beta`, `server.beta`. The bare
name is enough if only one has it.
"""

import dataclasses
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import Field, TypeAdapter

from medflare.core.errors import ConfigError
from medflare.core.settings import checked, unknown
from medflare.core.text import Json, JsonDict

H = TypeVar("H")
ALGORITHMS = ("site", "server")
SplitHyper = dict[str, JsonDict]  # {"site": {name: value}, "server": {name: value}}


def param(
    default: Any,
    text: str,
    *,
    symbol: str = "",
    source: str = "",
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A hyper-parameter field of a `core.settings.strict_dataclass`.

    Args:
        default: the value of the paper.
        text: what it does, one line.
        symbol: the paper's symbol ("λ").
        source: its equation, table or section in the paper.
        low: smallest allowed number; None: no bound. Allowed texts are a `Literal` in the
            annotation.
        high: largest allowed number.
    """
    return Field(
        default=default,
        ge=low,
        le=high,
        description=text,
        json_schema_extra={"symbol": symbol, "source": source},
    )


@dataclass(frozen=True)
class Described:
    """The description of a hyper-parameter: allowed texts are `choices`, allowed numbers are from
    `low` to `high` (None: no bound).
    """

    name: str
    default: Any
    text: str
    symbol: str
    source: str
    choices: tuple[Any, ...]
    low: float | None
    high: float | None


def refuse_undecorated(cls: type) -> None:
    """Raise ConfigError for a class of hyper-parameters that is no `strict_dataclass`."""
    own = vars(cls)
    is_decorated = "__pydantic_fields__" in own
    if not is_decorated and own.get("__annotations__"):
        raise ConfigError(f"hyper-parameters {cls.__name__}: put @strict_dataclass above it")


def described(cls: type) -> dict[str, Described]:
    """Every hyper-parameter of a class by name, in the order of its declaration."""
    descriptions = {}
    for name, field in TypeAdapter(cls).json_schema().get("properties", {}).items():
        choices: list[Any] = []
        limits: JsonDict = {}
        options = field.get("anyOf", [])  # of a union
        for part in (field, *options):
            choices += part.get("enum", [])
            if "const" in part:  # a Literal of one value
                choices.append(part["const"])
            limits = part | limits
        descriptions[name] = Described(
            name,
            field.get("default"),
            field.get("description", ""),
            field.get("symbol", ""),
            field.get("source", ""),
            tuple(choices),
            limits.get("minimum"),
            limits.get("maximum"),
        )
    return descriptions


def build_hyper(cls: type[H], values: Json, location: str = "hyper-parameters") -> H:
    """An instance of `cls` from JSON values, or from texts of a command line.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or outside its range, also a
            default.
    """
    read = dict(values)
    for name, field in getattr(cls, "__pydantic_fields__", {}).items():
        if name in values:
            read[name] = _read(values[name], field.annotation)
        elif not field.is_required():
            read[name] = field.default
    return checked(cls, read, location)


def split_hyper(values: Json, owners: Mapping[str, type], method: str) -> SplitHyper:
    """Every value by the algorithm that owns it, not yet checked.

    Args:
        values: bare names, names with their algorithm ("site.beta"), or whole algorithms ({"site":
            {"beta": 1}}).
        owners: algorithm -> class of its hyper-parameters.
        method: for the messages.

    Raises:
        ConfigError: a name that no algorithm has, with the nearest one, or a bare name that both
            have.
    """
    fields = {algorithm: described(owners[algorithm]) for algorithm in ALGORITHMS}
    split: SplitHyper = {"site": {}, "server": {}}
    for name, value in values.items():
        owner, dot, bare = name.partition(".")
        having = [algorithm for algorithm in ALGORITHMS if name in fields[algorithm]]
        if name in ALGORITHMS and isinstance(value, Mapping):
            split[name].update(value)
        elif dot and owner in ALGORITHMS:
            split[owner][bare] = value
        elif len(having) == 1:
            split[having[0]][name] = value
        elif not having:
            raise unknown(
                "hyper-parameter", name, {*fields["site"], *fields["server"]}, f"method {method}"
            )
        else:
            meanings = " and ".join(
                f"{algorithm}.{name} ({fields[algorithm][name].text})" for algorithm in having
            )
            raise ConfigError(
                f"hyper-parameter {name!r} of method {method!r} has two meanings, {meanings}; "
                f"write site.{name} or server.{name}"
            )
    for algorithm in ALGORITHMS:
        for name in split[algorithm]:
            if name not in fields[algorithm]:
                names = [f"{algorithm}.{field}" for field in fields[algorithm]]
                raise unknown("hyper-parameter", f"{algorithm}.{name}", names, f"method {method}")
    return split


def parsed_value(text: str) -> Any:
    """A value of a command line: JSON, true, false, none, parts separated by commas, or text.

    >>> parsed_value("0.3"), parsed_value("true"), parsed_value("none")
    (0.3, True, None)
    >>> parsed_value("1,2"), parsed_value("adam")
    ((1, 2), 'adam')
    """
    lowered = {"true": True, "false": False, "none": None}
    if text.lower() in lowered:
        return lowered[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        if "," not in text:
            return text
        return tuple(parsed_value(part) for part in text.split(","))


def plain(hyper: Any) -> JsonDict:
    """An algorithm's hyper-parameters as JSON values, sorted by name."""
    return json.loads(json.dumps(dataclasses.asdict(hyper), sort_keys=True))


def _options(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _read(value: Any, annotation: Any) -> Any:
    """Text as the number or boolean that it stands for, unless the field accepts this text."""
    if not isinstance(value, str):
        return value
    takes_text = False
    takes_numbers = False
    for option in _options(annotation):
        if get_origin(option) is Literal and value in get_args(option):
            return value
        kind = get_args(option)[0] if get_origin(option) is Annotated else option
        takes_text |= option is str
        takes_numbers |= kind in (int, float)
    parsed = parsed_value(value)
    if not takes_text or (takes_numbers and isinstance(parsed, int | float)):
        return parsed
    return value
