#!/usr/bin/env bash
# Follows a job to its end; exits non-zero, and says why, unless the job ended as completed.
#
#   ./watch.sh KIT JOB_ID [SECONDS]          (0: however long it takes)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
nvflare job monitor "$2" --timeout "${3:-0}" --startup-kit "$1" && exit 0 || status=$?
python3 "$here/explain.py" "$1" "$2"
exit $status
