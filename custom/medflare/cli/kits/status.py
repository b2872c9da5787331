"""The jobs at a party, from its kit's files: why it refused one, how far the others are, what left, where a site's own files are."""

import csv
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from medflare.cli.kits.kit import Kit
from medflare.data.local import FOLDER, OUTBOUND, PROGRESS, kept_of, private_folder
from medflare.flare.names import REFUSED

_JOB: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # FLARE's ids
_REFUSED: Final = re.compile(rf"\[R:([0-9a-f-]{{36}})\].*\[A:{re.escape(REFUSED)}\](.*)$", re.MULTILINE)  # in audit.log


@dataclass(frozen=True)
class JobState:
    """One job at this party.

    Attributes:
        id: FLARE's.
        name: of the job's folder.
        step: "train" or another task, of which the last one was begun at `begun`; "" where the job has none yet.
        round: 0-based, of `rounds`; None where there is no step.
        working: whether the site has not answered that step yet.
        left: entries that left the site, their bytes, and replies that its guard kept back.
        models: roles of the models that were delivered.
        refused: why the party refused it, each reason once, as its audit.log has them.
        folder: where the site keeps its own files of it: models, report, scores, state; "" where it has none.
    """

    id: str
    name: str
    step: str
    round: int | None
    rounds: int | None
    working: bool
    begun: str
    left: dict[str, int]
    models: tuple[str, ...]
    refused: tuple[str, ...]
    folder: str


def job_states(kit: Kit) -> list[JobState]:
    """All jobs of a kit that left something there: those that were refused at once, then the others, the newest first."""
    refused = _refusals(kit)
    folders = sorted((path for path in kit.folder.glob("*-*-*-*-*") if _JOB.fullmatch(path.name)), key=_changed, reverse=True)
    never = [folder for job in reversed(refused) if not (folder := kit.folder / job).exists()]  # FLARE removes what is refused at once
    return [_job(kit, folder, tuple(refused.get(folder.name, ()))) for folder in [*never, *folders]]


def _refusals(kit: Kit) -> dict[str, list[str]]:
    """Job -> why the party refused it, in the order of its audit.log."""
    reasons: dict[str, list[str]] = {}
    with suppress(OSError):
        for job, reason in _REFUSED.findall((kit.folder / "audit.log").read_text(encoding="utf-8", errors="replace")):
            reasons.setdefault(job, []).extend([] if reason in reasons.get(job, ()) else [reason])
    return reasons


def _job(kit: Kit, folder: Path, refused: tuple[str, ...]) -> JobState:
    own = kept_of(folder) if kit.kind == "site" else folder / FOLDER
    note = _json(own / PROGRESS)
    return JobState(
        id=folder.name,
        name=str(_json(folder / "meta.json").get("name", "")),
        step=str(note.get("phase", "")),
        round=note.get("round"),
        rounds=note.get("rounds"),
        working=bool(note.get("working")),
        begun=str(note.get("time", "")),
        left=_left(own / OUTBOUND),
        models=tuple(sorted(card.parent.name for card in own.glob("*/card.json"))),
        refused=refused,
        folder=str(own) if own.exists() and own == private_folder(folder) else "",
    )


def _left(report: Path) -> dict[str, int]:
    """What the guard's report of a job adds up to."""
    rows = []
    if report.exists():
        with report.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    sent = [row for row in rows if row["sent"] == "yes"]
    return {"entries": len(sent), "bytes": sum(int(row["bytes"] or 0) for row in sent), "withheld": len(rows) - len(sent)}


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _changed(path: Path) -> float:
    return path.stat().st_mtime
