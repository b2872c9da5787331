"""`medflare site ...`: what a hospital's administrator, or the server's, does with a startup kit day by day."""

import argparse
import json
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from medflare.cli.options import Commands, add_command
from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from medflare.cli.federation.kits.kit import Kit
    from medflare.cli.federation.kits.status import JobState, PartyState

_KIT = "startup kit of a site or the server: the folder with startup/ and local/"
# From a checkout, too, where medflare is not installed.
_THIS_COMMAND = ("/usr/bin/env", f"PYTHONPATH={Path(__file__).parents[3]}", sys.executable, "-m", "medflare.cli")
_PATIENCE = 60.0  # seconds in which a party comes up


def add_commands(commands: Commands) -> None:
    """Declare `site` with its actions."""
    parser = commands.add_parser("site", help="a startup kit day by day: set up, check, start, watch, stop, clean")
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
    doctor.add_argument("--preflight", action="store_true", help="run FLARE's own check too, which registers the site: not while it runs")
    start = add_command(
        actions, "start", _start, help="start the party and wait until it is up, or say why not", examples=("medflare site start site-1",)
    )
    stop = add_command(actions, "stop", _stop, help="end the party's processes and its jobs'", examples=("medflare site stop site-1",))
    restart = add_command(actions, "restart", _restart, help="stop and start", examples=("medflare site restart site-1",))
    for one in (start, restart):
        one.add_argument("--timeout", type=float, default=_PATIENCE, metavar="SECONDS", help="to wait (default: %(default)g)")
    status = add_command(
        actions,
        "status",
        _status,
        help="up since when, last contact, jobs with round and phase, what left",
        examples=("medflare site status site-1", "medflare site status site-1 --json"),
    )
    status.add_argument("--json", action="store_true", help="as JSON")
    clean = add_command(
        actions,
        "clean",
        _clean,
        help="remove decoded images, and what ended jobs remember; models and the account of what left stay",
        examples=("medflare site clean site-1 --older-than 30d --dry-run", "medflare site clean site-1 --older-than 12h --jobs"),
    )
    clean.add_argument("--older-than", type=_age, required=True, metavar="AGE", help="since the last use: 30d, 12h")
    clean.add_argument(
        "--jobs",
        action="store_true",
        help="also memory and FLARE's files of ended jobs, at the server checkpoints, without which none can be resumed",
    )
    clean.add_argument("--dry-run", action="store_true", help="only show what would go")
    for one in (doctor, start, stop, restart, status, clean):
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
            "medflare site setup site-1 --data-root /data/site-1 --device cuda:0 --systemd",
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
    both.add_argument("--systemd", type=Path, nargs="?", const=Path(), metavar="FILE", help="write a unit (default: into the kit)")


def _setup(options: argparse.Namespace) -> int:
    from medflare.cli.federation.kits.setup import Wishes, set_up
    from medflare.cli.federation.kits.unit import unit_name, unit_text
    from medflare.core.store import write_atomically

    wishes = Wishes(**{name: getattr(options, name) for name in Wishes.__dataclass_fields__})
    kits = [_kit(folder) for folder in options.kit]
    for kit in kits:
        for change in set_up(kit, wishes):
            print(f"{change.verdict:8} {change.file}")
            for setting in change.settings:
                print(f"         {setting}")
        if options.systemd is not None:
            if options.systemd.name and len(kits) > 1:
                raise ConfigError("--systemd FILE is for one kit; leave FILE out, and each kit gets its own")
            unit = options.systemd if options.systemd.name else kit.folder / unit_name(kit)
            write_atomically(unit, unit_text(kit, _THIS_COMMAND).encode(), public=bool(options.systemd.name))
            print(f"unit     {unit}; install it: sudo cp {unit} /etc/systemd/system/{unit_name(kit)} && "
                  f"sudo systemctl daemon-reload && sudo systemctl enable --now {unit_name(kit)}")  # fmt: skip
    return 0


