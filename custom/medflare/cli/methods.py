"""`medflare methods`: what there is, and what can be set."""

import argparse
import shutil
import sys

from medflare.cli.options import Commands, add_command, add_method_options, chosen_method
from medflare.core.errors import ConfigError


def add_commands(commands: Commands) -> None:
    """Declare it."""
    parser = add_command(
        commands,
        "methods",
        _methods,
        help="list methods with hyper-parameters, defaults, paper symbols and equations",
        description="List methods, ours and those that other installed packages bring, with the hyper-parameters of both halves as "
        "--set takes them: default, the paper's symbol, where it stands in the paper, what is allowed, and what it does.",
        examples=("medflare methods", "medflare methods fedsm", "medflare methods moon --server-half grace"),
    )
    add_method_options(parser, optional=True)


def _methods(options: argparse.Namespace) -> int:
    from medflare.cli.listing import method_listing
    from medflare.methods.catalogue import get_method, method_names

    if options.method is None and (options.site_half or options.server_half):
        raise ConfigError("--site-half and --server-half change a method; name it: medflare methods METHOD --site-half OTHER")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if options.method is not None:
        print(method_listing(chosen_method(options), width))
        return 0
    problems = []
    for name in method_names():
        try:
            print(method_listing(get_method(name), width), end="\n\n")
        except ConfigError as error:  # a broken package of somebody else hides no other method
            problems.append(str(error))
    print("\n".join(f"medflare: {problem}" for problem in problems), end="\n" * bool(problems), file=sys.stderr)
    return 1 if problems else 0
