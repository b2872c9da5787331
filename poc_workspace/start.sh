#!/usr/bin/env bash
# Starts a server or a site from its startup kit, and waits until its log says that it is up: medflare site start.
#
#   ./start.sh KIT [SECONDS]
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: start.sh KIT [SECONDS]" >&2; exit 2; }
exec python3 "$(dirname "${BASH_SOURCE[0]}")/party.py" start "$1" --timeout "${2:-60}"
