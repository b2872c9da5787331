"""One run from settings to results: what the plain loop and the FLARE controller have in common around the schedule."""

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from medflare.core.backing import Backing
from medflare.core.errors import Aborted, MedflareError, StateError
from medflare.core.events import Event, EventLog
from medflare.core.manifest import Manifest
from medflare.core.states import state_bytes
from medflare.core.store import make_folder, write_json
from medflare.data.acquisition import TRAINED_ON
from medflare.data.sites.local import MODELS_GB
from medflare.evaluation.console import round_line
from medflare.evaluation.names import RESULTS_FILE, ROUNDS_FILE
from medflare.evaluation.results import UNKNOWN, LiveReport, RunRecord, SiteRecord, append_round, build_results, write_results
from medflare.federation.checkpoint import Checkpoint
from medflare.federation.enrolment import trained_on
from medflare.federation.exchange import Exchange
from medflare.federation.outcome import Outcome, Selecting, StepReport, Telling
from medflare.federation.participant import identity_of
from medflare.federation.preflight import check_run
from medflare.federation.schedule import Federation
from medflare.federation.settings import WAITS, RunSettings
from medflare.inference.deployed import save_model
from medflare.methods.aggregation import Aggregation
from medflare.methods.base import Plan, ServerContext, ServerHalf
from medflare.methods.fedavg.site import SELECTED_ROUND
from medflare.methods.method import Method
from medflare.networks.weights import starting_state
from medflare.tasks.config import TaskConfig

MODELS = "models"


