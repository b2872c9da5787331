#!/usr/bin/env bash
# Downloads a finished job and shows its results; exits non-zero if the federation failed.
#
#   ./fetch.sh KIT JOB [FOLDER]              (JOB: its id or its name)
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: fetch.sh KIT JOB [FOLDER]" >&2; exit 2; }
exec python3 -m medflare.cli job fetch "$2" --kit "$1" --out "${3:-$PWD/$2}"
