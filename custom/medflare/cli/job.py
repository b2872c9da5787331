"""`medflare job`: create a FLARE job folder; submit, watch, fetch and list jobs."""

import os
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from medflare.cli.clean import size_of
from medflare.cli.options import AUTO_HELP, DefaultGroup, PathArgument, Track, add_commands, takes
from medflare.cli.run import FederationOptions, resolve_federation
from medflare.core.errors import ConfigError
from medflare.core.files import refuse_links
from medflare.core.text import JsonDict, printable
from medflare.federation.settings import RunSettings

Kit = Annotated[Path, typer.Option(help="Startup kit of the lead, or of the project admin")]
Job = Annotated[
    str,
    typer.Argument(
        help="Name (of several, the newest that runs), id, or the beginning of an id", metavar="JOB"
    ),
]


def add_groups(app: typer.Typer) -> None:
    """Add `job` with its actions."""
    about = "Create a FLARE job folder; submit, watch, fetch and list jobs."
    jobs = typer.Typer(cls=DefaultGroup, help=about, **AUTO_HELP)
    add_commands(
        jobs, create=create_job, submit=submit_job, watch=watch_job, fetch=fetch_job, list=list_jobs
    )
    app.add_typer(jobs, name="job")


@takes("federation", FederationOptions)
@takes("settings", RunSettings, skip=("resume",))
def create_job(
    federation: JsonDict,
    settings: JsonDict,
    out: Path,
    track: Track = None,
    no_byoc: bool = False,
    embed_code: bool = False,
    force: bool = False,
) -> None:
    """Write a FLARE job folder for the simulator, POC or production; `medflare job METHOD` is short
    for it.

    Args:
        out: Job folder to write
        no_byoc: Without app/custom/: for hospitals that reject jobs with code
        embed_code: app/custom/ holds medflare: sites need torch, monai and nvflare only
        force: Replace a job folder that --out names

    Examples:
        medflare job create fedsm --task brain_lgg --rounds 20 --set lam=0.3 --out jobs/my_fedsm
        medflare job create fedsm --no-byoc --out jobs/my_fedsm          # for hospitals that
            accept no code
        medflare job create evaluate --model MODEL --no-byoc --out jobs/test   # every site
            evaluates it, no site trains
        medflare job create fingerprint --task draft.json --no-byoc --out jobs/look   # for
            medflare task plan
        medflare job create fedsm --step-timeout 600 --min-sites 3 --out jobs/my_fedsm
    """
    from medflare.evaluation.presentation import format_bytes
    from medflare.flare.jobs.building import build_job

    if not force and (out / "meta.json").exists():
        raise ConfigError(
            f"--out {out}: a job folder is there; use another folder, or replace it with --force"
        )
    choice = FederationOptions(**federation)
    _, task, hyper, arguments = resolve_federation(choice, settings)
    folder = build_job(
        task=task,
        hyper=hyper,
        out=out,
        byoc=not no_byoc,
        embed_code=embed_code,
        track=track,
        **arguments,
    )
    if choice.model is not None:
        weights = task.network.get("weights") or hyper["server"]
        file = f"{weights['file']} of {choice.model} (sha256 {weights['sha256'][:16]}...)"
        print(f"the server reads {file}: name it in the server's local/medflare.json")
    folder_argument = shlex.quote(str(folder))
    if no_byoc:  # FLARE's simulator lets such a job name its own classes only
        command = (
            f"medflare job submit {folder_argument} --kit KIT    (on this machine: "
            f"medflare run {choice.method} ...)"
        )
    elif task.embedded:
        command = f"nvflare simulator {folder_argument} -n 4 -t 4 -w workspace"
    else:
        command = (
            f"MEDFLARE_DATA_ROOT=DATA nvflare simulator {folder_argument} -c SITE,SITE -t 2 -w "
            "workspace    (DATA has a folder per site)"
        )
    print(f"job folder: {folder} ({format_bytes(size_of(folder))})\nnext: {command}")


def submit_job(folder: PathArgument, kit: Kit) -> None:
    """Submit a job folder to the server of a federation, and print the job's id.

    Args:
        folder (FOLDER): Job folder, of medflare job create

    Examples:
        medflare job submit jobs/my_fedsm --kit lead@coordination.org
    """
    from medflare.flare.jobs.sessions import session

    _check_certificate(kit)
    if not (folder / "meta.json").is_file():
        raise ConfigError(f"{folder} is no job folder; write one with medflare job create")
    refuse_links(folder)
    with session(kit) as connection:
        print(printable(connection.submit_job(str(folder.resolve()))))


def watch_job(job: Job, kit: Kit, timeout: float = 0.0, patience: float = 600.0) -> int:
    """Follow a job of a federation to its end; exits non-zero, with the reason, unless it
    completes.

    Prints every step with its sites' metrics, rejected, late and missing replies, and sites without
    a heartbeat.

    Args:
        timeout: Seconds to watch (0: until the job ends)
        patience: Seconds to wait for a server that disappears

    Examples:
        medflare job watch fedsm-brain_lgg --kit lead@coordination.org
        medflare job watch 0b9e31c5 --kit lead@coordination.org --timeout 3600
    """
    from medflare.flare.jobs.watching import watch_job

    _check_certificate(kit)
    say = partial(print, flush=True)
    completed = watch_job(kit, job, say, timeout=timeout, patience=patience)
    return 0 if completed else 1


def fetch_job(job: Job, kit: Kit, out: Path | None = None) -> int:
    """Download a job's results, readable by this account alone, write their report, and show them;
    exits non-zero if the federation failed. Pages of the server are left out.

    Args:
        out: Folder for the results (default: a folder named by the id)

    Examples:
        medflare job fetch fedsm-brain_lgg --kit lead@coordination.org --out results
    """
    from medflare.evaluation.console import show_results
    from medflare.evaluation.report import write_report
    from medflare.evaluation.results import list_results
    from medflare.flare.jobs.sessions import fetch_job, found_job, id_of, jobs_of, session

    _check_certificate(kit)
    mask = os.umask(0o077)
    try:
        with session(kit) as connection:
            identity = id_of(found_job(jobs_of(connection), job))
            folder = fetch_job(connection, identity, out or Path(identity))
    finally:
        os.umask(mask)
    for file in list_results(folder):
        write_report(file.parent)
    return 0 if show_results(folder) else 1


def list_jobs(kit: Kit) -> None:
    """List the jobs of a federation, the newest last.

    Examples:
        medflare job list --kit lead@coordination.org
    """
    from medflare.flare.jobs.sessions import job_table, jobs_of, session

    _check_certificate(kit)
    with session(kit) as connection:
        print(job_table(jobs_of(connection)))


def _check_certificate(folder: Path) -> None:
    """Raise ConfigError if a person's certificate is not valid by this machine's clock.

    FLARE would report that the server is down.
    """
    from medflare.cli.startup_kit import certificate_end

    root = folder / "startup" / "rootCA.pem"
    certificate = folder / "startup" / "client.crt"
    if certificate.is_file() and root.is_file():  # otherwise the session reports what is missing
        certificate_end(folder.resolve().name, root, certificate)
