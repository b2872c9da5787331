"""The `medflare` command: a file for each group of subcommands."""

from medflare.cli.command import main

__all__ = ["main"]
