"""Runs commands of medflare one after the other in one process: a new one would import FLARE for each of them.

Standard input has a line of JSON for each, a list of words; the standard output has [exit status, output, errors].
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from medflare.cli.command import main


def run(words: list[str]) -> tuple[object, str, str]:
    """The exit status of a command, its output and its errors."""
    output = io.StringIO()
    errors = io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            status: object = main(words)
        except SystemExit as end:
            status = end.code
    return status, output.getvalue(), errors.getvalue()


for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)
