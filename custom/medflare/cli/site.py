"""`medflare site ...`: what a hospital's administrator, or the server's, does with a startup kit before FLARE starts it."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medflare.cli.kits.kit import open_kit
from medflare.cli.kits.setup import KitSettings, set_up
from medflare.cli.options import AUTO_HELP, add_command, takes

if TYPE_CHECKING:
    from medflare.cli.kits.status import JobState

_KIT = "Startup kit of a site or the server: the folder with startup/ and local/"
Kit = Annotated[Path, typer.Argument(help=_KIT)]


def add_commands(app: typer.Typer) -> None:
    """Declare `site` with its actions."""
    site = typer.Typer(help="A startup kit: set up, check, status (FLARE's own start.sh starts it).", **AUTO_HELP)
    add_command(
        site,
        "setup",
        setup,
        "medflare site setup site-1 --data-root /data/site-1 --device cuda:0",
        "medflare site setup server.example.org --storage /var/lib/medflare",
    )
    add_command(site, "doctor", doctor, "medflare site doctor site-1", "medflare site doctor site-1 --task app_configs/brain_lgg.json")
    add_command(site, "status", status, "medflare site status site-1", "medflare site status site-1 --json")
    app.add_typer(site, name="site")


@takes("settings", KitSettings)
def setup(kits: Annotated[list[Path], typer.Argument(metavar="KIT...", help=_KIT)], settings: dict[str, Any]) -> int:
    """Policies and settings in a kit's local/ folder: add what is missing, change what is named, keep the rest, and say what was done."""
    wanted = KitSettings(**settings)
    for kit in [open_kit(folder) for folder in kits]:
        for change in set_up(kit, wanted):
            print(f"{change.verdict:8} {change.file}")
            for setting in change.settings:
                print(f"         {setting}")
    return 0


def doctor(
    kit: Kit,
    task: Annotated[
        str | None, typer.Option(help="Read every image for it, as medflare data check does (default: the datalist is only looked for)")
    ] = None,
) -> int:
    """Check data, kit, certificate, clock, server, disk and device; a live federation is not touched."""
    from medflare.cli.kits.doctor import examine
    from medflare.tasks.config import load_task

    opened, failed = open_kit(kit), 0
    for finding in examine(opened, None if task is None else load_task(task)):
        print(f"{finding.verdict:8} {finding.check:12} {finding.text}", flush=True)
        failed += finding.verdict == "FAILED"
    print(f"{opened.name}: {failed} of these must be mended before it can work" if failed else f"{opened.name}: nothing stands in its way")
    return 1 if failed else 0


def status(kit: Kit, as_json: Annotated[bool, typer.Option("--json", help="As JSON")] = False) -> int:
    """Jobs here: why one was refused, round and phase, what left, where the models are."""
    from medflare.cli.kits.status import job_states

    opened = open_kit(kit)
    party, jobs = {"name": opened.name, "kind": opened.kind, "server": f"{opened.host}:{opened.port}"}, job_states(opened)
    if as_json:
        print(json.dumps({**party, "jobs": [dataclasses.asdict(job) for job in jobs]}, indent=2))
        return 0
    print(f"{opened.name}, {opened.kind}; server {party['server']}")
    for job in jobs:
        print("\n".join(["", f"  job {job.id} {job.name}".rstrip(), *(f"    {line}" for line in _job_lines(job))]))
    if not jobs:
        print("  no job so far")
    return 0


def _job_lines(job: "JobState") -> list[str]:
    from medflare.evaluation.presentation import format_bytes

    lines = [*job.refused]
    if job.round is not None and job.rounds is not None:
        step = f"{job.step}, round {min(job.round + 1, job.rounds)} of {job.rounds}"
        lines.append(f"{'at work on' if job.working else 'last step:'} {step}, since {job.begun}")
    if job.folder:
        lines.append(f"this site's own files of it: {job.folder}")
    if job.left["entries"] or job.left["withheld"]:
        lines.append(f"left: {format_bytes(job.left['bytes'])} in {job.left['entries']} entries; {job.left['withheld']} kept back")
    return [*lines, *([f"models: {', '.join(job.models)}"] if job.models else [])]
