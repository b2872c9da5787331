"""`medflare site ...` from a checkout, also where medflare is not installed.

For example: python party.py setup KIT --bring-code

The processes that it starts do not see the checkout: a job that brings its code runs that code.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "custom"))

from medflare.cli import main as medflare


def main(arguments: Sequence[str]) -> int:
    return medflare(["site", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
