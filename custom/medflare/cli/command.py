"""The whole command: its parser, and how it ends. Every subcommand exits non-zero when it failed and says why in one line."""

import argparse
import os
import sys
from collections.abc import Container, Sequence
from typing import Any

from medflare.cli import data, methods, models, results, run, starting, studies
from medflare.cli.federation import jobs, site, watching
from medflare.core.errors import MedflareError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: of the command line; None: those that the process was started with.

    Returns:
        The exit status: 0, 1 where something failed, 130 after Ctrl-C.

    Raises:
        SystemExit: an option is unknown or help was asked for.
    """
    options = command_line().parse_args(arguments)
    try:
        return int(options.command(options))
    except MedflareError as error:
        print(f"medflare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("medflare: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at the end
        return 1


def command_line() -> argparse.ArgumentParser:
    """The parser of the whole command; the options that it returns hold the subcommand's function as `command`."""
    parser = _CommandLine(
        prog="medflare",
        description="Federated medical imaging: personal models for the hospitals that train, a good one for those that never did.",
        epilog="Start with: medflare run fedsm --sites 4    (embedded synthetic images, a few minutes on two cores). With images of your "
        "own: medflare data init FOLDER, then medflare task init FOLDER --out task.json (docs/tutorial.md)",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser)
    parser.commands = commands.choices
    for group in (run, jobs, watching, site, studies, results, methods, data, starting, models):
        group.add_commands(commands)
    return parser


class _CommandLine(argparse.ArgumentParser):
    """Takes a command of two words, "job watch", for itself, where the first word alone is a command with arguments of its own."""

    commands: Container[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, which finds the command in the first of the arguments."""
        words = list(sys.argv[1:] if args is None else args)
        two = " ".join(words[:2])
        return super().parse_known_args([two, *words[2:]] if two in self.commands else words, namespace)
