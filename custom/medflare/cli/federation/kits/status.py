"""What a party is doing: up since when, in contact, which jobs, how far, and what has left."""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.processes import Processes, running, since
from medflare.data.sites.local import FOLDER, OUTBOUND, PROGRESS, kept_of, private_folder
from medflare.flare.names import REFUSED

_JOB: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # FLARE's ids
_REFUSED: Final = re.compile(rf"\[R:([0-9a-f-]{{36}})\].*\[A:{re.escape(REFUSED)}\](.*)$", re.MULTILINE)  # in audit.log
_TIME: Final = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE)
SIGNS: Final = {"server": "Server started", "site": "Successfully registered client"}  # in FLARE's log: the party is up
NOT_YET: Final = {"server": "started yet", "site": "registered yet"}
_CONTACT: Final = (SIGNS["site"], "getTask:", "SubmitUpdate to", "Client: New ", "Re-activate the client:")
_TROUBLE: Final = re.compile(
    r"Failed to send heartbeat|authentication failed|TP=heart_beat .*cannot send|Failed to re-activate"
    r"|Connector .*ACTIVE (?!tcp://localhost).*failed"  # a job's connector to its own party is not to the server
)
_FRESH: Final = timedelta(seconds=60)  # heartbeats come more often: without a complaint of so long they are answered
_TAIL: Final = 200_000  # bytes of a log
_BLUR: Final = timedelta(seconds=2)  # a process's start is known to a second or so


@dataclass(frozen=True)
class Left:
    """What the site's guard let leave in a job, and what it kept back.

    Attributes:
        entries: that left, `facts` among them.
        bytes: of all of them.
        withheld: replies that were kept back.
    """

    entries: int = 0
    bytes: int = 0
    withheld: int = 0


@dataclass(frozen=True)
class JobState:
    """One job at this party.

    Attributes:
        id: FLARE's.
        name: of the job's folder.
        running: whether it has a process.
        step: "train", "deliver" or another phase, of which the last one was begun; "" where the job has none yet.
        round: 0-based; None where there is no step.
        rounds: of the run.
        working: whether that step is being worked on; a site that has answered it waits for the next one.
        begun: when that step was, as text.
        left: see `Left`.
        models: roles of the models that were delivered.
        refused: why the party refused it, each reason once; as its audit.log says.
        folder: where the site keeps its own files of it: models, report, scores, state; "" where it has none.
    """

    id: str
    name: str
    running: bool
    step: str
    round: int | None
    rounds: int | None
    working: bool
    begun: str
    left: Left
    models: tuple[str, ...]
    refused: tuple[str, ...] = ()
    folder: str = ""


