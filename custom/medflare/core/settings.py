"""Settings as strict pydantic dataclasses, and their errors as one line that names the place and the setting."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError, WrapValidator

from medflare.core.errors import ConfigError, MedflareError

# For `@dataclass(frozen=True, config=STRICT)`: a number is never read from a text, nor a truth value from a number.
STRICT: Final = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", arbitrary_types_allowed=True)
_SHOWN: Final = 80  # characters of a refused value

S = TypeVar("S")


def checked(kind: type[S], values: Mapping[str, Any], place: str, *, error: type[MedflareError] = ConfigError, remedy: str = "") -> S:
    """An instance of the pydantic dataclass `kind`, made of settings that somebody wrote.

    Args:
        kind: the dataclass, declared with `STRICT`.
        values: setting -> value as JSON has it; a list may stand for a tuple.
        place: where the settings come from, the beginning of the message: a file, a task, a method.
        error: what is raised.
        remedy: the end of the message where a setting is missing; "" for none.

    Raises:
        error: a setting that is unknown (with the nearest names), missing, of another type or outside its range.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass
    if unlisted := [name for name in values if name not in known]:
        raise error(no_such("setting", unlisted[0], known, place))
    try:
        return _built(kind, values)
    except ValidationError as problem:
        end = f"; {remedy}" if remedy and problem.errors()[0]["type"] == "missing" else ""
        raise error(f"{place}: {first_problem(problem)}{end}") from None


def first_problem(problem: ValidationError) -> str:
    """What pydantic found, of the first setting that is wrong, on one line: "optimizer.lr: Input should be greater than 0, got -1"."""
    found = problem.errors(include_url=False)
    first = [item for item in found if item["loc"][:1] == found[0]["loc"][:1]]  # of a union one a member
    path = ".".join(str(part) for part in max((item["loc"] for item in first), key=len) if not str(part).startswith("function-"))
    words = " or ".join(dict.fromkeys(item["msg"].removeprefix("Value error, ") for item in first))
    value = found[0]["input"]
    if found[0]["type"] == "missing" or not (path or isinstance(value, str | int | float | None)):
        return f"{path}{': ' if path else ''}{words}"
    shown = repr(value)
    return f"{path}{': ' if path else ''}{words}, got {shown if len(shown) <= _SHOWN else f'{shown[: _SHOWN - 3]}...'}"


def nested(kind: type) -> BeforeValidator:
    """For `limit: Annotated[Limit, nested(Limit)]`: a setting that is an object with settings of its own, as strict as the outer ones."""
    return BeforeValidator(lambda value: _built(kind, value) if isinstance(value, Mapping) else value)


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
            raise ValueError(f"expected {words}") from None

    return WrapValidator(check)


def unknown(what: str, value: str, known: Iterable[str], place: str = "") -> ConfigError:
    """The error for a name that does not exist, see `no_such`."""
    return ConfigError(no_such(what, value, known, place))


def no_such(what: str, value: str, known: Iterable[str], place: str = "") -> str:
    """One line about a name that does not exist, with the closest names that do.

    Args:
        what: kind of thing, for example "metric".
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
    """Refuse an argument that the signature of `build` does not have.

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


def _built(kind: type[S], values: Mapping[str, Any]) -> S:
    return kind(**{str(name): _with_tuples(value) for name, value in values.items()})


def _with_tuples(value: Any) -> Any:
    """JSON has lists only, where a frozen dataclass has tuples; mappings stay what they are."""
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value
