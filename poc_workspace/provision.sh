#!/usr/bin/env bash
# Writes one startup kit per participant of a project file. The project admin runs it, on a machine that he trusts: the root key
# and everybody's private keys are made here. (Keys that never leave the sites: docs/deployment.md, "Distributed provisioning".)
#
#   ./provision.sh [PROJECT.yml] [WORKSPACE]
set -euo pipefail
umask 077 # the root key and all private keys: for this account's eyes alone
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=${1:-$here/project.yml}
workspace=${2:-$PWD/federation}

nvflare provision -p "$project" -w "$workspace" --force
newest=$(ls -d "$workspace"/*/prod_* | sort | tail -n 1)
for kit in "$newest"/*/; do
    if [[ -f $kit/startup/fed_server.json || -f $kit/startup/fed_client.json ]]; then
        python3 "$here/install_local.py" "$kit"
    fi
done
echo "startup kits: $newest"
