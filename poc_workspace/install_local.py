"""`medflare site setup` under its earlier name: python install_local.py KIT... [OPTIONS], see --help."""

import sys

from party import main

if __name__ == "__main__":
    sys.exit(main(["setup", *sys.argv[1:]]))
