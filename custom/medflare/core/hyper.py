"""Hyper-parameters: frozen pydantic dataclasses whose fields carry the paper's symbol, its source and what they allow.

Each belongs to the site algorithm or the server algorithm, and is named within it: `site.beta` and `server.beta` are two
things. The bare name serves wherever one algorithm owns it.
"""

import dataclasses
import difflib
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import Field

from medflare.core.errors import ConfigError
from medflare.core.settings import checked

H = TypeVar("H")
ALGORITHMS: Final = ("site", "server")
Halved = dict[str, dict[str, Any]]  # {"site": {name: value}, "server": {name: value}}


def param(default: Any, text: str, *, symbol: str = "", source: str = "", low: float | None = None, high: float | None = None) -> Any:
    """A hyper-parameter field of a dataclass declared with `core.settings.STRICT`.

    Args:
        default: the value that the paper (or the reading chosen in the specification) uses.
        text: what it does, one line.
        symbol: the paper's symbol, for example "λ".
        source: the equation, table or section it comes from.
        low: smallest allowed number; None: no bound.
        high: largest allowed number; None: no bound. The allowed texts stand in the annotation, as a `Literal`.

    Returns:
        A pydantic field, which the dataclass turns into a checked attribute.

    Examples:
        >>> param(0.7, "share of the own model", symbol="λ", low=0, high=1).default
        0.7
    """
    return Field(default=default, ge=low, le=high, description=text, json_schema_extra={"symbol": symbol, "source": source})


@dataclass(frozen=True)
class Described:
    """What there is to say about a hyper-parameter.

    Attributes:
        choices: the allowed texts, where they are few.
        low, high: the allowed closed range of a number, None where it is open.
    """

    name: str
    default: Any
    text: str
    symbol: str
    source: str
    choices: tuple[Any, ...]
    low: float | None
    high: float | None


def described(cls: type) -> dict[str, Described]:
    """Every hyper-parameter of a class by name, in the order of its declaration."""
    found = {}
    for name, field in getattr(cls, "__pydantic_fields__", {}).items():
        about = field.json_schema_extra or {}
        options = _options(field.annotation)
        bounds = [*field.metadata, *(bound for option in options for bound in getattr(option, "__metadata__", ()))]
        limits = [*bounds, *(inner for bound in bounds for inner in getattr(bound, "metadata", ()))]
        low, high = (next((getattr(limit, end) for limit in limits if hasattr(limit, end)), None) for end in ("ge", "le"))
        choices = tuple(choice for option in options if get_origin(option) is Literal for choice in get_args(option))
        text = (field.description or "", about.get("symbol", ""), about.get("source", ""))
        found[name] = Described(name, field.default, *text, choices, low, high)
    return found


def build_hyper(cls: type[H], values: Mapping[str, Any], place: str = "hyper-parameters") -> H:
    """An instance of `cls`, checked; text from a command line becomes what the field takes.

    Raises:
        ConfigError: a name that `cls` lacks, or a value of the wrong type or outside its range, with what it takes.
    """
    annotations = {name: field.annotation for name, field in getattr(cls, "__pydantic_fields__", {}).items()}
    read = {name: _read(value, annotations[name]) if name in annotations else value for name, value in values.items()}
    return checked(cls, read, place)


def halved(values: Mapping[str, Any], owners: Mapping[str, type], method: str) -> Halved:
    """Every value under the algorithm that owns it, none of them checked yet.

    Args:
        values: bare names, names with their algorithm ("site.beta"), or whole algorithms ({"site": {"beta": 1}}).
        owners: algorithm -> class of its hyper-parameters.
        method: for the messages.

    Raises:
        ConfigError: a name that no algorithm has, with the nearest one, or a bare name that both have.
    """
    fields = {algorithm: described(owners[algorithm]) for algorithm in ALGORITHMS}
    found: Halved = {algorithm: {} for algorithm in ALGORITHMS}
    for name, value in values.items():
        if name in ALGORITHMS and isinstance(value, Mapping):
            found[name].update(value)
            continue
        algorithm, dot, bare = name.partition(".")
        if dot and algorithm in ALGORITHMS:
            found[algorithm][bare] = value
            continue
        having = [algorithm for algorithm in ALGORITHMS if name in fields[algorithm]]
        if len(having) > 1:
            meanings = " and ".join(f"{algorithm}.{name} ({fields[algorithm][name].text})" for algorithm in ALGORITHMS)
            remedy = f"write site.{name} or server.{name}"
            raise ConfigError(f"hyper-parameter {name!r} of method {method!r} has two meanings, {meanings}; {remedy}")
        found[having[0] if having else _nowhere(name, fields, method)][name] = value
    for algorithm in ALGORITHMS:
        for name in found[algorithm]:
            if name not in fields[algorithm]:
                raise ConfigError(_no_such(f"{algorithm}.{name}", name, fields[algorithm], method))
    return found


def _nowhere(name: str, fields: Mapping[str, Mapping[str, Any]], method: str) -> str:
    raise ConfigError(_no_such(name, name, {known: None for algorithm in ALGORITHMS for known in fields[algorithm]}, method))


def _no_such(shown: str, name: str, known: Mapping[str, Any], method: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(known)) or 'none'}"
    return f"method {method!r} has no hyper-parameter {shown!r}; {hint}"


def parsed_value(text: str) -> Any:
    """What somebody wrote on a command line: JSON, true, false, none, parts separated by commas, or text.

    >>> parsed_value("0.3"), parsed_value("true"), parsed_value("none"), parsed_value("1,2"), parsed_value("adam")
    (0.3, True, None, (1, 2), 'adam')
    """
    lowered = {"true": True, "false": False, "none": None}
    if text.lower() in lowered:
        return lowered[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return tuple(parsed_value(part) for part in text.split(",")) if "," in text else text


def plain(hyper: Any) -> dict[str, Any]:
    """An algorithm's hyper-parameters by name, as JSON has them, sorted."""
    return json.loads(json.dumps(dataclasses.asdict(hyper), sort_keys=True))


def _options(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _read(value: Any, annotation: Any) -> Any:
    """Text as the number or truth value that it stands for, unless the field takes this very text."""
    if not isinstance(value, str):
        return value
    parsed, options = parsed_value(value), _options(annotation)
    if any(get_origin(option) is Literal and value in get_args(option) for option in options):
        return value
    takes_text = any(option is str for option in options)
    takes_numbers = any((get_args(option)[0] if get_origin(option) is Annotated else option) in (int, float) for option in options)
    return parsed if not takes_text or (takes_numbers and isinstance(parsed, int | float)) else value
