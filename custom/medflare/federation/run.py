"""One run from settings to results, for the plain loop and the FLARE controller."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from medflare.core.errors import Aborted, MedflareError, StepFailed
from medflare.core.events import EventLog
from medflare.core.files import make_folder, write_json
from medflare.core.states import StateDict
from medflare.core.text import Json, JsonDict, Say
from medflare.data.acquisition import TRAINED_ON
from medflare.data.progress import RoundsLeft
from medflare.evaluation.report import write_results
from medflare.evaluation.results import (
    RunRecord,
    SiteRecord,
    append_round,
    build_results,
    versions_of_run,
    write_rounds,
)
from medflare.federation.builtin_messages import FEDERATION_SHARES
from medflare.federation.checkpoint import Checkpoint
from medflare.federation.enrolment import identity_of, join_problems, trained_on
from medflare.federation.exchange import Exchange
from medflare.federation.final_models import PICTURES
from medflare.federation.outcome import Outcome, StepReport
from medflare.federation.preflight import check_run
from medflare.federation.schedule import Federation
from medflare.federation.settings import WAITS, RunSettings
from medflare.federation.tracking import Tracker
from medflare.inference.deployed import save_model
from medflare.methods.aggregation import Aggregation
from medflare.methods.base import ServerAlgorithm, ServerContext
from medflare.methods.fedavg.site import SELECTED_ROUND
from medflare.methods.method import Method
from medflare.networks.weights import starting_state
from medflare.tasks.config import TaskConfig

MODELS_FOLDER = "models"
SITES_FOLDER = "sites"  # folder of the sites' folders, in the plain loop


@dataclass
class Run:
    """A federation's method, task and settings, and where its results go.

    Attributes:
        hyper: the method's hyper-parameters, see `core.hyper.split_hyper`.
        sites: inside sites, sorted.
        aggregation: the formula of FLARE's aggregator component; None: that of the server
            algorithm.
        folder: of results.json, metrics.jsonl, report.html, models and the checkpoint; None: only
            the returned dict.
        checkpoints: folder of the checkpoint if it is not `folder`.
        weights: file of the initial weights, or its folder; None: see
            `networks.weights.find_weights`.
        engine: "local" or "flare", for the results.
        say: called with progress lines.
        observe: called after every step.
        track: see `tracking.check_track`.
        lead: who submitted the job; nobody else may resume it. "" if not under FLARE.
    """

    method: Method
    task: TaskConfig
    hyper: Json
    settings: RunSettings
    sites: tuple[str, ...]
    aggregation: Aggregation | None = None
    folder: Path | None = None
    checkpoints: Path | None = None
    weights: Path | None = None
    engine: str = "local"
    say: Say = lambda line: None
    observe: Callable[[StepReport], None] = lambda report: None
    track: str | None = None
    lead: str = ""
    events: EventLog = field(default_factory=EventLog)
    outcome: Outcome = field(default_factory=Outcome)

    def execute(
        self, exchange: Exchange, *, resume: bool = False, checked: bool = False
    ) -> JsonDict:
        """Run to the end and return the results dict.

        After a MedflareError its status is FAILED, with the reason.

        Args:
            exchange: how the engine reaches the sites.
            resume: continue after the last step of the checkpoint.
            checked: `check` has passed.

        Raises:
            Exception: Aborted, KeyboardInterrupt and every error that is not a MedflareError, after
                the results were written.
        """
        started = time.monotonic()
        reason = ""
        if self.folder is not None:
            # Others may read its report, not the folders in it.
            make_folder(self.folder, public=True)
        name = f"{self.method.name}-seed{self.settings.seed}"
        tracker = Tracker(self.track, self.folder, f"medflare {self.task.name}", name, self._warn)
        try:
            if not checked:
                self.check()
            federation = self._federation(exchange, tracker)
            finished = 0
            if resume:
                finished = self._checkpoint.restore(federation)
                started -= self.outcome.seconds_of_steps
                if self.folder is not None:
                    write_rounds(self.folder, self.outcome.history)
            federation.run(finished)
            self._store(federation.server)
        except (Aborted, KeyboardInterrupt) as error:
            reason = "interrupted from the keyboard"
            if isinstance(error, Aborted):
                reason = f"aborted: {error}"
            self.events.add("aborted", str(error) or reason)
            raise
        except MedflareError as error:
            reason = str(error)
            if not self._names_failure(reason):
                self.events.add("failed", reason)
        except StepFailed as error:
            reason = f"method {self.method.name!r} fails at {error}"
            self.events.add("failed", reason)
            raise StepFailed(reason) from error.__cause__
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.events.add("failed", reason)
            raise
        finally:
            self.outcome.seconds["total"] = time.monotonic() - started
            record = self._record(reason)
            if self.folder is None:
                results = build_results(record)
            else:
                results = write_results(self.folder, record)
            tracker.end(results)
        return results

    def _names_failure(self, reason: str) -> bool:
        """Whether the events of the failed sites already say what `reason` says."""
        problems = {}
        for event in self.events.of("failed"):
            if event["site"] is not None:
                problems[event["site"]] = event["message"]
        return reason == join_problems(problems)

    def _warn(self, problem: str) -> None:
        self.events.add("warning", problem)
        self.say(f"warning: {problem}")

    def check(self, *, resume: bool = False) -> None:
        """Raise ConfigError for a run that cannot start, see `preflight.check_run`, or has no
        weights; StateError for one that cannot `resume`.
        """
        if resume:
            self._checkpoint.stored()
        check_run(self.method, self.task, self.hyper, self.settings)
        _ = self._start  # raises where there are no weights

    @cached_property
    def _start(self) -> StateDict | None:
        return starting_state(self.task, self.settings.seed, self.weights)

    def _federation(self, exchange: Exchange, tracker: Tracker) -> Federation:
        seed = self.settings.seed
        rounds = self.settings.rounds
        context = ServerContext(
            plan=self.method.plan(self.task, self.sites, self.hyper),
            seed=seed,
            rounds=rounds,
            outside=self.settings.outside,
            phases=self.method.site_class.phases,
            aggregation=self.aggregation,
            events=self.events,
            start=self._start,
            weights=self.weights,
        )
        rounds_left = RoundsLeft(rounds)

        def after_step(report: StepReport) -> None:
            trained = context.rounds  # fewer after early stopping
            line = report.text(trained)
            round = report.step.round
            left = rounds_left.after(round) if round < trained else ""
            self.say(f"{line} | {left}" if left else line)
            if self.folder is not None:
                append_round(self.folder, report.line())
            factor = self.task.schedule.rate_factor(round, trained)
            tracker.step(report, self.task.optimizer["lr"] * factor)
            self.observe(report)

        identity = identity_of(self.method, self.hyper, self.task.fingerprint(), seed)
        return Federation(
            server=self.method.make_server(context),
            exchange=exchange,
            rules=self.settings,
            identity=identity,
            on_step=after_step,
            outcome=self.outcome,
            checkpoint=self._checkpoint.save,
        )

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        hyper = self.method.effective(self.hyper)
        plan = {
            "method": self.method.name,
            "algorithms": list(self.method.algorithms),
            "task": self.task.to_dict(),
            "hyper": hyper,
            "sites": list(self.sites),
        }
        for name, value in self.settings.to_dict().items():
            if name not in (*WAITS, "resume"):
                plan[name] = value
        if self.lead:  # first, as a difference is told with its value
            plan = {"lead": self.lead, **plan}
        versions = versions_of_run(self.method.name, self.task, hyper)
        return Checkpoint(self.checkpoints or self.folder, plan, versions)

    def _store(self, server: ServerAlgorithm) -> None:
        """Write the models and files that the server algorithm holds into the folder."""
        outcome = self.outcome
        outcome.tables = server.tables()
        outcome.selector_summary = server.selector_summary()
        if self.folder is None:
            return
        total = trained_on(outcome.enrolled)
        for path, model in server.models().items():
            if outcome.class_shares:
                model[FEDERATION_SHARES] = outcome.class_shares
            card: JsonDict = {
                "method": self.method.name,
                "site": None,
                "role": path,
                "seed": self.settings.seed,
                "rounds": server.context.rounds,
                "round": model.get(SELECTED_ROUND),
            }
            if total is not None:
                card[TRAINED_ON] = total
            save_model(self.folder / MODELS_FOLDER / path, self.task, model, card)
        for name, content in server.documents().items():
            write_json(self.folder / name, content, public=True)

    def _pictures(self) -> list[Path]:
        """The pictures in the sites' folders, which only the plain loop has here."""
        if self.folder is None:
            return []
        return sorted(self.folder.glob(f"{SITES_FOLDER}/*/{PICTURES}/*.png"))

    def _site_record(self, site: str) -> SiteRecord:
        role = "outside" if site in self.settings.outside else "inside"
        counts = self.outcome.enrolled.get(site, {}).get("n", {})
        # Of `builtin_messages.FINAL_REPLY_META`.
        meta = self.outcome.final_metadata.get(site, {})
        return SiteRecord(role, **{"n": counts, **meta})

    def _record(self, reason: str) -> RunRecord:
        """The record of the run so far; `reason` why it failed."""
        outcome = self.outcome
        sites = (*self.sites, *self.settings.outside)
        costs = outcome.costs
        pictures = {}
        for path in self._pictures():
            site = path.parts[-3]
            pictures[f"{site}: {path.stem}"] = path.read_bytes()
        return RunRecord(
            method=self.method.name,
            task=self.task,
            seed=self.settings.seed,
            rounds=self.settings.rounds if outcome.rounds is None else outcome.rounds,
            sites={site: self._site_record(site) for site in sites},
            reason=reason,
            events=self.events.to_list(),
            down_bytes=sum(cost.down_bytes for cost in costs.values()),
            up_bytes=sum(cost.up_bytes for cost in costs.values()),
            hyper=self.method.effective(self.hyper),
            settings={**self.settings.to_dict(), "engine": self.engine},
            pictures=pictures,
            costs={site: asdict(cost) for site, cost in costs.items()},
            citation=self.method.paper,
            seconds=outcome.seconds,
            history=outcome.history,
            model_selection=outcome.model_selection,
            tables=outcome.tables,
            cross_site=outcome.cross_site,
            selector=outcome.selector_summary,
        )
