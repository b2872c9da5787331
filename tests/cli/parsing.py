"""A command line parsed as far as its command, which is not run."""

from collections.abc import Sequence
from typing import Any

from typer.main import get_command

from medflare.cli.command import app


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command's path, and its options by name."""
    context: Any = get_command(app).make_context("medflare", list(words))
    while hasattr(context.command, "resolve_command"):
        name, command, rest = context.command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, rest, parent=context)
    return context.command_path, context.params


def command_names(command: Any = None, path: str = "") -> list[str]:
    """Every command without those that have subcommands: "run", "job watch"."""
    actual = []
    top: Any = command or get_command(app)
    for name, one in top.commands.items():
        actual += (
            command_names(one, f"{path}{name} ") if hasattr(one, "commands") else [f"{path}{name}"]
        )
    return actual