@dataclass(frozen=True)
class PartyState:
    """A party at this moment.

    Attributes:
        name: its name.
        kind: "site" or "server".
        server: host:port.
        up_since: as text; "" where it does not run.
        contact: when party and server last had to do with each other, as text; "" for never.
        registered: whether the log says so since the party's process started; of the server: whether it says that it has started.
        trouble: the last complaint of the log since then, and that the party is not registered yet; "" for none.
        jobs: the newest first.
    """

    name: str
    kind: str
    server: str
    up_since: str
    contact: str
    registered: bool
    trouble: str
    jobs: tuple[JobState, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def party_state(kit: Kit, now: datetime | None = None) -> PartyState:
    """Read from the kit's files and processes; nobody is asked.

    Args:
        kit: of a site or the server.
        now: the time; None: by the clock.
    """
    now = now or datetime.now()
    found = running(kit)
    up = f"{datetime.fromtimestamp(since(found.first)):%F %T}" if found.first is not None else ""
    folders = job_folders(kit)
    refused = _refused(kit)
    never = [folder for job in reversed(refused) if not (folder := kit.folder / job).exists()]  # FLARE removes what is refused at once
    jobs = tuple(_job(kit, folder, folder.name in found.jobs, tuple(refused.get(folder.name, ()))) for folder in [*never, *folders])
    spoke = [folder for place, folder in enumerate(folders) if place == 0 or folder.name in found.jobs]  # the last one also where it ended
    contact, trouble = _contact([kit.log, *(folder / "log.txt" for folder in spoke)], now, _begun(found))
    registered = is_registered(kit, found)
    if found.first is not None and not registered:
        trouble = ": ".join([f"not {NOT_YET[kit.kind]}", *([trouble] if trouble else [])])
    elif found.first is not None and not trouble and (contact or kit.kind == "site"):  # FLARE logs no heartbeat that is answered
        contact = f"{now:%F %T}"
    return PartyState(kit.name, kit.kind, f"{kit.host}:{kit.port}", up, contact, registered, trouble, jobs)


def is_registered(kit: Kit, found: Processes) -> bool:
    """Whether the log says since the start of the party's process that it is up.

    Args:
        kit: of a site or the server.
        found: what runs from it.
    """
    begun = _begun(found)
    if begun is None:
        return False
    sign = re.compile(rb"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d).*" + re.escape(SIGNS[kit.kind]).encode(), re.MULTILINE)
    for log in [kit.log, *kit.folder.glob("log.txt.*")]:  # FLARE goes on in a new one when one is large
        with suppress(OSError):
            if any(_time(match[1].decode()) >= begun for match in sign.finditer(log.read_bytes())):
                return True
    return False


def job_folders(kit: Kit) -> list[Path]:
    """Folders of all jobs in the kit, the newest first."""
    return sorted((path for path in kit.folder.glob("*-*-*-*-*") if _JOB.fullmatch(path.name)), key=_changed, reverse=True)


def _refused(kit: Kit) -> dict[str, list[str]]:
    """Job -> why the party refused it, in the order of its audit.log."""
    reasons: dict[str, list[str]] = {}
    with suppress(OSError):
        for job, reason in _REFUSED.findall((kit.folder / "audit.log").read_text(encoding="utf-8", errors="replace")):
            reasons.setdefault(job, []).extend([] if reason in reasons.get(job, ()) else [reason])
    return reasons


def _job(kit: Kit, folder: Path, active: bool, refused: tuple[str, ...]) -> JobState:
    own = kept_of(folder) if kit.kind == "site" else folder / FOLDER
    note = _json(own / PROGRESS)
    models = tuple(sorted(card.parent.name for card in own.glob("*/card.json")))
    name = str(_json(folder / "meta.json").get("name", ""))
    step = (
        str(note.get("phase", "")),
        note.get("round"),
        note.get("rounds"),
        bool(note.get("working")) and active,
        str(note.get("time", "")),
    )
    place = str(own) if own.exists() and own == private_folder(folder) else ""
    return JobState(folder.name, name, active, *step, left=_left(own / OUTBOUND), models=models, refused=refused, folder=place)


def _left(report: Path) -> Left:
    if not report.exists():
        return Left()
    with report.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    sent = [row for row in rows if row["sent"] == "yes"]
    return Left(len(sent), sum(int(row["bytes"] or 0) for row in sent), len(rows) - len(sent))


def _contact(logs: Iterable[Path], now: datetime, begun: datetime | None) -> tuple[str, str]:
    """(last contact in the logs, complaint since then and since the party began)."""
    lines = sorted(line for log in logs for line in _lines(log))
    contact = max((time for time, line in lines if any(sign in line for sign in _CONTACT)), default=None)
    earliest = max(contact or datetime.min, begun or datetime.min)
    late = [(time, line) for time, line in lines if time > earliest and _TROUBLE.search(line)]
    trouble = late[-1][1] if late and now - late[-1][0] < _FRESH else ""
    return ("" if contact is None else f"{contact:%F %T}"), trouble


def _begun(found: Processes) -> datetime | None:
    """When the party's process was started; None where only a shell runs, or nothing."""
    return datetime.fromtimestamp(since(found.parties[0])) - _BLUR if found.parties else None


def _lines(log: Path) -> Iterator[tuple[datetime, str]]:
    """(time, text) of the lines at a log's end that begin with a time."""
    if not log.exists():
        return
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        text = file.read().decode(errors="replace")
    for line in text.splitlines():
        if match := _TIME.match(line):
            yield _time(match[1]), line.split(" - ", 3)[-1]  # without time, component and level


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S")


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _changed(path: Path) -> float:
    return path.stat().st_mtime
