#!/usr/bin/env bash
# Submits a job folder with the startup kit of a lead (or the project admin) and prints the job's id.
#
#   ./submit.sh KIT JOB_FOLDER
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: submit.sh KIT JOB_FOLDER" >&2; exit 2; }
exec python3 -m medflare.cli job submit "$2" --kit "$1"
