#!/usr/bin/env bash
# Goes on with a job whose server (or whole federation) was interrupted, after the last step that it finished; prints the new
# job's id. Server and sites must still have their folders; nothing of the interrupted job is changed.
#
#   ./resume.sh KIT JOB_FOLDER JOB           (JOB: its id, the beginning of its id, or its name)
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: resume.sh KIT JOB_FOLDER JOB" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
job=$(python3 - "$1" "$3" <<'END'
import sys
from pathlib import Path

from medflare.core.errors import MedflareError
from medflare.flare.jobs.sessions import interrupted_job

try:
    print(interrupted_job(Path(sys.argv[1]), sys.argv[2]))
except MedflareError as error:
    sys.exit(f"resume.sh: {error}")
END
)
python3 -m medflare.cli resume "$2" --job "$job" --out "$scratch/job" > /dev/null # its hint is for a job that stays
"$here/submit.sh" "$1" "$scratch/job"
