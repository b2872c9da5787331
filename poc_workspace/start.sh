#!/usr/bin/env bash
# Starts a server or a site from its startup kit, and waits until its log says that it is up.
#
#   ./start.sh KIT [SECONDS]
set -euo pipefail
umask 077 # states, models, predictions and decoded images: for the account that runs the site alone
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kit=$(cd "$1" && pwd)
limit=${2:-60}
python3 "$here/check_clock.py" "$kit"

# How long a finished job waits for the last word of a site that is gone; FLARE's default is a quarter of an hour.
export NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT=${NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT:-60}

log=$kit/log.txt
touch "$log"
before=$(wc -l <"$log") # what earlier starts wrote does not count
"$kit/startup/start.sh" >>"$kit/start.log" 2>&1 </dev/null
[[ -f $kit/startup/fed_server.json ]] && sign="Server started" || sign="Successfully registered client"
for ((second = 0; second < limit; second++)); do
    if tail -n "+$((before + 1))" "$log" | grep -q "$sign"; then
        echo "$(basename "$kit") is up"
        exit 0
    fi
    sleep 1
done
echo "$(basename "$kit") is not up after $limit s; see $log and $kit/start.log" >&2
exit 1
