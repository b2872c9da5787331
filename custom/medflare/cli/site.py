"""`medflare site ...`: what an administrator does with the startup kit of a site or the server.

FLARE's own start.sh starts it.
"""

import csv
import dataclasses
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from medflare.cli.options import AUTO_HELP, PathArgument, PathArguments, add_commands, takes
from medflare.cli.startup_kit import Kit, KitSettings, open_kit, read_object, set_up
from medflare.core.errors import ERRORS, ConfigError
from medflare.core.text import JsonDict, printable
from medflare.data.local import FOLDER, OUTBOUND, PROGRESS, find_private_folder
from medflare.flare.names import JOB_ID, REFUSED

# A refused job in audit.log.
_REFUSED = re.compile(rf"\[R:([0-9a-f-]{{36}})\].*\[A:{re.escape(REFUSED)}\](.*)$", re.MULTILINE)


def add_groups(app: typer.Typer) -> None:
    """Add `site` with its actions."""
    about = "A startup kit: set up, check, status (FLARE's own start.sh starts it)."
    site = typer.Typer(help=about, **AUTO_HELP)
    add_commands(site, setup=setup, doctor=doctor, status=status)
    app.add_typer(site, name="site")


@takes("settings", KitSettings)
def setup(kits: PathArguments, settings: JsonDict) -> None:
    """Write policies and settings to a kit's local/ folder: add what is missing, change what is
    named, print every change.

    Args:
        kits (KIT...): Startup kit of a site or the server: the folder with startup/ and local/

    Examples:
        medflare site setup site-1 --data-root /data/site-1 --device cuda:0
        medflare site setup server.example.org --storage /var/lib/medflare
    """
    kit_settings = KitSettings(**settings)
    for kit in [open_kit(folder) for folder in kits]:
        for change in set_up(kit, kit_settings):
            print("\n         ".join([f"{change.action:8} {change.file}", *change.settings]))
    data_root = kit_settings.data_root
    if data_root is not None and not data_root.expanduser().is_dir():
        print(f"note: {data_root} is no folder on this machine; the site's machine needs it")


def doctor(kit: PathArgument, task: str | None = None) -> int:
    """Check data, kit, certificate, clock, server, disk and device, without joining the
    federation.

    Args:
        kit (KIT): Startup kit of a site or the server: the folder with startup/ and local/
        task: Read every image for it, as medflare data check does (default: only look for the
            datalist)

    Examples:
        medflare site doctor site-1
        medflare site doctor site-1 --task app_configs/brain_lgg.json
    """
    from medflare.cli.doctor import examine
    from medflare.tasks.config import load_task

    party = open_kit(kit)
    config = None if task is None else load_task(task)
    failed = 0
    for result in examine(party, config):
        print(f"{result.status:8} {result.check:12} {result.text}", flush=True)
        failed += result.status == "FAILED"
    if failed:
        print(f"{party.name}: {failed} of these must be fixed before it can take part")
        return 1
    print(f"{party.name}: ready")
    return 0


@dataclasses.dataclass(frozen=True)
class JobState:
    """A job at this party, read from the kit's files.

    Attributes:
        step: the phase that was begun last, at `begun`; "" if none was.
        round: 0-based, of `rounds`; None if no phase was begun.
        working: whether the site has not replied to that phase yet.
        ended: when the job's process ended; "" before, and if it was killed.
        failure: the last line of the site's errors.log; "" without an error.
        left: number of entries that left the site, their bytes, and the number of entries that the
            outbound guard withheld.
        models: roles of the final models.
        refused: why the party refused the job, each reason once.
        folder: where the site keeps the job's models, report, scores and state; "" if it has none.
    """

    id: str
    name: str
    step: str
    round: int | None
    rounds: int | None
    working: bool
    begun: str
    ended: str
    failure: str
    left: dict[str, int]
    models: tuple[str, ...]
    refused: tuple[str, ...]
    folder: str


