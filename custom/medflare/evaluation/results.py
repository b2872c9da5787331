"""What every run leaves behind, whichever engine ran it: results.json, metrics.jsonl and report.html. Other rooms enter here."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from medflare.core.errors import StateError
from medflare.core.store import write_atomically, write_json
from medflare.evaluation import report
from medflare.evaluation.contract import validate_results
from medflare.evaluation.names import COMPLETED, FAILED, FOLDER, MODELS, REPORT_FILE, RESULTS_FILE, ROLES, ROUNDS_FILE, SPLITS, UNKNOWN
from medflare.evaluation.record import RunRecord, SiteRecord, build_results, json_ready, mean_over_sites

__all__ = [
    "COMPLETED",
    "FAILED",
    "FOLDER",
    "MODELS",
    "REPORT_FILE",
    "RESULTS_FILE",
    "ROLES",
    "ROUNDS_FILE",
    "SPLITS",
    "UNKNOWN",
    "LiveReport",
    "RunRecord",
    "SiteRecord",
    "append_round",
    "build_results",
    "find_results",
    "load_results",
    "mean_over_sites",
    "read_rounds",
    "write_results",
]

_PAUSE: Final = 15.0  # seconds between two reports of a run that goes on, at least: one takes .3
_PAUSES: Final = 50  # times as long as one took to write


# -- results.json and report.html ------------------------------------------------------------------------------------------


def write_results(folder: Path, record: RunRecord) -> dict[str, Any]:
    """Write results.json and then report.html into `folder` and return the results dict.

    Raises:
        TypeError: the record holds what JSON cannot.
    """
    results = build_results(record)
    write_json(folder / RESULTS_FILE, results, public=True)
    page = report.render_report(results, json_ready(record.history), record.pictures)
    write_atomically(folder / REPORT_FILE, page.encode(), public=True)
    return results


class LiveReport:
    """The report of a run that goes on, written anew after its steps: a browser that has it open shows the newest by itself.

    Never so often that the run would wait for it: not in its first seconds, and then at most a fiftieth of its time.
    """

    def __init__(self) -> None:
        self._due = time.monotonic() + _PAUSE

    def refresh(self, folder: Path, record: Callable[[], RunRecord]) -> str:
        """Write report.html if it is time; results.json is for the end.

        Args:
            folder: where it goes.
            record: gives what is known of the run.

        Returns:
            Why it could not be drawn, "" where nothing is wrong. It is not tried again: no run ends for a page that nobody needs.
        """
        started = time.monotonic()
        if started < self._due:
            return ""
        try:
            known = record()
            page = report.render_report(build_results(known), json_ready(known.history), known.pictures)
            write_atomically(folder / REPORT_FILE, page.encode(), public=True)
        except Exception as error:
            self._due = math.inf
            return f"{type(error).__name__}: {error}"
        self._due = time.monotonic() + max(_PAUSE, _PAUSES * (time.monotonic() - started))
        return ""


def find_results(path: Path) -> Path:
    """The results.json meant by `path`: the file itself, or the newest one in the folder (a simulator's or POC's workspace, ...).

    Raises:
        StateError: there is none.
    """
    if path.is_file():
        return path
    below = (f"*/{RESULTS_FILE}", f"**/{FOLDER}/{RESULTS_FILE}")  # of runs of the plain loop, and in workspaces of FLARE's
    found = [path / RESULTS_FILE] if (path / RESULTS_FILE).is_file() else [file for where in below for file in path.glob(where)]
    if not path.exists():
        raise StateError(f"{path}: not there; give the folder of a run, or its {RESULTS_FILE}")
    if not found:
        raise StateError(
            f"{path}: no {RESULTS_FILE} and no {FOLDER}/{RESULTS_FILE} here; the run has not come to its end: its log says why, and "
            "`medflare resume` goes on with one of the plain loop"
        )
    return max(found, key=lambda file: file.stat().st_mtime)


def load_results(path: Path) -> dict[str, Any]:
    """The results dict of a run, checked against the contract; `path` as for `find_results`.

    Raises:
        StateError: there is no results.json, or it is damaged.
    """
    file = find_results(Path(path))
    try:
        results = json.loads(file.read_bytes())
        validate_results(results)
    except ValueError as error:
        if file.name != RESULTS_FILE:
            raise StateError(f"{file}: not the results of a run; give the folder of a run, or its {RESULTS_FILE}") from error
        raise StateError(f"{file}: {error}; run the job again") from error
    return results


# -- metrics.jsonl ---------------------------------------------------------------------------------------------------------


def append_round(folder: Path, line: Mapping[str, Any]) -> None:
    """Append one step to metrics.jsonl, on disk when this returns.

    A line that a crash cut short stays alone on its line, so that it spoils nothing but itself.

    Args:
        folder: where metrics.jsonl lies; made if it is not there.
        line: {"step", "phase", "round", "seconds", "sites": {site: meta of its reply}, "aggregation": {site: {name: number}}}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(json_ready(line), allow_nan=False).encode() + b"\n"
    with (folder / ROUNDS_FILE).open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else b"\n" + text
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The steps in metrics.jsonl; where a resumed run repeated a step, its last line counts; lines cut short are left out."""
    path = folder / ROUNDS_FILE
    steps: dict[int, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):  # a number may be what a crash left of a line
            steps[line["step"]] = line
    return [steps[step] for step in sorted(steps)]
