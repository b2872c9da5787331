"""Runs that are killed within their steps, and taken up again and again until they end."""

from collections.abc import Callable
from typing import Any

Results = dict[str, Any]
Run = Callable[[Callable[[str], None]], Results]  # with a reporter of progress


class Killed(BaseException):
    """What no handler of errors takes for one of its own."""


def in_pieces(begin: Run, go_on: Run) -> tuple[Results, int]:
    """Results of a run that is killed within every step but the first, and how often it was; `go_on` takes up the step that was lost."""
    killed, attempt = 0, begin
    while True:
        try:
            return attempt(_dying_at(2)), killed
        except Killed:
            killed, attempt = killed + 1, go_on


def _dying_at(call: int) -> Callable[[str], None]:
    """A reporter of progress that ends the run within its n-th step: sites have it behind them, the checkpoint does not hold it."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == call:
            raise Killed

    return say
