#!/usr/bin/env bash
# Asks all sites and the server to sign off and stop, which takes them some seconds. Needs the project admin's startup kit.
#
#   ./stop.sh KIT
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: stop.sh KIT" >&2; exit 2; }
nvflare system shutdown all --force --no-wait --startup-kit "$1"
