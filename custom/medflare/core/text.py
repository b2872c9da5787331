"""Text for a log, a terminal and a table: that of another party made safe, and shapes; text files
that people write.
"""

import codecs
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

NAME = 100  # maximum characters of a name
LONGEST_REASON = 2_000  # characters of an event or an error
LARGEST_INT = 2**63
_MOST_MB = 200  # of a file that people write
Json = Mapping[str, Any]  # a JSON object
JsonDict = dict[str, Any]  # one that may be changed
Say = Callable[[str], None]  # takes a line of progress


def printable(text: str) -> str:
    """Text on one line, without control characters, terminal escapes, invisible characters and
    marks of the writing direction.

    They are written as Python escapes; invalid Unicode becomes a question mark.

    Examples:
        >>> printable("two\\n lines"), printable("\\x1b[2Jgone \\u202etxt.exe")
        ('two lines', '\\\\x1b[2Jgone \\\\u202etxt.exe')
        >>> printable("Müller 腦")
        'Müller 腦'
    """
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    """The text as by `printable`, with line feeds and tabs as they are."""
    if text.isprintable():
        return text
    letters = []
    for letter in text.encode(errors="replace").decode():
        # Spaces (Zs) are not "printable", as U+202F in the names of screenshots.
        if letter.isprintable() or letter in "\t\n" or unicodedata.category(letter) == "Zs":
            letters.append(letter)
        else:
            letters.append(letter.encode("unicode_escape").decode())
    return "".join(letters)


def shown(value: object) -> str:
    """A value of another party for a message: the beginning of a text, else its type."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, int) and abs(value) < LARGEST_INT:
        return str(value)
    return type(value).__name__


def reason_line(text: object) -> str:
    """A site's reason as one printable line of limited length."""
    line = printable(str(text)[: 2 * LONGEST_REASON])
    return line[:LONGEST_REASON] or "no reason given"


def printable_json(value: Any, depth: int = 32) -> Any:
    """A JSON value with every text and name printable; ValueError if it is nested deeper than
    `depth`.
    """
    if depth < 0:
        raise ValueError("nested too deep")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        items = value.items()
        return {printable(str(name)): printable_json(inner, depth - 1) for name, inner in items}
    if isinstance(value, list | tuple):
        return [printable_json(inner, depth - 1) for inner in value]
    return value


def is_name(text: str) -> bool:
    """Whether a text can name a task, a label, a site or a model, in a table, a figure and a file
    name.

    Examples:
        >>> is_name("optic cup"), is_name(".."), is_name("a\\x1b[2Jb"), is_name("x" * 101)
        (True, False, False, False)
    """
    if not text.strip() or not text.isprintable():
        return False
    return len(text) <= NAME and text not in (".", "..")


def is_site_name(text: str) -> bool:
    """Whether a text can name a site, and its folder.

    Examples:
        >>> is_site_name("site-1"), is_site_name("a/b"), is_site_name("-2")
        (True, False, False)
    """
    return is_name(text) and not text.startswith("-") and "/" not in text and "\\" not in text


def format_shape(sides: Iterable[Any]) -> str:
    """A shape for messages, for example "64 x 48"."""
    return " x ".join(f"{side:g}" if isinstance(side, float) else str(side) for side in sides)


def format_seconds(seconds: float) -> str:
    """A duration, measured or estimated.

    Examples:
        >>> format_seconds(0.432), format_seconds(42.3), format_seconds(200.4), format_seconds(7500)
        ('0.43 s', '42 s', '3 min 20 s', '2 h 05 min')
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def read_text(path: Path) -> str:
    """The text of a file that people write, as editors on all systems save it.

    UTF-8 with or without a byte order mark, or UTF-16 with one; line ends are left as they are.
    ValueError for another encoding, a pipe, a device and more than 200 MB, OSError if the file
    cannot be read.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError("no file but a pipe or a device")
    size = path.stat().st_size / 1e6
    if size > _MOST_MB:
        raise ValueError(f"{size:.0f} MB, more than {_MOST_MB} MB; split it")
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not text in UTF-8, byte {error.start}; save it in UTF-8") from None
    if "\0" in text:
        raise ValueError("not text in UTF-8, it has zero bytes; save it in UTF-8")
    return text


def read_json(path: Path) -> Any:
    """The JSON value of a file that people write, see `read_text`; ValueError for other content."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Invalid \\"):
            raise ValueError(f"{error}; in a path, write / for \\") from None
        raise