@dataclass
class Run:
    """A federation's method, task and settings, and where its results go.

    Attributes:
        hyper: the method's hyper-parameters, see `core.hyper.halved`.
        sites: inside sites; sorted, their places are their labels.
        aggregation: the formula to aggregate with, where an engine's component holds it; None: the server half's own.
        folder: results.json, metrics.jsonl, report.html, models and the checkpoint go here; None: only the returned dict.
        checkpoints: folder for checkpoints where it is not `folder`.
        pictures: title -> PNG for the report; only an engine that has the sites' images anyway fills it.
        weights: file, or folder of the file, that the task's network starts from; None: see `networks.weights.found`.
        models_gb: gigabytes that a model of every site may take for all models to lie in memory, see `core.backing`.
        about: what else a reader of the results should know (the engine, for example).
        say: takes progress lines.
        observe: called after every step, for tracking.
    """

    method: Method
    task: TaskConfig
    hyper: Mapping[str, Any]
    settings: RunSettings
    sites: tuple[str, ...]
    aggregation: Aggregation[Any] | None = None
    folder: Path | None = None
    checkpoints: Path | None = None
    weights: Path | None = None
    models_gb: float = MODELS_GB
    pictures: dict[str, bytes] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = lambda line: None
    observe: Callable[[StepReport], None] = lambda report: None
    events: EventLog = field(default_factory=EventLog)

    @property
    def outside(self) -> tuple[str, ...]:
        """Sites that never train."""
        return self.settings.outside

    def execute(self, exchange: Exchange, *, resume: bool = False) -> dict[str, Any]:
        """Run to the end and return the results dict; a failure is a result too (status FAILED and the reason), never silence.

        Args:
            exchange: how the engine reaches the sites.
            resume: go on after the last step that the checkpoint in `folder` holds.

        Raises:
            Aborted: stopped from outside, after the results were written.
            KeyboardInterrupt: stopped by Ctrl-C, after the results were written.
        """
        started, outcome, reason = time.monotonic(), Outcome(), ""
        _begin(self.folder, anew=not resume)
        try:
            plan = self._plan()
            with _backing(self, plan):
                server = self._server(plan)
                federation = self._federation(server, exchange, outcome)
                federation.run(self._resumed(federation) if resume else 0)
                keep_what_is_left(self, server, outcome)
        except (Aborted, KeyboardInterrupt) as error:
            reason = f"aborted: {error}" if isinstance(error, Aborted) else "interrupted from the keyboard"
            self.events.add("aborted", str(error) or reason)
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
            results = written(self, outcome, reason)
        return results

    # -- parts -----------------------------------------------------------------------------------------------------------------

    def _plan(self) -> Plan[Any, Any]:
        check_run(self.method, self.task, self.hyper, rounds=self.settings.rounds, outside=self.outside)
        return self.method.plan(self.task, self.sites, self.hyper)

    def _server(self, plan: Plan[Any, Any]) -> ServerHalf[Any]:
        context = ServerContext(
            plan,
            self.settings.seed,
            self.settings.rounds,
            self.outside,
            phases=self.method.site_class.phases,
            aggregation=self.aggregation,
            events=self.events,
            start=starting_state(self.task, self.settings.seed, self.weights),
        )
        return self.method.make_server(context)

    def _federation(self, server: ServerHalf[Any], exchange: Exchange, outcome: Outcome) -> Federation:
        plan = server.context.plan

        @cache  # the networks behind a manifest are built once, not once a round
        def manifest(phase: str) -> Manifest:
            return self.method.site_class.manifest(phase, plan)

        def keep(finished: int) -> None:
            if self._checkpoint is not None:
                self._checkpoint.save(finished, federation)

        identity = identity_of(self.method, self.hyper, self.task.fingerprint(), self.settings.seed)
        federation = Federation(
            server,
            exchange,
            manifest,
            self.settings.rules,
            identity,
            partial(self._after_step, server.context, outcome, LiveReport()),
            keep,
            outcome,
            reports=lambda phase: self.method.site_class.phase(phase).reports,
        )
        return federation

    def _after_step(self, context: ServerContext, outcome: Outcome, live: LiveReport, report: StepReport) -> None:
        place = report.step.phase, report.step.round, context.rounds
        self.say(round_line(*place, report.facts, report.rejected, report.seconds, report.aggregation))
        if self.folder is not None:
            append_round(self.folder, report.line())
            _renew(live, self.folder, lambda: record_of(self, outcome, running=True), self.events)
        self.observe(report)

    def _resumed(self, federation: Federation) -> int:
        """The federation as its checkpoint has it; returns the number of finished steps."""
        if self._checkpoint is None:
            raise StateError("a run that keeps nothing cannot be resumed; give it a folder")
        return self._checkpoint.restore(federation)

    @cached_property
    def _checkpoint(self) -> Checkpoint | None:
        """Where the run is taken up; None where it keeps nothing."""
        folder = self.checkpoints or self.folder
        if folder is None:
            return None
        steering = {name: value for name, value in self.settings.to_dict().items() if name not in (*WAITS, "resume")}
        plan = {
            "method": self.method.name,
            "halves": list(self.method.halves),
            "task": self.task.to_dict(),
            "hyper": self.method.effective(self.hyper),
            "sites": list(self.sites),
            **steering,
        }
        return Checkpoint(folder, plan)


def _backing(run: Run, plan: Plan[Any, Any]) -> AbstractContextManager[None]:
    """Files for large states, where a model of every site is more than `models_gb`."""
    if state_bytes(plan.template()) * len(run.sites) <= run.models_gb * 10**9:
        return nullcontext()
    return Backing(run.checkpoints or run.folder or Path(tempfile.gettempdir())).used()


# -- results -----------------------------------------------------------------------------------------------------------------


def keep_what_is_left(run: Run, server: ServerHalf[Any], outcome: Outcome) -> None:
    """Models and files that the server half holds go beside the results; a personal model that never left its site is not among them.

    Args:
        run: method, task, settings and folder.
        server: its server half, after the last step.
        outcome: takes the half's tables, and by what its model selects.
    """
    if isinstance(server, Telling):
        outcome.tables = server.tables()
    if isinstance(server, Selecting):
        outcome.selector = server.selector_summary()
    if run.folder is None:
        return
    seen = trained_on(outcome.enrolled)
    for path, model in server.models().items():
        card: dict[str, Any] = {"method": run.method.name, "site": None, "role": path, "seed": run.settings.seed}
        card["rounds"] = server.context.rounds
        card["round"] = model.facts.get(SELECTED_ROUND)
        card |= {TRAINED_ON: seen} if seen is not None else {}
        save_model(run.folder / MODELS / path, run.task, model, card)
    for name, content in (server.documents() if isinstance(server, Telling) else {}).items():
        write_json(run.folder / name, content, public=True)


