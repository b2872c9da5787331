#!/usr/bin/env bash
# Writes one startup kit per participant of a project file. The project admin runs it, on a machine that he trusts: the root key
# and everybody's private keys are made here. (Keys that never leave the site: the section of that name in docs/deployment.md.)
#
#   ./provision.sh [PROJECT.yml] [WORKSPACE] [OPTIONS of nvflare provision, such as --add-client site-5.yml]
#   ./provision.sh --leave-root-key ...        the root key stays in the clear: for trials on one machine
#
# The root key is kept under a passphrase, which is asked for, or taken from MEDFLARE_ROOT_PASSPHRASE.
set -euo pipefail
umask 077 # the root key and all private keys: for this account's eyes alone
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
locked=yes
if [[ ${1:-} == --leave-root-key ]]; then
    locked=no
    shift
fi
project=${1:-$here/project.yml}
workspace=${2:-$PWD/federation}
shift $(($# < 2 ? $# : 2))

# Without the key of kits that are there nvflare would make another root, whose kits can never join.
name=$(python3 -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1], encoding="utf-8"))["name"])' "$project" 2>/dev/null) || name=
state=$workspace/$name/state # of another project in the workspace the key may stay away; what is no project file nvflare refuses
if [[ -n $name && ! -f $state/cert.json && ! -f $state/cert.json.locked ]] && compgen -G "$workspace/$name/prod_*" >/dev/null; then
    echo "provision.sh: $workspace/$name has kits and no root key: put cert.json.locked back into $state" >&2
    exit 1
fi

if [[ $locked == yes ]]; then
    if [[ -z ${MEDFLARE_ROOT_PASSPHRASE:-} ]]; then
        if [[ ! -t 0 ]]; then
            echo "provision.sh: no passphrase for the root key: set MEDFLARE_ROOT_PASSPHRASE (12 characters or more)" >&2
            exit 1
        fi
        read -rsp "passphrase of the root key (12 characters or more): " MEDFLARE_ROOT_PASSPHRASE && echo
        read -rsp "once more: " again && echo
        if [[ $MEDFLARE_ROOT_PASSPHRASE != "$again" ]]; then
            echo "provision.sh: these are two passphrases; nothing was written" >&2
            exit 1
        fi
    fi
    export MEDFLARE_ROOT_PASSPHRASE
    python3 "$here/root_key.py" unlock "$workspace"
    trap '[[ ! -d $workspace ]] || python3 "$here/root_key.py" lock "$workspace"' EXIT # whatever happens in between
elif compgen -G "$workspace/*/state/cert.json.locked" >/dev/null; then
    echo "provision.sh: the root key of $workspace is locked, and without it nvflare would make another: leave out --leave-root-key" >&2
    exit 1
fi

nvflare provision -p "$project" -w "$workspace" --force "$@"
newest=$(ls -td "$workspace"/*/prod_* | head -n 1) # by time: by name prod_100 comes before prod_99, and another project's after this one's
kits=()
for kit in "$newest"/*/; do
    if [[ -f $kit/startup/fed_server.json || -f $kit/startup/fed_client.json ]]; then
        kits+=("$kit")
    fi
done
python3 "$here/party.py" setup "${kits[@]}"
chmod -R go= "$newest" # nvflare lets everybody read and run its scripts, those in the kits of people too
echo "startup kits: $newest"
if [[ $newest != */prod_00 ]]; then
    echo "Hand over those of new parties alone and delete the others: kits of earlier generations stay in use."
fi
echo "To check a kit: medflare site doctor KIT. (nvflare preflight-check, which nvflare names above, disturbs a party that is up.)"
