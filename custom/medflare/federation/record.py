"""From a run that has ended, or could not begin, to its results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from medflare.core.events import EventLog
from medflare.evaluation.results import UNKNOWN, RunRecord, SiteRecord, build_results, write_results
from medflare.federation.outcome import Outcome
from medflare.federation.settings import RunSettings
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig


class Ended(Protocol):
    """What is asked of a run that has ended, see `run.Run`."""

    method: Method
    task: TaskConfig
    hyper: Mapping[str, Any]
    settings: RunSettings
    sites: tuple[str, ...]
    folder: Path | None
    pictures: dict[str, bytes]
    about: Mapping[str, Any]
    events: EventLog


def written(run: Ended, outcome: Outcome, reason: str) -> dict[str, Any]:
    """The results of a run, on disk where it has a folder; a failed one has a reason."""
    record = RunRecord(
        method=run.method.name,
        task=run.task,
        seed=run.settings.seed,
        rounds=run.settings.rounds,
        sites={site: _site_record(site, run.settings, outcome) for site in (*run.sites, *run.settings.outside)},
        reason=reason,
        events=run.events.to_list(),
        down_bytes=outcome.down_bytes,
        up_bytes=outcome.up_bytes,
        seconds=outcome.seconds,
        hyper=run.method.effective(run.hyper),
        settings={**run.settings.to_dict(), **run.about},
        history=outcome.history,
        pictures=run.pictures,
    )
    return build_results(record) if run.folder is None else write_results(run.folder, record)


def _site_record(site: str, settings: RunSettings, outcome: Outcome) -> SiteRecord:
    enrolled, delivered = outcome.enrolled.get(site, {}), outcome.delivered.get(site, {})
    role = "outside" if site in settings.outside else "inside"
    found = (delivered.get(name, {}) for name in ("metrics", "reports", "privacy"))
    return SiteRecord(role, enrolled.get("n", {}), *found)


def refused_run(
    folder: Path, reason: str, roles: Mapping[str, str], *, method: str = UNKNOWN, task: TaskConfig | None = None, seed: Any, rounds: Any
) -> dict[str, Any]:
    """Write and return the results of what could not become a run, because its task, method or settings are wrong.

    Args:
        folder: where results.json and report.html go.
        roles: site -> "inside" or "outside".
        method, task: as far as they are known.
        seed, rounds: as they were given; what is no whole number is shown as 0.
    """
    events = EventLog()
    events.add("failed", reason)
    record = RunRecord(
        method=method,
        task=task,
        seed=seed if isinstance(seed, int) else 0,
        rounds=max(0, rounds) if isinstance(rounds, int) else 0,
        sites={site: SiteRecord(role) for site, role in roles.items()},
        reason=reason,
        events=events.to_list(),
    )
    return write_results(folder, record)
