"""Why a job did not end as completed, in plain words: what FLARE keeps of it names the party, and the remedy follows."""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from nvflare.apis.job_def import JobMetaKey
from nvflare.fuel.flare_api.flare_api import Session

from medflare.flare.exchange.wire import UNABLE

# What FLARE or medflare writes -> what it means. {party} is the server or the site whose log or reply it is.
MEANINGS: Final[Mapping[str, str]] = {
    r"BYOC not permitted": (
        "{party} refuses jobs that bring their own code; submit the job without app/custom/ (medflare job ... --no-byoc), "
        'or have {party} allow "byoc" to your role in its local/authorization.json'
    ),
    r"Component '(?P<what>[\w.]+)'.* is not in allow_list": (
        "{party} does not allow the component {what}; where it is one of medflare's, its administrator brings class_allow_list in "
        "{party}'s local/resources.json up to date (`medflare site setup KIT --replace-policies`), then submit the job again"
    ),
    r"^(?:\w+: )?(?P<kind>component|network) (?P<what>.+?) refused: (?P<why>.+)": (
        "{party} refused the {kind} {what} that the job names: {why}; where it is one of medflare's, the administrator of {party} runs "
        "`medflare site setup KIT --replace-policies`, then submit the job again"
    ),
    r"No module named '(?P<what>[\w.]+)'": (
        "{party} lacks the Python package {what}; its administrator installs medflare with pip in the environment that FLARE runs in, "
        "or, where it allows jobs that bring code, submit one that does (medflare job ... --embed-code)"
    ),
    r"medflare: FAILED: (?!aborted)(?P<what>.+)": "the federation failed: {what}",
    rf"{UNABLE}(?:site \S+: )?(?P<what>.+)": "{party} could not do its part: {what}",
}


def explained(opened: Session, job: str) -> list[str]:
    """What is known about the end of a job, each reason once; never empty.

    Args:
        opened: a session of who submitted it, or of the project admin.
        job: its id.
    """
    found = list(dict.fromkeys(explanations(_texts(opened, job))))
    return found or [f"nothing known about job {job} explains its end; read the logs of the server and the sites"]


def explanations(texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What texts mean, line by line.

    Args:
        texts: (party, what it said).

    Examples:
        >>> list(explanations([("server", "... ERROR - medflare: FAILED: no site is present")]))
        ['the federation failed: no site is present']
    """
    for party, text in texts:
        for line in text.splitlines():
            matches = ((re.search(pattern, line), meaning) for pattern, meaning in MEANINGS.items())
            yield from (meaning.format(party=party, **match.groupdict()) for match, meaning in matches if match)


def server_log(opened: Session, job: str) -> str:
    """The server's log of a job.

    Args:
        opened: a session of who submitted it, or of the project admin.
        job: its id.
    """
    return "".join(opened.get_job_logs(job)["logs"].values())


def deployment(meta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(party, what it said) when FLARE handed the job out.

    Args:
        meta: of the job.
    """
    for detail in meta.get(JobMetaKey.JOB_DEPLOY_DETAIL.value) or []:
        party, _, said = str(detail).partition(": ")
        yield party, said


def _texts(opened: Session, job: str) -> Iterator[tuple[str, str]]:
    """(party, what it said): how the job was deployed, the error logs that sites let the server have, and the server's log."""
    yield from deployment(opened.get_job_meta(job))
    if "ERRORLOG" in " ".join(opened.list_job_components(job)):
        downloaded = Path(opened.download_job_components(job))
        try:
            for log in sorted(downloaded.rglob("ERRORLOG_*")):
                yield log.name.removeprefix("ERRORLOG_"), log.read_text(errors="replace")
        finally:
            shutil.rmtree(downloaded, ignore_errors=True)  # in the kit's transfer/, where results would then get another name
    yield from opened.get_job_logs(job)["logs"].items()
