"""A table of a study in Markdown, and what its cells say."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from medflare.evaluation.presentation import UNDEFINED, format_metric

# What would end a cell, or be HTML or a link: sites name models.
_MARKUP = re.compile(r"\||<(?=\S)|\](?=\()")


@dataclass(frozen=True)
class Table:
    """Lines of cells, the first with the headings, and how many columns are words; the others are
    numbers. As text it is Markdown. A bold cell is between two pairs of asterisks.
    """

    lines: Sequence[Sequence[str]]
    left: int

    def __str__(self) -> str:
        rule = ["---"] * self.left + ["---:"] * (len(self.lines[0]) - self.left)
        text = ""
        for line in [self.lines[0], rule, *self.lines[1:]]:
            cells = [_MARKUP.sub(r"\\\g<0>", cell) for cell in line]
            text += f"| {' | '.join(cells)} |\n"
        return text


def table_unless_empty(lines: Sequence[Sequence[str]], left: int) -> Table | None:
    """A table of lines, or None if there are only headings."""
    return Table(lines, left) if len(lines) > 1 else None


def bullets(lines: Iterable[str]) -> str:
    """The lines as a list in Markdown."""
    return "".join(f"- {line}\n" for line in lines)


def spread(metric: str, values: "pd.Series[float]") -> str:
    """ "mean ± standard deviation" of the defined values; the mean alone of one value."""
    defined = values.dropna()
    if defined.empty:
        return UNDEFINED
    text = format_metric(metric, defined.mean())
    if len(defined) > 1:
        text += f" ± {format_metric(metric, defined.std())}"
    return text


def p_text(p: float | None, test: str = "") -> str:
    if p is None:
        return UNDEFINED
    if p < 0.001:
        return f"< 0.001{test}"
    return f"{p:.3f}{test}"