def written(run: Run, outcome: Outcome, reason: str) -> dict[str, Any]:
    """The results of a run, on disk where it has a folder; a failed one has a reason.

    Args:
        run: method, task, settings and folder.
        outcome: what the schedule left.
        reason: why the run failed, one line; "" for a completed one.
    """
    record = record_of(run, outcome, reason)
    return build_results(record) if run.folder is None else write_results(run.folder, record)


def record_of(run: Run, outcome: Outcome, reason: str = "", *, running: bool = False) -> RunRecord:
    """What is known of a run.

    Args:
        run: method, task, settings and pictures.
        outcome: what the schedule left so far.
        reason: why the run failed, one line.
        running: it goes on.
    """
    return RunRecord(
        method=run.method.name,
        task=run.task,
        seed=run.settings.seed,
        rounds=run.settings.rounds if outcome.rounds is None else outcome.rounds,
        sites={site: _site_record(site, run.settings, outcome) for site in (*run.sites, *run.settings.outside)},
        reason=reason,
        events=run.events.to_list(),
        down_bytes=outcome.down_bytes,
        up_bytes=outcome.up_bytes,
        seconds=outcome.seconds,
        hyper=run.method.effective(run.hyper),
        settings={**run.settings.to_dict(), **run.about},
        history=outcome.history,
        elections=outcome.elections,
        tables=outcome.tables,
        selector=outcome.selector,
        pictures=run.pictures,
        costs={site: asdict(cost) for site, cost in outcome.costs.items()},
        running=running,
    )


def _site_record(site: str, settings: RunSettings, outcome: Outcome) -> SiteRecord:
    enrolled, delivered = outcome.enrolled.get(site, {}), outcome.delivered.get(site, {})
    role = "outside" if site in settings.outside else "inside"
    found = (delivered.get(name, {}) for name in ("metrics", "reports", "privacy", "classes"))
    return SiteRecord(role, enrolled.get("n", {}), *found)


def refused_run(
    folder: Path,
    reason: str,
    roles: Mapping[str, str],
    *,
    method: str = UNKNOWN,
    task: TaskConfig | None = None,
    seed: Any,
    rounds: Any,
    events: Iterable[Event] = (),
) -> dict[str, Any]:
    """Write and return the results of what could not become a run, because its task, method or settings are wrong, or died.

    Args:
        folder: where results.json and report.html go.
        reason: what is wrong, one line.
        roles: site -> "inside" or "outside".
        method: name, as far as it is known.
        task: as far as it is known.
        seed: as it was given; what is no whole number is shown as 0.
        rounds: as they were given; what is no whole number is shown as 0.
        events: what was noticed before.
    """
    told = EventLog(events)
    told.add("failed", reason)
    record = RunRecord(
        method=method,
        task=task,
        seed=seed if isinstance(seed, int) else 0,
        rounds=max(0, rounds) if isinstance(rounds, int) else 0,
        sites={site: SiteRecord(role) for site, role in roles.items()},
        reason=reason,
        events=told.to_list(),
    )
    return write_results(folder, record)


def _renew(live: LiveReport, folder: Path, record: Callable[[], RunRecord], events: EventLog) -> None:
    """The report while the run goes on; that it cannot be drawn is an event."""
    if problem := live.refresh(folder, record):
        events.add("warning", f"the report is no longer renewed while the run goes on: {problem}")


def _begin(folder: Path | None, *, anew: bool) -> None:
    """The run's folder, before anything private is written deeper in it: a report lies there, which others may read (`core.store`).

    A run that begins anew finds nothing there of an earlier one that could be taken for its own, should it come to no end.
    """
    if folder is None:
        return
    make_folder(folder, public=True)
    for name in (RESULTS_FILE, ROUNDS_FILE) if anew else ():
        (folder / name).unlink(missing_ok=True)
