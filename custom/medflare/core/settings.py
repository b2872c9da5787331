"""Settings as pydantic dataclasses, refused in one line that names the setting, what it takes and what it got."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from medflare.core.errors import ConfigError, MedflareError

# For `@dataclass(frozen=True, config=STRICT)`: a number is never read from a text, nor a truth value from a number.
STRICT: Final = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", arbitrary_types_allowed=True)

S = TypeVar("S")

_WORDS: Final = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "a non-empty text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "dataclass_type": "an object",
    "dataclass_exact_type": "an object",
}
_SHOWN: Final = 80  # characters of a refused value
_BOUNDS: Final = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "above")} | {
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}


def checked(kind: type[S], values: Mapping[str, Any], place: str, *, error: type[MedflareError] = ConfigError, remedy: str = "") -> S:
    """An instance of the pydantic dataclass `kind`, made of settings that somebody wrote.

    Args:
        kind: the dataclass, declared with `STRICT`.
        values: setting -> value as JSON has it; a list may stand for a tuple.
        place: where the settings come from, the beginning of the message: a file, a task, a method.
        error: what is raised.
        remedy: the end of the message where a setting is missing.

    Raises:
        error: a setting that is unknown (with the nearest names), missing, of another type or outside its range.
    """
    if stranger := _stranger(kind, values):
        raise error(f"{place}: {stranger}")
    try:
        return _built(kind, values)
    except ValidationError as problem:
        raise error(f"{place}: {first_problem(problem, values, remedy)}") from None


def nested(kind: type) -> BeforeValidator:
    """For `limit: Annotated[Limit, nested(Limit)]`: a setting that is an object with settings of its own, as strict as the outer ones."""

    def build(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value  # an instance, or what pydantic refuses
        if stranger := _stranger(kind, value):
            raise PydanticCustomError("stranger", "{text}", {"text": stranger})
        return _built(kind, value)

    return BeforeValidator(build)


def one_of(*choices: Any) -> AfterValidator:
    """For `Annotated[int, one_of(1, 3)]`: the allowed values, where a `Literal` would take true for 1 or would repeat a table's names."""

    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"one of {', '.join(map(str, choices))}")
        return value

    return AfterValidator(check)


def takes(words: str) -> WrapValidator:
    """For `Annotated[tuple[int, int], takes("[height, width]")]`: what the setting must be, said whatever is wrong with it."""

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(words) from None

    return WrapValidator(check)


def first_problem(problem: ValidationError, values: Mapping[str, Any], remedy: str = "") -> str:
    """The first thing that pydantic found, in words: "lam must be at most 1, got 1.5".

    Args:
        problem: what pydantic raised.
        values: the settings as they were given, by name.
        remedy: what to do about a missing setting; "" for nothing to add.
    """
    found = _most_telling(problem, values)
    kind, location = found["type"], found["loc"]
    if not location:  # of the settings together, by a validator of the whole
        return _expected(found)
    parts, given = _located(location, values)
    if kind == "missing" and isinstance(location[-1], str):
        return f"setting {_path((*parts, location[-1]))!r} is missing" + (f"; {remedy}" if remedy else "")
    path = _path(parts or location)
    if kind == "stranger":
        return f"{path}: {found['ctx']['text']}"
    if kind == "unexpected_keyword_argument":
        return f"unknown setting {path!r}"
    shown = repr(given)
    return f"{path} must be {_expected(found)}, got {shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + '...'}"


def unknown(what: str, value: str, known: Iterable[str], place: str = "") -> ConfigError:
    """The error for a name that does not exist, see `no_such`.

    Args:
        what: kind of thing, for example "metric".
        value: the name that was given.
        known: names that exist.
        place: the beginning of the message; "" for none.
    """
    return ConfigError(no_such(what, value, known, place))


def no_such(what: str, value: str, known: Iterable[str], place: str = "") -> str:
    """One line about a name that does not exist, with the closest names that do.

    Args:
        what: kind of thing, for example "metric".
        value: the name that was given.
        known: names that exist.
        place: the beginning of the message; "" for none.

    Examples:
        >>> no_such("metric", "dise", ["dice", "iou"], "task brain")
        "task brain: unknown metric 'dise'; did you mean dice? known: dice, iou"
    """
    names = sorted(known)
    close = get_close_matches(str(value), names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{place + ': ' if place else ''}unknown {what} {value!r}; {hint}known: {', '.join(names)}"


def refuse_arguments(build: Callable[..., Any], given: Iterable[str], place: str, *, taken: Iterable[str] = ()) -> None:
    """Nothing where `build` takes every argument that a setting gives it.

    Args:
        build: the callable whose signature decides.
        given: names of the arguments in the setting.
        place: the beginning of a message.
        taken: arguments that are not the setting's to give.

    Raises:
        ConfigError: names the first that it does not take, with the nearest names.
    """
    accepted = [name for name in inspect.signature(build).parameters if name not in taken]
    for name in given:
        if name not in accepted:
            raise unknown("argument", name, accepted, place)


def _stranger(kind: type, values: Mapping[str, Any]) -> str | None:
    """One line about the first name that `kind` does not have, or None."""
    known = [field.name for field in dataclasses.fields(kind)]
    return next((no_such("setting", name, known) for name in values if name not in known), None)


def _built(kind: type[S], values: Mapping[str, Any]) -> S:
    return kind(**{name: _with_tuples(value) for name, value in values.items()})


def _with_tuples(value: Any) -> Any:
    """JSON has lists only, where a frozen dataclass has tuples; mappings stay what they are."""
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value


def _most_telling(problem: ValidationError, values: Mapping[str, Any]) -> Any:
    """The first error of the first setting that is wrong; of a union's alternatives, the one that got furthest.

    One whose type fits and whose range does not is further than one whose type is wrong; otherwise all that they would take is said.
    """
    found = problem.errors()
    placed = [(_located(item["loc"], values)[0], item) for item in found if item["loc"][:1] == found[0]["loc"][:1]]
    furthest = max((parts for parts, _ in placed), key=len)  # the first of equally long ones
    alternatives = [item for parts, item in placed if parts == furthest]
    ranged = [item for item in alternatives if item["type"] in _BOUNDS]
    if ranged or len(alternatives) == 1 or alternatives[0]["type"] == "missing":
        return (ranged or alternatives)[0]
    words = list(dict.fromkeys(_expected(item) for item in alternatives))
    if "a number" in words or "a finite number" in words:
        words = [word for word in words if word != "a whole number"]
    return {**alternatives[0], "type": "union", "msg": " or ".join(words)}


def _located(location: tuple[int | str, ...], values: Any) -> tuple[tuple[int | str, ...], Any]:
    """Where pydantic found something and what was given there; its names for alternatives, and what is missing, are passed over."""
    parts: tuple[int | str, ...] = ()
    for part in location:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            continue
        parts = (*parts, part)
    return parts, values


def _path(parts: tuple[int | str, ...]) -> str:
    """ "loss.weights[2]"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _expected(found: Any) -> str:
    kind, context = found["type"], found.get("ctx", {})
    if kind == "union":
        return str(found["msg"])
    if kind in _BOUNDS:
        key, word = _BOUNDS[kind]
        return f"{word} {context[key]:g}"
    if kind in ("literal_error", "enum"):
        return "one of " + context["expected"].replace("''", '""').replace("'", "").replace(" or ", ", ")
    if kind == "none_required":
        return "none"
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])
    if kind == "missing":  # within a list of fixed length
        return "a longer list"
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        return f"a list of {'at least' if kind == 'too_short' else 'at most'} {bound}"
    return _WORDS.get(kind, found["msg"])
