"""What `medflare methods` shows: every hyper-parameter of a method in two lines that fit any window and can be searched with grep."""

import textwrap
from typing import TYPE_CHECKING

from medflare.core.hyper import Described, described
from medflare.evaluation.presentation import format_setting

if TYPE_CHECKING:
    from medflare.methods.method import Method

_INDENT = 2 * " "


def method_listing(method: "Method", width: int | None = None) -> str:
    """A method's title, paper and hyper-parameters, those of the site half before those of the server half.

    A hyper-parameter has its name as `--set` takes it, its default, the paper's symbol, its place in the paper, allowed values
    and its meaning.

    Args:
        method: the method.
        width: of the window in characters; None: lines are as long as they are.
    """
    halves = {half: described(owner) for half, owner in method.hyper_classes.items()}
    lines = [*_filled(f"{method.name}: {method.title}", width, 0), *_filled(method.paper, width, 1)]
    lines += _filled(f"models: {_models(method)}", width, 1)
    for half, origin in zip(halves, method.halves, strict=True):
        heading = half if origin == method.name else f"{half} half of {origin}"
        lines += _filled(heading if halves[half] else f"{heading}: no hyper-parameters", width, 1)
        for name, about in halves[half].items():
            ambiguous = all(name in fields for fields in halves.values())
            lines += _entry(f"{half}.{name}" if ambiguous else name, about, width)
    return "\n".join(lines)


def _models(method: "Method") -> str:
    if not method.trains:
        return "none, it trains nothing"
    return ", ".join(method.roles) + ("" if method.outside else "; none for sites that never train")


def _entry(name: str, about: Described, width: int | None) -> list[str]:
    origin = ", ".join(filter(None, (about.symbol, about.source)))
    facts = "; ".join(filter(None, (origin, _allowed(about))))
    known = f"  [{facts}]" if facts else ""
    return [*_filled(f"{name} = {format_setting(about.default)}{known}", width, 2), *_filled(about.text, width, 4)]


def _filled(text: str, width: int | None, depth: int) -> list[str]:
    """The text as lines, `depth` steps from the left; what does not fit goes on one step deeper."""
    first = depth * _INDENT
    if width is None:
        return [first + text]
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=first + _INDENT, break_on_hyphens=False)


def _allowed(about: Described) -> str:
    """The choices or the closed range of a hyper-parameter; empty where anything of its type goes."""
    if about.choices:
        return ", ".join(map(format_setting, about.choices))
    if about.low is None or about.high is None:
        return f"≥ {about.low:g}" if about.low is not None else f"≤ {about.high:g}" if about.high is not None else ""
    return f"{about.low:g} to {about.high:g}"