# -- the others ------------------------------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    from medflare.cli.federation.kits.doctor import examine, preflight
    from medflare.tasks.config import load_task

    kit = _kit(options.kit)
    if options.preflight:
        preflight(kit)
    failed = 0
    for finding in examine(kit, None if options.task is None else load_task(options.task)):
        print(f"{finding.verdict:8} {finding.check:12} {finding.text}", flush=True)
        failed += finding.verdict == "FAILED"
    print(f"{kit.name}: {failed} of these must be mended before it can work" if failed else f"{kit.name}: nothing stands in its way")
    return 1 if failed else 0


def _start(options: argparse.Namespace) -> int:
    from medflare.cli.federation.kits.starting import start

    print(start(_kit(options.kit), options.timeout))
    return 0


def _stop(options: argparse.Namespace) -> int:
    from medflare.cli.federation.kits.processes import stop

    kit = _kit(options.kit)
    ended = stop(kit)
    print(f"{kit.name} has stopped ({ended} processes)" if ended else f"{kit.name} does not run")
    return 0


def _restart(options: argparse.Namespace) -> int:
    return _stop(options) or _start(options)


def _status(options: argparse.Namespace) -> int:
    from medflare.cli.federation.kits.status import party_state

    state = party_state(_kit(options.kit))
    print(json.dumps(state.to_dict(), indent=2) if options.json else _described(state))
    return 0


def _described(state: "PartyState") -> str:
    lines = [
        f"{state.name}, {state.kind}; server {state.server}",
        f"  {f'up since {state.up_since}' if state.up_since else 'does not run'}",
    ]
    if state.kind == "site":
        known = "last contact with the server" if state.up_since else "last contact with the server that a log tells of"
        lines.append(f"  {known}: {state.contact or 'never'}")  # answered heartbeats are in no log
    if state.trouble:
        lines.append(f"  since then: {state.trouble}")
    for job in state.jobs:
        lines += ["", f"  job {job.id} {job.name}".rstrip(), *(f"    {line}" for line in _job_lines(job))]
    return "\n".join(lines if state.jobs else [*lines, "  no job so far"])


def _job_lines(job: "JobState") -> list[str]:
    from medflare.evaluation.presentation import format_bytes

    doing = "runs" if job.running else "has ended here"
    if job.round is not None and job.rounds is not None:
        step = f"{job.step}, round {min(job.round + 1, job.rounds)} of {job.rounds}"
        doing += f"; {'at work on' if job.working else 'last step:'} {step}, {'since' if job.working else 'at'} {job.begun}"
    lines = [*job.refused, *([] if job.refused and not job.begun else [doing])]
    if job.folder:
        lines.append(f"this site's own files of it: {job.folder}")
    if job.left.entries or job.left.withheld:
        lines.append(f"left: {format_bytes(job.left.bytes)} in {job.left.entries} entries; {job.left.withheld} kept back")
    return [*lines, *([f"models: {', '.join(job.models)}"] if job.models else [])]


def _clean(options: argparse.Namespace) -> int:
    from medflare.cli.federation.kits.cleaning import clean_kit
    from medflare.evaluation.presentation import format_bytes

    done = clean_kit(_kit(options.kit), options.older_than, jobs=options.jobs, dry_run=options.dry_run)
    for one in done:
        print(f"{'would go' if options.dry_run else 'removed'}: {one.what}, {format_bytes(one.bytes)}")
    if not done:
        print("nothing is that old")
    return 0


def _kit(folder: Path) -> "Kit":
    from medflare.cli.federation.kits.kit import open_kit

    return open_kit(folder)


def _named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty, as an unset variable is; name a folder")
    return text


def _names(text: str) -> list[str]:
    return [name.strip() for name in _named(text).split(",")]


def _folder(text: str) -> Path:
    return Path(_named(text))


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+)([dh])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; write 30d or 12h")
    try:
        return timedelta(days=int(match[1])) if match[2] == "d" else timedelta(hours=int(match[1]))
    except (OverflowError, ValueError):  # ValueError: of more digits than Python reads
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is older than time itself; write 30d or 12h") from None
