#!/usr/bin/env bash
# Downloads a finished job and shows its results; exits non-zero if the federation failed.
#
#   ./fetch.sh KIT JOB_ID [FOLDER]
set -euo pipefail
umask 077
folder=${3:-$PWD/$2}
nvflare job download "$2" -o "$folder" --startup-kit "$1"
python3 -m medflare.cli results "$folder"
