"""One run from settings to results: what the plain loop and the FLARE controller have in common around the schedule."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from medflare.core.errors import Aborted, MedflareError, StateError
from medflare.core.events import EventLog
from medflare.core.hyper import effective
from medflare.core.manifest import Manifest
from medflare.core.store import StateStore
from medflare.evaluation.console import round_line
from medflare.evaluation.results import UNKNOWN, RunRecord, SiteRecord, append_round, build_results, write_results
from medflare.federation.participant import identity_of
from medflare.federation.schedule import Exchange, Federation, Outcome, Rules, StepReport
from medflare.inference.deployed import save_model
from medflare.methods.base import ServerContext, ServerHalf
from medflare.methods.catalogue import Method
from medflare.tasks.config import TaskConfig

MODELS = "models"
CHECKPOINT = "checkpoint"


@dataclass
class Run:
    """A federation's settings, and where its results go.

    Attributes:
        sites: inside sites; sorted, their places are their labels.
        folder: results.json, metrics.jsonl, report.html, models and the checkpoint go here; None: only the returned dict.
        pictures: title -> PNG for the report; only an engine that has the sites' images anyway fills it.
        settings: further settings that a reader of the results should know (the engine, for example).
        say: takes progress lines.
        observe: called after every step, for tracking.
        checkpoints: folder for checkpoints where it is not `folder`.
    """

    method: Method
    task: TaskConfig
    hyper: Mapping[str, Any]
    rounds: int
    seed: int
    sites: tuple[str, ...]
    outside: tuple[str, ...] = ()
    rules: Rules = Rules()
    folder: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)
    say: Callable[[str], None] = lambda line: None
    observe: Callable[[StepReport], None] = lambda report: None
    events: EventLog = field(default_factory=EventLog)
    checkpoints: Path | None = None

    def execute(self, exchange: Exchange, *, resume: bool = False) -> dict[str, Any]:
        """Run to the end and return the results dict; a failure is a result too (status FAILED and the reason), never silence.

        Args:
            resume: go on after the last step that the checkpoint in `folder` holds.

        Raises:
            Aborted: stopped from outside, after the results were written.
        """
        started = time.monotonic()
        outcome, reason = Outcome(), ""
        server: ServerHalf | None = None
        try:
            server = self._server()
            federation = self._federation(server, exchange, outcome)
            federation.run(self._restore(federation) if resume else 0)
            self._keep_models(server)
        except Aborted as error:
            reason = f"aborted: {error}"
            self.events.add("aborted", str(error))
            raise
        except MedflareError as error:
            reason = str(error)
            self.events.add("failed", reason)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.events.add("failed", reason)
            raise
        finally:
            outcome.seconds["total"] = time.monotonic() - started
            results = self._results(outcome, reason)
        return results

    def _server(self) -> ServerHalf:
        self.method.check(self.hyper, self.task)
        context = ServerContext(self.task, self.seed, self.rounds, self.sites, self.outside, events=self.events)
        return self.method.make_server(context, self.hyper)

    def _federation(self, server: ServerHalf, exchange: Exchange, outcome: Outcome) -> Federation:
        plan = self.method.plan(self.task, self.sites, self.hyper)

        @cache  # the networks behind a manifest are built once, not once a round
        def manifest(phase: str) -> Manifest:
            return self.method.site_class.outbound(phase, plan)

        identity = identity_of(self.method, self.hyper, self.task.fingerprint(), self.seed)
        return Federation(server, exchange, manifest, self.rules, identity, self._after_step, self._checkpoint, outcome)

    def _after_step(self, report: StepReport) -> None:
        step = report.step
        self.say(round_line(step.phase, step.round, self.rounds, report.facts, report.rejected, report.seconds, report.aggregation))
        if self.folder is not None:
            append_round(self.folder, report.line())
        self.observe(report)

    # -- checkpoints: the server half after every step, so that a killed server goes on after the last finished one ----------

    def _checkpoint(self, finished: int, federation: Federation) -> None:
        store = self._store
        if store is None:
            return
        message, outcome = federation.server.state(), federation.outcome
        message.facts["run"] = {
            "finished": finished,
            "enrolled": sorted(outcome.enrolled),
            "events": self.events.to_list(),
            "history": outcome.history,
            "bytes": [outcome.down_bytes, outcome.up_bytes],
            "plan": self._plan(),
        }
        store.save(CHECKPOINT, message)

    @property
    def _store(self) -> StateStore | None:
        folder = self.checkpoints or self.folder
        return None if folder is None else StateStore(folder)

    def _plan(self) -> dict[str, Any]:
        """What this run is, as far as it decides what its steps mean: a checkpoint is taken up by the same run only."""
        return {
            "method": self.method.name,
            "task": self.task.to_dict(),
            "hyper": dict(self.hyper),
            "rounds": self.rounds,
            "seed": self.seed,
            "sites": list(self.sites),
            "outside": list(self.outside),
            "rules": asdict(self.rules),
        }

    def _restore(self, federation: Federation) -> int:
        """Take up the checkpoint in `folder`; returns the number of finished steps.

        Raises:
            StateError: there is none, or it belongs to another run.
        """
        store = self._store
        message = store.load(CHECKPOINT) if store is not None else None
        if store is None or message is None:
            raise StateError(f"no checkpoint in {store and store.folder}: the run did not finish its first step; start it afresh")
        stored = message.facts.pop("run")
        own = json.loads(json.dumps(self._plan()))
        for name, value in own.items():
            if stored["plan"][name] != value:
                raise StateError(
                    f"the checkpoint in {store.folder} has {name} = {stored['plan'][name]!r}, this run {value!r}; "
                    "resume with what it began with"
                )
        federation.server.restore(message)
        federation.returning = stored["enrolled"]
        federation.outcome.history = stored["history"]
        federation.outcome.down_bytes, federation.outcome.up_bytes = stored["bytes"]
        self.events.replace([*stored["events"], *self.events.to_list()])
        self.events.add("resumed", f"went on after {stored['finished']} finished steps")
        return int(stored["finished"])

    # -- results ------------------------------------------------------------------------------------------------------------

    def _keep_models(self, server: ServerHalf) -> None:
        """The models that the server holds go beside the results; a personal model that never left its site is not among them."""
        if self.folder is None:
            return
        for path, model in server.models().items():
            card = {"method": self.method.name, "site": None, "role": path, "seed": self.seed, "rounds": self.rounds}
            save_model(self.folder / MODELS / path, self.task, model, card)

    def _results(self, outcome: Outcome, reason: str) -> dict[str, Any]:
        record = RunRecord(
            method=self.method.name,
            task=self.task,
            seed=self.seed,
            rounds=self.rounds,
            sites={site: self._site_record(site, outcome) for site in (*self.sites, *self.outside)},
            reason=reason,
            events=self.events.to_list(),
            down_bytes=outcome.down_bytes,
            up_bytes=outcome.up_bytes,
            seconds=outcome.seconds,
            hyper=effective(self.hyper, self.method.site_class.Hyper, self.method.server_class.Hyper),
            settings={**asdict(self.rules), **self.settings},
            history=outcome.history,
            pictures=self.pictures,
        )
        return build_results(record) if self.folder is None else write_results(self.folder, record)

    def _site_record(self, site: str, outcome: Outcome) -> SiteRecord:
        enrolled, delivered = outcome.enrolled.get(site, {}), outcome.delivered.get(site, {})
        role = "outside" if site in self.outside else "inside"
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


def take_up(interrupted: Path, own: Path) -> None:
    """Copy the checkpoint of an interrupted run to where a new run looks for its own.

    Raises:
        StateError: there is none, or it is damaged.
    """
    message = StateStore(interrupted).load(CHECKPOINT)
    if message is None:
        raise StateError(f"no checkpoint in {interrupted}: that run did not finish its first step, or it came to its end; start afresh")
    StateStore(own).save(CHECKPOINT, message)


def stored_plan(folder: Path) -> dict[str, Any]:
    """What the run was whose checkpoint lies in `folder`, see `Run._plan`.

    Raises:
        StateError: there is none, or it is damaged.
    """
    message = StateStore(folder).load(CHECKPOINT)
    if message is None:
        raise StateError(f"no checkpoint in {folder}: the run did not finish its first step; start it afresh")
    return dict(message.facts["run"]["plan"])
