#!/usr/bin/env bash
# Starts a server or a site with FLARE's own start.sh, its files for this account alone, and waits until its log says that it is up.
#
#   ./start.sh KIT [SECONDS]
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: start.sh KIT [SECONDS]" >&2; exit 2; }
kit=$(cd "$1" && pwd)
name=$(basename "$kit")
umask 077
touch "$kit/log.txt" "$kit/start.log"
before=$(wc -l <"$kit/log.txt") # what earlier starts wrote does not count
starts=$(wc -l <"$kit/start.log")
# How long the server waits for the last word of a site that is gone: FLARE's own is a quarter of an hour.
export NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT=${NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT:-60}
"$kit/startup/start.sh" >>"$kit/start.log" 2>&1 </dev/null
for _ in $(seq "${2:-60}"); do
    sleep 1
    if tail -n "+$((starts + 1))" "$kit/start.log" | grep "one instance" >/dev/null; then # FLARE writes it in the background
        echo "start.sh: $name runs already" >&2
        exit 1
    fi
    if tail -n "+$((before + 1))" "$kit/log.txt" | grep -E "Server started|Successfully registered client" >/dev/null; then
        echo "$name is up"
        exit 0
    fi
done
echo "start.sh: $name is not up after ${2:-60} s and keeps trying; see $kit/log.txt, $kit/start.log and: medflare site doctor $kit" >&2
exit 1
