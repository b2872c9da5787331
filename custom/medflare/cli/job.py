"""`medflare job`: create a FLARE job folder; submit, watch, fetch and list jobs."""

import os
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from medflare.cli.options import AUTO_HELP, DefaultGroup, Track, add_command, takes
from medflare.cli.run import FederationOptions, chosen
from medflare.core.errors import ConfigError
from medflare.core.text import printable
from medflare.federation.settings import RunSettings

Kit = Annotated[Path, typer.Option(help="Startup kit of the lead, or of the project admin")]
Job = Annotated[
    str,
    typer.Argument(
        help="Name (the newest of several), id, or the beginning of an id", metavar="JOB"
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add `job` with its actions."""
    jobs = typer.Typer(
        cls=DefaultGroup,
        help="Create a FLARE job folder; submit, watch, fetch and list jobs.",
        **AUTO_HELP,
    )
    add_command(
        jobs,
        "create",
        create_job,
        "medflare job create fedsm --task brain_lgg --rounds 20 --set lam=0.3 --out jobs/my_fedsm",
        "medflare job create fedsm --no-byoc --out jobs/my_fedsm          "
        "# for hospitals that accept no code",
        "medflare job create evaluate --model MODEL --no-byoc --out jobs/test   "
        "# every site evaluates it, no site trains",
        "medflare job create fingerprint --task draft.json --no-byoc --out jobs/look   "
        "# for medflare task plan",
        "medflare job create fedsm --step-timeout 600 --min-sites 3 --out jobs/my_fedsm",
    )
    add_command(
        jobs, "submit", submit_job, "medflare job submit jobs/my_fedsm --kit lead@coordination.org"
    )
    add_command(
        jobs,
        "watch",
        watch_job,
        "medflare job watch fedsm-brain_lgg --kit lead@coordination.org",
        "medflare job watch 0b9e31c5 --kit lead@coordination.org --timeout 3600",
    )
    add_command(
        jobs,
        "fetch",
        fetch_job,
        "medflare job fetch fedsm-brain_lgg --kit lead@coordination.org --out results",
    )
    add_command(jobs, "list", list_jobs, "medflare job list --kit lead@coordination.org")
    app.add_typer(jobs, name="job")


@takes("federation", FederationOptions)
@takes("settings", RunSettings, skip=("resume",))
def create_job(
    federation: FederationOptions,
    settings: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Job folder to write")],
    track: Track = None,
    no_byoc: Annotated[
        bool,
        typer.Option(
            "--no-byoc", help="Without app/custom/: for hospitals that reject jobs with code"
        ),
    ] = False,
    embed_code: Annotated[
        bool,
        typer.Option(
            "--embed-code",
            help="app/custom/ holds medflare: sites need torch, monai and nvflare only",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a job folder that --out names")
    ] = False,
) -> int:
    """Write a FLARE job folder for the simulator, POC or production; `medflare job METHOD` is short
    for it.
    """
    from medflare.evaluation.presentation import format_bytes
    from medflare.flare.jobs.building import build_job, size_of

    if not force and (out / "meta.json").exists():
        raise ConfigError(
            f"--out {out}: a job folder is there; use another folder, or replace it with --force"
        )
    _, task, hyper, arguments = chosen(federation, settings)
    folder = build_job(
        task=task,
        hyper=hyper,
        out=out,
        byoc=not no_byoc,
        embed_code=embed_code,
        track=track,
        **arguments,
    )
    if federation.model is not None:
        weights = task.network.get("weights") or hyper["server"]
        file = f"{weights['file']} of {federation.model} (sha256 {weights['sha256'][:16]}...)"
        print(f"the server reads {file}: name it in the server's local/medflare.json")
    place = shlex.quote(str(folder))
    if no_byoc:  # FLARE's simulator lets such a job name its own classes only
        command = (
            f"medflare job submit {place} --kit KIT    (on this machine: "
            f"medflare run {federation.method} ...)"
        )
    elif task.embedded:
        command = f"nvflare simulator {place} -n 4 -t 4 -w workspace"
    else:
        command = (
            f"MEDFLARE_DATA_ROOT=DATA nvflare simulator {place} -c SITE,SITE -t 2 -w "
            "workspace    (DATA has a folder per site)"
        )
    print(f"job folder: {folder} ({format_bytes(size_of(folder))})\nnext: {command}")
    return 0


def submit_job(
    folder: Annotated[
        Path, typer.Argument(help="Job folder, of medflare job create", metavar="FOLDER")
    ],
    kit: Kit,
) -> int:
    """Submit a job folder to the server of a federation, and print the job's id."""
    from medflare.flare.jobs.sessions import session

    _check_certificate(kit)
    if not (folder / "meta.json").is_file():
        raise ConfigError(f"{folder} is no job folder; write one with medflare job create")
    with session(kit) as connection:
        print(printable(connection.submit_job(str(folder.resolve()))))
    return 0


def watch_job(
    job: Job,
    kit: Kit,
    timeout: Annotated[float, typer.Option(help="Seconds to watch (0: until the job ends)")] = 0.0,
    patience: Annotated[
        float, typer.Option(help="Seconds to wait for a server that disappears")
    ] = 600.0,
) -> int:
    """Follow a job of a federation to its end; exits non-zero, with the reason, unless it
    completes.

    Prints every step with its sites' metrics, rejected, late and missing replies, and sites without
    a heartbeat.
    """
    from medflare.flare.jobs.watching import watch_job

    _check_certificate(kit)
    say = partial(print, flush=True)
    completed = watch_job(kit, job, say, timeout=timeout, patience=patience)
    return 0 if completed else 1


def fetch_job(
    job: Job,
    kit: Kit,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results (default: a folder named by the id)")
    ] = None,
) -> int:
    """Download a job's results, readable by this account alone, and show them; exits non-zero if
    the federation failed.
    """
    from medflare.evaluation.console import show_results
    from medflare.flare.jobs.sessions import fetch_job, found_job, id_of, jobs_of, session

    _check_certificate(kit)
    mask = os.umask(0o077)
    try:
        with session(kit) as connection:
            identity = id_of(found_job(jobs_of(connection), job))
            folder = fetch_job(connection, identity, out or Path(identity))
    finally:
        os.umask(mask)
    return 0 if show_results(folder) else 1


def list_jobs(kit: Kit) -> int:
    """List the jobs of a federation, the newest last."""
    from medflare.flare.jobs.sessions import jobs_of, listing, session

    _check_certificate(kit)
    with session(kit) as connection:
        print(listing(jobs_of(connection)))
    return 0


def _check_certificate(folder: Path) -> None:
    """Raise ConfigError if a person's certificate is not valid by this machine's clock.

    FLARE would report that the server is down.
    """
    from medflare.cli.startup_kit import certificate_end

    root = folder / "startup" / "rootCA.pem"
    certificate = folder / "startup" / "client.crt"
    if certificate.is_file() and root.is_file():  # otherwise the session reports what is missing
        certificate_end(folder.resolve().name, root, certificate)
