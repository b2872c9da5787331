"""`medflare methods`: the methods and their hyper-parameters, as plain text."""

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Final

import typer

from medflare.cli.options import add_command
from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from medflare.core.hyper import Described
    from medflare.methods.method import Method

_WIDE: Final = 10_000  # columns, where nothing is wrapped
Algorithm = Annotated[str | None, typer.Option(metavar="METHOD", help="Use that algorithm of another method")]


def add_commands(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "methods", methods, "medflare methods", "medflare methods fedsm", "medflare methods moon --server-algorithm grace")


def methods(
    method: Annotated[str | None, typer.Argument(help="One method (default: all)")] = None,
    site_algorithm: Algorithm = None,
    server_algorithm: Algorithm = None,
) -> int:
    """List the methods, also those of other installed packages, with their hyper-parameters.

    For each hyper-parameter: its name in --set, its default, the paper's symbol and equation, allowed values and its meaning.
    """
    from medflare.methods.catalogue import get_method, method_names

    if method is None and (site_algorithm or server_algorithm):
        raise ConfigError("--site-algorithm and --server-algorithm need a method: medflare methods METHOD --site-algorithm OTHER")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    if method is not None:
        print(method_listing(get_method(method, site=site_algorithm, server=server_algorithm), width))
        return 0
    failed = 0
    for name in method_names():
        try:
            print(method_listing(get_method(name), width), end="\n\n")
        except ConfigError as error:  # a broken package of another author must not hide the other methods
            print(f"medflare: {error}", file=sys.stderr)
            failed = 1
    return failed


def method_listing(method: "Method", width: int = _WIDE) -> str:
    """A method's title, paper and hyper-parameters, in lines of at most `width` characters: the site algorithm's, then the server's."""
    from medflare.core.hyper import described

    algorithms = {algorithm: described(owner) for algorithm, owner in method.hyper_classes.items()}
    lines = [*_wrapped(f"{method.name}: {method.title}", width, 0), *_wrapped(method.paper, width, 1)]
    models = ", ".join(method.roles) + ("" if method.outside else "; none for outside sites")
    lines += _wrapped(f"models: {models if method.trains else 'none that is new, it trains nothing'}", width, 1)
    for algorithm, origin in zip(algorithms, method.algorithms, strict=True):
        heading = algorithm if origin == method.name else f"{algorithm} algorithm of {origin}"
        lines += _wrapped(heading if algorithms[algorithm] else f"{heading}: no hyper-parameters", width, 1)
        for name, about in algorithms[algorithm].items():
            ambiguous = all(name in fields for fields in algorithms.values())
            lines += _entry(f"{algorithm}.{name}" if ambiguous else name, about, width)
    return "\n".join(lines)


def _entry(name: str, about: "Described", width: int) -> list[str]:
    """Name, default, symbol, source, and the choices or the range if not any value of its type is allowed; then its meaning."""
    from medflare.evaluation.presentation import format_setting

    if about.choices:
        allowed = ", ".join(map(format_setting, about.choices))
    elif about.low is not None and about.high is not None:
        allowed = f"{about.low:g} to {about.high:g}"
    else:
        allowed = f"≥ {about.low:g}" if about.low is not None else f"≤ {about.high:g}" if about.high is not None else ""
    meta = "; ".join(filter(None, (", ".join(filter(None, (about.symbol, about.source))), allowed)))
    setting = f"{name} = {format_setting(about.default)}" + (f"  [{meta}]" if meta else "")
    return [*_wrapped(setting, width, 2), *_wrapped(about.text, width, 4)]


def _wrapped(text: str, width: int, depth: int) -> list[str]:
    """The text as lines that are indented by `depth` steps; continued lines by one more."""
    first = depth * "  "
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=first + "  ", break_on_hyphens=False)
