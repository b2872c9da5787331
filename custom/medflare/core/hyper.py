"""Hyper-parameters: frozen dataclasses whose fields carry the paper's symbol, the source and the allowed values."""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from medflare.core.errors import ConfigError

H = TypeVar("H")


def param(
    default: Any,
    text: str,
    *,
    symbol: str = "",
    source: str = "",
    choices: Sequence[Any] = (),
    low: float = -math.inf,
    high: float = math.inf,
) -> Any:
    """A hyper-parameter field.

    Args:
        default: the value that the paper (or the reading chosen in the specification) uses.
        text: what it does, one line.
        symbol: the paper's symbol, for example "λ".
        source: the equation, table or section it comes from.
        choices: the allowed values, where they are few.
        low, high: the allowed closed range of a number.
    """
    metadata = {"text": text, "symbol": symbol, "source": source, "choices": tuple(choices), "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class NoHyper:
    """For a half without settings."""


def field_names(*hyper_classes: type) -> list[str]:
    return sorted({field.name for cls in hyper_classes for field in dataclasses.fields(cls)})


def build_hyper(cls: type[H], values: Mapping[str, Any]) -> H:
    """An instance of `cls` from those of `values` that it has fields for, checked; text (from a command line) is converted.

    Raises:
        ConfigError: a value of the wrong type or outside its range, naming the field and what it takes.
    """
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    chosen = {name: _checked(name, value, hints[name], fields[name].metadata) for name, value in values.items() if name in fields}
    return cls(**chosen)


def effective(values: Mapping[str, Any], *hyper_classes: type) -> dict[str, Any]:
    """Every hyper-parameter by name as it is used: the given values, checked, and the defaults of the others."""
    merged: dict[str, Any] = {}
    for cls in hyper_classes:
        merged |= dataclasses.asdict(build_hyper(cls, values))
    return dict(sorted(merged.items()))


def check_names(values: Mapping[str, Any], hyper_classes: Sequence[type], method: str) -> None:
    """Every name must belong to one of the classes; otherwise a ConfigError that suggests the nearest one."""
    known = field_names(*hyper_classes)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise ConfigError(f"method {method!r} has no hyper-parameter {name!r}; {hint}")


def _checked(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    converted = _converted(name, value, hint)
    choices = metadata.get("choices", ())
    if choices and converted not in choices:
        raise ConfigError(f"hyper-parameter {name} = {value!r}: choose one of {', '.join(map(str, choices))}")
    if isinstance(converted, (int, float)) and not isinstance(converted, bool):
        low, high = metadata.get("low", -math.inf), metadata.get("high", math.inf)
        if not low <= converted <= high:
            raise ConfigError(f"hyper-parameter {name} = {value!r} is outside [{low:g}, {high:g}]")
    return converted


def _converted(name: str, value: Any, hint: Any) -> Any:
    allowed = getattr(hint, "__args__", ()) or (hint,)
    if isinstance(value, str) and str not in allowed:
        value = parsed_value(value)
    if isinstance(value, str) and str in allowed and not isinstance(value, bool):
        # a union such as `float | str` ("tune" or a number): prefer the number when the text is one
        number = parsed_value(value)
        if isinstance(number, (int, float)) and float in allowed:
            value = number
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, int) and not isinstance(value, bool) and float in allowed and int not in allowed:
        value = float(value)
    plain = tuple(getattr(kind, "__origin__", kind) for kind in allowed)
    if (isinstance(value, bool) and bool not in plain) or not isinstance(value, plain):
        wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in plain)
        raise ConfigError(f"hyper-parameter {name} = {value!r} must be {wanted}")
    return value


def parsed_value(text: str) -> Any:
    import json

    lowered = {"true": True, "false": False, "none": None}
    if text.lower() in lowered:
        return lowered[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return tuple(parsed_value(part) for part in text.split(",")) if "," in text else text
