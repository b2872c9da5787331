"""Text that somebody else wrote, as a log, a terminal and a table may show it."""

from typing import Any, Final

NAME: Final = 100  # most characters of a name


def printable(text: str) -> str:
    """Free text on one line, whose characters are what they look like.

    Control characters, escapes of terminals, marks that turn the direction of writing and invisible characters are written as Python writes
    them; what is no Unicode is a question mark.

    Args:
        text: for example a file's name, or what another party sent.

    Examples:
        >>> printable("two\\n lines"), printable("\\x1b[2Jgone \\u202etxt.exe"), printable("Müller 腦")
        ('two lines', '\\\\x1b[2Jgone \\\\u202etxt.exe', 'Müller 腦')
    """
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    """The same, with lines and tabs as they are."""
    if text.isprintable():
        return text
    letters = text.encode(errors="replace").decode()
    return "".join(letter if letter.isprintable() or letter in "\t\r\n" else letter.encode("unicode_escape").decode() for letter in letters)


def printable_json(value: Any, depth: int = 32) -> Any:
    """JSON in which every text is printable, names included.

    Raises:
        ValueError: it is nested deeper.
    """
    if depth < 0:
        raise ValueError("nested too deep")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): printable_json(inner, depth - 1) for name, inner in value.items()}
    return [printable_json(inner, depth - 1) for inner in value] if isinstance(value, list | tuple) else value


def is_name(text: str) -> bool:
    """Whether a text can name a task, a label, a site or a model: in a table, in a figure and as a part of a file's name.

    Examples:
        >>> is_name("optic cup"), is_name(".."), is_name("a\\x1b[2Jb"), is_name("x" * 101)
        (True, False, False, False)
    """
    return bool(text.strip()) and text.isprintable() and len(text) <= NAME and text not in (".", "..")
