"""Markdown tables, and numbers as they stand in their cells."""

from collections.abc import Sequence

from medflare.evaluation.presentation import UNDEFINED, format_metric


def markdown(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines as a Markdown table.

    Args:
        lines: cells; the first line holds the headings.
        left: all columns but so many first ones are set flush right.
    """
    rule = ["---" if column < left else "---:" for column in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]]) + "\n"


def p_value(p: float | None) -> str:
    """Three decimals, a dash where there is no test."""
    return UNDEFINED if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def interval(bounds: tuple[float, float] | None) -> str:
    """An interval of differences, a dash where there is none.

    Examples:
        >>> interval((-0.01, 0.125)), interval(None)
        ('-0.010 to +0.125', '–')
    """
    return UNDEFINED if bounds is None else f"{bounds[0]:+.3f} to {bounds[1]:+.3f}"


def spread(metric: str, mean: float | None, sd: float | None) -> str:
    """ "mean ± standard deviation", the mean alone where there is no spread, a dash where there is neither."""
    if mean is None:
        return UNDEFINED
    return format_metric(metric, mean) + ("" if sd is None else f" ± {format_metric(metric, sd)}")
