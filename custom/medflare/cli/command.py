"""The whole command: its subcommands, and how it ends. Every subcommand exits non-zero when it failed and says why in one line."""

import errno
import io
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final

import typer
from typer.main import get_command

import medflare
from medflare.cli import data, federation, methods, models, site, studies
from medflare.cli.options import AUTO_HELP
from medflare.core.errors import MedflareError
from medflare.core.packages import end_quickly
from medflare.data.progress import print_lines

_UsageError: Any = typer.BadParameter.__bases__[0]
_REMEDIES: Final = {
    errno.ENOENT: "correct the path",
    errno.ENOTDIR: "a file stands where a folder is needed; correct the path",
    errno.EEXIST: "a file stands where a folder is needed; correct the path",
    errno.EISDIR: "a folder stands where a file is needed; correct the path",
    errno.EACCES: "use a place that this account may read and write, or change its permissions",
    errno.EPERM: "use a place that this account may read and write, or change its permissions",
    errno.ENOSPC: "make room on the disk, or use another one",
    errno.EDQUOT: "make room within this account's quota, or use another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

app = typer.Typer(
    name="medflare",
    help="Federated medical imaging: personal models for the hospitals that train, a good one for those that never did.",
    epilog="Start with: medflare run fedsm --sites 4    (embedded synthetic images, a few minutes on two cores). With images of your "
    "own: medflare data init FOLDER, then medflare task init FOLDER --out task.json (docs/tutorial.md)",
    **AUTO_HELP,
)
for group in (data, federation, methods, models, site, studies):
    group.add_commands(app)


def _version(asked: bool) -> None:
    if asked:
        print(f"medflare {medflare.__version__}")
        raise typer.Exit


@app.callback()
def _top(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version.")) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: of the command line; None: those that the process was started with.

    Returns:
        The exit status: 0, 1 where something failed, 130 after Ctrl-C.

    Raises:
        SystemExit: help was asked for (status 0), or an option or a command is unknown (2).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of sites and files may hold letters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    end_quickly()
    print_lines()
    try:
        return _invoked(list(sys.argv[1:] if arguments is None else arguments))
    except MedflareError as error:
        problem = str(error)
    except KeyboardInterrupt as stop:
        print("; ".join(["medflare: interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130
    except EOFError:
        problem = "no answer came; give what is asked for as an option, or --yes where there is one"
    except BrokenPipeError:  # whoever read the output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at the end
        return 1
    except shutil.Error as error:  # its first argument lists all files that could not be copied
        first = error.args[0][0] if error.args and isinstance(error.args[0], list) and error.args[0] else ("", error, "")
        problem = f"{first[1]}: {first[2]}"
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:  # no file of the user's: where it comes from says more than one line
            raise
        remedy = _REMEDIES.get(error.errno or 0, "use another place")
        problem = f"{error.filename or 'what the command prints'}: {error.strerror}; {remedy}"
    print(f"medflare: {problem}", file=sys.stderr)
    return 1


def _invoked(arguments: list[str]) -> int:
    """The status of the subcommand. What the command line does not know is one line: the usage of some commands fills a window."""
    command: Any = get_command(app)
    try:
        with command.make_context("medflare", arguments) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx else "medflare"
        print(f"{path}: {' '.join(error.format_message().split())} ({path} --help shows what it takes)", file=sys.stderr)
        raise SystemExit(2) from None
