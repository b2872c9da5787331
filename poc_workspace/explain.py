"""Says in plain words why a job did not run: reads what FLARE keeps of it and names the party and the remedy.

    python explain.py KIT JOB_ID

KIT is the startup kit of the lead who submitted the job, or of the project admin. Called by watch.sh when a job fails.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

# What FLARE or medflare writes -> what it means. {party} is the server or the site whose log or reply it is.
MEANINGS = (
    (
        r"BYOC not permitted",
        "{party} refuses jobs that bring their own code; submit the job without app/custom/ (medflare job ... --no-byoc), "
        'or have {party} allow "byoc" to your role in its local/authorization.json',
    ),
    (
        r"Component '(?P<what>[\w.]+)'.* is not in allow_list",
        "{party} does not allow the component {what}; its administrator adds \"medflare.\" to class_allow_list in "
        "{party}'s local/resources.json (install_local.py does so), then submit the job again",
    ),
    (
        r"No module named '(?P<what>[\w.]+)'",
        "{party} lacks the Python package {what}; its administrator installs medflare with pip in the environment that FLARE runs in",
    ),
    (r"medflare: FAILED: (?P<what>.+)", "the federation failed: {what}"),
    (r"medflare: site \S+: (?P<what>.+)", "{party} could not do its part: {what}"),
)


def main(kit: str, job: str) -> int:
    found = list(dict.fromkeys(explanations(_texts(kit, job))))
    for line in found or [f"nothing known about job {job} explains its end; read the logs of the server and the sites"]:
        print(line)
    return 0


def explanations(texts: Iterator[tuple[str, str]]) -> Iterator[str]:
    """What the (party, text) pairs mean, in the order of `MEANINGS` for each line."""
    for party, text in texts:
        for line in text.splitlines():
            for pattern, meaning in MEANINGS:
                if match := re.search(pattern, line):
                    yield meaning.format(party=party, **match.groupdict())
                    break


def _texts(kit: str, job: str) -> Iterator[tuple[str, str]]:
    """(party, what it said): how the job was deployed, then the logs that the server holds."""
    for detail in _nvflare(kit, "meta", job).get("job_deploy_detail") or []:
        party, _, said = detail.partition(": ")
        yield party, said
    logs = _nvflare(kit, "logs", job, "--sites", "all").get("logs") or {}
    for party, text in sorted(logs.items()):
        yield party, text if isinstance(text, str) else json.dumps(text)


def _nvflare(kit: str, *command: str) -> dict[str, Any]:
    """The data of one `nvflare job` command; empty where it has none or is not allowed."""
    reply = subprocess.run(["nvflare", "--format", "json", "job", *command, "--startup-kit", kit], capture_output=True, text=True)
    try:
        return json.loads(reply.stdout).get("data") or {}
    except ValueError:
        return {}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: explain.py KIT JOB_ID")
    sys.exit(main(*sys.argv[1:]))
