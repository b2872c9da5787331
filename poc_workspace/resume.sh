#!/usr/bin/env bash
# Goes on with a job whose server (or whole federation) was interrupted, after the last step that it finished; prints the new
# job's id. Server and sites must still have their folders; nothing of the interrupted job is changed.
#
#   ./resume.sh KIT JOB_FOLDER JOB_ID
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m medflare.cli resume "$2" --job "$3" --out "$scratch/job" >&2
"$here/submit.sh" "$1" "$scratch/job"
