"""Says in plain words why a job did not run: reads what FLARE keeps of it and names the party and the remedy.

    python explain.py KIT JOB

KIT is the startup kit of the lead who submitted the job, or of the project admin; JOB its id or its name.
"""

import sys
from pathlib import Path

from medflare.core.errors import MedflareError
from medflare.flare.jobs.sessions import found_job, id_of, jobs_of, session
from medflare.flare.jobs.watching import explained


def main(kit: str, job: str) -> None:
    with session(Path(kit)) as opened:
        print("\n".join(explained(opened, id_of(found_job(jobs_of(opened), job)))))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: explain.py KIT JOB")
    try:
        main(*sys.argv[1:])
    except MedflareError as error:
        sys.exit(f"explain.py: {error}")
