"""`medflare methods`: what there is, and every hyper-parameter in two lines that fit any window and can be searched with grep."""

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from medflare.cli.options import add_command
from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from medflare.core.hyper import Described
    from medflare.methods.method import Method

Algorithm = Annotated[str | None, typer.Option(metavar="METHOD", help="Use that algorithm of another method")]


def add_commands(app: typer.Typer) -> None:
    """Declare it."""
    add_command(app, "methods", methods, "medflare methods", "medflare methods fedsm", "medflare methods moon --server-algorithm grace")


def methods(
    method: Annotated[str | None, typer.Argument(help="One method (default: all)")] = None,
    site_algorithm: Algorithm = None,
    server_algorithm: Algorithm = None,
) -> int:
    """List methods, ours and those that other installed packages bring, with their hyper-parameters.

    Those of both algorithms as --set takes them: default, the paper's symbol and place, what is allowed, and what it does.
    """
    from medflare.methods.catalogue import get_method, method_names

    if method is None and (site_algorithm or server_algorithm):
        raise ConfigError(
            "--site-algorithm and --server-algorithm change a method; name it: medflare methods METHOD --site-algorithm OTHER"
        )
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if method is not None:
        print(method_listing(get_method(method, site=site_algorithm, server=server_algorithm), width))
        return 0
    failed = 0
    for name in method_names():
        try:
            print(method_listing(get_method(name), width), end="\n\n")
        except ConfigError as error:  # a broken package of somebody else hides no other method
            print(f"medflare: {error}", file=sys.stderr)
            failed = 1
    return failed


def method_listing(method: "Method", width: int | None = None) -> str:
    """A method's title, paper and hyper-parameters, those of the site algorithm before those of the server algorithm.

    A hyper-parameter has its name as `--set` takes it, its default, the paper's symbol, its place in the paper, allowed values
    and its meaning.

    Args:
        method: the method.
        width: of the window in characters; None: lines are as long as they are.
    """
    from medflare.core.hyper import described

    algorithms = {algorithm: described(owner) for algorithm, owner in method.hyper_classes.items()}
    lines = [*_filled(f"{method.name}: {method.title}", width, 0), *_filled(method.paper, width, 1)]
    lines += _filled(f"models: {_models(method)}", width, 1)
    for algorithm, origin in zip(algorithms, method.algorithms, strict=True):
        heading = algorithm if origin == method.name else f"{algorithm} algorithm of {origin}"
        lines += _filled(heading if algorithms[algorithm] else f"{heading}: no hyper-parameters", width, 1)
        for name, about in algorithms[algorithm].items():
            ambiguous = all(name in fields for fields in algorithms.values())
            lines += _entry(f"{algorithm}.{name}" if ambiguous else name, about, width)
    return "\n".join(lines)


def _models(method: "Method") -> str:
    if not method.trains:
        return "none, it trains nothing"
    return ", ".join(method.roles) + ("" if method.outside else "; none for sites that never train")


def _entry(name: str, about: "Described", width: int | None) -> list[str]:
    from medflare.evaluation.presentation import format_setting

    origin = ", ".join(filter(None, (about.symbol, about.source)))
    meta = "; ".join(filter(None, (origin, _allowed(about))))
    known = f"  [{meta}]" if meta else ""
    return [*_filled(f"{name} = {format_setting(about.default)}{known}", width, 2), *_filled(about.text, width, 4)]


def _filled(text: str, width: int | None, depth: int) -> list[str]:
    """The text as lines, `depth` steps from the left; what does not fit goes on one step deeper."""
    first = depth * "  "
    if width is None:
        return [first + text]
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=first + "  ", break_on_hyphens=False)


def _allowed(about: "Described") -> str:
    """The choices or the closed range of a hyper-parameter; empty where anything of its type goes."""
    from medflare.evaluation.presentation import format_setting

    if about.choices:
        return ", ".join(map(format_setting, about.choices))
    if about.low is None or about.high is None:
        return f"≥ {about.low:g}" if about.low is not None else f"≤ {about.high:g}" if about.high is not None else ""
    return f"{about.low:g} to {about.high:g}"
