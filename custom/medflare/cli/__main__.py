"""`python -m medflare.cli`: the command where its script is not on the path."""

import sys

from medflare.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
