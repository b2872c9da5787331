"""`medflare job watch`, `fetch` and `list`: the lead's look at the jobs of a federation."""

import argparse
import os
from functools import partial
from pathlib import Path

from medflare.cli.options import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Declare them."""
    watch = add_command(
        commands,
        "job watch",
        _watch,
        help="follow a job of a federation; exits non-zero, and says why, unless it completes",
        description="Follow a job to its end: every step with its sites' metrics, what is rejected, late or missing, and who is silent. "
        "Where the server goes away it is tried again. Exits non-zero, and says why, unless the job completes.",
        examples=(
            "medflare job watch fedsm-brain_lgg --kit lead@coordination.org",
            "medflare job watch 0b9e31c5 --kit lead@coordination.org --timeout 3600",
        ),
    )
    watch.add_argument("job", metavar="JOB", help="name (of several the newest that runs), id, or the beginning of an id")
    _add_kit(watch)
    watch.add_argument("--timeout", type=float, default=0.0, metavar="SECONDS", help="watch no longer than that (default: to its end)")
    text = "wait so long for a server that goes away meanwhile (default: %(default)g)"
    watch.add_argument("--patience", type=float, default=600.0, metavar="SECONDS", help=text)
    fetch = add_command(
        commands,
        "job fetch",
        _fetch,
        help="download a job's results and show them; exits non-zero if the federation failed",
        description="Download what the server has of a job that has ended, for this account alone, and show its results. Exits non-zero "
        "if the federation failed.",
        examples=("medflare job fetch fedsm-brain_lgg --kit lead@coordination.org --out results",),
    )
    fetch.add_argument("job", metavar="JOB", help="name (where several have it, the id), id, or the beginning of an id")
    _add_kit(fetch)
    fetch.add_argument("--out", type=Path, metavar="FOLDER", help="where the results go (default: a folder named like the job's id)")
    several = add_command(
        commands,
        "job list",
        _list,
        help="the jobs of a federation, the newest last",
        examples=("medflare job list --kit lead@coordination.org",),
    )
    _add_kit(several)


def _add_kit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kit", type=Path, required=True, help="startup kit of the lead, or of the project admin")


def _watch(options: argparse.Namespace) -> int:
    from medflare.flare.jobs.watching import watch_job

    _refuse_expired(options.kit)
    say, waits = partial(print, flush=True), {"timeout": options.timeout, "patience": options.patience}
    return 0 if watch_job(options.kit, options.job, say, **waits) else 1


def _fetch(options: argparse.Namespace) -> int:
    from medflare.evaluation.console import show_results
    from medflare.flare.jobs.sessions import fetch_job, found_job, id_of, jobs_of, session

    _refuse_expired(options.kit)
    before = os.umask(0o077)  # what was learnt from patients is for this account
    try:
        with session(options.kit) as opened:
            job = id_of(found_job(jobs_of(opened), options.job))
            place = fetch_job(opened, job, options.out or Path(job))
    finally:
        os.umask(before)
    return 0 if show_results(place) else 1


def _list(options: argparse.Namespace) -> int:
    from medflare.flare.jobs.sessions import jobs_of, listing, session

    _refuse_expired(options.kit)
    with session(options.kit) as opened:
        print(listing(jobs_of(opened)))
    return 0


def _refuse_expired(folder: Path) -> None:
    """Nothing where a person's certificates are valid, or are missing, which the session says: FLARE asks only whether the server is up.

    Raises:
        ConfigError: one is not valid by this machine's clock.
    """
    from medflare.cli.kits.kit import Kit, certificate_end

    certificate, key, root = (folder / "startup" / name for name in ("client.crt", "client.key", "rootCA.pem"))
    if certificate.is_file() and root.is_file():
        certificate_end(Kit(folder, "site", folder.resolve().name, "", 0, certificate, key, root))
