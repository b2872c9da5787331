"""Says in plain words why a job did not run: reads what FLARE keeps of it and names the party and the remedy.

    python explain.py KIT JOB_ID

KIT is the startup kit of the lead who submitted the job, or of the project admin. Called by watch.sh when a job fails.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

# What FLARE or medflare writes -> what it means. {party} is the server or the site whose log or reply it is.
MEANINGS = {
    r"BYOC not permitted": (
        "{party} refuses jobs that bring their own code; submit the job without app/custom/ (medflare job ... --no-byoc), "
        'or have {party} allow "byoc" to your role in its local/authorization.json'
    ),
    r"Component '(?P<what>[\w.]+)'.* is not in allow_list": (
        '{party} does not allow the component {what}; its administrator adds "medflare." to class_allow_list in '
        "{party}'s local/resources.json (install_local.py does so), then submit the job again"
    ),
    r"No module named '(?P<what>[\w.]+)'": (
        "{party} lacks the Python package {what}; its administrator installs medflare with pip in the environment that FLARE runs in, "
        "or, where it allows jobs that bring code, submit one that does (medflare job ... --embed-code)"
    ),
    r"medflare: FAILED: (?!aborted)(?P<what>.+)": "the federation failed: {what}",
    r"medflare: site \S+: (?P<what>.+)": "{party} could not do its part: {what}",
}


def main(kit: str, job: str) -> None:
    user = json.loads((Path(kit) / "startup" / "fed_admin.json").read_text())["admin"]["username"]
    session = new_secure_session(user, kit)
    try:
        found = list(dict.fromkeys(explanations(_texts(session, job))))
    finally:
        session.close()
    for line in found or [f"nothing known about job {job} explains its end; read the logs of the server and the sites"]:
        print(line)


def explanations(texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What the (party, text) pairs mean, line by line."""
    for party, text in texts:
        for line in text.splitlines():
            matches = ((re.search(pattern, line), meaning) for pattern, meaning in MEANINGS.items())
            yield from (meaning.format(party=party, **match.groupdict()) for match, meaning in matches if match)


def _texts(session: Session, job: str) -> Iterator[tuple[str, str]]:
    """(party, what it said): how the job was deployed, the server's log, and the error logs that sites let the server have."""
    for detail in session.get_job_meta(job).get("job_deploy_detail") or []:
        party, _, said = detail.partition(": ")
        yield party, said
    if "ERRORLOG" in " ".join(session.list_job_components(job)):
        for log in sorted(Path(session.download_job_components(job)).rglob("ERRORLOG_*")):
            yield log.name.removeprefix("ERRORLOG_"), log.read_text(errors="replace")
    yield from session.get_job_logs(job)["logs"].items()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: explain.py KIT JOB_ID")
    main(*sys.argv[1:])
