"""The whole command: its parser, and how it ends. Every subcommand exits non-zero when it failed and says why in one line."""

import argparse
import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Container, Sequence
from itertools import takewhile
from typing import Any, Final, NoReturn

import medflare
from medflare.cli import data, jobs, methods, models, results, run, site, starting, studies, watching
from medflare.core.errors import MedflareError
from medflare.core.packages import end_quickly
from medflare.data.progress import print_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: of the command line; None: those that the process was started with.

    Returns:
        The exit status: 0, 1 where something failed, 130 after Ctrl-C.

    Raises:
        SystemExit: an option is unknown or help was asked for.
    """
    _print_anything()
    end_quickly()
    print_lines()
    options = command_line().parse_args(arguments)
    try:
        return int(options.command(options))
    except MedflareError as error:
        print(f"medflare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print("; ".join(["medflare: interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130
    except EOFError:
        print("medflare: no answer came; give what is asked for as an option, or --yes where there is one", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at the end
        return 1
    except shutil.Error as error:
        print(f"medflare: {_about_copies(error)}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:  # no file of the user's: where it comes from says more than one line
            raise
        print(f"medflare: {_about_a_file(error)}", file=sys.stderr)
        return 1


_REMEDIES: Final = {
    errno.ENOENT: "correct the path",
    errno.ENOTDIR: "a file stands where a folder is needed; correct the path",
    errno.EEXIST: "a file stands where a folder is needed; correct the path",
    errno.EISDIR: "a folder stands where a file is needed; correct the path",
    errno.EACCES: "use a place that this account may read and write, or change its permissions",
    errno.EPERM: "use a place that this account may read and write, or change its permissions",
    errno.EROFS: "use a place that can be written, or mount it so",
    errno.ENOSPC: "make room on the disk, or use another one",
    errno.EDQUOT: "make room within this account's quota, or use another disk",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _about_a_file(error: OSError) -> str:
    """One line about a file that cannot be used: its path, what the system says, the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "use another place")
    return f"{error.filename or 'what the command prints'}: {error.strerror}; {remedy}"


def _about_copies(error: shutil.Error) -> str:
    """One line about the first of the files that could not be copied, of which Python lists all, each with what the system said."""
    said = error.args[0] if error.args else ""
    if not isinstance(said, list) or not said:
        return f"{' '.join(str(said).split())}; use another place"
    _, place, reason = said[0]
    number = re.match(r"\[Errno (\d+)\]", str(reason))
    return _about_a_file(OSError(int(number[1]), os.strerror(int(number[1])), str(place))) if number else f"{place}: {reason}"


def _print_anything() -> None:
    """A letter that the terminal's encoding does not have is shown as an escape: names of sites and files may hold any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def command_line() -> argparse.ArgumentParser:
    """The parser of the whole command; the options that it returns hold the subcommand's function as `command`."""
    parser = _CommandLine(
        prog="medflare",
        description="Federated medical imaging: personal models for the hospitals that train, a good one for those that never did.",
        epilog="Start with: medflare run fedsm --sites 4    (embedded synthetic images, a few minutes on two cores). With images of your "
        "own: medflare data init FOLDER, then medflare task init FOLDER --out task.json (docs/tutorial.md)",
    )
    parser.add_argument("--version", action="version", version=f"medflare {medflare.__version__}")
    kind: type[argparse.ArgumentParser] = _Parser
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=kind)
    parser.commands = commands.choices
    for group in (run, jobs, watching, site, studies, results, methods, data, starting, models):
        group.add_commands(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that refuses what it does not know in one line, with the nearest option or command that it has.

    It completes no option: of `job` --sites would be taken for --sites-per-round.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **{**settings, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, which would first complain of what is missing, and only then of what is misspelt."""
        words = list(sys.argv[1:] if args is None else args)
        for word in takewhile(self._own, words):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in word and name not in self._option_string_actions:
                from medflare.core.settings import no_such

                self.error(no_such("option", name, (known for known in self._option_string_actions if known.startswith("--"))))
        options, left = super().parse_known_args(words, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return options, left

    def _own(self, word: str) -> bool:
        """Whether options may still follow that are not those of a subcommand, nor values."""
        return word.startswith("-") if self._subparsers else word != "--"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, with the nearest of the choices."""
        if action.choices is not None and value not in action.choices:
            from medflare.core.settings import no_such

            what = "choice" if action.option_strings else str(action.metavar or action.dest).lower()
            raise argparse.ArgumentError(action if action.option_strings else None, no_such(what, str(value), map(str, action.choices)))

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and one line. The usage of some commands fills a window; it stands in their help."""
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help shows what it takes\n")


class _CommandLine(_Parser):
    """Takes a command of two words, "job watch", for itself, where the first word alone is a command with arguments of its own."""

    commands: Container[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, which finds the command in the first of the arguments."""
        words = list(sys.argv[1:] if args is None else args)
        two = " ".join(words[:2])
        return super().parse_known_args([two, *words[2:]] if two in self.commands else words, namespace)
