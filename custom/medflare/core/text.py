"""Text for a log, a terminal and a table: that of another party made safe, and shapes."""

from collections.abc import Iterable
from typing import Any, Final

NAME: Final = 100  # maximum characters of a name


def printable(text: str) -> str:
    """Text on one line, without control characters, terminal escapes, invisible characters and marks of the writing direction.

    They are written as Python escapes; invalid Unicode becomes a question mark.

    Examples:
        >>> printable("two\\n lines"), printable("\\x1b[2Jgone \\u202etxt.exe"), printable("Müller 腦")
        ('two lines', '\\\\x1b[2Jgone \\\\u202etxt.exe', 'Müller 腦')
    """
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    """The same, with line feeds and tabs as they are."""
    if text.isprintable():
        return text
    letters = text.encode(errors="replace").decode()
    return "".join(letter if letter.isprintable() or letter in "\t\n" else letter.encode("unicode_escape").decode() for letter in letters)


def printable_json(value: Any, depth: int = 32) -> Any:
    """A JSON value with every text and name printable; ValueError if it is nested deeper than `depth`."""
    if depth < 0:
        raise ValueError("nested too deep")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): printable_json(inner, depth - 1) for name, inner in value.items()}
    return [printable_json(inner, depth - 1) for inner in value] if isinstance(value, list | tuple) else value


def is_name(text: str) -> bool:
    """Whether a text can name a task, a label, a site or a model, in a table, a figure and a file name.

    Examples:
        >>> is_name("optic cup"), is_name(".."), is_name("a\\x1b[2Jb"), is_name("x" * 101)
        (True, False, False, False)
    """
    return bool(text.strip()) and text.isprintable() and len(text) <= NAME and text not in (".", "..")


def format_shape(sides: Iterable[Any]) -> str:
    """ "64 x 48", for messages."""
    return " x ".join(f"{side:g}" if isinstance(side, float) else str(side) for side in sides)
