"""`medflare results`: how a finished run ended and what came out."""

import argparse
from pathlib import Path

from medflare.cli.options import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Declare it."""
    parser = add_command(
        commands,
        "results",
        _results,
        help="show the results of a finished run; exits non-zero if it failed",
        examples=(
            "medflare results workspace                  # of nvflare simulator ... -w workspace",
            "medflare results runs/fedsm-phantom-seed0",
        ),
    )
    parser.add_argument("path", type=Path, help="results.json, or a folder somewhere above it (a simulator workspace, a downloaded job)")


def _results(options: argparse.Namespace) -> int:
    from medflare.evaluation.console import show_results

    return 0 if show_results(options.path) else 1
