#!/usr/bin/env bash
# Submits a job folder with the startup kit of a lead (or the project admin) and prints the job's id.
#
#   ./submit.sh KIT JOB_FOLDER
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: submit.sh KIT JOB_FOLDER" >&2; exit 2; }
reply=$(nvflare --format json job submit -j "$2" --startup-kit "$1") || { echo "$reply" >&2; exit 1; }
python3 -c 'import json, sys; print(json.loads(sys.argv[1])["data"]["job_id"])' "$reply"
