"""What `medflare methods` shows: every hyper-parameter of a method in two lines that fit any window and can be searched with grep."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medflare.methods.catalogue import Method

_INDENT, _DEEPER = 2 * " ", 6 * " "


def method_listing(method: "Method", width: int | None = None) -> str:
    """A method's hyper-parameters: default, paper's symbol, place in the paper, allowed values and the half that reads it; meaning.

    Args:
        width: of the window in characters; None: lines are as long as they are.
    """
    halves = {"site": method.site_class.Hyper, "server": method.server_class.Hyper}
    readers: dict[str, list[str]] = {}
    fields: dict[str, dataclasses.Field[Any]] = {}
    for half, hyper in halves.items():
        for field in dataclasses.fields(hyper):
            fields[field.name] = field
            readers.setdefault(field.name, []).append(half)
    lines = _filled(f"{method.name}: {method.paper}", width, "", _INDENT)
    for name, field in fields.items():
        about = field.metadata
        default = (
            str(field.default).lower() if field.default is None or isinstance(field.default, bool) else field.default
        )  # as `--set` takes them
        facts = [", ".join(filter(None, (about["symbol"], about["source"]))), _allowed(about), " and ".join(readers[name])]
        lines += _filled(f"{name} = {default}  [{'; '.join(filter(None, facts))}]", width, _INDENT, _DEEPER)
        lines += _filled(about["text"], width, _DEEPER, _DEEPER)
    return "\n".join(lines)


def _filled(text: str, width: int | None, first: str, further: str) -> list[str]:
    if width is None:
        return [first + text]
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=further, break_on_hyphens=False)


def _allowed(metadata: Mapping[str, Any]) -> str:
    """The choices or the closed range of a hyper-parameter; empty where anything of its type goes."""
    if metadata["choices"]:
        return ", ".join(map(str, metadata["choices"]))
    low, high = metadata["low"], metadata["high"]
    if math.isinf(low) and math.isinf(high):
        return ""
    return f"≥ {low:g}" if math.isinf(high) else f"≤ {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"