def status(kit: PathArgument, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Jobs here: why one was refused, round and phase, what left the site, where the models are.

    Args:
        kit (KIT): Startup kit of a site or the server: the folder with startup/ and local/
        as_json: As JSON

    Examples:
        medflare site status site-1
        medflare site status site-1 --json
    """
    party = open_kit(kit)
    server = f"{party.host}:{party.port}"
    jobs = job_states(party)
    if as_json:
        listed = [dataclasses.asdict(job) for job in jobs]
        content = {
            "name": party.name,
            "kind": party.kind,
            "runs": _is_running(party),
            "server": server,
            "jobs": listed,
        }
        print(json.dumps(content, indent=2))
        return
    state = "runs" if _is_running(party) else "does not run on this machine"
    print(f"{party.name}, {party.kind}, {state}; server {server}")
    for job in jobs:
        heading = printable(f"job {job.id} {job.name}")
        print("\n    ".join([f"\n  {heading}", *map(printable, _job_lines(job))]))
    if not jobs and party.kind == "server":
        print("  no job runs; all jobs: medflare job list, with a person's kit")
    elif not jobs:
        print("  no job yet")


def _job_lines(job: JobState) -> list[str]:
    from medflare.evaluation.presentation import format_bytes

    lines = [*job.refused]
    if job.round is not None and job.rounds is not None:
        step = f"{job.step}, round {min(job.round + 1, job.rounds)} of {job.rounds}"
        if job.ended:
            lines.append(f"ended {job.ended}, last step: {step}")
        else:
            doing = "working on" if job.working else "last step:"
            lines.append(f"{doing} {step}, since {job.begun}")
    if job.failure:
        lines.append(f"last error: {job.failure} ({ERRORS})")
    if job.folder:
        lines.append(f"files of this site: {job.folder}")
    left = job.left
    if left["entries"] or left["withheld"]:
        size = format_bytes(left["bytes"])
        lines.append(f"sent: {size} in {left['entries']} entries; {left['withheld']} withheld")
    if job.models:
        lines.append(f"models: {', '.join(job.models)}")
    return lines


def job_states(kit: Kit) -> list[JobState]:
    """All jobs of a kit: first those that were refused at once, then the others, newest first."""
    refused: dict[str, dict[str, None]] = {}  # job -> reasons in the party's audit.log, each once
    with suppress(OSError):
        log = (kit.folder / "audit.log").read_text(encoding="utf-8", errors="replace")
        for job, reason in _REFUSED.findall(log):
            refused.setdefault(job, {})[reason] = None
    changed: dict[str, float] = {}  # job -> when one of its folders was changed
    places = [kit.folder]
    if kit.kind == "site":  # FLARE removes a job's other folder if the server asks for this
        places.append(kit.folder / FOLDER)
    for place in places:
        for path in place.glob("*-*-*-*-*"):
            if JOB_ID.fullmatch(path.name):
                changed[path.name] = max(path.stat().st_mtime, changed.get(path.name, 0.0))
    removed = [job for job in reversed(refused) if job not in changed]  # FLARE removes such a job
    jobs = [*removed, *sorted(changed, key=changed.__getitem__, reverse=True)]
    return [_job_state(kit, kit.folder / job, refused.get(job, ())) for job in jobs]


def _job_state(kit: Kit, folder: Path, refused: Iterable[str]) -> JobState:
    private = find_private_folder(folder) if kit.kind == "site" else folder / FOLDER
    progress = _read_json(private / PROGRESS)
    outbound = private / OUTBOUND
    rows = []
    if outbound.exists():
        rows = list(csv.DictReader(outbound.read_text(encoding="utf-8").splitlines()))
    sent = [row for row in rows if row["sent"] == "yes"]
    return JobState(
        id=folder.name,
        name=str(_read_json(folder / "meta.json").get("name", "")),
        step=str(progress.get("phase", "")),
        round=progress.get("round"),
        rounds=progress.get("rounds"),
        working=bool(progress.get("working")),
        begun=str(progress.get("time", "")),
        ended=str(progress.get("ended", "")),
        failure=_last_line(private / ERRORS),
        left={
            "entries": len(sent),
            "bytes": sum(int(row["bytes"] or 0) for row in sent),
            "withheld": len(rows) - len(sent),
        },
        models=tuple(sorted(card.parent.name for card in private.glob("*/card.json"))),
        refused=tuple(refused),
        folder=str(private) if kit.kind == "site" and private.exists() else "",
    )


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else ""
    return ""


def _is_running(kit: Kit) -> bool:
    """Whether the process that FLARE's start.sh leaves lives on this machine."""
    try:
        os.kill(int((kit.folder / "daemon_pid.fl").read_text()), 0)
    except PermissionError:
        return True  # of another account
    except (OSError, ValueError):
        return False
    return True


def _read_json(path: Path) -> JsonDict:
    with suppress(ConfigError):
        return read_object(path)
    return {}
