"""`medflare job watch` and `medflare job list`: the lead's look at the jobs of a federation."""

import argparse
from functools import partial
from pathlib import Path

from medflare.cli.options import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Declare both."""
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

    say, waits = partial(print, flush=True), {"timeout": options.timeout, "patience": options.patience}
    return 0 if watch_job(options.kit, options.job, say, **waits) else 1


def _list(options: argparse.Namespace) -> int:
    from medflare.flare.jobs.listing import listing
    from medflare.flare.jobs.sessions import jobs_of, session

    with session(options.kit) as opened:
        print(listing(jobs_of(opened)))
    return 0
