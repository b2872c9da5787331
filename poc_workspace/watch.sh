#!/usr/bin/env bash
# Follows a job to its end, round by round; exits non-zero, and says why, unless the job ended as completed.
#
#   ./watch.sh KIT JOB [SECONDS]             (JOB: its id or its name; 0: however long it takes)
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: watch.sh KIT JOB [SECONDS]" >&2; exit 2; }
exec python3 -m medflare.cli job watch "$2" --kit "$1" --timeout "${3:-0}"
