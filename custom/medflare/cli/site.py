"""`medflare site ...`: what a hospital's administrator, or the server's, does with a startup kit before FLARE starts it."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from medflare.cli.options import Commands, add_command

if TYPE_CHECKING:
    from medflare.cli.kits.kit import Kit
    from medflare.cli.kits.status import JobState

_KIT = "startup kit of a site or the server: the folder with startup/ and local/"


def add_commands(commands: Commands) -> None:
    """Declare `site` with its actions."""
    parser = commands.add_parser("site", help="a startup kit: set up, check, status (FLARE's own start.sh starts it)")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_setup(actions)
    doctor = add_command(
        actions,
        "doctor",
        _doctor,
        help="check data, kit, certificate, clock, server, disk and device; a live federation is not touched",
        examples=("medflare site doctor site-1", "medflare site doctor site-1 --task app_configs/brain_lgg.json"),
    )
    doctor.add_argument("--task", help="read every image for it, as medflare data check does (default: the datalist is only looked for)")
    status = add_command(
        actions,
        "status",
        _status,
        help="jobs here: why one was refused, round and phase, what left, where the models are",
        examples=("medflare site status site-1", "medflare site status site-1 --json"),
    )
    status.add_argument("--json", action="store_true", help="as JSON")
    for one in (doctor, status):
        one.add_argument("kit", type=Path, metavar="KIT", help=_KIT)


# -- setup -----------------------------------------------------------------------------------------------------------------


def _add_setup(actions: Commands) -> None:
    parser = add_command(
        actions,
        "setup",
        _setup,
        help="policies and settings in the kit's local/: add what is missing, change what is named",
        description="Adds the policies that are missing, changes the settings that are named, keeps the rest, and says what it did.",
        examples=(
            "medflare site setup site-1 --data-root /data/site-1 --device cuda:0",
            "medflare site setup server.example.org --storage /var/lib/medflare",
        ),
    )
    parser.add_argument("kit", type=Path, nargs="+", metavar="KIT", help=_KIT)
    site = parser.add_argument_group("a site's own settings (local/medflare.json)")
    site.add_argument(
        "--data-root", type=_folder, metavar="FOLDER", help="with datalist.json; without it only tasks with embedded images run"
    )
    site.add_argument("--device", help="where models run: cpu, cuda, cuda:1 (a new site: cpu)")
    site.add_argument("--batch-size", type=int, metavar="N", help="most images at once, for a small GPU (default: as the task says)")
    site.add_argument("--cache", type=_named, metavar="FOLDER", help="for decoded images, or off (default: medflare-cache beside local/)")
    site.add_argument("--minimum-patients", type=int, metavar="N", help="no metric of fewer patients leaves (a new site: 5)")
    about = "FLARE sends the site's log of errors in a job to the server (a new site: no)"
    site.add_argument("--stream-logs", action=argparse.BooleanOptionalAction, help=about)
    server = parser.add_argument_group("the server's")
    server.add_argument("--storage", type=_folder, metavar="FOLDER", help="for submitted jobs and results (default: storage in the kit)")
    both = parser.add_argument_group("both")
    both.add_argument(
        "--bring-code",
        action="store_true",
        help="medflare is not installed here: a lead's jobs may bring it (medflare job ... --embed-code); no OutboundGuard, no restarts",
    )
    about = "installed packages, separated by commas, whose networks and methods a job may name (local/medflare.json; a new party: none)"
    both.add_argument("--packages", type=_names, metavar="NAMES", help=about)
    both.add_argument("--replace-policies", action="store_true", help="new policies in place of those that are there")


def _setup(options: argparse.Namespace) -> int:
    from medflare.cli.kits.setup import Wishes, set_up

    wishes = Wishes(**{name: getattr(options, name) for name in Wishes.__dataclass_fields__})
    for kit in [_kit(folder) for folder in options.kit]:
        for change in set_up(kit, wishes):
            print(f"{change.verdict:8} {change.file}")
            for setting in change.settings:
                print(f"         {setting}")
    return 0


# -- doctor and status -----------------------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    from medflare.cli.kits.doctor import examine
    from medflare.tasks.config import load_task

    kit, failed = _kit(options.kit), 0
    for finding in examine(kit, None if options.task is None else load_task(options.task)):
        print(f"{finding.verdict:8} {finding.check:12} {finding.text}", flush=True)
        failed += finding.verdict == "FAILED"
    print(f"{kit.name}: {failed} of these must be mended before it can work" if failed else f"{kit.name}: nothing stands in its way")
    return 1 if failed else 0


def _status(options: argparse.Namespace) -> int:
    from medflare.cli.kits.status import job_states

    kit = _kit(options.kit)
    party, jobs = {"name": kit.name, "kind": kit.kind, "server": f"{kit.host}:{kit.port}"}, job_states(kit)
    if options.json:
        print(json.dumps({**party, "jobs": [dataclasses.asdict(job) for job in jobs]}, indent=2))
        return 0
    print(f"{kit.name}, {kit.kind}; server {party['server']}")
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


def _kit(folder: Path) -> "Kit":
    from medflare.cli.kits.kit import open_kit

    return open_kit(folder)


def _named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty, as an unset variable is; name a folder")
    return text


def _names(text: str) -> list[str]:
    return [name.strip() for name in _named(text).split(",")]


def _folder(text: str) -> Path:
    return Path(_named(text))
