"""The `medflare` command: its groups, and errors as one line and an exit status."""

import errno
import io
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.main import get_command

import medflare
from medflare.cli import clean, data, job, methods, models, provision, run, site, studies
from medflare.cli.options import AUTO_HELP, add_commands
from medflare.core.errors import MedflareError
from medflare.core.interrupts import interruptible
from medflare.core.packages import end_quickly
from medflare.core.threads import limit_spinning
from medflare.data.progress import print_lines

_UsageError: Any = typer.BadParameter.__bases__[0]
_REMEDIES = {
    errno.ENOENT: "correct the path",
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST), "a file is where a folder is needed; correct the path"
    ),
    errno.EISDIR: "a folder is where a file is needed; correct the path",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or use another place"),
    errno.ENOSPC: "free space on the disk, or use another one",
    errno.EDQUOT: "free space in this account's quota, or use another disk",
}

app = typer.Typer(
    name="medflare",
    help="Federated learning for medical images: personal models for participating hospitals, "
    "general models for all others.",
    epilog="Start with: medflare run fedsm --sites 4    (synthetic images, a few minutes on two "
    "cores). With your images: medflare data init FOLDER, then medflare task init FOLDER "
    "--out task.json (docs/tutorial.md). Hospitals: medflare provision (project admin), "
    "medflare site setup and doctor (each hospital), medflare job create and submit (lead)",
    **AUTO_HELP | {"add_completion": True},
)
add_commands(
    app,
    run=run.run,
    resume=run.resume,
    results=run.results,
    methods=methods.methods,
    predict=models.predict,
    export=models.export,
    clean=clean.clean,
    provision=provision.provision,
)
for module in (data, job, site, studies):
    module.add_groups(app)


def _version(show: bool) -> None:
    if show:
        print(f"medflare {medflare.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 after a failure, 130 after Ctrl-C or SIGTERM.

    SystemExit: after --help (status 0), or for an unknown command or option (2).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # its encoding may lack letters of names
    if arguments is None:  # the command itself, not a call from a program
        # Its processes import nothing from the working directory (Python 3.11 or later): it may be
        # a folder that somebody else has filled.
        os.environ.setdefault("PYTHONSAFEPATH", "1")
        limit_spinning(os.environ)
    end_quickly()
    print_lines()
    try:
        with interruptible():
            return _invoke(list(sys.argv[1:] if arguments is None else arguments))
    except MedflareError as error:
        problem = str(error)
    except (KeyboardInterrupt, typer.Abort) as stop:  # Abort: at a question
        print("; ".join(["medflare: interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130
    except EOFError:
        problem = "no input; answer the question by an option, or with --yes"
    except BrokenPipeError:  # the reader (head, less) has ended
        # Otherwise Python reports an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except shutil.Error as error:
        problem = _copy_problem(error)
    except OSError as error:
        disk_is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if error.filename is None and not disk_is_full:  # a bug or a network error
            raise
        remedy = _REMEDIES.get(error.errno or 0, "use another place")
        problem = f"{error.filename or 'output'}: {error.strerror}; {remedy}"
    print(f"medflare: {problem}", file=sys.stderr)
    return 1


def _copy_problem(error: shutil.Error) -> str:
    """The first file that could not be copied, and why; `copytree` lists them."""
    if isinstance(error.args[0], list):
        _, target, reason = error.args[0][0]
        return f"{target}: {reason}"
    return str(error)


def _invoke(arguments: list[str]) -> int:
    """The exit status of the subcommand.

    An unknown command or option is reported in one line, without the usage.
    """
    if "_MEDFLARE_COMPLETE" in os.environ:  # the shell asks for the words that fit
        app(prog_name="medflare")
    command: Any = get_command(app)
    try:
        with command.make_context("medflare", arguments) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None
    except _UsageError as error:
        if error.ctx and type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help())
            raise SystemExit(2) from None
        path = error.ctx.command_path if error.ctx else _named(command, arguments)
        problem = " ".join(error.format_message().split()).replace("Value error, ", "")
        print(f"{path}: {problem} ({path} --help shows what it takes)", file=sys.stderr)
        raise SystemExit(2) from None


def _named(command: Any, arguments: Sequence[str]) -> str:
    """The command that the first words name, as an error without context does not."""
    path = "medflare"
    for word in arguments:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        path += f" {word}"
    return path
